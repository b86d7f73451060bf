"""How often drafts are right, learned for each request, starting from its tenant's record.

Drafters propose for every token, whether a plan uses the draft or not, so each token shows whether
the first proposed token would have been right. Learning thus costs no steps. Drafts with stronger
evidence are assumed to be right as often as those with weaker evidence, until they have a record of
their own.
"""

from __future__ import annotations

from collections import OrderedDict

PRIOR = 0.3  # for a kind of draft without a record
PRIOR_WEIGHT = 2.0  # in observations
TENANT_WEIGHT = 3.0  # weight of the tenant's record in a request's, in observations
TENANT_MEMORY = 0.99  # factor of a record with each observation
REQUEST_MEMORY = 0.9
TENANTS = 1024  # most tenants with a record


class _Rate:
    """Recent share of correct drafts."""

    __slots__ = ("right", "seen")

    def __init__(self) -> None:
        self.right = self.seen = 0.0

    def note(self, right: bool, memory: float) -> None:
        self.right = self.right * memory + right
        self.seen = self.seen * memory + 1.0


# By the drafter's name and the strength of the draft: a list that grows as needed.
_Rates = dict[str, list[_Rate]]


class AcceptanceRates:
    """Records of all tenants, bounded. Not thread-safe."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, _Rates] = OrderedDict()

    def of(self, tenant: str) -> RequestRates:
        """The record for a new request of a tenant."""
        known = self._tenants.setdefault(tenant, {})
        self._tenants.move_to_end(tenant)
        if len(self._tenants) > TENANTS:
            self._tenants.popitem(last=False)
        return RequestRates(known)


class RequestRates:
    """The record of one request.

    Args:
        tenant: The record of its tenant, which it adds to.

    Attributes:
        guessed: Tokens with a proposal so far.
        right: Tokens that equalled their proposals.
    """

    def __init__(self, tenant: _Rates) -> None:
        self._tenant, self._own = tenant, _Rates()
        self.guessed = self.right = 0

    def estimate(self, source: str, strength: int = 0) -> float:
        """The probability that the first token of such a draft is right."""
        found, tenant = PRIOR, self._tenant.get(source)
        if tenant is None:  # it includes the request's tokens
            return found
        own = self._own.get(source, ())
        known = len(own)
        # From weaker evidence to stronger: each record is the prior of the next.
        for number, one in enumerate(tenant[: strength + 1]):
            found = (one.right + found * PRIOR_WEIGHT) / (one.seen + PRIOR_WEIGHT)
            if number < known:
                mine = own[number]
                found = (mine.right + found * TENANT_WEIGHT) / (mine.seen + TENANT_WEIGHT)
        return found

    def note(self, source: str, strength: int, right: bool) -> None:
        """Notes whether a proposed token was right; all before it in the draft were right."""
        self.guessed += 1
        self.right += right
        for rates, memory in ((self._own, REQUEST_MEMORY), (self._tenant, TENANT_MEMORY)):
            kinds = rates.setdefault(source, [])
            while len(kinds) <= strength:
                kinds.append(_Rate())
            kinds[strength].note(right, memory)
