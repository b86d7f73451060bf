"""What `jaxserve serve` needs around the engine: flags to a checked config, the text when
it is ready.

Nothing here imports jax, so that a mistake shows before anything slow starts.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from jaxserve import __version__
from jaxserve.checkpoint_files import check_folder
from jaxserve.command_line import Parser
from jaxserve.config import AUTO, Config, ConfigError, ServerConfig
from jaxserve.config.config_dict import config_from_config_dict
from jaxserve.config.tree import DEFAULTS, OPEN_FIELDS, did_you_mean_field
from jaxserve.configs import base
from jaxserve.engine.stats import EngineInfo
from jaxserve.hub import download, is_hub_id
from jaxserve.server.access.options import KEY_VARIABLE, Access
from jaxserve.server.requests.addresses import bind_sockets
from jaxserve.server.requests.slo_classes import slo_classes
from jaxserve.server.server import Server
from jaxserve.server.startup.flag_hints import hint
from jaxserve.server.startup.help_text import help_text

_PORTS = ("port", "http_port", "metrics_port")
_OWN_NAME = re.compile("[A-Za-z0-9_-]+")
_SHORTCUTS = {
    "model": ("model.path", "checkpoint directory, Hugging Face or Orbax"),
    "load_format": ("model.load_format", "auto, safetensors, orbax or random"),
    "policy": ("scheduler.policy", "scheduling policy"),
    "port": ("server.port", "gRPC port, 0 for any free one"),
    "http_port": ("server.http_port", "HTTP port, -1 for none, 0 for any free one"),
    "metrics_port": ("server.metrics_port", "Prometheus port, -1 for none, 0 for any free one"),
    "request_log": ("telemetry.request_log", "log one line a call"),
    "log_prompts": ("telemetry.log_prompts", "with prompts and texts in it"),
    "log_format": ("telemetry.log_format", "of what is logged: text or json"),
    "otlp_endpoint": ("telemetry.otlp_endpoint", "where traces go by OTLP, http://localhost:4317"),
}
_TRUTH = {"true": True, "t": True, "1": True, "false": False, "f": False, "0": False}
_WANTED = {bool: "true or false", int: "a whole number", float: "a number", tuple: "like (1, 2)"}


class UsageError(ValueError):
    """The command line is wrong; one line says how."""


def preset_path(name: str) -> str:
    """The file of a preset, such as `tiny_cpu`, whether it is there or not."""
    return str(Path(base.__file__).parent / f"{name.replace('-', '_')}.py")


def with_model(argv: Sequence[str]) -> list[str]:
    """The arguments with the MODEL that they may begin with as flags.

    Args:
        argv: without the program's name. MODEL is a preset's name, a checkpoint's folder or a model
            of the Hugging Face Hub; the latter two go with configs/base.py, unless --config names
            another. A config file does, too.

    Raises:
        UsageError: it is none of these.
    """
    if not argv or argv[0].startswith("-"):
        return list(argv)
    model, rest = argv[0], list(argv[1:])
    if model.endswith(".py") or (not os.path.exists(model) and os.path.isfile(preset_path(model))):
        return [f"--config={model}", *rest]
    if os.path.exists(model) or os.sep in model:
        has_config = any(each.lstrip("-").partition("=")[0] == "config" for each in rest)
        config = [] if has_config else [f"--config={preset_path('base')}"]
        return [*config, f"--model={model}", *rest]
    raise UsageError(
        f"{model!r} is neither a folder nor a preset ({', '.join(_presets())}), and a model of the "
        "Hugging Face Hub is OWNER/NAME"
    )


def answer(argv: Sequence[str], default: str) -> str | None:
    """What to print where the command line is a question; else None. Arguments as in
    `parse_flags`. Raises UsageError, and ConfigError as `read_config`."""
    if "--version" in argv:
        return f"jaxserve {__version__}"
    left = [argument for argument in argv if argument not in ("--help", "-h", "-help")]
    if len(left) == len(argv):
        return None
    return help_text(_SHORTCUTS, read_config(parse_flags(left, default)))


class Flags(NamedTuple):
    """What a command line says.

    Attributes:
        config: what the config file's get_config() has returned, with the fields that are set as
            --config.SECTION.FIELD.
        shortcuts: values of the flags beside --config, by name.
    """

    config: object
    shortcuts: dict[str, Any]


def parse_flags(argv: Sequence[str], default: str, own_flags: Sequence[str] = ()) -> Flags:
    """Parses flags.

    Args:
        argv: the arguments, without the program's name.
        default: the config file if there is no --config.
        own_flags: other flags of the command, to suggest for an unknown one.

    Raises:
        UsageError: the arguments are wrong; one line.
    """
    known = flag_names()
    parser = Parser(add_help=False, argument_default=argparse.SUPPRESS, exit_on_error=False)
    for name in known:
        if isinstance(_default(name), bool):
            parser.add_argument(f"--{name}", dest=name, nargs="?", const="true")
            parser.add_argument(f"--no{name}", dest=name, action="store_const", const="false")
        elif not isinstance(_default(name), dict):
            parser.add_argument(f"--{name}", dest=name)
    try:
        doubled = [f"-{one}" if re.match("-[a-z]", one) else one for one in argv]  # one dash does
        found, rest = parser.parse_known_args(doubled)
    except argparse.ArgumentError as error:
        raise UsageError(str(error)) from None
    values = {name: _value(name, text) for name, text in vars(found).items()}
    config = _loaded(_config_file(values.pop("config", default)))
    shortcuts = {name: values.pop(name) for name in _SHORTCUTS if name in values}
    for name, value in values.items():
        _set(config, name.removeprefix("config."), value)
    for argument in rest:
        path, text = _own_field(argument, [*known, *(name[2:] for name in own_flags)])
        _set(config, path, text)
    return Flags(config, shortcuts)


def flag_names() -> list[str]:
    """The flags of `jaxserve serve`: shortcuts, and fields as config.SECTION.FIELD."""
    return ["config", *_SHORTCUTS, *(f"config.{path}" for path in DEFAULTS)]


def read_config(given: Flags) -> Config:
    """The config with the shortcuts applied, checked. Raises ConfigError."""
    fields = {_SHORTCUTS[n][0].replace(".", "__"): value for n, value in given.shortcuts.items()}
    if "model" in given.shortcuts:
        fields["model__preset"] = ""  # the checkpoint has a shape of its own
        # Random weights were for want of a checkpoint.
        fields.setdefault("model__load_format", AUTO)
    config = config_from_config_dict(given.config, fields)
    slo_classes(config.server.slo_classes)
    return config


def find_checkpoint(config: Config) -> Config:
    """The same with a folder for its model, which may be a checkpoint's, before JAX is imported.
    What is no folder here, but may be a model of the Hugging Face Hub, is taken from there. Raises
    ConfigError."""
    path = config.model.path
    if not path:
        return config
    try:
        if is_hub_id(path):
            name = config.model.name or path
            config = config.with_fields(model__path=download(path), model__name=name)
        check_folder(config.model.path)
    except ValueError as error:
        raise ConfigError(f"model.path: {error}") from None
    return config


def check_ports(server: ServerConfig) -> None:
    """Raises ConfigError if the host is unknown, or a port is taken: better now than after the
    model has loaded."""
    taken: dict[int, str] = {}
    for name in _PORTS:
        port = getattr(server, name)
        if port < 0:
            continue
        if port > 0 and port in taken:
            raise ConfigError(f"server.{name}: {port} is {taken[port]} already")
        taken[port] = f"server.{name}"
        try:
            for listener in bind_sockets(server.host, port, 1):
                listener.close()
        except OSError as error:
            where = f"cannot listen on {server.host}:{port} ({error.strerror})"
            shortcut = f"--{name}={0 if name == 'port' else -1}"
            wish = "takes any free port" if name == "port" else "does without"
            raise ConfigError(f"server.{name}: {where}; {shortcut} {wish}") from None


def ready_text(info: EngineInfo, server: Server, seconds: float) -> str:
    """What to print once calls are taken."""
    params = f"{info.num_params / 1e6:,.1f}M parameters"
    device = info.device if info.mesh_tensor == 1 else f"{info.mesh_tensor} x {info.device}"
    pool = f"{info.num_blocks:,} blocks of {info.block_size}: {info.pool_tokens:,} tokens"
    metrics, batches = server.metrics_address, server.batch_path
    http, scheme = server.http_address, server.access.scheme
    key = f", with a key as {KEY_VARIABLE} in its environment" if server.access.keys.needed else ""
    lines = [
        f"jaxserve is ready after {seconds:.1f} s",
        f"  model    {info.model} ({info.family}, {params}, {info.dtype} on {device}, "
        f"{info.attention_backend} attention)",
        f"  pool     {pool}, {info.pool_bytes / 2**20:,.0f} MiB",
        f"  limits   {min(info.max_model_len, info.pool_tokens):,} tokens a request",
        f"  policy   {info.policy}{_hidden_caches(info)}",
        f"  steps    predicted by a cost model, {info.cost_model}",
        f"  address  {server.address}",
        f"  http     {f'{scheme}://{http}/v1, console at {scheme}://{http}/' if http else 'off'}",
        f"  metrics  {f'{scheme}://{metrics}/metrics' if metrics else 'off'}",
        f"  batches  {batches or 'off'}",
        f"Try it in a second terminal{key}:",
        f"  {client_line(server.address, server.access)}",
    ]
    return "\n".join(lines)


def _hidden_caches(info: EngineInfo) -> str:
    if info.hidden_read is None or info.rho is None:
        return ""
    return f", KV and hidden caches, {info.hidden_read} at {1e6 * info.rho:+.2f} us a token"


def client_line(address: str, access: Access) -> str:
    """The client's command, with its folder and the flags only if they are needed."""
    host, _, port = address.rpartition(":")
    reached = "localhost" if host in ("0.0.0.0", "[::]") else host
    default = reached == "localhost" and int(port) == ServerConfig.port
    where = "" if default else f"--address={reached}:{port} "
    if access.tls is not None:
        where += "--tls " if access.tls.client_ca is None else "--tls_cert=FILE --tls_key=FILE "
    return f'{jaxserve_command()} complete {where}"Once upon a time"'


