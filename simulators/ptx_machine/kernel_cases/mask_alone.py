"""The gradient of a float mask has the same bits in a batch, packed, and alone, on the PTX machine.

    python -m ptx_machine.kernel_cases.mask_alone

It prints how many calls the device has had. tests/cuda/test_kernel_engine.py runs it. Most sequences have
more than one tile of queries and of keys: sums over them must not depend on the batch or on the longest
sequence.
"""

from __future__ import annotations

from itertools import product
from typing import Any

from .engine_device import SCALE, Device

# isort: split
import torch
from torch import Tensor

HEADS, DIM = 3, 16
#: Queries and keys of each sequence.
LENGTHS = ((131, 150), (200, 90), (64, 201))
LONGEST = (200, 201)
#: Whether the mask differs between heads, queries and keys.
KEPT = list(product((False, True), repeat=3))


def gradient(call: Device, tensors: tuple[Tensor, ...], mask: Tensor, **options: Any) -> Tensor:
    """The mask's gradient, where the loss is the sum of the product of the output and the last tensor."""
    query, key, value, grad_out = tensors
    common = {"query": query, "key": key, "attn_mask": mask, "scale": SCALE, **options}
    # The dtype is float32, because 16-bit outputs have residuals, which this test is not about.
    out, row_max, row_sum = call("attention_forward", value=value, **common)[:3]
    of = call(
        "attention_backward", value=value, **common, row_max=row_max, row_sum=row_sum,
        grad_out=grad_out, out=out, need_mask_grad=True,
    )  # fmt: skip
    return of[3]


def packed(call: Device, sequences: list[tuple[Tensor, ...]], mask: Tensor) -> Tensor:
    """The mask's gradient for packed sequences, each (1, H, length, D) with a mask of its own."""
    rows = tuple(torch.cat(tensors, 2) for tensors in zip(*sequences, strict=True))
    lengths = [[s[n].shape[2] for s in sequences] for n in (0, 1)]
    options: dict[str, Any] = {"max_seqlen_q": max(lengths[0]), "max_seqlen_k": max(lengths[1])}
    for name, of in zip(("cu_seqlens_q", "cu_seqlens_k"), lengths, strict=True):
        options[name] = torch.tensor([0, *of]).cumsum(0)
    return gradient(call, rows, mask, **options)


def judge(call: Device, kept: tuple[bool, ...], sequences: list[tuple[Tensor, ...]]) -> None:
    heads, queries, keys = (size if own else 1 for own, size in zip(kept, (HEADS, *LONGEST), strict=True))
    masks = torch.randn(len(sequences), heads, queries, keys)
    together = packed(call, sequences, masks)
    for n, (sequence, lengths) in enumerate(zip(sequences, LENGTHS, strict=True)):
        rows, columns = (length if own else 1 for own, length in zip(kept[1:], lengths, strict=True))
        mask = masks[n : n + 1, :, :rows, :columns].contiguous()
        name = f"{call.kernel}, heads, queries, keys {kept}, sequence {n}"
        alone = gradient(call, sequence, mask)
        assert torch.equal(together[n : n + 1, :, :rows, :columns], alone), f"{name}: packed"
        assert torch.equal(packed(call, [sequence], mask), alone), f"{name}: packed alone"
        twice = tuple(torch.cat([t, t]) for t in sequence)
        assert torch.equal(gradient(call, twice, torch.cat([mask, mask]))[1:], alone), f"{name}: in a batch"


def main() -> None:
    torch.manual_seed(0)
    sequences = [
        tuple(torch.randn(1, HEADS, length, DIM) for length in (queries, keys, keys, queries))
        for queries, keys in LENGTHS
    ]
    devices = [Device(kernel) for kernel in ("simt", "sm80")]
    for device, kept in product(devices, KEPT):
        judge(device, kept, sequences)
    print(sum(device.calls for device in devices))


if __name__ == "__main__":
    main()
