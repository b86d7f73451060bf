"""The console's chat and its Markdown: the scripts in node, without a page."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import pytest

from jaxserve.server.http.web_console import FOLDER

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="needs node")
CHAT = """
const { Conversation, fields, latencies, verdict } = await import(FOLDER + "/conversation.mjs");
const bodies = [];
const ask = async (path, { signal, body }) => {
  bodies.push({ path, ...JSON.parse(body) });
  const answer = ANSWERS.shift();
  if (answer === null) return { ok: false, json: async () => ({ error: { message: "no" } }) };
  const stream = new ReadableStream({ start(to) {
    for (const chunk of answer) {
      to.enqueue(new TextEncoder().encode(`data: ${JSON.stringify(chunk)}\\n\\n`));
    }
    signal.addEventListener("abort", () => to.error(signal.reason));
    const last = answer.at(-1);
    if (last?.choices?.[0]?.finish_reason || last?.error || last?.cut) to.close();
    if (last?.fails) queueMicrotask(() => to.error(new TypeError("network error")));
  } });
  return { ok: true, body: stream };
};
let now = 0;
const chat = new Conversation(ask, () => {}, () => now += 10);
chat.chats = CHATS;
const rest = async () => { for (let k = 0; k < 50; k++) await new Promise(setImmediate); };
const stayed = [];
for (const text of SAID) {
  const sent = text === null ? chat.again(SETTINGS) : chat.send(text, SETTINGS);
  await rest();
  chat.stop();
  stayed.push(await sent);
}
const shown = chat.exchanges.map(
  (one) => ({ ...one, verdict: verdict(one), latencies: latencies(one) }));
console.log(JSON.stringify({ bodies, stayed, shown, running: chat.running }));
"""
PAGE = """
class Node {
  constructor(tag) { this.tag = tag; this.parts = []; }
  append(...parts) {
    for (const part of parts) if (part instanceof Node) part.above = this;
    this.parts.push(...parts);
  }
  remove() { this.above.parts.splice(this.above.parts.indexOf(this), 1); }
  addEventListener() {}
}
const told = ["href", "rel", "start", "checked", "className"];
const plain = (node) => typeof node === "string" ? node : [
  node.tag,
  ...told.filter((name) => node[name] !== undefined).map((name) => ({ [name]: node[name] })),
  ...node.parts.map(plain),
];
globalThis.document = { createElement: (tag) => new Node(tag) };
const { Markdown } = await import(FOLDER + "/markdown.mjs");
const into = new Node("div"), markdown = new Markdown(into);
let first, kept;
for (const text of TEXTS) {
  markdown.show(text);
  first ??= into.parts[0]; kept = into.parts[0] === first;
}
console.log(JSON.stringify({ shown: into.parts.map(plain), kept }));
"""


def run(script: str, **given: Any) -> dict[str, Any]:
    """What the script prints. given: its constants."""
    given["FOLDER"] = FOLDER.as_uri()
    names = "".join(f"const {name} = {json.dumps(value)};\n" for name, value in given.items())
    done = subprocess.run(
        [str(NODE), "--input-type=module"],
        input=names + script,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def words(*texts: str, **last: Any) -> list[dict[str, Any]]:
    """An answer's pieces: "~" begins one of a thought. last: what comes with its end."""
    deltas = [
        {"reasoning_content": text[1:]} if text[0] == "~" else {"content": text} for text in texts
    ]
    chunks: list[dict[str, Any]] = [{"choices": [{"delta": delta}]} for delta in deltas]
    if last:
        chunks.append({"choices": [{"delta": {}, **last}]})
    return chunks


def chat(
    said: list[str | None],
    answers: list[list[dict[str, Any]] | None],
    settings: dict[str, str] | None = None,
    chats: bool = True,
) -> dict[str, Any]:
    """What there is to see, and what was asked, after these were sent.

    Args:
        said: what was sent, one after another; None: once more. Each answer is stopped that does
            not end by itself.
        answers: the chunks of each; None is refused.
        settings: what is in the fields beside it.
        chats: whether the model has a chat template.
    """
    return run(CHAT, SAID=said, ANSWERS=answers, SETTINGS=settings or {}, CHATS=chats)


def turns(body: dict[str, Any]) -> list[str]:
    return [f"{each['role']}: {each['content']}" for each in body["messages"]]


END = {"finish_reason": "stop"}


