"""Functions of scores and maps of blocks in the kernels: functions written by hand in C++, compiled here, and
the formula with the same functions in torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from cases import normal, remembered
from compiled_functions import load
from tolerances import assert_accurate
from torch import Tensor

from selfattn_ext import backends, library, ops, reference

SCALE = 0.3

Options = dict[str, Any]


@dataclass(frozen=True)
class Function:
    """A structure of score_functions.cpp, and the same in torch."""

    #: (scores, tensors, numbers, (batch, head, query, key) of the scores) -> scores
    value: Callable[[Tensor, list[Tensor], list[float], list[Tensor]], Tensor]
    #: (B, H, L, S) -> shapes of its tensors
    shapes: Callable[[int, int, int, int], list[tuple[int, ...]]] = lambda b, h, q, k: []
    #: (L, S) -> its numbers
    numbers: Callable[[int, int], list[float]] = lambda q, k: []
    #: Whom it hides, by (numbers, places).
    hides: Callable[[list[float], list[Tensor]], Tensor] | None = None
    #: The dimensions that `exclusive` may name.
    exclusive: int = 0


def wild(scores: Tensor, query: Tensor, key: Tensor) -> Tensor:
    scores = torch.where(query % 5 == 1, -torch.inf, scores)
    scores = torch.where((query % 5 == 2) & (key == 3), torch.nan, scores)
    return torch.where((query % 5 == 3) & (key == 4), torch.inf, scores)


FUNCTIONS = {
    "Bias": Function(
        lambda s, t, n, at: s + t[0].T[at[1], at[3] - at[2] + int(n[0])],
        shapes=lambda b, h, q, k: [(q + k, h)],
        numbers=lambda q, k: [float(q)],
        exclusive=2,
    ),
    "Factor": Function(
        lambda s, t, n, at: s * t[0].T[at[1], at[2]],
        shapes=lambda b, h, q, k: [(q, h)],
        hides=lambda n, at: (3 * at[2] + 2 * at[3] + at[0] + at[1]) % 7 == 0,
        exclusive=6,
    ),
    "Square": Function(
        lambda s, t, n, at: s + s * s * t[0][at[3]] + t[1][at[0]] * (at[3] % 3),
        shapes=lambda b, h, q, k: [(k,), (b,)],
    ),
    "Causal": Function(
        lambda s, t, n, at: s,
        numbers=lambda q, k: [float(k - q)],
        hides=lambda n, at: at[3] > at[2] + int(n[0]),
    ),
    "Cap": Function(lambda s, t, n, at: n[0] * torch.tanh(s / n[0]), numbers=lambda q, k: [0.7]),
    "Wild": Function(lambda s, t, n, at: wild(s, at[2], at[3])),
}


@dataclass(frozen=True)
class Call:
    """A call of the operators with a function, a map of blocks, or both."""

    function: str | None
    lengths: tuple[int, int]
    dtype: torch.dtype = torch.float32
    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    dims: tuple[int, int] = (16, 24)
    block_size: tuple[int, int] | None = None
    #: Sizes of the map's batch and heads.
    map_shared: tuple[bool, bool] = (False, False)
    options: Options = field(default_factory=dict, repr=False)
    seed: int = 0

    def tensors(self) -> list[Tensor]:
        (queries, keys), (dim, value_dim) = self.lengths, self.dims
        shapes = (
            (self.heads, queries, dim),
            (self.kv_heads, keys, dim),
            (self.kv_heads, keys, value_dim),
        )
        return [
            normal(self.batch, *shape, dtype=self.dtype, seed=self.seed + i) for i, shape in enumerate(shapes)
        ]

    def captured(self) -> list[Tensor]:
        if self.function is None:
            return []
        dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        shapes = FUNCTIONS[self.function].shapes(self.batch, self.heads, *self.lengths)
        # Every second element of a longer tensor, as functions must look at strides.
        return [
            normal(*shape[:-1], 2 * shape[-1], dtype=dtype, seed=50 + self.seed + i)[..., ::2]
            for i, shape in enumerate(shapes)
        ]

    def numbers(self) -> list[float]:
        return [] if self.function is None else FUNCTIONS[self.function].numbers(*self.lengths)

    def block_map(self) -> Tensor | None:
        if self.block_size is None:
            return None
        blocks = [-(-n // size) for n, size in zip(self.lengths, self.block_size, strict=True)]
        shape = [
            1 if shared else n for shared, n in zip(self.map_shared, (self.batch, self.heads), strict=True)
        ]
        generator = torch.Generator().manual_seed(self.seed)
        states = torch.randint(0, 3, (*shape, *blocks), generator=generator)
        states[..., 0] = states[..., 0].clamp(min=1)  # most rows see something
        return states.to(torch.uint8)

    def arguments(self) -> Options:
        """The operators' keyword arguments."""
        arguments: Options = {"kernel_name": backends.forced_kernel(), **self.options}
        if self.function is not None:
            arguments |= {
                "score_function": load(self.function, self.dtype),
                "captured": self.captured(),
                "captured_numbers": self.numbers(),
            }
        if self.block_size is not None:
            arguments |= {"block_map": self.block_map(), "block_size": self.block_size}
        return arguments

    def score_function(self, captured: Sequence[Tensor]) -> Callable[[Tensor], Tensor]:
        """The function and the map in torch."""

        def value(scores: Tensor) -> Tensor:
            numbers = self.numbers()
            at = list(torch.meshgrid(*(torch.arange(n) for n in scores.shape), indexing="ij"))
            function = None if self.function is None else FUNCTIONS[self.function]
            hidden = torch.zeros(scores.shape, dtype=torch.bool)
            if function is not None:
                scores = function.value(scores, [t.to(scores.dtype) for t in captured], numbers, at)
                if function.hides is not None:
                    hidden = function.hides(numbers, at)
            states = self.block_map()
            if states is not None:
                assert self.block_size is not None
                for d, (size, n) in enumerate(zip(self.block_size, scores.shape[2:], strict=True), start=2):
                    states = states.repeat_interleave(size, dim=d).narrow(d, 0, n)
                hidden = torch.where(states == 1, hidden, states == 0)
            return torch.where(hidden, -torch.inf, scores)

        return value


