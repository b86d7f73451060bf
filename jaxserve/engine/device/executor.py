"""Runs batches on the device: owns the parameters, the donated pool and the sampling state.

`submit` returns at once; `StepHandle.result` waits. Only one thread uses an executor. Its arguments
are plain data, NumPy arrays and numbers, so that they can be sent to executors on other hosts.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import numpy as np
from jax.typing import DTypeLike

from jaxserve.engine.device.batch_layout import Layout, empty_tables, expand, keep
from jaxserve.engine.device.buckets import Buckets
from jaxserve.engine.device.cache_moves import Mover
from jaxserve.engine.device.device_arrays import put_replicated
from jaxserve.engine.device.hidden_cache import make_project_to_kv
from jaxserve.engine.device.host_copies import Saved
from jaxserve.engine.device.model_step import StepOutput, make_model_step
from jaxserve.engine.device.pooling_step import Pooled, Wanted, make_pooling_step
from jaxserve.engine.device.prompt_logprobs_step import make_prompt_step
from jaxserve.engine.device.sampling import SampleResult, mask_words, sample_full
from jaxserve.engine.device.sampling_state import SlotParams, admit, init_state, replicated, warm_up
from jaxserve.engine.device.step_model import StepModel
from jaxserve.engine.device.verification import Checked
from jaxserve.models.base import Params
from jaxserve.models.lora import Adapters, Layers, empty_adapter, make_put
from jaxserve.pallas_kernels import Pool, pool_format
from jaxserve.pallas_kernels.low_rank import RANKS

_SAMPLE_FULL = jax.jit(sample_full, donate_argnums=0)

MOST_PADDING = 64  # tokens of padding for which a CPU runs a step
COMPILING = 8  # most steps compiled at once: each takes gigabytes for large models


_Program = tuple[Any, ...]  # what compiles a program, and its arguments


class Handle(Protocol):
    """A launched step."""

    def result(self) -> SampleResult:
        """The sampled tokens as NumPy arrays, [R] of the step's layout. Waits for the device;
        raises what the device raised."""
        ...

    def prompt(self) -> SampleResult:
        """Log-probabilities of the step's targets, [T] of its layout, as NumPy arrays. Only for a
        step with targets."""
        ...

    def pooled(self) -> Pooled:
        """Vectors and logits that the step's `wanted` asks for, as NumPy arrays. Only for a step
        with `wanted`."""
        ...


@dataclass(frozen=True)
class PendingSample:
    """A step whose logits are being computed and whose tokens are not sampled yet. The form of the
    arrays is up to the executor.

    Attributes:
        rows: R, of the step's layout.
        logits: [R, V].
        slots: [R], the device slot of each row.
        emit: [R], whether a row samples a token.
        checked: which rows are drafts; None if none may be.
        prompt: [T], log-probabilities of the step's targets; None without targets.
        pooled: results for the step's `wanted`; None without it.
    """

    rows: int
    logits: Any
    slots: Any
    emit: Any
    checked: Any = None
    prompt: Any = None
    pooled: Any = None


class Executor(Protocol):
    """Runs the engine's steps on a device, or on several.

    Calls take effect in the order in which they are made. They return before the device has done
        the work, with two exceptions: a large `save` or `load` may wait for memory on the device,
        and a `load` for the copy that it needs. A device error is raised by the next call.

    Attributes:
        buckets: the layouts of its compiled steps.
        intact: whether it can be used after a call has raised: the device has lost nothing but what
        that call was about.
        copies_beside: whether copies to and from the host run beside the steps, on their own link.
    """

    @property
    def buckets(self) -> Buckets:
        """See the class."""
        ...

    @property
    def intact(self) -> bool:
        """See the class."""
        ...

    @property
    def copies_beside(self) -> bool:
        """See the class."""
        ...

    def admit(self, slot: int, params: SlotParams) -> None:
        """Sets the sampling parameters of a device slot's request, before the first step in it."""
        ...

    def project_to_kv(self, layout: Layout, packed: np.ndarray) -> None:
        """Projects cached hidden vectors to K and V. K overwrites the vectors.

        Args:
            layout: `Buckets.projection_layout`.
            packed: see `submit` and `batching.projection_batches`.
        """
        ...

    def copy_slots(self, places: np.ndarray) -> None:
        """Copies cached tokens within the pool, in all layers.

        Args:
            places: int32 [m, 4], from (block, slot) to (block, slot). No target is a source.
        """
        ...

    def save(self, keys: Sequence[int], counts: Sequence[int], slots: np.ndarray) -> None:
        """Copies cached tokens to host memory.

        Args:
            keys: keys to find them by.
            counts: tokens of each key.
            slots: int32 [sum(counts), 2], (block, slot): those of keys[0] first.
        """
        ...

    def load(self, keys: Sequence[int], counts: Sequence[int], slots: np.ndarray) -> None:
        """Copies saved tokens to the same number of slots of the pool; arguments as in `save`."""
        ...

    def discard(self, keys: Sequence[int]) -> None:
        """Frees the tokens saved under these keys. Unknown keys are ignored."""
        ...

    @property
    def sends(self) -> bool:
        """Whether what is saved can be sent to other engines: `saved` and `keep`."""
        ...

    @property
    def page_bytes(self) -> int:
        """Bytes of a saved block of K and V."""
        ...

    def saved(self, key: int) -> Saved:
        """The tokens saved under a key, for `keep` of another engine's executor."""
        ...

    def fits(self, page: np.ndarray) -> bool:
        """Whether an array of another engine has shape and dtype of a saved block of K and V."""
        ...

    def keep(self, pages: Mapping[int, np.ndarray]) -> None:
        """Keeps tokens that another engine has saved, by key, for `load`. Their arrays must not
        change; they are copied only if they stay for long."""
        ...

    def put_adapter(self, slot: int, first: int, adapter: Layers) -> None:
        """Copies an adapter to the device; rows of later steps may use it.

        Args:
            slot: below `LoraSlots.count`. No row of a later step uses its old content.
            first: the first of its columns, whose old content no row of a later step uses.
            adapter: NumPy arrays, see `jaxserve.models.lora.make_put`.
        """
        ...

    def submit(
        self,
        layout: Layout,
        packed: np.ndarray,
        *,
        full: bool,
        targets: np.ndarray | None = None,
        wanted: Wanted | None = None,
    ) -> Handle:
        """Launches one step.

        Args:
            layout: the bucket.
            packed: from `Layout.pack`, not to be changed afterwards.
            full: whether any row samples with more than plain greedy.
            targets: int32 [layout.tokens], the token that follows each in its prompt, or
            `layout.NO_TARGET`; None if no request asks for prompt logprobs. Not for a decode step.
            wanted: hidden states to sum up, and logits to return; None if no request asks for any.
            Not for a decode step.
        """
        ...

    def compute(
        self,
        layout: Layout,
        packed: np.ndarray,
        *,
        targets: np.ndarray | None = None,
        wanted: Wanted | None = None,
    ) -> PendingSample:
        """Launches one step up to its logits. `sample` must follow.

        Args:
            layout: see `submit`.
            packed: see `submit`.
            targets: see `submit`.
            wanted: see `submit`.
        """
        ...

    def sample(self, pending: PendingSample, masks: np.ndarray) -> Handle:
        """Launches the sampling of a step, in which each row gets a token that its mask allows.

        Args:
            pending: what `compute` returned.
            masks: uint32 [layout.rows, `mask_words(V)`]; see `sampling.sample_full`.
        """
        ...

    def close(self) -> None:
        """Ends its threads. No call may follow. Idempotent."""
        ...


