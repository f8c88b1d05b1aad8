"""The pool of pages that the sequences of a KVCache share."""

from __future__ import annotations

import torch

__all__ = ["PagePool"]


class PagePool:
    """Pages that sequences take as they grow, and give back as they shrink.

    Args:
        pages: the number of pages.
        page_size: tokens per page.
        sequences: the number of sequences that share them.
        columns: the most pages that a sequence can have.

    Attributes:
        pages, page_size: as given.
        table: (sequences, columns), int32 on the CPU: the pages of each sequence, in the order of its tokens.
            Entries past them are left over from earlier sequences.
    """

    def __init__(self, pages: int, page_size: int, sequences: int, columns: int) -> None:
        self.pages = pages
        self.page_size = page_size
        self.table = torch.zeros(sequences, columns, dtype=torch.int32, device="cpu")
        self._free = list(range(pages - 1, -1, -1))
        self._held: list[list[int]] = [[] for _ in range(sequences)]

    @property
    def free(self) -> int:
        """The number of pages that no sequence has."""
        return len(self._free)

    def lacking(self, sequence: int, length: int) -> int:
        """The number of further pages that a sequence would need for ``length`` tokens."""
        return self._pages_of(length) - len(self._held[sequence])

    def resize(self, sequence: int, length: int) -> None:
        """Has a sequence hold the pages for ``length`` tokens and no more. The pool must have enough."""
        held, count = self._held[sequence], self._pages_of(length)
        first = len(held)
        while len(held) > count:
            self._free.append(held.pop())
        while len(held) < count:
            held.append(self._free.pop())
        if count > first:
            self.table[sequence, first:count] = torch.tensor(held[first:], dtype=torch.int32, device="cpu")

    def _pages_of(self, length: int) -> int:
        return -(-length // self.page_size)
