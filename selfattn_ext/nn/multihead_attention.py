"""MultiheadAttention, a drop-in for torch.nn.MultiheadAttention."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parameter import Parameter

from ..arguments import checks, split_blocks
from ..collecting import request_for
from ..functional import scaled_dot_product_attention
from .layer_checks import check_input, check_positive, given, is_traced, step_of_trace
from .rotary import rotary_embedding


class MultiheadAttention(nn.MultiheadAttention):
    """A drop-in for torch.nn.MultiheadAttention on the package's kernels (Vaswani et al. 2017, section
    3.2.2).

    Constructor, parameters, initialisation, state_dict keys, forward arguments and results are torch's, so
    that it loads torch's checkpoints and can take the place of ``self_attn`` in
    torch.nn.TransformerEncoderLayer and TransformerDecoderLayer. What differs:

    - A query whose keys are all hidden gets zeros (before the output projection), where torch gives NaN.
    - ``is_causal=True`` needs no attn_mask. Together with one it is the hint that torch describes: the layer
      assumes that the mask is the causal one and does not read it, whatever else is asked for.
    - key_padding_mask and attn_mask may differ in dtype, and bool masks are not turned into float ones.
    - Wrong arguments raise TypeError or ValueError, where torch raises AssertionError or RuntimeError.

    Args:
        embed_dim, num_heads, dropout, bias: as in :class:`torch.nn.MultiheadAttention`.
        add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype: likewise.
        num_kv_heads: key and value heads, a divisor of num_heads; each serves num_heads / num_kv_heads query
            heads (grouped-query attention, Ainslie et al. 2023, https://arxiv.org/abs/2305.13245; 1 is
            multi-query attention). The projections of keys and values shrink accordingly.
        rotary: whether to rotate queries and keys by their positions, by
            :func:`selfattn_ext.nn.rotary_embedding` (Su et al. 2021).
        rotary_base, rotary_interleaved: base and interleaved of the rotation.
        window_size: (left, right), how many keys before and after its own position a query sees; −1 is no
            bound.

    In eval mode without gradients, torch.nn.TransformerEncoderLayer may compute its output from the
    parameters alone, without calling this layer (torch.backends.mha.set_fastpath_enabled(False) forbids
    that). The result is the same, except for queries whose keys are all hidden. torch never does so if
    num_kv_heads, rotary or window_size are used, which its fast path lacks.

    Raises:
        ValueError: a size is not positive, num_heads does not divide embed_dim, num_kv_heads does not divide
            num_heads, rotary is used with an odd head size, a window is combined with add_bias_kv or
            add_zero_attn (whose keys have no position), or a bound of the window is below −1.

    Example:
        >>> import torch
        >>> from selfattn_ext import MultiheadAttention
        >>> layer = MultiheadAttention(64, 8, batch_first=True, num_kv_heads=2, rotary=True)
        >>> x = torch.randn(2, 10, 64)
        >>> out, weights = layer(x, x, x, is_causal=True)
        >>> out.shape, weights.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 10, 10]))
        >>> torchs = torch.nn.MultiheadAttention(64, 8)
        >>> MultiheadAttention(64, 8).load_state_dict(torchs.state_dict())
        <All keys matched successfully>
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        num_kv_heads: int | None = None,
        rotary: bool = False,
        rotary_base: float = 10000.0,
        rotary_interleaved: bool = False,
        window_size: tuple[int, int] = (-1, -1),
    ) -> None:
        checks.flags(rotary=rotary, rotary_interleaved=rotary_interleaved)
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_positive(embed_dim=embed_dim, num_heads=num_heads, num_kv_heads=num_kv_heads)
        if embed_dim % num_heads:
            raise ValueError(
                f"embed_dim must be divisible by num_heads, got embed_dim={embed_dim}, num_heads={num_heads}"
            )
        if num_heads % num_kv_heads:
            raise ValueError(
                f"num_heads must be divisible by num_kv_heads, got num_heads={num_heads}, "
                f"num_kv_heads={num_kv_heads}"
            )
        if rotary and embed_dim // num_heads % 2:
            raise ValueError(f"rotary needs an even embed_dim / num_heads, got {embed_dim // num_heads}")
        if len(window_size) != 2 or min(window_size) < -1:
            raise ValueError(f"window_size must be (left, right), each at least -1, got {window_size}")
        if tuple(window_size) != (-1, -1) and (add_bias_kv or add_zero_attn):
            raise ValueError(
                "window_size does not combine with add_bias_kv or add_zero_attn: their keys have no position"
            )
        super().__init__(
            embed_dim,
            num_heads,
            dropout,
            bias,
            add_bias_kv,
            add_zero_attn,
            kdim,
            vdim,
            batch_first,
            device,
            dtype,
        )
        self.num_kv_heads = num_kv_heads
        self.rotary = rotary
        self.rotary_base = rotary_base
        self.rotary_interleaved = rotary_interleaved
        self.window_size = checks.window(window_size)
        if num_kv_heads != num_heads:
            self._shrink_keys_and_values(device, dtype)
        if num_kv_heads != num_heads or rotary or self.window_size != (-1, -1):
            # False keeps torch.nn.TransformerEncoderLayer from computing the layer from the parameters alone.
            # This class reads only `in_proj_weight is None` to know how the projections are stored.
            self._qkv_same_embed_dim = False

    def _shrink_keys_and_values(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        def empty(*shape: int) -> Parameter:
            return Parameter(torch.empty(shape, device=device, dtype=dtype))

        kv_dim = self.num_kv_heads * self.head_dim
        if self.in_proj_weight is not None:
            self.in_proj_weight = empty(self.embed_dim + 2 * kv_dim, self.embed_dim)
        else:
            self.k_proj_weight = empty(kv_dim, self.kdim)
            self.v_proj_weight = empty(kv_dim, self.vdim)
        if self.in_proj_bias is not None:
            self.in_proj_bias = empty(self.embed_dim + 2 * kv_dim)
        if self.bias_k is not None:
            self.bias_k = empty(1, 1, kv_dim)
            self.bias_v = empty(1, 1, kv_dim)
        self._reset_parameters()

    def _reset_parameters(self) -> None:
        for weight in (self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight):
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)
        for bias in (self.bias_k, self.bias_v):
            if bias is not None:
                nn.init.xavier_normal_(bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        return_aux: Any = None,
    ) -> Any:
        """Attends from query to key and value, as torch.nn.MultiheadAttention.forward.

        Args:
            query: (L, N, embed_dim), with batch_first (N, L, embed_dim), or unbatched (L, embed_dim).
            key: as query, with S for L and kdim for embed_dim.
            value: as query, with S for L and vdim for embed_dim.
            key_padding_mask: (N, S), unbatched (S); bool, True hides the key, or float, added to its scores.
            need_weights: whether to return the weights; without them no (N, H, L, S) is stored.
            attn_mask: (L, S) or (N · num_heads, L, S); bool, True hides, or float, added to the scores. A
                float mask that requires grad gets its gradient.
            average_attn_weights: whether the weights are averaged over the heads.
            is_causal: query i sees only the keys 0..i; the class says what it means together with attn_mask.
            return_aux: an :class:`selfattn_ext.AuxRequest`: also return the statistics that it asks for, an
                :class:`selfattn_ext.AuxOutput` (N, num_heads, L), as the third result. key_weights has the
                keys of add_bias_kv and add_zero_attn, too.

        Returns:
            The output in query's shape, and the weights (N, L, S), unbatched (L, S), with a dimension
            num_heads before L if they are not averaged, or None without need_weights. In training the weights
            are those after dropout.

        Raises:
            TypeError: an argument is not a tensor, or has the wrong dtype.
            ValueError: an argument has the wrong shape.
        """
        if is_traced(self, query):
            return step_of_trace(
                self,
                query,
                key,
                value,
                key_padding_mask,
                need_weights,
                attn_mask,
                average_attn_weights,
                is_causal,
                return_aux=return_aux,
            )
        if query is key is value and isinstance(query, Tensor) and query.is_nested:
            if return_aux is not None:
                raise ValueError("return_aux must be None for nested tensors")
            return self._forward_nested(
                query, key_padding_mask, need_weights, attn_mask, average_attn_weights
            )
        checks.flags(is_causal=is_causal)
        is_batched = self._check_inputs(query, key, value)
        q, k, v = self._project(query, key, value)
        length, source = q.shape[2], k.shape[2]
        if self.bias_k is not None and self.bias_v is not None:
            k, v = _append(k, self.bias_k), _append(v, self.bias_v)
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        extra = k.shape[2] - source

        masks = self._check_masks(attn_mask, key_padding_mask, q.shape[0], length, source, is_batched)
        attn_mask, key_padding_mask = masks
        if is_causal and extra:
            # Appended keys are visible to all queries, so the kernels' causal rule does not fit.
            if attn_mask is None:
                attn_mask = torch.ones(length, source, dtype=torch.bool, device=q.device).triu_(1)
            is_causal = False
        elif is_causal:
            attn_mask = None
        mask = _merge(attn_mask, key_padding_mask)
        if mask is not None and extra:
            mask = F.pad(mask, (0, extra), value=mask.dtype == torch.bool)

        request = request_for(self, return_aux)
        result = scaled_dot_product_attention(
            q,
            k,
            v,
            mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=is_causal,
            enable_gqa=self.num_kv_heads != self.num_heads,
            window_size=self.window_size,
            return_weights=bool(need_weights),
            return_aux=request,
        )
        out, *rest = result if isinstance(result, tuple) else (result,)
        aux = given(self, [] if request is None else [rest.pop()], return_aux, self.num_kv_heads)
        weights = rest[0] if need_weights else None
        swapped = is_batched and not self.batch_first
        out = self.out_proj((out.permute(2, 0, 1, 3) if swapped else out.transpose(1, 2)).flatten(2))
        if weights is not None and average_attn_weights:
            weights = weights.mean(dim=1)
        if is_batched:
            return out, weights, *aux
        aux = [type(each)(*(None if part is None else part.squeeze(0) for part in each)) for each in aux]
        return out.squeeze(0), None if weights is None else weights.squeeze(0), *aux

    def _forward_nested(self, x: Tensor, key_padding_mask: Tensor | None, *options: Any) -> Any:
        if self.in_proj_weight is None or not self._qkv_same_embed_dim:
            raise ValueError(
                "query may be a nested tensor only in a layer without kdim, vdim and options that "
                "torch.nn.MultiheadAttention lacks"
            )
        need_weights, attn_mask, average_attn_weights = options
        return super().forward(x, x, x, key_padding_mask, need_weights, attn_mask, average_attn_weights)

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Raises for inputs that do not fit, and returns whether they have a batch dimension."""
        for name, tensor, features in (
            ("query", query, self.embed_dim),
            ("key", key, self.kdim),
            ("value", value, self.vdim),
        ):
            check_input(name, tensor, features, self.out_proj.weight)
            if tensor.dim() != query.dim() or tensor.dim() not in (2, 3):
                raise ValueError(
                    f"query, key and value must all be 2-D or all be 3-D, got query {tuple(query.shape)}, "
                    f"{name} {tuple(tensor.shape)}"
                )
        if key.shape[:-1] != value.shape[:-1]:
            raise ValueError(
                f"key and value must agree in all but the last dimension, got key {tuple(key.shape)}, "
                f"value {tuple(value.shape)}"
            )
        batch_dim = 0 if self.batch_first else 1
        if query.dim() == 3 and query.shape[batch_dim] != key.shape[batch_dim]:
            raise ValueError(
                f"query and key must have the same batch size (dimension {batch_dim}), got query "
                f"{tuple(query.shape)}, key {tuple(key.shape)}"
            )
        return query.dim() == 3

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Projects to queries (N, H, L, D), keys and values (N, H_kv, S, D), in as few products as it can."""
        kv_dim = self.num_kv_heads * self.head_dim
        sizes = (self.embed_dim, kv_dim, kv_dim)
        bias = self.in_proj_bias
        if self.in_proj_weight is None:
            biases = (None,) * 3 if bias is None else bias.split(sizes)
            q = F.linear(query, self.q_proj_weight, biases[0])
            k = F.linear(key, self.k_proj_weight, biases[1])
            v = F.linear(value, self.v_proj_weight, biases[2])
        elif query is key is value:
            q, k, v = F.linear(query, self.in_proj_weight, bias).split(sizes, dim=-1)
        elif key is value:
            halves = (self.embed_dim, 2 * kv_dim)
            weight_q, weight_kv = self.in_proj_weight.split(halves)
            bias_q, bias_kv = (None, None) if bias is None else bias.split(halves)
            q = F.linear(query, weight_q, bias_q)
            k, v = F.linear(key, weight_kv, bias_kv).split(kv_dim, dim=-1)
        else:
            weights = self.in_proj_weight.split(sizes)
            biases = (None,) * 3 if bias is None else bias.split(sizes)
            q, k, v = (F.linear(x, *wb) for x, *wb in zip((query, key, value), weights, biases, strict=True))
        return (
            self._heads(q, rotate=self.rotary),
            self._heads(k, rotate=self.rotary),
            self._heads(v, rotate=False),
        )

    def _heads(self, projected: Tensor, *, rotate: bool) -> Tensor:
        """Views (N, L, heads · D), (L, N, heads · D) or unbatched (L, heads · D) as (N, heads, L, D)."""
        x = torch.unflatten(projected, -1, (projected.shape[-1] // self.head_dim, self.head_dim))
        swapped = x.dim() == 4 and not self.batch_first
        if rotate:
            split_blocks.refuse("a layer that counts rotary positions itself")
            # Rotation in this layout keeps it, so the heads need no copy before the output projection.
            positions = torch.arange(x.shape[0 if swapped else -3], device=x.device)
            positions = positions.view(-1, 1, 1) if swapped else positions.view(-1, 1)
            x = rotary_embedding(x, positions, base=self.rotary_base, interleaved=self.rotary_interleaved)
        if x.dim() == 3:
            return x.transpose(0, 1).unsqueeze(0)
        return x.permute(1, 2, 0, 3) if swapped else x.transpose(1, 2)

    def _check_masks(
        self,
        attn_mask: Tensor | None,
        key_padding_mask: Tensor | None,
        batch: int,
        length: int,
        source: int,
        is_batched: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Returns the masks as views that broadcast to (N, H, L, S); raises if they do not fit."""
        if attn_mask is not None:
            per_head = (batch * self.num_heads, length, source)
            _check_mask("attn_mask", attn_mask, (length, source), per_head, key_padding=(batch, source))
            if attn_mask.dim() == 3:
                attn_mask = torch.unflatten(attn_mask, 0, (batch, self.num_heads))
        if key_padding_mask is not None:
            _check_mask("key_padding_mask", key_padding_mask, (batch, source) if is_batched else (source,))
            key_padding_mask = key_padding_mask.view(batch, 1, 1, source)
        return attn_mask, key_padding_mask

    def extra_repr(self) -> str:
        options = [
            f"embed_dim={self.embed_dim}",
            f"num_heads={self.num_heads}",
            f"batch_first={self.batch_first}",
        ]
        if self.num_kv_heads != self.num_heads:
            options.append(f"num_kv_heads={self.num_kv_heads}")
        if self.rotary:
            options.append(f"rotary_base={self.rotary_base}, rotary_interleaved={self.rotary_interleaved}")
        if self.window_size != (-1, -1):
            options.append(f"window_size={self.window_size}")
        return ", ".join(options)


def _append(x: Tensor, row: Tensor) -> Tensor:
    """Appends the key or value `row` (1, 1, H · D) to the S keys or values of x (N, H, S, D)."""
    batch, heads, _, size = x.shape
    return torch.cat([x, row.to(x.dtype).view(1, heads, 1, size).expand(batch, -1, -1, -1)], dim=2)


def _check_mask(name: str, mask: Tensor, *shapes: tuple[int, ...], key_padding: tuple[int, ...] = ()) -> None:
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(mask).__name__}")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"{name} must be bool or float, got {mask.dtype}")
    if tuple(mask.shape) not in shapes:
        allowed = " or ".join(map(str, shapes))
        hint = ", which is the shape of key_padding_mask" if tuple(mask.shape) == key_padding else ""
        raise ValueError(f"{name} must have the shape {allowed}, got {tuple(mask.shape)}{hint}")


def _merge(attn_mask: Tensor | None, key_padding_mask: Tensor | None) -> Tensor | None:
    """Merges masks in which True = hidden to one for the kernels: bool with True = attend, or float."""
    masks = [mask for mask in (attn_mask, key_padding_mask) if mask is not None]
    hidden = [mask for mask in masks if mask.dtype == torch.bool]
    added = [mask for mask in masks if mask.dtype != torch.bool]
    if hidden and added:
        return torch.where(hidden[0], -math.inf, added[0])
    if hidden:
        return ~(hidden[0] | hidden[1] if len(hidden) == 2 else hidden[0])
    if added:
        return added[0] + added[1] if len(added) == 2 else added[0]
    return None
