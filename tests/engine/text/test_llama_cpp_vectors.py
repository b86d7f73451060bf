"""Texts are the tokens that llama.cpp's own tests have for them. The source package that has those
is downloaded."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from jaxserve.config import ConfigError
from jaxserve.engine.text.detokenizer import load_tokenizer

pytestmark = pytest.mark.slow
NAME, VERSION = "llama_cpp_python", "0.3.36"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
# pip asks for the name and the version before it keeps a source package. Its own backend would
# have to be installed for that, and would be run.
BACKEND = f"""
import pathlib

def prepare_metadata_for_build_wheel(folder, config_settings=None):
    made = pathlib.Path(folder) / "{NAME}-{VERSION}.dist-info"
    made.mkdir()
    text = "Metadata-Version: 2.1\\nName: {NAME}\\nVersion: {VERSION}\\n"
    (made / "METADATA").write_text(text)
    return made.name
"""
SEPARATOR = "\n__ggml_vocab_test__\n"
SERVED = ("command-r", "deepseek-coder", "deepseek-llm", "gpt-2", "llama-bpe", "llama-spm", "mpt",
          "phi-3", "qwen2", "refact", "starcoder")  # fmt: skip
REFUSED = {
    "bert-bge": "tokenizer.ggml.model is 'bert'",
    "falcon": "tokenizer.ggml.pre is 'falcon'",
    "gemma-4": "tokenizer.ggml.model is 'gemma4'",
    "gpt-neox": "has no tokenizer.ggml.pre",
    "nomic-bert-moe": "tokenizer.ggml.model is 't5'",
    "qwen35": "tokenizer.ggml.pre is 'qwen35'",
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vectors")
    backend = folder / "scikit_build_core"
    backend.mkdir()
    (backend / "__init__.py").touch()
    (backend / "build.py").write_text(BACKEND)
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary=:all:", "--quiet"]
    pip += ["--no-build-isolation", "--disable-pip-version-check", "--dest", str(folder)]
    subprocess.run(
        [*pip, f"{NAME}=={VERSION}"],
        check=True,
        env={**os.environ, "PYTHONPATH": str(folder)},
        timeout=1800,
    )
    package = folder / f"{NAME}-{VERSION}.tar.gz"
    with package.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == SHA256
    with tarfile.open(package) as archive:
        wanted = [each for each in archive if "/llama.cpp/models/ggml-vocab-" in each.name]
        archive.extractall(folder, wanted, filter="data")
    return folder / f"{NAME}-{VERSION}" / "vendor" / "llama.cpp" / "models"


@pytest.mark.promise(34)
@pytest.mark.parametrize("name", SERVED)
def test_texts_are_the_same_tokens(name: str, models: Path) -> None:
    file = models / f"ggml-vocab-{name}.gguf"
    texts = Path(f"{file}.inp").read_bytes().decode().split(SEPARATOR)
    lines = Path(f"{file}.out").read_text().split("\n")
    expected = {text: list(map(int, line.split())) for text, line in zip(texts, lines, strict=True)}
    assert len(expected) > 40
    tokenizer = load_tokenizer(file)
    assert {text: tokenizer.encode(text, special=False) for text in expected} == expected


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_is_refused_by_name(name: str, models: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(models / f"ggml-vocab-{name}.gguf")
    assert REFUSED[name] in str(caught.value)
