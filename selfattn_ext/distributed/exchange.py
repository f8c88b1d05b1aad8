"""Ranks send each other blocks of keys and values, and the gradients of these.

A block is what one rank holds. They go around (rotate="p2p": each rank holds at most two beside its own, and
the next one is on its way while it computes with one), or all come at once (rotate="allgather").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from . import traffic
from .plan import Plan

__all__ = ["gather_gradients", "pass_around"]

#: A function of the number of a rank and its block, which returns the gradients of the block.
OfBlock = Callable[[int, Sequence[Tensor]], list[Tensor]]


def pass_around(plan: Plan, own: Sequence[Tensor]) -> Iterator[tuple[int, Sequence[Tensor]]]:
    """The blocks of all ranks, (number of the rank, tensors (B, H, S, .)), one's own first, then those of the
    ranks before, in the same order whichever way they come.
    """
    ranks = plan.ranks
    sources = [(ranks.rank - step) % ranks.size for step in range(ranks.size)]
    if plan.rotate == "allgather":
        everybody = _all_gather(plan, own)
        for source in sources:
            yield source, own if source == ranks.rank else [tensors[source] for tensors in everybody]
        return
    held = list(own)
    for step, source in enumerate(sources):
        following = _Passing(plan, held, sources[step + 1]) if step + 1 < ranks.size else None
        yield source, held
        if following is not None:
            held = following.received()


def gather_gradients(plan: Plan, own: Sequence[Tensor], of_block: OfBlock) -> list[Tensor]:
    """The gradients of one's own block, added up over the ranks, whose blocks come by once more."""
    ranks = plan.ranks
    if plan.rotate == "allgather":
        parts: list[list[Tensor]] = [[] for _ in range(ranks.size)]
        for source, block in pass_around(plan, own):
            parts[source] = of_block(source, block)
        return _add_up(plan, parts)
    travelling: _Passing | None = None
    sums: list[Tensor] = []
    for source, block in pass_around(plan, own):
        sums = of_block(source, block)
        if travelling is not None:
            sums = [part + total for part, total in zip(sums, travelling.received(), strict=True)]
        # The next rank holds the block after this one, and its sums go with it until they reach their rank.
        travelling = _Passing(plan, sums, (source - 1) % ranks.size) if ranks.size > 1 else None
    return sums if travelling is None else travelling.received()


class _Passing:
    """A block on its way to the next rank, and the block of rank ``source`` on its way to this one."""

    def __init__(self, plan: Plan, sent: Sequence[Tensor], source: int) -> None:
        ranks = plan.ranks
        self._sent = [tensor.contiguous() for tensor in sent]
        self._received = [
            tensor.new_empty(*tensor.shape[:2], plan.keys.size(source), tensor.size(3)) for tensor in sent
        ]
        traffic.note(self._sent)
        # Both sides know which parts have no rows.
        transfers = [
            dist.P2POp(send_or_receive, tensor, ranks.peer(peer), ranks.group)
            for send_or_receive, tensors, peer in (
                (dist.isend, self._sent, ranks.rank + 1),
                (dist.irecv, self._received, ranks.rank - 1),
            )
            for tensor in tensors
            if tensor.numel()
        ]
        self._works = dist.batch_isend_irecv(transfers) if transfers else []

    def received(self) -> list[Tensor]:
        """Waits for the block that comes, and returns it."""
        for work in self._works:
            work.wait()
        return self._received


def _all_gather(plan: Plan, own: Sequence[Tensor]) -> list[list[Tensor]]:
    """For each tensor, those of all ranks. Collectives want equal sizes, so shorter ones are filled up."""
    ranks = plan.ranks
    most = max(plan.keys.size(rank) for rank in range(ranks.size))
    found = []
    for tensor in own:
        filled = tensor.new_zeros(*tensor.shape[:2], most, tensor.size(3))
        filled[:, :, : tensor.size(2)] = tensor
        traffic.note([filled], ranks.size - 1)
        everybody = tensor.new_empty(ranks.size, *filled.shape)
        dist.all_gather(list(everybody.unbind()), filled, ranks.group)
        found.append([everybody[rank][:, :, : plan.keys.size(rank)] for rank in range(ranks.size)])
    return found


def _add_up(plan: Plan, parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The sums over the ranks of what each has for this one, in the order of the ranks."""
    ranks = plan.ranks
    own = plan.keys.size(ranks.rank)
    sums = []
    for tensors in zip(*parts, strict=True):
        sent = torch.cat([tensor.reshape(-1) for tensor in tensors])
        traffic.note(tensor for rank, tensor in enumerate(tensors) if rank != ranks.rank)
        shape = (*tensors[0].shape[:2], own, tensors[0].size(3))
        received = sent.new_empty(ranks.size, *shape)
        dist.all_to_all_single(
            received.view(-1), sent, [received[0].numel()] * ranks.size,
            [tensor.numel() for tensor in tensors], ranks.group,
        )  # fmt: skip
        total = received[0]
        for part in received[1:]:
            total = total + part
        sums.append(total)
    return sums
