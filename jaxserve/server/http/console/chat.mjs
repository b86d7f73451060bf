// The view of the chat: what was said above, the message below, settings beside it.
import { Conversation, SETTINGS, latencies, ms, verdict } from "./conversation.mjs";
import { Markdown, copier, element } from "./markdown.mjs";

const $ = (id) => document.getElementById(id);
const WIDE = matchMedia("(min-width: 1000px)");

// One exchange: its elements, and what changes in them.
class Exchange {
  constructor(one, actions) {
    this.one = one;
    this.said = element("p", { className: "said", textContent: one.prompt });
    this.summary = element("summary");
    this.thoughts = element("div", { className: "thoughts" });
    this.thought = element("details", { className: "thought", hidden: true }, this.summary, this.thoughts);
    this.summary.addEventListener("click", () => { this.chosen = true; });
    this.text = element("div", { className: "text" });
    this.markdown = new Markdown(this.text);
    this.pending = element("p", { className: "pending" }, element("i"), element("i"), element("i"),
      element("span", { textContent: "waiting for the first token" }));
    this.error = element("p", { className: "error", hidden: true });
    this.error.setAttribute("role", "alert");
    this.verdict = element("span", { className: "verdict", hidden: true });
    this.measures = element("dl", { className: "measures" });
    const button = (textContent, act) => {
      const made = element("button", { type: "button", className: "quiet", textContent });
      made.addEventListener("click", act);
      return made;
    };
    this.copy = copier(() => one.text);
    this.again = button("Regenerate", actions.again);
    this.edit = button("Edit", actions.edit);
    this.foot = element("footer", {}, this.verdict, this.measures,
      element("span", { className: "actions" }, this.copy, this.again, this.edit));
    this.node = element("article", {}, this.said,
      element("div", { className: "answer" }, this.thought, this.text, this.pending, this.error, this.foot));
    this.due = 0;
  }

  // As soon as the page is drawn again, and no more often than it is quick to.
  later(then) {
    if (this.due) return;
    this.due = setTimeout(() => requestAnimationFrame(() => {
      this.due = 0;
      const began = performance.now();
      then();
      this.cost = performance.now() - began;
    }), 9 * (this.cost ?? 0));
  }

  show({ plain, last }) {
    const { one } = this, thinks = one.open && !one.text && one.thought !== "";
    this.node.setAttribute("aria-busy", String(one.open));
    this.thought.hidden = !one.thought;
    this.thoughts.textContent = one.thought;
    this.summary.textContent = thinks ? "Thinking\u2026" : `Thought for ${ms(one.thoughtMs ?? 0)}`;
    if (!this.chosen) this.thought.open = thinks;
    if (plain) this.text.textContent = one.text; else this.markdown.show(one.text);
    this.text.classList.toggle("plain", plain);
    this.pending.hidden = !one.open || one.text !== "" || one.thought !== "";
    this.error.hidden = one.error === null;
    this.error.textContent = one.error ?? "";
    const told = verdict(one);
    this.verdict.hidden = told === null;
    if (told) [this.verdict.dataset.kind, this.verdict.textContent] = told;
    this.measures.replaceChildren(...this.#rows());
    this.copy.style.display = one.text && !one.open ? "" : "none";
    this.again.hidden = one.open || !last;
    this.again.textContent = one.error === null ? "Regenerate" : "Try again";
    this.edit.hidden = this.again.hidden;
  }

  #rows() {
    const { one } = this, rows = [];
    const add = (name, value, kind = "", title = "") => rows.push(
      element("div", { className: kind, title }, element("dt", { textContent: name }), element("dd", { textContent: value })));
    if (one.seen.ttft === null && !one.timings) return rows;
    const source = one.timings ? "measured by the server" : "as seen in this browser";
    for (const [name, time, target, met] of latencies(one)) {
      if (time === null) continue;
      const of = target === null ? "" : ` of ${ms(target)}`;
      add(name, ms(time) + of, met === null ? "" : met ? "met" : "missed", source);
    }
    if (one.usage) {
      const { completion_tokens: count, prompt_tokens: prompt } = one.usage, spent = one.timings?.total_ms;
      add("output", `${count} tokens` + (spent ? `, ${(1000 * count / spent).toFixed(1)}/s` : ""));
      const found = one.usage.prompt_tokens_details?.cached_tokens ?? 0;
      add("prompt", `${prompt} tokens` + (found ? `, ${found} cached` : ""));
    }
    const endings = { length: "cut off at max tokens", stopped: "stopped" };
    if (one.finish in endings) add("ended", endings[one.finish]);
    for (const each of one.slo?.problems ?? []) {
      const name = each.kind.replaceAll("_", " ").toLowerCase();
      add("note", `${name}: ${ms(each.target_ms)} is less than ${ms(each.limit_ms)}`, "missed");
    }
    return rows;
  }
}

export class Chat {
  #shown = new Map();
  #info = null;

