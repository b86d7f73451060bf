"""Writes, or checks, the reference logits of `transformers` for the model tests.

    python tools/reference/make_reference.py            rewrite tests/reference
    python tools/reference/make_reference.py --check    fail if a fresh run differs

Runs on the CPU in float32, in its own environment (requirements.txt beside this file);
jaxserve is not needed. Each case is a .json (the config as given, and as
transformers saves it) and an .npz (tokens int32 [S, T], logits float32 [S, T, V]). The configs have
both spellings of the rope fields: rope_theta with rope_scaling, and rope_parameters.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from weights import tensor

FOLDER = Path(__file__).resolve().parents[2] / "tests" / "reference"
TOLERANCE = 1e-5
SAME_AS = {"kimi_k2": "deepseek_v3"}  # as transformers reads it in kimi_k25
NUM_SEQUENCES, SEQUENCE_LENGTH = 2, 44


def run_case(given: dict[str, Any]) -> tuple[dict[str, Any], np.ndarray, np.ndarray]:
    """One case's config as transformers saves it, its tokens and its logits."""
    fields = copy.deepcopy(given)  # transformers rewrites the rope dict it is given
    model_type = fields.pop("model_type")
    config = transformers.AutoConfig.for_model(SAME_AS.get(model_type, model_type), **fields)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    saved = json.loads(config.to_json_string(use_diff=False))
    model = with_weights(model)
    with torch.no_grad():
        draw = np.random.RandomState(0)
        size = (NUM_SEQUENCES, SEQUENCE_LENGTH)
        tokens = draw.randint(0, given["vocab_size"], size).astype(np.int32)
        logits = model(torch.from_numpy(tokens.astype(np.int64)), use_cache=False).logits
    return saved, tokens, logits.numpy()


def with_weights(model: Any) -> Any:
    """The model with the weights of `tensor`, named as in its checkpoints, which store experts
    separately; transformers joins them as it loads."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        file = Path(folder) / "model.safetensors"
        values = {
            name: torch.from_numpy(tensor(name, tuple(stored.shape)))
            for name, stored in load_file(file).items()
        }
        save_file(values, file, metadata={"format": "pt"})
        plainly = {"attn_implementation": "eager", "experts_implementation": "eager"}
        return type(model).from_pretrained(folder, dtype=torch.float32, **plainly).eval()


def check(
    name: str,
    described: dict[str, Any],
    saved: dict[str, Any],
    tokens: np.ndarray,
    logits: np.ndarray,
) -> list[str]:
    """Compares a fresh run with a case's files.

    Args:
        name: Name of the case.
        described: Contents of its .json.
        saved: Config as transformers saves it.
        tokens: int32 [S, T].
        logits: float32 [S, T, V].

    Returns:
        One line per difference.
    """
    if not (file := FOLDER / f"{name}.npz").exists():
        return [f"{name}: no fixture"]
    stored = np.load(file)
    problems = []
    if described.get("saved") != saved:
        problems.append(f"{name}: config differs")
    if not np.array_equal(stored["tokens"], tokens):
        problems.append(f"{name}: tokens differ")
    elif not (difference := np.abs(stored["logits"] - logits).max()) <= TOLERANCE:
        problems.append(f"{name}: logits differ by {difference:.2e} (allowed {TOLERANCE:.0e})")
    return problems


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    checking = parser.parse_args().check
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    names = sorted(path.stem for path in FOLDER.glob("*.json"))
    problems = [f"{p.stem}: no such case" for p in FOLDER.glob("*.npz") if p.stem not in names]
    for name in names:
        described = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
        saved, tokens, logits = run_case(described["config"])
        if checking:
            problems += check(name, described, saved, tokens, logits)
        else:
            text = json.dumps({**described, "saved": saved}, indent=1, sort_keys=True) + "\n"
            (FOLDER / f"{name}.json").write_text(text, encoding="utf-8")
            np.savez_compressed(FOLDER / f"{name}.npz", tokens=tokens, logits=logits)
    done = f"{len(names)} reference cases {'agree' if checking else 'written'}"
    print("\n".join(problems) or done)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
