"""The committed Python code is what the .proto gives."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import shutil
from pathlib import Path

import pytest

from jaxserve.server.proto import (
    batches_pb2,
    batches_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
)
from tools import generate_proto

MODULES = {"batches": batches_pb2, "generation": generation_pb2}
FILES = [f"{name}{end}" for name in MODULES for end in ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")]


def test_regeneration_gives_the_committed_code(tmp_path: Path) -> None:
    """Another grpcio-tools writes other version numbers and perhaps other boilerplate, so then it
    is the descriptor that must agree, to the byte."""
    written = generate_proto.generate(tmp_path)
    assert [path.name for path in written] == FILES
    if importlib.metadata.version("grpcio-tools") == generate_proto.OLDEST_TOOLS:
        for path in written:
            assert path.read_text() == (generate_proto.OUT_DIR / path.name).read_text()
    for path in written:
        if path.name.endswith("_pb2.py"):
            literal = re.search(r"AddSerializedFile\((b'.*')\)\n", path.read_text())
            assert literal is not None
            committed = MODULES[path.name.removesuffix("_pb2.py")].DESCRIPTOR
            assert ast.literal_eval(literal[1]) == committed.serialized_pb
        else:
            code = (generate_proto.OUT_DIR / path.name).read_text()
            assert _names(path.read_text()) == _names(code)


@pytest.mark.parametrize("name", MODULES)
def test_generated_code_accepts_the_declared_versions(name: str) -> None:
    """pyproject's lower bounds are what the generated code itself demands at import."""
    pb2 = (generate_proto.OUT_DIR / f"{name}_pb2.py").read_text()
    major, minor, patch = re.findall(r"^    (\d+),$", pb2, re.MULTILINE)
    pyproject = (generate_proto.PROTO_DIR.parent / "pyproject.toml").read_text()
    bound = re.search(r'"protobuf>=([\d.]+)', pyproject)
    assert bound is not None
    declared = tuple(int(part) for part in bound[1].split("."))
    assert declared >= (int(major), int(minor), int(patch))
    grpc_bound = re.search(r'"grpcio>=([\d.]+)', pyproject)
    assert grpc_bound is not None
    grpc_code = (generate_proto.OUT_DIR / f"{name}_pb2_grpc.py").read_text()
    needed = re.search(r"GRPC_GENERATED_VERSION = '([\d.]+)'", grpc_code)
    assert needed is not None
    assert _version(grpc_bound[1]) >= _version(needed[1])


def test_modules_know_their_own_place() -> None:
    assert generation_pb2.GenerateRequest.__module__ == generation_pb2.__name__
    assert generation_pb2_grpc.GenerationStub.__module__ == generation_pb2_grpc.__name__
    assert batches_pb2.BatchLine.__module__ == batches_pb2.__name__
    assert batches_pb2_grpc.BatchesStub.__module__ == batches_pb2_grpc.__name__


def test_without_the_proto_the_error_says_where_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate_proto, "PROTO_DIR", tmp_path)
    with pytest.raises(FileNotFoundError, match="clone of the repository"):
        generate_proto.generate(tmp_path)


def test_a_broken_proto_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(generate_proto.PROTO_DIR, tmp_path / "proto")
    (tmp_path / "proto" / generate_proto.PROTO_FILES[0]).write_text("nonsense")
    monkeypatch.setattr(generate_proto, "PROTO_DIR", tmp_path / "proto")
    with pytest.raises(RuntimeError, match="protoc failed"):
        generate_proto.generate(tmp_path)


def _names(code: str) -> list[str]:
    return re.findall(r"^\s*(?:class|def) (\w+)", code, re.MULTILINE)


def _version(text: str) -> tuple[int, ...]:
    numbers = [int(part) for part in text.split(".")]
    return tuple(numbers + [0] * (3 - len(numbers)))
