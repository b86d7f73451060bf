"""How often drafts are right, learned for each request and, as a start, for its tenant.

Drafters propose for every token, whether a plan takes the draft or not, so that each token says
whether the first of the proposed ones would have been right. Learning costs no step. Drafts that
more speaks for are taken to be right as often as those that less speaks for, until they have a
record of their own.
"""

from __future__ import annotations

from collections import OrderedDict

PRIOR = 0.3  # of a kind of draft of which nothing is known
PRIOR_WEIGHT = 2.0  # in observations
TENANT_WEIGHT = 3.0  # what a tenant's record counts for in a request's, in observations
TENANT_MEMORY = 0.99  # what is left of a record with each observation
REQUEST_MEMORY = 0.9
TENANTS = 1024  # whose records are kept


class _Rate:
    """Of which share was right, lately."""

    __slots__ = ("right", "seen")

    def __init__(self) -> None:
        self.right = self.seen = 0.0

    def note(self, right: bool, memory: float) -> None:
        self.right = self.right * memory + right
        self.seen = self.seen * memory + 1.0


# By the drafter's name, and how much spoke for the draft: a list that grows as far as needed.
_Rates = dict[str, list[_Rate]]


class AcceptanceRates:
    """Of all tenants, bounded. Not thread-safe."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, _Rates] = OrderedDict()

    def of(self, tenant: str) -> RequestRates:
        """For a new request of a tenant."""
        known = self._tenants.setdefault(tenant, {})
        self._tenants.move_to_end(tenant)
        if len(self._tenants) > TENANTS:
            self._tenants.popitem(last=False)
        return RequestRates(known)


class RequestRates:
    """Of one request.

    Args:
        tenant: The record of its tenant, which it adds to.

    Attributes:
        guessed: Tokens that were noted so far.
        right: Those of them that were right.
    """

    def __init__(self, tenant: _Rates) -> None:
        self._tenant, self._own = tenant, _Rates()
        self.guessed = self.right = 0

    def estimate(self, source: str, strength: int = 0) -> float:
        """How likely the first token of such a draft is right."""
        found, tenant = PRIOR, self._tenant.get(source)
        if tenant is None:  # it has the request's tokens, too
            return found
        own = self._own.get(source, ())
        known = len(own)
        # Of what spoke less for it first: each is where the next begins.
        for number, one in enumerate(tenant[: strength + 1]):
            found = (one.right + found * PRIOR_WEIGHT) / (one.seen + PRIOR_WEIGHT)
            if number < known:
                mine = own[number]
                found = (mine.right + found * TENANT_WEIGHT) / (mine.seen + TENANT_WEIGHT)
        return found

    def note(self, source: str, strength: int, right: bool) -> None:
        """Whether a proposed token was right, of those behind which all were."""
        self.guessed += 1
        self.right += right
        for rates, memory in ((self._own, REQUEST_MEMORY), (self._tenant, TENANT_MEMORY)):
            kinds = rates.setdefault(source, [])
            while len(kinds) <= strength:
                kinds.append(_Rate())
            kinds[strength].note(right, memory)
