"""as_flex: a block in which torch's flex_attention runs on this package's kernels."""

from __future__ import annotations

from contextlib import ContextDecorator
from types import TracebackType

from .torch_flex import switch

__all__ = ["as_flex"]


def as_flex() -> ContextDecorator:
    """A context manager and decorator: torch's flex_attention runs, and trains, on this package's kernels.

    Takes every call of :func:`torch.nn.attention.flex_attention.flex_attention` with tensors on the CPU,
    by whatever name a program has bound it, eager and in functions that torch.compile compiles,
    ``fullgraph=True`` included. The results are those of :func:`selfattn_ext.flex_attention`, with gradients
    of query, key, value and captured tensors. Calls with tensors on other devices, of other dtypes or of
    subclasses stay torch's own.

    It holds for the whole process, in all threads, while any thread is in a block: torch's function is
    one for all of them. Blocks may be nested, also with
    ``selfattn_ext.integrations.torch_flex.activate()``, which is the same without an end. A function is
    compiled once for use inside and once for use outside. Activation checkpointing recomputes in the
    backward, which therefore belongs into a block too. Enter blocks outside of compiled functions; inside,
    they break the graph.

    Returns:
        A context manager, which also decorates functions, and which can be entered again.

    Raises:
        RuntimeError: on entry, if this torch's flex_attention has other arguments than this package knows.
        ValueError, TypeError, IndexError: in the block, as :func:`selfattn_ext.flex_attention` does.

    Example:
        >>> import torch, selfattn_ext
        >>> from torch.nn.attention.flex_attention import flex_attention
        >>> def nearer_is_better(score, batch, head, q_idx, kv_idx):
        ...     return score - (q_idx - kv_idx).abs()
        >>> query = torch.randn(1, 2, 16, 8, requires_grad=True)
        >>> with selfattn_ext.as_flex():
        ...     flex_attention(query, query, query, nearer_is_better).sum().backward()
        >>> query.grad.shape
        torch.Size([1, 2, 16, 8])
    """
    return _Block()


class _Block(ContextDecorator):
    def __enter__(self) -> None:
        switch.enter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        switch.leave()
