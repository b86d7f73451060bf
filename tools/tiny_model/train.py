"""Train the model in the box: a few million parameters that tell small stories.

    python tools/tiny_model/train.py --out jaxserve/assets/tiny-stories

The data come from `grammar`, the model is `jaxserve.models.families.opt`. Everything is decided by
the seed and the step number; see README.md for the command of the shipped model.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import checkpoint
import corpus
import figure
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
from bpe import train_tokenizer
from generate import PROMPTS, generate
from tokenizers import Tokenizer

from jaxserve.models.base import AttentionInput, Carry, LayerIndex, StepInputs
from jaxserve.models.dense import causal_attend
from jaxserve.models.families import opt
from jaxserve.models.forward import forward, logits

_DECAY_SHARE = 0.3  # share of the steps, at the end, in which the learning rate falls
_LONG_SHARE = 0.1  # share of the steps, at the end, with rows as long as the context
_WARMUP_STEPS = 150


class State(NamedTuple):
    """What training changes.

    Attributes:
        params: The model's parameters.
        optimizer: Its state.
        step: Number of steps done.
    """

    params: opt.OPTParams
    optimizer: Any
    step: int


def init_params(config: opt.OPTConfig, seed: int) -> opt.OPTParams:
    """float32 parameters drawn by the family's specs."""
    specs, tree = jax.tree.flatten(opt.FAMILY.param_specs(config))
    keys = jax.random.split(jax.random.key(seed), len(specs))
    fill = {"zeros": jnp.zeros, "ones": jnp.ones}
    leaves = [
        spec.std * jax.random.normal(key, spec.shape)
        if spec.init == "normal"
        else fill[spec.init](spec.shape, jnp.float32)
        for spec, key in zip(specs, keys, strict=True)
    ]
    return jax.tree.unflatten(tree, leaves)


def make_optimizer(steps: int, learning_rate: float) -> optax.GradientTransformation:
    """AdamW (Loshchilov & Hutter 2019): warm-up, constant rate, then a cosine down to zero.

    Until the cosine begins nothing depends on `steps`, so a saved run can still be extended.
    """
    constant = steps - max(1, int(steps * _DECAY_SHARE))
    warmup = min(_WARMUP_STEPS, max(1, constant // 2))
    schedule = optax.join_schedules(
        [
            optax.linear_schedule(0.0, learning_rate, warmup),
            optax.constant_schedule(learning_rate),
            optax.cosine_decay_schedule(learning_rate, steps - constant),
        ],
        [warmup, constant],
    )

    def decayed(params: opt.OPTParams) -> Any:
        # The layers' projections, which are matrices; no biases, norms or embeddings.
        none = jax.tree.map(lambda _: False, params)
        return none.replace(layers=jax.tree.map(lambda leaf: leaf.ndim == 2, params.layers))

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule, b1=0.9, b2=0.98, weight_decay=0.05, mask=decayed),
    )


def loss_fn(
    params: opt.OPTParams, config: opt.OPTConfig, tokens: jax.Array, positions: jax.Array
) -> jax.Array:
    """Mean negative log likelihood, nats a token.

    Args:
        params, config: The model.
        tokens: int32 [B, S + 1].
        positions: int32 [B, S].
    """
    rows, length = positions.shape
    one_row = causal_attend(config)

    def attend(carry: Carry, layer: LayerIndex, inputs: AttentionInput) -> tuple[Carry, jax.Array]:
        def one(*row: jax.Array) -> jax.Array:
            return one_row(carry, layer, AttentionInput(*row, inputs.weights, inputs.kind))[1]

        of_tokens = (inputs.q, inputs.k, inputs.v, inputs.x)
        mixed = jax.vmap(one)(*(a.reshape(rows, length, *a.shape[1:]) for a in of_tokens))
        return carry, mixed.reshape(inputs.q.shape)

    row = jnp.repeat(jnp.arange(rows, dtype=jnp.int32), length)
    inputs = StepInputs(tokens[:, :-1].reshape(-1), positions.reshape(-1), row)
    _, x = forward(opt.FAMILY, params, config, inputs, attend, ())
    predicted, targets = logits(opt.FAMILY, params, config, x), tokens[:, 1:].reshape(-1)
    return optax.softmax_cross_entropy_with_integer_labels(predicted, targets).mean()


def make_step(config: opt.OPTConfig, optimizer: optax.GradientTransformation) -> Any:
    """A jitted (params, optimizer state, tokens, positions) -> (params, optimizer state, loss)."""

    def step(params: opt.OPTParams, state: Any, tokens: jax.Array, positions: jax.Array) -> Any:
        loss, gradients = jax.value_and_grad(loss_fn)(params, config, tokens, positions)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    return jax.jit(step, donate_argnums=(0, 1))


