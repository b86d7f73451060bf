"""Refuses requests with wrong targets where they come in, before vLLM's engine has them."""

from __future__ import annotations

from typing import Any

from vllm.v1.sample.logits_processor import LogitsProcessor

from jaxserve.vllm.settings import Settings, targets_of


class Targets(LogitsProcessor):
    """For `--logits-processors jaxserve.vllm:Targets`: vLLM asks these for their opinion of a
    request's arguments, and answers a ValueError with status 400. It changes no logits.

    Args:
        vllm_config, device, is_pin_memory: As vLLM passes them; none is needed.
    """

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        pass

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Raises InvalidRequest, a ValueError, that names a wrong target."""
        targets_of(sampling_params.extra_args, Settings())

    def is_argmax_invariant(self) -> bool:
        """It is, so greedy batches skip it."""
        return True

    def apply(self, logits: Any) -> Any:
        """The logits as they are."""
        return logits

    def update_state(self, batch_update: Any) -> None:
        """There is no state."""