def jaxserve_command() -> str:
    """`jaxserve` of the interpreter that runs, as short as a shell here finds it."""
    folder = Path(sys.executable).parent
    script = folder / "jaxserve"
    name, module = ("jaxserve", "") if script.is_file() else ("python", " -m jaxserve")
    found = shutil.which(name)
    if found is not None and Path(found).parent == folder:
        return f"{name}{module}"
    here = script if not module else Path(sys.executable)
    inside = here.is_relative_to(Path.cwd())
    return f"{here.relative_to(Path.cwd()) if inside else here}{module}"


def _default(name: str) -> Any:
    """The value that a flag's field has without it."""
    path = _SHORTCUTS[name][0] if name in _SHORTCUTS else name.removeprefix("config.")
    return DEFAULTS.get(path, "")


def _value(name: str, text: str) -> Any:
    kind = type(_default(name))
    try:
        if kind is bool:
            return _TRUTH[text.lower()]
        if kind is tuple:
            found = ast.literal_eval(text)
            return found if isinstance(found, tuple) else (found,)
        return kind(text)
    except (KeyError, ValueError, SyntaxError):
        raise UsageError(f"flag --{name}={text}: must be {_WANTED[kind]}") from None


def _own_field(argument: str, known: Sequence[str]) -> tuple[str, str]:
    """Path and text of a field whose name is the user's own. Raises UsageError for what is none."""
    if not argument.startswith("-"):
        raise UsageError(f"unexpected argument {argument!r}; flags are written --name=value")
    flag, equals, text = argument.partition("=")
    path = flag.removeprefix("--config.")
    section = next((one for one in OPEN_FIELDS if f"{path}.".startswith(f"{one}.")), None)
    if section is not None:
        if equals and _OWN_NAME.fullmatch(path.removeprefix(f"{section}.")):
            return path, text
        form = f"--config.{section}.NAME=VALUE"
        raise UsageError(f"{argument}: a {OPEN_FIELDS[section]} is set as {form}")
    name = flag.lstrip("-")
    path = name.removeprefix("no").removeprefix("config.")
    if name.removeprefix("no") != path:
        raise UsageError(f"unknown field {path}{did_you_mean_field(path)}")
    raise UsageError(f"there is no flag {flag}{hint(name, known)}")


