"""References of drafting heads, and what is said when there is nothing behind one."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import NotFound, Unavailable
from paceline.head_source import is_head_reference, resolve_head


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    assert resolve_head(str(tmp_path)) == tmp_path


def test_what_is_neither_a_folder_nor_an_id_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="paceline train") as caught:
        resolve_head(str(tmp_path / "none"), field="self_draft_model")
    assert caught.value.field == "self_draft_model"


def test_a_hub_id_offline_says_what_else_to_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    told: list[str] = []
    with pytest.raises(Unavailable, match="give the folder of a checkpoint"):
        resolve_head("owner/eagle-head", progress=told.append)
    assert told == ["looking for owner/eagle-head in the hub's cache and on the hub"]


@pytest.mark.parametrize(
    ("reference", "possible"), [("owner/head", True), ("head", False), ("a/b/c", False), ("", False)]
)
def test_what_may_be_a_head(reference: str, possible: bool) -> None:
    assert is_head_reference(reference) is possible
