"""The text of `jaxserve serve --help`: flags, and fields with their docstrings."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

from jaxserve.config import Config
from jaxserve.config.tree import field_docs, section_docs


def help_text(shortcuts: Mapping[str, tuple[str, str]], config: Config) -> str:
    """The text. shortcuts: flags beside --config, each with its field and a description. config:
    the config whose values are shown."""
    lines = [
        "usage: jaxserve serve [MODEL] [--NAME=VALUE ...] [--config.SECTION.FIELD=VALUE ...]",
        "",
        "Serves a model until SIGTERM or ^C; without MODEL and --config, the model in the box.",
        "",
        "  MODEL",
        *_wrapped(
            "a checkpoint's folder, a model of the Hugging Face Hub, such as Qwen/Qwen2.5-0.5B, or "
            "a preset, such as opt_125m_cpu"
        ),
        "  --help, -h",
        "  --version",
        "  --config=FILE",
        *_wrapped("Python with get_config(), which gives the fields their values, or a preset"),
    ]
    for name, (path, text) in shortcuts.items():
        lines += [f"  --{name}=VALUE", *_wrapped(f"{text}; the same as --config.{path}")]
    lora = "an adapter, by name; any number of them; the same as --config.lora.adapters.NAME=FOLDER"
    lines += ["  --lora=NAME=FOLDER", *_wrapped(lora)]
    lines += ["", "Fields, with the values that they have:"]
    for section, what in section_docs().items():
        lines += ["", f"{section}: {what}"]
        for name, text in field_docs(section).items():
            value = getattr(getattr(config, section), name)
            if isinstance(value, Mapping):
                value = ", ".join(f"{key}={own}" for key, own in value.items())
            lines += [f"  --config.{section}.{name}={value}", *_wrapped(text)]
    return "\n".join(lines)


def _wrapped(text: str) -> list[str]:
    margin = " " * 6
    return textwrap.wrap(
        text, 100, initial_indent=margin, subsequent_indent=margin, break_on_hyphens=False
    )
