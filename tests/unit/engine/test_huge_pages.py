"""Memory moves into huge pages where the system has them, and holds what it held."""

from __future__ import annotations

import ctypes
import mmap
import re
from pathlib import Path

import pytest
import torch

from paceline.engine import huge_pages
from paceline.engine.huge_pages import move_to_huge_pages
from paceline.engine.packing import PackedWeight

MIB = 1 << 20


def huge_bytes_at(address: int) -> int:
    """Bytes in huge pages of the mapping that an address lies in, as the kernel counts them."""
    for mapping in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text("utf-8")):
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", mapping)
        if bounds and int(bounds[1], 16) <= address < int(bounds[2], 16):
            found = re.search(r"AnonHugePages:\s+(\d+) kB", mapping)
            return int(found[1]) << 10 if found else 0
    return 0


def system_has_them() -> bool:
    """Whether this system makes huge pages when it is asked to: asked here without our code."""
    memory = mmap.mmap(-1, 4 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(bytes(4 * MIB))
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    start = -(-address // (2 * MIB)) * 2 * MIB
    libc = ctypes.CDLL(None)
    return bool(libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(2 * MIB), 25) == 0)


def test_memory_in_use_is_moved_and_keeps_its_contents() -> None:
    values = torch.randn(8 * MIB // 4)
    before = values.clone()
    move_to_huge_pages(values.data_ptr(), values.nbytes)
    assert torch.equal(values, before)
    if system_has_them():
        assert huge_bytes_at(values.data_ptr() + values.nbytes // 2) >= 6 * MIB


def test_a_packed_weight_lies_in_them_and_gives_the_same_products() -> None:
    torch.manual_seed(0)
    weight, rows = torch.randn(2048, 1024), torch.randn(5, 1024)
    packed = PackedWeight(weight)
    torch.testing.assert_close(packed(rows), rows @ weight.T, rtol=1e-4, atol=1e-4)
    if system_has_them():
        middle = torch.ops.mkldnn.data_ptr(packed._packed) + 4 * MIB
        assert huge_bytes_at(middle) >= 6 * MIB


@pytest.mark.parametrize("num_bytes", [0, 1, MIB // 2 - 1])
def test_small_memory_is_left_alone(num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_page_size", lambda: 2 * MIB)
    monkeypatch.setattr(huge_pages, "_libc", lambda: pytest.fail("asked for a huge page"))
    move_to_huge_pages(10 * MIB, num_bytes)


def test_a_system_without_them_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_page_size", lambda: 0)
    monkeypatch.setattr(huge_pages, "_libc", lambda: pytest.fail("asked for a huge page"))
    move_to_huge_pages(10 * MIB, 100 * MIB)


def test_a_range_that_is_not_there_is_no_error() -> None:
    move_to_huge_pages(1 << 46, 8 * MIB)
