"""Suggests flags for unknown ones, such as those of other servers."""

from __future__ import annotations

import difflib
from collections.abc import Collection

# Flags of vLLM's and SGLang's servers that differ from our names. Flags with the name of a field,
# such as --max-model-len, are found by that.
_RIVALS = {
    "tensor_parallel_size": "config.mesh.tensor",
    "tp_size": "config.mesh.tensor",
    "tp": "config.mesh.tensor",
    "nnodes": "config.mesh.hosts",
    "node_rank": "config.mesh.host_index",
    "dist_init_addr": "config.mesh.coordinator",
    "master_addr": "config.mesh.coordinator",
    "model_path": "model",
    "served_model_name": "config.model.name",
    "context_length": "config.engine.max_model_len",
    "gpu_memory_utilization": "config.cache.memory_fraction",
    "mem_fraction_static": "config.cache.memory_fraction",
    "kv_cache_memory_bytes": "config.cache.memory_gib",
    "num_gpu_blocks_override": "config.cache.num_blocks",
    "kv_cache_dtype": "config.cache.dtype",
    "dtype": "config.model.dtype",
    "page_size": "config.cache.block_size",
    "swap_space": "config.cache.host_gib",
    "max_num_seqs": "config.scheduler.max_rows",
    "max_running_requests": "config.scheduler.max_rows",
    "max_num_batched_tokens": "config.scheduler.max_batch_tokens",
    "chunked_prefill_size": "config.scheduler.max_prefill_tokens",
    "max_prefill_tokens": "config.scheduler.max_prefill_tokens",
    "max_queued_requests": "config.scheduler.max_queue",
    "scheduling_policy": "policy",
    "schedule_policy": "policy",
    "api_key": "config.server.api_keys",
    "ssl_certfile": "config.server.tls_cert",
    "ssl_keyfile": "config.server.tls_key",
    "ssl_ca_certs": "config.server.tls_client_ca",
    "allowed_origins": "config.server.cors_origins",
    "enable_log_requests": "request_log",
    "log_requests": "request_log",
    "enable_lora": "config.lora.max_loras",
    "max_loras_per_batch": "config.lora.max_loras",
    "max_lora_rank": "config.lora.max_rank",
    "lora_modules": "lora",
    "lora_paths": "lora",
    "lora_target_modules": "config.lora.target_modules",
    "otlp_traces_endpoint": "otlp_endpoint",
}


def hint(flag: str, known: Collection[str]) -> str:
    """The flags that may be meant, as the end of a line.

    Args:
        flag: its name without leading dashes.
        known: all names, including `config.SECTION.FIELD`.

    Returns:
        `; did you mean --NAME?`, with two names if two fields have this name; if no name is close,
        a hint at --help.
    """
    name = flag.replace("-", "_")
    ours = _RIVALS.get(name)
    names = [ours] if ours else [full for full in known if full.rpartition(".")[2] == name]
    names = names or difflib.get_close_matches(name, known, n=1)
    if not names:
        last = {full.rpartition(".")[2]: full for full in known}
        names = [last[full] for full in difflib.get_close_matches(name, last, n=1)]
    if not names:
        return "; --help says what there is"
    return f"; did you mean {' or '.join('--' + full for full in names)}?"
