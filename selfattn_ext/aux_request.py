"""What a call of attention is asked for beside its output (``return_aux``), and what it returns for that."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from torch import Tensor

from .reference_statistics import AuxOutput

__all__ = ["AuxRequest", "Wanted", "returned", "wanted"]


class AuxRequest(NamedTuple):
    """Asks a function of this package for statistics of the softmax, by its argument ``return_aux``.

    Each field is a flag. docs/statistics.md has the formulas. In place of a request of this class, that of
    :mod:`torch.nn.attention.flex_attention` may be given, which has the first two.

    Args:
        lse: the log-sum-exp of each query's scores, sinks included.
        max_scores: the largest score of each query, sinks excluded; -inf if the query sees no key. It has no
            gradient.
        entropy: the entropy of each query's weights, in nats; a sink takes part with its share.
        mean_score: the sum of weights times scores over the keys of each query.
        key_weights: the sum of the weights that each key receives from all queries of a head. "kv_heads" adds
            up the heads that share a head of key and value, too.

    Scores are those that the softmax takes, scaled, capped and biased. Weights are those before dropout.

    Example:
        >>> import torch
        >>> from selfattn_ext import AuxRequest, scaled_dot_product_attention
        >>> query, key, value = torch.randn(3, 1, 2, 6, 8).unbind()
        >>> request = AuxRequest(max_scores=True, key_weights=True)
        >>> out, aux = scaled_dot_product_attention(query, key, value, is_causal=True, return_aux=request)
        >>> aux.max_scores.shape, aux.key_weights.shape
        (torch.Size([1, 2, 6]), torch.Size([1, 2, 6]))
        >>> torch.allclose(aux.key_weights.sum(-1), torch.tensor(6.0))  # each query gives a weight of 1
        True
    """

    lse: bool = False
    max_scores: bool = False
    entropy: bool = False
    mean_score: bool = False
    key_weights: bool | Literal["kv_heads"] = False


class Wanted(NamedTuple):
    """The results that a call has beside out, as flags."""

    weights: bool = False
    lse: bool = False
    max_scores: bool = False
    entropy: bool = False
    mean_score: bool = False
    key_weights: bool = False

    def of_rows(self) -> bool:
        """Tells whether a forward must find out more about each row than its log-sum-exp."""
        return self.max_scores or self.entropy or self.mean_score

    def names(self) -> list[str]:
        return [name for name, is_wanted in zip(self._fields, self, strict=True) if is_wanted]


def wanted(request: Any, return_weights: bool, return_lse: bool) -> Wanted:
    """Returns what a request, and the flags beside it, ask for.

    Raises:
        TypeError, ValueError: the request is none; the message says what is one.
    """
    flags = {name: getattr(request, name, False) for name in AuxRequest._fields}
    if not isinstance(request, AuxRequest) and not (
        hasattr(request, "lse") and hasattr(request, "max_scores")
    ):
        raise TypeError(
            "return_aux must be an AuxRequest of selfattn_ext or of torch.nn.attention.flex_attention, but "
            f"it is {type(request).__name__}"
        )
    for name, flag in flags.items():
        if not isinstance(flag, bool) and not (name == "key_weights" and flag == "kv_heads"):
            choices = 'True, False or "kv_heads"' if name == "key_weights" else "True or False"
            raise ValueError(f"return_aux: {name} must be {choices}, but it is {flag!r}")
    flags["lse"] = flags["lse"] or return_lse
    flags["key_weights"] = bool(flags["key_weights"])
    return Wanted(return_weights, **flags)


def returned(request: Any, found: AuxOutput, kv_heads: int | None) -> Any:
    """Returns what a call gives for a request: an AuxOutput, torch's own for its request.

    ``found`` has at least what the request asks for, key_weights (..., H, S) for each query head or kv head.
    kv_heads is None for what has a single head.
    """
    if not isinstance(request, AuxRequest):
        from torch.nn.attention.flex_attention import AuxOutput as TorchOutput

        return TorchOutput(
            found.lse if request.lse else None, found.max_scores if request.max_scores else None
        )
    chosen = {name: getattr(found, name) if getattr(request, name) else None for name in request._fields}
    if request.key_weights == "kv_heads" and kv_heads is not None:
        chosen["key_weights"] = _of_kv_heads(found.key_weights, kv_heads)
    return AuxOutput(**chosen)


def _of_kv_heads(key_weights: Tensor | None, kv_heads: int) -> Tensor:
    """Adds up the query heads (..., H, S) that share a kv head."""
    assert key_weights is not None
    group = key_weights.size(-2) // max(kv_heads, 1)
    return key_weights.unflatten(-2, (kv_heads, group)).sum(-2)
