"""Writes, or checks, the vectors that sentence-transformers makes with a case's weights.

    python tools/reference/make_pooling_reference.py            rewrite tests/reference/pooling
    python tools/reference/make_pooling_reference.py --check    fail if a fresh run differs

The base is a case of make_reference.py, with its weights, saved like an embedding checkpoint:
without the language-model head, so without the prefix of names. vectors.npz has prompts (int32 [S,
T], of lengths int32 [S]), a float32 [S, d_model] per pooling mode, normalised, and logits; files of
bidirectional models have the same.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import numpy as np
import torch
import transformers
from make_reference import FOLDER as BASES
from make_reference import TOLERANCE, with_weights
from sentence_transformers.sentence_transformer.modules import Pooling

FOLDER = BASES / "pooling"
# By file: the case, and additional fields of its config.
BOTH_WAYS = {"is_causal": False}
FILES: dict[str, tuple[str, dict[str, Any]]] = {
    "vectors": ("qwen3", {}),
    "both_ways_qwen2": ("qwen2", BOTH_WAYS),
    "both_ways_window": ("qwen2_window", BOTH_WAYS),
    "both_ways_gemma3": ("gemma3", {"use_bidirectional_attention": True}),
}
MODES = ("lasttoken", "mean", "cls")
LENGTHS = (1, 7, 16, 30)


def vectors(base: str, more: dict[str, Any]) -> dict[str, np.ndarray]:
    """The contents of a case's file. more: additional fields of its config."""
    fields = json.loads((BASES / f"{base}.json").read_text(encoding="utf-8"))["config"] | more
    vocab = fields["vocab_size"]
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    model = with_weights(
        transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        )
    )
    draw = np.random.RandomState(1)
    shape = len(LENGTHS), max(LENGTHS)
    prompts = draw.randint(3, vocab, shape).astype(np.int32)
    ids: Any = torch.from_numpy(prompts.astype(np.int64))
    mask = torch.arange(shape[1])[None] < torch.tensor(LENGTHS)[:, None]
    with torch.no_grad():
        states = model.model(ids, attention_mask=mask.long(), use_cache=False).last_hidden_state
        logits = model.lm_head(states[torch.arange(shape[0]), torch.tensor(LENGTHS) - 1])
        arrays = {}
        for mode in MODES:
            features = {"token_embeddings": states, "attention_mask": mask.long()}
            pooled = Pooling(states.shape[-1], pooling_mode=mode)(features)["sentence_embedding"]
            arrays[mode] = torch.nn.functional.normalize(pooled).numpy()
    lengths = np.array(LENGTHS, np.int32)
    return {"prompts": prompts, "lengths": lengths, "logits": logits.numpy(), **arrays}


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    checking = parser.parse_args().check
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    FOLDER.mkdir(exist_ok=True)
    problems: list[str] = []
    for name, case in FILES.items():
        made, file = vectors(*case), FOLDER / f"{name}.npz"
        if not checking:
            np.savez_compressed(file, **made)
            continue
        stored = np.load(file)
        problems += [
            f"{name}: {key} differs"
            for key, value in made.items()
            if not np.allclose(stored[key], value, atol=TOLERANCE, rtol=0)
        ]
    print("\n".join(problems) or f"vectors {'agree' if checking else 'written'}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