def train(
    config: opt.OPTConfig,
    tokenizer: Tokenizer,
    *,
    steps: int,
    batch_tokens: int,
    row_length: int,
    learning_rate: float = 1.5e-3,
    seed: int = 0,
    saved: Path | None = None,
) -> Iterator[tuple[State, float]]:
    """Trains a model, and yields the state and the loss after every step.

    Args:
        config: Of the model.
        tokenizer: Of the model.
        steps: When to stop; the learning rate's schedule ends there.
        batch_tokens: Tokens of a step.
        row_length: Tokens of a row, until the last steps have rows as long as the context.
        learning_rate: The highest.
        seed: Of parameters and data.
        saved: File with a state to go on from, if it exists.
    """
    optimizer = make_optimizer(steps, learning_rate)
    params = init_params(config, seed)
    state = State(params, optimizer.init(params), 0)
    if saved is not None and saved.exists():
        state = State(*flax.serialization.from_bytes(tuple(state), saved.read_bytes()))
    run = make_step(config, optimizer)
    for step in range(state.step, steps):
        length = row_length if step < steps * (1 - _LONG_SHARE) else config.max_position
        tokens, positions = corpus.batch(
            tokenizer, f"{seed}/{step}", batch_tokens // length, length, config.max_position
        )
        params, optimizer_state, loss = run(state.params, state.optimizer, tokens, positions)
        state = State(params, optimizer_state, step + 1)
        yield state, float(loss)


def held_out_loss(params: opt.OPTParams, config: opt.OPTConfig, tokenizer: Tokenizer) -> float:
    """Loss on 32 rows that no training seed makes, at full context."""
    length = config.max_position
    evaluate = jax.jit(loss_fn, static_argnums=1)
    losses = []
    for i in range(8):
        tokens, positions = corpus.batch(tokenizer, f"held out/{i}", 4, length, length)
        losses.append(float(evaluate(params, config, tokens, positions)))
    return float(np.mean(losses))


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line (None: this process's); argparse exits on errors."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for the checkpoint")
    add("--steps", type=int, default=6000, help="optimizer steps; the schedule ends with them")
    add("--minutes", type=float, help="stop early after this long (then no longer reproducible)")
    add("--seed", type=int, default=0)
    add("--learning_rate", type=float, default=1.5e-3)
    add("--batch_tokens", type=int, default=1024, help="tokens a step")
    add("--row_length", type=int, default=256, help="tokens per row, except in the last steps")
    add("--vocab_size", type=int, default=1536)
    add("--d_model", type=int, default=256)
    add("--layers", type=int, default=4)
    add("--heads", type=int, default=4)
    add("--max_position", type=int, default=512)
    add(
        "--saved",
        type=Path,
        help="save the state here regularly, and continue from it if it exists",
    )
    add("--save_every", type=int, default=200, help="steps between two saves")
    add("--log", type=Path, help="write the loss here, a JSON object per line")
    add("--figure", type=Path, help="draw the loss curve here (PNG)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Trains a tokenizer and a model, writes the checkpoint and prints samples of its text."""
    args = parse_args(argv)
    tokenizer = train_tokenizer(args.vocab_size)
    vocab_size = tokenizer.get_vocab_size()
    hf = checkpoint.hf_config(vocab_size, args.d_model, args.layers, args.heads, args.max_position)
    config = opt.config_from_hf(hf)
    print(f"{opt.FAMILY.num_params(config):,} parameters, {vocab_size} tokens", flush=True)
    state = run(args, config, tokenizer)
    loss = held_out_loss(state.params, config, tokenizer)
    print(f"held-out loss {loss:.4f} nats a token after {state.step} steps", flush=True)
    checkpoint.export(args.out, state.params, hf, tokenizer)
    if args.log and args.figure:
        figure.draw(args.log, args.figure)
    for prompt in PROMPTS:
        for temperature in (0.0, 0.8):
            text = generate(state.params, config, tokenizer, prompt, temperature, seed=args.seed)
            print(f"\n[temperature {temperature}] {text}", flush=True)


def run(args: argparse.Namespace, config: opt.OPTConfig, tokenizer: Tokenizer) -> State:
    """Train as the arguments say, log, save, and return the last state."""
    begin, losses, last = time.monotonic(), [], time.monotonic()
    log = args.log.open("a", encoding="utf-8") if args.log else None
    asked = ("steps", "batch_tokens", "row_length", "learning_rate", "seed", "saved")
    steps = train(config, tokenizer, **{name: getattr(args, name) for name in asked})
    for state, loss in steps:
        losses.append(loss)
        if state.step % 50 == 0 or state.step == args.steps:
            seconds, last = time.monotonic() - last, time.monotonic()
            rate = args.batch_tokens * len(losses) / seconds
            mean = round(float(np.mean(losses)), 4)
            print(f"step {state.step}/{args.steps} loss {mean} {rate:.0f} tokens/s", flush=True)
            if log:
                entry = {"step": state.step, "loss": mean, "tokens_per_s": round(rate)}
                print(json.dumps(entry), file=log, flush=True)
            losses.clear()
        if args.saved and state.step % args.save_every == 0:
            save(state, args.saved)
        if args.minutes and time.monotonic() - begin > args.minutes * 60:
            break
    return state


def save(state: State, path: Path) -> None:
    """Write the state in one go, so that a stop at any moment leaves a whole file."""
    partial = path.with_suffix(".partial")
    partial.write_bytes(flax.serialization.to_bytes(tuple(state)))
    os.replace(partial, path)


if __name__ == "__main__":
    main()
