"""The settings, section by section: each field with its default, its meaning and its range.

`--config.SECTION.FIELD=VALUE` sets a field; `--help` shows its description.
"""

from __future__ import annotations

import math
import os
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
TEXT, JSON = "text", "json"  # values of log_format
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
    """Raises ConfigError unless `fine`. path: SECTION.FIELD. must: the requirement, for the
    message."""
    value = getattr(section, path.partition(".")[2])
    _require(fine, f"{path}{must}, got {value!r}")


def _listed(text: str) -> tuple[str, ...]:
    return tuple(each.strip() for each in text.split(",") if each.strip())


@dataclass(frozen=True)
class CacheConfig:
    """The pool of cache blocks.

    Attributes:
        block_size: Tokens that a block holds. 0: 64 on TPUs, 16 elsewhere.
        num_blocks: Blocks in the pool. A block holds K or V of block_size tokens, for all layers.
            0: as many as memory_gib holds. The array is rounded up to one of a few sizes, so that
            pools of similar sizes share compiled steps.
        memory_gib: Size of the pool in GiB. 0: what memory_fraction leaves, but no more than
            max_rows requests of max_model_len can use. On CPUs, which other programs use too: what
            four such requests need, or a sixteenth of the free memory if that is more, but at most
            a quarter of the free memory plus one such request; and no more than at the last start,
            since steps are compiled for the pool's size.
        memory_fraction: Share of the free memory of the device, or of the host, for weights, pool
            and steps together.
        host_gib: Host memory in GiB for caches: checkpoints, for policies that make them, and with
            prefix_caching also blocks that leave the pool (except under bros).
        hidden_read: How hidden caches are read, for policies that use them: auto (absorbed if
            positions are not rotated, else projected; on CPUs projected; no hidden caches where
            they do not help, see docs/internals.md) | absorbed (cheaper decodes, but
            log-probabilities depend on which kind of cache a request has) | projected.
        dtype: Type of K, V and hidden vectors in the pool: auto (that of the activations; on CPUs
            bfloat16 for bfloat16 weights) | float32 | bfloat16 | float16 | fp8 (e4m3) | int8 (with
            a scale for each token and head). The 8-bit types change texts a little, see
            docs/quantization.md.
        prefix_caching: Whether requests reuse K and V that other requests of the same tenant and
            salt have computed.
        share_between_keys: Whether requests also reuse those of other tenants. The time to a first
            token then tells one tenant what others have asked.
        retention: Which unused blocks are kept longest, with parameters: lru (the most recently
            read) | worth (those likely to save the most computing, first of all for real-time
            requests) | ttl (as lru, but programs keep theirs while a tool runs, for the time that
            pays); see docs/reuse.md.
        rho: Seconds that a step takes longer for each token read from a hidden cache instead of
            from K and V: a number, or auto for what scheduler.profile, or the timing at the start,
            says.
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
    """How steps run.

    Attributes:
        max_model_len: Most prompt and output tokens of a request. 0: what the model was trained
            for.
        attention_backend: auto (triton on NVIDIA GPUs from sm_80 up, or on Hopper what the start
            measures to be faster; tpu on TPUs, numba on CPUs that have it, else xla) | xla | numba
            | triton | tpu | mosaic-gpu (Hopper: as triton, except for decodes and prompts) |
            mosaic-gpu-decodes, mosaic-gpu-prompts (except for these alone). triton-interpret,
            tpu-interpret and mosaic-gpu-interpret run anywhere, very slowly, for tests.
        row_buckets: Numbers of rows for which decode steps are compiled, ascending. Empty: powers
            of two, then steps of 256.
        token_buckets: Numbers of tokens for which other steps are compiled, likewise.
        compilation_cache_dir: Folder in which compiled steps survive a restart. Empty: they do not.
        overlap: Finish a step on the host while the device runs the next one.
        deterministic: Give the tokens and log-probabilities of every request the same bits whatever
            else is served, see docs/exactness.md. On CPUs they always have. On GPUs and TPUs all
            steps then have one shape, that of scheduler.max_batch_tokens, and are slower; without
            this, single requests may ask for it.
        forbid_compile: Treat a compilation after the warm-up as a failure of the engine.
        stall_s: Seconds without a finished step, while there are requests, after which the engine
            counts as hung and health is NOT_SERVING until it goes on. 0: never.
        grammar_compile_s: Most CPU seconds for compiling a grammar.
        grammar_mib: MiB of memory for compiled grammars that are kept; one may take a quarter.
        grammar_mask_ms: Most CPU milliseconds that a grammar may take for a token, on average over
            at least 50 tokens.
        record: File to which everything that is served is written, without any text, for jaxserve
            simulate --replay=FILE. Empty: nothing is recorded.
        record_mib: Size in MiB at which FILE, as at each start of the server, becomes FILE.1,
            replacing an older one, and begins again. Only one server may use a FILE.
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
        max_loras: Most adapters loaded at once. 0: the number in `adapters`. If there are any, each
            step is compiled once or twice more, for batches with adapters.
        max_rank: Largest rank of an adapter: 8, 16, 32, 64, 128 or 256. Memory is reserved for
            max_loras adapters of this rank.
        target_modules: Names of the projections that adapters may change, separated by commas:
            q_proj,v_proj. Empty: all projections of the layers. With fewer, steps with adapters are
            faster.
        adapters: Adapters loaded at the start: a name, and a folder as PEFT saves it
            (adapter_config.json, adapter_model.safetensors). --lora=NAME=FOLDER is the same.
        root: Folder whose adapters may be loaded over HTTP, by /v1/load_lora_adapter. Empty: none.
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
        """Most adapters loaded at once."""
        return self.max_loras or len(self.adapters)

    @property
    def targets(self) -> tuple[str, ...]:
        """`target_modules` as a tuple."""
        return _listed(self.target_modules)


