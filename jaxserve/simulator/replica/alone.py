"""How long each request takes on an idle system."""

from __future__ import annotations

import numpy as np

from jaxserve.sched.cost.cost_model import BatchFeatures
from jaxserve.simulator.settings import Setting
from jaxserve.simulator.workloads.workload import Workload


def served_alone(workload: Workload, setting: Setting) -> np.ndarray:
    """Seconds from the arrival to the last token of each request on an idle system, float64 [n].

    Prompts are computed in chunks of P, without what an earlier call of the program has cached.
    Each step takes as long as the cost model says, or as the host's work for it.
    """
    prompt, output, size = workload.prompt_len, workload.output_len, setting.block_size
    cached = np.zeros(len(prompt), np.int64)
    if setting.prefix_caching:
        source, program = workload.prefix_of, workload.programs.program
        same = (source >= 0) & (program >= 0) & (program[source] == program)
        # The last token of a prompt is always computed.
        cached = np.where(same, np.minimum(workload.prefix_len, prompt - 1) // size * size, 0)
    chunk = setting.limits.max_prefill_tokens
    chunks = -(-(prompt - cached) // chunk)
    owner = np.repeat(np.arange(len(prompt)), chunks)
    place = np.arange(len(owner)) - np.repeat(np.cumsum(chunks) - chunks, chunks)
    before = cached[owner] + place * chunk
    tokens = np.minimum(chunk, prompt[owner] - before)
    zero, one = np.zeros(len(owner), np.int64), np.ones(len(owner), np.int64)
    padding, host = setting.padding, setting.host
    first = BatchFeatures(
        num_tokens=tokens,
        padded_tokens=tokens if padding is None else padding.padded(tokens, tokens == 1),
        decode_kv=zero,
        num_decodes=zero,
        prefill_quad=tokens * (tokens + 2 * before),
        num_prefills=one,
        prefill_m=before,
    )
    plan = host.receive + host.plan + host.plan_row + host.launch + host.launch_row
    least = plan + host.finish + host.finish_row
    took = np.maximum(setting.cost_model.batch_time(first), least)
    found = np.bincount(owner, took, minlength=len(prompt)).astype(np.float64)
    found += host.wake + host.receive_row + plan + host.admit + host.idle
    # Decodes, one after another, by the mean of their caches: the cost is linear in it.
    later = output - 1
    middle = prompt + (later + 1) // 2
    single = BatchFeatures.of_decodes(np.ones(len(prompt), np.int64), middle, padding)
    return np.asarray(found + later * np.maximum(setting.cost_model.batch_time(single), least))