@dataclass(frozen=True)
class Results:
    out: Tensor
    weights: Tensor
    gradients: dict[str, Tensor]
    #: How large what a gradient is a sum of is.
    terms: dict[str, float] = field(default_factory=dict)


def run(call: Call, exclusive: int | None = None) -> Results:
    """Through the operators."""
    tensors, arguments = call.tensors(), call.arguments()
    out, row_max, row_sum, residual = ops.attention_forward(*tensors, SCALE, need_residual=True, **arguments)
    weights = ops.attention_weights(*tensors[:2], row_max, row_sum, SCALE, **arguments)
    grad_out, grad_weights = cotangents(call)
    passed = (grad_out, *tensors, out, row_max, row_sum, SCALE)
    more = {
        "out_residual": residual if residual.numel() else None,
        "grad_row": (weights.double() * grad_weights.double()).sum(-1).to(row_max.dtype),
        "grad_weights": grad_weights,
    }
    masked = "attn_mask" in arguments
    grads = ops.attention_backward(*passed, need_mask_grad=masked, **more, **arguments)
    gradients = dict(zip(("query", "key", "value"), grads, strict=False))
    if masked:
        gradients["mask"] = grads[3]
    if "alibi_slopes" in arguments:
        gradients["slopes"] = grads[4]
    captured = arguments.get("captured") or []
    if captured:
        assert call.function is not None
        sums = ops.attention_captured_gradients(
            *passed,
            captured_sizes=[tensor.numel() for tensor in captured],
            exclusive=FUNCTIONS[call.function].exclusive if exclusive is None else exclusive,
            **more,
            **arguments,
        )
        for i, part in enumerate(sums.split([tensor.numel() for tensor in captured])):
            gradients[f"captured {i}"] = part.reshape(captured[i].shape)
    return Results(out, weights, gradients)


def cotangents(call: Call) -> tuple[Tensor, Tensor]:
    shape = (call.batch, call.heads, call.lengths[0])
    return (
        normal(*shape, call.dims[1], dtype=call.dtype, seed=90),
        normal(*shape, call.lengths[1], dtype=call.dtype, seed=91),
    )


