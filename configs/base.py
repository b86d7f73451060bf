"""Every field there is, with its default; a preset starts from here and changes some.

Not a preset of its own: it names no model. Any field can be set on the command line,
`--config.scheduler.max_rows=16`; `jaxserve serve --help` shows what is said of each here.
"""

from typing import Any

from ml_collections import ConfigDict

_SLO_CLASSES = {
    "interactive": "ttft=1s:tbt=187.5ms",
    "standard": "ttft=5s:tbt=375ms",
    "offline": "jct=600s:tier=best_effort",
}


def get_config() -> ConfigDict:
    """What `jaxserve serve`, the bench and the notebook take."""
    return ConfigDict(
        {
            "model": _model(),
            "cache": _cache(),
            "scheduler": _scheduler(),
            "engine": _engine(),
            "mesh": _mesh(),
            "server": _server(),
            "telemetry": _telemetry(),
        }
    )


def _model() -> dict[str, Any]:
    """What is served."""
    return {
        # Directory of a checkpoint: Hugging Face (config.json, safetensors) or Orbax.
        "path": "",
        # auto | safetensors | orbax | random. random needs no weights: config.json under
        # path gives the shape, or preset does.
        "load_format": "auto",
        # A built-in shape for random weights, e.g. opt-125m.
        "preset": "",
        # Of the weights: auto | float32 | bfloat16 | float16. auto: the checkpoint's; on TPUs
        # bfloat16 for float16; on CPUs float32, but bfloat16 for a checkpoint of bfloat16 where
        # the processor has instructions for it. All else is computed in the same, on CPUs in
        # float32; K and V are kept in the same, on CPUs of float16 and beside hidden caches in
        # float32.
        "dtype": "auto",
        # Seed of random weights.
        "seed": 0,
        # What GetServerInfo and the metrics call it; empty: from path or preset.
        "name": "",
    }


def _cache() -> dict[str, Any]:
    """The pool of blocks."""
    return {
        # Tokens a block holds. 0: 64 on TPUs, 16 elsewhere.
        "block_size": 0,
        # Blocks of the pool; each holds K or V of block_size tokens, for all layers.
        # 0: as many as memory_gib holds. Its array has a few more, one of few sizes, so that not
        # each number has steps of its own to compile.
        "num_blocks": 0,
        # Size of the pool; 0: what memory_fraction leaves, as far as max_rows requests of
        # max_model_len can use it. On CPUs, whose memory others need, too, an eighth to a quarter
        # of it, one of few sizes, for each of which steps are compiled, or less, if the last start
        # had less; but room for four such requests.
        "memory_gib": 0.0,
        # Of the memory that is free on the device, or the host, what weights, pool and steps take.
        "memory_fraction": 0.9,
        # Host memory for checkpoints of caches, for policies that make them.
        "host_gib": 0.0,
        # How policies with hidden caches have them read: auto (absorbed where positions are
        # not rotated, else projected) | absorbed | projected.
        "hidden_read": "auto",
        # Seconds that a step takes longer for a token of a hidden cache than for one of K
        # and V: a number, or auto for what scheduler.profile, or the timing at the start, says.
        "rho": "auto",
    }


def _scheduler() -> dict[str, Any]:
    """Who is served next."""
    return {
        # vllm: prefill first. sarathi: decode first, prompts in chunks beside decodes.
        # jaxserve policies lists all. path/to/file.py:name is one of your own, or
        # path/to/file.py where that has no other.
        "policy": "sarathi",
        # The policy's own parameters, as jaxserve policies shows them:
        # --config.scheduler.params.watermark=0.05. They may follow its name, too,
        # sarathi:watermark=0.05.
        "params": {},
        # Tokens of one batch. Where policies compute whole prompts (vllm), it must hold the longest
        # request.
        "max_batch_tokens": 512,
        # How far prefills may fill it; policies that compute whole prompts do not ask.
        "max_prefill_tokens": 512,
        # Requests of one batch, at most max_batch_tokens.
        "max_rows": 32,
        # Requests waiting; beyond them calls get RESOURCE_EXHAUSTED. What is kept of them and of
        # max_rows may take 1 GiB, which is some hundred thousand of them. Where several API keys
        # call, one cannot have all of the places.
        "max_queue": 256,
        # What steps take is learned while serving. This is what is believed before: a profile
        # that jaxserve profile wrote; empty: what a few steps take that are timed at
        # the first start, in at most 20 s, and kept beside the compiled ones.
        "profile": "",
        # For policies that draw lots.
        "seed": 0,
    }


def _engine() -> dict[str, Any]:
    """How steps are run."""
    return {
        # Prompt and output tokens of one request; 0: what the model was trained for.
        "max_model_len": 0,
        # auto (triton on NVIDIA GPUs from sm_80 up, tpu on TPUs, numba on CPUs that have it, else
        # xla) | xla | numba | triton | tpu | mosaic-gpu (Hopper: as triton, but for decodes; where
        # `jaxserve bench gpu` has measured that it is faster). triton-interpret,
        # tpu-interpret and mosaic-gpu-interpret run anywhere, very slowly: for tests.
        "attention_backend": "auto",
        # Rows of the decode batches to compile, ascending; empty: powers of two, then steps of 256.
        "row_buckets": (),
        # The same of the tokens of other batches.
        "token_buckets": (),
        # Compiled steps survive a restart here; empty: nothing is kept.
        "compilation_cache_dir": "~/.cache/jaxserve/xla",
        # Finish a step on the host while the device runs the next one.
        "overlap": True,
        # A compilation after the warm-up is an engine failure.
        "forbid_compile": False,
        # Seconds without a finished step, though there are requests, after which the engine counts
        # as hung: health turns to NOT_SERVING until it goes on. 0: never.
        "stall_s": 60.0,
        # File that all that is served is written to, without any text, so that
        # jaxserve simulate --replay=FILE can serve it again; empty: nowhere.
        "record": "",
        # At this size, MiB, and at each start of the server, what is there goes on as FILE.1,
        # replacing an older one, and FILE begins again. One server a FILE.
        "record_mib": 64,
    }