  constructor(ask) {
    this.conversation = new Conversation(ask, (one) => this.#changed(one));
    $("form").addEventListener("submit", (event) => { event.preventDefault(); this.#send(); });
    $("prompt").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault(); this.#send();
    });
    $("prompt").addEventListener("input", fit);
    $("stop").addEventListener("click", () => this.conversation.stop());
    $("clear").addEventListener("click", () => { this.conversation.clear(); $("prompt").focus(); });
    document.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      if (this.conversation.running) this.conversation.stop();
      else if (!WIDE.matches && !$("settings").hidden) setUp(false);
    });
    $("settings").addEventListener("submit", (event) => event.preventDefault());
    $("settings-toggle").addEventListener("click", () => setUp($("settings").hidden));
    $("settings-close").addEventListener("click", () => setUp(false));
    $("slo_class").addEventListener("change", () => this.#hint());
    WIDE.addEventListener("change", () => setUp(WIDE.matches));
    setUp(WIDE.matches);
  }

  // What is served, and how; again after the server was away.
  about(info) {
    const { chat, causal, model, adapters, slo_classes: classes, defaults, max_model_len: most } = info;
    const first = this.#info === null;
    this.#info = info; this.conversation.chats = chat;
    options($("model"), [[model, ""], ...adapters.map((name) => [name, name])]);
    options($("slo_class"), [["none", ""], ...Object.keys(classes).map((name) => [name, name])]);
    $("system-row").hidden = !chat;
    $("max_tokens").placeholder = defaults.max_tokens ?? "what fits";
    $("max_tokens").title = `prompt and output together: ${most.toLocaleString()}`;
    for (const name of ["temperature", "top_p"]) $(name).placeholder = defaults[name];
    $("greeting").textContent = chat ? `Chat with ${model}` : model;
    $("mode").textContent = !causal ? "This model makes vectors of texts, and generates none."
      : chat ? "Under each answer is how fast it came and, if it had targets, whether the server met them."
        : "This model has no chat template: it continues your text, and does not answer it.";
    $("prompt").placeholder = chat ? "Say something" : "A text to continue";
    $("prompt").ariaLabel = chat ? "Message" : "Text to continue";
    $("go").textContent = chat ? "Send" : "Continue";
    $("clear").textContent = chat ? "New chat" : "Clear";
    if (first && !chat) { $("prompt").value = "Once upon a time"; $("max_tokens").value = "200"; }
    $("prompt").disabled = $("go").disabled = !causal;
    this.#hint(); fit();
  }

  focus() { if (WIDE.matches && !$("chat-view").hidden) $("prompt").focus({ preventScroll: true }); }

  #hint() {
    const targets = this.#info.slo_classes[$("slo_class").value]?.targets ?? {};
    for (const name of ["ttft_ms", "tbt_ms", "jct_ms"]) $(name).placeholder = targets[name] ?? "none";
  }

  #settings() {
    if (!$("settings").checkValidity()) { setUp(true); $("settings").reportValidity(); return null; }
    return Object.fromEntries(SETTINGS.map((name) => [name, $(name).value]));
  }

  async #send() {
    const prompt = $("prompt").value, settings = this.#settings();
    if (!settings || this.conversation.running || !prompt.trim()) return;
    $("prompt").value = ""; fit();
    if (!WIDE.matches) setUp(false);
    const sent = this.conversation.send(prompt, settings);
    bottom();
    if (!await sent) { $("prompt").value ||= prompt; fit(); }
  }

  #again() {
    const settings = this.#settings();
    if (settings && !this.conversation.running) this.conversation.again(settings);
  }

  #edit() {
    if (this.conversation.running) return;
    $("prompt").value = this.conversation.takeBack();
    fit(); $("prompt").focus();
  }

  #changed(one) {
    const exchange = one && this.#shown.get(one);
    if (exchange) exchange.later(() => this.#follow(() => this.#show(exchange)));
    else if (!one) this.#follow(() => this.#all());
  }

  #show(exchange) {
    const { exchanges, chats } = this.conversation;
    exchange.show({ plain: !chats, last: exchange.one === exchanges.at(-1) });
  }

  #all() {
    const { exchanges, running, chats } = this.conversation;
    for (const [one, { node }] of this.#shown) if (!exchanges.includes(one)) { node.remove(); this.#shown.delete(one); }
    const actions = { again: () => this.#again(), edit: () => this.#edit() };
    for (const one of exchanges.filter((each) => !this.#shown.has(each))) {
      const exchange = new Exchange(one, actions);
      this.#shown.set(one, exchange); $("turns").append(exchange.node);
    }
    for (const exchange of this.#shown.values()) this.#show(exchange);
    $("stop").hidden = !running; $("go").hidden = running;
    $("welcome").hidden = exchanges.length > 0 && chats;
    $("greeting").hidden = exchanges.length > 0;
  }

  // Stays at the end of the conversation, if it is there.
  #follow(change) {
    const log = $("conversation"), there = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
    change();
    if (there) bottom();
  }
}

function bottom() { $("conversation").scrollTop = $("conversation").scrollHeight; }

// As high as what is in it; the style says how high at most.
function fit() {
  const { style } = $("prompt");
  style.height = "auto"; style.height = $("prompt").scrollHeight + "px";
}

function setUp(open) {
  $("settings").hidden = !open;
  $("settings-toggle").ariaExpanded = String(open);
}

// Of a select, by [text, value]; what was chosen stays so, if it can.
function options(select, all) {
  const chosen = select.value;
  select.replaceChildren(...all.map(([text, value]) => new Option(text, value)));
  if (all.some(([, value]) => value === chosen)) select.value = chosen;
}
