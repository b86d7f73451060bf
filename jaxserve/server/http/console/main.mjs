// The page: its views by their addresses, the API key, and whether the server is there.
import { Chat } from "./chat.mjs";
import { Operations } from "./operations.mjs";

const $ = (id) => document.getElementById(id);
const RETRY_MS = 3000;

// The key lasts as long as the tab, and goes nowhere but into the header, which an EventSource
// cannot send: hence fetch.
const KEY = "jaxserve.key";
async function ask(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...key && { Authorization: "Bearer " + key } };
  try {
    const answer = await fetch(path, { ...options, headers });
    if (answer.status === 401) lock();
    return answer;
  } catch (error) {
    if (error.name !== "AbortError") lost();
    throw error;
  }
}

function status(text, well) {
  $("state").textContent = text; $("state").classList.toggle("off", !well);
}

let waits = null, open = false, first = true;
function lost(text = "not connected") {
  open = false;
  if (!$("gate").hidden) return;
  status(text, false);
  waits ??= setTimeout(() => { waits = null; enter(); }, RETRY_MS);
}

function lock() {
  open = false; operations.close();
  $("refused").textContent = sessionStorage.getItem(KEY) ? "The server does not know that key." : "";
  sessionStorage.removeItem(KEY);
  status("needs an API key", false); $("gate").hidden = false; $("key").focus();
}

async function enter() {
  const answer = await ask("console/info").catch(() => null);
  if (!answer || answer.status === 401) return;
  if (!answer.ok) return lost();
  const info = await answer.json();
  $("gate").hidden = true; $("key").value = "";
  $("about").textContent = `${info.model} on ${info.device}, policy ${info.policy}, ${info.version}`;
  document.title = `jaxserve: ${info.model}`;
  chat.about(info);
  open = true;
  status("connected", true); route();
  if (first) chat.focus();
  first = false;
}

// #operations, or else the chat. A page that nobody sees reads no feed.
function route() {
  const view = location.hash === "#operations" ? "operations" : "chat";
  document.body.dataset.view = view;
  for (const main of document.querySelectorAll("main")) main.hidden = main.dataset.view !== view;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === "#" + view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (!open) return;
  if (view === "operations" && !document.hidden) operations.open();
  else { operations.close(); status("connected", true); }
}

const chat = new Chat(ask), operations = new Operations(ask, status, lost);
window.addEventListener("hashchange", () => { route(); chat.focus(); });
document.addEventListener("visibilitychange", route);
$("gate").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, $("key").value.trim()); enter();
});
route(); enter();
