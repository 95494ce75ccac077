"""Memory in use moves into huge pages where the system has them, and holds what it held."""

from __future__ import annotations

import ctypes
import mmap
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from paceline import huge_pages
from paceline.engine.packing import PackedWeight
from paceline.huge_pages import move_to_huge_pages

MIB = 1 << 20
PLENTY = 1 << 40


def huge_bytes_at(address: int) -> int:
    """Bytes in huge pages of the mapping that an address lies in, as the kernel counts them."""
    for mapping in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text("utf-8")):
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", mapping)
        if bounds and int(bounds[1], 16) <= address < int(bounds[2], 16):
            found = re.search(r"AnonHugePages:\s+(\d+) kB", mapping)
            return int(found[1]) << 10 if found else 0
    return 0


@contextmanager
def reserved(num_bytes: int) -> Iterator[tuple[mmap.mmap, int]]:
    """Memory of its own and its address, between pages that nobody may touch; not in use yet."""
    with mmap.mmap(-1, num_bytes + 2 * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        view = ctypes.c_char.from_buffer(memory)
        start = ctypes.addressof(view)
        libc = ctypes.CDLL(None)
        for fence in (start, start + num_bytes + mmap.PAGESIZE):
            assert libc.mprotect(ctypes.c_void_p(fence), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
        try:
            yield memory, start + mmap.PAGESIZE
        finally:
            libc.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(len(memory)), mmap.PROT_READ | mmap.PROT_WRITE)
            del view


def system_has_them() -> bool:
    """Whether this system makes huge pages when it is asked to: asked here without our code."""
    with reserved(4 * MIB) as (memory, address):
        memory[mmap.PAGESIZE : mmap.PAGESIZE + 4 * MIB] = bytes(4 * MIB)
        start = -(-address // (2 * MIB)) * 2 * MIB
        return bool(ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(2 * MIB), 25) == 0)


def test_memory_in_use_is_moved_and_keeps_its_contents() -> None:
    with reserved(8 * MIB) as (memory, address):
        text = bytes(range(256)) * (8 * MIB // 256)
        memory[mmap.PAGESIZE : mmap.PAGESIZE + 8 * MIB] = text
        move_to_huge_pages(PLENTY)
        assert memory[mmap.PAGESIZE : mmap.PAGESIZE + 8 * MIB] == text
        if system_has_them():
            assert huge_bytes_at(address) >= 6 * MIB


def test_memory_that_is_hardly_used_stays_untouched() -> None:
    with reserved(8 * MIB) as (memory, address):
        half = mmap.PAGESIZE + 4 * MIB
        memory[mmap.PAGESIZE : half : 2 * mmap.PAGESIZE] = bytes(4 * MIB // (2 * mmap.PAGESIZE))
        move_to_huge_pages(PLENTY)
        assert huge_bytes_at(address) == 0


def test_packed_weights_give_the_same_products_afterwards() -> None:
    torch.manual_seed(0)
    weight, rows = torch.randn(2048, 1024), torch.randn(5, 1024)
    packed = PackedWeight(weight)
    before = packed(rows)
    moved = move_to_huge_pages(PLENTY)
    assert torch.equal(packed(rows), before)
    if system_has_them():
        assert moved >= 6 * MIB
        assert huge_bytes_at(torch.ops.mkldnn.data_ptr(packed._packed) + 4 * MIB) >= 4 * MIB


def test_weights_that_a_cache_holds_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_libc", lambda: pytest.fail("asked for a huge page"))
    assert move_to_huge_pages(31 * MIB) == 0


def test_a_system_without_them_is_not_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huge_pages, "_MAPS", tmp_path / "maps")
    monkeypatch.setattr(huge_pages, "_libc", lambda: pytest.fail("asked for a huge page"))
    assert move_to_huge_pages(PLENTY) == 0


def test_only_private_memory_without_a_file_is_tried() -> None:
    mappings = """\
55d0c0000000-55d0c0600000 rw-p 00000000 00:00 0                          [heap]
7f0000000000-7f0000400000 rw-p 00000000 00:00 0
7f1000000000-7f1000400000 r--p 00000000 00:00 0
7f2000000000-7f2000400000 rw-s 00000000 00:01 12                         /dev/zero (deleted)
7f3000000000-7f3000400000 rw-p 00000000 fe:00 99                         /usr/lib/a library.so
7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0                          [stack]
"""
    assert list(huge_pages._private_memory(mappings)) == [
        (0x55D0C0000000, 0x55D0C0600000),
        (0x7F0000000000, 0x7F0000400000),
    ]
