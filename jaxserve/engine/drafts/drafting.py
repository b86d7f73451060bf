"""All drafters of a continuation together, and the earlier outputs that they use."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

from jaxserve.engine.drafts.draft import Draft
from jaxserve.engine.drafts.drafter import Drafter
from jaxserve.engine.drafts.forced import GRAMMAR, Forced
from jaxserve.engine.drafts.lookup import EARLIER_OUTPUTS, PROMPT_LOOKUP, Lookup
from jaxserve.engine.drafts.prediction import PREDICTION, Prediction
from jaxserve.engine.drafts.token_index import END, TokenIndex
from jaxserve.engine.text.matcher import Matcher

# Most tokens of prompt and output that a continuation searches, initially the last 16,384 of its
# prompt: 384 KiB.
KNOWN = 32_768
# Most tokens of a tenant's earlier outputs (with one salt): 768 KiB; and most tenants, the latest
# to ask: 48 MiB in total.
EARLIER, TENANTS = 65_536, 64

DRAFTERS = (GRAMMAR, PREDICTION, PROMPT_LOOKUP, EARLIER_OUTPUTS)
"""The names of all drafters."""


class Drafting:
    """Drafts for one continuation. Used on the engine's thread.

    Args:
        prompt: its tokens.
        outputs: the tenant's earlier outputs.
        prediction: the likely output; empty without one.
        matcher: its state in the grammar, which its owner advances; None without one.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        outputs: TokenIndex,
        prediction: Sequence[int] = (),
        matcher: Matcher | None = None,
    ) -> None:
        self._outputs, self._matcher = outputs, matcher
        self._known = TokenIndex(KNOWN, prompt)
        self._forced = None if matcher is None else Forced(matcher)
        self._drafters: list[Drafter] = [Prediction(prediction)] if prediction else []
        self._drafters += [
            Lookup(PROMPT_LOOKUP, self._known, self._known),
            Lookup(EARLIER_OUTPUTS, outputs, self._known),
        ]

    def append(self, token: int) -> None:
        """Takes the next token of the output."""
        self._known.append(token)
        for one in self._drafters:
            one.append(token)

    def propose(self, most: int, estimate: Callable[[str, int], float]) -> Draft | None:
        """The best draft of the next tokens; a certain one if there is one. Under a grammar, the
        grammar allows all of its tokens.

        Args:
            most: most tokens; no draft if below 1.
            estimate: the probability that the first token of a draft with this source and strength
            is right.

        Returns:
            None if no drafter has a guess.
        """
        if most < 1:
            return None
        if self._forced is not None and (draft := self._forced.propose(most)) is not None:
            return draft
        drafts = [draft for one in self._drafters if (draft := one.propose(most)) is not None]
        if len(drafts) > 1:
            drafts.sort(key=lambda draft: -estimate(draft.source, draft.strength))
        if self._matcher is None:
            return drafts[0] if drafts else None
        for draft in drafts:
            valid = self._matcher.valid_prefix(draft.tokens)
            if valid:
                return (
                    draft
                    if valid == len(draft.tokens)
                    else draft._replace(tokens=draft.tokens[:valid])
                )
        return None

    def end(self, output_tokens: Sequence[int]) -> None:
        """The continuation has ended; later ones of the tenant may find its output."""
        if output_tokens:
            self._outputs.extend((*output_tokens, END))


class Drafts:
    """Drafts for an engine's continuations.

    The earlier outputs of a tenant are searched only for its own requests, so that no tenant can
        tell from times what others were given: as with the keys of blocks (`block_keys.py`), by
        tenant, salt and adapter.

    Args:
        shared: whether tenants share earlier outputs.
    """

    def __init__(self, *, shared: bool = False) -> None:
        self._shared = shared
        self._outputs: OrderedDict[tuple[str, str, bytes], TokenIndex] = OrderedDict()
        self._lock = threading.Lock()

    def of(
        self,
        prompt: Sequence[int],
        tenant: str = "",
        salt: str = "",
        prediction: Sequence[int] = (),
        matcher: Matcher | None = None,
        adapter: bytes = b"",
    ) -> Drafting:
        """Drafts for a new continuation. Indexes the prompt. Any thread may ask.

        Args:
            prompt: its tokens.
            tenant: see `Request.tenant`.
            salt: see `Request.cache_salt`.
            prediction: the likely output; empty without one.
            matcher: its state in the grammar; None without one.
            adapter: digest of the adapter that writes it; empty for the base model.
        """
        return Drafting(prompt, self._outputs_of(tenant, salt, adapter), prediction, matcher)

    def _outputs_of(self, tenant: str, salt: str, adapter: bytes) -> TokenIndex:
        whose = "" if self._shared else tenant, salt, adapter
        with self._lock:
            found = self._outputs.get(whose)
            if found is None:
                found = self._outputs[whose] = TokenIndex(EARLIER)
                if len(self._outputs) > TENANTS:
                    self._outputs.popitem(last=False)
            self._outputs.move_to_end(whose)
            return found
