"""Attention calls as data, and the judge of their results.

A case makes its inputs, and runs them through the package, the exact formula and a peer.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import gpu
import torch
from tolerances import assert_accurate
from torch import Tensor

import selfattn_ext
from selfattn_ext import AuxRequest, reference

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
NAMES = {torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}

#: name -> (shape of the mask given B, H, L, S; dtype, None for that of the query).
MASKS = {
    "bool": (lambda b, h, q, k: (b, h, q, k), torch.bool),
    "bool keys": (lambda b, h, q, k: (b, 1, 1, k), torch.bool),
    "bool square": (lambda b, h, q, k: (q, k), torch.bool),
    "float": (lambda b, h, q, k: (b, h, q, k), None),
    "float heads": (lambda b, h, q, k: (h, q, k), None),
    "float square": (lambda b, h, q, k: (q, k), None),
    "float keys": (lambda b, h, q, k: (b, 1, 1, k), None),
    "float rows": (lambda b, h, q, k: (1, h, q, 1), None),
    "float32": (lambda b, h, q, k: (1, h, q, k), torch.float32),
    "bfloat16": (lambda b, h, q, k: (b, 1, q, k), torch.bfloat16),
}

#: Masks that only some tests need. There are float ones of every broadcast, named by the dimensions that they
#: have. Others hide whole tiles, whole rows, or half of the keys from all heads but the last, leave scores
#: whose exponential overflows float32, or have a dtype of their own.
MORE_MASKS = {
    "float " + ("".join(name for name, has in zip("bhqk", kept, strict=True) if has) or "number"): (
        lambda b, h, q, k, kept=kept: tuple(
            n if has else 1 for n, has in zip((b, h, q, k), kept, strict=True)
        ),
        None,
    )
    for kept in itertools.product((True, False), repeat=4)
} | {
    "bool tiles": (lambda b, h, q, k: (b, 1, q, k), torch.bool),
    "float tiles": (lambda b, h, q, k: (h, q, k), None),
    "bool heads": (lambda b, h, q, k: (h, 1, k), torch.bool),
    "low": (lambda b, h, q, k: (q, k), None),
    "float32 keys": (lambda b, h, q, k: (b, 1, 1, k), torch.float32),
    "bfloat16 square": (lambda b, h, q, k: (q, k), torch.bfloat16),
}

STATISTICS = AuxRequest(max_scores=True, entropy=True, mean_score=True, key_weights=True)

LAYOUTS = ("contiguous", "transposed", "expanded", "offset", "columns")


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """Returns the values in another memory layout; "expanded" repeats those of the first batch entry."""
    if layout == "contiguous":
        return tensor
    if layout == "transposed":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "expanded":
        return tensor[:1].expand(tensor.shape)
    if layout == "offset":
        padded = tensor.new_full((*tensor.shape[:-1], tensor.shape[-1] + 3), torch.nan)
        padded[..., 2 : 2 + tensor.shape[-1]] = tensor
        return padded[..., 2 : 2 + tensor.shape[-1]]
    assert layout == "columns"
    return tensor.transpose(2, 3).contiguous().transpose(2, 3)


@dataclass(frozen=True)
class Case:
    batch: int = 2
    heads: int = 2
    kv_heads: int = 2
    queries: int = 17
    keys: int = 33
    head_dim: int = 16
    value_dim: int = 16
    dtype: torch.dtype = torch.float32
    layout: str = "contiguous"
    grad_layout: str = "contiguous"  # of the gradient of out
    mask: str | None = None
    is_causal: bool = False
    query_offset: int = 0
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: int = 0  # 0: none, 1: slopes (H,), 2: slopes (B, H)
    sinks: int = 0  # 0: none, 1: a logit (H,) per head, 2: (B, H)
    dropout_p: float = 0.0
    weights: bool = False
    lse: bool = False
    statistics: bool = False  # all that return_aux has beside lse
    opposed: float = 0.0  # is added to the first elements of queries and subtracted from those of keys
    seed: int = 0
    device: str = gpu.DEVICE

    def __str__(self) -> str:
        shown = [NAMES[self.dtype]]
        for field, default in Case.__dataclass_fields__.items():
            value = getattr(self, field)
            if field not in ("dtype", "seed", "device") and value != default.default:
                shown.append(f"{field}={value}".replace(" ", ""))
        return "-".join(shown)

    def inputs(self) -> dict[str, Tensor]:
        """Draws query, key, value and the tensors among the options; the floating ones require grad."""
        generator = torch.Generator().manual_seed(1000 + self.seed)

        def normal(*shape: int, dtype: torch.dtype = self.dtype) -> Tensor:
            return drawn(shape, generator).to(self.device, dtype)

        b, h, hk, q, k = self.batch, self.heads, self.kv_heads, self.queries, self.keys
        query, key = normal(b, h, q, self.head_dim), normal(b, hk, k, self.head_dim)
        query[..., :1] += self.opposed
        key[..., :1] -= self.opposed
        tensors = {
            "query": laid_out(query, self.layout),
            "key": laid_out(key, self.layout),
            "value": laid_out(normal(b, hk, k, self.value_dim), self.layout),
        }
        if self.mask is not None:
            shape, dtype = (MASKS | MORE_MASKS)[self.mask]
            shape = shape(b, h, q, k)
            hidden = (torch.rand(shape, generator=generator, device="cpu") < 0.3).to(self.device)
            if self.mask.endswith("tiles"):
                hidden[..., : q // 3, k // 4 :] = True
                hidden[..., q // 2 :, : k // 2] = True
                hidden[..., q // 4 : q // 4 + 3, :] = True
            if self.mask == "bool heads":
                hidden[:-1, :, k // 2 :] = True
            if dtype == torch.bool:
                tensors["attn_mask"] = ~hidden
            else:
                mask = normal(*shape, dtype=dtype or self.dtype)
                mask = mask - 100 if self.mask == "low" else mask
                tensors["attn_mask"] = mask if min(shape) == 1 else mask.masked_fill(hidden, -torch.inf)
        if self.alibi:
            shape = (h,) if self.alibi == 1 else (b, h)
            tensors["alibi_slopes"] = torch.rand(shape, generator=generator, device="cpu").to(self.device)
        if self.sinks:
            tensors["sinks"] = normal(*((h,) if self.sinks == 1 else (b, h)), dtype=torch.float32)
        return {
            name: tensor.detach().requires_grad_(tensor.is_floating_point())
            for name, tensor in tensors.items()
        }

    def products(self) -> int:
        """Returns a forward's multiplications: those of the scores and of their weights with the values."""
        return self.batch * self.heads * self.queries * self.keys * (self.head_dim + self.value_dim)

    def numbers(self) -> dict[str, Any]:
        """Returns the options that are not tensors, without those at their default."""
        options = {
            "is_causal": self.is_causal,
            "query_offset": self.query_offset,
            "window_size": self.window,
            "softcap": self.softcap,
            "dropout_p": self.dropout_p,
        }
        defaults = {"window_size": (-1, -1)}
        return {name: value for name, value in options.items() if value != defaults.get(name, 0)}

    def run(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Computes the case with the package."""
        torch.manual_seed(self.seed)
        results = selfattn_ext.scaled_dot_product_attention(
            **tensors,
            **self.numbers(),
            enable_gqa=self.heads != self.kv_heads,
            return_weights=self.weights,
            return_lse=self.lse,
            return_aux=STATISTICS if self.statistics else None,
        )
        return self.named(results)

    def named(self, results: Any) -> dict[str, Tensor]:
        """Returns what a call of an attention function has returned, by its names."""
        names = ["out", *(["weights"] if self.weights else []), *(["lse"] if self.lse else [])]
        if not self.statistics:
            return dict(zip(names, results if len(names) > 1 else [results], strict=True))
        *results, aux = results
        return dict(zip(names, results, strict=True)) | statistics_of(aux)

    def run_with_gradients(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Computes the case and, for random cotangents, the gradients of all inputs."""
        results = self.run(tensors)
        return results | gradients(results, cotangents_of(results, self.seed), tensors)

    def as_function(self) -> tuple[Callable[..., tuple[Tensor, ...]], list[Tensor]]:
        """Returns what a comparison with finite differences takes: results as a function of the inputs, in
        order, and these inputs in float64.
        """
        tensors = self.inputs()

        def results(*points: Tensor) -> tuple[Tensor, ...]:
            # A row that sees nothing has lse -inf, whose differences would be NaN.
            return tuple(
                result.masked_fill(result == -torch.inf, 0.0)
                for result in self.run(dict(zip(tensors, points, strict=True))).values()
            )

        return results, list(exact_inputs(tensors).values())

    def formula(self, tensors: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
        """Computes the case with the reference."""
        if self.dropout_p:
            options["dropout_seed"] = dropout_seed(self.seed, self.device)
        result = reference.attention(**tensors, **self.numbers(), **options)._asdict()
        results = {
            name: result[name] for name in ("out", "weights", "lse") if name == "out" or getattr(self, name)
        }
        if self.statistics:
            numbers = {name: number for name, number in self.numbers().items() if name != "dropout_p"}
            without = {name: tensor for name, tensor in tensors.items() if name != "value"}
            of_dtype = {name: value for name, value in options.items() if name == "compute_dtype"}
            found = reference.score_statistics(**without, **numbers, **of_dtype)
            results |= statistics_of(found)
        return results

    def largest_term(self, tensors: dict[str, Tensor], grad_out: Tensor) -> float:
        """Returns the size of the terms whose difference is the gradient of a score.

        The gradient is weight * (of_dropped - mean): the gradient of the weight after dropout times 0 or
        1 / (1 - p), less its mean by the weights. Rounding errors of both are proportional to of_dropped.
        """
        terms = (grad_out.double() @ value_of_heads(tensors, self)).abs()
        kept_scale = 1 / (1 - self.dropout_p) if self.dropout_p < 1 else 0.0
        return float(terms.max()) * kept_scale if terms.numel() else 0.0


def statistics_of(found: Any) -> dict[str, Tensor]:
    """Returns those of an AuxOutput that STATISTICS asks for."""
    return {name: getattr(found, name) for name, asked in STATISTICS._asdict().items() if asked}


def drawn(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Draws normal numbers in float64 on the CPU, so that every device gets the same."""
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64, device="cpu")


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Draws normal numbers with a seed of their own, rounded to ``dtype``."""
    return drawn(shape, torch.Generator().manual_seed(seed)).to(dtype)


def random_state() -> Tensor:
    """Returns the state of the generator that draws tensors of the tested device."""
    return torch.get_rng_state() if gpu.DEVICE == "cpu" else torch.cuda.get_rng_state()


def set_random_state(state: Tensor) -> None:
    """Restores the state that :func:`random_state` has returned."""
    (torch.set_rng_state if gpu.DEVICE == "cpu" else torch.cuda.set_rng_state)(state)


def dropout_seed(manual_seed: int, device: str = gpu.DEVICE) -> Tensor:
    """Returns the seed that the package draws first after torch.manual_seed(manual_seed)."""
    torch.manual_seed(manual_seed)
    return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device)


def exact_inputs(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the same numbers in float64."""
    return {
        name: tensor.detach().double().requires_grad_() if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }


def gradients(
    results: dict[str, Tensor], cotangents: dict[str, Tensor], tensors: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Returns the gradient of every differentiable input, zero if the results do not depend on it."""
    results = {name: result for name, result in results.items() if name != "max_scores"}  # it has none
    wanted = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
    grads = torch.autograd.grad(
        list(results.values()),
        list(wanted.values()),
        [cotangents[name].to(result.dtype) for name, result in results.items()],
        allow_unused=True,
    )
    return {
        f"grad of {name}": torch.zeros_like(tensor) if grad is None else grad
        for (name, tensor), grad in zip(wanted.items(), grads, strict=True)
    }


def cotangents_of(results: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2000 + seed)
    return {name: drawn(result.shape, generator).to(result) for name, result in results.items()}


def value_of_heads(tensors: dict[str, Tensor], case: Case) -> Tensor:
    """Returns the values that each query head multiplies its weights with, (B, H, Ev, S)."""
    return tensors["value"].detach().repeat_interleave(case.heads // case.kv_heads, dim=1).mT


@contextmanager
def _one_thread() -> Iterator[None]:
    """Makes the judges use one thread, as small steps in several threads mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


Result = TypeVar("Result")


def _content(value: Any) -> Any:
    """Returns a hashable value that two arguments share if they are the same, tensors bit by bit."""
    if isinstance(value, Tensor):
        flat = value.detach().cpu().resolve_neg().contiguous().reshape(-1)
        digest = hashlib.blake2b(flat.view(torch.uint8).numpy()).digest()
        return value.device, value.dtype, value.shape, value.stride(), value.requires_grad, digest
    if isinstance(value, dict):
        return tuple((key, _content(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(_content, value))
    return value


def remembered(judge: Callable[..., Result]) -> Callable[..., Result]:
    """Returns a judge that remembers its answers: tests repeat a question for every kernel, and it takes
    longer than they do. It must not change its arguments, nor its callers what it returns.

    It remembers only the last questions, as one process asks for all kernels: see conftest.py.
    """
    answers: OrderedDict[Any, Result] = OrderedDict()

    @functools.wraps(judge)
    def ask(*arguments: Any, **options: Any) -> Result:
        # torch's own products depend on the precision.
        question = (_content(arguments), _content(options), torch.get_float32_matmul_precision())
        if question not in answers:
            answers[question] = judge(*arguments, **options)
            while len(answers) > 16:
                answers.popitem(last=False)
        return answers[question]

    return ask


def in_another_order(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns tensors with the same products of query and key, in float64 with terms in reverse order. So are
    their tangents and gradients, whose names end like theirs.
    """
    return {
        name: tensor.flip(-1) if tensor.dtype == torch.float64 and name.endswith(("query", "key")) else tensor
        for name, tensor in tensors.items()
    }


class Judge:
    """The results that a case should have: by the formula in float64, and by the formula with sums in the
    accumulation dtype, the best that can be expected of the case's dtype.

    In float64 the two would be the same, so there the second sums the head dim from its end. Their difference
    shows the rounding error of the judge itself, which is large if large scores cancel.
    """

    def __init__(
        self, case: Case, tensors: dict[str, Tensor], cotangents: dict[str, Tensor] | None = None
    ) -> None:
        """Judges the results for these tensors, and the gradients if the results have cotangents."""
        self.case = case
        self.terms = 1.0
        with _one_thread():
            exact_tensors = exact_inputs(tensors)
            self.exact, self.peer = case.formula(exact_tensors), case.formula(in_another_order(tensors))
            if cotangents is not None:
                self.exact |= gradients(self.exact, cotangents, exact_tensors)
                self.peer |= gradients(self.peer, cotangents, tensors)
                self.terms = case.largest_term(exact_tensors, cotangents["out"])
        self.exact, self.peer = (
            {name: result.detach() for name, result in results.items()} for results in (self.exact, self.peer)
        )

    def assert_accurate(self, results: dict[str, Tensor]) -> None:
        """Asserts that results and gradients are as accurate as the table of tolerances demands."""
        case = self.case
        for name, result in results.items():
            is_grad = name.startswith("grad")
            size = self.terms if is_grad else 1.0
            if name == "grad of alibi_slopes":
                size *= case.queries + case.keys + abs(case.query_offset)
            if name in ("grad of query", "grad of key"):
                size *= max(1.0, case.opposed)  # products with elements of that size cancel
            dtype = case.dtype if is_grad else None
            assert_accurate(name, result.detach(), self.exact[name], self.peer[name], size, dtype)


#: Returns the judge of a case, the same one for the same tensors and cotangents.
judge_of = remembered(Judge)


def check(case: Case) -> dict[str, Tensor]:
    """Asserts that results and gradients of a case are as accurate as the table of tolerances demands, and
    returns them.
    """
    tensors = case.inputs()
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    ours = case.run(tensors)
    cotangents = cotangents_of(ours, case.seed)
    cotangents["out"] = laid_out(cotangents["out"], case.grad_layout)
    ours |= gradients(ours, cotangents, tensors)
    judge_of(case, tensors, cotangents).assert_accurate(ours)
    for name, tensor in tensors.items():
        same = (tensor == before[name]) | (tensor.isnan() & before[name].isnan())
        assert bool(same.all()), f"{name} was changed"
    return ours
