"""What a server says of itself: its model, and by its metrics its cache and its rows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from jaxserve.bench.http_target import Address
from jaxserve.bench.load_target import BenchError
from jaxserve.twin.recordings import ServerFacts

MOST = 1 << 31
"""Most tokens or rows that a server is believed to have."""
POLICY = "sarathi_pc"
"""Decodes first, then prompts in order of arrival as far as a step has room: vLLM, SGLang and
llama.cpp by default."""


def facts_of(address: Address, model: str, **known: int | None) -> ServerFacts:
    """What the server at this address says.

    Args:
        address: Where it is.
        model: The model to take; "" for its first.
        **known: Numbers of `ServerFacts` that count instead of its own, None for those that do not.

    Raises:
        BenchError: Nobody answers there, or there is no such model.
    """
    listed = address.get("/v1/models")
    if listed is None:
        raise BenchError(f"{address.base.geturl()}/v1/models: there is nothing")
    entry = _model(listed, model)
    metrics, props = address.get("/metrics"), address.get("/props")
    found, source = of_metrics((metrics or b"").decode(errors="replace"))
    if not found and props is not None:
        found, source = of_props(props)
    found = {name: value for name, value in found.items() if 0 < value <= MOST}
    longest = entry.get("max_model_len")
    if isinstance(longest, int) and 0 < longest <= MOST:
        found.setdefault("max_model_len", longest)
    found |= {name: value for name, value in known.items() if value is not None}
    return ServerFacts(str(entry.get("id", model)), POLICY, source=source, **found)


def of_metrics(text: str) -> tuple[dict[str, int], str]:
    """Numbers of `ServerFacts` in the metrics of vLLM or SGLang, and whose they are."""
    try:
        samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
    except ValueError:
        return {}, ""
    for name, read in _METRICS.items():
        mine = [one for one in samples if one.name.startswith(name)]
        try:
            found = read(mine)
        except (ValueError, OverflowError):  # a number that is none
            continue
        if found:
            return found, name
    return {}, ""


def of_props(body: bytes) -> tuple[dict[str, int], str]:
    """The same of llama.cpp's /props."""
    props = _object(body)
    slots, settings = props.get("total_slots"), props.get("default_generation_settings")
    each = settings.get("n_ctx") if isinstance(settings, dict) else None
    if not (isinstance(slots, int) and isinstance(each, int) and min(slots, each) > 0):
        return {}, ""
    found = {"max_rows": slots, "max_model_len": each, "kv_tokens": slots * each}
    return found, "llama.cpp"


def _vllm(samples: Iterable[Any]) -> dict[str, int]:
    for one in samples:
        if one.name == "vllm:cache_config_info":
            blocks, size = one.labels.get("num_gpu_blocks"), one.labels.get("block_size")
            if str(blocks).isdigit() and str(size).isdigit():
                return {"kv_tokens": int(blocks) * int(size)}
    return {}


def _sglang(samples: Iterable[Any]) -> dict[str, int]:
    pools = [int(one.value) for one in samples if one.name == "sglang:max_total_num_tokens"]
    return {"kv_tokens": pools[0]} if pools and pools[0] > 0 else {}


_METRICS = {"vllm:": _vllm, "sglang:": _sglang}


def _model(listed: bytes, name: str) -> Mapping[str, Any]:
    found = _object(listed).get("data")
    models = [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
    if not name and models:
        return models[0]
    for one in models:
        if one.get("id") == name:
            return one
    there = ", ".join(str(one.get("id")) for one in models[:8])
    raise BenchError(f"--model={name}: the server has {there or 'none'}")


def _object(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