def test_an_answer_is_a_turn_whole_or_stopped() -> None:
    answers: list[list[dict[str, Any]] | None] = [words("Hel", "lo", **END), words("We", "ll"), []]
    page = chat(["Hi", "More", "And?"], answers)
    first, second, third = map(turns, page["bodies"])
    assert first == ["user: Hi"] and second == [*first, "assistant: Hello", "user: More"]
    assert third == [*second, "assistant: Well", "user: And?"]
    assert [one["finish"] for one in page["shown"]] == ["stop", "stopped"]
    assert page["stayed"] == [True, True, False], "nothing has come of the last one"
    assert not page["running"]


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (None, "no"),
        ([{"error": {"message": "out of luck"}}], "out of luck"),
        ([{"choices": [], "fails": True}], "The connection was lost."),
        ([{"choices": [], "cut": True}], "The connection was lost."),
    ],
)
def test_an_error_is_told_where_it_arose_and_makes_room(
    answer: list[dict[str, Any]] | None, says: str
) -> None:
    """No turn is empty, and none of the user's follows another."""
    page = chat(["Hi"], [answer])
    assert [(one["prompt"], one["error"]) for one in page["shown"]] == [("Hi", says)]
    page = chat(["Hi", "Hello"], [answer, words("Yes", **END)])
    assert [one["prompt"] for one in page["shown"]] == ["Hello"]
    assert [turns(body) for body in page["bodies"]] == [["user: Hi"], ["user: Hello"]]
    page = chat(["Hi", None], [answer, words("Yes", **END)])
    assert [(one["text"], one["error"]) for one in page["shown"]] == [("Yes", None)]


def test_an_answer_once_more_knows_nothing_of_itself() -> None:
    page = chat(["Hi", "So?", None], [words(text, **END) for text in ("A", "B", "C")])
    assert page["bodies"][1]["messages"] == page["bodies"][2]["messages"]
    assert [one["text"] for one in page["shown"]] == ["A", "C"]


def test_thoughts_are_shown_and_not_sent_back() -> None:
    page = chat(["Hi", "More"], [words("~Who", "~?", "Hello.", **END), words("~Hm", "Well")])
    assert turns(page["bodies"][1]) == ["user: Hi", "assistant: Hello.", "user: More"]
    assert [one["thought"] for one in page["shown"]] == ["Who?", "Hm"]
    assert page["shown"][0]["thoughtMs"] == 10.0


def test_settings_are_what_the_fields_say() -> None:
    """An empty one leaves it to the server."""
    given = {"max_tokens": "7", "temperature": "0", "top_p": "", "seed": "3", "tier": "best_effort"}
    given |= {
        "ttft_ms": "400",
        "tbt_ms": "",
        "slo_class": "gold",
        "model": "",
        "system": "Be brief.",
    }
    (body,) = chat(["Hi"], [words("A", **END)], given)["bodies"]
    assert turns(body) == ["system: Be brief.", "user: Hi"]
    for name in ("messages", "stream", "stream_options"):
        del body[name]
    numbers = {"max_tokens": 7, "temperature": 0, "seed": 3, "slo": {"ttft_ms": 400}}
    path = "v1/chat/completions"
    assert body == {"path": path, **numbers, "tier": "best_effort", "slo_class": "gold"}
    (body,) = chat(["Hi"], [words("A", **END)])["bodies"]
    assert set(body) == {"path", "messages", "stream", "stream_options"}


def test_a_model_that_cannot_chat_goes_on_with_a_text() -> None:
    answer = [{"choices": [{"text": "upon", "finish_reason": "length"}]}]
    page = chat(["Once", "Twice"], [answer, answer], {"system": "Be brief."}, chats=False)
    assert [body["prompt"] for body in page["bodies"]] == ["Once", "Twice"]
    assert {body["path"] for body in page["bodies"]} == {"v1/completions"}
    assert not any("messages" in body for body in page["bodies"])
    assert [one["text"] for one in page["shown"]] == ["upon", "upon"]


TIMINGS = {"ttft_ms": 31, "tbt_ms": 212.4, "max_tbt_ms": 241, "total_ms": 900, "queue_ms": 1}
TARGETS = {"ttft_ms": 1000, "tbt_ms": 187.5, "max_tbt_ms": 2000}


def judged(**met: bool) -> dict[str, Any]:
    given = {"ttft_ms": True, "tbt_ms": True, "max_tbt_ms": True, **met}
    return {"targets": TARGETS, "targets_met": given, "met": all(given.values()), "problems": []}


def test_an_answer_has_its_latencies_and_the_server_s_verdict() -> None:
    missed = judged(tbt_ms=False)
    (one,) = chat(["Hi"], [words("A", **END, timings=TIMINGS, slo=missed)])["shown"]
    assert one["verdict"] == ["missed", "Missed: TBT, P99"]
    assert one["latencies"] == [
        ["TTFT", 31, 1000, True],
        ["TBT, P99", 212.4, 187.5, False],
        ["longest gap", 241, 2000, True],
        ["JCT", 900, None, None],
    ]
    (one,) = chat(["Hi"], [words("A", **END, timings=TIMINGS, slo=judged())])["shown"]
    assert one["verdict"] == ["met", "Targets met"]
    (one,) = chat(["Hi"], [words("A", **END, timings=TIMINGS)])["shown"]
    assert one["verdict"] is None and [row[0] for row in one["latencies"]] == [
        *("TTFT", "longest gap", "JCT")
    ]


