"""Generates the protobuf stubs in src/paceline/v1 from proto/paceline/v1; `make proto` calls it.

    python scripts/gen_protos.py            writes them
    python scripts/gen_protos.py --check    exit code 1 if the committed ones are stale

The tools come from the `dev` extra, in the versions that constraints.txt pins. Stubs are never edited.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTO = ROOT / "proto"
PACKAGE = Path("paceline/v1")
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")


def generate(target: Path) -> None:
    """Writes all stubs below `target`/paceline/v1.

    Raises:
        SystemExit: protoc or a plugin failed; its message is on stderr.
    """
    scripts = Path(sysconfig.get_path("scripts"))
    plugins = {
        "protoc-gen-mypy": scripts / "protoc-gen-mypy",
        "protoc-gen-mypy_grpc": scripts / "protoc-gen-mypy_grpc",
    }
    command = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        f"-I{PROTO}",
        *(f"--plugin={name}={path}" for name, path in plugins.items()),
        f"--python_out={target}",
        f"--grpc_python_out={target}",
        f"--mypy_out=quiet:{target}",
        f"--mypy_grpc_out=quiet:{target}",
        *sorted(str(path.relative_to(PROTO)) for path in (PROTO / PACKAGE).glob("*.proto")),
    ]
    completed = subprocess.run(command, cwd=PROTO, check=False)  # noqa: S603 - a fixed program
    if completed.returncode:
        raise SystemExit(f"protoc failed with {completed.returncode}; is the dev extra installed?")


def stubs(folder: Path) -> dict[str, str]:
    """Text of every stub in a folder, by file name."""
    files = (path for path in folder.iterdir() if path.name.endswith(SUFFIXES))
    return {path.name: path.read_text(encoding="utf-8") for path in files}


def stale_stubs() -> list[str]:
    """Names of committed stubs that differ from what the protos give, are missing, or have no proto any more."""
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        fresh = stubs(Path(scratch) / PACKAGE)
    committed = stubs(ROOT / "src" / PACKAGE)
    return sorted(name for name in fresh.keys() | committed.keys() if fresh.get(name) != committed.get(name))


def main() -> int:
    """Generates or checks; returns the exit code."""
    parser = argparse.ArgumentParser(description="Generate the protobuf stubs.")
    parser.add_argument("--check", action="store_true", help="only say whether the committed stubs are stale")
    if not parser.parse_args().check:
        generate(ROOT / "src")
        return 0
    stale = stale_stubs()
    for name in stale:
        sys.stderr.write(f"stale: {PACKAGE / name}; run `make proto`\n")
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
