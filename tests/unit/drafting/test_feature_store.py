"""The drafter's store of features: they follow one another, within a bound."""

from __future__ import annotations

import pytest
import torch
from paceline_drafter.feature_store import FeatureStore

from paceline.engine.feature_bytes import from_features, to_features
from paceline.errors import CapacityExceeded, InvalidArgument
from paceline.messages import FeatureDtype, FeatureFormat, Features

WIDTH = 4
FORM = FeatureFormat("final_norm", WIDTH)
CPU = torch.device("cpu")


def rows(first_row: int, stop: int, mark: float = 0.0) -> torch.Tensor:
    return torch.arange(first_row, stop, dtype=torch.float32)[:, None].expand(-1, WIDTH) + mark


def features(first_row: int, stop: int, mark: float = 0.0) -> Features:
    return to_features(rows(first_row, stop, mark), first_row, FeatureDtype.FLOAT32)


def store_of(num_rows: int = 1000, form: FeatureFormat = FORM) -> tuple[FeatureStore, list[None]]:
    """A store with room for so many rows, and its short starts."""
    store, short_starts = FeatureStore(form, max_bytes=num_rows * WIDTH * 4), list[None]()
    store.on_short_start = lambda: short_starts.append(None)
    return store, short_starts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", list(FeatureDtype))
def test_rows_survive_the_wire(name: FeatureDtype, dtype: torch.dtype) -> None:
    sent = torch.linspace(-2, 2, 12, dtype=dtype).view(3, 4)
    message = to_features(sent, 5, name)
    assert (message.first_row, message.end, len(message.data)) == (5, 8, 3 * message.row_bytes)
    got = from_features(message, width=4, dtype=dtype, device=CPU)
    assert got.dtype is dtype
    torch.testing.assert_close(got, sent, rtol=1e-2, atol=0)


def test_another_width_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="have 4 numbers per row, this drafter builds on 5"):
        from_features(features(0, 2), width=5, dtype=torch.float32, device=CPU)


def test_rows_that_follow_are_added_and_known_ones_stay() -> None:
    store, short_starts = store_of()
    store.add("s", features(0, 70))
    held = store.add("s", features(60, 200, mark=0.5))
    assert (held.first_row, held.num_rows) == (0, 200)
    assert torch.equal(held.read(0, 200), torch.cat([rows(0, 70), rows(70, 200, 0.5)]))
    assert torch.equal(held.read(69, 71), torch.cat([rows(69, 70), rows(70, 71, 0.5)]))
    store.add("s", features(10, 20))
    assert held.num_rows == 200
    assert not short_starts
    with pytest.raises(IndexError):
        held.read(150, 201)


def test_a_gap_is_not_taken_unless_the_session_starts_short() -> None:
    store, short_starts = store_of()
    store.add("s", features(0, 3))
    assert store.add("s", features(5, 8)).num_rows == 3
    held = store.add("s", features(5, 8), starts_short=True)
    assert (held.first_row, held.num_rows, len(short_starts)) == (5, 8, 1)
    assert torch.equal(held.read(5, 8), rows(5, 8))
    assert store.rows("s", 8) is held
    assert store.rows("s", 9) is None
    assert store.rows("other", 0) is None


def test_rows_go_with_their_tokens() -> None:
    store, _ = store_of()
    held = store.add("s", features(5, 12), starts_short=True)
    held.crop(9)
    assert torch.equal(held.read(5, 9), rows(5, 9))
    store.add("s", features(9, 11, mark=0.5))
    assert torch.equal(held.read(8, 11), torch.cat([rows(8, 9), rows(9, 11, 0.5)]))
    held.crop(5)
    assert (held.first_row, held.num_rows) == (0, 0)


def test_a_method_that_reads_the_last_row_only_keeps_no_others() -> None:
    store, short_starts = store_of(form=FeatureFormat("final_norm", WIDTH, only_last=True))
    store.add("s", features(7, 8))
    held = store.add("s", features(19, 20))
    assert (held.first_row, held.num_rows) == (19, 20)
    assert not short_starts


def test_sessions_that_were_used_longest_ago_lose_their_rows_first() -> None:
    store, short_starts = store_of(num_rows=300)
    for name in ("a", "b", "c"):
        store.add(name, features(0, 100))
    store.of("a")
    store.add("d", features(0, 100))
    assert [store.of(name).num_rows for name in ("a", "b", "c", "d")] == [100, 0, 100, 100]
    store.add("e", features(0, 100), busy=("a", "c"))
    assert [store.of(name).num_rows for name in ("a", "c", "d", "e")] == [100, 100, 0, 100]
    assert not short_starts  # they are brought again in whole
    assert store.num_bytes <= 300 * WIDTH * 4
    store.forget("a")
    assert store.num_bytes <= 200 * WIDTH * 4


def test_busy_sessions_leave_no_room_beyond_the_bound() -> None:
    store, short_starts = store_of(num_rows=300)
    for name in ("a", "b"):
        store.add(name, features(0, 100))
    held = store.add("c", features(0, 90), busy=("a", "b"))
    assert held.num_rows == 90
    store.add("c", features(90, 300), busy=("a", "b"))
    store.add("d", features(0, 60), busy=("a", "b", "c"))
    assert [store.of(name).num_rows for name in ("a", "b", "c", "d")] == [100, 100, 90, 0]
    assert store.num_bytes <= 300 * WIDTH * 4
    assert not short_starts
    assert store.add("d", features(0, 60)).num_rows == 60, "as soon as the others are idle"
    assert store.num_bytes <= 300 * WIDTH * 4


def test_one_session_alone_keeps_its_newest_rows() -> None:
    store, short_starts = store_of(num_rows=100)
    store.add("s", features(0, 90))
    held = store.add("s", features(90, 130))
    assert (held.first_row, held.num_rows, len(short_starts)) == (30, 130, 1)
    assert torch.equal(held.read(30, 130), rows(30, 130))
    assert store.num_bytes == 100 * WIDTH * 4
    with pytest.raises(CapacityExceeded, match="raise feature_bytes"):
        store.add("t", features(0, 101))
