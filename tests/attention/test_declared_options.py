"""Declared options: each option of the operators' schema changes what each kernel computes.

The options are read from the schema, so a new one without a line in changes() fails here. So does one that
some kernel ignores, or a shortcut inside a kernel for few queries, packed sequences or caches. Other tests
show that results are right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import gpu
import pytest
import torch
from compiled_functions import load
from torch import Tensor

from selfattn_ext import backends
from selfattn_ext.build import library

BATCH, HEADS, KV_HEADS, KEYS, HEAD_DIM, VALUE_DIM, PAGE = 2, 4, 2, 40, 24, 16, 10
#: Numbers of queries that kernels compute in different ways: one, as in decoding, a few, and many.
QUERIES = (1, 3, 37)
DTYPES = (torch.float32, torch.bfloat16)
SCALE = 0.4

#: Options that only some kernels have -> the option that these kernels declare.
DECLARED = {
    "score_function": "score_function",
    "captured": "score_function",
    "captured_numbers": "score_function",
    "block_map": "block_map",
    "block_size": "block_map",
    "selection": "selection",
    "selection_size": "selection",
}
#: Those of them that a call on CUDA may have here, as functions are libraries for the CPU.
OF_CUDA = ("selection",)
#: Options of the forward and the backward alone. The other operators refuse them.
SELECTED = ("selection", "selection_size")
#: Options that are not judged by results: the kernel, and the least precision. Unknown names are refused.
NAMES = ("kernel_name", "float32_precision")
#: This one promises something about results, which test_batch_invariant.py checks.
PROMISES = ("batch_invariant",)
#: Options that ask for results; they are judged by the gradient that these serve.
NEEDS = ("need_residual", "need_weights", "need_mask_grad")

Options = dict[str, Any]


class Change(NamedTuple):
    """A call without an option, or with one value of it, and what is added to get another result."""

    before: Options
    added: Options


def integers(*numbers: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(numbers, dtype=dtype)


def head_numbers() -> Tensor:
    return torch.linspace(0.1, 0.8, HEADS).reshape(1, HEADS)


def changes(queries: int) -> dict[str, Change]:
    """Returns two calls for each option of the schema, on equal tensors, with ``queries`` per sequence."""
    offset: Options = {"query_offset": 20}
    seed: Options = {"dropout_p": 0.5, "dropout_seed": integers(1)}
    mask = torch.randn(BATCH, HEADS, queries, KEYS)
    # Two sequences of different lengths are in the rows of one batch element: see inputs().
    packed_q: Options = {
        "cu_seqlens_q": integers(0, queries, 2 * queries + 1),
        "max_seqlen_q": queries + 1,
    }
    packed_k: Options = {"cu_seqlens_k": integers(0, KEYS - 9, 2 * KEYS), "max_seqlen_k": KEYS + 9}
    packed = packed_q | packed_k
    lengths = (queries, KEYS - 9), (queries + 1, KEYS + 9)
    own_masks = torch.randn(sum(rows * keys for rows, keys in lengths))
    rows_shared = torch.randn(lengths[0][1] + lengths[1][1])
    cap = {"score_function": load("Cap", torch.float32), "captured_numbers": [0.7]}
    square = {
        "score_function": load("Square", torch.float32),
        "captured": [torch.linspace(-1, 1, KEYS), torch.linspace(0, 1, BATCH)],
    }
    blocks = integers(1, 0, 2, 2, 1, 0, 0, 2, 1, dtype=torch.uint8).reshape(1, 1, 3, 3)
    table = integers(0, 1, 2, 3, 4, 5, 6, 7, dtype=torch.int32).reshape(BATCH, -1)
    lists = integers(0, 2, dtype=torch.int32).repeat(1, 1, queries, 1)
    return {
        "attn_mask": Change({}, {"attn_mask": mask}),
        "alibi_slopes": Change({}, {"alibi_slopes": head_numbers()}),
        "sinks": Change({}, {"sinks": head_numbers()}),
        "dropout_p": Change({}, seed),
        "dropout_seed": Change(seed, {"dropout_seed": integers(2)}),
        "is_causal": Change(offset, {"is_causal": True}),
        "window_left": Change(offset, {"window_left": 5}),
        "window_right": Change(offset, {"window_right": 2}),
        "query_offset": Change({"is_causal": True}, {"query_offset": 7}),
        "softcap": Change({}, {"softcap": 0.5}),
        "cu_seqlens_q": Change(packed, {"cu_seqlens_q": integers(0, queries + 1, 2 * queries + 1)}),
        "cu_seqlens_k": Change(packed, {"cu_seqlens_k": integers(0, KEYS - 3, 2 * KEYS)}),
        "seqlens_k": Change({}, {"seqlens_k": integers(KEYS - 7, 5)}),
        "query_offsets": Change({"is_causal": True}, {"query_offsets": integers(3, 11)}),
        "block_table": Change(
            {"block_table": table, "seqlens_k": integers(KEYS - 1, KEYS - 4)},
            {"block_table": table.flip(0, 1)},
        ),
        "mask_shapes": Change(
            packed | {"attn_mask": rows_shared, "mask_shapes": [1, 1, lengths[0][1], 1, 1, lengths[1][1]]},
            {"attn_mask": own_masks, "mask_shapes": [n for pair in lengths for n in (1, *pair)]},
        ),
        "score_function": Change({}, cap),
        "captured": Change(square, {"captured": [torch.linspace(1, -1, KEYS), torch.ones(BATCH)]}),
        "captured_numbers": Change(cap, {"captured_numbers": [0.3]}),
        "block_map": Change({}, {"block_map": blocks, "block_size": [16, 16]}),
        "block_size": Change({"block_map": blocks, "block_size": [16, 16]}, {"block_size": [16, 9]}),
        "selection": Change({}, {"selection": lists, "selection_size": [1, 8]}),
        "selection_size": Change({"selection": lists, "selection_size": [1, 8]}, {"selection_size": [1, 16]}),
        # A sequence longer than these is refused.
        "max_seqlen_q": Change(packed, {"max_seqlen_q": queries}),
        "max_seqlen_k": Change(packed, {"max_seqlen_k": KEYS}),
        # These are options of the backward.
        "out_residual": Change({}, {"out_residual": ...}),
        "grad_row": Change({}, {"grad_row": ...}),
        "grad_weights": Change({}, {"grad_weights": ...}),
        "grad_mean": Change({}, {"grad_mean": ...}),
        "grad_sink": Change({"sinks": head_numbers()}, {"grad_sink": ...}),
        "grad_keys": Change({}, {"grad_keys": ...}),
        # This one is an option of sums of weights.
        "per_key": Change({}, {"per_key": torch.randn(BATCH, HEADS, KEYS)}),
    }


#: Options that hide scores, among which the largest need not be.
RULES = (
    "is_causal", "window_left", "window_right", "query_offset", "query_offsets", "seqlens_k", "block_map",
    "block_size", "cu_seqlens_q", "cu_seqlens_k",
)  # fmt: skip
LONGEST = ("max_seqlen_q", "max_seqlen_k")


def options_of(operator: Any) -> list[str]:
    """Returns the names of an operator's options in its schema."""
    return [argument.name for argument in operator.default._schema.arguments if argument.kwarg_only]


