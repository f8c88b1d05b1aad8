"""The subcommand ``check``: every kernel of this machine against the formula, in both passes.

The judge is :mod:`selfattn_ext.reference` in float64. A result passes if its error, relative to the largest
true value, is at most twice the error that the same formula makes in the result's own dtype, plus a few
roundings; if it is infinite or NaN exactly where the formula is; and if one thread and several, or two runs
on a GPU, give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from selfattn_ext import (
    attention_scores,
    attention_with_kvcache,
    backends,
    masked_softmax,
    reference,
    scaled_dot_product_attention,
    varlen_attention,
)
from selfattn_ext.terminal import Progress, describe, table

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Added to twice the formula's error, as a different, equally good order of operations may cost this much. It
# is more for float64, because the truth itself has been computed in float64.
ROUNDING = {
    torch.float64: 64 * torch.finfo(torch.float64).eps,
    torch.float32: 8 * torch.finfo(torch.float32).eps,
    torch.bfloat16: 0.5 * torch.finfo(torch.bfloat16).eps,
    torch.float16: 0.5 * torch.finfo(torch.float16).eps,
}


@dataclass(frozen=True)
class Case:
    """One computation, by this package and by the formula.

    Both functions take the inputs as keyword arguments and return a tensor or a tuple of them; the inputs are
    float64 tensors, converted to the dtype under test, and all of them get gradients, unless the function has
    none.
    """

    name: str
    ours: Callable[..., Any]
    formula: Callable[..., Any]
    inputs: dict[str, Tensor]
    backward: bool = True


@dataclass
class Verdict:
    """The result for one kernel and dtype over all cases: the worst error and the error allowed there."""

    forward: tuple[float, float] = (0.0, math.inf)
    backward: tuple[float, float] = (0.0, math.inf)
    same_bits: bool = True
    failures: list[str] = field(default_factory=list)


def cases(seed: int) -> list[Case]:
    """Returns cases without options and with every option at least once, with sizes around tile edges."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def qkv(heads: int, kv_heads: int, length: int, keys: int, dim: int, value_dim: int) -> dict[str, Tensor]:
        return {
            "query": normal(2, heads, length, dim),
            "key": normal(2, kv_heads, keys, dim),
            "value": normal(2, kv_heads, keys, value_dim),
        }

    shown = torch.rand(37, 53, generator=generator) < 0.7
    shown[5] = False  # a query that sees nothing
    bias = normal(2, 1, 37, 53).masked_fill(torch.rand(37, 53, generator=generator) < 0.2, -math.inf)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)
    return [
        _attention("plain", qkv(2, 2, 64, 64, 64, 64)),
        _attention("causal", qkv(2, 2, 65, 65, 32, 32), is_causal=True),
        _attention("one query, grouped heads", qkv(4, 1, 1, 300, 40, 40)),
        _attention("causal, offset", qkv(2, 2, 33, 130, 17, 20), is_causal=True, query_offset=97),
        _attention("bool mask, grouped heads", qkv(4, 2, 37, 53, 24, 24), attn_mask=shown),
        _attention("float mask with gradient", {**qkv(2, 2, 37, 53, 16, 16), "attn_mask": bias}),
        _attention("window, softcap", qkv(2, 2, 70, 70, 16, 16), window_size=(9, 4), softcap=5.0),
        _attention("ALiBi, sinks", {**qkv(4, 4, 40, 40, 8, 8), "alibi_slopes": slopes, "sinks": normal(4)}),
        _attention(
            "weights, lse, all together",
            {**qkv(4, 1, 37, 53, 20, 12), "attn_mask": bias, "alibi_slopes": slopes, "sinks": normal(4)},
            want=("weights", "lse"),
            is_causal=True,
            query_offset=16,
            window_size=(40, -1),
            softcap=8.0,
            scale=0.3,
        ),
        Case(
            "masked_softmax",
            partial(masked_softmax, scale=0.5, is_causal=True, query_offset=3),
            partial(reference.masked_softmax, scale=0.5, is_causal=True, query_offset=3),
            {"scores": normal(2, 2, 37, 53), "mask": bias},
        ),
        Case(
            "attention_scores",
            attention_scores,
            reference.attention_scores,
            {"query": normal(2, 2, 37, 24), "key": normal(2, 2, 53, 24)},
        ),
        _packed(
            "packed sequences",
            {"query": normal(91, 4, 32), "key": normal(91, 2, 32), "value": normal(91, 2, 24)},
        ),
        _paged("cache in pages, one token", normal, 1),
        _paged("cache in pages, a prompt", normal, 33),
    ]


