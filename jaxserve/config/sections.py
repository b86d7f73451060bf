"""What can be set, section by section: each field with its default, what it means, and its range.

`--config.SECTION.FIELD=VALUE` sets one; `--help` shows what is said of each here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from jaxserve.config.errors import ConfigError
from jaxserve.sched.cache.cache_kinds import HIDDEN_READS
from jaxserve.sched.cache.retention import LRU
from jaxserve.sched.registry import make_retention

AUTO = "auto"
NO_DEFAULTS = "none"
LOAD_FORMATS = (AUTO, "safetensors", "gguf", "orbax", "random")
DTYPES = ("float32", "bfloat16", "float16")
SMALL_CACHES = ("fp8", "int8")
CACHE_DTYPES = (AUTO, *DTYPES, *SMALL_CACHES)
TEXT, JSON = "text", "json"  # what logs can be
MAX_SEED = 2**31 - 1
MAX_LORAS = 256
LORA_RANKS = (8, 16, 32, 64, 128, 256)
LORA_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@+-]{0,127}")
_MAX_S = 86_400
_MAX_SHARE = 1000
_MAX_KIB = 1 << 20
_MAX_MIB = 1 << 20
_ORIGIN = re.compile(r"\*|https?://[^/\s,*?#@]+")
_HOST = re.compile(r"\*|(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
SLO_CLASSES = {
    "interactive": "ttft=1s:tbt=187.5ms",
    "standard": "ttft=5s:tbt=375ms",
    "offline": "jct=600s:tier=best_effort",
}


def _require(fine: bool, problem: str) -> None:
    if not fine:
        raise ConfigError(problem)


def _check(section: object, path: str, fine: bool, must: str) -> None:
    """Refuses a value unless it is fine. path: SECTION.FIELD. must: what it has to be."""
    value = getattr(section, path.partition(".")[2])
    _require(fine, f"{path}{must}, got {value!r}")


def _listed(text: str) -> tuple[str, ...]:
    return tuple(each.strip() for each in text.split(",") if each.strip())


@dataclass(frozen=True)
class CacheConfig:
    """The pool of blocks.

    Attributes:
        block_size: Tokens a block holds. 0: 64 on TPUs, 16 elsewhere.
        num_blocks: Blocks of the pool; each holds K or V of block_size tokens, for all layers. 0:
            as many as memory_gib holds. The array is rounded up to one of a few sizes, so that
            pools of similar sizes share compiled steps.
        memory_gib: Size of the pool; 0: what memory_fraction leaves, as far as max_rows requests of
            max_model_len can use it. On CPUs, whose memory others need, too, what four such
            requests need, or a sixteenth of the free memory if that is more, but no more than a
            quarter of it and one such request; and less if the last start had less, since steps are
            compiled for one of few sizes.
        memory_fraction: Of the memory that is free on the device, or the host, what weights, pool
            and steps take.
        host_gib: Host memory for caches: checkpoints, for policies that make them, and with
            prefix_caching blocks that leave the pool (not under bros).
        hidden_read: How policies with hidden caches have them read: auto (absorbed where positions
            are not rotated, else projected; on CPUs projected; none where they bring nothing, see
            docs/internals.md) | absorbed (cheaper decodes, but log-probabilities that depend on
            which cache a request has) | projected.
        dtype: Of K, V and hidden vectors in the pool: auto (that of the activations; on CPUs
            bfloat16 for bfloat16 weights) | float32 | bfloat16 | float16 | fp8 (e4m3) | int8 (with
            a scale per token and head). Those of 8 bits change texts a little, see
            docs/quantization.md.
        prefix_caching: Whether requests find K and V of what others have computed, of the same
            tenant and salt.
        share_between_keys: Whether they find those of other tenants, too, which then can tell by
            the time to a first token what others have asked.
        retention: Which of what nobody reads stays when its room is wanted, with parameters: lru
            (what was read last) | worth (what is likely to save most of computing, most for
            real-time requests; see docs/reuse.md).
        rho: Seconds that a step takes longer for a token of a hidden cache than for one of K and V:
            a number, or auto for what scheduler.profile, or the timing at the start, says.
    """

    block_size: int = 0
    num_blocks: int = 0
    memory_gib: float = 0.0
    memory_fraction: float = 0.9
    host_gib: float = 0.0
    hidden_read: str = "auto"
    dtype: str = AUTO
    prefix_caching: bool = True
    share_between_keys: bool = False
    retention: str = LRU
    rho: str = "auto"

    def __post_init__(self) -> None:
        for name in ("block_size", "memory_gib", "host_gib"):
            fine = 0 <= getattr(self, name) < math.inf
            _check(self, f"cache.{name}", fine, " must be at least 0")
        least = " must be at least 2, one for K and one for V (0 for as many as fit)"
        _check(self, "cache.num_blocks", self.num_blocks == 0 or self.num_blocks >= 2, least)
        _check(self, "cache.memory_fraction", 0 < self.memory_fraction <= 1, " must be in (0, 1]")
        alone = self.share_between_keys and not self.prefix_caching
        _check(self, "cache.share_between_keys", not alone, " needs cache.prefix_caching")
        alone = self.retention != LRU and not self.prefix_caching
        _check(self, "cache.retention", not alone, " needs cache.prefix_caching")
        try:
            make_retention(self.retention)
        except ValueError as error:
            raise ConfigError(f"cache.retention: {error}") from error
        known = f" must be auto or one of {', '.join(HIDDEN_READS)}"
        _check(self, "cache.hidden_read", self.hidden_read in (AUTO, *HIDDEN_READS), known)
        known = f" must be one of {', '.join(CACHE_DTYPES)}"
        _check(self, "cache.dtype", self.dtype in CACHE_DTYPES, known)
        try:
            fine = self.rho == AUTO or math.isfinite(float(self.rho))
        except ValueError:
            fine = False
        _check(self, "cache.rho", fine, " must be auto or a number of seconds")


@dataclass(frozen=True)
class EngineConfig:
    """How steps are run.

    Attributes:
        max_model_len: Prompt and output tokens of one request; 0: what the model was trained for.
        attention_backend: auto (triton on NVIDIA GPUs from sm_80 up, tpu on TPUs, numba on CPUs
            that have it, else xla) | xla | numba | triton | tpu | mosaic-gpu (Hopper: as triton,
            but for decodes; where `jaxserve bench gpu` has measured that it is faster).
            triton-interpret, tpu-interpret and mosaic-gpu-interpret run anywhere, very slowly: for
            tests.
        row_buckets: Rows of the decode batches to compile, ascending; empty: powers of two, then
            steps of 256.
        token_buckets: The same of the tokens of other batches.
        compilation_cache_dir: Compiled steps survive a restart here; empty: nothing is kept.
        overlap: Finish a step on the host while the device runs the next one.
        deterministic: Tokens and log-probabilities of every request have the same bits whatever
            else is served, see docs/exactness.md. On CPUs they always have. On GPUs and TPUs all
            steps are of one shape then, that of scheduler.max_batch_tokens, and slower; requests
            may ask for it themselves where it is not set.
        forbid_compile: A compilation after the warm-up is an engine failure.
        stall_s: Seconds without a finished step, though there are requests, after which the engine
            counts as hung: health turns to NOT_SERVING until it goes on. 0: never.
        grammar_compile_s: Seconds of a processor that a grammar may take to be compiled.
        grammar_mib: MiB of memory for the compiled grammars that are kept, a quarter of it for one.
        grammar_mask_ms: Milliseconds of a processor that a grammar may take for each token on
            average, once it has had those of 50 tokens.
        record: File that all that is served is written to, without any text, so that jaxserve
            simulate --replay=FILE can serve it again; empty: nowhere.
        record_mib: At this size, MiB, and at each start of the server, what is there goes on as
            FILE.1, replacing an older one, and FILE begins again. One server a FILE.
    """

    max_model_len: int = 0
    attention_backend: str = "auto"
    row_buckets: tuple[int, ...] = ()
    token_buckets: tuple[int, ...] = ()
    compilation_cache_dir: str = "~/.cache/jaxserve/xla"
    overlap: bool = True
    deterministic: bool = False
    forbid_compile: bool = False
    stall_s: float = 60.0
    grammar_compile_s: float = 2.0
    grammar_mib: float = 128.0
    grammar_mask_ms: float = 1.0
    record: str = ""
    record_mib: int = 64

    def __post_init__(self) -> None:
        _check(self, "engine.stall_s", 0 <= self.stall_s <= _MAX_S, f": must be 0 to {_MAX_S}")
        for name, most in (("compile_s", 600), ("mib", 1 << 20), ("mask_ms", 60_000)):
            field = f"grammar_{name}"
            fine = 0 < getattr(self, field) <= most
            _check(self, f"engine.{field}", fine, f" must be above 0 and at most {most}")
        fine = not self.record or self.record_mib >= 1
        _check(self, "engine.record_mib", fine, " must be at least 1")


@dataclass(frozen=True)
class LoraConfig:
    """Adapters (LoRA) beside the model, which requests name as their model, see docs/lora.md.

    Attributes:
        max_loras: Adapters that may be loaded at once; 0: those of `adapters`. With any, each step
            is compiled once more, for batches in which some row has one, or twice.
        max_rank: Largest rank of an adapter: 8, 16, 32, 64, 128 or 256. There is room for max_loras
            of this one; smaller ones take less of it.
        target_modules: Names of the projections that adapters may change, separated by commas:
            q_proj,v_proj. Empty: all of the layers'. Fewer make steps with adapters faster.
        adapters: Those loaded at the start: a name, and its folder as PEFT saves it
            (adapter_config.json, adapter_model.safetensors). --lora=NAME=FOLDER is the same.
        root: Folder under which those lie that may be loaded over HTTP, /v1/load_lora_adapter;
            empty: none may.
    """

    max_loras: int = 0
    max_rank: int = 16
    target_modules: str = ""
    adapters: Mapping[str, str] = field(default_factory=dict)
    root: str = ""

    def __post_init__(self) -> None:
        fine = 0 <= self.max_loras <= MAX_LORAS
        _check(self, "lora.max_loras", fine, f" must be 0 to {MAX_LORAS}")
        ranks = f" must be one of {', '.join(map(str, LORA_RANKS))}"
        _check(self, "lora.max_rank", self.max_rank in LORA_RANKS, ranks)
        given = len(self.adapters)
        most = self.max_loras or MAX_LORAS
        _require(given <= most, f"lora.adapters: {given} are more than lora.max_loras ({most})")
        for name, path in self.adapters.items():
            like = "has 1 to 128 of A-Z a-z 0-9 . _ : @ + -"
            _require(
                bool(LORA_NAME.fullmatch(name)), f"lora.adapters: a name {like}; got {name!r:.80}"
            )
            _require(bool(path), f"lora.adapters: {name} has no folder")

    @property
    def slots(self) -> int:
        """How many may be loaded at once."""
        return self.max_loras or len(self.adapters)

    @property
    def targets(self) -> tuple[str, ...]:
        """`target_modules`, one by one."""
        return _listed(self.target_modules)


@dataclass(frozen=True)
class MeshConfig:
    """The devices.

    Attributes:
        tensor: Devices that one layer's heads are split over; of several hosts as many on each.
        hosts: Processes, one a host, that serve the model together, see docs/hosts.md; 0: as many
            as the cluster says (TPU pod, SLURM, Kubernetes Job).
        coordinator: HOST:PORT at which the first of them, the leader, listens for the others;
            empty: as the cluster says.
        host_index: Which of them this one is, 0 leads; -1: as the cluster says.
        hosts_wait_s: Seconds in which all of them have to come.
    """

    tensor: int = 1
    hosts: int = 1
    coordinator: str = ""
    host_index: int = -1
    hosts_wait_s: float = 300.0


@dataclass(frozen=True)
class ServedModelConfig:
    """What is served.

    Attributes:
        path: Directory of a checkpoint: Hugging Face (config.json, safetensors) or Orbax; or a GGUF
            file, or a directory with one.
        load_format: auto | safetensors | gguf | orbax | random. random needs no weights:
            config.json under path gives the shape, or preset does.
        preset: A built-in shape for random weights, e.g. opt-125m.
        dtype: Of the weights: auto | float32 | bfloat16 | float16. auto: the checkpoint's; on TPUs
            bfloat16 for float16; on CPUs float32, but bfloat16 for a checkpoint of bfloat16, or
            weights of 8 or 4 bits, where the processor has instructions for it. All else is
            computed in the same, on CPUs in float32, but for what a product with bfloat16 or few
            bits rounds; K and V are kept in the same, on CPUs of float16 and beside hidden caches
            in float32.
        quantization: Of the weights, as they are loaded: int8 | int4 | fp8; int8:group=N and
            int4:group=N,zero have groups of N inputs (int4: 32), with zero points. Embeddings and
            the output table become int8. Empty: as the checkpoint has them. none: those of a GGUF
            file are made wide.
        generation_config: What temperature, top_k, top_p, min_p and repetition_penalty of requests
            that do not say are: auto: what generation_config.json says, or a GGUF file, or
            smollm2's card; none: jaxserve's own defaults.
        seed: Seed of random weights.
        name: What GetServerInfo and the metrics call it; empty: from path or preset.
    """

    path: str = ""
    load_format: str = "auto"
    preset: str = ""
    dtype: str = "auto"
    quantization: str = ""
    generation_config: str = AUTO
    seed: int = 0
    name: str = ""

    def __post_init__(self) -> None:
        formats = f" must be one of {', '.join(LOAD_FORMATS)}"
        _check(self, "model.load_format", self.load_format in LOAD_FORMATS, formats)
        dtypes = f" must be auto or one of {', '.join(DTYPES)}"
        _check(self, "model.dtype", self.dtype in (AUTO, *DTYPES), dtypes)
        read = self.generation_config in (AUTO, NO_DEFAULTS)
        _check(self, "model.generation_config", read, f" must be {AUTO} or {NO_DEFAULTS}")


@dataclass(frozen=True)
class SchedulerConfig:
    """Who is served next.

    Attributes:
        policy: goodput: what lets most requests attain their targets. sarathi: decode first,
            prompts in chunks beside decodes, in order of arrival. vllm: prefill first. jaxserve
            policies lists all. path/to/file.py:name is one of your own, or path/to/file.py
            where that has no other.
        params: The policy's own parameters, as jaxserve policies shows them:
            --config.scheduler.params.watermark=0.05. They may follow its name, too,
            sarathi:watermark=0.05.
        max_batch_tokens: Tokens of one batch. Where policies compute whole prompts (vllm), it must
            hold the longest request.
        max_prefill_tokens: How far prefills may fill it; policies that compute whole prompts do not
            ask.
        max_rows: Requests of one batch, at most max_batch_tokens.
        max_queue: Requests waiting; beyond them calls get RESOURCE_EXHAUSTED. What is kept of them
            and of max_rows may take 1 GiB, which is some hundred thousand of them. Where several
            API keys call, one cannot have all of the places.
        profile: What steps take is learned while serving. This is what is believed before: a
            profile that jaxserve profile wrote; empty: what a few steps take that are timed at the
            first start, in at most 20 s, and kept beside the compiled ones.
        seed: For policies that draw lots.
    """

    policy: str = "goodput"
    params: Mapping[str, Any] = field(default_factory=dict)
    max_batch_tokens: int = 512
    max_prefill_tokens: int = 512
    max_rows: int = 32
    max_queue: int = 256
    profile: str = ""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_batch_tokens", "max_rows"):
            _check(self, f"scheduler.{name}", getattr(self, name) >= 1, " must be at least 1")
        _require(
            self.max_rows <= self.max_batch_tokens,
            f"scheduler.max_rows ({self.max_rows}) must be at most scheduler.max_batch_tokens "
            f"({self.max_batch_tokens}): each request of a batch has at least a token in it",
        )
        _check(self, "scheduler.max_queue", self.max_queue >= 0, " must be at least 0")
        _check(self, "scheduler.seed", 0 <= self.seed <= MAX_SEED, f" must be 0 to {MAX_SEED}")


@dataclass(frozen=True)
class ServerConfig:
    """Where it listens.

    Attributes:
        host: localhost: this machine only. 0.0.0.0: everyone; ::, by IPv6, too. What is open to
            them a line in the log says.
        port: 0: any free one.
        http_port: HTTP, in the shape of OpenAI's API; -1: none, 0: any free port.
        metrics_port: Prometheus; -1: none, 0: any free port.
        api_keys: File of API keys, jaxserve keys writes it, read again when it changes. More may be
            in the environment, JAXSERVE_API_KEYS. With neither, everybody may call.
        tls_cert: TLS on all ports: PEM file of the certificate and those between it and its CA.
        tls_key: PEM file of its key.
        tls_client_ca: PEM file of the CAs whose certificates clients must have (mTLS); empty: they
            need none.
        cors_origins: Origins of pages that may call from a browser, such as https://example.org,
            separated by commas; * is any. Empty: none but the console, and without keys those of
            localhost, which may call and not read.
        allowed_hosts: Host names that HTTP requests may name if the server has no API keys, such as
            gpu1.example or *.example, separated by commas; * allows all. localhost, IP addresses,
            server.host and the machine's own name are always allowed. Any other name is refused,
            because web pages of other sites could use it to reach the server.
        grace_s: Seconds that running requests get after SIGTERM.
        max_calls: Calls that generate, or make vectors, that are open at once, those included that
            wait for a slow reader; beyond them calls get RESOURCE_EXHAUSTED. 0: as many as
            scheduler.max_queue and max_rows.
        refuse_late: Real-time requests with a TTFT or JCT target are refused, with
            RESOURCE_EXHAUSTED, where they are expected to wait for others for more than this share
            of what the target leaves beside their own prompt; those that say serve_late are not. 0:
            nobody is.
        stream_buffer_kib: KiB of output that may wait for the reader of one call; then it ends with
            RESOURCE_EXHAUSTED.
        write_timeout_s: Seconds that the reader may take to read a message; then the same.
        exit_on_failure: Whether the process ends, with exit code 1, once the engine has failed or
            hung, after calls got their INTERNAL, so that whoever supervises it starts it again: on
            | off (it stays, refuses, and is for a health check to end).
        reflection: gRPC server reflection, with which tools such as grpcurl need no proto file.
        batch_dir: Folder of the batches, which survive the server there; only one server at a time,
            on a local disk. auto: ~/.local/state/jaxserve/batches-PORT, none with any free port or
            where that cannot be written.
            Empty: batches are refused.
        batch_in_flight: Requests of batches, each of the n of a line, that the engine gets at once;
            the others wait on the disk. 0: twice scheduler.max_rows, but at most half of
            scheduler.max_queue.
        batch_keep_days: Batches that are over are forgotten after so many days, and those that were
            never whole.
        batch_gib: GiB on the disk, beyond which no more lines are taken.
        batch_key_share: What the batches of one API key may take of it, and its files of as much
            again, where its line in the file of keys does not say.
        batch_key_files: How many batches it may have, and how many files; without keys, all of
            them.
        response_count: Responses of /v1/responses that are kept, in memory, to be asked for and to
            be gone on from. The oldest leave first; a restart forgets all.
        response_mib: MiB that they may take; 0: none is kept.
        response_keep_hours: One is forgotten after so many hours.
        response_key_share: What those of one API key may take of both.
        slo_classes: Targets with a name, which a request may give instead of its own: any of ttft=,
            tbt=, jct= and max_tbt=, tier=best_effort, and value=, what it is worth that they are
            met (1; policy goodput goes by it). Classes of one's own go beside these,
            --config.server.slo_classes.mine=ttft=2s:tbt=50ms. Tokens come at the speed at which
            people read (AccelGen section 1: 0.1875 s each), and at half of it.
        tool_format: How the model writes calls of tools: harmony, hermes, json, llama3, mistral,
            pythonic or qwen. auto: as its chat template says.
        reasoning_format: How the model writes what it thinks before it answers: granite, harmony,
            mistral, seed_oss, think, or none, where that is not told apart from the answer. auto:
            as its chat template says.
        score_template: File with the prompt in which a model scores a pair of texts, with {query}
            and {document} in it, where score_tokens, or a call, has tokens to score by.
        score_tokens: One token or several, separated by commas: a score is how likely the first of
            them is to follow, among these. Empty: it is the cosine of the texts' vectors.
    """

    host: str = "localhost"
    port: int = 50051
    http_port: int = 8000
    metrics_port: int = 9464
    api_keys: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_client_ca: str = ""
    cors_origins: str = ""
    allowed_hosts: str = ""
    grace_s: float = 30.0
    max_calls: int = 0
    refuse_late: float = 0.75
    stream_buffer_kib: int = 1024
    write_timeout_s: float = 30.0
    exit_on_failure: str = "on"
    reflection: bool = True
    batch_dir: str = "auto"
    batch_in_flight: int = 0
    batch_keep_days: float = 7.0
    batch_gib: float = 4.0
    batch_key_share: float = 0.25
    batch_key_files: int = 10_000
    response_count: int = 10_000
    response_mib: int = 256
    response_keep_hours: float = 24.0
    response_key_share: float = 0.25
    slo_classes: Mapping[str, str] = field(default_factory=lambda: dict(SLO_CLASSES))
    tool_format: str = "auto"
    reasoning_format: str = "auto"
    score_template: str = ""
    score_tokens: str = ""

    def __post_init__(self) -> None:
        for name, low, high in (
            ("port", 0, 65535),
            ("http_port", -1, 65535),
            ("metrics_port", -1, 65535),
            ("grace_s", 0, _MAX_S),
            ("stream_buffer_kib", 64, _MAX_KIB),
            ("write_timeout_s", 0.1, _MAX_S),
            ("refuse_late", 0, _MAX_SHARE),
            ("response_mib", 0, _MAX_MIB),
        ):
            fine = low <= getattr(self, name) <= high
            _check(self, f"server.{name}", fine, f": must be {low} to {high}")
        for name, least in (("max_calls", 0), ("batch_key_files", 1), ("response_count", 1)):
            fine = getattr(self, name) >= least
            _check(self, f"server.{name}", fine, f": must be at least {least}")
        for name in ("batch_keep_days", "batch_gib", "response_keep_hours"):
            fine = 0 < getattr(self, name) < math.inf
            _check(self, f"server.{name}", fine, ": must be more than 0")
        share = ": must be more than 0 and at most 1"
        for name in ("batch_key_share", "response_key_share"):
            _check(self, f"server.{name}", 0 < getattr(self, name) <= 1, share)
        fine = self.exit_on_failure in ("on", "off")
        _check(self, "server.exit_on_failure", fine, ": must be on or off")
        tls = bool(self.tls_cert or self.tls_key or self.tls_client_ca)
        for name in ("tls_cert", "tls_key"):
            needs = "is missing; TLS needs server.tls_cert and server.tls_key"
            _require(not tls or bool(getattr(self, name)), f"server.{name}: {needs}")
        for origin in self.origins:
            like = "must be like https://example.org, without a path, or *"
            _require(
                bool(_ORIGIN.fullmatch(origin)), f"server.cors_origins: {like}; got {origin!r}"
            )
        for host in self.names:
            like = "must be a name such as gpu1.example or *.example, without a port, or *"
            _require(bool(_HOST.fullmatch(host)), f"server.allowed_hosts: {like}; got {host!r}")

    @property
    def origins(self) -> tuple[str, ...]:
        """`cors_origins`, one by one."""
        return _listed(self.cors_origins)

    @property
    def names(self) -> tuple[str, ...]:
        """`allowed_hosts`, one by one."""
        return _listed(self.allowed_hosts)


@dataclass(frozen=True)
class TelemetryConfig:
    """What an operator is told, beside the metrics.

    Attributes:
        log_format: text | json: one object per line. docs/operations.md lists the fields.
        request_log: Log one line per call: id, lengths, times, targets and how it ended; nothing of
            what was said.
        log_prompts: In those lines, what was said, too: prompts and texts.
        otlp_endpoint: Where traces go by OTLP over gRPC, http://localhost:4317: a span per call,
            and its queueing, prefill and decode. Empty: nowhere. Needs the extra otel.
    """

    log_format: str = "text"
    request_log: bool = False
    log_prompts: bool = False
    otlp_endpoint: str = ""

    def __post_init__(self) -> None:
        form = f": must be {TEXT} or {JSON}"
        _check(self, "telemetry.log_format", self.log_format in (TEXT, JSON), form)
        _require(
            self.request_log or not self.log_prompts,
            "telemetry.log_prompts: needs telemetry.request_log, whose lines they are in",
        )
        try:
            parts = urlsplit(self.otlp_endpoint)
            fine = parts.scheme in ("http", "https") and bool(parts.hostname and parts.port)
        except ValueError:
            fine = False
        url = ": must be a URL as http://localhost:4317"
        _check(self, "telemetry.otlp_endpoint", fine or not self.otlp_endpoint, url)
