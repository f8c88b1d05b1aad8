"""The operators on CUDA tensors, from the dispatcher to kernels on the PTX machine.

    python -m ptx_machine.kernel_cases.engine_cases

judges every operator by the formula, as cases.check does, on the device as on the CPU, also for tensors
without elements; shapes, strides and dtypes must be the same on both. It prints how many calls the device has
had. tests/cuda/test_kernel_engine.py runs it. Memory of results and workspaces is NaN beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

from . import device_plugin  # noqa: F401  (before the package)

# isort: split
import torch
from cases import (
    DTYPES,
    Case,
    Judge,
    cotangents_of,
    dropout_seed,
    exact_inputs,
    gradients,
    laid_out,
    value_of_heads,
)
from tolerances import assert_accurate
from torch import Tensor

from selfattn_ext import arguments, ops, reference

from ..few_instances import fitted
from . import sequence_cases
from .engine_device import FEW, SCALE, Device, Host, Named, able, compare

#: batch, heads, kv_heads, queries, keys, head_dim, value_dim
SIZES = [
    (2, 4, 2, 33, 40, 16, 24),
    (1, 2, 2, 5, 0, 8, 8),
    (2, 2, 1, 0, 7, 8, 8),
    (0, 2, 2, 3, 4, 8, 8),
    (2, 2, 2, 9, 70, 8, 0),
    (1, 1, 1, 6, 7, 0, 8),
]
_ANY: dict[str, Any] = {"softcap": 3.0, "query_offset": 3, "dropout_p": 0.3, "weights": True, "lse": True}
#: No options; every option with values for each element of the batch; options that the batch shares.
OPTIONS: list[dict[str, Any]] = [
    {},
    {**_ANY, "mask": "float", "alibi": 2, "sinks": 2, "is_causal": True, "grad_layout": "columns"},
    {**_ANY, "mask": "float hk", "alibi": 1, "sinks": 1, "grad_layout": "transposed"},
]
#: "" leaves the choice to the package.
KERNELS = ("", "simt", "sm80")


class AttentionJudge(Judge):
    """Judges all results of the attention operators, some of which the package does not return to its
    callers.
    """

    def __init__(self, case: Case, tensors: Named, cotangents: Named) -> None:
        super().__init__(replace(case, weights=True, lse=True), tensors, cotangents)

    def assert_accurate(self, results: Named) -> None:
        results = dict(results)
        # No caller may rely on the value of row_max alone, so the two are judged as lse.
        results["lse"] = results.pop("row_max") + results.pop("row_sum").log()
        results.pop("out_residual")  # judge_residual() judges this
        for name in [name for name in results if name not in self.exact]:
            assert results.pop(name).numel() == 0, f"{name}, which nobody has asked for"
        super().assert_accurate(results)


def judge_residual(case: Case, devices: list[Device]) -> None:
    """Judges out_residual, what rounding took away from out, by the sum of both. The sum has the errors of
    16-bit weights, which are far below those of out where values have a mean.
    """
    given: dict[str, Any] = {name: tensor.detach() for name, tensor in case.inputs().items()}
    given["value"] += 4.0
    scale = reference.default_scale(case.head_dim)
    exact = replace(case, weights=True).formula(exact_inputs(given))
    rounded = exact["weights"].to(case.dtype).double()
    peer = (rounded / rounded.sum(-1, keepdim=True)) @ value_of_heads(given, case).mT.double()
    rounded_peer = peer.to(case.dtype)
    peer = rounded_peer.double() + (peer - rounded_peer.double()).to(case.dtype).double()

    def judge(results: Named) -> None:
        whole = results["out"].double() + results["out_residual"].double()
        assert_accurate("out with out_residual", whole.float(), exact["out"].detach(), peer.detach())

    def forward(call: Host) -> Named:
        out, *_, residual = call("attention_forward", **given, scale=scale, need_residual=True)
        return {"out": out, "out_residual": residual}

    def plain_forward(call: Host) -> Named:
        options = {"attn_mask": None, "scale": None, "is_causal": False, "enable_gqa": True}
        out, _, residual = call("masked_attention_forward", **given, **options)
        return {"out": out, "out_residual": residual}

    compare(forward, judge, devices)
    compare(plain_forward, judge, devices[:1])


def judge_attention(case: Case, devices: list[Device]) -> None:
    """Judges the operators of attention; each takes results of the one before it."""
    accumulation = reference.accumulation_dtype(case.dtype)
    tensors = {name: tensor.detach() for name, tensor in case.inputs().items()}
    tensors["value"] = tensors["value"].contiguous()  # query and key keep a layout with heads inside
    for name in tensors.keys() & {"alibi_slopes", "sinks"}:
        tensors[name] = tensors[name].reshape(-1, case.heads).to(accumulation)
    cotangents = cotangents_for(case)
    # The judge computes gradients only of tensors that require them.
    asked = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
    judge = AttentionJudge(case, asked, cotangents)
    # Note [Gradient of weights and lse] in selfattn_ext/autograd/attention_function.py.
    of_weights = (judge.exact["weights"].detach() * cotangents["weights"].double()).sum(-1)
    row_gradients = {
        "grad_row": (of_weights - cotangents["lse"].double()).to(accumulation),
        "grad_weights": cotangents["weights"],
    }
    given: dict[str, Any] = {**tensors, **case.numbers(), "scale": reference.default_scale(case.head_dim)}
    value = given.pop("value")
    if case.dropout_p:
        given["dropout_seed"] = dropout_seed(case.seed)
    rounds = case.dtype in ops.SIXTEEN_BITS

    def results_of(call: Host) -> Named:
        forward = call("attention_forward", value=value, **given, need_residual=rounds)
        results = dict(zip(("out", "row_max", "row_sum", "out_residual"), forward, strict=True))
        statistics = {name: results[name] for name in ("row_max", "row_sum")}
        (weights,) = call("attention_weights", **given, **statistics)
        grads = call(
            "attention_backward",
            value=value,
            **given,
            **statistics,
            grad_out=cotangents["out"],
            out=results["out"],
            out_residual=results["out_residual"] if rounds else None,
            need_mask_grad=case.mask is not None,
            **(row_gradients if case.weights else {}),
        )
        inputs = ("query", "key", "value", "attn_mask", "alibi_slopes", "sinks")
        of = {f"grad of {name}": grad for name, grad in zip(inputs, grads, strict=True)}
        return {**results, "weights": weights, **of}

    compare(results_of, judge.assert_accurate, devices)


def cotangents_for(case: Case) -> Named:
    """The gradients of out, weights and lse: either those of the sum of out alone, or random ones."""
    rows = (case.batch, case.heads, case.queries)
    shapes = {"out": (*rows, case.value_dim), "weights": (*rows, case.keys), "lse": rows}
    zeros = {name: torch.zeros(shape, dtype=case.dtype) for name, shape in shapes.items()}
    if not case.weights:
        return {**zeros, "out": torch.ones((), dtype=case.dtype).expand(shapes["out"])}
    cotangents = cotangents_of(zeros, case.seed)
    return {**cotangents, "out": laid_out(cotangents["out"], case.grad_layout)}


def judge_basic_attention(case: Case, device: Device) -> None:
    """Judges the operators for calls without options but the causal rule."""
    tensors = case.inputs()
    cotangents = cotangents_of(cotangents_for(case), case.seed)
    zeros = {name: torch.zeros_like(cotangents[name]) for name in ("weights", "lse")}
    judge = AttentionJudge(case, tensors, cotangents | zeros)
    given: dict[str, Any] = {name: tensor.detach() for name, tensor in tensors.items()}
    given |= {"attn_mask": None, "scale": None, "is_causal": case.is_causal}

    def results_of(call: Host) -> Named:
        (alone,) = call("masked_attention", **given, enable_gqa=True)
        out, statistics, residual = call("masked_attention_forward", **given, enable_gqa=True)
        assert torch.equal(alone, out), "masked_attention"
        saved = {"out": out, "statistics": statistics, "out_residual": residual}
        grads = call("masked_attention_backward", grad_out=cotangents["out"], **given, **saved)
        results = {"out": out, "row_max": statistics[0], "row_sum": statistics[1]}
        results["out_residual"] = out.new_empty(0) if residual is None else residual
        return results | {f"grad of {name}": grad for name, grad in zip(tensors, grads, strict=True)}

    compare(results_of, judge.assert_accurate, [device])


def judge_formula(
    formula: Callable[..., Named], tensors: Named, results_of: Callable[[Host], Named], devices: list[Device]
) -> None:
    """Judges operators other than attention by the formula in float64 and in the tensors' dtype."""
    exact, peer = formula(**exact_inputs(tensors)), formula(**tensors)

    def judge(results: Named) -> None:
        for name, result in results.items():
            assert_accurate(name, result, exact[name].detach(), peer[name].detach())

    compare(results_of, judge, devices)


