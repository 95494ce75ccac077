"""An adapter and its base in one folder, for everyone who is given the adapter's name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from paceline.adapted_model import ADAPTER_CONFIG, ADAPTER_FOLDER, EXIT_LAYER
from paceline.errors import ModelError, NotFound
from paceline.model_source import CacheSettings, lasting_reference, resolve
from tests.fakes.tiny_tokenizer import write_letters


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return CacheSettings().folder


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = write_letters(tmp_path / "base")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def write_adapter(folder: Path, base: str | None, **config: Any) -> Path:
    folder.mkdir(parents=True)
    names = {} if base is None else {"base_model_name_or_path": base}
    (folder / ADAPTER_CONFIG).write_text(json.dumps({"r": 2, **names}))
    (folder / "adapter_model.safetensors").write_bytes(b"change")
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_an_adapter_is_found_with_the_files_of_its_base_and_writes_none(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "mine", str(base), exit_layer=4, other=1)
    folder = resolve(str(adapter))
    assert folder.name.startswith("mine-")
    assert {path.name for path in folder.iterdir()} == {path.name for path in base.iterdir()} | {ADAPTER_FOLDER}
    assert [path.name for path in folder.iterdir() if not path.is_symlink()] == ["config.json"]
    expected = json.loads((base / "config.json").read_text()) | {EXIT_LAYER: 4}
    assert json.loads((folder / "config.json").read_text()) == expected
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert (folder / ADAPTER_FOLDER / "adapter_model.safetensors").read_bytes() == b"change"
    assert resolve(str(adapter)) == resolve(str(adapter), weights=False) == folder


def test_a_base_that_is_given_takes_the_place_of_the_one_that_the_adapter_names(base: Path, tmp_path: Path) -> None:
    for named in (None, "/nowhere/base"):
        folder = resolve(str(write_adapter(tmp_path / f"on-{named is None}", named)), base=str(base))
        assert (folder / "model.safetensors").read_bytes() == b"weights"
        assert (folder / ADAPTER_FOLDER).is_dir()
    with pytest.raises(NotFound, match=r"^there is no file gone"):
        resolve(str(tmp_path / "on-True"), base="gone.gguf")
    told: list[str] = []
    assert resolve(str(base), base="another", progress=told.append) == base
    assert told == [f"{base} is a whole model, not an adapter: it is served as it is, and another is not"]


def test_what_is_linked_keeps_its_permissions(base: Path, tmp_path: Path) -> None:
    (base / "model.safetensors").chmod(0o600)
    folder = resolve(str(write_adapter(tmp_path / "mine", str(base))))
    assert folder.stat().st_mode & 0o777 == 0o755
    assert (base / "model.safetensors").stat().st_mode & 0o777 == 0o600


def test_what_has_changed_is_joined_anew(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "mine", str(base), exit_layer=4)
    folders = {resolve(str(adapter))}
    for path in (adapter / "config.json", base / "model.safetensors"):
        os.utime(path, ns=(1, 1))
        folders.add(resolve(str(adapter)))
    (base / "more.safetensors").touch()
    folders.add(resolve(str(adapter)))
    assert len(folders) == 4


def test_the_exit_layer_may_stand_in_the_adapter_s_own_configuration(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "mine", str(base))
    (adapter / ADAPTER_CONFIG).write_text(json.dumps({"base_model_name_or_path": str(base), EXIT_LAYER: 3}))
    assert json.loads((resolve(str(adapter)) / "config.json").read_text())[EXIT_LAYER] == 3


def test_a_base_that_is_not_found_is_said_to_be_one(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "mine", "gone.gguf")
    with pytest.raises(
        NotFound, match=r"base_model_name_or_path of .*mine/adapter_config\.json: there is no file gone"
    ):
        resolve(str(adapter))


def test_a_reference_that_holds_in_any_working_directory(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(base.parent)
    assert lasting_reference("base") == lasting_reference("./base/") == str(base)
    assert lasting_reference("owner/name") == "owner/name"
    assert lasting_reference("smollm2-135m-instruct") == "smollm2-135m-instruct"


def test_an_adapter_without_a_base_or_on_another_adapter_is_refused(base: Path, tmp_path: Path, cache: Path) -> None:
    with pytest.raises(ModelError, match="names no base: put a folder"):
        resolve(str(write_adapter(tmp_path / "none", None)))
    with pytest.raises(NotFound, match="/nowhere/base"):
        resolve(str(write_adapter(tmp_path / "lost", "/nowhere/base")))
    first = write_adapter(tmp_path / "first", str(base))
    with pytest.raises(ModelError, match="is an adapter too: merge"):
        resolve(str(write_adapter(tmp_path / "second", str(first))))
    with pytest.raises(ModelError, match="is an adapter too: merge"):
        resolve(str(write_adapter(tmp_path / "own", str(tmp_path / "own"))))
    (first / ADAPTER_CONFIG).write_text("[]")
    with pytest.raises(ModelError, match="not an object of JSON"):
        resolve(str(first))
    (first / ADAPTER_CONFIG).write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        resolve(str(first))
    assert not list(cache.glob("models/*second*"))