def operator(name: str) -> Any:
    return getattr(library.ops(), name)


def call(name: str, *arguments: Any, **options: Any) -> Any:
    """Calls the operator on the forced kernel, which public functions would pass to it."""
    return operator(name)(*arguments, **{"kernel_name": backends.forced_kernel(), **options})


class Inputs(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor


def inputs(queries: int, dtype: torch.dtype, options: Options) -> Inputs:
    """Draws tensors in the layout that the options ask for."""
    query = torch.randn(BATCH, HEADS, queries, HEAD_DIM)
    key = torch.randn(BATCH, KV_HEADS, KEYS, HEAD_DIM)
    value = torch.randn(BATCH, KV_HEADS, KEYS, VALUE_DIM)
    if "cu_seqlens_q" in options:
        query = torch.randn(1, HEADS, 2 * queries + 1, HEAD_DIM)
        key, value = (torch.randn(1, KV_HEADS, 2 * KEYS, width) for width in (HEAD_DIM, VALUE_DIM))
    if "block_table" in options:
        pages = int(options["block_table"].numel())
        key, value = (torch.randn(pages, KV_HEADS, PAGE, width) for width in (HEAD_DIM, VALUE_DIM))
    return Inputs(query.to(dtype), key.to(dtype), value.to(dtype))


def forward(tensors: Inputs, options: Options) -> tuple[Tensor, ...]:
    return tuple(call("attention_forward", *tensors, SCALE, need_residual=True, **options))


def weights(tensors: Inputs, statistics: tuple[Tensor, Tensor], options: Options) -> Tensor:
    result: Tensor = call("attention_weights", *tensors[:2], *statistics, SCALE, **options)
    return result


def backward(tensors: Inputs, of_forward: tuple[Tensor, ...], options: Options) -> tuple[Tensor, ...]:
    out, row_max, row_sum, _ = of_forward
    grad_out = torch.linspace(-1, 1, out.numel()).reshape(out.shape).to(out.dtype)
    arguments = (grad_out, *tensors, out, row_max, row_sum, SCALE)
    return tuple(call("attention_backward", *arguments, need_mask_grad="attn_mask" in options, **options))


def refused(name: str, run: Callable[[], Any]) -> bool:
    """Tells whether the forced kernel does not declare the option, and checks that it refuses it then."""
    declaration = DECLARED.get(name)
    if declaration is None:
        return False
    declared = OF_CUDA
    if gpu.DEVICE != "cuda":
        declared = library.extension().choose_kernel(backends.forced_kernel()).get("options", ())
    if declaration in declared:
        return False
    with pytest.raises(ValueError, match=declaration):
        run()
    return True


def differ(first: Tensor, second: Tensor) -> bool:
    return first.shape != second.shape or not torch.equal(first.nan_to_num(), second.nan_to_num())


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    result: torch.dtype = request.param
    return result


@pytest.fixture(params=QUERIES)
def queries(request: pytest.FixtureRequest) -> int:
    result: int = request.param
    return result


def pairs(
    operator_name: str, queries: int, dtype: torch.dtype
) -> Iterator[tuple[str, Inputs, Options, Options]]:
    """Yields each option that the forced kernel takes, with inputs, and two calls that differ in it."""
    known = changes(queries)
    for name in options_of(operator(operator_name)):
        if name in NAMES + PROMISES + NEEDS + LONGEST:
            continue
        before, added = known[name]
        tensors = inputs(queries, dtype, before)
        if name in SELECTED and operator_name not in ("attention_forward", "attention_backward"):
            continue
        if not refused(name, partial(forward, tensors, before | added)):
            yield name, tensors, before, before | added


def test_every_option_of_the_schema_has_a_change() -> None:
    known = set(changes(3))
    names = ("attention_forward", "attention_weights", "attention_weight_sums", "attention_statistics")
    for name in (*names, "attention_backward", "attention_with_cache", "statistics_with_cache"):
        assert set(options_of(operator(name))) <= known | set(NAMES + PROMISES + NEEDS), name


def test_others_refuse_selected_keys(kernel: str) -> None:
    options = changes(3)["selection"].added
    query, key, value = inputs(3, torch.float32, {})
    rows = torch.ones(BATCH, HEADS, 3)
    for run in (
        partial(call, "attention_weights", query, key, rows, rows, SCALE),
        partial(call, "attention_weight_sums", query, key, rows, rows, SCALE),
        partial(call, "attention_statistics", query, key, value, SCALE),
        partial(call, "attention_jvp", query, key, value, SCALE, tangent_query=query),
    ):
        with pytest.raises(ValueError, match=r"selection|has no forward mode"):
            run(**options)


def test_forward_applies_every_option(kernel: str, dtype: torch.dtype, queries: int) -> None:
    for name, tensors, before, after in pairs("attention_forward", queries, dtype):
        first, second = forward(tensors, before)[0], forward(tensors, after)[0]
        assert differ(first, second), f"attention_forward ignores {name}"


def test_weights_apply_every_option(kernel: str, dtype: torch.dtype, queries: int) -> None:
    """Both calls get the same row statistics, so that no effect on the forward is mistaken for one here."""
    for name, tensors, before, after in pairs("attention_weights", queries, dtype):
        _, row_max, row_sum, _ = forward(tensors, before)
        if name == "sinks":
            # Sinks act only through the statistics.
            continue
        first, second = (weights(tensors, (row_max, row_sum), options) for options in (before, after))
        assert differ(first, second), f"attention_weights ignores {name}"


def test_statistics_apply_every_option(kernel: str, dtype: torch.dtype, queries: int) -> None:
    """Each number of a row changes, except that dropout comes after them, and a sink is no visible score."""
    for name, tensors, before, after in pairs("attention_statistics", queries, dtype):
        first, second = (
            call("attention_statistics", *tensors, SCALE, **options)[4:] for options in (before, after)
        )
        if name in ("dropout_p", "dropout_seed"):
            # A forward without options may be another kernel, which rounds row_sum in its own way.
            assert not differ(first[0], second[0]), name
            torch.testing.assert_close(first[1], second[1], rtol=1e-6, atol=1e-6)
            continue
        assert differ(first[1], second[1]), f"attention_statistics ignores {name}"
        assert differ(first[0], second[0]) or name in ("sinks", *RULES), f"row_top ignores {name}"


def test_sums_of_weights_apply_every_option(kernel: str, dtype: torch.dtype, queries: int) -> None:
    """Both calls get the same row statistics, through which sinks act alone."""
    for name, tensors, before, after in pairs("attention_weight_sums", queries, dtype):
        if name == "sinks":
            continue
        _, row_max, row_sum, _ = forward(tensors, before)
        given = (*tensors[:2], row_max, row_sum, SCALE)
        sums = [call("attention_weight_sums", *given, **options) for options in (before, after)]
        numbers = torch.linspace(-1, 1, sums[0].numel()).reshape(sums[0].shape).to(sums[0].dtype)
        if name != "per_key":
            sums += [
                call("attention_weight_sums", *given, per_key=numbers, **options)
                for options in (before, after)
            ]
        for first, second in zip(sums[::2], sums[1::2], strict=True):
            dropped = name in ("dropout_p", "dropout_seed")
            assert differ(first, second) != dropped, f"attention_weight_sums: {name}"


def test_backward_applies_every_option(kernel: str, dtype: torch.dtype, queries: int) -> None:
    """Both calls get the same results of the forward. Caches have no gradients."""
    for name, tensors, before, after in pairs("attention_backward", queries, dtype):
        of_forward = forward(tensors, before)
        _, row_max, _, residual = of_forward
        given = {
            "out_residual": residual + 1.0 if residual.numel() else None,
            "grad_row": torch.ones_like(row_max),
            "grad_weights": torch.randn(BATCH, HEADS, queries, KEYS).to(dtype),
            "grad_mean": torch.ones_like(row_max),
            "grad_sink": torch.ones_like(row_max),
            "grad_keys": torch.randn(BATCH, HEADS, KEYS),
        }
        after = {key: given[key] if value is ... else value for key, value in after.items()}
        if name == "out_residual" and after[name] is None:
            continue  # nothing is rounded
        if name == "block_table":
            with pytest.raises(ValueError, match="block_table"):
                backward(tensors, of_forward, after)
            continue
        first = backward(tensors, of_forward, before)
        second = backward(tensors, of_forward, after)
        if name == "sinks":
            assert second[5].abs().max() > 0, "attention_backward ignores sinks"
            continue
        if name == "grad_sink":
            assert differ(first[5], second[5]), "attention_backward ignores grad_sink"
            continue
        assert differ(first[0], second[0]) or differ(first[1], second[1]), (
            f"attention_backward ignores {name}"
        )
        if name == "alibi_slopes":
            assert second[4].abs().max() > 0
        if name == "attn_mask":
            assert second[3].abs().max() > 0


def test_steps_on_a_cache_apply_every_option(kernel: str, dtype: torch.dtype, queries: int) -> None:
    """The operator appends one new key to each sequence, then attends."""
    for name, tensors, before, after in pairs("attention_with_cache", queries, dtype):
        if {"cu_seqlens_k", "mask_shapes"} & after.keys():
            continue  # refused: keys and values are a cache
        new = [torch.ones(BATCH, KV_HEADS, 1, width, dtype=dtype) for width in (HEAD_DIM, VALUE_DIM)]
        lengths = {"seqlens_k": integers(KEYS - 1, KEYS - 4)}
        results = []
        for options in (lengths | before, lengths | after):
            caches = tensors.key.clone(), tensors.value.clone()
            step = call("attention_with_cache", tensors.query, *caches, *new, SCALE, **options)
            results.append(step[0])
        assert differ(*results), f"attention_with_cache ignores {name}"


@pytest.mark.cpu_only(reason="on a GPU operators do not check offsets; kernels limit them")
@pytest.mark.parametrize("name", LONGEST)
def test_a_sequence_longer_than_the_longest_is_refused(name: str) -> None:
    before, added = changes(3)[name]
    tensors = inputs(3, torch.float32, before)
    forward(tensors, before)
    with pytest.raises(
        ValueError, match=name.replace("max", "cu").replace("seqlen_", "seqlens_") + "|" + name
    ):
        forward(tensors, before | added)


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"kernel|float32_precision"):
        forward(inputs(3, torch.float32, {}), {name: "nobody"})


def test_masked_softmax_applies_every_option(kernel: str, dtype: torch.dtype) -> None:
    scores = torch.randn(BATCH, HEADS, 5, KEYS).to(dtype)
    known = {
        "mask": Change({}, {"mask": torch.randn(1, 1, 1, KEYS)}),
        "is_causal": Change({}, {"is_causal": True}),
        "query_offset": Change({"is_causal": True}, {"query_offset": 4}),
    }
    for name in options_of(operator("masked_softmax")):
        if name in NAMES:
            continue
        before, added = known[name]
        first, second = (
            call("masked_softmax", scores, SCALE, **options) for options in (before, before | added)
        )
        assert differ(first, second), f"masked_softmax ignores {name}"


def test_kernels_declare_names_of_the_schema() -> None:
    names = set(options_of(operator("attention_forward")))
    for row in library.extension().kernel_table():
        declared = {word for option in row["options"] for word in option.split(" or a window")[0].split()}
        assert declared <= names
        assert {"attn_mask", "softcap"} <= declared
