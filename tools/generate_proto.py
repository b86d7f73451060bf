"""Writes the Python code of proto/jaxserve_v1/; `make proto` calls it.

    pip install grpcio-tools==1.80.0
    python -m tools.generate_proto [OUT_DIR]

Generated code needs at least the generator's versions of protobuf and grpcio, so the committed
files are made with the oldest supported grpcio-tools; newer runtimes accept them.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tempfile
from pathlib import Path

OLDEST_TOOLS = "1.80.0"
OUT_DIR = Path(__file__).resolve().parents[1] / "jaxserve" / "server" / "proto"
PROTO_DIR = Path(__file__).resolve().parents[1] / "proto"
PROTO_FILES = ("jaxserve_v1/batches.proto", "jaxserve_v1/generation.proto")
PACKAGE = "jaxserve.server.proto"


def generate(out_dir: Path) -> list[Path]:
    """Writes X_pb2.py, its .pyi and X_pb2_grpc.py of each X.proto into `out_dir`.

    Raises FileNotFoundError without a .proto (an installed package does not contain it), and
    RuntimeError if protoc fails; protoc itself prints why.
    """
    for path in (PROTO_DIR / name for name in PROTO_FILES):
        if not path.is_file():
            raise FileNotFoundError(f"{path}: run this in a clone of the repository")
    written = []
    with tempfile.TemporaryDirectory() as scratch:
        flags = [f"--{plugin}_out={scratch}" for plugin in ("python", "pyi", "grpc_python")]
        # In a separate process, since it loads another copy of protobuf's C++ code.
        command = [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            f"-I{PROTO_DIR}",
            *flags,
            *PROTO_FILES,
        ]
        if subprocess.run(command, check=False).returncode != 0:
            raise RuntimeError(f"protoc failed on {' or '.join(PROTO_FILES)}")
        for source in sorted((Path(scratch) / "jaxserve_v1").iterdir()):
            target = out_dir / source.name
            target.write_text(_in_package(source.read_text()))
            written.append(target)
    return written


def _in_package(text: str) -> str:
    """protoc names modules after the proto's own path; ours live in `PACKAGE`."""
    text = text.replace("from jaxserve_v1 import", f"from {PACKAGE} import")
    return re.sub(r"'jaxserve_v1\.(\w+_pb2)'", rf"'{PACKAGE}.\1'", text)


def main() -> int:
    """Writes into the package, or into the folder that is the only argument. Exit codes: 0, or 1 if
    the committed files would be written by another grpcio-tools than the oldest supported one."""
    out_dir = Path(sys.argv[1]) if len(sys.argv) > 1 else OUT_DIR
    tools = importlib.metadata.version("grpcio-tools")
    if tools != OLDEST_TOOLS and out_dir == OUT_DIR:
        print(
            f"grpcio-tools is {tools}; committed files are made with {OLDEST_TOOLS}: make proto",
            file=sys.stderr,
        )
        return 1
    for path in generate(out_dir):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