def formula(call: Call, dtype: torch.dtype | None) -> Results:
    """The same by the formula, in float64 or in the call's dtype."""

    def leaf(tensor: Tensor) -> Tensor:
        return (tensor if dtype is None else tensor.to(dtype)).detach().requires_grad_()

    options = {name: value for name, value in call.options.items() if name != "batch_invariant"}
    inputs = dict(zip(("query", "key", "value"), map(leaf, call.tensors()), strict=True))
    captured = [leaf(tensor) for tensor in call.captured()]
    leaves = inputs | {f"captured {i}": tensor for i, tensor in enumerate(captured)}
    for option, short in (("attn_mask", "mask"), ("alibi_slopes", "slopes")):
        if option in options:
            leaves[short] = options[option] = leaf(options[option])
    if "sinks" in options:
        options["sinks"] = leaf(options["sinks"]).detach()
    options["window_size"] = (options.pop("window_left", -1), options.pop("window_right", -1))
    function, seen = call.score_function(captured), {}

    def observed(scores: Tensor) -> Tensor:
        seen["before"], seen["after"] = scores, function(scores)
        return seen["after"]

    result = reference.attention(*inputs.values(), scale=SCALE, score_function=observed, **options)
    results = [result.out, result.weights]
    grads = torch.autograd.grad(
        results,
        [*leaves.values(), seen["after"]],
        [cotangent.to(part.dtype) for cotangent, part in zip(cotangents(call), results, strict=True)],
    )
    gradients = dict(zip(leaves, grads, strict=False))
    before = seen["before"].detach().requires_grad_()
    steepest = max(
        1.0, float(torch.autograd.grad(function(before).clamp(min=-1e9).sum(), before)[0].abs().max())
    )
    # Rounding errors of a score's gradient, weight * (dP - delta), are in proportion to dP; the function
    # multiplies them.
    grad_out, grad_weights = (cotangent.double() for cotangent in cotangents(call))
    values = call.tensors()[2].double().repeat_interleave(call.heads // call.kv_heads, dim=1)
    largest = float((grad_out @ values.mT + grad_weights).abs().max()) / (1 - options.get("dropout_p", 0.0))
    terms = dict.fromkeys(("query", "key", "value"), largest * steepest)
    errors = torch.maximum(grads[-1].abs(), result.weights.detach() * largest)
    if captured:
        # These functions are made of terms that are positive for positive scores, times captured numbers.
        sums = torch.autograd.grad(function(before.detach().abs()), captured, errors)
        terms |= {f"captured {i}": float(part.max()) for i, part in enumerate(sums)}
    if "slopes" in gradients:
        far = torch.arange(call.lengths[0])[:, None] - torch.arange(call.lengths[1])
        terms["slopes"] = steepest * float((errors * far.abs()).sum((0, 2, 3)).max())
    if "mask" in gradients:
        terms["mask"] = largest
    return Results(result.out.detach(), result.weights.detach(), gradients, terms)


@remembered
def exact_and_peer(fields: dict[str, Any]) -> tuple[Results, Results]:
    """The formula of a call in float64 and in its dtype."""
    return formula(Call(**fields), torch.float64), formula(Call(**fields), None)


def check(call: Call) -> None:
    result = run(call)
    exact, peer = exact_and_peer({name: getattr(call, name) for name in call.__dataclass_fields__})
    assert_accurate(f"out of {call}", result.out, exact.out, peer.out)
    assert_accurate(f"weights of {call}", result.weights, exact.weights, peer.weights)
    assert result.gradients.keys() == exact.gradients.keys()
    for which, gradient in result.gradients.items():
        assert_accurate(
            f"grad of {which} of {call}",
            gradient,
            exact.gradients[which],
            peer.gradients[which],
            exact.terms[which],
            call.dtype,
        )


def same(first: Results, second: Results) -> bool:
    """To the bit, NaN where the other has NaN."""
    pairs = [(first.out, second.out), (first.weights, second.weights)]
    pairs += [(gradient, second.gradients[name]) for name, gradient in first.gradients.items()]
    return all(
        torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs
    )


#: Around a strip of 8 to 64 queries, a block of 64 keys, and primes.
LENGTHS = [(1, 1), (1, 70), (3, 63), (31, 64), (32, 65), (33, 127), (47, 128), (48, 129), (49, 31), (67, 211)]
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
TAME = [name for name in FUNCTIONS if name != "Wild"]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("function", TAME)
def test_functions(function: str, lengths: tuple[int, int], isa: str) -> None:
    for dtype in DTYPES:
        check(Call(function, lengths, dtype))


@pytest.mark.parametrize("block_size", [(16, 16), (100, 100), (128, 128), (128, 16), (7, 5), (1, 1)], ids=str)
@pytest.mark.parametrize("function", [None, *TAME])
def test_maps_of_blocks(function: str | None, block_size: tuple[int, int], isa: str) -> None:
    shared = itertools.cycle(itertools.product((False, True), repeat=2))
    for lengths in ((2, 130), (67, 211), (130, 40)):
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            check(Call(function, lengths, dtype, block_size=block_size, map_shared=next(shared)))


def test_beyond_a_map_nobody_sees_anybody(kernel: str) -> None:
    if kernel == "loops":
        return  # refuses: see below
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


#: Options beside a function, of a call.
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


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("function", [None, *TAME])
def test_with_other_options(function: str | None, option: str, isa: str) -> None:
    for lengths, dtype in itertools.product(((3, 130), (67, 211)), DTYPES):
        call = Call(function, lengths, dtype, block_size=(20, 48) if option != "alibi" else None)
        if function is None and call.block_size is None:
            continue
        options = OPTIONS[option](call)
        if options.get("attn_mask") is not None and options["attn_mask"].dtype == torch.bool:
            # A boolean mask has no gradient: as a float one.
            hidden = torch.zeros(options["attn_mask"].shape, dtype=dtype).masked_fill(
                ~options["attn_mask"], -torch.inf
            )
            options["attn_mask"] = hidden
        check(replace(call, options=options))


def test_wild_numbers_act_as_those_of_a_mask(isa: str) -> None:
    """+inf, NaN and rows of -inf."""
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
    """NaN and infinities in keys and values that a function hides, or a map: as those that a mask hides."""
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
        results = []
        for given in (
            {**arguments, "attn_mask": also},
            {"attn_mask": shown, "kernel_name": arguments["kernel_name"]},
        ):
            given["batch_invariant"] = True
            out, row_max, row_sum, _ = ops.attention_forward(*tensors, SCALE, **given)
            weights = ops.attention_weights(*tensors[:2], row_max, row_sum, SCALE, **given)
            grads = ops.attention_backward(
                cotangents(call)[0], *tensors, out, row_max, row_sum, SCALE, **given
            )[:3]
            results.append(Results(out, weights, dict(zip("qkv", grads, strict=True))))
        assert results[0].out.isfinite().any(-1).any()
        assert same(*results), f"{dtype}, {by_map}"


@pytest.mark.parametrize("function", ["Bias", "Factor", "Square"])
def test_threads_change_no_bit(function: str, isa: str, one_thread: None) -> None:
    for dtype, block_size in itertools.product((torch.float32, torch.bfloat16), (None, (100, 100))):
        call = Call(function, (260, 300), dtype, block_size=block_size)
        results = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(run(call))
        torch.set_num_threads(1)
        assert same(results[0], results[1])
        assert same(results[0], results[2])


@pytest.mark.parametrize("function", ["Bias", "Factor", "Square"])
def test_captured_gradients_by_parts(function: str, isa: str) -> None:
    """However scores are divided, the sums are the same but for their order."""
    call = Call(function, (200, 130), torch.float64, batch=5)
    exclusive = FUNCTIONS[function].exclusive
    whole = run(call)
    for fewer in {exclusive & bits for bits in range(8)} - {exclusive}:
        divided = run(call, fewer)
        for name in (name for name in whole.gradients if name.startswith("captured")):
            torch.testing.assert_close(divided.gradients[name], whole.gradients[name], rtol=1e-12, atol=1e-10)
    single = Call(function, (200, 130), torch.float64, batch=1, seed=7)
    if function == "Square":  # one batch element: nobody else reads v[0]
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


def packed(tensors: list[Tensor], lengths: Sequence[int]) -> Tensor:
    """(1, H, rows, E) of the first rows of (B, H, L, E)."""
    return torch.cat([tensors[0][b, :, :n] for b, n in enumerate(lengths)], dim=1)[None]


@pytest.mark.parametrize("function", ["Bias", "Factor", "Square"])
def test_packed_sequences_have_numbers_and_maps_of_their_own(function: str, isa: str) -> None:
    """As calls of a batch in which each of them has its number."""
    lengths = [(5, 70), (90, 64), (1, 3), (33, 130)]
    for dtype in (torch.float32, torch.bfloat16):
        longest = (90, 130)
        whole = Call(function, longest, dtype, batch=4, block_size=(32, 48))
        arguments, tensors, block_map = whole.arguments(), whole.tensors(), whole.block_map()
        starts = [torch.tensor([0, *itertools.accumulate(n)]) for n in zip(*lengths, strict=True)]
        own = {
            "cu_seqlens_q": starts[0],
            "cu_seqlens_k": starts[1],
            "max_seqlen_q": longest[0],
            "max_seqlen_k": longest[1],
        }
        rows = [packed([tensors[i]], [n[min(i, 1)] for n in lengths]) for i in range(3)]
        grad = packed([cotangents(whole)[0]], [n[0] for n in lengths])
        out, row_max, row_sum, _ = ops.attention_forward(*rows, SCALE, **own, **arguments)
        given = (grad, *rows, out, row_max, row_sum, SCALE)
        grads = ops.attention_backward(*given, **own, **arguments)[:3]
        sizes = [tensor.numel() for tensor in arguments["captured"]]
        captured = ops.attention_captured_gradients(
            *given,
            captured_sizes=sizes,
            exclusive=FUNCTIONS[function].exclusive,
            **own,
            **arguments,
        )
        total = torch.zeros_like(captured)
        for b, (queries, keys) in enumerate(lengths):
            alone = [tensors[0][b : b + 1, :, :queries], *(x[b : b + 1, :, :keys] for x in tensors[1:])]
            # A batch in which the others have nothing but zeros.
            batch = [x.new_zeros(4, *x.shape[1:]).index_copy(0, torch.tensor([b]), x) for x in alone]
            upstream = torch.zeros(4, whole.heads, queries, whole.dims[1], dtype=dtype)
            upstream[b] = cotangents(whole)[0][b, :, :queries]
            results = ops.attention_forward(*batch, SCALE, **arguments)
            given = (upstream, *batch, *results[:3], SCALE)
            alone_grads = ops.attention_backward(*given, **arguments)[:3]
            first = [int(s[b]) for s in starts]
            assert torch.equal(out[0, :, first[0] : first[0] + queries], results[0][b])
            for i, (mine, theirs) in enumerate(zip(grads, alone_grads, strict=True)):
                at = first[min(i, 1)]
                assert torch.equal(mine[0, :, at : at + (queries, keys)[min(i, 1)]], theirs[b])
            total += ops.attention_captured_gradients(*given, captured_sizes=sizes, **arguments)
        assert block_map is not None
        torch.testing.assert_close(captured, total, rtol=1e-4, atol=1e-4)


def test_keys_in_pages(isa: str) -> None:
    """A cache in pages, as its keys one behind the other."""
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
    """Where it is asked for, a row is the same whatever comes with it."""
    for dtype in DTYPES:
        call = Call("Square", (40, 130), dtype, options={"batch_invariant": True})
        query, key, value = call.tensors()
        out = ops.attention_forward(query, key, value, SCALE, **call.arguments())[0]
        one = ops.attention_forward(query[:, :, :1], key, value, SCALE, **call.arguments())[0]
        assert torch.equal(out[:, :, :1], one)


def refusal(
    match: str, error: type[Exception] = ValueError, call: Call | None = None, **changed: Any
) -> None:
    call = Call("Bias", (5, 9)) if call is None else call
    arguments = {**call.arguments(), **changed}
    with pytest.raises(error, match=match):
        ops.attention_forward(*call.tensors(), SCALE, **arguments)


def test_refusals() -> None:
    refusal("has not been loaded", score_function="nobody")
    refusal("has not been loaded", score_function="a name of more than the 31 characters that there may be")
    refusal(
        "scores of 4 bytes",
        call=Call("Bias", (5, 9), torch.float64),
        score_function=load("Bias", torch.float32),
    )
    refusal(r"float32\[2\]\) and 1", captured=[])
    refusal(r"captured are \(float32\[1\]\)", captured=[torch.zeros(4)])
    refusal(r"captured are \(int64\[2\]\)", captured=[torch.zeros(4, 4, dtype=torch.int64)])
    refusal("and 0 numbers", captured_numbers=None)
    refusal("without score_function", score_function="")
    refusal("without score_function", score_function="", captured=None)
    blocks = torch.ones(1, 1, 2, 2, dtype=torch.uint8)
    refusal("without block_map", block_size=(4, 4))
    refusal("block_size must be given", block_map=blocks)
    refusal("two positive numbers", block_map=blocks, block_size=(0, 4))
    refusal("must be uint8", block_map=blocks.bool(), block_size=(4, 4))
    refusal("4 dimensions", block_map=blocks[0], block_size=(4, 4))
    refusal("1 or 2, 1 or 4", block_map=blocks.expand(3, 1, 2, 2), block_size=(4, 4))
    refusal("stride 1", block_map=torch.ones(1, 1, 2, 4, dtype=torch.uint8)[..., ::2], block_size=(4, 4))


def test_reading_beside_a_tensor_is_an_error(isa: str) -> None:
    short = Call("Bias", (5, 9))
    refusal("captured tensor", IndexError, captured=[short.captured()[0][:-2]])
    # But not where nobody sees the score.
    shown = torch.tensor([[2, 0]], dtype=torch.uint8).reshape(1, 1, 1, 2)
    arguments = {**short.arguments(), "captured": [short.captured()[0][:-2]]}
    ops.attention_forward(*short.tensors(), SCALE, block_map=shown, block_size=(8, 4), **arguments)


def test_refusals_of_gradients() -> None:
    call = Call("Square", (5, 9))
    out, row_max, row_sum, _ = ops.attention_forward(*call.tensors(), SCALE, **call.arguments())

    def gradients(sizes: list[int], **changed: Any) -> Tensor:
        return ops.attention_captured_gradients(
            out,
            *call.tensors(),
            out,
            row_max,
            row_sum,
            SCALE,
            captured_sizes=sizes,
            **{**call.arguments(), **changed},
        )

    assert gradients([9, 2]).shape == (11,)
    assert gradients([0, 0]).shape == (0,)
    for sizes, match in (([9], "2 numbers"), ([8, 2], "tensor 0 with 9 elements"), ([9, -1], "tensor 1")):
        with pytest.raises(ValueError, match=match):
            gradients(sizes)
    with pytest.raises(ValueError, match="exclusive"):
        gradients([9, 2], exclusive=8)


def test_libraries_that_are_none(tmp_path: Any) -> None:
    load_score_function = library.extension().load_score_function
    text = tmp_path / "text.so"
    text.write_text("no library")
    with pytest.raises(ValueError, match="cannot be loaded"):
        load_score_function("text", str(text))
    with pytest.raises(ValueError, match="has no table"):
        load_score_function("other", str(library.extension().__file__))
    for name in ("", "x" * 32):
        with pytest.raises(ValueError, match="1 to 31 characters"):
            load_score_function(name, str(text))
    # A known name is not looked at again.
    load_score_function(load("Bias", torch.float32), str(text))


def test_kernels_without_functions_refuse_them() -> None:
    call = Call("Bias", (5, 9))
    blocks = torch.ones(1, 1, 2, 2, dtype=torch.uint8)
    refusal("does not apply score_function", call=call, kernel_name="loops")
    refusal(
        "does not apply block_map",
        call=Call(None, (5, 9)),
        kernel_name="loops",
        block_map=blocks,
        block_size=(4, 4),
    )
