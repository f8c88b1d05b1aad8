"""merge_attention: results over disjoint parts of the keys are put together to the result over all keys.

Merging is attention once more. For a query, the parts stand where keys did: their scores are the log-sum-exps
of the parts, and their values the outputs. So the softmax is the formula's, with its care for rows that see
nothing, and its derivatives of any order. RowResults of :mod:`selfattn_ext.distributed.merge` cannot be used
here: it says why.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from .arguments import checks, overrides
from .formula_steps import accumulation_dtype, softmax_with_lse

__all__ = ["merge_attention"]

_is_overridden = torch.overrides.has_torch_function_variadic
_hand_over = torch.overrides.handle_torch_function


def merge_attention(
    outs: Tensor | Sequence[Tensor], lses: Tensor | Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Attention over all keys, from the results of attention over disjoint parts of them.

    It serves keys that are in several places, or whose masks differ: a prefix that sequences share, the
    tokens of a tree of guesses behind it, the chunks of a long context.

    Args:
        outs: the outputs of the parts, (..., L, Ev) each, float64, float32, bfloat16 or float16: a list or a
            tuple, or one tensor with the parts along its first dimension. Leading dimensions broadcast; L and
            Ev are the same in all parts.
        lses: their log-sum-exps, (..., L) each, as ``return_lse=True`` gives them: float64 for float64 outs,
            else float32. They are a list, a tuple or one tensor, too.

    Returns:
        out (..., L, Ev) in the dtype of outs and contiguous, and lse (..., L) in the dtype of lses; both may
        be merged again. Sums are in the dtype of lses, and out is rounded once. Both are differentiable with
        respect to outs and lses, any number of times, and in forward mode. Where the lse of a part is -inf,
        the row has seen no key of it: its out there has no influence, even if it is NaN, and both get
        gradient 0. A row that has seen no key of any part has output 0 and lse -inf.

    Raises:
        ValueError, TypeError: naming the argument, what was given and what is allowed.

    Each key belongs to exactly one part. So does a sink: pass ``sinks`` to one of the calls. Positions are
    those among the keys of a part: ``query_offset`` is the position of query 0 less that of the part's first
    key, and then ALiBi, windows and the causal rule are those of one call. Each part with dropout draws a
    pattern of its own.

    The outputs of :func:`selfattn_ext.varlen_attention`, (total, H, Ev), and those of
    :func:`selfattn_ext.attention_with_kvcache` in the layout "blhd", have tokens before heads, and their lse
    has heads before tokens: transpose the outputs, as below.

    The method is that of Milakov and Gimelshein (2018), "Online normalizer calculation for softmax".

    Example:
        >>> import torch
        >>> from selfattn_ext import merge_attention, scaled_dot_product_attention
        >>> query, key, value = torch.randn(3, 2, 4, 9, 16, dtype=torch.float64).unbind()
        >>> parts = [
        ...     scaled_dot_product_attention(query, *part, return_lse=True)
        ...     for part in zip(key.split([2, 7], dim=2), value.split([2, 7], dim=2))
        ... ]
        >>> out, lse = merge_attention(*zip(*parts))
        >>> torch.allclose(out, scaled_dot_product_attention(query, key, value))
        True
        >>> outs, lses = torch.randn(2, 20, 4, 16), torch.randn(2, 4, 20)  # two parts, packed: (total, H, Ev)
        >>> out, lse = merge_attention(outs.transpose(-3, -2), lses)
        >>> out.transpose(-3, -2).shape, lse.shape
        (torch.Size([20, 4, 16]), torch.Size([4, 20]))
    """
    tensors = (*_given(outs), *_given(lses))
    if _is_overridden(*tensors) and (relevant := overrides.overriding_arguments(*tensors)):
        return _hand_over(merge_attention, relevant, outs, lses)
    of_outs, of_lses = _parts("outs", outs), _parts("lses", lses)
    _check(of_outs, of_lses)
    unseen = [lse == -torch.inf for lse in of_lses]
    # A tangent of -inf may be anything. As a constant, it has none.
    scores = [lse.masked_fill(dead, -torch.inf) for lse, dead in zip(of_lses, unseen, strict=True)]
    shares, lse = softmax_with_lse(torch.stack(torch.broadcast_tensors(*scores), -1), None)
    # The products have the dtype of the shares, without a copy of an out in that dtype.
    products = (
        out.masked_fill(dead.unsqueeze(-1), 0.0) * share.unsqueeze(-1)
        for out, dead, share in zip(of_outs, unseen, shares.unbind(-1), strict=True)
    )
    merged = functools.reduce(torch.add, products)
    return merged.to(of_outs[0].dtype), lse


def _given(parts: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    """Returns the tensors of an argument as they were given."""
    return parts if isinstance(parts, (list, tuple)) else (parts,)  # type: ignore[return-value]


def _parts(name: str, parts: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    if not isinstance(parts, Tensor):
        if not isinstance(parts, (list, tuple)):
            raise TypeError(
                f"{name} must be a list or a tuple of tensors, or one tensor with the parts along its first "
                f"dimension, got {checks.described(parts)}"
            )
        found: Sequence[Tensor] = parts
    elif checks.dense_tensor(name, parts).dim():
        found = parts.unbind()
    else:
        raise ValueError(f"{name} must have the parts along its first dimension, got a tensor of shape ()")
    if not found:
        raise ValueError(f"{name} must have at least one part, got none")
    return found


def _check(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> None:
    """Checks the parts; torch's operations would take some mistakes for a wish to broadcast or to convert."""
    if len(outs) != len(lses):
        raise ValueError(f"lses must have as many parts as outs, {len(outs)}, got {len(lses)}")
    checks.alike({f"outs[{index}]": out for index, out in enumerate(outs)})
    checks.alike({f"lses[{index}]": lse for index, lse in enumerate(lses)})
    first = outs[0]
    checks.on_device("lses[0]", lses[0], "outs[0]", first.device)
    if lses[0].dtype != accumulation_dtype(first.dtype):
        raise TypeError(
            f"lses must be {accumulation_dtype(first.dtype)} for outs of {first.dtype}, got {lses[0].dtype}"
        )
    lead: Sequence[int] = ()
    for index, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        shape = tuple(out.shape)
        if len(shape) < 2:
            raise ValueError(f"outs[{index}] must be (..., L, Ev), with at least 2 dimensions, got {shape}")
        if shape[-2:] != first.shape[-2:]:
            raise ValueError(
                f"outs[{index}] of shape {shape} and outs[0] of shape {tuple(first.shape)} must have the "
                "same L and Ev, their last two dimensions"
            )
        if lse.shape != shape[:-1]:
            raise ValueError(
                f"lses[{index}] must have the shape {shape[:-1]}, that of outs[{index}] without Ev, got "
                f"{tuple(lse.shape)}{_hint(shape, tuple(lse.shape))}"
            )
        try:
            lead = torch.broadcast_shapes(lead, shape[:-2])
        except RuntimeError:
            raise ValueError(
                f"outs[{index}] of shape {shape} does not broadcast to the parts before it, whose leading "
                f"dimensions are {tuple(lead)}"
            ) from None


def _hint(out: tuple[int, ...], lse: tuple[int, ...]) -> str:
    """Says what to do with outputs whose heads come after their tokens."""
    if len(lse) < 2 or (*lse[:-2], lse[-1], lse[-2]) != out[:-1]:
        return ""
    return "; if heads come after tokens in outs, as in packed sequences, pass out.transpose(-3, -2)"
