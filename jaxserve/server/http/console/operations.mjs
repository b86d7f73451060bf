// The view of operations: what the scheduler does, live. The feed is read while the view is open.
import { events, ms, problem } from "./conversation.mjs";
import { element } from "./markdown.mjs";

const $ = (id) => document.getElementById(id);
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const SEGMENTS = [["met", "--good"], ["missed", "--bad"], ["given_up", "--warn"], ["refused", "--refused"]];
const WORDS = { missed: "missed", given_up: "given up, still running", refused: "refused" };
let last = null;

function canvas(node) {
  const ratio = window.devicePixelRatio || 1, wide = node.clientWidth, high = node.clientHeight;
  if (node.width !== Math.round(wide * ratio) || node.height !== Math.round(high * ratio)) {
    node.width = Math.round(wide * ratio); node.height = Math.round(high * ratio);
  }
  const pen = node.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, wide, high);
  return [pen, wide, high];
}

function strip(steps) {
  const [pen, wide, high] = canvas($("strip"));
  const count = 120, most = axis(Math.max(1, ...steps.map((s) => s[0] + s[1] + s[2])));
  const shades = [color("--decode"), color("--prefill"), color("--again")];
  pen.font = "11px system-ui";
  const edge = pen.measureText(most.toLocaleString()).width + 8, floor = high - 16;
  const width = (wide - edge) / count, room = floor - 14;
  pen.textBaseline = "middle"; pen.textAlign = "right";
  for (const share of [0, 0.5, 1]) {
    const level = floor - share * room;
    pen.fillStyle = color("--soft"); pen.fillText((share * most).toLocaleString(), edge - 6, level);
    pen.fillStyle = color("--line"); pen.fillRect(edge, level, wide - edge, 1);
  }
  pen.fillStyle = color("--soft"); pen.textBaseline = "bottom";
  for (const back of [120, 90, 60, 30, 1]) {
    pen.textAlign = back === 120 ? "left" : back === 1 ? "right" : "center";
    const name = back === 1 ? "last step" : "\u2212" + back;
    pen.fillText(name, back === 1 ? wide : wide - back * width, high);
  }
  steps.forEach((step, place) => {
    const left = wide - (steps.length - place) * width;
    let base = floor;
    for (let kind = 0; kind < 3; kind++) {
      const tall = step[kind] / most * room;
      pen.fillStyle = shades[kind]; pen.fillRect(left, base - tall, Math.max(width - 1, 1), tall);
      base -= tall;
    }
    pen.fillStyle = color("--ink");
    if (step[3]) { pen.beginPath(); pen.moveTo(left, base - 9); pen.lineTo(left + width, base - 9);
      pen.lineTo(left + width / 2, base - 3); pen.fill(); }
    else if (step[4]) { pen.beginPath(); pen.arc(left + width / 2, base - 5, 2, 0, 7); pen.fill(); }
  });
}

// The least of 2, 4, 6, 10, 20, 40, 60, 100, ... that is not below it: half of it is whole, too.
function axis(most) {
  for (let unit = 1; ; unit *= 10) for (const times of [2, 4, 6, 10]) if (most <= times * unit) return times * unit;
}

function pool(map) {
  const node = $("pool"), cells = map.length, wide = node.clientWidth;
  const side = Math.max(4, Math.min(20, Math.sqrt(wide * 190 / cells)));
  const across = Math.max(1, Math.floor(wide / side)), rows = Math.ceil(cells / across);
  node.style.height = Math.ceil(rows * side) + "px";
  const [pen] = canvas(node);
  const shades = [0, 1, 2, 3, 4, 5, 6, 7].map((k) => color("--u" + k));
  const gap = side > 6 ? 1.5 : 0.75;
  for (let k = 0; k < cells; k++) {
    pen.fillStyle = shades[map.charCodeAt(k) - 48];
    pen.fillRect(k % across * side, Math.floor(k / across) * side, side - gap, side - gap);
  }
}

// All that had targets: who is still served though they are given up, and who was refused, have not
// met them.
export function told(each) {
  const count = SEGMENTS.reduce((sum, [name]) => sum + each[name], 0);
  const share = Math.floor(100 * each.met / Math.max(count, 1)); // 100% is all of them
  const others = Object.entries(WORDS).filter(([name]) => each[name]).map(([name, words]) => `${each[name]} ${words}`);
  return { count, text: `${share}% of ${count} met`, others: others.join(", ") };
}

function attained(each) {
  const { count, text, others } = told(each);
  const bar = element("div", { className: "meter" });
  for (const [name] of SEGMENTS) {
    const part = element("i", { className: name });
    part.style.flexGrow = each[name];
    if (each[name]) bar.append(part);
  }
  bar.setAttribute("role", "img"); bar.setAttribute("aria-label", `${each.class}: ${text}` + (others && `; ${others}`));
  const past = element("canvas", { className: "history", title: "15 seconds a bar" });
  past.setAttribute("role", "img");
  past.setAttribute("aria-label", `Requests of ${each.class} over the last 5 minutes, by what came of their targets`);
  const line = element("p", {}, element("b", {}, each.class === "default" ? "own targets" : each.class), element("span", {}, text));
  return [element("div", { className: "attained" }, line, bar, element("p", { className: "soft" }, others), past),
    () => history(past, each.history), count];
}