@dataclass(frozen=True)
class MeshConfig:
    """The devices.

    Attributes:
        tensor: Devices among which each layer's heads are divided; with several hosts, an equal
            number on each.
        hosts: Processes, one a host, that serve the model together, see docs/hosts.md. 0: as many
            as the cluster says (TPU pod, SLURM, Kubernetes Job).
        coordinator: HOST:PORT at which the leader, host 0, listens for the others. Empty: as the
            cluster says.
        host_index: Index of this host; 0 leads. -1: as the cluster says.
        hosts_wait_s: Seconds within which all hosts must connect.
    """

    tensor: int = 1
    hosts: int = 1
    coordinator: str = ""
    host_index: int = -1
    hosts_wait_s: float = 300.0


@dataclass(frozen=True)
class ServedModelConfig:
    """The model.

    Attributes:
        path: Folder of a Hugging Face (config.json, safetensors) or Orbax checkpoint; or a GGUF
            file, or a folder with one.
        load_format: auto | safetensors | gguf | orbax | random. random needs no weights: the shape
            is that of config.json under path, or of preset.
        preset: A built-in shape for random weights, e.g. opt-125m.
        dtype: Type of the weights: auto | float32 | bfloat16 | float16. auto: the checkpoint's; on
            TPUs bfloat16 instead of float16; on CPUs float32, except that checkpoints of bfloat16,
            and weights of 8 or 4 bits, take bfloat16 if the processor has instructions for it.
            Activations have the same type; on CPUs they are float32, rounded to bfloat16 only where
            they are multiplied. K and V have the same type too; on CPUs, float16 and engines with
            hidden caches keep them in float32.
        quantization: How weights are quantised when they are loaded: int8 | int4 | fp8;
            int8:group=N and int4:group=N,zero have groups of N inputs (int4: 32), with zero points.
            Embeddings and the output table become int8. Empty: as the checkpoint has them. none:
            the weights of a GGUF file are dequantised.
        generation_config: Defaults of temperature, top_k, top_p, min_p and repetition_penalty.
            auto: from generation_config.json, the GGUF file, or smollm2's card; none: jaxserve's
            own.
        seed: Seed of random weights.
        name: The model's name in GetServerInfo and metrics. Empty: from path or preset.
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
        two = f"model.preset={self.preset} and model.path={self.path} are two models"
        _require(not (self.path and self.preset), f"{two}; --model= leaves the preset")
        dtypes = f" must be auto or one of {', '.join(DTYPES)}"
        _check(self, "model.dtype", self.dtype in (AUTO, *DTYPES), dtypes)
        read = self.generation_config in (AUTO, NO_DEFAULTS)
        _check(self, "model.generation_config", read, f" must be {AUTO} or {NO_DEFAULTS}")

    @property
    def served_name(self) -> str:
        """What the model is called: as configured, else by its path or preset."""
        return self.name or os.path.basename(self.path.rstrip("/")) or self.preset


@dataclass(frozen=True)
class SchedulerConfig:
    """Which requests are served next.

    Attributes:
        policy: goodput: maximises the requests that attain their targets. sarathi: decodes first,
            with prompts in chunks beside them, in order of arrival. vllm: prefills first. jaxserve
            policies lists all. path/to/file.py:name is a policy of your own, or path/to/file.py if
            the file has only one.
        params: The policy's own parameters, as jaxserve policies shows them:
            --config.scheduler.params.watermark=0.05. They may also follow the name:
            sarathi:watermark=0.05.
        max_batch_tokens: Most tokens of a batch. Policies that compute whole prompts (vllm) need
            room for the longest request.
        max_prefill_tokens: Most prefill tokens of a batch; ignored by policies that compute whole
            prompts.
        max_rows: Most requests of a batch; at most max_batch_tokens.
        max_queue: Most waiting requests; further calls get RESOURCE_EXHAUSTED. What the server
            keeps of waiting and running requests may take 1 GiB, enough for some hundred thousand.
            If several API keys call, none can take all places.
        profile: File of step times, written by jaxserve profile, with which the cost model starts;
            it learns while serving. Empty: a few steps are timed at the first start, in at most 20
            s, and the result is kept beside the compiled steps.
        seed: Seed of policies that draw random numbers.
        infer_programs: Whether calls that name no program belong to the one that they continue, by
            tool calls, previous_response_id, the prompt's beginning or prompt_cache_key; false:
            only those that name one belong to one.
        program_silence_s: Seconds without a call after which a program counts as ended; longer if
            its tools take longer. 1 to 1,000,000.
    """

    policy: str = "goodput"
    params: Mapping[str, Any] = field(default_factory=dict)
    max_batch_tokens: int = 512
    max_prefill_tokens: int = 512
    max_rows: int = 32
    max_queue: int = 256
    profile: str = ""
    seed: int = 0
    infer_programs: bool = True
    program_silence_s: float = 300.0

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
        fits = 1 <= self.program_silence_s <= 1e6
        _check(self, "scheduler.program_silence_s", fits, " must be 1 to 1,000,000")


@dataclass(frozen=True)
class ServerConfig:
    """The server's ports, access and limits.

    Attributes:
        host: Address to listen on. localhost: this machine only. 0.0.0.0: everyone; ::, by IPv6
            too. The log says what is open to whom.
        port: gRPC. 0: any free port.
        http_port: HTTP, in the shape of OpenAI's API. -1: none, 0: any free port.
        metrics_port: Prometheus. -1: none, 0: any free port.
        api_keys: File of API keys, written by jaxserve keys and read again when it changes. More
            keys may be in the environment variable JAXSERVE_API_KEYS. Without any, everybody may
            call.
        tls_cert: PEM file of the certificate and its intermediate certificates; turns on TLS for
            all ports.
        tls_key: PEM file of its private key.
        tls_client_ca: PEM file of the CAs that sign client certificates (mTLS). Empty: clients need
            none.
        cors_origins: Origins of web pages that may call from a browser, such as
            https://example.org, separated by commas; * allows any. Empty: only the console; without
            API keys pages of localhost may also call, but not read the answer.
        allowed_hosts: Host names that HTTP requests may name if the server has no API keys, such as
            gpu1.example or *.example, separated by commas; * allows all. localhost, IP addresses,
            server.host and the machine's own name are always allowed. Any other name is refused,
            because web pages of other sites could use it to reach the server.
        grace_s: Seconds that running requests get after SIGTERM.
        max_calls: Most calls open at once that generate or make vectors, including those that wait
            for a slow reader; further calls get RESOURCE_EXHAUSTED. 0: scheduler.max_queue plus
            max_rows.
        refuse_late: Refuse a real-time request, with RESOURCE_EXHAUSTED, if it is expected to wait
            for others for more than this share of what its TTFT or JCT target leaves beside its own
            prompt. Requests that say serve_late are served. 0: refuse none.
        stream_buffer_kib: KiB of output that may wait for a call's reader; beyond that the call
            ends with RESOURCE_EXHAUSTED.
        write_timeout_s: Seconds that the reader may take for one message; beyond that likewise.
        exit_on_failure: What to do once the engine has failed or hung, after open calls have got
            INTERNAL: on: exit with code 1, for a supervisor to start the server again | off: stay,
            refuse calls, and leave it to health checks.
        reflection: gRPC server reflection, with which tools such as grpcurl need no proto file.
        batch_dir: Folder of batches, which survive a restart. It must be on a local disk and belong
            to one server. auto: ~/.local/state/jaxserve/batches-PORT; no batches if any port is
            chosen freely or the folder cannot be written. Empty: batches are refused.
        batch_in_flight: Most requests of batches in the engine at once, counting each of the n of a
            line; the others wait on disk. 0: twice scheduler.max_rows, but at most half of
            scheduler.max_queue.
        batch_keep_days: Days after which batches that have ended, or were never complete, are
            deleted.
        batch_gib: GiB on disk beyond which no more lines are accepted.
        batch_key_share: Share of batch_gib for the batches of one API key, and as much again for
            its files, if the file of keys does not say otherwise.
        batch_key_files: Most batches, and most files, of one API key; without keys, of all callers
            together.
        response_count: Most responses of /v1/responses that are kept in memory, to be retrieved or
            continued. The oldest are dropped first; a restart drops all.
        response_mib: MiB that they may take. 0: none is kept.
        response_keep_hours: Hours after which a response is dropped.
        response_key_share: Share of both for the responses of one API key.
        slo_classes: Named targets, which a request may use instead of its own: any of ttft=, tbt=,
            jct= and max_tbt=, tier=best_effort, value=, what meeting them is worth (1; used by
            policy goodput), and program=, the deadline of programs that give none. Your own classes
            are added to these:
            --config.server.slo_classes.mine=ttft=2s:tbt=50ms. The defaults' tokens come at reading
            speed (AccelGen section 1: 0.1875 s each), or at half of it.
        tool_format: How the model writes tool calls: harmony, hermes, json, llama3, mistral,
            pythonic or qwen. auto: as its chat template says.
        reasoning_format: How the model writes its reasoning before the answer: granite, harmony,
            mistral, seed_oss, think, or none, if reasoning and answer are not told apart. auto: as
            its chat template says.
        score_template: File with the prompt for scoring a pair of texts, with {query} and
            {document} in it, used where score_tokens, or the call, names tokens.
        score_tokens: A token, or several separated by commas. The score is the probability that the
            first of them comes next, among these. Empty: the cosine of the texts' vectors.
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
        """`cors_origins` as a tuple."""
        return _listed(self.cors_origins)

    @property
    def names(self) -> tuple[str, ...]:
        """`allowed_hosts` as a tuple."""
        return _listed(self.allowed_hosts)


@dataclass(frozen=True)
class TelemetryConfig:
    """Logs and traces.

    Attributes:
        log_format: text | json, one object a line. docs/operations.md lists the fields.
        request_log: Log one line for each call: id, lengths, times, targets and outcome, but no
            text.
        log_prompts: Add prompts and output texts to those lines.
        otlp_endpoint: URL to which traces are sent by OTLP over gRPC, http://localhost:4317: a span
            for each call, and spans of its queueing, prefill and decode. Empty: none are sent.
            Needs the extra otel.
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
