"""A packed sequence gets the bits of its own call, in any batch and with any threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace

import gpu
import pytest
import torch
from cases import DTYPES, NAMES, Case, cotangents_of, exact_inputs, gradients
from tolerances import assert_accurate
from torch import Tensor
from varlen_cases import CASES, VarlenCase, of

from selfattn_ext import backends
from selfattn_ext.formula_steps import mask_of_sequence

# (queries, keys): edges of tiles, blocks and chunks of keys, primes, few queries beside many, empty ones.
LENGTHS = (
    (1, 5),
    (0, 9),
    (49, 65),
    (5, 0),
    (48, 64),
    (4, 300),
    (0, 0),
    (17, 13),
    (67, 200),
    (2, 3),
    (64, 1),
)
#: Positions of their first queries.
OFFSETS = tuple(5 * b - keys // 8 for b, (_, keys) in enumerate(LENGTHS))


def part(case: VarlenCase, b: int, name: str, tensor: Tensor) -> Tensor:
    """Returns the part of an input or of a result that is sequence b's."""
    queries, keys = (
        slice(sum(lengths[:b]), sum(lengths[: b + 1])) for lengths in (case.query_lengths, case.key_lengths)
    )
    if name in ("query", "out"):
        return tensor[queries]
    if name in ("key", "value"):
        return tensor[keys]
    if name in ("lse", "max_scores", "entropy", "mean_score"):
        return tensor[:, queries]
    if name == "key_weights":
        return tensor[:, keys]
    if name in ("alibi_slopes", "sinks"):
        return tensor[b] if tensor.dim() == 2 else tensor
    return mask_of_sequence(tensor, b, *case.sequences[b])


