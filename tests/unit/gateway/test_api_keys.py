"""API keys: what a file may hold, who is let in, rotation, and that no key is ever shown."""

from __future__ import annotations

import hmac
import logging
import os
from pathlib import Path

import pytest
from paceline_gateway.api_keys import ApiKeys

from paceline.errors import ConfigurationError, Unauthenticated

ALICE = "sk-alice-0123456789abcdef"
BOB = "sk-bob-0123456789abcdefgh"
FILE = f"# rotated in May\n\nalice: {ALICE}\n  bob :{BOB}  \n"


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(FILE)
    return path


def test_a_key_names_its_tenant(path: Path) -> None:
    keys = ApiKeys.load(path)
    assert keys.required
    assert keys.tenant(f"Bearer {ALICE}") == "alice"
    assert keys.tenant(f"bearer   {BOB} ") == "bob"


def test_without_a_file_nothing_is_asked_for() -> None:
    keys = ApiKeys.load(None)
    assert not keys.required
    assert keys.tenant(None) == keys.tenant("Bearer anything") == ""


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        ALICE,
        f"Basic {ALICE}",
        f"Bearer {ALICE}x",
        f"Bearer {ALICE[:-1]}",
        f"Bearer {ALICE} {BOB}",
        f"Bearer {ALICE.upper()}",
        "Bearer sk-secret-é\udc80",
        "Bearer alice",
    ],
)
def test_others_are_refused_and_told_what_to_send(path: Path, authorization: str | None) -> None:
    with pytest.raises(Unauthenticated, match="Authorization: Bearer KEY") as caught:
        ApiKeys.load(path).tenant(authorization)
    for secret in (ALICE, BOB, "sk-"):
        assert secret.lower() not in str(caught.value).lower()


def test_every_key_is_compared(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []
    real = hmac.compare_digest

    def compare(left: bytes, right: bytes) -> bool:
        compared.append(left)
        return real(left, right)

    keys = ApiKeys.load(path)
    monkeypatch.setattr(hmac, "compare_digest", compare)
    for shown in (ALICE, BOB):
        compared.clear()
        keys.tenant(f"Bearer {shown}")
        assert len(set(compared)) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no API key"),
        ("# only a comment\n", "no API key"),
        (f"alice: {ALICE}\n{BOB}\n", "line 2"),
        ("alice: short-sk-key\n", "line 1 .* has 12 characters; at least 16"),
        (f"alice: {ALICE}\nalice: {BOB}\n", "line 2 .* the name of an earlier line"),
        (f"alice: {ALICE}\nbob: {ALICE}\n", "line 2 .* the key of an earlier line"),
        (f"a b: {ALICE}\n", "the name in line 1"),
        (f": {ALICE}\n", "the name in line 1"),
        (f"alice: {ALICE} {BOB}\n", "visible ASCII"),
        (f"alice: {ALICE}é\n", "visible ASCII"),
        (f"{ALICE}: alice\n", "line 1 .* has 5 characters"),
    ],
)
def test_a_wrong_file_is_refused_without_showing_it(path: Path, text: str, message: str) -> None:
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=message) as caught:
        ApiKeys.load(path)
    assert caught.value.field == "api_keys_file"
    assert "sk-" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no-such-file"):
        ApiKeys.load(tmp_path / "no-such-file")
    with pytest.raises(ConfigurationError, match="cannot read"):
        ApiKeys.load(tmp_path)
    (tmp_path / "binary").write_bytes(b"alice: \xff\xfe")
    with pytest.raises(ConfigurationError, match="UTF-8"):
        ApiKeys.load(tmp_path / "binary")


def test_a_rotated_secret_is_taken_within_a_second(tmp_path: Path) -> None:
    """As Kubernetes does it: the file is a link into a folder, which is a link that is replaced."""
    for version, key in (("v1", ALICE), ("v2", BOB)):
        (tmp_path / version).mkdir()
        (tmp_path / version / "keys").write_text(f"team: {key}\n")
        os.utime(tmp_path / version / "keys", (1_700_000_000, 1_700_000_000))
    (tmp_path / "..data").symlink_to("v1")
    (tmp_path / "keys").symlink_to("..data/keys")
    clock = Clock()
    keys = ApiKeys(tmp_path / "keys", clock)

    (tmp_path / "..new").symlink_to("v2")
    (tmp_path / "..new").rename(tmp_path / "..data")
    assert keys.tenant(f"Bearer {ALICE}") == "team"
    clock.now += 1.0
    assert keys.tenant(f"Bearer {BOB}") == "team"
    with pytest.raises(Unauthenticated):
        keys.tenant(f"Bearer {ALICE}")


def test_the_file_is_looked_at_once_a_second_at_most(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    keys = ApiKeys(path, clock)
    looks: list[Path] = []
    stat = Path.stat

    def counting(self: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        looks.append(self)
        return stat(self, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(Path, "stat", counting)
    for _ in range(40):
        clock.now += 0.1
        keys.tenant(f"Bearer {ALICE}")
    assert 3 <= len(looks) <= 4


@pytest.mark.parametrize("broken", ["", "alice sk-without-a-colon-0123456789\n", None])
def test_a_broken_new_file_keeps_the_old_keys(path: Path, broken: str | None, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    keys = ApiKeys(path, clock)
    if broken is None:
        path.unlink()
    else:
        path.write_text(broken)
    for _ in range(3):
        clock.now += 1.0
        assert keys.tenant(f"Bearer {ALICE}") == "alice"
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1, "said once for each state of the file"
    assert "old API keys stay in force" in errors[0].getMessage()
    assert "sk-" not in caplog.text

    path.write_text(f"carol: {BOB}\n")
    clock.now += 1.0
    assert keys.tenant(f"Bearer {BOB}") == "carol"


def test_a_file_that_can_be_read_only_later_is_taken_then(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rights are set after it was put there, which leaves no mark on what it holds, its size or its time."""
    clock = Clock()
    keys = ApiKeys(path, clock)
    path.write_text(f"carol: {BOB}\n")

    def refuse(self: Path, encoding: str) -> str:
        raise PermissionError(13, "Permission denied", str(self), encoding)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", refuse)
        clock.now += 1.0
        assert keys.tenant(f"Bearer {ALICE}") == "alice"
    clock.now += 1.0
    assert keys.tenant(f"Bearer {BOB}") == "carol"


def test_nothing_that_is_printed_has_a_key_in_it(path: Path) -> None:
    keys = ApiKeys.load(path)
    assert repr(keys) == str(keys) == "ApiKeys(2 keys)"
    assert ALICE not in repr(vars(keys)), "only hashes are kept"
