"""Senseless starts, lengths, offsets, page numbers and selections, on the device of the PTX machine.

Nothing checks such numbers before a kernel does. Whatever they are, the kernel must stay inside of the
tensors.

    python -m ptx_machine.kernel_cases.wild_numbers [CALLS]

runs each operator of attention so many times on the kernels that take its dtype, and asserts that it has
changed no input. Each tensor and each workspace is an allocation of its own, so the machine reports an access
beside it. It prints how many calls the device has had.
"""

from __future__ import annotations

import math
import random
import sys
from typing import Any

from . import device_plugin  # noqa: F401  (before the package)

# isort: split
import torch
from torch import Tensor

from .engine_device import FEW as FEW_INSTANCES
from .engine_device import Device, able
from .split_cases import FEW_QUERIES, SPLIT

HEADS, KV_HEADS, DIM = 2, 1, 40 if FEW_INSTANCES else 16
KERNELS = ("simt", "sm80")
#: Rows of a packed tensor, or of a sequence's part of a cache: more than a tile, and fewer.
ROWS = (70, 5, 20)
#: The same for few queries and many keys, whose keys are split.
FEW, MANY = (1, 3, FEW_QUERIES, 20), (SPLIT + 1, 2 * SPLIT + 70)


def number(most: int) -> int:
    """A number that could be right, one near the ends, or one far off."""
    near = (-1, 0, 1, most - 1, most, most + 1)
    far = (-(2**63), -(2**40), 2**31, 2**40, 2**62, 2**63 - 1)
    return random.choice((random.randint(0, most), random.choice(near), random.choice(far)))


def numbers(count: int, most: int) -> Tensor:
    return torch.tensor([number(most) for _ in range(count)])