def judge_scores(case: Case, grad: Tensor, devices: list[Device]) -> None:
    """Judges attention_scores and its gradients."""
    tensors = {name: tensor for name, tensor in case.inputs().items() if name != "value"}
    given = {name: tensor.detach() for name, tensor in tensors.items()}

    def formula(query: Tensor, key: Tensor) -> Named:
        results = {"scores": reference.attention_scores(query, key, SCALE)}
        return results | gradients(results, {"scores": grad}, {"query": query, "key": key})

    def results_of(call: Host) -> Named:
        (scores,) = call("attention_scores", **given, scale=SCALE)
        grads = call("attention_scores_backward", **given, scale=SCALE, grad_scores=grad)
        return {"scores": scores, "grad of query": grads[0], "grad of key": grads[1]}

    judge_formula(formula, tensors, results_of, devices)


def judge_softmax(case: Case, scores: Tensor, devices: list[Device]) -> None:
    """Judges masked_softmax and its backward, which takes the weights."""
    mask = torch.randn(1, case.heads, 1, case.keys)
    weights = reference.masked_softmax(scores, mask, scale=SCALE, is_causal=True)
    grad = torch.randn(scores.shape).to(case.dtype).mT.contiguous().mT

    def formula(scores: Tensor, mask: Tensor, weights: Tensor, grad: Tensor) -> Named:
        wide = reference.accumulation_dtype(scores.dtype)
        w, g = weights.to(wide), grad.to(wide)
        of_scores = SCALE * w * (g - (w * g).sum(-1, keepdim=True))
        result = reference.masked_softmax(scores, mask, scale=SCALE, is_causal=True)
        return {"weights": result, "grad of scores": of_scores.to(scores.dtype)}

    def results_of(call: Host) -> Named:
        (result,) = call("masked_softmax", scores=scores, scale=SCALE, mask=mask, is_causal=True)
        (of_scores,) = call("masked_softmax_backward", grad_weights=grad, weights=weights, scale=SCALE)
        return {"weights": result, "grad of scores": of_scores}

    tensors = {"scores": scores, "mask": mask, "weights": weights, "grad": grad}
    judge_formula(formula, tensors, results_of, devices)