// How many ended in each part of the window, the latest at the right: met, missed, refused.
function history(node, parts) {
  const [pen, wide, high] = canvas(node), width = wide / parts.length;
  const most = Math.max(1, ...parts.map((part) => part[0] + part[1] + part[2]));
  const shades = ["--good", "--bad", "--refused"].map(color);
  pen.fillStyle = color("--line"); pen.fillRect(0, high - 1, wide, 1);
  parts.forEach((part, place) => {
    let base = high - 1;
    part.forEach((count, kind) => {
      const tall = count / most * (high - 2);
      pen.fillStyle = shades[kind];
      pen.fillRect(place * width, base - tall, Math.max(width - 2, 1), tall);
      base -= tall;
    });
  });
}

const tier = (name) => name === "realtime" ? "real-time" : name.replace("_", "-");
const row = (head, ...cells) => {
  const th = element("th", {}, head);
  th.scope = "row";
  return element("tr", {}, th, ...cells.map((text) => element("td", {}, String(text))));
};
const pair = (times) => times ? [ms(times.p50), ms(times.p99)] : ["\u2013", "\u2013"];
const empty = (columns, text) => element("tr", {}, element("td", { colSpan: columns, className: "soft" }, text));

function show(state) {
  last = state;
  $("decision").textContent = state.decision;
  $("rate").textContent = state.tokens_per_s.toFixed(state.tokens_per_s < 10 ? 1 : 0);
  $("running").textContent = state.running; $("waiting").textContent = state.waiting;
  $("preemptions").textContent = state.preemptions.toLocaleString();
  $("hits").textContent = state.prefix_cache_hits === null ? "\u2013" : (100 * state.prefix_cache_hits).toFixed(0) + "%";
  $("latency").replaceChildren(...state.latency.map((each) => row(tier(each.tier), ...pair(each.ttft_ms), ...pair(each.tbt_ms))));
  if (!state.latency.length) $("latency").append(empty(5, "no token yet"));
  $("newcomer").textContent = state.newcomer
    ? `Estimate: a real-time prompt of ${state.newcomer.prompt_tokens} tokens that came now would have its first token in ${ms(state.newcomer.ttft_ms)}.` : "";
  strip(state.steps); pool(state.pool.map);
  [...$("uses").children].forEach((each, use) => {
    each.lastElementChild.textContent = state.pool.counts[use].toLocaleString();
  });
  const used = state.pool.blocks - state.pool.free;
  $("used").textContent = (100 * used / state.pool.blocks).toFixed(0) + "%";
  $("fill").textContent = `${used.toLocaleString()} of ${state.pool.blocks.toLocaleString()} blocks`;
  $("every").textContent = state.pool.every > 1 ? `\u2013 one of ${state.pool.every} blocks shown` : "";
  $("classes").replaceChildren(...state.requests.map((each) => row(
    tier(each.tier) + (each.class === "default" ? "" : ", " + each.class), each.running, each.waiting)));
  if (!state.requests.length) $("classes").append(empty(3, "nobody"));
  const { running, waiting, ended } = state.programs;
  const outcomes = ["met", "missed", "given_up", "ended"].filter((what) => ended[what])
    .map((what) => `${ended[what].toLocaleString()} ${what === "ended" ? "without a deadline" : what.replace("_", " ")}`);
  $("programs").textContent = running + waiting + outcomes.length
    ? `Programs: ${running.toLocaleString()} running, ${waiting.toLocaleString()} between calls; ended in 5 minutes: ${outcomes.join(", ") || "none"}.` : "";
  if (state.attainment.length) {
    const all = state.attainment.map(attained);
    $("attainment").replaceChildren(...all.map(([node]) => node));
    for (const [, draw] of all) draw();
  }
}

// status: is told how it goes: (words, whether all is well). lost: is called where the server is away, with
// what it said last.
export class Operations {
  #reading = null;

  constructor(ask, status, lost) {
    Object.assign(this, { ask, status, lost });
    const again = () => this.#reading && last && show(last);
    window.addEventListener("resize", again);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  }

  open() {
    if (this.#reading) return;
    this.#reading = new AbortController();
    this.#read(this.#reading.signal);
  }

  close() { this.#reading?.abort(); this.#reading = null; }

  async #read(signal) {
    let closed;
    try {
      const answer = await this.ask("console/events", { signal });
      if (!answer.ok) throw new Error(await problem(answer));
      for await (const data of events(answer)) {
        const state = JSON.parse(data);
        closed = state.closed ?? undefined;
        show(state); this.status(closed ?? "live", !closed);
      }
    } catch (error) {
      if (signal.aborted) return;
      $("decision").textContent = error.message;
    }
    if (signal.aborted) return;
    this.close(); this.lost(closed);
  }
}