def parts(case: VarlenCase, b: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns copies of the parts that are sequence b's."""
    return {
        name: part(case, b, name, tensor).detach().clone().requires_grad_(tensor.requires_grad)
        for name, tensor in tensors.items()
    }


def alone(case: VarlenCase, b: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Calls attention for the parts of sequence b; returns its results in the form of a packed call."""
    single = Case(**{field.name: getattr(case, field.name) for field in fields(Case)})
    if case.offsets is not None:
        single = replace(single, query_offset=case.offsets[b])
    rows = {name: tensors[name].transpose(0, 1) for name in ("query", "key", "value")}
    results = single.run(tensors | rows)
    return results | {"out": results["out"].transpose(0, 1)}


def everything(
    results: dict[str, Tensor], tensors: dict[str, Tensor], cotangents: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Returns the results and the gradients of the inputs.

    Gradients through the weights are left out: torch sums padded rows in another order than shorter ones.
    """
    return results | gradients({name: results[name] for name in cotangents}, cotangents, tensors)


def results_of(case: VarlenCase, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Makes the packed call; returns everything, and the cotangents."""
    results = case.run(tensors)
    differentiated = {name: result for name, result in results.items() if name != "weights"}
    cotangents = cotangents_of(differentiated, case.seed)
    return everything(results, tensors, cotangents), cotangents


def shared_by_all(case: VarlenCase, tensors: dict[str, Tensor]) -> set[str]:
    """Returns the tensors whose gradients are sums over all sequences."""
    dims = {"alibi_slopes": 2, "sinks": 2, "attn_mask": 4}
    return {
        name
        for name, tensor in tensors.items()
        if tensor.requires_grad and (tensor.dim(), tensor.size(0)) < (dims.get(name, 0), case.batch)
    }


def check_alone(case: VarlenCase) -> None:
    """Asserts that each sequence has the bits that it has alone, that rows of no sequence are zero, and that
    the gradients of tensors that sequences share are the sums over these.
    """
    tensors = case.inputs()
    shared = shared_by_all(case, tensors)
    # Autograd would sum the gradients of a list's masks in their own dtype.
    case = replace(case, lse=True, mask_list=case.mask_list and "attn_mask" not in shared)
    packed, cotangents = results_of(case, tensors)
    rest = {name: tensor.detach().clone() for name, tensor in packed.items()}
    exact_tensors = exact_inputs(tensors)
    exact, peer = (
        {name: torch.zeros_like(tensors[name], dtype=torch.float64) for name in shared} for _ in range(2)
    )
    for b in range(case.batch):
        given = {name: part(case, b, name, tensor) for name, tensor in cotangents.items()}
        own = parts(case, b, tensors)
        for name, result in everything(alone(case, b, own), own, given).items():
            source = name.removeprefix("grad of ")
            part(case, b, source, rest[name]).zero_()
            if name == source or source not in shared:
                assert torch.equal(part(case, b, source, packed[name]), result), f"{name} of sequence {b}"
            else:
                part(case, b, source, peer[source]).add_(result)
        if shared:
            own = parts(case, b, exact_tensors)
            results = everything(alone(case, b, own), own, given)
            for name in shared:
                part(case, b, name, exact[name]).add_(results[f"grad of {name}"])
    for name, tensor in rest.items():
        assert not tensor.any(), f"{name} is not zero in rows of no sequence"
    for name in shared:
        assert_accurate(name, packed[f"grad of {name}"], exact[name], peer[name], dtype=case.dtype)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.seed}-{case}")
def test_pair_of_options(case: VarlenCase, one_thread: None) -> None:
    """Dropout has a test of its own, and so have rows of no sequence, whose lse is not zero."""
    check_alone(replace(case, dropout_p=0.0, more=0))


#: On instruction sets that multiply bfloat16 numbers, float32 numbers are sums of up to three of them.
ARITHMETICS = [*((dtype, "highest") for dtype in DTYPES), (torch.float32, "high"), (torch.float32, "medium")]


@pytest.fixture
def precision() -> Iterator[Callable[[str], None]]:
    """Lets a test set torch's precision of float32 products, and restores it after the test."""
    before = torch.get_float32_matmul_precision()
    yield torch.set_float32_matmul_precision
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("dtype", "exactness"), ARITHMETICS, ids=lambda x: NAMES[x] if isinstance(x, torch.dtype) else x
)
def test_instruction_sets(
    dtype: torch.dtype, exactness: str, isa: str, one_thread: None, precision: Callable[[str], None]
) -> None:
    precision(exactness)
    case = of(LENGTHS, heads=4, dtype=dtype, is_causal=True, offsets=OFFSETS)
    # Two masks take turns.
    if (ARITHMETICS.index((dtype, exactness)) + [*backends.cpu_isas(), *gpu.KERNELS].index(isa)) % 2:
        mask = "bfloat16 square" if exactness == "highest" else "float32 keys"
        check_alone(replace(case, mask=mask, weights=True))
    else:
        check_alone(replace(case, mask="float", mask_list=True, alibi=2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_kernel(dtype: torch.dtype, device: str, one_thread: None) -> None:
    """The loops, and the kernels of a GPU, if there is one."""
    lengths = ((3, 40), (0, 0), (1, 90), (30, 7), (16, 17))
    options = {"offsets": (0, 5, -1, 15, 18), "alibi": 2, "sinks": 2, "device": device}
    check_alone(of(lengths, heads=4, dtype=dtype, is_causal=True, **options))


@pytest.mark.parametrize("mask_list", [False, True])
@pytest.mark.parametrize("mask", ["float", "float bhq", "float32 keys"])
def test_one_query_or_one_key(mask: str, mask_list: bool, isa: str, one_thread: None) -> None:
    """The own mask of such a sequence has one row or one column, and looks as if it were broadcast."""
    lengths = ((1, 200), (70, 1), (150, 90), (1, 1))
    check_alone(of(lengths, heads=4, mask=mask, mask_list=mask_list))


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize(
    "case",
    [
        # With one kv head, three threads work on two sequences at once.
        of(((400, 600), (390, 600), (380, 590)), heads=4, kv_heads=1, dtype=torch.bfloat16, alibi=1),
        of(LENGTHS, kv_heads=1, head_dim=64, value_dim=64, dtype=torch.bfloat16, mask="float hk"),
        of(LENGTHS, kv_heads=1, mask="float heads"),
        of(LENGTHS, heads=4, dtype=torch.bfloat16, mask="bfloat16 square"),
        of(LENGTHS, kv_heads=1, mask="float32 keys", mask_list=True),
        of(LENGTHS, heads=4, dtype=torch.bfloat16, mask="float", mask_list=True),
    ],
    ids=str,
)
def test_threads(case: VarlenCase, threads: int, isa: str, one_thread: None) -> None:
    case = replace(case, lse=True)
    tensors = case.inputs()
    first, _ = results_of(case, tensors)
    torch.set_num_threads(threads)
    again, _ = results_of(case, tensors)
    for name, result in first.items():
        assert torch.equal(result, again[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dropout_counts_sequences(dtype: torch.dtype, isa: str) -> None:
    """A sequence drops the same weights in any batch: its number counts, not its place."""
    case = of(LENGTHS, heads=4, dtype=dtype, dropout_p=0.4, weights=True, lse=True)
    tensors = case.inputs()
    packed = case.run(tensors)
    dropped = packed["weights"][8] == 0
    assert 0.3 < float(dropped[..., :67, :200].float().mean()) < 0.5
    for b, lengths in enumerate(LENGTHS):
        # All other sequences are empty.
        sequences = tuple(lengths if other == b else (0, 0) for other in range(case.batch))
        for name, result in replace(case, sequences=sequences).run(parts(case, b, tensors)).items():
            result = part(case, b, name, result) if name == "weights" else result
            assert torch.equal(part(case, b, name, packed[name]), result), f"{name} of sequence {b}"