def judge_sequences(case: sequence_cases.SequenceCase, devices: list[Device]) -> None:
    """Judges the operators of attention on packed sequences and on caches."""
    with torch.enable_grad():
        given, judge = sequence_cases.given_by(case, case.inputs())
    numbers = sequence_cases.numbers_of_call(case)

    def results_of(call: Host) -> Named:
        return sequence_cases.operators(given, case, numbers, call)

    compare(results_of, lambda results: sequence_cases.assert_accurate(judge, results), devices)


def judge_own_masks(dtype: torch.dtype, mask_dtype: torch.dtype | None, devices: list[Device]) -> None:
    """Judges a mask for each sequence, in every broadcast, with every other option that differs between
    sequences.
    """
    lengths = torch.tensor([(0, 0), (5, 7), (0, 3), (33, 40), (1, 64), (2, 0), (70, 9)]).cumsum(0)
    shapes = [2, 5, 7, 1, 0, 3, 1, 33, 1, 2, 1, 64, 1, 1, 1, 1, 70, 9]
    batch, rows, keys = len(lengths) - 1, *lengths[-1].tolist()
    options: dict[str, Any] = {
        "cu_seqlens_q": lengths[:, 0].contiguous(),
        "cu_seqlens_k": lengths[:, 1].contiguous(),
        "max_seqlen_q": 70,
        "max_seqlen_k": 80,
        "query_offsets": torch.tensor([3, 0, 9, 60, 0, -5]),
        "mask_shapes": shapes,
        "is_causal": True,
        "dropout_p": 0.3,
    }
    wide, seed = reference.accumulation_dtype(dtype), torch.tensor([7])
    numbers = sum(math.prod(shapes[at : at + 3]) for at in range(0, len(shapes), 3))
    drawn = {
        "query": torch.randn(1, 2, rows, 16).to(dtype),
        "key": torch.randn(1, 1, keys, 16).to(dtype),
        "value": torch.randn(1, 1, keys, 24).to(dtype),
        "attn_mask": torch.randn(numbers).to(mask_dtype or dtype),
        "alibi_slopes": torch.rand(batch, 2, dtype=wide),
        "sinks": torch.randn(batch, 2, dtype=wide),
    }
    tensors = {name: tensor.requires_grad_() for name, tensor in drawn.items()}
    grad = torch.randn(1, 2, rows, 24).to(dtype)

    def formula(**tensors: Tensor) -> Named:
        query, key, value, mask, slopes, sinks = tensors.values()
        call = arguments.Tensors(query, key, value, mask, slopes, sinks, seed)
        result = arguments.formula(call, SCALE, options)
        results = {"out": result.out, "weights": result.weights, "lse": result.lse}
        return results | gradients({"out": result.out}, {"out": grad}, tensors)

    def results_of(call: Host) -> Named:
        given = {name: tensor.detach() for name, tensor in tensors.items()}
        value, common = given.pop("value"), {**options, "scale": SCALE, "dropout_seed": seed}
        rounds = dtype in ops.SIXTEEN_BITS
        forward = call("attention_forward", value=value, **given, **common, need_residual=rounds)
        saved = dict(zip(("row_max", "row_sum"), forward[1:3], strict=True))
        (weights,) = call("attention_weights", **given, **saved, **common)
        more = {"out_residual": forward[3]} if rounds else {}
        of = call(
            "attention_backward", value=value, **given, **saved, **common, **more,
            grad_out=grad, out=forward[0], need_mask_grad=True,
        )  # fmt: skip
        results = {"out": forward[0], "weights": weights, "lse": forward[1] + forward[2].log()}
        results |= {f"grad of {name}": one for name, one in zip(tensors, of, strict=True)}
        if dtype != torch.float64:  # these sums cancel nearly to zero
            del results["grad of alibi_slopes"], results["grad of sinks"]
        return results

    with torch.enable_grad():
        judge_formula(formula, tensors, results_of, devices)


