"""The shipped checkpoint: small, whole, loadable, and able to tell a story."""

import json

import bpe
import corpus
import generate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import train
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from jaxserve.models.families import opt
from jaxserve.weights import load_config, load_params

FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


@pytest.fixture(scope="module")
def tokenizer(asset):
    return Tokenizer.from_file(str(asset / "tokenizer.json"))


@pytest.fixture(scope="module")
def model(asset):
    family, config, _ = load_config(asset)
    params = load_params(asset, family, config, dtype=jnp.float32, mesh=None)
    return config, params


def test_files_and_size(asset):
    files = list(asset.iterdir())
    assert {file.name for file in files} == FILES
    assert sum(file.stat().st_size for file in files) <= 8_000_000


def test_config_and_weights_agree(asset, tokenizer):
    hf = json.loads((asset / "config.json").read_text())
    config = opt.config_from_hf(hf)
    tensors = load_file(asset / "model.safetensors")
    assert {array.dtype for array in tensors.values()} == {np.dtype(np.float16)}
    assert sum(array.size for array in tensors.values()) == opt.FAMILY.num_params(config)
    assert config.max_position == 512
    assert tokenizer.get_vocab_size() == config.vocab_size
    assert (config.bos_token_id, config.eos_token_ids) == (2, (2,))
    assert tokenizer.token_to_id("</s>") == 2
    assert tokenizer.token_to_id("<pad>") == 1


def test_a_text_begins_with_eos(tokenizer):
    assert tokenizer.encode("Once upon a time").ids[0] == 2
    assert tokenizer.encode("Once", add_special_tokens=False).ids[0] != 2


@settings(deadline=None)
@given(text=st.text())
def test_any_text_survives_the_tokenizer(tokenizer, text):
    if any(special in text for special in bpe.SPECIAL):
        return
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_the_model_has_learned_the_grammar(model, tokenizer):
    """On stories it has not seen it is far better than guessing (7.3 nats a token)."""
    config, params = model
    tokens, positions = corpus.batch(tokenizer, "test", 4, 256, config.max_position)
    loss = jax.jit(train.loss_fn, static_argnums=1)(params, config, tokens, positions)
    assert float(loss) < 1.0


@pytest.mark.parametrize(
    "prompt",
    ["Once upon a time", pytest.param("One day, a little fox", marks=pytest.mark.slow)],
)
def test_greedy_text_is_a_story_that_ends(model, tokenizer, prompt):
    config, params = model
    text = generate.generate(params, config, tokenizer, prompt)
    assert text.startswith(prompt)
    assert 40 <= len(text.split()) <= 250
    assert text[-1] in '.!"'
    # Somebody has a name, and it comes back.
    names = [word.strip('.,!?"') for word in text.split() if word[:1].isupper()]
    assert max(names.count(name) for name in set(names) - {"The", "She", "He", "I"}) >= 4
