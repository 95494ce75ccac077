"""The protos: linted, and the committed stubs are what they give."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from paceline.v1 import common_pb2, drafter_pb2, gateway_pb2, verifier_pb2
from scripts import gen_protos

ROOT = Path(__file__).resolve().parents[2]


def test_committed_stubs_are_not_stale() -> None:
    assert gen_protos.stale_stubs() == []


def test_a_changed_proto_makes_stubs_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ROOT / "proto", tmp_path / "proto")
    changed = tmp_path / "proto/paceline/v1/verifier.proto"
    changed.write_text(changed.read_text().replace("int64 round = 3;", "int64 round = 33;", 1))
    monkeypatch.setattr(gen_protos, "PROTO", tmp_path / "proto")
    assert any(name.startswith("verifier_pb2") for name in gen_protos.stale_stubs())


def test_buf_lint() -> None:
    buf = Path(sysconfig.get_path("scripts")) / "buf"
    command = [str(buf), "lint", "proto"]
    completed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert completed.returncode == 0, completed.stdout + completed.stderr


def test_stubs_import_in_a_fresh_process() -> None:
    """The grpc runtime that is installed is new enough for the stubs."""
    code = "from paceline.v1 import drafter_pb2_grpc, gateway_pb2_grpc, verifier_pb2_grpc"
    completed = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr


@pytest.mark.parametrize("module", [common_pb2, drafter_pb2, gateway_pb2, verifier_pb2])
def test_no_unsigned_fields_and_enums_start_unspecified(module: object) -> None:
    descriptor = module.DESCRIPTOR  # type: ignore[attr-defined]
    for enum in descriptor.enum_types_by_name.values():
        assert enum.values_by_number[0].name.endswith("_UNSPECIFIED")
    for message in descriptor.message_types_by_name.values():
        for field in message.fields:
            unsigned = {field.TYPE_UINT32, field.TYPE_UINT64, field.TYPE_FIXED32, field.TYPE_FIXED64}
            assert field.type not in unsigned, f"{message.name}.{field.name}"
