// What was said, and the call that is open. It knows nothing of the page.

const NUMBERS = ["max_tokens", "temperature", "top_p", "seed"];
const TARGETS = ["ttft_ms", "tbt_ms", "jct_ms"];
const NAMES = ["model", "tier", "slo_class"];
export const SETTINGS = [...NUMBERS, ...TARGETS, ...NAMES, "system"];

// A request's fields. What is blank is left to the server.
export function fields(settings) {
  const given = (names, as) => Object.fromEntries(
    names.filter((name) => settings[name]).map((name) => [name, as(settings[name])]));
  const slo = given(TARGETS, Number);
  return { ...given(NUMBERS, Number), ...given(NAMES, String), ...Object.keys(slo).length && { slo } };
}

// The data of an answer's server-sent events.
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : new Error("The connection was lost.");
    });
    if (done) return;
    const lines = (rest + value).split("\n\n"); rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6);
  }
}

export async function problem(answer) {
  const body = await answer.json().catch(() => null);
  return body?.error?.message ?? `The server answered ${answer.status}.`;
}

const LATENCIES = [["TTFT", "ttft_ms"], ["TBT, P99", "tbt_ms"], ["longest gap", "max_tbt_ms"], ["JCT", "jct_ms"]];

// Rows of [name, milliseconds, target, whether it was met]; null where there is none. An answer that
// was broken off has only what was seen here.
export function latencies({ timings, slo, seen }) {
  const got = timings ? { ...timings, jct_ms: timings.total_ms } : { ttft_ms: seen.ttft, max_tbt_ms: seen.gap, jct_ms: seen.total };
  return LATENCIES
    .map(([name, key]) => [name, got[key] ?? null, slo?.targets[key] ?? null, slo?.targets_met[key] ?? null])
    .filter(([name, time, target]) => target !== null || time !== null && name !== "TBT, P99");
}

// What the server says of the targets: [kind, words]; null before it says anything.
export function verdict({ slo, givenUp }) {
  if (!slo) return givenUp === null ? null : ["given-up", `Targets given up after ${ms(givenUp)}: the server does not expect to meet them`];
  if (slo.met) return ["met", "Targets met"];
  const missed = latencies({ timings: {}, slo }).filter(([, , , met]) => met === false).map(([name]) => name);
  return ["missed", `Missed: ${missed.join(", ")}` + (givenUp === null ? "" : `, given up after ${ms(givenUp)}`)];
}

export const ms = (value) => value >= 999.5 ? Number((value / 1000).toFixed(value < 9950 ? 2 : 1)) + " s"
  : Number(value.toFixed(value < 9.95 ? 1 : 0)) + " ms";

const fresh = () => ({
  text: "", thought: "", thoughtMs: null, finish: null, error: null, open: true,
  timings: null, slo: null, givenUp: null, usage: null, seen: { ttft: null, gap: null, total: null },
});

// What is sent along as a turn: the others are dropped once there is a next message.
const answered = (one) => one.text !== "" || one.finish === "stop" || one.finish === "length";

// ask: fetch. changed: is called with the exchange that has changed, or without one where some came or went.
export class Conversation {
  exchanges = [];
  chats = true; // else a prompt is continued, and knows none of those before it
  #call = null;

  constructor(ask, changed, clock = () => performance.now()) {
    Object.assign(this, { ask, changed, clock });
  }

  get running() { return this.#call !== null; }

  // Whether the exchange stays: one that is stopped before anything came of it does not.
  send(prompt, settings) {
    this.exchanges = this.exchanges.filter(answered);
    this.exchanges.push({ prompt, ...fresh() });
    return this.#run(this.exchanges.at(-1), settings);
  }

  // The last answer once more.
  again(settings) {
    const one = Object.assign(this.exchanges.at(-1), fresh());
    return this.#run(one, settings);
  }

  stop() { this.#call?.abort(); }

  clear() {
    this.stop(); this.exchanges = []; this.changed();
  }

  // Takes the last exchange back, and returns what was said.
  takeBack() {
    const { prompt } = this.exchanges.pop();
    this.changed();
    return prompt;
  }

  body(one, settings) {
    const body = { stream: true, stream_options: { include_usage: true }, ...fields(settings) };
    if (!this.chats) return { ...body, prompt: one.prompt };
    const turn = (role, content) => ({ role, content });
    const before = this.exchanges.slice(0, this.exchanges.indexOf(one));
    const system = settings.system?.trim() ? [turn("system", settings.system)] : [];
    // Thoughts are shown, and not sent back.
    const said = before.flatMap(({ prompt, text }) => [turn("user", prompt), turn("assistant", text)]);
    return { ...body, messages: [...system, ...said, turn("user", one.prompt)] };
  }

  async #run(one, settings) {
    const call = this.#call = new AbortController(), began = this.clock();
    this.changed();
    try {
      const answer = await this.ask(this.chats ? "v1/chat/completions" : "v1/completions", {
        method: "POST", signal: call.signal, headers: { "Content-Type": "application/json" },
        body: JSON.stringify(this.body(one, settings)),
      }).catch((error) => { throw error.name === "AbortError" ? error : new Error("The server cannot be reached."); });
      if (!answer.ok) throw new Error(await problem(answer));
      await this.#read(one, answer, began);
    } catch (error) {
      if (error.name === "AbortError") one.finish = "stopped";
      else one.error = error.message;
    }
    one.open = false; one.seen.total = this.clock() - began;
    if (this.#call === call) this.#call = null;
    const empty = one.finish === "stopped" && !one.text && !one.thought;
    if (empty) this.exchanges = this.exchanges.filter((each) => each !== one);
    this.changed();
    return !empty;
  }

  async #read(one, answer, began) {
    let last = null;
    for await (const data of events(answer)) {
      if (data === "[DONE]") continue;
      const { error, usage, choices } = JSON.parse(data);
      if (error) throw new Error(error.message);
      one.usage = usage ?? one.usage;
      for (const { text, delta, timings, slo, finish_reason: finish } of choices) {
        const now = this.clock(), written = text || delta?.content || "", thought = delta?.reasoning_content || "";
        if (written || thought) {
          if (last === null) one.seen.ttft = now - began;
          else one.seen.gap = Math.max(one.seen.gap ?? 0, now - last);
          last = now;
        }
        if (thought) one.thoughtMs = now - began - one.seen.ttft;
        one.text += written; one.thought += thought;
        if (slo?.expected) one.givenUp = now - began;
        else if (slo) one.slo = slo;
        one.timings = timings ?? one.timings; one.finish = finish ?? one.finish;
      }
      this.changed(one);
    }
    if (one.finish === null) throw new Error("The connection was lost.");
  }
}