def test_targets_that_are_given_up_are_told_at_once() -> None:
    lost = {"choices": [{"delta": {}, "slo": {"expected": "missed"}}]}
    (one,) = chat(["Hi"], [[lost, *words("A")]])["shown"]
    assert one["verdict"][0] == "given-up" and "given up after 10 ms" in one["verdict"][1]
    last = {**END, "timings": TIMINGS, "slo": judged(ttft_ms=False)}
    (one,) = chat(["Hi"], [[lost, *words("A", **last)]])["shown"]
    assert one["verdict"] == ["missed", "Missed: TTFT, given up after 10 ms"]


def test_one_that_is_broken_off_has_what_was_seen() -> None:
    (one,) = chat(["Hi"], [words("A", "B", "C")])["shown"]
    assert one["latencies"] == [
        ["TTFT", 10, None, None],
        ["longest gap", 10, None, None],
        ["JCT", 40, None, None],
    ]


def markdown(*texts: str) -> list[Any]:
    """The elements of the last of them, shown one after another."""
    found: list[Any] = run(PAGE, TEXTS=texts)["shown"]
    return found


def test_markdown_is_made_elements() -> None:
    assert markdown("# A *b*\n\n1. x\n2. y\n\n---\n`c<d>` **e** ~~f~~") == [
        ["h3", "A ", ["em", "b"]],
        ["ol", ["li", "x"], ["li", "y"]],
        ["hr"],
        ["p", ["code", "c<d>"], " ", ["strong", "e"], " ", ["del", "f"]],
    ]
    (block,) = markdown("```py\nif a < b:\n    <i>\n```")
    assert block[-1] == ["pre", ["code", "if a < b:\n    <i>"]]
    (table,) = markdown("|a|b|\n|-|-:|\n|1|2|")
    assert table[-1][-1] == ["tbody", ["tr", ["td", "1"], ["td", {"className": "right"}, "2"]]]
    assert markdown("> a\nb &lt; &#65; &nope;") == [
        ["blockquote", ["p", "a", ["br"], "b < A &nope;"]]
    ]


@pytest.mark.parametrize(
    "text",
    [
        "<script>alert(1)</script>",
        "a <img src=x onerror=alert(1)> b",
        "<div onclick='x'>\n\nb</div>",
        "[a](javascript:alert(1)) [b](data:text/html,x) [c](/v1/models) <javascript:x>",
        "![a](javascript:x)",
        "[x]: javascript:alert(1)\n\n[x]",
        "&lt;script&gt;alert(1)&lt;/script&gt;",
        "```html\n<script>\n```",
    ],
)
def test_no_html_and_no_address_of_a_model_s_is_more_than_text(text: str) -> None:
    """All that is made is made here, by name; and links lead to other sites, in another tab."""

    def check(node: Any) -> None:
        if isinstance(node, list):
            assert node[0] in {"p", "div", "span", "pre", "code", "button", "blockquote"}, node
            assert not any("href" in part for part in node if isinstance(part, dict))
            for part in node[1:]:
                check(part)

    found = markdown(text)
    assert found
    for node in found:
        check(node)


def test_links_and_pictures_are_links() -> None:
    link = {"href": "https://a.example/b"}, {"rel": "noopener noreferrer"}
    assert markdown("[x](https://a.example/b)") == [["p", ["a", *link, "x"]]]
    assert markdown("![y](https://a.example/b)") == [["p", ["a", *link, "y"]]]


def test_a_stream_keeps_what_it_has_shown() -> None:
    found = run(PAGE, TEXTS=["One", "One\n\nT", "One\n\n**Two**"])
    assert found == {"shown": [["p", "One"], ["p", ["strong", "Two"]]], "kept": True}
    assert markdown("a *b", "a *b*") == [["p", "a ", ["em", "b"]]]


def test_what_is_nested_too_deeply_is_text() -> None:
    text = ">" * 20_000
    assert markdown(text) == [["p", text]]
    text, deep = ">" * 400 + "a", 0
    (found,) = markdown(text)
    while isinstance(found, list):
        found, deep = found[-1], deep + 1
    assert deep < 100 and text.endswith(found) and found.startswith(">")


def test_a_bar_of_targets_counts_all_that_had_any() -> None:
    """Six that run and are given up are six that are not met."""
    script = """
globalThis.document = {}; globalThis.window = {};
const { told } = await import(FOLDER + "/operations.mjs");
console.log(JSON.stringify(EACH.map(told)));
"""
    given = [(1, 0, 6, 0), (1, 1, 0, 2), (999, 1, 0, 0), (3, 0, 0, 0)]
    names = ("met", "missed", "given_up", "refused")
    found: Any = run(script, EACH=[dict(zip(names, each, strict=True)) for each in given])
    assert [each["text"] for each in found] == [
        *("14% of 7 met", "25% of 4 met", "99% of 1000 met", "100% of 3 met")
    ]
    assert found[0]["others"] == "6 given up, still running"
    assert found[1]["others"] == "1 missed, 2 refused"
