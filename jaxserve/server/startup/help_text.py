"""What `jaxserve serve --help` prints: flags, and fields as configs/base.py explains them."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping

from ml_collections import ConfigDict

from jaxserve.configs import base


def help_text(shortcuts: Mapping[str, tuple[str, str]], config: ConfigDict) -> str:
    """shortcuts: flags beside --config, each with the field that it sets and what that is. config:
    whose values are shown."""
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
    lines += ["", "Fields, with the values that they have:"]
    functions = _functions()
    for section in base.get_config():
        lines += ["", f"{section}: {ast.get_docstring(functions[section])}"]
        for name, comment in field_comments(section).items():
            value = config[section][name]
            if isinstance(value, ConfigDict):
                value = ", ".join(f"{key}={text}" for key, text in value.items())
            lines += [f"  --config.{section}.{name}={value}", *_wrapped(comment)]
    return "\n".join(lines)


def field_comments(section: str) -> dict[str, str]:
    """By name of a field of the section: the comment that stands above it in base.py."""
    lines, found = inspect.getsource(base).splitlines(), {}
    functions = _functions()
    for key in _fields(functions[section], functions):
        words: list[str] = []
        for line in reversed(lines[: key.lineno - 1]):
            if not line.strip().startswith("#"):
                break
            words.insert(0, line.strip().lstrip("# "))
        found[str(key.value)] = " ".join(words)
    return found


def _functions() -> dict[str, ast.FunctionDef]:
    """By section, and by what sections have from elsewhere: the function with the fields."""
    nodes = ast.parse(inspect.getsource(base)).body
    return {node.name[1:]: node for node in nodes if isinstance(node, ast.FunctionDef)}


def _fields(
    function: ast.FunctionDef, functions: Mapping[str, ast.FunctionDef]
) -> list[ast.Constant]:
    (returned,) = (node for node in function.body if isinstance(node, ast.Return))
    assert isinstance(returned.value, ast.Dict)
    found: list[ast.Constant] = []
    for key, value in zip(returned.value.keys, returned.value.values, strict=True):
        if isinstance(key, ast.Constant):
            found.append(key)
        elif isinstance(value, ast.Call) and isinstance(value.func, ast.Name):  # **_name()
            found += _fields(functions[value.func.id[1:]], functions)
    return found


def _wrapped(text: str) -> list[str]:
    margin = " " * 6
    return textwrap.wrap(
        text, 100, initial_indent=margin, subsequent_indent=margin, break_on_hyphens=False
    )
