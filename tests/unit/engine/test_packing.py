"""Packed linear layers give the products of the plain ones, in place and once in memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from paceline.engine.packing import PackedLinear, pack_linears, packing_obstacle, padded_count


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("pad_to_rows", [1, 4])
@pytest.mark.parametrize("shape", [(1, 24), (3, 24), (9, 24), (1, 1, 24), (1, 2, 24), (2, 3, 24), (1, 33, 24), (24,)])
def test_a_packed_layer_multiplies_like_a_plain_one(shape: tuple[int, ...], pad_to_rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(24, 40, bias=bias)
    packed = PackedLinear(plain.weight, plain.bias, pad_to_rows)
    inputs = torch.randn(shape)
    with torch.inference_mode():
        product = packed(inputs)
    assert product.shape == (*shape[:-1], 40)
    torch.testing.assert_close(product, functional.linear(inputs, plain.weight, plain.bias))


def test_rows_of_neighbours_change_no_bit() -> None:
    torch.manual_seed(0)
    packed = PackedLinear(torch.randn(40, 24), None, 4)
    rows, others = torch.randn(1, 5, 24), torch.randn(1, 5, 24)
    with torch.inference_mode():
        alone, crowded = packed(rows), packed(torch.cat([rows[:, :2], others[:, 2:]], dim=1))
    assert torch.equal(alone[:, :2], crowded[:, :2])


@pytest.mark.parametrize("least", [1, 4])
def test_many_rows_come_in_few_numbers_and_few_of_them_for_nothing(least: int) -> None:
    counts = {num_rows: padded_count(num_rows, least) for num_rows in range(1, 513)}
    assert all(num_rows <= count <= max(least, num_rows * 17 / 16) for num_rows, count in counts.items())
    assert all(counts[num_rows] == max(num_rows, least) for num_rows in range(1, 33))
    assert all(counts[count] == count for count in set(counts.values()))
    assert len(set(counts.values())) == 33 - least + 64


def test_where_the_kernels_do_not_depend_on_it_nothing_is_padded() -> None:
    assert [padded_count(num_rows, 0) for num_rows in range(1, 513)] == list(range(1, 513))


class TiedModel(nn.Module):
    """An embedding, a layer and a head that shares the embedding's table."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.body = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Bilinear(16, 16, 16))
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("table", torch.arange(3), persistent=False)
        self.requires_grad_(requires_grad=False)


def test_every_plain_linear_is_replaced_and_the_tied_table_stays() -> None:
    model = TiedModel()
    table = model.embedding.weight.clone()
    report = pack_linears(model)
    assert isinstance(model.head, PackedLinear)
    assert isinstance(model.body[0], PackedLinear)
    assert isinstance(model.body[2], nn.Bilinear)
    assert torch.equal(model.embedding.weight, table)
    assert (report.num_packed, report.reason) == (2, "")
    assert report.packed_bytes == 4 * (16 * 16 + 16 + 16 * 50)
    assert report.duplicated_bytes == 4 * 16 * 50
    assert dict(model.named_buffers())["table"].tolist() == [0, 1, 2]
    assert "table" not in model.state_dict()


def test_other_number_formats_are_left_alone_with_the_reason() -> None:
    model = nn.Sequential(nn.Linear(8, 8)).to(torch.bfloat16)
    assert pack_linears(model).reason == packing_obstacle(model) == "weights are torch.bfloat16"
    assert type(model[0]) is nn.Linear


def test_without_the_kernel_library_nothing_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    model = nn.Sequential(nn.Linear(8, 8))
    assert pack_linears(model).reason == "this build of torch lacks oneDNN"
    assert type(model[0]) is nn.Linear