@dataclass(frozen=True)
class StepHandle:
    """A step launched by `JaxExecutor`."""

    _result: SampleResult
    _prompt: SampleResult | None
    _pooled: Pooled | None

    def result(self) -> SampleResult:
        """See `Handle`."""
        return jax.tree.map(np.asarray, self._result)

    def prompt(self) -> SampleResult:
        """See `Handle`."""
        assert self._prompt is not None
        return jax.tree.map(np.asarray, self._prompt)

    def pooled(self) -> Pooled:
        """See `Handle`."""
        assert self._pooled is not None
        return jax.tree.map(np.asarray, self._pooled)


class JaxExecutor:
    """An `Executor` on JAX's devices: a model's steps over its pool, one program per layout.

    Args:
        model: the model to compute.
        params: its parameters, on the devices.
        pool: the block pool, on the devices.
        buckets: the layouts to compile.
        moves_cache: whether to compile `copy_slots`, `save` and `load`.
        masked_sampling: whether to compile `sample`.
        adapters: room for adapters on the devices, zeros; None if `model.lora` is None.

    Attributes:
        stages: what `buckets` may become after the warm-up, each with more layouts than the one
            before. Those of a stage have to be compiled before.
    """

    def __init__(
        self,
        model: StepModel,
        params: Params,
        pool: Pool,
        buckets: Buckets,
        *,
        moves_cache: bool = False,
        masked_sampling: bool = False,
        adapters: Adapters | None = None,
    ) -> None:
        self.buckets = buckets
        self.params = params
        self._adapters, self._model_lora = adapters, model.lora
        if adapters is not None:
            self._put_adapter = make_put(adapters)
        self.pool = pool
        self._mesh = model.mesh
        self._place: Any = replicated(model.mesh)
        self._state = init_state(buckets.slots, model.config.vocab_size, model.mesh)
        placed = pool_format(pool)
        # Keys: whether layouts are deterministic.
        self._steps = {False: make_model_step(model, placed)}
        self._scores = {False: make_prompt_step(model)}
        if buckets.deterministic:
            self._steps[True] = make_model_step(model, placed, deterministic=True)
            self._scores[True] = make_prompt_step(model, placed)
        self._pool_states = make_pooling_step(model)
        large = [layout for layout in buckets.all() if layout.mirrors]
        self._tables: Any = put_replicated(empty_tables(large[0]), self._place) if large else None
        placed_alike: dict[str, Any] = {
            "static_argnames": "layout",
            "donate_argnames": "tables",
            "out_shardings": None if model.mesh is None else self._place,
        }
        self._expand, self._keep = (jax.jit(one, **placed_alike) for one in (expand, keep))
        self._project_to_kv = make_project_to_kv(model, placed)
        # Decode steps do not support drafts; sampling is one program for all steps of a size.
        self._no_drafts: dict[int, Checked] = {}
        if buckets.drafts:
            nothing = ((np.zeros(rows, bool), np.zeros(rows, np.int32)) for rows in buckets.rows)
            self._no_drafts = {
                len(each[0]): Checked(*put_replicated(each, self._place)) for each in nothing
            }
        self.stages: list[Buckets] = []
        self._compiled: set[_Program] = set()
        self._held: Any  # shapes of what the steps are given beside a batch
        # Masks that allow all tokens, by rows: sampling has masks always, or never.
        self._allowed: dict[int, jax.Array] = {}
        if masked_sampling:
            words = mask_words(model.config.vocab_size)
            for rows in buckets.rows:
                full = np.full((rows, words), 2**32 - 1, np.uint32)
                self._allowed[rows] = put_replicated(full, self._place)
        self._d_model = model.config.d_model
        self._activations = model.activations or jax.tree.leaves(params)[0].dtype
        self._mover = Mover(model, placed, self._place) if moves_cache else None

    @property
    def intact(self) -> bool:
        """See `Executor`. False once a failed call has lost its donated arrays."""
        held = jax.tree.leaves((self.pool, self._state, self._adapters, self._tables))
        return not any(array.is_deleted() for array in held)

    @property
    def copies_beside(self) -> bool:
        """See `Executor`."""
        return self._mover is not None and self._mover.pinned

    def admit(self, slot: int, params: SlotParams) -> None:
        """See `Executor`."""
        self._state = admit(self._state, slot, params)

    def put_adapter(self, slot: int, first: int, adapter: Layers) -> None:
        """See `Executor`."""
        assert self._adapters is not None
        with self._mesh or contextlib.nullcontext():
            given = put_replicated((adapter, np.int32(slot + 1), np.int32(first)), self._place)
            self._adapters = self._put_adapter(self._adapters, *given)

    def submit(
        self,
        layout: Layout,
        packed: np.ndarray,
        *,
        full: bool,
        targets: np.ndarray | None = None,
        wanted: Wanted | None = None,
    ) -> StepHandle:
        """See `Executor`."""
        if full:
            pending = self.compute(layout, packed, targets=targets, wanted=wanted)
            return self._launch_sampling(pending, self._allowed.get(layout.rows))
        done, prompt, pooled = self._launch(layout, layout.greedy(packed), targets, wanted)
        return self._handle(SampleResult(done.tokens), prompt, pooled)

    def compute(
        self,
        layout: Layout,
        packed: np.ndarray,
        *,
        targets: np.ndarray | None = None,
        wanted: Wanted | None = None,
    ) -> PendingSample:
        """See `Executor`."""
        done, *beside = self._launch(layout, packed, targets, wanted)
        checked = done.checked if layout.drafts else self._no_drafts.get(layout.rows)
        return PendingSample(layout.rows, done.logits, done.slots, done.emit, checked, *beside)

    def _launch(
        self,
        layout: Layout,
        packed: np.ndarray,
        targets: np.ndarray | None,
        wanted: Wanted | None,
    ) -> tuple[StepOutput, SampleResult | None, Pooled | None]:
        """The model's step, the log-probabilities of targets, and the results for `wanted`."""
        if self._mover is not None:
            self._mover.check()
        with self._mesh or contextlib.nullcontext():
            batch = self._put(layout, packed)
            step = self._steps[layout.deterministic]
            done = step(*self._arguments(layout, batch), layout=layout)
            self.pool, self._state = done.pool, self._state.after(done.newest)
            prompt = pooled = None
            if targets is not None:
                of = put_replicated(targets, self._place)
                score = self._scores[layout.deterministic]
                prompt = score(self.params, done.hidden, of, rows=layout.rows)
            if wanted is not None:
                what = put_replicated(wanted, self._place)
                pooled = self._pool_states(self.params, done.hidden, done.logits, *what)
        return done, prompt, pooled

    def _arguments(self, layout: Layout, batch: jax.Array) -> tuple[Any, ...]:
        """Arguments of a model's step."""
        usual = self.params, self.pool, self._state.newest, batch
        return (*usual, self._adapters) if layout.lora else usual

    def _put(self, layout: Layout, packed: np.ndarray) -> jax.Array:
        """A packed batch on the device, whole."""
        batch: jax.Array = put_replicated(packed, self._place)
        if not layout.mirrors:
            return batch
        if len(packed) == layout.size:
            self._tables = self._keep(batch, self._tables, layout=layout.as_expanded())
            return batch
        whole, self._tables = self._expand(batch, self._tables, layout=layout.as_expanded())
        return whole

    def sample(self, pending: PendingSample, masks: np.ndarray) -> StepHandle:
        """See `Executor`."""
        return self._launch_sampling(pending, put_replicated(masks, self._place))

    def _launch_sampling(
        self, pending: PendingSample, masks: jax.Array | None = None
    ) -> StepHandle:
        with self._mesh or contextlib.nullcontext():
            self._state, result = _SAMPLE_FULL(
                self._state,
                pending.logits,
                pending.slots,
                pending.emit,
                masks,
                pending.checked,
            )
        return self._handle(result, pending.prompt, pending.pooled)

    def _handle(
        self, result: SampleResult, prompt: SampleResult | None, pooled: Pooled | None
    ) -> StepHandle:
        for leaf in jax.tree.leaves((result, prompt, pooled)):
            leaf.copy_to_host_async()
        return StepHandle(result, prompt, pooled)

    def project_to_kv(self, layout: Layout, packed: np.ndarray) -> None:
        """See `Executor`."""
        with self._mesh or contextlib.nullcontext():
            batch = self._put(layout, packed)
            self.pool = self._project_to_kv(self.params, self.pool, batch, layout=layout)

    def copy_slots(self, places: np.ndarray) -> None:
        """See `Executor`."""
        with self._mesh or contextlib.nullcontext():
            self.pool = self._moving().copy_slots(self.pool, places)

    def save(self, keys: Sequence[int], counts: Sequence[int], slots: np.ndarray) -> None:
        """See `Executor`."""
        with self._mesh or contextlib.nullcontext():
            self._moving().save(self.pool, keys, counts, slots)

    def load(self, keys: Sequence[int], counts: Sequence[int], slots: np.ndarray) -> None:
        """See `Executor`."""
        with self._mesh or contextlib.nullcontext():
            self.pool = self._moving().load(self.pool, keys, counts, slots)

    def discard(self, keys: Sequence[int]) -> None:
        """See `Executor`."""
        self._moving().discard(keys)

    @property
    def sends(self) -> bool:
        """See `Executor`."""
        return self._mover is not None

    @property
    def page_bytes(self) -> int:
        """See `Executor`."""
        return math.prod(self._page_shape) * self.pool.dtype.itemsize

    @functools.cached_property
    def _page_shape(self) -> tuple[int, ...]:
        return self._moving().shape(self.pool, 2 * self.pool.shape[3])

    def saved(self, key: int) -> Saved:
        """See `Executor`."""
        return self._moving().saved(key)

    def fits(self, page: np.ndarray) -> bool:
        """See `Executor`."""
        return page.shape == self._page_shape and page.dtype == self.pool.dtype

    def keep(self, pages: Mapping[int, np.ndarray]) -> None:
        """See `Executor`."""
        self._moving().keep(pages)

    def close(self) -> None:
        """See `Executor`."""
        if self._mover is not None:
            self._mover.close()

    def _moving(self) -> Mover:
        if self._mover is None:
            raise RuntimeError("a policy without moves_cache moves caches")
        return self._mover

    def compile(self, buckets: Buckets) -> Iterator[None]:
        """Compiles what these layouts need and earlier ones did not. Yields after each program.
        Another thread may make other calls meanwhile."""
        for program in self._programs(buckets):
            self._compile_once(program)
            yield

    def _programs(self, buckets: Buckets) -> list[_Program]:
        """What to compile for these layouts, in order: methods with their arguments.

        Steps with hidden rows come first: they take longest, and should not be left for a single
        thread at the end. On CPUs the first model step also makes numba compile its kernels, for
        which all these steps wait; programs without kernels are compiled meanwhile.
        """
        layouts = buckets.all()
        longest_first = sorted(layouts[1:], key=lambda each: (not each.hidden, each.decode_only))
        found: list[_Program] = [(self._compile, layout) for layout in (layouts[0], *longest_first)]
        if self._mesh is not None:  # only the step knows where its results are
            return found
        found[1:1] = [
            *((self._compile_sampler, layout.rows) for layout in buckets.sampled()),
            *((self._compile_scorer, layout) for layout in layouts if _scored(layout)),
            *((self._compile_transfers, layout) for layout in layouts if layout.mirrors),
        ]
        return found + [(self._compile_projection,)] * buckets.hidden

    def _compile_once(self, program: _Program) -> None:
        if program not in self._compiled:
            compiler, *arguments = program
            compiler(*arguments)
            self._compiled.add(program)

    def _compile(self, layout: Layout) -> None:
        """Compiles a model's step; a call with these arguments finds it compiled."""
        step: Any = self._steps[layout.deterministic]
        with self._mesh or contextlib.nullcontext():
            params, pool, newest, adapters = self._held
            more = (adapters,) if layout.lora else ()
            batch = self._like((layout.size,), np.int32)
            step.lower(params, pool, newest, batch, *more, layout=layout).compile()

    def _compile_projection(self) -> None:
        """Compiles the projection of hidden caches."""
        layout = self.buckets.projection_layout()
        batch = self._like((layout.size,), np.int32)
        self._project_to_kv.lower(*self._held[:2], batch, layout=layout).compile()

    def _compile_transfers(self, layout: Layout) -> None:
        """Compiles what makes a packed batch of each length whole on the device."""
        of = layout.as_expanded()
        for size in layout.sizes:
            batch = self._like((size,), np.int32)
            make = self._keep if size == layout.size else self._expand
            make.lower(batch, _shapes(self._tables), layout=of).compile()

    def _compile_sampler(self, rows: int) -> None:
        """Compiles sampling with more than plain greedy."""
        vocab, each = self._state.vocab_size, self._like((rows,), np.int32)
        true = self._like((rows,), np.bool_)
        masks = self._like((rows, mask_words(vocab)), np.uint32) if self._allowed else None
        checked: Any = None
        if self.buckets.drafts:
            checked = Checked(true, each)  # type: ignore[arg-type]
        logits = self._like((rows, vocab), np.float32)
        _SAMPLE_FULL.lower(self._state, logits, each, true, masks, checked).compile()

    def _compile_scorer(self, layout: Layout) -> None:
        """Compiles the scoring of a step's prompts, and its vectors."""
        hidden = self._like((layout.tokens, self._d_model), self._activations)
        score: Any = self._scores[layout.deterministic]
        targets = self._like((layout.tokens,), np.int32)
        score.lower(self._held[0], hidden, targets, rows=layout.rows).compile()
        pool: Any = self._pool_states
        logits = self._like((layout.rows, self._state.vocab_size), np.float32)
        wanted = (self._like(each.shape, np.int32) for each in Wanted.nothing(layout))
        pool.lower(self._held[0], hidden, logits, *wanted).compile()

    def _like(self, shape: tuple[int, ...], dtype: DTypeLike) -> jax.ShapeDtypeStruct:
        """An array where batches are put."""
        place = self._place
        if self._mesh is None:
            place = jax.sharding.SingleDeviceSharding(place)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    def _put_all(self, layout: Layout) -> None:
        """Compiles the transfer of a packed batch to the device, for each length."""
        for size in layout.sizes if layout.mirrors else ():
            self._put(layout, layout.padding(size))

    def _run_once(self, layout: Layout, full: bool) -> None:
        """Runs a step on padding, which compiles what goes with it, unless that is compiled
        already."""
        targets = layout.no_targets() if _scored(layout) else None
        wanted = Wanted.nothing(layout) if _scored(layout) else None
        self.submit(layout, layout.empty(), full=full, targets=targets, wanted=wanted).result()

    def warmup(
        self,
        progress: Callable[[Iterable[Any]], Iterable[Any]],
        barrier: Callable[[], None] = lambda: None,
        *,
        all_steps: bool = True,
    ) -> None:
        """Compiles the steps, so that none compiles when it is called, and runs them on padding.

        Args:
            progress: wraps the list of work, as tqdm does.
            barrier: called before the first step is run.
            all_steps: whether to compile every step; else only the first of `Buckets.stages`, and
                the others are left to `compile`. Over several devices it is always every step.
        """
        if not all_steps and self._mesh is None:
            self.buckets, *self.stages = self.buckets.stages()
        layouts = self.buckets.all()
        self._state = warm_up(self._state)
        self._held = _shapes((self.params, self.pool, self._state.newest, self._adapters))
        # XLA compiles several programs at once.
        threads = ThreadPoolExecutor(min(COMPILING, os.cpu_count() or 1))
        try:
            work: list[Callable[[], Any]] = [
                threads.submit(self._compile_once, program).result
                for program in self._programs(self.buckets)
            ]
            work += [barrier, *(partial(self._put_all, layout) for layout in layouts)]
            greedy, sampled = layouts, self.buckets.sampled()
            if self._mesh is None and jax.default_backend() == "cpu":
                # Everything that runs here is compiled, and needs no additional memory. Padding
                # takes as long as tokens; the rest only makes Python know the steps.
                greedy = [layout for layout in layouts if layout.tokens <= MOST_PADDING]
                sampled = sampled[:1]
            work += [partial(self._run_once, layout, False) for layout in greedy]
            work += [partial(self._run_once, layout, True) for layout in sampled]
            for piece in progress(work):
                piece()
        finally:
            threads.shutdown(cancel_futures=True)
        if self.buckets.hidden:
            layout = self.buckets.projection_layout()
            self.project_to_kv(layout, layout.empty())
        if self._mover is not None:
            with self._mesh or contextlib.nullcontext():
                self.pool = self._mover.warm_up(self.pool)
        if self._model_lora is not None and self._adapters is not None:
            for columns in RANKS:  # one program each
                if columns <= self._model_lora.rank:
                    self.put_adapter(0, 0, empty_adapter(self._adapters, columns))


def _shapes(arrays: Any) -> Any:
    """What compilers must know of a tree of arrays, which may be donated meanwhile."""

    def one(array: Any) -> jax.ShapeDtypeStruct:
        place = array.format if array.committed else None
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=place)

    return jax.tree.map(one, arrays)


def _scored(layout: Layout) -> bool:
    """Whether prompts in such a step may be scored; steps with hidden rows share the program."""
    return not (layout.decode_only or layout.hidden)
