"""KVCache: keys and values of a decoder's layers and sequences, in slots or in pages of a pool.

Note [Lengths on both sides]
    The lengths of sequences are kept twice: as Python ints, which decide about capacity and pages, and as
    tensors, which the operators read. A step begins with :meth:`KVCache.extend`, which counts and refuses;
    the calls of layers after it read tensors alone. So nothing waits for a GPU, and neither torch.compile
    nor a CUDA graph has to begin anew for the next token: tensors of the same shape are updated in place.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from ..arguments import (
    DEFAULT_SOFTCAP,
    DEFAULT_WINDOW,
    REFUSALS,
    AttentionOptions,
    Keywords,
    SparseCall,
    call_checks,
    checks,
    explained,
    keywords_for,
    shapes,
    split_blocks,
)
from ..attend import results
from ..sparse.sequences import with_selection
from . import cache_checks, huge_pages
from .page_pool import PagePool
from .step import append_to_cache, attend_to_cache
from .step_with_functions import attend_with_functions

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..arguments.overloads import ForAny, ForAux, ForLse, ForOut, ForWeights, ForWeightsAndLse
    from ..flex.flex_call import MaskMod, ScoreMod
    from ..reference_statistics import AuxOutput

__all__ = ["KVCache"]


class KVCache:
    """Keys and values of several layers, for a number of sequences that begin, grow and end.

    A step of a decoder is one :meth:`extend`, which makes room for the tokens to come, and one :meth:`attend`
    per layer.

    Args:
        layers: the number of layers, which have a tensor of keys and one of values each.
        sequences: the number of sequences that it holds at a time. They are numbered from 0.
        kv_heads: Hk, heads of keys and values.
        head_dim: E, of keys; that of values is value_dim, by default the same.
        capacity: the most tokens that a sequence can have.
        page_size: tokens per page; None keeps each sequence contiguous.
        pages: the size of the pool that all sequences share; by default every sequence can become full.
        layout: "bhld" or "blhd", of the cache and of the tensors that attend takes; see
            :func:`selfattn_ext.attention_with_kvcache`.
        dtype: float64, float32, bfloat16 or float16.
        device: the device of the cache.

    Attributes:
        keys, values: one tensor per layer: (sequences, Hk, capacity, E), in pages (pages, Hk, page_size, E),
            with layout "blhd" the second and third dimension swapped. Rows that no sequence has filled are
            undefined.
        cache_seqlens: int64, the number of tokens that each sequence of the step had before it.
        block_table: int32, the pages of each sequence of the step; None if sequences are contiguous and
            all of them take part. With these two, :func:`selfattn_ext.attention_with_kvcache` takes the
            tensors of a layer.
        cu_seqlens: int64, the first row of each sequence if tokens are packed.
        packed_positions: int64, the place of each token of the step in its sequence, packed.
        capacity, page_size, layout, dtype, device: as given; without pages, page_size is the capacity.

    Raises:
        ValueError, TypeError: naming the argument, what was given and what is allowed.

    Example:
        >>> import torch, selfattn_ext
        >>> cache = selfattn_ext.KVCache(layers=2, sequences=3, kv_heads=4, head_dim=64, capacity=32)
        >>> for tokens in (5, 1):  # a prompt, then the token after it
        ...     cache.extend(tokens)
        ...     for layer in range(2):
        ...         query, key, value = torch.randn(3, 3, 4, tokens, 64).unbind()
        ...         out = cache.attend(layer, query, key, value)
        >>> cache.lengths, out.shape
        ([6, 6, 6], torch.Size([3, 4, 1, 64]))
    """

    def __init__(
        self,
        layers: int,
        sequences: int,
        kv_heads: int,
        head_dim: int,
        capacity: int,
        *,
        value_dim: int | None = None,
        page_size: int | None = None,
        pages: int | None = None,
        layout: str = "bhld",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        layers = checks.integer("layers", layers, 1)
        sequences = checks.integer("sequences", sequences, 1)
        kv_heads = checks.integer("kv_heads", kv_heads, 1)
        head_dim = checks.integer("head_dim", head_dim, 1)
        self.capacity = checks.integer("capacity", capacity, 1)
        value_dim = head_dim if value_dim is None else checks.integer("value_dim", value_dim, 1)
        if layout not in ("bhld", "blhd"):
            raise ValueError(f'layout must be "bhld" or "blhd", got {layout!r}')
        checks.float_dtype("dtype", dtype)
        self.layout = layout
        self.dtype = dtype
        self._pool: PagePool | None = None
        if page_size is None:
            if pages is not None:
                raise ValueError("pages needs a page_size")
            count, self.page_size = sequences, self.capacity
        else:
            self.page_size = checks.integer("page_size", page_size, 1)
            columns = -(-self.capacity // self.page_size)
            count = sequences * columns if pages is None else checks.integer("pages", pages, 1)
            self._pool = PagePool(count, self.page_size, sequences, columns)
        shape = (count, kv_heads, self.page_size) if layout == "bhld" else (count, self.page_size, kv_heads)
        # A pool fills page after page, but a short contiguous sequence would take more memory than it fills.
        empty = torch.empty if self._pool is None else huge_pages.empty
        self.keys, self.values = (
            [empty((*shape, width), dtype=dtype, device=device) for _ in range(layers)]
            for width in (head_dim, value_dim)
        )
        self.device = self.keys[0].device
        self._lengths = [0] * sequences
        self._used = [False] * sequences
        self.block_table: Tensor | None = None
        self.cache_seqlens = torch.zeros(sequences, dtype=torch.int64, device=self.device)
        self._begin(list(range(sequences)), [0] * sequences)

    def __repr__(self) -> str:
        shape, value_dim = self.keys[0].shape, self.values[0].size(-1)
        made = {
            "layers": len(self.keys),
            "sequences": len(self._lengths),
            "kv_heads": shape[1] if self.layout == "bhld" else shape[2],
            "head_dim": shape[3],
            "capacity": self.capacity,
        }
        if value_dim != shape[3]:
            made["value_dim"] = value_dim
        if self._pool is not None:
            made |= {"page_size": self.page_size, "pages": shape[0]}
        said = [f"{name}={number}" for name, number in made.items()]
        if self.layout != "bhld":
            said.append(f"layout={self.layout!r}")
        said += [f"dtype={self.dtype}", f"device={str(self.device)!r}"]
        free = "" if self._pool is None else f", {self.free_pages} pages free"
        return f"KVCache({', '.join(said)}) with lengths {reprlib.repr(self._lengths)}{free}"

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
                f"the pool of {self.keys[0].shape[0]} pages is exhausted: this step takes {missing} more of "
                f"{self.page_size} tokens each, and {self._pool.free} are free; free() a sequence, or make "
                "the pool larger (pages=)"
            )
        before = [self._lengths[sequence] for sequence in chosen]
        for sequence, count in zip(chosen, numbers, strict=True):
            self._used[sequence] = True
            self._resize(sequence, self._lengths[sequence] + count)
        self._begin(chosen, before, numbers)

    @overload
    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, attn_mask: Tensor | None = ...,
        dropout_p: float = ..., is_causal: bool = ..., scale: float | None = ...,
        score_mod: ScoreMod | None = ..., mask_mod: MaskMod | None = ..., indices: Tensor | None = ...,
        block_indices: Tensor | None = ..., block_size: int | None = ..., **options: Unpack[ForOut],
    ) -> Tensor: ...  # fmt: skip
    @overload
    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, attn_mask: Tensor | None = ...,
        dropout_p: float = ..., is_causal: bool = ..., scale: float | None = ...,
        score_mod: ScoreMod | None = ..., mask_mod: MaskMod | None = ..., indices: Tensor | None = ...,
        block_indices: Tensor | None = ..., block_size: int | None = ..., **options: Unpack[ForWeights],
    ) -> tuple[Tensor, Tensor]: ...  # fmt: skip
    @overload
    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, attn_mask: Tensor | None = ...,
        dropout_p: float = ..., is_causal: bool = ..., scale: float | None = ...,
        score_mod: ScoreMod | None = ..., mask_mod: MaskMod | None = ..., indices: Tensor | None = ...,
        block_indices: Tensor | None = ..., block_size: int | None = ..., **options: Unpack[ForLse],
    ) -> tuple[Tensor, Tensor]: ...  # fmt: skip
    @overload
    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, attn_mask: Tensor | None = ...,
        dropout_p: float = ..., is_causal: bool = ..., scale: float | None = ...,
        score_mod: ScoreMod | None = ..., mask_mod: MaskMod | None = ..., indices: Tensor | None = ...,
        block_indices: Tensor | None = ..., block_size: int | None = ..., **options: Unpack[ForWeightsAndLse],
    ) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip
    @overload
    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, attn_mask: Tensor | None = ...,
        dropout_p: float = ..., is_causal: bool = ..., scale: float | None = ...,
        score_mod: ScoreMod | None = ..., mask_mod: MaskMod | None = ..., indices: Tensor | None = ...,
        block_indices: Tensor | None = ..., block_size: int | None = ..., **options: Unpack[ForAux],
    ) -> tuple[Tensor, AuxOutput]: ...  # fmt: skip
    @overload
    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, attn_mask: Tensor | None = ...,
        dropout_p: float = ..., is_causal: bool = ..., scale: float | None = ...,
        score_mod: ScoreMod | None = ..., mask_mod: MaskMod | None = ..., indices: Tensor | None = ...,
        block_indices: Tensor | None = ..., block_size: int | None = ..., **options: Unpack[ForAny],
    ) -> Any: ...  # fmt: skip

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = True,
        scale: float | None = None,
        window_size: Sequence[int] = DEFAULT_WINDOW,
        softcap: float = DEFAULT_SOFTCAP,
        alibi_slopes: Tensor | None = None,
        sinks: Tensor | None = None,
        score_mod: ScoreMod | None = None,
        mask_mod: MaskMod | None = None,
        indices: Tensor | None = None,
        block_indices: Tensor | None = None,
        block_size: int | None = None,
        return_weights: bool = False,
        return_lse: bool = False,
        return_aux: Any = None,
    ) -> Any:
        """Writes the keys and values of the step into a layer, and attends to all that the sequences have.

        Args:
            layer: the number of the layer, from 0 on.
            query: (B, H, L, E) in the cache's layout, for B sequences with L new tokens each; or packed
                (total, H, E), for any numbers of tokens. Hk divides H.
            key, value: the same with Hk heads.
            attn_mask, dropout_p, scale: as in :func:`selfattn_ext.attention_with_kvcache`.
            is_causal: likewise, but True by default.
            window_size, softcap, alibi_slopes, sinks, score_mod, mask_mod: likewise.
            indices, block_indices, block_size: likewise; those of packed tokens are as in
                :func:`selfattn_ext.varlen_attention`.
            return_weights, return_lse, return_aux: likewise.

        Returns:
            out, shaped as query with the value's head dim; with the weights (B, H, L, capacity), the lse,
            (B, H, L) or packed (H, total), and an :class:`selfattn_ext.AuxOutput`, whose key_weights are
            (B, H, capacity), if asked for. It has no gradients.

        Raises:
            ValueError, TypeError: naming the argument, what was given and what is allowed; the cache is then
                as it was.
        """
        options = AttentionOptions(
            attn_mask, dropout_p, is_causal, scale, True, window_size, softcap, alibi_slopes, sinks, None,
            return_weights, return_lse, return_aux,
        )  # fmt: skip
        split_blocks.refuse("KVCache.attend")
        try:
            if not (type(is_causal) is type(return_weights) is type(return_lse) is bool):
                call_checks.flags(options)
            keys, values = self._caches(layer)
            (q, k, v), keywords = self._operands(query, key, value)
            keywords |= keywords_for(options, keys)
            keywords["seqlens_k"], keywords["query_offsets"] = self._seqlens, self.cache_seqlens
            if self.block_table is not None:
                keywords["block_table"] = self.block_table
            has_functions = score_mod is not None or mask_mod is not None
            if indices is not None or block_indices is not None or block_size is not None:
                form = shapes.Canonical(q, keys, values, (self._step.batch,), 4, query.dim() == 3)
                chosen = (indices, block_indices, block_size)
                options, keywords = with_selection(form, chosen, options, keywords, has_functions)
            given = (q, keys, values, k, v, self._step.batch, options, keywords)
            if not has_functions:
                step = attend_to_cache(*given)
            else:
                step = attend_with_functions(*given, score_mod, mask_mod, self.cache_seqlens)
        except REFUSALS as refusal:
            call = SparseCall(query, key, value, options, indices, block_indices, block_size)
            raise explained(refusal, query, cache_checks.attend, self, self._step, layer, call) from None
        if query.dim() == 3:
            return results(*shapes.restored_packed(*step[:3]), *step[3:])
        out, weights, lse, *aux = step
        if self.layout == "blhd":
            out = out.transpose(1, 2)
        return out if weights is None and lse is None and not aux else results(out, weights, lse, *aux)

    def append(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Writes the keys and values of the step into a layer, and does not attend.

        Args:
            layer, key, value: as :meth:`attend` takes them.

        Raises:
            ValueError, TypeError: as :meth:`attend` does.
        """
        try:
            keys, values = self._caches(layer)
            (k, v), keywords = self._operands(key, value)
            starts = keywords.get("cu_seqlens_q")
            append_to_cache(keys, values, k, v, self.cache_seqlens, starts, self.block_table)
        except REFUSALS as refusal:
            raise explained(refusal, key, cache_checks.append, self, self._step, layer, key, value) from None

    def _caches(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer in the operators' form."""
        keys, values = self.keys[layer], self.values[layer]
        if self.layout == "blhd":
            return keys.transpose(1, 2), values.transpose(1, 2)
        return keys, values

    def _operands(self, *tensors: Tensor) -> tuple[tuple[Tensor, ...], Keywords]:
        """Tokens of the step in the operators' form, and the keywords that packed ones need."""
        if self._ended:
            raise ValueError(self._ended)
        batch, rows = self._step.batch, self._step.uniform
        views = tensors
        keywords: Keywords = {}
        if tensors[0].dim() == 3:
            batch, rows = 1, self._step.total
            views = tuple(map(shapes.of_packed, tensors))
            keywords = {"cu_seqlens_q": self.cu_seqlens, "max_seqlen_q": self._step.longest}
        elif self.layout == "blhd":
            views = tuple(tensor.transpose(1, 2) for tensor in tensors)
        for view in views:
            if view.size(0) != batch or view.size(2) != rows:
                raise ValueError("not the tokens of the step")
        return views, keywords

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
