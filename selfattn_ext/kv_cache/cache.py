"""KVCache: keys and values of a decoder's layers and sequences, in slots or in pages of a pool."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
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
from .cached_sequences import CachedSequences
from .page_pool import PagePool
from .step import append_to_cache, attend_to_cache
from .step_with_functions import attend_with_functions

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..arguments.overloads import ForAny, ForAux, ForLse, ForOut, ForWeights, ForWeightsAndLse
    from ..flex.flex_call import MaskMod, ScoreMod
    from ..reference_statistics import AuxOutput

__all__ = ["KVCache"]


class KVCache(CachedSequences):
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
        capacity = checks.integer("capacity", capacity, 1)
        value_dim = head_dim if value_dim is None else checks.integer("value_dim", value_dim, 1)
        if layout not in ("bhld", "blhd"):
            raise ValueError(f'layout must be "bhld" or "blhd", got {layout!r}')
        checks.float_dtype("dtype", dtype)
        self.layout = layout
        self.dtype = dtype
        pool = None
        if page_size is None:
            if pages is not None:
                raise ValueError("pages needs a page_size")
            count, self.page_size = sequences, capacity
        else:
            self.page_size = checks.integer("page_size", page_size, 1)
            columns = -(-capacity // self.page_size)
            count = sequences * columns if pages is None else checks.integer("pages", pages, 1)
            pool = PagePool(count, self.page_size, sequences, columns)
        shape = (count, kv_heads, self.page_size) if layout == "bhld" else (count, self.page_size, kv_heads)
        # A pool fills page after page, but a short contiguous sequence would take more memory than it fills.
        empty = torch.empty if pool is None else huge_pages.empty
        self.keys, self.values = (
            [empty((*shape, width), dtype=dtype, device=device) for _ in range(layers)]
            for width in (head_dim, value_dim)
        )
        super().__init__(sequences, capacity, pool, self.keys[0].device)

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
