"""The console's chat: its script in node, with as much of a page as it touches."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from typing import Any

import pytest

from jaxserve.server.http.web_console import PAGE

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="needs node")
PARTS = """
class Part {
  textContent = ""; value = ""; parts = []; on = {}; options = [{}];
  classList = { add() {}, toggle() {} };
  addEventListener(name, does) { this.on[name] = does; }
  append(...parts) { for (const part of parts) { part.above = this; this.parts.push(part); } }
  replaceChildren(...parts) { this.parts = []; this.append(...parts); }
  get lastChild() { return this.parts.at(-1); }
  remove() { this.above.parts.splice(this.above.parts.indexOf(this), 1); }
  focus() {}
}
const found = {};
globalThis.document = {
  getElementById: (id) => found[id] ??= new Part(),
  createElement: () => new Part(), documentElement: {}, addEventListener() {},
};
globalThis.window = { addEventListener() {} };
globalThis.matchMedia = () => new Part();
globalThis.sessionStorage = { getItem: () => null };
const asked = [], settings = [];
const word = (text) => {
  const delta = text[0] === "~" ? { reasoning_content: text.slice(1) } : { content: text };
  return `data: ${JSON.stringify({ choices: [{ delta }] })}\\n\\n`;
};
globalThis.fetch = async (path, { signal, body } = {}) => {
  const info = { chat: true, slo_classes: [] };
  if (path === "console/info") return { ok: true, json: async () => info };
  if (path === "console/events") return new Promise(() => {});
  const { stream: _, messages: __, ...options } = JSON.parse(body);
  settings.push(options);
  asked.push(JSON.parse(body).messages.map((one) => `${one.role}: ${one.content}`));
  const answer = ANSWERS.shift();
  if (answer === null) return { ok: false, json: async () => ({ error: { message: "no" } }) };
  const stream = new ReadableStream({ start(to) {
    for (const text of answer) to.enqueue(new TextEncoder().encode(word(text)));
    signal.addEventListener("abort", () => to.error(signal.reason));
    if (answer.at(-1) === ".") to.close();
  } });
  return { ok: true, body: stream };
};
const rest = async () => { for (let k = 0; k < 50; k++) await new Promise(setImmediate); };
(async () => {
  (0, eval)(SCRIPT);
  await rest();
  for (const id of Object.keys(SETTINGS)) document.getElementById(id).value = SETTINGS[id];
  for (const text of SAID) {
    found.prompt.value = text;
    found.form.on.submit({ preventDefault() {} });
    await rest();
    found.stop.on.click();
    await rest();
  }
  const turns = found.turns.parts.map((one) => `${one.className}: ${one.textContent}`);
  const [text, thought] = [found.text.textContent, found.thought.textContent];
  const prompt = found.prompt.value;
  console.log(JSON.stringify({ asked, settings, turns, prompt, text, thought }));
  process.exit(0);
})();
"""


def chat(
    said: list[str], answers: list[list[str] | None], settings: dict[str, str] | None = None
) -> dict[str, Any]:
    """What the page shows, and what it has asked, after these were sent.

    Args:
        said: what was sent, one after another; each answer is stopped that does not end by itself.
        answers: the words of each. "." ends one; "~" begins one of a thought; None is refused.
        settings: what is in the fields beside the message, by id.
    """
    script = re.search(r"<script>(.*)</script>", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert script is not None and NODE is not None
    given = {"SCRIPT": script[1], "SAID": said, "ANSWERS": answers, "SETTINGS": settings or {}}
    names = "".join(f"const {name} = {json.dumps(value)};\n" for name, value in given.items())
    done = subprocess.run(
        [NODE, "-"], input=names + PARTS, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_an_answer_is_a_turn_whole_or_stopped() -> None:
    page = chat(["Hi", "More"], [["Hello", "."], ["Well"]])
    assert page["asked"] == [["user: Hi"], ["user: Hi", "assistant: Hello.", "user: More"]]
    assert page["turns"] == [*page["asked"][1], "assistant: Well"]
    assert page["prompt"] == page["text"] == ""


@pytest.mark.parametrize("answer", [[], None])
def test_what_was_not_answered_is_taken_back(answer: list[str] | None) -> None:
    """Stopped before its first word, or refused: no turn is empty, and none of the user's follows
    another."""
    page = chat(["Hi", "Hello"], [answer, ["Yes", "."]])
    assert page["asked"] == [["user: Hi"], ["user: Hello"]]
    assert page["turns"] == ["user: Hello", "assistant: Yes."]
    page = chat(["Hi"], [answer])
    assert page["turns"] == [] and page["prompt"] == "Hi"
    assert page["text"] == ("" if answer is not None else "\n[no]")


def test_thoughts_are_shown_and_not_sent_back() -> None:
    page = chat(["Hi", "More"], [["~Who", "~?", "Hello", "."], ["~Hm", "Well"]])
    assert page["asked"][1] == ["user: Hi", "assistant: Hello.", "user: More"]
    assert page["turns"][:3] == ["user: Hi", "thought: Who?", "assistant: Hello."]
    assert page["turns"][3:] == ["user: More", "thought: Hm", "assistant: Well"]
    assert page["thought"] == ""


def test_settings_are_what_the_fields_say() -> None:
    """An empty one leaves it to the server."""
    given = {"max_tokens": "7", "temperature": "0.5"}
    assert chat(["Hi"], [["."]], given)["settings"] == [{"max_tokens": 7, "temperature": 0.5}]
    given = {"max_tokens": "", "temperature": "0"}
    assert chat(["Hi"], [["."]], given)["settings"] == [{"temperature": 0}]
