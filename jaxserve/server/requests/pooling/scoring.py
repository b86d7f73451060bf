"""Scores of pairs of texts: either by the logits of some tokens after a prompt with both texts, or
by the cosine of their vectors."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxserve.checkpoint_files import read_text
from jaxserve.config import ConfigError
from jaxserve.sched.request import MAX_SCORED_TOKENS, InvalidRequest, PoolingParams, at_most_entries
from jaxserve.server.requests.pooling.pooled_call import MAX_INPUTS

Pair = tuple[str, str]
Encode = Callable[[str], list[int]]
MAX_PROMPT_CHARACTERS = 1 << 22
"""Most characters of all prompts made of a call's pairs: 14 for each token that the call may
have."""
_MAX_TEMPLATE = 1 << 16  # bytes
_MAX_TOKEN = 1 << 10  # characters; the longest that vocabularies have are 128
_PLACES = re.compile(r"\{(query|document)\}")


@dataclass(frozen=True)
class Scoring:
    """How a server scores by default.

    Attributes:
        template: the prompt of a pair, with {query} and {document} in it.
        tokens: possible answers, each one token of the model; the first means that the texts match.
            Empty: a score is the cosine of two vectors.
    """

    template: str = ""
    tokens: tuple[str, ...] = ()


NO_TOKENS = Scoring()


def load_scoring(file: str, tokens: str) -> Scoring:
    """Reads `server.score_template` and `server.score_tokens`. Raises ConfigError."""
    name, template = "server.score_template", ""
    if file:
        try:
            template = read_text(Path(file).expanduser(), _MAX_TEMPLATE)
            check_template(template, name)
        except InvalidRequest as error:
            raise ConfigError(str(error)) from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"{name}: cannot read {file}: {error}") from None
    named = tuple(token for token in tokens.split(",") if token)
    if len(named) > MAX_SCORED_TOKENS:
        raise ConfigError(f"server.score_tokens: at most {MAX_SCORED_TOKENS}, got {len(named)}")
    return Scoring(template, named)


@dataclass(frozen=True)
class PairPrompts:
    """The prompts that give the scores of some pairs.

    Attributes:
        prompts: texts.
        pooling: what to compute for each prompt.
        _places: for each pair, the indices of its prompts.
    """

    prompts: Sequence[str]
    pooling: PoolingParams
    _places: Sequence[tuple[int, ...]]

    def scores(self, pooled: Sequence[np.ndarray]) -> list[float]:
        """The score of each pair: from 0 to 1 by tokens, from -1 to 1 by vectors. pooled: the
        values of each prompt."""
        return [_score([pooled[place] for place in places]) for places in self._places]


def _score(of: Sequence[np.ndarray]) -> float:
    if len(of) == 2:
        return float(np.clip(of[0].astype(np.float64) @ of[1], -1.0, 1.0))
    logits = of[0].astype(np.float64)
    if len(logits) == 1:
        logits = np.append(logits, 0.0)
    likely = np.exp(logits - logits.max())
    return float(likely[0] / likely.sum())


def pairs_of(first: Sequence[str], second: Sequence[str], name: str) -> list[Pair]:
    """Pairs one text with several, or equally many of both. name: name of the field of the second
    texts. Raises InvalidRequest."""
    if len(first) == 1:
        first = [first[0]] * len(second)
    if len(first) != len(second):
        problem = f"has {len(second)} texts beside {len(first)}; as many are needed, or one and any"
        raise InvalidRequest(name, problem)
    return list(zip(first, second, strict=True))


def pair_prompts(
    pairs: Sequence[Pair],
    scoring: Scoring,
    tokens: Sequence[str | int] | None,
    template: str | None,
    usual: PoolingParams,
    encode: Encode,
) -> PairPrompts:
    """The prompts that give the scores of pairs of a query and a document.

    Args:
        pairs: at least one pair.
        scoring: the server's defaults.
        tokens: the call's tokens instead, as texts or ids; None if it has none.
        template: likewise.
        usual: how the model's vectors are made by default.
        encode: encodes a text, without special tokens.

    Raises:
        InvalidRequest: If there are too many pairs, a text is not exactly one token, or there is no
            template with both texts in it.
    """
    at_most_entries("documents", len(pairs), MAX_INPUTS)
    named = scoring.tokens if tokens is None else tokens
    if not named:
        if template is not None:
            raise InvalidRequest("template", "is only for scores by tokens")
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        place = {text: number for number, text in enumerate(texts)}
        near = dataclasses.replace(usual, normalize=True)
        return PairPrompts(texts, near, [(place[one], place[other]) for one, other in pairs])
    at_most_entries("tokens", len(named), MAX_SCORED_TOKENS)
    ids = tuple(token if isinstance(token, int) else _token_id(token, encode) for token in named)
    form = scoring.template if template is None else template
    check_template(form, "template")
    _check_size(form, pairs)
    prompts = [_filled(form, pair) for pair in pairs]
    return PairPrompts(
        prompts, PoolingParams(scored_token_ids=ids), [(i,) for i in range(len(prompts))]
    )


def check_template(template: str, field_name: str) -> None:
    """Raises InvalidRequest, which names the field, unless the template has a place for both
    texts."""
    if set(_PLACES.findall(template)) != {"query", "document"}:
        raise InvalidRequest(field_name, "must be a text with {query} and {document} in it")


def _check_size(template: str, pairs: Sequence[Pair]) -> None:
    """Checks the size before prompts are made: a query is in each of them, possibly many times."""
    named = _PLACES.findall(template)
    of_query, of_document = named.count("query"), named.count("document")
    size = len(template) * len(pairs) + sum(
        of_query * len(query) + of_document * len(document) for query, document in pairs
    )
    if size > MAX_PROMPT_CHARACTERS:
        problem = f"the pairs' prompts have {size:,} characters in all"
        raise InvalidRequest("documents", f"{problem}; at most {MAX_PROMPT_CHARACTERS:,} are taken")


def _filled(template: str, pair: Pair) -> str:
    texts = dict(zip(("query", "document"), pair, strict=True))
    return _PLACES.sub(lambda match: texts[match[1]], template)


def _token_id(text: str, encode: Encode) -> int:
    if len(text) > _MAX_TOKEN:
        problem = f"one has {len(text)} characters; each must be one token of this model"
        raise InvalidRequest("tokens", problem)
    try:
        ids = encode(text)
    except InvalidRequest as error:  # far too long
        raise error.renamed("tokens") from None
    if len(ids) != 1:
        problem = f"{text!r:.80} is {len(ids)} tokens of this model; each must be one"
        raise InvalidRequest("tokens", problem)
    return ids[0]
