"""What users say: the policy and the usual targets at the start, its own targets with a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxserve.sched.policy import Policy
from jaxserve.sched.registry import make_policy
from jaxserve.sched.request import SLO, InvalidRequest, Tier

KEY = "jaxserve"  # of `--additional-config`
TARGETS = {"ttft_ms": "ttft", "tbt_ms": "tbt", "jct_ms": "jct"}
TIERS = {tier.name.lower(): tier for tier in Tier}
MOST_MS = 1e12
_NOTHING: dict[str, Any] = {}
_NO_TARGETS = SLO()


@dataclass(frozen=True)
class Settings:
    """The object `jaxserve` of vLLM's `--additional-config`.

    Attributes:
        policy: The policy's name, with parameters or not.
        slo: Targets of requests, as far as these neither say their own nor are best-effort.
        tier: Tier of requests that do not say theirs; None: real-time with targets, best-effort
            without any.
    """

    policy: str = "goodput"
    slo: SLO = _NO_TARGETS
    tier: Tier | None = None

    @classmethod
    def read(cls, additional: Any) -> Settings:
        """Reads `VllmConfig.additional_config`. ValueError names what is wrong."""
        said = additional.get(KEY, _NOTHING) if isinstance(additional, Mapping) else _NOTHING
        if not isinstance(said, Mapping):
            raise ValueError(f"additional config {KEY}: must be an object, got {said!r:.80}")
        known = ("policy", *TARGETS, "tier")
        if unknown := sorted(said.keys() - set(known)):
            raise ValueError(
                f"additional config {KEY}: there is no {unknown[0]!r}. Known: {', '.join(known)}"
            )
        policy = said.get("policy", cls.policy)
        if not isinstance(policy, str):
            raise ValueError(f"additional config {KEY}: policy must be a name, got {policy!r:.80}")
        try:
            return cls(policy, _slo(said), _tier(said, cls.tier))
        except InvalidRequest as error:
            raise ValueError(f"additional config {KEY}: {error}") from None


def targets_of(said: Mapping[str, Any] | None, usual: Settings) -> tuple[SLO, Tier]:
    """The targets and the tier of a request. InvalidRequest names what is wrong with them.

    Args:
        said: Its `vllm_xargs` or `extra_args`, which may have others' arguments, too.
        usual: What counts where it says nothing.
    """
    said = said or _NOTHING
    own, tier = _slo(said), _tier(said, usual.tier)
    if tier is not Tier.BEST_EFFORT:
        kept = {name: getattr(own, name) or getattr(usual.slo, name) for name in TARGETS.values()}
        own = SLO(**kept)
    return own, (
        Tier.BEST_EFFORT if own == _NO_TARGETS else Tier.REALTIME
    ) if tier is None else tier


def runnable(name: str, *, chunked: bool, whole: bool) -> Policy:
    """Makes the policy. ValueError if it needs what vLLM does not have.

    Args:
        name: Its name.
        chunked: Whether vLLM computes prompts in chunks.
        whole: Whether a batch may hold the longest prompt.
    """
    policy = make_policy(name)
    own_moves = not policy.adapts
    needs_whole = not (policy.chunked or whole)
    for there, what in (
        (policy.hypothetical, "knows how long outputs will be"),
        (policy.two_sided, "fills blocks from both sides"),
        (not policy.counts_blocks, "asks which block is whose"),
        (policy.hybrid_cache and own_moves, "has hidden caches"),
        (policy.moves_cache and own_moves, "moves caches to host memory"),
        (policy.speculates, "plans drafts, which are vLLM's own here"),
        (policy.keeps_programs, "counts on caches that stay while tools run"),
        (policy.chunked and not chunked, "cuts prompts, which --no-enable-chunked-prefill forbids"),
        (needs_whole, "needs --max-num-batched-tokens of at least --max-model-len"),
    ):
        if there:
            raise ValueError(f"policy {name!r} cannot run inside vLLM so: it {what}")
    return policy


def _slo(said: Mapping[str, Any]) -> SLO:
    found = {}
    for name, target in TARGETS.items():
        if (value := said.get(name)) is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidRequest(name, f"must be a number of milliseconds, got {value!r:.80}")
        if not 0 < value <= MOST_MS:
            limits = f"more than 0 and at most {MOST_MS:g}"
            raise InvalidRequest(name, f"must be {limits} milliseconds, got {value!r:.80}")
        found[target] = value / 1000
    return SLO(**found)


def _tier(said: Mapping[str, Any], usual: Tier | None) -> Tier | None:
    name = said.get("tier")
    if name is None:
        return usual
    if not isinstance(name, str) or name not in TIERS:
        raise InvalidRequest("tier", f"must be {' or '.join(TIERS)}, got {name!r:.80}")
    return TIERS[name]
