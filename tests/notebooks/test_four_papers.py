"""The papers' notebook runs from top to bottom, and its figures are as it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.notebooks.books import run

NOTEBOOK = "four_papers"
PROMPTS = "prompt_tokens > 100"
DECODES = "prompt_tokens == 0"
LARGE = "chunks['accelgen'][2]"
CLAIMS = {
    "Steps with prompts, which take longer, are predicted to take longer.": " and ".join(
        f"np.median({times}[{PROMPTS}]) > np.median({times}[{DECODES}])"
        for times in ("took", "predicted")
    ),
    "they finish the same load at the same time as": "len(same) == 2 and all(same.values())",
    "computes all prompts in one batch": (
        "(first['prompts_first'].batches.num_prefills > 0).sum() == 1"
    ),
    "while other requests already decode.": (
        "(first['decodes_first'].batches.num_prefills * "
        "first['decodes_first'].batches.num_decodes > 0).sum() > 1"
    ),
    "It takes half the memory": "cost['K and V'][0] == 2 * cost['hidden vector'][0]",
    "Reading it takes longer": "cost['K and V'][1] < cost['hidden vector'][1]",
    "With them the pool holds more requests.": (
        "len(views['aptserve'].requests) > len(views['aptserve_kv'].requests) "
        "and len(views['aptserve'].plane) == len(views['aptserve_kv'].plane) "
        "and (views['aptserve'].plane == HIDDEN).any() "
        "and not (views['aptserve_kv'].plane == HIDDEN).any()"
    ),
    "From 4 requests per second on, `aptserve` has more in time than `aptserve_kv`": (
        "all(early['aptserve', r] > early['aptserve_kv', r] > 1.5 * early['vllm', r] "
        "for early in [{(p['policy'], p['rate']): p['slo_attainment'] for p in first_tokens}] "
        "for r in RATES if r >= 4)"
    ),
    "when most blocks have tokens of both": "shared == (view.fill > 0).all(axis=0).sum() > 10",
    "Nine of ten chats wait least with `bros`, less with shared blocks than without": (
        "waits['bros'] < waits['bros:sharing=false'] < min(waits['priority'], waits['vllm'])"
    ),
    "with `vllm`, which ignores tiers, they wait up to ten seconds.": "8 < waits['vllm'] < 12",
    "most of them finish with `bros`, too.": "max(ended, key=ended.get) == 'bros'",
    "With `accelgen` no step exceeds the target": "late['accelgen'] == 0",
    "with a quick reader, chunks have at most 300 tokens": (
        f"chunks['accelgen'][1][{LARGE} == 0.06].max() <= 300"
    ),
    "otherwise up to a thousand.": f"900 < chunks['accelgen'][1][{LARGE} > 0.06].max() < 1100",
    "With `sarathi` one in ten steps with a chunk takes too long.": (
        "0.05 < late['sarathi'] < 0.15"
    ),
    "of the seven it has the largest share in time at each rate": (
        "len(POLICIES) == 7 and "
        "all(shares['goodput', r] == max(shares[p, r] for p in POLICIES) for r in RATES)"
    ),
}


@pytest.mark.slow
def test_it_runs_and_shows_what_it_says(elsewhere: Path) -> None:
    _, pictures = run(NOTEBOOK, elsewhere, CLAIMS)
    assert pictures == 10
