"""The table that is embedding and head at once: the rows and products of the plain one, to the bit."""

from __future__ import annotations

import pytest
import torch

from paceline.engine.native import tables
from paceline.engine.native.tables import TiedTable, head_rows
from paceline.engine.native.weights import MakeWeight, PlainWeight
from paceline.engine.packing import PackedLinear, PackedWeight
from paceline.errors import ConfigurationError

NUM_TOKENS, WIDTH = 200, 24


@pytest.fixture
def values(monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """Of a table that lies in four blocks, the last one smaller."""
    monkeypatch.setattr(tables, "_BLOCK_BYTES", 64 * WIDTH * 4)
    return torch.randn(NUM_TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))


def test_rows_are_the_plain_table_s(values: torch.Tensor) -> None:
    table = TiedTable(values)
    for ids in ([0], [63, 64, 5, 64, 199, 0], list(range(NUM_TOKENS)), [7, 7, 7]):
        tokens = torch.tensor(ids)
        rows = table.embed(tokens)
        assert torch.equal(rows, values[tokens])
        rows.add_(1.0)  # the rows are the caller's: this must not reach the table


def test_products_are_those_of_one_packed_weight(values: torch.Tensor) -> None:
    table, whole = TiedTable(values), PackedWeight(values)
    assert table.num_bytes == whole.num_bytes == values.nbytes
    for num_rows in (1, 4, 5, 17):
        inputs = torch.randn(num_rows, WIDTH)
        assert torch.equal(table(inputs), whole(inputs))


def test_what_stays_unpacked_is_bounded(values: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_RECENT_ROWS", 3)
    table = TiedTable(values)
    for ids in ([1, 2], [3, 4, 5, 6, 7], [6], [1]):
        assert torch.equal(table.embed(torch.tensor(ids)), values[torch.tensor(ids)])
        assert len(table._recent) <= 3


@pytest.mark.parametrize("make", [PlainWeight, PackedWeight, lambda weight, _bias: TiedTable(weight)])
def test_rows_of_any_head_can_be_copied(make: MakeWeight, values: torch.Tensor) -> None:
    tokens = torch.tensor([199, 3, 64])
    rows = head_rows(make(values, None), tokens)
    assert torch.equal(rows, values[tokens])
    rows.zero_()
    assert values[3].any()


def test_rows_of_another_kind_of_head_are_refused(values: torch.Tensor) -> None:
    with pytest.raises(ConfigurationError, match="quantization to none"):
        head_rows(PackedLinear(values, None), torch.tensor([1]))
