"""The experts of a DeepSeek's config.json, and of models that have the same fields: first layers
without experts, then routed ones in groups, and one or more that all tokens go to, which are one of
as many widths (DeepSeek-AI 2024, section 2.1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models import hf as fields
from jaxserve.models.base import Experts

Hf = Mapping[str, Any]  # a config.json, with defaults for missing fields
_GREEDY, _BY_GROUP = "greedy", "group_limited_greedy"


def by_softmax(hf: Hf) -> Experts | None:
    """The experts of DeepSeek V2; None if no layer has any. Raises ValueError, which names a
    field."""
    fields.one_of(hf, "scoring_func", ("softmax",))
    if fields.flag(hf, "norm_topk_prob", False):  # transformers ignores it, other code does not
        raise ValueError("config.json: norm_topk_prob is not supported with deepseek_v2")
    groups = (1, 1)
    if fields.one_of(hf, "topk_method", (_GREEDY, _BY_GROUP)) == _BY_GROUP:
        groups = _groups(hf)
    return _experts(hf, groups, normalised=False, sigmoid=False)


def by_sigmoid(hf: Hf) -> Experts | None:
    """The same of DeepSeek V3, see `Experts.sigmoid`, of Kimi K2 and GLM-4.5."""
    fields.one_of(hf, "scoring_func", ("sigmoid",))
    fields.one_of(hf, "topk_method", ("noaux_tc",))
    groups, num_experts = _groups(hf), fields.positive_int(hf, "n_routed_experts")
    if 1 < groups[0] == num_experts:
        raise ValueError(
            f"config.json: n_group {groups[0]} must leave two of n_routed_experts ({num_experts}) "
            "to each group, by whose best two it is chosen"
        )
    normalised = fields.flag(hf, "norm_topk_prob", True)
    return _experts(hf, groups, normalised=normalised, sigmoid=True)


def _groups(hf: Hf) -> tuple[int, int]:
    """The number of groups, and those that a token's experts may come from."""
    num_experts = fields.positive_int(hf, "n_routed_experts")
    groups = fields.positive_int(hf, "n_group")
    per_token = fields.positive_int(hf, "topk_group")
    if num_experts % groups or per_token > groups:
        raise ValueError(
            f"config.json: n_group {groups} must divide n_routed_experts ({num_experts}), and "
            f"be at least topk_group ({per_token})"
        )
    return groups, per_token


def _experts(hf: Hf, groups: tuple[int, int], *, normalised: bool, sigmoid: bool) -> Experts | None:
    if hf.get("moe_layer_freq", 1) != 1:
        what = f"must be 1, got {fields.shown(hf['moe_layer_freq'])}"
        raise ValueError(f"config.json: moe_layer_freq {what}")
    dense = fields.layer_count(hf, "first_k_dense_replace")
    num_experts = fields.positive_int(hf, "n_routed_experts")
    experts_per_token = fields.positive_int(hf, "num_experts_per_tok")
    choice = num_experts // groups[0] * groups[1]
    if experts_per_token > choice:
        raise ValueError(
            f"config.json: num_experts_per_tok must be at most {choice}, the experts that there "
            f"are to choose from, got {experts_per_token}"
        )
    if dense >= fields.positive_int(hf, "num_hidden_layers"):
        return None
    d_ff = fields.positive_int(hf, "moe_intermediate_size")
    return Experts(
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        d_ff=d_ff,
        shared_d_ff=d_ff * fields.positive_int(hf, "n_shared_experts"),
        normalised=normalised,
        scale=fields.number(hf, "routed_scaling_factor"),
        sigmoid=sigmoid,
        groups=groups[0],
        groups_per_token=groups[1],
        dense_layers=tuple(range(dense)),
    )
