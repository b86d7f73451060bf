"""Small engines with random weights, and a way to wait for what they say."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxserve
from jaxserve.config import Config
from jaxserve.engine.engine import Engine
from jaxserve.engine.output import FinishReason, Output
from jaxserve.engine.startup import initial_cost_model
from jaxserve.engine.startup.build import build_engine
from jaxserve.engine.startup.step_profile import Progress, Seconds, timed_model
from jaxserve.engine.startup.step_timer import Shape
from jaxserve.sched.cost.cost_model import LinearCostModel
from jaxserve.sched.cost.padding import Padding
from jaxserve.sched.request import (
    NOTHING_SAMPLED,
    SLO,
    PoolingParams,
    Program,
    Request,
    SamplingParams,
    Tier,
)

TIMEOUT = 120  # seconds until a test gives up on the engine

SHAPES: dict[str, dict[str, Any]] = {
    "opt": {
        "model_type": "opt",
        "vocab_size": 96,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "ffn_dim": 64,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "activation_function": "relu",
        "word_embed_proj_dim": 32,
        "init_std": 0.3,
        "eos_token_id": 2,
    },
    "llama": {
        "model_type": "llama",
        "vocab_size": 96,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "initializer_range": 0.3,
        "eos_token_id": 2,
    },
    "moe": {  # a layer with experts, one of which all tokens go to, and one without
        "model_type": "qwen2_moe",
        "vocab_size": 96,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.3,
        "eos_token_id": 2,
    },
    "deepseek": {  # latent attention; a layer without experts, and one with
        "model_type": "deepseek_v2",
        "vocab_size": 96,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": None,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 4,  # heads as wide as those of the others
        "qk_rope_head_dim": 4,
        "v_head_dim": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.3,
        "eos_token_id": 2,
    },
}


SCARCE = {"cache__num_blocks": 36, "scheduler__max_rows": 8}  # whoever preempts, does
BOX = Path(jaxserve.__file__).parent / "assets" / "tiny-stories"  # the model in the box


def write_shape(folder: Path, family: str) -> Path:
    """A checkpoint directory with nothing but a config.json: random weights fill it."""
    path = folder / family
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(SHAPES[family]))
    return path


@contextmanager
def engine(path: Path, block_secret: bytes | None = None, **fields: Any) -> Iterator[Engine]:
    """A running engine; fields override the config, `scheduler__max_rows=4`. Whatever the test
    did, the pool must be whole afterwards.

    Most of what a test costs is compiling steps, and their shapes come from max_rows, num_blocks,
    block_size and the buckets: as they are here, or as in `SCARCE`, somebody has compiled them.
    """
    defaults = {
        "model__path": str(path),
        "model__load_format": "random",
        "cache__block_size": 4,
        "cache__num_blocks": 1024,
        "cache__prefix_caching": False,  # engines are shared, and tests write to pools by hand
        "scheduler__policy": "sarathi",  # needs no steps but those of all policies
        "scheduler__max_batch_tokens": 64,
        "scheduler__max_prefill_tokens": 64,
        "scheduler__max_rows": 32,
        "engine__row_buckets": (8, 32),
        "engine__token_buckets": (64,),
        "engine__compilation_cache_dir": "",
        "engine__forbid_compile": True,
    }
    config = Config().with_fields(**{**defaults, **fields})
    with pytest.MonkeyPatch.context() as patch:
        if not config.engine.compilation_cache_dir:
            patch.setattr(initial_cost_model, "timed_model", _timed_once)
        built = build_engine(config, progress=False, block_secret=block_secret)
    built.start()
    try:
        yield built
    finally:
        built.stop()
    stats = built.stats()
    assert stats.blocks_free == stats.blocks_total, "blocks leaked"
    assert stats.waiting == stats.running == 0
    if config.engine.forbid_compile:
        assert stats.compiles_after_warmup == 0


def box(**fields: Any) -> AbstractContextManager[Engine]:
    """The same of the model in the box."""
    return engine(BOX, model__load_format="auto", **fields)


_timed: dict[Hashable, LinearCostModel] = {}


def _timed_once(
    seconds: Seconds,
    wanted: Sequence[Shape],
    padding: Padding,
    num_layers: int,
    *,
    experts: tuple[int, int],
    progress: Progress,
) -> LinearCostModel:
    """`timed_model`, once a process for the same steps, as `StartCache` has it."""
    key = tuple(wanted), padding, num_layers, experts
    if key not in _timed:
        _timed[key] = timed_model(
            seconds, wanted, padding, num_layers, experts=experts, progress=progress
        )
    return _timed[key]


def wait_until_idle(on: Engine) -> None:
    """Until the engine has ended every request, finished every step it has launched, and is in no
    observer: whoever shares it meets nothing of those before."""
    idle, receive = threading.Event(), on._receive

    def watched(*, wait: bool) -> bool:
        if wait and not on._inbox:
            idle.set()
        return receive(wait=wait)

    assert on._failure is None, "a shared engine has failed"
    on._receive = watched  # type: ignore[method-assign]
    try:
        on.cancel("nobody")  # it is ignored, but the engine comes by
        assert idle.wait(TIMEOUT), "the engine does not come to rest"
    finally:
        del on._receive


@dataclass
class Stream:
    """All that was said of one request."""

    outputs: list[Output] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)
    left: int = 1
    on_output: Callable[[Output], None] | None = None

    def __call__(self, output: Output) -> None:
        self.outputs.append(output)
        if self.on_output is not None:
            self.on_output(output)
        if output.finish_reason is not None:
            self.left -= 1
            if not self.left:
                self.ended.set()

    def wait(self) -> Stream:
        assert self.ended.wait(TIMEOUT), "the engine did not finish the request"
        return self

    def tokens(self, index: int = 0) -> list[int]:
        return [t for o in self.outputs if o.index == index for t in o.token_ids]

    def text(self, index: int = 0) -> str:
        return "".join(o.text for o in self.outputs if o.index == index)

    def last(self, index: int = 0) -> Output:
        return next(o for o in self.outputs if o.index == index and o.finish_reason is not None)

    @property
    def reason(self) -> FinishReason | None:
        return self.last().finish_reason


class Gate:
    """A callback in which the engine's thread waits, from the first output on, until `open`."""

    def __init__(self) -> None:
        self._inside, self._open = threading.Event(), threading.Event()

    def __call__(self, output: Output) -> None:
        self._inside.set()
        assert self._open.wait(TIMEOUT)

    def reached(self) -> None:
        """Waits until the engine waits."""
        assert self._inside.wait(TIMEOUT), "nothing was said"

    def open(self) -> None:
        """Lets it go on, for good."""
        self._open.set()


