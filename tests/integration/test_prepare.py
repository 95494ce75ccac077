from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import psutil
import pytest

from paceline.cli.prepare import Prepared, prepare
from paceline.errors import ModelError, NotFound


def ignore(_line: str) -> None:
    """Progress that nobody reads."""


def make_model_folder(folder: Path) -> Path:
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).write_text("{}")
    return folder


async def test_folders_are_taken_as_they_are(tmp_path: Path) -> None:
    target, drafter = make_model_folder(tmp_path / "target"), tmp_path / "drafter"
    drafter.mkdir()
    prepared = await prepare(str(target), bits="", draft_model=str(drafter), progress=ignore)
    assert prepared == Prepared(str(target), str(drafter))


async def test_no_draft_model(tmp_path: Path) -> None:
    target = make_model_folder(tmp_path / "target")
    assert (await prepare(str(target), bits="", draft_model="", progress=ignore)).drafter_dir == ""


async def test_a_head_is_looked_for_before_the_target_is_fetched(tmp_path: Path) -> None:
    target, head = make_model_folder(tmp_path / "target"), tmp_path / "head"
    head.mkdir()
    prepared = await prepare(str(target), bits="", draft_model="", head=str(head), progress=ignore)
    assert prepared == Prepared(str(target), "", str(head))
    with pytest.raises(NotFound, match="paceline train") as caught:
        await prepare("no-such-model", bits="", draft_model="", head=str(tmp_path / "none"), progress=ignore)
    assert caught.value.field == "head"


async def test_an_adapter_is_added_to_the_base_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    base, adapter = make_model_folder(tmp_path / "base"), tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": "/nowhere/base"}')
    prepared = await prepare(str(adapter), bits="", draft_model="", base=str(base), progress=ignore)
    assert (Path(prepared.target_dir) / "adapter").resolve() == adapter
    assert (Path(prepared.target_dir) / "model.safetensors").resolve() == base / "model.safetensors"


async def test_errors_keep_their_class(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="there is no file") as caught:
        await prepare(str(tmp_path / "none.gguf"), bits="", draft_model="", progress=ignore)
    assert caught.value.field == "model"
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="lacks"):
        await prepare(str(tmp_path / "empty"), bits="", draft_model="", progress=ignore)


async def test_a_cancelled_preparation_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process waits for ever, like a fetch from a network that hangs."""
    program = tmp_path / "endless"
    program.write_text(
        f"#!{sys.executable}\nimport json, os, signal\n"
        "print(json.dumps({'progress': str(os.getpid())}), flush=True)\nsignal.pause()\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    pids: list[int] = []
    started = asyncio.Event()

    def progress(line: str) -> None:
        pids.append(int(line))
        started.set()

    task = asyncio.create_task(prepare("x", bits="", draft_model="", progress=progress))
    await asyncio.wait_for(started.wait(), 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not psutil.pid_exists(pids[0])


async def test_a_process_that_breaks_is_an_error_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "broken"
    program.write_text("#!/bin/sh\necho the reason >&2\nexit 4\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(ModelError, match="exit status 4: the reason"):
        await prepare("x", bits="", draft_model="", progress=ignore)