def _set(config: object, path: str, value: Any) -> None:
    """Sets a field; what has no place for it is refused when the tree is made."""
    *sections, name = path.split(".")
    for part in sections:
        config = config.get(part) if isinstance(config, ConfigDict) else None
    if isinstance(config, ConfigDict):
        # The file may have a number where this is text.
        with config.unlocked(), config.ignore_type():
            config[name] = value


def _config_file(given: str) -> str:
    """A file, or the name of a preset."""
    found = next((path for path in (given, preset_path(given)) if os.path.isfile(path)), None)
    if found is None:
        known = ", ".join(_presets())
        raise UsageError(f"--config: there is no file {given!r}; presets: {known}")
    return found


def _presets() -> list[str]:
    folder = Path(base.__file__).parent
    return sorted(p.stem for p in folder.glob("*.py") if p.stem not in ("base", "__init__"))


def _loaded(file: str) -> object:
    """What its get_config() returns. Raises UsageError."""
    module = ModuleType("jaxserve_config")
    module.__file__ = file
    sys.modules[module.__name__] = module  # where dataclasses look
    try:
        SourceFileLoader(module.__name__, file).exec_module(module)
        found: object = module.get_config()
    except Exception as error:  # it is other people's code
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UsageError(f"the config file failed: {said}") from None
    return found
