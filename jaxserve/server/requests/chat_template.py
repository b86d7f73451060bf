"""Chats to prompts: the checkpoint's own template, rendered in a sandbox, or a plain default.

As Hugging Face has it: a Jinja template in tokenizer_config.json, or beside it in a file of its
own, which gets `messages`, the special tokens and `add_generation_prompt`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxserve.engine.errors import ConfigError
from jaxserve.sched.request import InvalidRequest

# For models that were trained on no chats: the turns, and whose it is.
PLAIN = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
_FILE, _CONFIG = "chat_template.jinja", "tokenizer_config.json"


class ChatTemplate:
    """Renders chats. own: whether it is the checkpoint's, which writes its special tokens itself.

    special: what templates know as bos_token, eos_token and so on.
    """

    def __init__(self, source: str, special: Mapping[str, str], *, own: bool) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._template: Template = environment.from_string(source)
        self._special = dict(special)
        self.own = own

    def render(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool = True,
        **further: Any,
    ) -> str:
        """The prompt's text. Raises InvalidRequest for a chat that the template does not take."""
        try:
            return self._template.render(
                **{**self._special, **further},
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
            )
        except (TemplateError, TypeError, ValueError, KeyError, ArithmeticError) as error:
            raise InvalidRequest("messages", f"the model's chat template: {error}") from None


def load_chat_template(path: str) -> ChatTemplate:
    """Of a checkpoint's directory; the plain one where there is none. path: "" for random weights.
    Raises ConfigError for a file or a template that cannot be read."""
    folder = Path(path).expanduser()
    config = _read_config(folder / _CONFIG) if path else {}
    special = {
        name: text
        for name, value in config.items()
        if name.endswith("_token")
        and isinstance(text := value.get("content") if isinstance(value, dict) else value, str)
    }
    source, where = _source(folder, config) if path else (None, "")
    try:
        return ChatTemplate(PLAIN if source is None else source, special, own=source is not None)
    except TemplateError as error:
        raise ConfigError(f"model.path: the chat template in {where}: {error}") from None


def _source(folder: Path, config: Mapping[str, Any]) -> tuple[str | None, str]:
    file = folder / _FILE
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8"), str(file)
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"model.path: cannot read {file}: {error}") from None
    found = config.get("chat_template")
    if isinstance(found, list):  # several, by name
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
        found = named.get("default")
    return (found if isinstance(found, str) else None), str(folder / _CONFIG)


def _read_config(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: cannot read {file}: {error}") from None
    return config if isinstance(config, dict) else {}


def _to_json(value: Any, **options: Any) -> str:
    """Unlike Jinja's own, it does not write <, > and & as for HTML."""
    options.setdefault("ensure_ascii", False)
    return json.dumps(value, **options)


def _raise(message: str) -> None:
    raise TemplateError(message)