_names = iter(range(10**9))


def send(
    on: Engine,
    prompt: Sequence[int],
    on_output: Callable[[Output], None] | None = None,
    *,
    tier: Tier = Tier.REALTIME,
    slo: SLO | None = None,
    adapter: str = "",
    tenant: str = "",
    program: Program | None = None,
    continues: tuple[tuple[str, str], ...] = (),
    **sampling: Any,
) -> tuple[str, Stream]:
    """Submits one request; its id and its stream."""
    params = SamplingParams(**sampling)
    stream = Stream(left=params.n, on_output=on_output)
    name = f"request-{next(_names)}"
    who: dict[str, Any] = {"adapter": adapter, "tenant": tenant}
    who |= {"program": program, "continues": continues}
    request = Request(name, tuple(prompt), params, slo or SLO(), tier, **who)
    on.check(request)
    on.submit(request, stream)
    return name, stream


def pool(on: Engine, prompt: Sequence[int], pooling: PoolingParams, adapter: str = "") -> Stream:
    """Submits one request for a vector; its stream."""
    stream = Stream()
    name = f"request-{next(_names)}"
    request = Request(name, tuple(prompt), NOTHING_SAMPLED, adapter=adapter, pooling=pooling)
    on.check(request)
    on.submit(request, stream)
    return stream


def vector(stream: Stream) -> np.ndarray:
    """The stream's, before which nothing comes, and with which no token."""
    (last,) = stream.wait().outputs
    assert last.finish_reason is FinishReason.STOP, last.error
    assert (last.token_ids, last.text) == ((), "") and last.pooled is not None
    assert last.pooled.dtype == np.float32
    return last.pooled


SAMPLING: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}


def prompts(count: int = 32) -> list[list[int]]:
    """The same ones every time, of 1 to 30 tokens."""
    rng = random.Random(7)
    return [[rng.randrange(3, 96) for _ in range(rng.randint(1, 30))] for _ in range(count)]


def generate(on: Engine, prompts: Sequence[Sequence[int]], **sampling: Any) -> list[list[int]]:
    """The tokens of every prompt, all submitted at once."""
    streams = [send(on, prompt, **sampling)[1] for prompt in prompts]
    return [stream.wait().tokens() for stream in streams]
