"""Functions of scores and maps of blocks in the kernels.

The functions are written by hand in C++ and compiled here; the judge is the formula with the same functions
in torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
import turns
from cases import normal
from function_cases import FUNCTIONS, SCALE, Call, Options, Results, check, cotangents, run, same, wild
from tolerances import assert_accurate
from torch import Tensor

from selfattn_ext import ops, reference

#: (queries, keys) around strips of 8 to 64 queries and blocks of 64 keys, and primes.
LENGTHS = [(1, 1), (1, 70), (3, 63), (31, 64), (32, 65), (33, 127), (47, 128), (48, 129), (49, 31), (67, 211)]
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
TAME = [name for name in FUNCTIONS if name != "Wild"]


def in_turns(number: int) -> pytest.MarkDecorator:
    """Gives a test one of so many parts of its combinations in `make test`, and another one in .ci/run."""
    others = turns.chosen(range(1, number))
    return pytest.mark.parametrize(
        "turn", [0, *(pytest.param(turn, marks=pytest.mark.thorough) for turn in others)]
    )


@in_turns(4)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("function", TAME)
def test_functions(function: str, lengths: tuple[int, int], turn: int, isa: str) -> None:
    """Every function and all lengths meet each dtype."""
    place = TAME.index(function) + LENGTHS.index(lengths) + turn
    check(Call(function, lengths, DTYPES[place % 4]))


BLOCK_SIZES = [(16, 16), (100, 100), (128, 128), (128, 16), (7, 5), (1, 1)]


@in_turns(3)
@pytest.mark.parametrize("block_size", BLOCK_SIZES, ids=str)
@pytest.mark.parametrize("function", [None, *TAME])
def test_maps_of_blocks(function: str | None, block_size: tuple[int, int], turn: int, isa: str) -> None:
    """Each length has one of three dtypes; another turn or function takes another dtype."""
    shared = list(itertools.product((False, True), repeat=2))
    first = [None, *TAME].index(function) + BLOCK_SIZES.index(block_size) + turn
    for place, lengths in enumerate(((2, 130), (67, 211), (130, 40)), first):
        dtype = (torch.float64, torch.float32, torch.bfloat16)[place % 3]
        check(Call(function, lengths, dtype, block_size=block_size, map_shared=shared[place % 4]))


def test_beyond_a_map_nobody_sees_anybody(kernel: str) -> None:
    if kernel == "loops":
        return  # it refuses maps; another test shows that
    call = Call("Bias", (70, 150))
    arguments = call.arguments()
    tensors = call.tensors()
    short = torch.full((1, 1, 3, 4), 2, dtype=torch.uint8)
    out, _, row_sum, _ = ops.attention_forward(
        *tensors, SCALE, block_map=short, block_size=(16, 32), **arguments
    )
    seen = ops.attention_forward(
        tensors[0][:, :, :48], tensors[1][:, :, :128], tensors[2][:, :, :128], SCALE, **arguments
    )[0]
    assert torch.equal(out[:, :, 48:], torch.zeros_like(out[:, :, 48:]))
    assert torch.equal(row_sum[:, :, 48:], torch.zeros_like(row_sum[:, :, 48:]))
    assert_accurate("out", out[:, :, :48], seen.double())
    nothing = short[..., :0, :]
    out = ops.attention_forward(*tensors, SCALE, block_map=nothing, block_size=(16, 32), **arguments)[0]
    assert torch.equal(out, torch.zeros_like(out))


def float_mask(call: Call) -> Tensor:
    mask = normal(call.batch, call.heads, *call.lengths, dtype=call.dtype, seed=70)
    mask[:, :, :, 64:128] = -torch.inf
    mask[:, :, ::3, ::5] = -torch.inf
    return mask


#: Options that a call has beside a function.
OPTIONS: dict[str, Callable[[Call], Options]] = {
    "softcap": lambda c: {"softcap": 1.5},
    "alibi": lambda c: {
        "alibi_slopes": normal(1, c.heads, seed=71).abs().to(reference.accumulation_dtype(c.dtype)) / 50,
        "softcap": 2.0,
    },
    "mask": lambda c: {"attn_mask": float_mask(c)},
    "boolean mask": lambda c: {"attn_mask": float_mask(c) > 0, "softcap": 1.0},
    "window": lambda c: {"window_left": 40, "window_right": 30, "query_offset": 50},
    "causal": lambda c: {"is_causal": True, "query_offset": 60, "attn_mask": float_mask(c)},
    "sinks": lambda c: {"sinks": normal(1, c.heads, seed=72).to(reference.accumulation_dtype(c.dtype))},
    "dropout": lambda c: {"dropout_p": 0.3, "dropout_seed": torch.tensor([5])},
    "batch_invariant": lambda c: {"batch_invariant": True},
}


@in_turns(8)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("function", [None, *TAME])
def test_with_other_options(function: str | None, option: str, turn: int, isa: str) -> None:
    """Every option, and every function, meets each dtype, few queries and many."""
    place = [None, *TAME].index(function) + list(OPTIONS).index(option) + turn
    dtype, lengths = DTYPES[place % 4], ((67, 131), (3, 130))[place // 4 % 2]
    call = Call(function, lengths, dtype, block_size=(20, 48) if option != "alibi" else None)
    if function is None and call.block_size is None:
        return
    options = OPTIONS[option](call)
    mask = options.get("attn_mask")
    if mask is not None and mask.dtype == torch.bool:
        # A boolean mask has no gradient, so it is turned into a float one.
        options["attn_mask"] = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, -torch.inf)
    check(replace(call, options=options))


def test_wild_numbers_act_as_those_of_a_mask(isa: str) -> None:
    """The numbers are +inf, NaN and rows of -inf."""
    for dtype, lengths in itertools.product(DTYPES, ((4, 70), (67, 211))):
        call = Call("Wild", lengths, dtype)
        at = list(
            torch.meshgrid(*(torch.arange(n) for n in (call.batch, call.heads, *lengths)), indexing="ij")
        )
        mask = wild(torch.zeros(at[0].shape), at[2], at[3]).to(dtype)
        masked = run(replace(call, function=None, options={"attn_mask": mask, "batch_invariant": True}))
        del masked.gradients["mask"]
        assert same(masked, run(replace(call, options={"batch_invariant": True})))


def test_hidden_numbers_do_no_harm(isa: str) -> None:
    """NaN and infinities in keys and values that a function or a map hides have no influence."""
    for dtype, by_map in itertools.product(DTYPES, (False, True)):
        call = Call("Causal", (60, 160), dtype, heads=2)
        if by_map:
            call = replace(call, block_size=(32, 32), map_shared=(True, True))
        tensors = call.tensors()
        tensors[1][:, :, 130], tensors[2][:, :, 128:] = torch.nan, torch.inf
        tensors[1][:, :, 40], tensors[2][:, :, 41] = torch.inf, torch.nan
        shown = call.score_function([])(torch.zeros(2, 2, 60, 160)) == 0
        shown[:, :, :, 40:42] = False
        arguments = call.arguments()
        also = torch.ones(1, 1, 1, 160, dtype=torch.bool)
        also[..., 40:42] = False
        by_mask = {"attn_mask": shown, "kernel_name": arguments["kernel_name"]}
        results = []
        for given in ({**arguments, "attn_mask": also}, by_mask):
            given["batch_invariant"] = True
            out, *rows, _ = ops.attention_forward(*tensors, SCALE, **given)
            weights = ops.attention_weights(*tensors[:2], *rows, SCALE, **given)
            grads = ops.attention_backward(cotangents(call)[0], *tensors, out, *rows, SCALE, **given)[:3]
            results.append(Results(out, weights, dict(zip("qkv", grads, strict=True))))
        assert results[0].out.isfinite().any(-1).any()
        assert same(*results), f"{dtype}, {by_map}"


@pytest.mark.parametrize("function", ["Bias", "Factor", "Square"])
def test_threads_change_no_bit(function: str, isa: str, one_thread: None) -> None:
    dtypes = (torch.bfloat16, torch.float32) if function == "Factor" else (torch.float32, torch.bfloat16)
    for dtype, block_size in zip(dtypes, (None, (100, 100)), strict=True):
        call = Call(function, (260, 300), dtype, block_size=block_size)
        torch.set_num_threads(1)
        alone = run(call)
        torch.set_num_threads(3)
        assert same(alone, run(call))


@pytest.mark.parametrize("function", ["Bias", "Factor", "Square"])
def test_captured_gradients_by_parts(function: str, isa: str) -> None:
    """However the scores are divided, the sums differ only in their order."""
    call = Call(function, (200, 130), torch.float64, batch=5)
    exclusive = FUNCTIONS[function].exclusive
    whole = run(call)
    for fewer in {exclusive & bits for bits in range(8)} - {exclusive}:
        divided = run(call, fewer)
        for name in (name for name in whole.gradients if name.startswith("captured")):
            torch.testing.assert_close(divided.gradients[name], whole.gradients[name], rtol=1e-12, atol=1e-10)
    single = Call(function, (200, 130), torch.float64, batch=1, seed=7)
    if function == "Square":  # with one batch element, only its scores read v[0]
        check(single)
        arguments = single.arguments()
        tensors = single.tensors()
        out, row_max, row_sum, _ = ops.attention_forward(*tensors, SCALE, **arguments)
        passed = (cotangents(single)[0], *tensors, out, row_max, row_sum, SCALE)
        both, second = (
            ops.attention_captured_gradients(*passed, captured_sizes=sizes, **arguments)
            for sizes in ([130, 1], [0, 1])
        )
        assert both.shape == (131,)
        torch.testing.assert_close(second, both[130:], rtol=1e-12, atol=1e-12)


def packed(tensor: Tensor, lengths: Sequence[int]) -> Tensor:
    """Packs the first rows of each of (B, H, L, E) to (1, H, rows, E)."""
    return torch.cat([tensor[b, :, :n] for b, n in enumerate(lengths)], dim=1)[None]


def with_gradients(tensors: Sequence[Tensor], options: Options, exclusive: int = 0) -> list[Tensor]:
    """Computes the output, its gradients, and those of what the function has captured; the last of the
    tensors is the gradient of the output.
    """
    *points, grad = tensors
    given = (grad, *points, *ops.attention_forward(*points, SCALE, **options)[:3], SCALE)
    sizes = [tensor.numel() for tensor in options["captured"]]
    captured = ops.attention_captured_gradients(*given, captured_sizes=sizes, exclusive=exclusive, **options)
    return [given[4], *ops.attention_backward(*given, **options)[:3], captured]


@pytest.mark.parametrize("function", ["Bias", "Factor", "Square"])
def test_packed_sequences_have_numbers_and_maps_of_their_own(function: str, isa: str) -> None:
    """A packed sequence gives the same as the batch element of its number."""
    lengths = [(5, 70), (90, 64), (1, 3), (33, 130)]
    counts = list(zip(*lengths, strict=True))
    starts = [torch.tensor([0, *itertools.accumulate(count)]) for count in counts]
    own = {"cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1], "max_seqlen_q": 90, "max_seqlen_k": 130}
    for dtype in (torch.float32, torch.bfloat16):
        whole = Call(function, (90, 130), dtype, batch=4, block_size=(32, 48))
        arguments, tensors = whole.arguments(), [*whole.tensors(), cotangents(whole)[0]]
        rows = [packed(x, counts[side]) for x, side in zip(tensors, (0, 1, 1, 0), strict=True)]
        *found, captured = with_gradients(rows, own | arguments, FUNCTIONS[function].exclusive)
        total = torch.zeros_like(captured)
        for b, count in enumerate(lengths):
            cut = [x[:, :, : count[side]] for x, side in zip(tensors, (0, 1, 1, 0), strict=True)]
            # In this batch the other elements are zeros.
            alone = [torch.zeros_like(x).index_copy(0, torch.tensor([b]), x[b : b + 1]) for x in cut]
            *results, part = with_gradients(alone, arguments)
            for mine, theirs, side in zip(found, results, (0, 0, 1, 1), strict=True):
                assert torch.equal(mine[0, :, starts[side][b] : starts[side][b + 1]], theirs[b])
            total += part
        # These are the same numbers, summed in float64 in another order.
        torch.testing.assert_close(captured, total, rtol=1e-12, atol=1e-10)


def test_keys_in_pages(isa: str) -> None:
    """A cache in pages gives the same as its keys in one tensor."""
    for dtype, queries in itertools.product((torch.float32, torch.bfloat16), (1, 3, 40)):
        call = Call("Bias", (queries, 96), dtype, block_size=(16, 32))
        query, key, value = call.tensors()
        pages = [
            x.unflatten(2, (6, 16)).transpose(1, 2).flatten(0, 1).flip(0).contiguous() for x in (key, value)
        ]
        table = torch.arange(11, -1, -1, dtype=torch.int32).reshape(2, 6)
        lengths = {"seqlens_k": torch.tensor([90, 96])}
        plain = ops.attention_forward(query, key, value, SCALE, **lengths, **call.arguments())
        paged = ops.attention_forward(query, *pages, SCALE, block_table=table, **lengths, **call.arguments())
        for first, second in zip(plain, paged, strict=True):
            assert torch.equal(first, second)


def test_one_function_of_few_queries_and_of_many(isa: str) -> None:
    """Under batch_invariant(), a row is the same with few and with many others."""
    for dtype in DTYPES:
        call = Call("Square", (40, 130), dtype, options={"batch_invariant": True})
        query, key, value = call.tensors()
        out = ops.attention_forward(query, key, value, SCALE, **call.arguments())[0]
        one = ops.attention_forward(query[:, :, :1], key, value, SCALE, **call.arguments())[0]
        assert torch.equal(out[:, :, :1], one)