def _attention(name: str, inputs: dict[str, Tensor], want: Sequence[str] = (), **options: Any) -> Case:
    wanted = {f"return_{output}": True for output in want}
    grouped = inputs["query"].shape[1] != inputs["key"].shape[1]

    def formula(**tensors: Tensor) -> tuple[Tensor, ...]:
        keywords: dict[str, Any] = {**tensors, **options}
        result = reference.attention(**keywords)
        return (result.out, *(getattr(result, output) for output in want))

    def ours(**tensors: Tensor) -> Any:
        device = tensors["query"].device
        here = {
            key: value.to(device) if isinstance(value, Tensor) else value for key, value in options.items()
        }
        keywords: dict[str, Any] = {**tensors, **here, **wanted}
        return scaled_dot_product_attention(enable_gqa=grouped, **keywords)

    return Case(name, ours, formula, inputs)


def _packed(name: str, inputs: dict[str, Tensor]) -> Case:
    starts = torch.tensor([0, 65, 65, 66, 91])

    def call(function: Callable[..., Any], tensors: dict[str, Tensor], **options: Any) -> Any:
        here = starts.to(tensors["query"].device)
        return function(**tensors, cu_seqlens_q=here, cu_seqlens_k=here, max_seqlen_q=65, max_seqlen_k=65,
                        is_causal=True, **options)  # fmt: skip

    def ours(**tensors: Tensor) -> Any:
        return call(varlen_attention, tensors, enable_gqa=True)

    def formula(**tensors: Tensor) -> Tensor:
        return call(reference.varlen_attention, tensors).out

    return Case(name, ours, formula, inputs)


def _paged(name: str, normal: Callable[..., Tensor], new: int) -> Case:
    """Returns a case of two sequences, of 70 and 3 tokens before the new ones, in shuffled pages of 16."""
    lengths, table = torch.tensor([70, 3]), torch.tensor([[9, 0, 4, 7, 2, 8, 1], [5, 3, 6, 6, 6, 6, 6]])
    inputs = {
        "query": normal(2, 4, new, 40),
        "key_cache": normal(10, 2, 16, 40),
        "value_cache": normal(10, 2, 16, 40),
    }
    inputs |= {"key": normal(2, 2, new, 40), "value": normal(2, 2, new, 40)}

    def ours(**tensors: Tensor) -> Any:
        device = tensors["query"].device
        places = {"cache_seqlens": lengths.to(device), "block_table": table.to(device)}
        keywords: dict[str, Any] = {**tensors, **places}
        return attention_with_kvcache(**keywords, is_causal=True, layout="bhld")

    def formula(**tensors: Tensor) -> Tensor:
        outs = []
        for b, length in enumerate(lengths.tolist()):
            key, value = (
                torch.cat(
                    [
                        tensors[f"{part}_cache"][table[b]].transpose(0, 1).flatten(1, 2)[:, :length],
                        tensors[part][b],
                    ],
                    1,
                )
                for part in ("key", "value")
            )
            query = tensors["query"][b]
            outs.append(reference.attention(query, key, value, is_causal=True, query_offset=length).out)
        return torch.stack(outs)

    return Case(name, ours, formula, inputs, backward=False)


def run(seed: int = 0) -> int:
    """Checks everything and prints the table. Returns 0, or 1 if something failed."""
    kernels = [*backends.available(), *backends.available("cuda")]
    verdicts = {
        (kernel, dtype): Verdict() for kernel in kernels for dtype in DTYPES if _name(dtype) in kernel.dtypes
    }
    todo = cases(seed)
    threads = max(2, torch.get_num_threads())
    # The cases run on one thread, as they are too small for more; only the check of several threads has more.
    with Progress("checking", len(todo) * len(DTYPES)) as progress, _threads(1):
        for done, (case, dtype) in enumerate([(case, dtype) for case in todo for dtype in DTYPES]):
            judge = _Judge(case, dtype)
            for kernel in kernels:
                if (kernel, dtype) in verdicts:
                    _check(judge, kernel, threads, verdicts[kernel, dtype])
            progress.update(done + 1, case.name)
    return _print(verdicts, len(todo), threads)


class _Judge:
    """A case in one dtype: its inputs, the truth in float64, and the errors that are allowed."""

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        self.case = case
        self.inputs = {name: tensor.to(dtype) for name, tensor in case.inputs.items()}
        exact = {name: tensor.double() for name, tensor in self.inputs.items()}
        self._truth = _evaluate(case, case.formula, exact)
        plain = _evaluate(case, case.formula, self.inputs)
        self.allowed = tuple(2 * error + ROUNDING[dtype] for error in self.errors(plain))

    def errors(self, results: tuple[list[Tensor], list[Tensor]]) -> tuple[float, float]:
        """Returns the largest relative error of the outputs and of the gradients, 0 if there are none."""
        forward, backward = (
            max(map(relative_error, found, truth), default=0.0)
            for found, truth in zip(results, self._truth, strict=True)
        )
        return forward, backward


