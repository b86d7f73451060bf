"""Writes, or checks, adapters that PEFT itself saves, and the logits that it computes with them.

    python tools/reference/make_peft_reference.py            rewrite tests/reference/peft
    python tools/reference/make_peft_reference.py --check    fail if a fresh run differs

The bases are cases of make_reference.py, with its weights. A case is a folder: adapter_config.json
and adapter_model.safetensors as PEFT saves them, and logits.npz (tokens int32 [S, T], logits
float32 [S, T, V]).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from make_reference import FOLDER as BASES
from make_reference import TOLERANCE, with_weights
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from weights import tensor

FOLDER = BASES / "peft"
FILES = ("adapter_config.json", "adapter_model.safetensors")


class Case(NamedTuple):
    """A base, by its name in tests/reference, and its adapter's settings."""

    base: str
    said: dict[str, Any]


CASES = {
    "llama2_all": Case("llama2", {"r": 4, "lora_alpha": 6, "target_modules": "all-linear"}),
    "opt_rslora": Case(
        "opt",
        {"r": 9, "lora_alpha": 2, "target_modules": ["q_proj", "v_proj"], "use_rslora": True},
    ),
}


def run_case(case: Case, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Saves the adapter. Returns the tokens and the logits with it."""
    fields = json.loads((BASES / f"{case.base}.json").read_text(encoding="utf-8"))["config"]
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    model = with_weights(
        transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        )
    )
    model.name_or_path = case.base
    adapted: Any = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **case.said)).eval()
    tokens = np.load(BASES / f"{case.base}.npz")["tokens"]
    with torch.no_grad():
        for name, value in adapted.named_parameters():
            if "lora_" in name:
                value.copy_(torch.from_numpy(tensor(name, tuple(value.shape))))
        adapted.save_pretrained(folder, save_embedding_layers=False)
        logits = adapted(torch.from_numpy(tokens.astype(np.int64)), use_cache=False).logits
    return tokens, logits.numpy()


def settings(folder: Path) -> dict[str, Any]:
    """The contents of adapter_config.json, with sorted lists, since PEFT makes them from sets."""
    fields = json.loads((folder / FILES[0]).read_text(encoding="utf-8"))
    return {
        key: sorted(value) if isinstance(value, list) else value for key, value in fields.items()
    }


def check(name: str, folder: Path, logits: np.ndarray) -> list[str]:
    """One line per difference from a case's files. folder: has a fresh adapter."""
    stored = FOLDER / name
    if not (stored / "logits.npz").exists():
        return [f"{name}: no fixture"]
    problems = []
    if settings(folder) != settings(stored):
        problems.append(f"{name}: {FILES[0]} differs")
    fresh, other = load_file(folder / FILES[1]), load_file(stored / FILES[1])
    if fresh.keys() != other.keys() or not all(
        torch.equal(fresh[key], other[key]) for key in fresh
    ):
        problems.append(f"{name}: {FILES[1]} differs")
    difference = np.abs(np.load(stored / "logits.npz")["logits"] - logits).max()
    if not difference <= TOLERANCE:
        problems.append(f"{name}: logits differ by {difference:.2e} (allowed {TOLERANCE:.0e})")
    return problems


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    checking = parser.parse_args().check
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    problems: list[str] = []
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            tokens, logits = run_case(case, folder)
            if checking:
                problems += check(name, folder, logits)
                continue
            (FOLDER / name).mkdir(parents=True, exist_ok=True)
            text = json.dumps(settings(folder), indent=1, sort_keys=True) + "\n"
            (FOLDER / name / FILES[0]).write_text(text, encoding="utf-8")
            (FOLDER / name / FILES[1]).write_bytes((folder / FILES[1]).read_bytes())
            np.savez_compressed(FOLDER / name / "logits.npz", tokens=tokens, logits=logits)
    done = f"{len(CASES)} adapters {'agree' if checking else 'written'}"
    print("\n".join(problems) or done)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
