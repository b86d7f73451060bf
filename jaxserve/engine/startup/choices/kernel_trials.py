"""Which of a GPU's kernels decodes and prompts attend with, as measured at the start."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxserve import __version__
from jaxserve.engine.startup.json_file import JsonFile
from jaxserve.pallas_kernels.backends import KernelShape, rivals
from jaxserve.pallas_kernels.trials import DECODES, PROMPTS

log = logging.getLogger(__name__)

KEPT = "kernels.json"  # beside the compiled steps
PATIENCE_S = 180  # of which nearly all is compiling
MARGIN = 1.05  # times as fast, or it is noise
Times = Mapping[str, Mapping[str, float]]


def fastest(
    usual: str,
    shape: KernelShape,
    directory: str,
    measure: Callable[[tuple[str, ...], KernelShape], Times] | None = None,
) -> str:
    """The backend for a model: the usual one, or a rival that takes the model, where that has the
    same results and is faster, for decodes, prompts or both. Measured once for each shape, device
    and version.

    Args:
        usual: The backend that "auto" stands for.
        shape: The model's shape.
        directory: Where choices are kept for the next start; "" for nowhere.
        measure: As `trials.run_trials`; None for that, in a process of its own.
    """
    offered = rivals(usual, shape)
    if offered is None:
        return usual
    kept = JsonFile(Path(os.path.expanduser(directory)) / KEPT) if directory else None
    device = jax.devices()[0].device_kind
    about = {**dataclasses.asdict(shape), "dtype": jnp.dtype(shape.dtype).name}
    key = json.dumps([usual, device, about, __version__, jax.__version__], sort_keys=True)
    before = kept.read().get(key) if kept else None
    if before in (usual, *offered.names):
        return str(before)
    try:
        times = (measure or _measure)((usual, offered.both), shape)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        log.warning("attention by %s: %s was not measured: %s", usual, offered.both, error)
        return usual
    wins = [_wins(times.get(kind, {}), usual, offered.both) for kind in (DECODES, PROMPTS)]
    # An index of names: usual, for decodes, for prompts, for both.
    chosen = (usual, offered.decodes, offered.prompts, offered.both)[wins[0] + 2 * wins[1]]
    log.info("attention by %s, as measured: %s", chosen, json.dumps(times))
    if kept:
        kept.put(key, chosen)
    return chosen


def _wins(times: Mapping[str, float], usual: str, rival: str) -> bool:
    return usual in times and rival in times and times[usual] > MARGIN * times[rival]


def _measure(names: tuple[str, ...], shape: KernelShape) -> Times:
    given = {**dataclasses.asdict(shape), "dtype": jnp.dtype(shape.dtype).name}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "jaxserve.pallas_kernels.trials"),
            json.dumps({"names": names, "shape": given}),
        ],
        check=True,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
    )
    times: Times = json.loads(done.stdout)
    return times
