"""varlen_attention compiled, exported, transformed by torch.func, and under autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import gpu
import pytest
import torch
import torch.nn.functional as F
from test_compile import graphs
from tolerances import assert_accurate
from torch import Tensor
from torch.export import Dim, export
from torch.func import grad, jvp, vjp, vmap
from torch.utils.flop_counter import FlopCounterMode
from varlen_cases import ARGUMENTS, HEADS, KEY, MASKS, OFFSETS, QUERY, ROWS, VALUE, WIDTH, index, starts

import selfattn_ext
from selfattn_ext import ops, varlen_attention

pytestmark = pytest.mark.usefixtures("one_thread")


def both(options: dict[str, Any]) -> Callable[..., Any]:
    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out, lse = varlen_attention(query, key, value, OFFSETS, OFFSETS, 7, 7, return_lse=True, **options)
        return out.sin().sum() + lse.nan_to_num(neginf=0.0).sin().sum()

    return call


TRANSFORMED = {"plain": {}, "dropout": {"dropout_p": 0.3}, "rules": {"is_causal": True, "softcap": 2.0}}


@pytest.mark.parametrize("name", list(TRANSFORMED))
def test_transforms(name: str) -> None:
    tensors = [tensor.double() for tensor in (QUERY, KEY, VALUE)]
    function = both(TRANSFORMED[name])

    def seeded(*given: Tensor) -> Tensor:
        torch.manual_seed(4)
        return function(*given)

    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    expected = torch.autograd.grad(seeded(*leaves), leaves)
    torch.testing.assert_close(grad(seeded, argnums=(0, 1, 2))(*tensors), expected)
    _, pull = vjp(seeded, *tensors)
    torch.testing.assert_close(pull(torch.ones((), dtype=torch.float64)), expected)
    directions = [torch.randn_like(tensor) for tensor in tensors]
    _, slope = jvp(seeded, tuple(tensors), tuple(directions))
    along = sum((g * d).sum() for g, d in zip(expected, directions, strict=True))
    torch.testing.assert_close(slope, along)


def test_offsets_may_be_arguments_of_a_transformed_function() -> None:
    def loss(query: Tensor, offsets: Tensor) -> Tensor:
        return varlen_attention(query, KEY, VALUE, offsets, offsets, 7, 7).square().sum()

    leaf = QUERY.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf, OFFSETS), leaf)
    torch.testing.assert_close(grad(loss)(QUERY, OFFSETS), expected)
    queries = torch.stack([QUERY, 2 * QUERY])
    torch.testing.assert_close(vmap(grad(loss), in_dims=(0, None))(queries, OFFSETS)[0], expected)
    with pytest.raises(ValueError, match=r"cu_seqlens_q.*vmap"):
        vmap(loss, in_dims=(None, 0))(QUERY, torch.stack([OFFSETS, OFFSETS]))


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_vmap(dropout_p: float) -> None:
    """Each slice gets the results that it gets alone, and so do gradients of shared tensors."""
    queries, masks = torch.randn(3, ROWS, HEADS, WIDTH), torch.randn(HEADS, 7, 7, 3)

    def call(query: Tensor, mask: Tensor, value: Tensor = VALUE) -> Tensor:
        torch.manual_seed(2)
        return varlen_attention(
            query, KEY, value, OFFSETS, OFFSETS, 7, 7, mask, dropout_p=dropout_p, is_causal=True
        )

    outs = vmap(call, in_dims=(0, 3), randomness="same")(queries, masks)
    gradient = grad(lambda query, mask, value: call(query, mask, value).square().sum(), argnums=(0, 1, 2))
    found = vmap(gradient, in_dims=(0, 3, None), randomness="same")(queries, masks, VALUE)
    for i in range(3):
        assert torch.equal(outs[i], call(queries[i], masks[..., i]))
        expected = gradient(queries[i], masks[..., i], VALUE)
        assert all(torch.equal(a[i], b) for a, b in zip(found, expected, strict=True))
    assert vmap(call, in_dims=(0, 3), randomness="same")(queries[:0], masks[..., :0]).shape == (
        0,
        *QUERY.shape,
    )


def test_two_graphs_serve_all_packings() -> None:
    def call(query: Tensor, offsets: Tensor, longest: int, positions: Tensor) -> Tensor:
        return varlen_attention(
            query, query, query, offsets, offsets, longest, longest, is_causal=True, query_offset=positions
        )

    calls = []
    for count, lengths in enumerate(((3, 4), (5, 2, 9), (8, 1, 2, 3), (2,) * 11), 2):
        rows = torch.randn(sum(lengths) + count, HEADS, WIDTH)
        calls.append((rows, starts(lengths), max(lengths), torch.arange(len(lengths))))
    assert graphs(call, calls) <= 2


def test_a_graph_for_masks_of_all_lengths() -> None:
    def call(offsets: Tensor, rows: Tensor, longest: int, *masks: Tensor) -> Tensor:
        return varlen_attention(rows, rows, rows, offsets, offsets, longest, longest, masks)

    calls = []
    for lengths in ((2, 5), (3, 7), (9, 4), (6, 11)):
        masks = [torch.randn(HEADS, n, n) for n in lengths]
        calls.append((starts(lengths), torch.randn(sum(lengths), HEADS, WIDTH), max(lengths), *masks))
    assert graphs(call, calls) <= 2


def test_one_graph_with_gradients() -> None:
    """One tensor is query, key and value, and masks for each sequence are given, too."""
    masks = [torch.randn(2, 2), torch.randn(0, 0), torch.randn(7, 7)]

    def step(query: Tensor, key: Tensor, sinks: Tensor, mask: Tensor) -> Tensor:
        packing = (OFFSETS, OFFSETS, 7, 7)
        out = varlen_attention(query, query, query, *packing, [*masks[:2], mask], sinks=sinks)
        out, weights, lse = varlen_attention(
            out, key, key, *packing, dropout_p=0.3, return_weights=True, return_lse=True
        )
        return out.sin().sum() + weights.square().sum() + lse.nan_to_num(neginf=0.0).sum()

    leaves = [t.clone().requires_grad_() for t in (QUERY, KEY, torch.randn(HEADS), masks[2])]
    torch._dynamo.reset()
    outcomes = []
    for function in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        torch.manual_seed(3)
        total = function(*leaves)
        outcomes.append([total.detach(), *torch.autograd.grad(total, leaves)])
    torch.testing.assert_close(*outcomes)


class _Attends(torch.nn.Module):
    def forward(self, query: Tensor, offsets: Tensor, longest: Tensor) -> Tensor:
        return varlen_attention(query, query, query, offsets, offsets, longest.size(0), longest.size(0))


def test_export() -> None:
    rows, sequences, longest = (
        Dim("rows", min=2, max=999),
        Dim("sequences", min=2, max=99),
        Dim("longest", min=2),
    )
    given = (QUERY, OFFSETS.long(), torch.empty(7))
    program = export(_Attends(), given, dynamic_shapes=({0: rows}, {0: sequences}, {0: longest}))
    for lengths in ((2, 0, 7), (4, 1, 30, 2, 5)):
        query = torch.randn(sum(lengths), HEADS, WIDTH, requires_grad=True)
        arguments = (query, starts(lengths), torch.empty(max(lengths)))
        outs = [function(*arguments) for function in (program.module(), _Attends())]
        torch.testing.assert_close(*outs)
        gradients = [torch.autograd.grad(out.square().sum(), query)[0] for out in outs]
        torch.testing.assert_close(*gradients)


def test_autocast() -> None:
    with torch.autocast(gpu.DEVICE, torch.bfloat16):
        out, lse = varlen_attention(**ARGUMENTS, return_lse=True)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    low = {name: ARGUMENTS[name].bfloat16() for name in ("query", "key", "value")}
    assert torch.equal(out, varlen_attention(**{**ARGUMENTS, **low}))


class _Seen(Tensor):
    functions: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.functions.append(getattr(func, "__name__", str(func)))
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("name", ["query", "cu_seqlens_k", "alibi_slopes", "attn_mask", "query_offset"])
def test_overrides_see_one_call(name: str) -> None:
    more = {
        "alibi_slopes": torch.rand(HEADS),
        "attn_mask": [*MASKS[:2], MASKS[2].as_subclass(_Seen)],
        "query_offset": index(0, 1, 2),
    }
    given = ARGUMENTS[name] if name in ARGUMENTS else more[name]
    changed = {name: given if isinstance(given, list) else given.as_subclass(_Seen)}
    _Seen.functions.clear()
    result = varlen_attention(**{**ARGUMENTS, **changed})
    assert _Seen.functions == ["varlen_attention"]
    assert type(result) is _Seen


def operator_calls(dtype: torch.dtype) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    offsets = OFFSETS.long()
    query, key, value = (
        torch.randn(ROWS, heads, width).to(dtype).transpose(0, 1).unsqueeze(0)
        for heads, width in ((4, 8), (2, 8), (2, 3))
    )
    statistics = torch.float64 if dtype == torch.float64 else torch.float32
    packing = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": 7, "max_seqlen_k": 8}
    rich = {
        **packing,
        "query_offsets": index(0, 1, 2),
        "attn_mask": torch.randn(3, 1, 7, 8),
        "sinks": torch.randn(3, 4, dtype=statistics),
        "is_causal": True,
    }
    own = {**packing, "attn_mask": torch.randn(4 + 4 * 7 * 7), "mask_shapes": [1, 2, 2, 1, 0, 1, 4, 7, 7]}
    calls = []
    for keywords in (packing, rich, own):
        out, row_max, row_sum, residual = ops.attention_forward(
            query, key, value, 0.3, need_residual=True, **keywords
        )
        saved = (out, query, key, value, out, row_max, row_sum, 0.3)
        more = {"out_residual": residual} if dtype in ops.SIXTEEN_BITS else {}
        more |= {"grad_row": row_max.nan_to_num(), "grad_weights": torch.randn(3, 4, 7, 8).to(dtype)}
        calls += [
            (ops.attention_forward, (query, key, value, 0.3), {**keywords, "need_residual": True}),
            (ops.attention_weights, (query, key, row_max, row_sum, 0.3), keywords),
            (ops.attention_backward, saved, {**keywords, **more, "need_mask_grad": "attn_mask" in keywords}),
        ]
    return calls


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_opcheck(dtype: torch.dtype) -> None:
    tests = ("test_schema", "test_faketensor")
    for operator, args, kwargs in operator_calls(dtype):
        torch.library.opcheck(operator, args, kwargs, test_utils=tests)


def test_operations_are_those_of_the_sequences() -> None:
    tensors = [tensor.clone().requires_grad_() for tensor in (QUERY, KEY, VALUE)]
    with FlopCounterMode(display=False) as counter:
        varlen_attention(*tensors, OFFSETS, OFFSETS, 7, 7).sum().backward()
    pairs = 2 * 2 + 7 * 7
    assert counter.get_total_flops() == 2 * HEADS * WIDTH * pairs * (2 + 5)


def test_the_call_of_flash_attention() -> None:
    """The offset that the docstring names gives FlashAttention's lower-right causal rule."""
    offsets_k = starts((5, 3, 11))
    key = torch.randn(19, HEADS, WIDTH)
    out = varlen_attention(
        QUERY, key, key, OFFSETS, offsets_k, 7, 11, is_causal=True,
        query_offset=offsets_k.diff() - OFFSETS.diff(),
    )  # fmt: skip
    for first, last, begin, end in ((0, 2, 0, 5), (2, 9, 8, 19)):
        q, k = QUERY[first:last].transpose(0, 1), key[begin:end].transpose(0, 1)
        mask = torch.ones(last - first, end - begin, dtype=torch.bool).tril(end - begin - (last - first))
        exact = F.scaled_dot_product_attention(*(tensor.double() for tensor in (q, k, k)), mask)
        peer = F.scaled_dot_product_attention(q, k, k, mask)
        assert_accurate("out", out[first:last].transpose(0, 1), exact, peer)
    assert selfattn_ext.varlen_attention is varlen_attention