def call(turn: int) -> dict[str, Any]:
    """The arguments of one forward; packed tensors and pages take turns."""
    form = ("packed", "cache", "pages", "packed pages")[turn % 4]
    split = turn // 4 % 2 == 0
    batch, rows = random.randint(1, 4), random.choice(FEW if split else ROWS)
    keys = random.choice(MANY if split else ROWS)
    dtype = (torch.bfloat16, torch.float32)[turn // 8 % 2]
    options: dict[str, Any] = {
        "scale": 0.3,
        "is_causal": random.random() < 0.5,
        "window_left": random.choice((-1, 9)),
        "query_offsets": numbers(batch, 40),
    }
    queries, longest = rows, keys
    if form.startswith("packed"):
        queries = options["max_seqlen_q"] = random.choice((1, 16, 40, rows))
        options["cu_seqlens_q"] = numbers(batch + 1, rows)
    if form == "packed":
        longest = options["max_seqlen_k"] = random.choice((1, 40, keys))
        options["cu_seqlens_k"] = numbers(batch + 1, keys)
    if (form == "packed" and random.random() < 0.5) or form != "packed":
        options["seqlens_k"] = numbers(batch, longest)
    places, page = batch, keys
    if form.endswith("pages"):
        places, page = 3, random.choice((1, 7, 16))
        table = numbers(batch * (-(-keys // page)), places).clamp(-(2**31), 2**31 - 1)
        options["block_table"] = table.to(torch.int32).reshape(batch, -1)
        longest = options["block_table"].shape[1] * page
    query_batch = 1 if form.startswith("packed") else batch
    key_batch = 1 if form == "packed" else places
    options["query"] = torch.randn(query_batch, HEADS, rows, DIM).to(dtype)
    for name in ("key", "value"):
        options[name] = torch.randn(key_batch, KV_HEADS, page, DIM).to(dtype)
    kept = [random.random() < 0.5 for _ in range(4)]
    if form == "packed" and random.random() < 0.4:
        # The masks have other sizes than the sequences.
        three = [
            [random.choice(sizes) for sizes in ((1, HEADS), (1, 5, rows), (1, 7, keys))] for _ in range(batch)
        ]
        options["mask_shapes"] = [size for shape in three for size in shape]
        options["attn_mask"] = torch.randn(sum(math.prod(shape) for shape in three)).to(dtype)
    elif random.random() < 0.5:
        sizes = (batch, HEADS, queries, longest)
        shape = [size if has else 1 for size, has in zip(sizes, kept, strict=True)]
        options["attn_mask"] = torch.randn(shape).to(dtype)
    if random.random() < 0.5:
        options["alibi_slopes"] = torch.rand(batch if kept[0] else 1, HEADS)
        options["sinks"] = torch.rand(batch if kept[1] else 1, HEADS)
    if dtype == torch.float32 and turn % 3:
        # Sequences that overlap would write the same inverse lists at once, which is a race.
        for name in options.keys() & {"cu_seqlens_q", "cu_seqlens_k"}:
            options[name] = options[name].sort().values
        options |= selection(turn, batch, rows, longest, form.startswith("packed"))
    return options


def selection(turn: int, batch: int, rows: int, keys: int, packed: bool) -> dict[str, Any]:
    """Lists in any order, of blocks that are there and that are not. Each is in a list once, because lanes
    would otherwise count it at the same time, which is a race.
    """
    draw = random.Random(turn)
    of_row, of_block = 1 if packed else draw.choice((1, 7)), draw.choice((1, 16))
    blocks = [*range(-2, -(-keys // of_block) + 3), -(2**31), 2**31 - 1]
    shape = (draw.choice((1, 1 if packed else batch)), draw.choice((1, HEADS)), -(-rows // of_row))
    lists = [draw.sample(blocks, 5) for _ in range(math.prod(shape))]
    return {
        "selection": torch.tensor(lists, dtype=torch.int32).reshape(*shape, 5),
        "selection_size": [of_row, of_block],
    }


def lengths(numbers: Tensor, rows: int, longest: int, packed: bool) -> list[int]:
    """The lengths that kernels derive from starts, if rows are packed, or from the given lengths."""
    found = []
    for number, end in zip(numbers.tolist(), numbers[1:].tolist() if packed else numbers, strict=False):
        first = min(max(number, 0), rows) if packed else 0
        last = min(max(end if packed else number, first), rows)
        found.append(min(last - first, longest))
    return found


def splits_keys(given: dict[str, Any]) -> bool:
    """Whether a sequence has so few queries and so many keys that the keys are split."""
    query, key = given["query"], given["key"]
    queries = [query.shape[2]] * len(given["query_offsets"])
    if "cu_seqlens_q" in given:
        queries = lengths(given["cu_seqlens_q"], query.shape[2], given["max_seqlen_q"], True)
    rows = key.shape[2] * (given["block_table"].shape[1] if "block_table" in given else 1)
    keys = [rows] * len(queries)
    if "cu_seqlens_k" in given:
        keys = lengths(given["cu_seqlens_k"], rows, given["max_seqlen_k"], True)
    if "seqlens_k" in given:
        keys = list(map(min, keys, lengths(given["seqlens_k"], rows, rows, False)))
    return any(0 < few <= FEW_QUERIES and many > SPLIT for few, many in zip(queries, keys, strict=True))


def run(device: Device, given: dict[str, Any]) -> None:
    """Forward, weights unless keys are selected and, except for pages, gradients."""
    given = dict(given)
    out, row_max, row_sum, _ = device("attention_forward", **given, need_residual=False)
    value = given.pop("value")
    statistics = {"row_max": row_max, "row_sum": row_sum}
    if "selection" not in given:
        device("attention_weights", **given, **statistics)
    if "block_table" in given:
        return
    mask = "attn_mask" in given and "selection" not in given
    given |= {"value": value, **statistics, "grad_out": torch.randn(out.shape).to(out.dtype), "out": out}
    device("attention_backward", **given, need_mask_grad=mask)


def main() -> None:
    random.seed(0)
    torch.manual_seed(0)
    devices = [Device(kernel) for kernel in KERNELS]
    turns = next((int(it) for it in sys.argv[1:] if it.isdecimal()), 60)
    with_splits = selected = 0
    for turn in range(turns):
        given = call(turn)
        with_splits += splits_keys(given)
        selected += "selection" in given
        before = {name: it.clone() for name, it in given.items() if isinstance(it, Tensor)}
        for device in able(devices, given["query"].dtype):
            if "selection" in given and device.kernel != "simt":
                continue
            run(device, given)
            for name, tensor in before.items():
                assert torch.equal(given[name], tensor), f"{name} was changed by {device.kernel}"
    assert with_splits >= turns // 8, f"keys are split in {with_splits} calls only"
    assert selected >= turns // 6, f"keys are selected in {selected} calls only"
    print(sum(device.calls for device in devices))


if __name__ == "__main__":
    main()
