"""What is asked of a checkpoint's folder before anything is loaded, by whoever has no JAX yet.

Its files are somebody else's: they may be no files, or endless.
"""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

MAX_JSON = 64 << 20
"""Bytes of a JSON file: configs have kilobytes, an index of all tensors at most a few MiB."""


HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_TORCH = (".bin", ".pt", ".pth")
_SAVE = (
    "transformers writes safetensors: "
    "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW)"
)
_GGUF_MAGIC = b"GGUF"


def find_gguf(path: str | Path) -> Path | None:
    """The GGUF file that this is, or the only one in this folder, if that has no config.json; None
    where there is none, or several."""
    try:
        return _found_gguf(Path(os.path.expanduser(path)))
    except (OSError, ValueError):
        return None


def _found_gguf(path: Path) -> Path | None:
    if path.is_dir():
        inside = _gguf_names(path)
        alone = len(inside) == 1 and not os.path.lexists(path / "config.json")
        return path / inside[0] if alone else None
    return path if path.is_file() and _is_gguf(path) else None


def _gguf_names(folder: Path) -> list[str]:
    # Pictures' encoders (mmproj) lie beside some models, and are none.
    return [
        name
        for name in sorted(os.listdir(folder))
        if name.endswith(".gguf") and not name.startswith("mmproj")
    ]


def _is_gguf(file: Path) -> bool:
    with file.open("rb") as opened:
        return opened.read(4) == _GGUF_MAGIC


def check_folder(path: str | Path) -> None:
    """Raises ValueError where this can be neither a checkpoint's folder nor a GGUF file: what it is
    instead, and what to do, in a line."""
    folder = Path(os.path.expanduser(path))
    try:
        problem = None if _found_gguf(folder) is not None else _problem(folder)
    except (FileNotFoundError, NotADirectoryError):
        problem = f"no such checkpoint directory: {folder}{_hub_hint(str(path))}"
    except (OSError, ValueError) as error:
        problem = f"cannot look at {str(folder)!r}: {error}"
    if problem is not None:
        raise ValueError(problem)


def _problem(folder: Path) -> str | None:
    mode = os.stat(folder).st_mode
    if not stat.S_ISDIR(mode):
        return f"{folder} is no checkpoint directory: {_of_file(folder, mode)}"
    if not os.path.lexists(folder / "config.json"):
        return f"{folder / 'config.json'} is missing{_without_config(folder)}"
    return None


def _hub_hint(given: str) -> str:
    if not HUB_ID.fullmatch(given):
        return ""
    name = given.split("/")[1]
    return (
        f"; if it is a model of the Hugging Face Hub, download it first: "
        f"hf download {given} --local-dir {name}"
    )


def _of_file(file: Path, mode: int) -> str:
    if not stat.S_ISREG(mode):
        return "it is neither a folder nor a file"
    if file.suffix == ".gguf":
        return "it does not begin as a GGUF file does; was it downloaded whole?"
    if file.suffix == ".safetensors":
        return f"give the folder that it is in, {file.parent}"
    if file.suffix in _TORCH:
        return f"it holds PyTorch weights; give a folder with config.json and safetensors; {_SAVE}"
    return "it is a file; give the folder that holds config.json, or a GGUF file"


def _without_config(folder: Path) -> str:
    names = sorted(os.listdir(folder))
    gguf = _gguf_names(folder)
    snapshots = folder / "snapshots"
    if len(gguf) > 1:
        return f"; it has {len(gguf)} GGUF files: give one of them, such as {folder / gguf[0]}"
    if "adapter_config.json" in names:
        return (
            "; adapter_config.json: an adapter (LoRA) is no model by itself; give its base model, "
            f"and --lora=NAME={folder}"
        )
    if snapshots.is_dir() and (inside := sorted(os.listdir(snapshots))):
        return f"; it is a folder of the Hub's cache: give {snapshots / inside[-1]}"
    if "params.json" in names:
        return "; params.json: give the checkpoint as Hugging Face has it, with config.json"
    return ""


def without_safetensors(folder: Path) -> str:
    """What a folder without *.safetensors has instead, and what to do."""
    gguf = _gguf_names(folder)
    if gguf:
        return f"to serve {gguf[0]}, give that file"
    for name in sorted(os.listdir(folder)):
        if name.endswith(_TORCH):
            return f"{name} holds PyTorch weights, which are not read; {_SAVE}"
        if name.endswith((".h5", ".msgpack", ".onnx")):
            return f"{name} is not read; {_SAVE}"
    return "were its weights downloaded?"


def regular_file(path: Path) -> int:
    """The size of a file, in bytes, that can be read without waiting for anybody.

    Raises:
        FileNotFoundError: there is none.
        OSError: it cannot be looked at.
        ValueError: it is a folder, a FIFO, a socket or a device.
    """
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("it is no regular file")
    return found.st_size


def read_bytes(path: Path, most: int) -> bytes:
    """The bytes of a regular file, at most `most`. Raises as `regular_file`, and ValueError for
    more."""
    size = regular_file(path)
    if size > most:
        raise ValueError(f"it has {size:,} bytes, and {most:,} are allowed")
    with path.open("rb") as file:
        content = file.read(most + 1)  # it may grow meanwhile
    if len(content) > most:
        raise ValueError(f"it has more than {most:,} bytes")
    return content


def read_text(path: Path, most: int = MAX_JSON) -> str:
    """The UTF-8 text of a regular file. Raises as `read_bytes`, and ValueError for other bytes than
    UTF-8."""
    return read_bytes(path, most).decode()


def read_json(path: Path, most: int = MAX_JSON) -> Any:
    """What a JSON file holds. Raises as `read_text`, and ValueError where it is not valid JSON or
    nested too deeply."""
    text = read_text(path, most)
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"it is not valid JSON: {error}") from None
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