def judge_append(dims: tuple[int, int], dtype: torch.dtype, packed: bool, paged: bool, call: Host) -> None:
    """Judges append_to_cache and attention_with_cache: every new row is behind the earlier ones, nothing else
    has changed, and the result is attention over the updated caches.
    """
    heads, page, lengths, counts = 2, 5, (0, 4, 7), (2, 0, 5) if packed else (3, 3, 3)
    batch, capacity = len(lengths), 3 * page
    table = torch.randperm(batch * 3 + 2).to(torch.int32)[: batch * 3].reshape(batch, 3)
    starts = torch.tensor([0, 2, 2, 7])
    rows = (1, heads, 7 + 2) if packed else (batch, heads, counts[0])
    news = [laid_out(torch.randn(*rows, dim).to(dtype), "transposed") for dim in dims]
    held = (batch * 3 + 2, heads, page) if paged else (batch, heads, capacity)
    caches = [laid_out(torch.randn(*held, dim).to(dtype), "offset") for dim in dims]
    expected = [cache.clone() for cache in caches]
    for b, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        for n in range(count):
            from_row = (0, starts[b] + n) if packed else (b, n)
            at = length + n
            to_row = (table[b, at // page], at % page) if paged else (b, at)
            for cache, new in zip(expected, news, strict=True):
                cache[to_row[0], :, to_row[1]] = new[from_row[0], :, from_row[1]]

    def assert_appended(to: list[Tensor], name: str) -> None:
        assert all(torch.equal(one, other) for one, other in zip(to, expected, strict=True)), name

    into = dict(zip(("key_cache", "value_cache"), (cache.clone() for cache in caches), strict=True))
    given: dict[str, Any] = dict(zip(("key", "value"), news, strict=True))
    pages = {"block_table": table} if paged else {}
    packs = {"cu_seqlens": starts} if packed else {}
    call("append_to_cache", **into, **given, **pages, **packs, seqlens=torch.tensor(lengths))
    assert_appended(list(into.values()), "append_to_cache")

    into = dict(zip(into, (cache.clone() for cache in caches), strict=True))
    query = torch.randn(*rows[:1], 2 * heads, rows[2], dims[0]).to(dtype)
    after = torch.tensor([sum(pair) for pair in zip(lengths, counts, strict=True)])
    options: dict[str, Any] = {"seqlens_k": after, "is_causal": True, "scale": SCALE, **pages}
    options["query_offsets"] = torch.tensor(lengths)
    options |= {"cu_seqlens_q": starts, "max_seqlen_q": max(counts)} if packed else {}
    results = call("attention_with_cache", query=query, **into, **given, **options)
    assert_appended(list(into.values()), "attention_with_cache")
    key, value = expected
    again = call("attention_forward", query=query, key=key, value=value, **options)
    assert all(torch.equal(one, other) for one, other in zip(results, again[:3], strict=True))


def sized(case: Case) -> Any:
    """The case, or with few instances one that they can compute."""
    return fitted(case, "simt" if case.dtype == torch.float32 else "sm80") if FEW else case


def main() -> None:
    torch.manual_seed(0)
    devices = [Device(kernel) for kernel in KERNELS]
    dtypes = [torch.float32, torch.bfloat16] if FEW else DTYPES
    for size, dtype in product(SIZES, dtypes):
        of = able(devices, dtype)
        try:
            for number, options in enumerate(OPTIONS):
                judge_attention(sized(Case(*size, dtype, layout="transposed", seed=number, **options)), of)
            if "sm80" in [it.kernel for it in of]:  # the operator itself would choose it
                judge_basic_attention(sized(Case(*size, dtype, is_causal=True)), of[0])
            if dtype in ops.SIXTEEN_BITS:
                judge_residual(sized(Case(*size, dtype)), of)
            square = torch.randn(*size[:2], *size[3:5]).to(dtype)
            judge_scores(sized(Case(*size, dtype, layout="transposed")), square, of)
            judge_softmax(Case(*size, dtype), square, of)
        except (AssertionError, RuntimeError) as error:
            raise AssertionError(f"{dtype}, {size}: {error}") from error
    for case in sequence_cases.cases()[::5]:
        judge_sequences(sized(case), able(devices, case.dtype)[:2])
    exact = dtypes[:1] if FEW else dtypes
    for dtype, mask_dtype in product(exact, (None, torch.bfloat16)):
        judge_own_masks(dtype, mask_dtype, able(devices, dtype))
    for dtype, packed, paged, dims in product(exact, (False, True), (False, True), ((16, 24), (5, 3))):
        judge_append(dims, dtype, packed, paged, able(devices, dtype)[0])
    print(sum(device.calls for device in devices))


if __name__ == "__main__":
    main()
