"""Ranks tell each other what they call, or why they do not, before any other exchange.

Note [One error on every rank]
    A rank that raises leaves the others waiting in the exchange that it does not come to. So every function
    that exchanges something begins with the same exchange, :func:`agree`, and runs in a :class:`Telling`
    block: what is raised there before ranks have agreed, for whatever reason, is told to those who wait. It
    takes the place of the call in that exchange, so that a call that goes well costs one exchange, and the
    group can be used again after one that does not.

    After they have agreed, ranks decide by what all know: the call and the :class:`Numbers` of all ranks.
    What one of them alone knows must not say whether, or how much, it exchanges, nor make it raise. So it is
    with gradients: where any rank records one, every rank does, and takes part in its exchanges.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import hashlib
import operator
import threading
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from .group import Ranks, ranks_of

__all__ = ["Agreed", "Flags", "Numbers", "Telling", "agree", "digest_of", "tells"]

_Function = TypeVar("_Function", bound=Callable[..., Any])

#: The parts of a call in which ranks must agree, by the names that users know.
Call = Mapping[str, Any]

#: The key in place of a call that a rank refuses; its value is a sentence for the others.
_REFUSED = "refused"


class Flags(enum.IntFlag):
    """Facts about the call of a rank. Joined over the ranks, each is true of one of them at least."""

    #: Whether a gradient is recorded, and whether none could be, as under torch.no_grad.
    RECORDS = enum.auto()
    NO_GRAD = enum.auto()
    #: Whether these want a gradient.
    KEY = enum.auto()
    VALUE = enum.auto()
    MASK = enum.auto()
    #: Whether the mask differs between batch elements, heads and rows.
    MASK_BATCH = enum.auto()
    MASK_HEADS = enum.auto()
    MASK_ROWS = enum.auto()


class Numbers(NamedTuple):
    """The numbers that a rank alone knows, and tells the others beside its call."""

    query_rows: int = 0
    key_rows: int = 0
    #: The seed of dropout; all ranks use rank 0's.
    seed: int = 0
    flags: int = 0
    #: A digest of a mask that is the same for all rows.
    mask: int = 0


class Agreed(NamedTuple):
    """The numbers of all ranks, and their flags together."""

    numbers: list[Numbers]
    flags: Flags


class Telling:
    """A block in which an exception is told to the ranks of ``groups``, unless they have agreed before."""

    def __init__(self, *groups: Any) -> None:
        self._groups = groups
        self._agreed: list[dist.ProcessGroup] = []
        #: The refusal of another rank, which this one passes on to its other group.
        self._heard: str | None = None

    def __enter__(self) -> Telling:
        _blocks.open.append(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if isinstance(error, Exception):
                self._tell(error)
        finally:
            _blocks.open.remove(self)

    def _tell(self, error: Exception) -> None:
        for given in self._groups:
            ranks = _waiting_in(given)
            if ranks is None or ranks.group in self._agreed:
                continue
            why = str(error) or type(error).__name__
            refused = f"rank {dist.get_rank()} has made no call, as its arguments were refused: {why}"
            # This rank's own error is being raised already; one in telling it must not hide it.
            with contextlib.suppress(Exception), _undisturbed():
                agree(ranks, {_REFUSED: self._heard or refused}, Numbers())

    def met(self, group: dist.ProcessGroup) -> None:
        """Notes that this rank has come to the exchange of a group."""
        self._agreed.append(group)

    def hear(self, said: str) -> None:
        """Notes what was said because ranks of a group do not agree."""
        self._heard = said


class _Blocks(threading.local):
    """The blocks that this thread is in."""

    def __init__(self) -> None:
        self.open: list[Telling] = []


_blocks = _Blocks()


def tells(function: _Function) -> _Function:
    """Makes a function with an argument ``group``, and perhaps ``ring_group``, one :class:`Telling` block."""

    @functools.wraps(function)
    def telling(*args: Any, **given: Any) -> Any:
        ring = given.get("ring_group")
        groups = (given.get("group"),) if ring is None else (given.get("group"), ring)
        with Telling(*groups):
            return function(*args, **given)

    return telling  # type: ignore[return-value]


def digest_of(content: bytes) -> int:
    """A hash of 64 bits."""
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "little", signed=True)


def agree(ranks: Ranks, call: Call, own: Numbers) -> Agreed:
    """The numbers of all ranks, once they all make the same call.

    Costs an exchange of a few bytes, before which nothing else is exchanged.

    Raises:
        ValueError: on every rank if a rank makes another call; the message names what differs.
    """
    for block in _blocks.open:
        block.met(ranks.group)
    digest = digest_of(repr(call).encode())
    mine = torch.tensor([digest, *own], dtype=torch.int64, device=_device_of(ranks.group))
    everybody = mine.new_empty(ranks.size, len(mine))
    dist.all_gather(list(everybody.unbind()), mine, ranks.group)
    found = everybody.tolist()
    if any(row[0] != digest for row in found):
        calls: list[Any] = [None] * ranks.size
        with _undisturbed():
            dist.all_gather_object(calls, dict(call), ranks.group)
        _disagree(_difference(calls, ranks))
    numbers = [Numbers(*row[1:]) for row in found]
    together = functools.reduce(operator.or_, (Flags(each.flags) for each in numbers))
    if together & (Flags.RECORDS | Flags.NO_GRAD) == Flags.RECORDS | Flags.NO_GRAD:
        named = {
            flag: next(ranks.peer(rank) for rank, each in enumerate(numbers) if each.flags & flag)
            for flag in (Flags.RECORDS, Flags.NO_GRAD)
        }
        _disagree(
            f"ranks must make the same call, but rank {named[Flags.RECORDS]} records gradients and rank "
            f"{named[Flags.NO_GRAD]} does not, as by torch.no_grad"
        )
    return Agreed(numbers, together)


def _disagree(said: str) -> NoReturn:
    for block in _blocks.open:
        block.hear(said)
    raise ValueError(said)


def _difference(calls: list[Call], ranks: Ranks) -> str:
    """The first thing in which ranks differ. They are named by their numbers in the default group."""
    for call in calls:
        if _REFUSED in call:
            return str(call[_REFUSED])
    for name in dict.fromkeys(name for call in calls for name in call):
        values = [call.get(name) for call in calls]
        for rank, value in enumerate(values):
            if value != values[0]:
                first, other = f"{values[0]} on rank {ranks.peer(0)}", f"{value} on rank {ranks.peer(rank)}"
                return f"ranks must make the same call, but {name} is {first} and {other}"
    return "ranks must make the same call, but their calls differ"


def _waiting_in(group: Any) -> Ranks | None:
    """The ranks that wait for a rank whose argument ``group`` is this; None if nobody can be told.

    An argument that is no group says nothing about where they wait. If there has never been another group
    than the default one, it is there.
    """
    try:
        return ranks_of(group)
    except (RuntimeError, ValueError):
        return None
    except TypeError:
        from torch.distributed.distributed_c10d import get_pg_count

        return ranks_of(None) if get_pg_count() == 1 else None


def _device_of(group: dist.ProcessGroup) -> torch.device:
    """The device on which a group compares calls: the CPU if it can, which waits for no GPU. The group alone
    decides, because a rank's tensors may be anywhere.
    """
    kinds = [each.partition(":")[0] for each in dist.get_backend_config(group).split(",")]
    if "cpu" in kinds:
        return torch.device("cpu")
    return torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Tensors are plain ones here, whatever modes, transforms and default devices a rank has come from."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    with temporarily_clear_interpreter_stack(), _disable_current_modes(), torch.device("cpu"):
        yield
