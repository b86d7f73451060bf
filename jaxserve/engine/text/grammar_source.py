"""Grammars in the form of llguidance (https://github.com/guidance-ai/llguidance), and its limits.
llguidance parses grammars and makes masks.

Imported with the first grammar. Nothing else that takes long is imported here: a process that
compiles one grammar begins with this module.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxserve.engine.text.json_schemas import compilable
from jaxserve.sched.request import Grammar, GrammarKind, InvalidRequest

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

# White space between parts of JSON is limited: a model might otherwise write nothing else.
_JSON: JsonCompileOptions = {
    "whitespace_flexible": True,
    "whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,8}",
    # An unknown keyword is an error, whatever the schema itself says about it.
    "lenient": False,
    "coerce_one_of": False,
}
# In llguidance's units. They do not bound everything that a grammar takes; `grammar_process.py`
# does. States are per text, at about 2 KiB each; usual schemas need a few hundred.
_COMPILE_FUEL, _STEP_FUEL, _MAX_STATES = 300_000, 50_000, 20_000
_ESCAPED = re.compile(r"\\.", re.DOTALL)
_CLASSES = {
    r"\d": "[0-9]",
    r"\D": "[^0-9]",
    r"\w": "[0-9A-Za-z_]",
    r"\W": "[^0-9A-Za-z_]",
}
_META = frozenset(r"\.+*?()|[]{}^$")


def make_tokenizer(definition: str, vocab_size: int, eos_ids: Sequence[int]) -> LLTokenizer:
    """The library's own tokenizer; with a large vocabulary this takes a second. See `Grammars` for
    the arguments."""
    from llguidance import LLTokenizer

    ends = list(eos_ids) or None
    try:
        return LLTokenizer(definition, vocab_size, eos_token=ends)
    except ValueError:  # it has tokens that the model lacks; masks will not allow them
        return LLTokenizer(definition, eos_token=ends)


def make_matcher(grammar: Grammar, tokenizer: LLTokenizer) -> LLMatcher:
    """A matcher at the grammar's beginning. Raises InvalidRequest if the grammar is malformed,
    unsupported or too complex."""
    from llguidance import LLMatcher, LLParserLimits

    try:
        source = _source(grammar)
    except ValueError as error:
        raise InvalidRequest(grammar.field_name, one_line(str(error))) from None
    limits = LLParserLimits(
        initial_lexer_fuel=_COMPILE_FUEL,
        step_lexer_fuel=_STEP_FUEL,
        max_lexer_states=_MAX_STATES,
        verbose_errors=False,
    )
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=limits)
    if matcher.is_error():
        raise InvalidRequest(grammar.field_name, one_line(matcher.get_error()))
    return matcher


def _source(grammar: Grammar) -> str:
    """The grammar in llguidance's form. Raises ValueError."""
    from llguidance import LLMatcher

    text = grammar.text
    match grammar.kind:
        case GrammarKind.JSON_OBJECT:
            return LLMatcher.grammar_from_json_schema({"type": "object"}, overrides=_JSON)
        case GrammarKind.JSON_SCHEMA:
            if text.strip() == "false":
                raise ValueError("nothing is valid by it")
            text = "{}" if text.strip() == "true" else _rewritten(text)
            return LLMatcher.grammar_from_json_schema(text, overrides=_JSON)
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(_ESCAPED.sub(_as_ecma, text))
        case GrammarKind.CHOICE:
            choices: list[str] = json.loads(text)
            return LLMatcher.grammar_from_regex("|".join(map(_literal, choices)))
        case GrammarKind.LARK:
            return _with_schemas(**json.loads(text))


def _rewritten(text: str) -> str:
    """A schema in the compiler's dialect. Unreadable ones are left for the compiler to report."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return json.dumps(compilable(schema))


def _with_schemas(lark: str, schemas: Mapping[str, Mapping[str, Any]]) -> str:
    """The grammar that begins with the Lark rules."""
    named = [
        {"name": name, "json_schema": {**compilable(schema), "x-guidance": _JSON}}
        for name, schema in schemas.items()
    ]
    return json.dumps({"grammars": [{"name": "start", "lark_grammar": lark}, *named]})


def _as_ecma(escaped: re.Match[str]) -> str:
    r"""\d and \w, and their opposites, in ASCII as in ECMAScript: except in a schema's pattern, the
    library uses those of every script. Its input may have nested classes."""
    return _CLASSES.get(escaped[0], escaped[0])


def _literal(text: str) -> str:
    return "".join(f"\\{char}" if char in _META else char for char in text)


def one_line(problem: str) -> str:
    """A parser's message, which may be long and have several lines, as one line."""
    lines = [line.strip() for line in problem.splitlines()]
    text = " ".join(line for line in lines if line and set(line) - set("^ |"))
    return text if len(text) <= 300 else f"{text[:297]}..."