def _mesh() -> dict[str, Any]:
    """The devices."""
    return {
        # Devices that one layer's heads are split over; of several hosts as many on each.
        "tensor": 1,
        # Processes, one a host, that serve the model together, see docs/hosts.md; 0: as many as the
        # cluster says (TPU pod, SLURM, Kubernetes Job).
        "hosts": 1,
        # HOST:PORT at which the first of them, the leader, listens for the others; empty: as the
        # cluster says.
        "coordinator": "",
        # Which of them this one is, 0 leads; -1: as the cluster says.
        "host_index": -1,
        # Seconds in which all of them have to come.
        "hosts_wait_s": 300.0,
    }


def _server() -> dict[str, Any]:
    """Where it listens."""
    return {
        # localhost: this machine only. 0.0.0.0: everyone; what is open to them a line in the log
        # says.
        "host": "localhost",
        # 0: any free one.
        "port": 50051,
        # HTTP, in the shape of OpenAI's API; -1: none, 0: any free port.
        "http_port": 8000,
        # Prometheus; -1: none, 0: any free port.
        "metrics_port": 9464,
        # File of API keys, jaxserve keys writes it, read again when it changes. More may
        # be in the environment, JAXSERVE_API_KEYS. With neither, everybody may call.
        "api_keys": "",
        # TLS on all ports: PEM file of the certificate and those between it and its CA.
        "tls_cert": "",
        # PEM file of its key.
        "tls_key": "",
        # PEM file of the CAs whose certificates clients must have (mTLS); empty: they need none.
        "tls_client_ca": "",
        # Origins of pages that may call from a browser, such as https://example.org, separated by
        # commas; * is any. Empty: none but the console, and without keys those of localhost, which
        # may call and not read.
        "cors_origins": "",
        # Names by which the server is called over HTTP where it has no API keys: gpu1.example,
        # *.example, separated by commas; * is any. localhost, addresses, host and the machine's own
        # name are always some. Pages of other sites could call under any other name.
        "allowed_hosts": "",
        # Seconds that running requests get after SIGTERM.
        "grace_s": 30.0,
        **_overload(),
        # Whether the process ends, with exit code 1, once the engine has failed or hung, after
        # calls got their INTERNAL, so that whoever supervises it starts it again: on | off (it
        # stays, refuses, and is for a health check to end).
        "exit_on_failure": "on",
        # gRPC server reflection, with which tools such as grpcurl need no proto file.
        "reflection": True,
        # Folder of the batches, which survive the server there; only one server at a time, on a
        # local disk. auto: ~/.local/state/jaxserve/batches-PORT, none with any free port. Empty:
        # batches are refused.
        "batch_dir": "auto",
        # Requests of batches, each of the n of a line, that the engine gets at once; the others
        # wait on the disk. 0: twice scheduler.max_rows, but at most half of scheduler.max_queue.
        "batch_in_flight": 0,
        # Batches that are over are forgotten after so many days, and those that were never whole.
        "batch_keep_days": 7.0,
        # GiB on the disk, beyond which no more lines are taken.
        "batch_gib": 4.0,
        # What the batches of one API key may take of it, and its files of as much again, where its
        # line in the file of keys does not say.
        "batch_key_share": 0.25,
        # How many batches it may have, and how many files; without keys, all of them.
        "batch_key_files": 10_000,
        # Targets with a name, which a request may give instead of its own: any of ttft=, tbt= and
        # jct=, and tier=best_effort. Classes of one's own go beside these,
        # --config.server.slo_classes.mine=ttft=2s:tbt=50ms. Tokens come at the speed at which
        # people read (AccelGen section 1: 0.1875 s each), and at half of it.
        "slo_classes": dict(_SLO_CLASSES),
    }


def _telemetry() -> dict[str, Any]:
    """What an operator is told, beside the metrics."""
    return {
        # text | json: one object a line. docs/operations.md lists the fields.
        "log_format": "text",
        # Log one line a call: id, lengths, times, targets and how it ended; nothing of what was
        # said.
        "request_log": False,
        # In those lines, what was said, too: prompts and texts.
        "log_prompts": False,
        # Where traces go by OTLP over gRPC, http://localhost:4317: a span a call, and its queueing,
        # prefill and decode. Empty: nowhere. pip install 'jaxserve[otel]'.
        "otlp_endpoint": "",
    }


def _overload() -> dict[str, Any]:
    """What is refused, or ended, so that those who are served are served well."""
    return {
        # Generate calls that are open at once, those included that wait for a slow reader; beyond
        # them calls get RESOURCE_EXHAUSTED. 0: as many as scheduler.max_queue and max_rows.
        "max_calls": 0,
        # Real-time requests with a TTFT or JCT target are refused, with RESOURCE_EXHAUSTED, where
        # they are expected to wait for others for more than this share of what the target leaves
        # beside their own prompt; those that say serve_late are not. 0: nobody is.
        "refuse_late": 0.75,
        # KiB of output that may wait for the reader of one call; then it ends with
        # RESOURCE_EXHAUSTED.
        "stream_buffer_kib": 1024,
        # Seconds that the reader may take to read a message; then the same.
        "write_timeout_s": 30.0,
    }
