"""Self-attention with projections: one head that returns its weights, and many heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..arguments import checks
from ..capture import is_capturing
from ..collecting import request_for
from ..functional import scaled_dot_product_attention
from .layer_checks import check_input, check_positive, given, is_traced, own_request, step_of_trace


class SelfAttention(nn.Module):
    """Single-head self-attention, softmax(Q Kᵀ / √d_k) V W_o (Vaswani et al. 2017, equation 1).

    Q = x W_q, K = x W_k and V = x W_v; none of the four projections has a bias.

    Args:
        d_model: features of the input and of the output.
        d_k: features of queries and keys, d_model by default.
        d_v: features of values, d_model by default.
        device, dtype: of the parameters.

    Raises:
        ValueError: a size is not positive.

    Example:
        >>> import torch
        >>> from selfattn_ext import SelfAttention
        >>> out, weights = SelfAttention(d_model=32, d_k=24, d_v=40)(torch.randn(4, 6, 32))
        >>> out.shape, weights.shape
        (torch.Size([4, 6, 32]), torch.Size([4, 6, 6]))
    """

    def __init__(
        self,
        d_model: int,
        d_k: int | None = None,
        d_v: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.d_model = d_model
        self.d_k = d_model if d_k is None else d_k
        self.d_v = d_model if d_v is None else d_v
        check_positive(d_model=self.d_model, d_k=self.d_k, d_v=self.d_v)
        factory: dict[str, Any] = {"bias": False, "device": device, "dtype": dtype}
        self.W_q = nn.Linear(self.d_model, self.d_k, **factory)
        self.W_k = nn.Linear(self.d_model, self.d_k, **factory)
        self.W_v = nn.Linear(self.d_model, self.d_v, **factory)
        self.W_o = nn.Linear(self.d_v, self.d_model, **factory)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, *, is_causal: bool = False, return_aux: Any = None
    ) -> Any:
        """Attends from every position of x to every position of x.

        Args:
            x: (..., L, d_model) in the dtype of the parameters; (L, d_model) is fine.
            mask: 0 and 1 or False and True, broadcastable to (..., L, L); 0 hides key j from query i. The
                values of a float mask are checked, which on CUDA waits for the GPU; those of bool are not.
            is_causal: hides the keys after each query as well.
            return_aux: an :class:`selfattn_ext.AuxRequest`: also return the statistics that it asks for.

        Returns:
            The output (..., L, d_model) and the attention weights (..., L, L), and for return_aux an
            :class:`selfattn_ext.AuxOutput` (..., L); all are differentiable.

        Raises:
            TypeError: x or mask is not a tensor, or has the wrong dtype.
            ValueError: x or mask has the wrong shape, or a float mask holds anything but 0 and 1.
        """
        if is_traced(self, x):
            return step_of_trace(self, x, mask, is_causal=is_causal, return_aux=return_aux)
        check_input("x", x, self.d_model, self.W_q.weight)
        return_aux = own_request(return_aux)
        request = request_for(self, return_aux)
        result = scaled_dot_product_attention(
            self.W_q(x),
            self.W_k(x),
            self.W_v(x),
            None if mask is None else _visible(mask, (*x.shape[:-1], x.shape[-2])),
            is_causal=is_causal,
            return_weights=True,
            return_aux=request,
        )
        aux = [] if request is None else [result[2]]
        return self.W_o(result[0]), result[1], *given(self, aux, return_aux, None)

    def extra_repr(self) -> str:
        return f"d_model={self.d_model}, d_k={self.d_k}, d_v={self.d_v}"


class MultiHeadSelfAttention(nn.Module):
    """Multi-head self-attention, Concat(head_1, ..., head_h) W_o (Vaswani et al. 2017, section 3.2.2).

    Each head attends with d_model / num_heads of the features of Q = x Wq, K = x Wk and V = x Wv; the four
    projections have a bias.

    Args:
        d_model: features of the input and of the output.
        num_heads: heads, a divisor of d_model.
        device, dtype: of the parameters.

    Raises:
        ValueError: a size is not positive, or num_heads does not divide d_model.

    Example:
        >>> import torch
        >>> from selfattn_ext import MultiHeadSelfAttention
        >>> layer = MultiHeadSelfAttention(d_model=32, num_heads=4)
        >>> mask = torch.tril(torch.ones(6, 6))  # 0 hides
        >>> layer(torch.randn(2, 6, 32), mask).shape
        torch.Size([2, 6, 32])
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_positive(d_model=d_model, num_heads=num_heads)
        if d_model % num_heads:
            raise ValueError(
                f"d_model must be divisible by num_heads, got d_model={d_model}, num_heads={num_heads}"
            )
        self.d_model = d_model
        self.num_heads = num_heads
        self.head_dim = d_model // num_heads
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.Wq = nn.Linear(d_model, d_model, **factory)
        self.Wk = nn.Linear(d_model, d_model, **factory)
        self.Wv = nn.Linear(d_model, d_model, **factory)
        self.Wo = nn.Linear(d_model, d_model, **factory)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        *,
        is_causal: bool = False,
        return_weights: bool = False,
        return_aux: Any = None,
    ) -> Any:
        """Attends from every position of x to every position of x, in each head.

        Args:
            x: (B, L, d_model) in the dtype of the parameters, (L, d_model), or with more leading dimensions.
            mask: 0 and 1 or False and True of any dtype; 0 hides key j from query i. (L, L) for all,
                (B, L, L) for each sequence, (B, 1, 1, L) to hide padding, or any shape that broadcasts to
                (B, H, L, L). The values of a float mask are checked, which on CUDA waits for the GPU; those
                of bool are not.
            is_causal: hides the keys after each query as well.
            return_weights: whether to return the weights as well, which costs the memory of (B, H, L, L).
            return_aux: an :class:`selfattn_ext.AuxRequest`: also return the statistics that it asks for.

        Returns:
            The output (B, L, d_model), or a tuple of it and what else was asked for: the weights
            (B, H, L, L), and an :class:`selfattn_ext.AuxOutput` (B, H, L).

        Raises:
            TypeError: x or mask is not a tensor, or has the wrong dtype.
            ValueError: x or mask has the wrong shape, or a float mask holds anything but 0 and 1.
        """
        if is_traced(self, x):
            options = {"return_weights": return_weights, "return_aux": return_aux}
            return step_of_trace(self, x, mask, is_causal=is_causal, **options)
        check_input("x", x, self.d_model, self.Wq.weight)
        if mask is not None:
            # A mask per sequence, (..., L, L), holds for all heads.
            is_per_sequence = isinstance(mask, Tensor) and x.dim() > 2 and mask.dim() == x.dim()
            mask = mask.unsqueeze(-3) if is_per_sequence else mask
            length = x.shape[-2]
            mask = _visible(mask, (*x.shape[:-2], self.num_heads, length, length))
        return_aux = own_request(return_aux)
        request = request_for(self, return_aux)
        result = scaled_dot_product_attention(
            self._heads(self.Wq(x)),
            self._heads(self.Wk(x)),
            self._heads(self.Wv(x)),
            mask,
            is_causal=is_causal,
            return_weights=return_weights,
            return_aux=request,
        )
        out, *rest = result if isinstance(result, tuple) else (result,)
        aux = [] if request is None else [rest.pop()]
        rest += given(self, aux, return_aux, self.num_heads)
        out = self.Wo(out.transpose(-3, -2).flatten(-2))
        return (out, *rest) if rest else out

    def _heads(self, projected: Tensor) -> Tensor:
        return torch.unflatten(projected, -1, (self.num_heads, self.head_dim)).transpose(-3, -2)

    def extra_repr(self) -> str:
        return f"d_model={self.d_model}, num_heads={self.num_heads}"


def _visible(mask: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Returns a mask of 0 (hidden) and 1 as the bool mask that the kernels take."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask must be a tensor, got {type(mask).__name__}")
    given = tuple(mask.shape)
    if len(given) > len(shape) or any(
        g not in (1, s) for g, s in zip(given[::-1], shape[::-1], strict=False)
    ):
        hint = checks.with_missing_dimensions("mask", given, shape)
        raise ValueError(f"mask must broadcast to {shape}, got {given}{hint}")
    if mask.dtype == torch.bool:
        return mask
    if mask.is_complex():
        raise TypeError(f"mask must be bool, integer or float, got {mask.dtype}")
    # Values are checked, as an additive mask of 0 and -inf means the opposite of what its values mean here.
    can_look = not torch.compiler.is_compiling() and not is_capturing(mask)
    if mask.is_floating_point() and can_look and not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError(
            "mask must hold 0 (hidden) and 1 (visible) only; an additive mask of 0 and -inf is for "
            "scaled_dot_product_attention"
        )
    return mask != 0
