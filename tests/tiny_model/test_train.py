"""The training script: reproducible, resumable, and what it exports loads again."""

import json
from functools import partial

import bpe
import checkpoint
import corpus
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import train

from jaxserve.models.families import opt
from jaxserve.weights import load_config, load_params

SMALL = {"steps": 4, "batch_tokens": 64, "row_length": 32, "seed": 5}


@pytest.fixture(scope="module")
def tokenizer():
    return bpe.train_tokenizer(300, num_stories=50)


@pytest.fixture(scope="module")
def hf(tokenizer):
    return checkpoint.hf_config(
        tokenizer.get_vocab_size(), d_model=16, num_layers=2, num_heads=2, max_position=32
    )


def run(hf, tokenizer, **changes):
    config = opt.config_from_hf(hf)
    return list(train.train(config, tokenizer, **(SMALL | changes)))


def same(left, right):
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


@pytest.mark.slow
def test_one_seed_one_model(hf, tokenizer):
    first, second = run(hf, tokenizer), run(hf, tokenizer)
    assert [loss for _, loss in first] == [loss for _, loss in second]
    assert same(first[-1][0].params, second[-1][0].params)
    assert all(np.isfinite(loss) for _, loss in first)
    other = run(hf, tokenizer, seed=6)
    assert not same(first[-1][0].params, other[-1][0].params)


def test_the_loss_falls(hf, tokenizer):
    losses = [loss for _, loss in run(hf, tokenizer, steps=40, learning_rate=1e-2)]
    assert np.mean(losses[-5:]) < losses[0] - 1.0


def test_a_stopped_run_goes_on_as_if_never_stopped(hf, tokenizer, tmp_path):
    whole = run(hf, tokenizer)
    saved = tmp_path / "state"
    config = opt.config_from_hf(hf)
    for state, _ in train.train(config, tokenizer, **SMALL):
        if state.step == 2:
            train.save(state, saved)
            break
    rest = run(hf, tokenizer, saved=saved)
    assert [state.step for state, _ in rest] == [3, 4]
    assert same(whole[-1][0].params, rest[-1][0].params)


def test_export_loads_as_any_checkpoint(hf, tokenizer, tmp_path):
    *_, (state, _) = run(hf, tokenizer)
    checkpoint.export(tmp_path, state.params, hf, tokenizer)
    family, config, _ = load_config(tmp_path)
    assert config == opt.config_from_hf(hf)
    params = load_params(tmp_path, family, config, dtype=jnp.float32, mesh=None)
    stored = jax.tree.map(lambda leaf: np.asarray(leaf, np.float16), state.params)
    assert same(params, stored)


def test_main_writes_log_and_figure(tmp_path, capsys, monkeypatch):
    few_stories = partial(bpe.train_tokenizer, num_stories=50)
    monkeypatch.setattr(train, "train_tokenizer", few_stories)
    log, figure = tmp_path / "log.jsonl", tmp_path / "loss.png"
    shape = "--d_model 16 --layers 1 --heads 1 --max_position 40 --vocab_size 300"
    training = "--steps 3 --batch_tokens 64 --row_length 32"
    arguments = f"{shape} {training} --out {tmp_path / 'out'} --log {log} --figure {figure}"
    train.main(arguments.split())
    last = json.loads(log.read_text().splitlines()[-1])
    assert last["step"] == 3
    assert np.isfinite(last["loss"])
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert "Once upon a time" in capsys.readouterr().out


def test_rows_are_stories_between_eos(tokenizer):
    row = corpus.row(tokenizer, "key", 600)
    assert row[0] == bpe.EOS_ID
    assert np.array_equal(row, corpus.row(tokenizer, "key", 600))
    assert not np.array_equal(row, corpus.row(tokenizer, "other", 600))
    begin, end = np.flatnonzero(row == bpe.EOS_ID)[:2]
    text = tokenizer.decode(row[begin + 1 : end].tolist())
    assert text[0].isupper()
    assert text[-1] in '.!"'


def test_positions_cover_the_context():
    tokenizer = bpe.train_tokenizer(300, num_stories=50)
    _, positions = corpus.batch(tokenizer, "key", 64, 8, 32)
    assert positions.min() == 0
    assert positions.max() == 31
    assert (np.diff(positions) == 1).all()
    assert (positions[::2, 0] == 0).all()
