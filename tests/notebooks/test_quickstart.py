"""The quickstart notebook runs from top to bottom, and shows what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.notebooks.books import run

NOTEBOOK = "quickstart"
CLAIMS = {
    "At step 12 all six hold blocks.": "len(views[12].requests) == len(lengths) == 6",
    "At step 120 only the two with the longest outputs are left.": (
        "set(views[120].requests) == {requests[i].request_id for i in (0, 4)} "
        "and sorted(o for _, o in lengths)[-2:] == [lengths[0][1], lengths[4][1]]"
    ),
    # Of prompts that begin alike most would be found, and nobody would wait.
    "four long prompts arrive in the middle.": (
        "all(sum(step.num_prefill_tokens for step in steps) == SHORT * 10 + LONG * 180 "
        "for _, steps in served.values())"
    ),
    "running requests pause.": "pauses['vllm'] > 1",
    "adds chunks of prompts to the decodes.": (
        "all(step.num_decodes for step in served['sarathi'][1][BURST:] if step.num_prefill_tokens)"
    ),
    "With `sarathi` all running requests get a token in each step": "pauses['sarathi'] == 1",
    "With `vllm` the prompts are done after a few steps": "firsts['vllm'] < firsts['sarathi']",
    "new requests get their first token later.": "firsts['sarathi'] > firsts['vllm']",
}


@pytest.mark.slow
def test_it_runs_and_shows_what_it_says(elsewhere: Path) -> None:
    text, pictures = run(NOTEBOOK, elsewhere, CLAIMS)
    assert "there was a" in text and text.count("\n- ") + text.startswith("- ") == 4
    same, again, other, _ = (line for line in text.splitlines() if line.startswith("- "))
    assert same == again != other
    assert pictures == 2
