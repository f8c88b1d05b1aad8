"""The sequences of a KVCache: their lengths, their pages, and the step that some of them take together.

Note [Lengths on both sides]
    The lengths of sequences are kept twice: as Python ints, which decide about capacity and pages, and as
    tensors, which the operators read. A step begins with :meth:`KVCache.extend`, which counts and refuses;
    the calls of layers after it read tensors alone. So nothing waits for a GPU, and neither torch.compile
    nor a CUDA graph has to begin anew for the next token: tensors of the same shape are updated in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..arguments import checks
from . import cache_checks
from .page_pool import PagePool

__all__ = ["CachedSequences"]


class CachedSequences:
    """Sequences that begin, grow and end. What their tokens are is up to a :class:`.KVCache`.

    Args:
        sequences: the number of sequences at a time.
        capacity: the most tokens that a sequence can have.
        pool: the pages that they share; None if each is contiguous.
        device: that of the tensors.

    Attributes:
        cache_seqlens, block_table, cu_seqlens, packed_positions: as of :class:`selfattn_ext.KVCache`.
    """

    def __init__(self, sequences: int, capacity: int, pool: PagePool | None, device: torch.device) -> None:
        self.capacity = capacity
        self.device = device
        self._pool = pool
        self._lengths = [0] * sequences
        self._used = [False] * sequences
        self.block_table: Tensor | None = None
        self.cache_seqlens = torch.zeros(sequences, dtype=torch.int64, device=device)
        self._begin(list(range(sequences)), [0] * sequences)

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of each sequence, those of the step included."""
        return list(self._lengths)

    @property
    def free_pages(self) -> int:
        """The number of pages of the pool that are free; without pages, of sequences that are not in use."""
        return self._used.count(False) if self._pool is None else self._pool.free

    @property
    def positions(self) -> Tensor:
        """The places (B, L) of the tokens of the step, if all sequences have as many.

        Raises:
            ValueError: they have different numbers of tokens.
        """
        if self._step.uniform is None:
            raise ValueError("the sequences of this step have different numbers of tokens: packed_positions")
        return self.packed_positions.view(self._step.batch, self._step.uniform)

    def allocate(self) -> int:
        """Takes a sequence into use, with length 0.

        Returns:
            Its number.

        Raises:
            ValueError: all sequences are in use.
        """
        if False not in self._used:
            raise ValueError(f"all {len(self._used)} sequences of the cache are in use: free one")
        sequence = self._used.index(False)
        self._used[sequence] = True
        return sequence

    def free(self, sequence: int) -> None:
        """Ends a sequence, and a step that it takes part in: its pages go back to the pool, its number to
        allocate().

        Args:
            sequence: its number.

        Raises:
            ValueError, TypeError: there is no sequence of that number.
        """
        sequence = cache_checks.sequence_number("sequence", sequence, len(self._used))
        self._resize(sequence, 0)
        self._used[sequence] = False

    def reset(self) -> None:
        """Ends all sequences."""
        for sequence in range(len(self._used)):
            self.free(sequence)
        everything = list(range(len(self._used)))
        self._begin(everything, [0] * len(everything))

    def truncate(self, length: int, sequences: Iterable[int] | None = None) -> None:
        """Forgets all tokens from that position on, as after guesses of a draft model that were wrong. A step
        that loses tokens by it is over.

        Args:
            length: sequences that are not longer stay as they are.
            sequences: the numbers of those that are cut; all by default.

        Raises:
            ValueError, TypeError: naming the argument, what was given and what is allowed.
        """
        checks.integer("length", length, 0)
        for sequence in cache_checks.sequence_numbers(sequences, len(self._used)):
            self._resize(sequence, min(length, self._lengths[sequence]))

    def extend(self, counts: int | Sequence[int] = 1, sequences: Iterable[int] | None = None) -> None:
        """Begins a step: makes room for new tokens. All layers then append or attend, until the next step, or
        until one of its sequences is freed or cut off, which ends it.

        The tokens count from now on; truncate() takes back a step that is given up.

        Args:
            counts: the number of tokens to come, for all sequences of the step or one number for each.
            sequences: those that take part, in the order of the batch; all by default. They count as in use.

        Raises:
            ValueError, TypeError: a sequence would have more tokens than its capacity, the pool has too few
                pages, or an argument is wrong. Nothing has changed then.
        """
        chosen = cache_checks.sequence_numbers(sequences, len(self._used))
        numbers = cache_checks.token_counts(counts, len(chosen))
        missing = 0
        for sequence, count in zip(chosen, numbers, strict=True):
            length = self._lengths[sequence] + count
            if length > self.capacity:
                raise ValueError(
                    f"sequence {sequence} of the cache is full: it has {self._lengths[sequence]} tokens, "
                    f"{count} more are to come, and its capacity is {self.capacity}"
                )
            if self._pool is not None:
                missing += self._pool.lacking(sequence, length)
        if self._pool is not None and missing > self._pool.free:
            raise ValueError(
                f"the pool of {self._pool.pages} pages is exhausted: this step takes {missing} more of "
                f"{self._pool.page_size} tokens each, and {self._pool.free} are free; free() a sequence, or "
                "make the pool larger (pages=)"
            )
        before = [self._lengths[sequence] for sequence in chosen]
        for sequence, count in zip(chosen, numbers, strict=True):
            self._used[sequence] = True
            self._resize(sequence, self._lengths[sequence] + count)
        self._begin(chosen, before, numbers)

    def _resize(self, sequence: int, length: int) -> None:
        if length < self._lengths[sequence] and sequence in self._chosen:
            # Another sequence may have its pages by the time that a layer writes.
            self._ended = (
                f"the step is over, as its sequence {sequence} has been freed or cut off since: extend() "
                "begins the next"
            )
        self._lengths[sequence] = length
        if self._pool is not None:
            self._pool.resize(sequence, length)

    def _begin(self, chosen: list[int], before: list[int], counts: Sequence[int] | None = None) -> None:
        """Updates the tensors that layers read, in place if shapes are those of the step before."""
        counts = [0] * len(chosen) if counts is None else counts
        self._step = step = cache_checks.step_of(counts)
        self._chosen, self._ended = frozenset(chosen), ""
        lengths = torch.tensor([before, counts], dtype=torch.int64, device="cpu")
        starts = torch.zeros(len(chosen) + 1, dtype=torch.int64, device="cpu")
        torch.cumsum(lengths[1], 0, out=starts[1:])
        shifts = (lengths[0] - starts[:-1]).repeat_interleave(lengths[1], output_size=step.total)
        self.cache_seqlens = self._current("cache_seqlens", lengths[0])
        self._seqlens = self._current("_seqlens", lengths.sum(0))
        self.cu_seqlens = self._current("cu_seqlens", starts)
        self.packed_positions = self._current(
            "packed_positions", torch.arange(step.total, device="cpu") + shifts
        )
        everybody = chosen == list(range(len(self._used)))
        if self._pool is not None:
            table = self._pool.table if everybody else self._pool.table[chosen]
        elif everybody:
            self.block_table = None
            return
        else:
            # Each sequence counts as one page of its own.
            table = torch.tensor(chosen, dtype=torch.int32, device="cpu").unsqueeze(1)
        self.block_table = self._current("block_table", table)

    def _current(self, name: str, numbers: Tensor) -> Tensor:
        tensor = getattr(self, name, None)
        if tensor is None or tensor.shape != numbers.shape:
            return numbers.to(self.device, copy=True)
        if tensor.is_inference() and not torch.is_inference_mode_enabled():
            return numbers.to(self.device, copy=True)  # torch allows no write in place here
        return tensor.copy_(numbers)
