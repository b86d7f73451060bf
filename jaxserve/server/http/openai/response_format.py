"""What a body says of how its text has to be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from jaxserve.sched.request import Grammar, InvalidRequest
from jaxserve.server.http.openai.schema import Generation

Made = tuple[str, Callable[[], Grammar]]


def requested_grammar(body: Generation) -> Grammar | None:
    """None for any text. Raises InvalidRequest, also for more than one."""
    found = list(_asked(body))
    if len(found) > 1:
        raise InvalidRequest(found[1][0], f"contradicts {found[0][0]}; one of them is enough")
    if not found:
        return None
    with naming_grammar_fields(body):
        return found[0][1]()


@contextmanager
def naming_grammar_fields(body: Generation) -> Iterator[None]:
    """What is found wrong with its grammar meanwhile is said of the field that it came in."""
    try:
        yield
    except InvalidRequest as error:
        if not error.field_name.startswith("grammar."):
            raise
        name = next(name for name, _ in _asked(body))
        raise InvalidRequest(name, error.problem) from None


def _asked(body: Generation) -> Iterator[Made]:
    """Each that is given, by its field. Raises InvalidRequest."""
    form, structured = body.response_format, body.structured_outputs
    if form is not None:
        schema = form.json_schema
        if (schema is not None) != (form.type == "json_schema"):
            problem = f"is not for type {form.type}" if schema else "is missing"
            raise InvalidRequest("response_format.json_schema", problem)
        if form.type == "json_object":
            yield "response_format", Grammar.json_object
        if schema is not None:
            asked = schema.json_schema
            yield "response_format.json_schema.schema", lambda: Grammar.json_schema(asked)
    if structured is not None:
        given = {
            "json": structured.json_schema,
            "regex": structured.regex,
            "choice": structured.choice,
            "json_object": structured.json_object,
        }
        given = {name: value for name, value in given.items() if value is not None}
        if not given:
            raise InvalidRequest("structured_outputs", "needs json, regex, choice or json_object")
        for name, value in given.items():
            yield f"structured_outputs.{name}", _maker(name, value)
    for name in ("json", "regex", "choice"):
        value = getattr(body, f"guided_{name}")
        if value is not None:
            yield f"guided_{name}", _maker(name, value)


def _maker(name: str, value: object) -> Callable[[], Grammar]:
    match name, value:
        case "json", dict() | bool() | str():
            return lambda: Grammar.json_schema(value)
        case "regex", str():
            return lambda: Grammar.regex(value)
        case "choice", list():
            return lambda: Grammar.choice(value)
    return Grammar.json_object
