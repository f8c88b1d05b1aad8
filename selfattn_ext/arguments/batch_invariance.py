"""The setting that gives a query row the same bits however its sequence is cut into calls.

:class:`batch_invariant` and the environment variable SELFATTN_BATCH_INVARIANT ask for that.
"""

from __future__ import annotations

import os
from types import TracebackType

__all__ = ["batch_invariant"]

VARIABLE = "SELFATTN_BATCH_INVARIANT"


def of_environment() -> bool:
    """Reads SELFATTN_BATCH_INVARIANT.

    Raises:
        ValueError: its value is neither "0" nor "1".
    """
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ValueError(f'{VARIABLE} must be "0" or "1", but it is "{value}"')
    return value == "1"


#: Whether calls of the whole process are to be batch-invariant. torch.compile guards its graphs by it.
asked: bool = of_environment()


class batch_invariant:
    """A query row gets the same bits alone, in a chunk of any size, and in the whole prompt.

    As a function it sets this for the whole process, all threads, until it is called again;
    SELFATTN_BATCH_INVARIANT=1 does so from the start. As a context manager it restores what was before::

        selfattn_ext.batch_invariant()  # from now on

        with selfattn_ext.batch_invariant():  # only here
            ...

    The setting belongs to the process, as that of :func:`torch.use_deterministic_algorithms` does: threads
    that enter and leave blocks at different times change it for each other. A call reads it when it is made;
    its gradients, whenever they are computed, and graphs that were captured or exported keep the value that
    the call has read. torch.compile compiles again if the setting has changed.

    It holds for the output and the log-sum-exp of
    :func:`~selfattn_ext.scaled_dot_product_attention`, :func:`~selfattn_ext.varlen_attention`,
    :func:`~selfattn_ext.attention_with_kvcache` and :class:`~selfattn_ext.KVCache`, for their weights and for
    the gradient of a query row. docs/batch-invariance.md says between which calls, and what it costs.

    Args:
        enabled: False for the fastest way, the default of a process, in which a call with few queries is
            computed differently from one with many.

    Raises:
        TypeError: enabled is not a bool.

    Example:
        >>> import torch, selfattn_ext
        >>> query, key, value = torch.randn(3, 1, 4, 64, 32).unbind()
        >>> with selfattn_ext.batch_invariant():
        ...     prompt = selfattn_ext.scaled_dot_product_attention(query, key, value)
        ...     token = selfattn_ext.scaled_dot_product_attention(query[:, :, :1], key, value)
        >>> torch.equal(prompt[:, :, :1], token)
        True
    """

    def __init__(self, enabled: bool = True) -> None:
        if not isinstance(enabled, bool):
            raise TypeError(f"enabled must be a bool, but it is a {type(enabled).__name__}")
        self._before = asked
        self._enabled = enabled
        _set(enabled)

    def __enter__(self) -> None:
        _set(self._enabled)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _set(self._before)


def _set(enabled: bool) -> None:
    global asked
    asked = enabled