def _check(judge: _Judge, kernel: backends.Kernel, threads: int, verdict: Verdict) -> None:
    name = judge.case.name
    try:
        inputs = {name: tensor.to(_device(kernel)) for name, tensor in judge.inputs.items()}
        with _forced(kernel):
            results = _evaluate(judge.case, judge.case.ours, inputs)
            with _threads(threads):
                again = _evaluate(judge.case, judge.case.ours, inputs)
    except Exception as error:  # this command reports everything that goes wrong
        verdict.failures.append(f"{name}: {type(error).__name__}: {describe(error)}")
        return
    errors = judge.errors(results)
    verdict.forward = max(verdict.forward, (errors[0], judge.allowed[0]), key=_severity)
    verdict.backward = max(verdict.backward, (errors[1], judge.allowed[1]), key=_severity)
    for direction, found, allowed in zip(("forward", "backward"), errors, judge.allowed, strict=True):
        if not found <= allowed:
            verdict.failures.append(f"{name}: {direction} error {found:.1e}, allowed {allowed:.1e}")
    if not all(map(_same_bits, [*results[0], *results[1]], [*again[0], *again[1]])):
        verdict.same_bits = False
        runs = "two runs" if _device(kernel) == "cuda" else f"one thread and {threads} threads"
        verdict.failures.append(f"{name}: {runs} give different results")


def _device(kernel: backends.Kernel) -> str:
    return "cuda" if kernel.isa == "cuda" else "cpu"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _severity(pair: tuple[float, float]) -> float:
    error, allowed = pair
    return math.inf if math.isnan(error) else error / allowed


def _evaluate(
    case: Case, function: Callable[..., Any], inputs: dict[str, Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Returns, on the CPU, the outputs and all inputs' gradients for one fixed gradient of the outputs."""
    leaves = {name: tensor.detach().clone().requires_grad_(case.backward) for name, tensor in inputs.items()}
    outputs = function(**leaves)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    if not case.backward:
        return [output.cpu() for output in outputs], []
    generator = torch.Generator().manual_seed(1)
    gradients = [
        torch.randn(output.shape, generator=generator, dtype=torch.float64).to(
            next(iter(inputs.values())).dtype
        )
        for output in outputs
    ]
    grads = torch.autograd.grad(
        outputs, list(leaves.values()), [g.to(out) for g, out in zip(gradients, outputs, strict=True)]
    )
    return [output.detach().cpu() for output in outputs], [grad.cpu() for grad in grads]


@contextmanager
def _forced(kernel: backends.Kernel) -> Iterator[None]:
    """Makes all calls take this kernel, and checks that they do."""
    device = _device(kernel)
    isa = kernel.isa if kernel.automatic and device == "cpu" else ""
    with backends.use_cpu_isa(isa), backends.use(kernel.name):
        # A call of this size and dtype is never passed on to another kernel.
        probe = torch.zeros(1, 1, 8, 64, dtype=torch.bfloat16, device=device)
        chosen = backends.explain(probe, probe, probe)
        if (chosen.kernel, chosen.isa) != (kernel.name, kernel.isa):
            raise RuntimeError(
                f"{kernel.name}/{kernel.isa} is forced, but {chosen.kernel}/{chosen.isa} would run"
            )
        yield


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def relative_error(result: Tensor, truth: Tensor) -> float:
    """Returns the largest difference over the largest finite true value.

    It is inf if result and truth have Inf or NaN in different places.
    """
    result, truth = result.double(), truth.double()
    finite = truth.isfinite()
    if not torch.equal(result.isfinite(), finite) or not torch.equal(
        result[~finite].nan_to_num(), truth[~finite].nan_to_num()
    ):
        return math.inf
    if not finite.any():
        return 0.0
    difference = (result[finite] - truth[finite]).abs().max().item()
    return difference / max(truth[finite].abs().max().item(), 1e-300)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _print(verdicts: dict[tuple[backends.Kernel, torch.dtype], Verdict], count: int, threads: int) -> int:
    rows = [
        [
            f"{kernel.name}/{kernel.isa}",
            _name(dtype),
            *(f"{number:.1e}" for number in (*verdict.forward, *verdict.backward)),
            "yes" if verdict.same_bits else "NO",
            "FAILED" if verdict.failures else "ok",
        ]
        for (kernel, dtype), verdict in verdicts.items()
    ]
    header = [
        "kernel",
        "dtype",
        "forward",
        "allowed",
        "backward",
        "allowed",
        f"1 = {threads} threads",
        "result",
    ]
    print(table(header, rows, left=2))
    failures = [
        f"{kernel.name}/{kernel.isa} {_name(dtype)}: {failure}"
        for (kernel, dtype), verdict in verdicts.items()
        for failure in verdict.failures
    ]
    if failures:
        print("\nfailed:", *failures, sep="\n  ")
        return 1
    everything = [*backends.kernels(), *backends.kernels("cuda")]
    unavailable = [kernel for kernel in everything if not kernel.available]
    for kernel in unavailable:
        print(f"not on this machine: {kernel.name}/{kernel.isa}: {kernel.reason}")
    print(
        f"all good: {count} cases each; errors against the formula in float64, relative to the largest value"
    )
    return 0
