"""Huge pages of the system, which are asked for where a KV cache is in pages."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from selfattn_ext import KVCache
from selfattn_ext.kv_cache import huge_pages

SMAPS = Path("/proc/self/smaps")

# malloc maps new memory for tensors of this size, and never reuses freed memory for them.
MANY = (1 << 24,)

on_linux = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists() or not SMAPS.exists(),
    reason="the system has no huge pages, or does not report them",
)


def flags(address: int) -> list[str]:
    """Returns the system's flags for the memory at an address; "hg" means that huge pages were asked for."""
    found = False
    for line in SMAPS.read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            begin, end = (int(text, 16) for text in words[0].split("-"))
            found = begin <= address < end
        elif found and words[0] == "VmFlags:":
            return words[1:]
    raise AssertionError(f"no mapping of {address:#x}")


def asked_for(tensor: Tensor) -> bool:
    return "hg" in flags(tensor.data_ptr() + tensor.nbytes // 2)


@on_linux
class TestAsked:
    @pytest.mark.parametrize("layout", ["bhld", "blhd"])
    def test_pages_of_a_pool(self, layout):
        cache = KVCache(2, 4, 2, 64, 32768, page_size=16, layout=layout)
        assert all(asked_for(tensor) for tensor in [*cache.keys, *cache.values])

    def test_one_piece_is_left_alone(self):
        """In slots, a short sequence would take 2 MB per head, not the 4096 bytes that it has filled."""
        cache = KVCache(2, 4, 2, 64, 32768)
        assert not any(asked_for(tensor) for tensor in [*cache.keys, *cache.values])

    def test_neighbours_are_left_alone(self):
        before, asked, after = (torch.empty(MANY), huge_pages.empty(MANY, torch.float32), torch.empty(MANY))
        assert [asked_for(tensor) for tensor in (before, asked, after)] == [False, True, False]


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (1 << 10, 1 << 10)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_torch_empty(shape, dtype):
    tensor = huge_pages.empty(shape, dtype)
    assert (tensor.shape, tensor.dtype, tensor.device.type) == (torch.Size(shape), dtype, "cpu")
    tensor.fill_(2)
    assert bool((tensor == 2).all())


def test_where_there_is_no_memory():
    assert huge_pages.empty(MANY, dtype=torch.float32, device="meta").device.type == "meta"
    with FakeTensorMode():
        assert huge_pages.empty(MANY, dtype=torch.float32).shape == MANY


def test_systems_that_cannot_be_asked(monkeypatch):
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    huge_pages._madvise.cache_clear()
    try:
        assert huge_pages.empty(MANY, dtype=torch.float32).shape == MANY
    finally:
        huge_pages._madvise.cache_clear()
