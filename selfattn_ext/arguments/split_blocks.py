"""Whether a block of selfattn_ext.distributed.context_parallel is open.

Tensors hold a part of a sequence then. What would take the part for the whole, and has no way to be split,
refuses by :func:`refuse`.
"""

from __future__ import annotations

__all__ = ["close", "open_one", "refuse"]

_open = 0


def open_one() -> None:
    """A block begins."""
    global _open
    _open += 1


def close() -> None:
    """A block ends."""
    global _open
    _open -= 1


def refuse(what: str) -> None:
    """Raises NotImplementedError while a block is open."""
    if _open:
        raise NotImplementedError(f"{what} cannot be split over processes, as context_parallel asks")
