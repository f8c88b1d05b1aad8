"""Cases of score functions: in Python, as options of this package, and by flex_attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from selfattn_ext import flex_attention, scaled_dot_product_attention
from selfattn_ext.bench.cases import Case, Inputs
from selfattn_ext.bench.contenders import OURS, Call, Contender
from selfattn_ext.terminal import describe

Name = Literal["causal", "alibi", "softcap", "documents", "relative bias"]

DOCUMENTS = 16
SOFTCAP = 20.0


@dataclass(frozen=True)
class FunctionCase(Case):
    """Self-attention with a function of scores.

    The functions are causal, ALiBi, softcap, 16 documents of equal length that see only themselves, and a
    learned bias for each head and distance.
    """

    function: Name = "causal"

    @property
    def has_formula(self) -> bool:
        return False

    def options(self) -> str:
        return f"function={self.function} {super().options()}".strip()

    def pairs(self) -> int:
        if self.function == "documents":
            return self.batch * self.length * self.length // DOCUMENTS
        return super().pairs()

    def further(self) -> dict[str, Any]:
        return {"function": self.function}


@dataclass(frozen=True)
class _Function:
    """The arguments of flex_attention, and the options of this package that mean the same."""

    score_mod: Callable[..., Tensor] | None = None
    mask_mod: Callable[..., Tensor] | None = None
    options: dict[str, Any] | None = None  # None: no options mean the same


def _function(case: Case, tensors: Inputs) -> _Function:
    assert isinstance(case, FunctionCase)
    heads, device = case.heads, tensors.query.device
    if case.function == "causal":
        return _Function(mask_mod=lambda b, h, q, kv: q >= kv, options={"is_causal": True})
    if case.function == "alibi":
        slopes = torch.exp2(-torch.arange(1, heads + 1, device=device) * 8.0 / heads)
        return _Function(
            lambda score, b, h, q, kv: score - slopes[h] * (q - kv).abs(), options={"alibi_slopes": slopes}
        )
    if case.function == "softcap":
        return _Function(
            lambda score, b, h, q, kv: SOFTCAP * torch.tanh(score / SOFTCAP), options={"softcap": SOFTCAP}
        )
    if case.function == "documents":
        numbers = torch.arange(case.length, device=device) // -(-case.length // DOCUMENTS)
        return _Function(mask_mod=lambda b, h, q, kv: numbers[q] == numbers[kv])
    table = tensors.mask
    assert table is not None
    return _Function(lambda score, b, h, q, kv: score + table[h, q - kv + case.length - 1])


def _with_table(case: Case, tensors: Inputs) -> Inputs:
    """Puts the learned bias, if there is one, in the place of the mask, so that it gets a gradient, too."""
    assert isinstance(case, FunctionCase)
    if case.function != "relative bias":
        return tensors
    shape = case.heads, 2 * case.length - 1
    return replace(tensors, mask=torch.zeros(shape, device=tensors.query.device, requires_grad=case.backward))


def _block_mask(case: Case, function: _Function, tensors: Inputs) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    if function.mask_mod is None:
        return None
    device = tensors.query.device.type
    return create_block_mask(function.mask_mod, None, None, case.length, case.length, device=device)


def _prepare(case: Case, tensors: Inputs) -> Call:
    function = _function(case, tensors)
    mask = _block_mask(case, function, tensors)

    def call() -> Tensor:
        out = flex_attention(tensors.query, tensors.key, tensors.value, function.score_mod, mask)
        assert isinstance(out, Tensor)
        return out

    return call


def _prepare_options(case: Case, tensors: Inputs) -> Call:
    """Prepares the same call by options; for documents, the call without a mask."""
    function = _function(case, tensors)
    options = {} if case.options().startswith("function=documents") else function.options
    if options is None:
        raise NotImplementedError("no option means the same")

    def call() -> Tensor:
        return scaled_dot_product_attention(tensors.query, tensors.key, tensors.value, **options)

    return call


def _prepare_eager(case: Case, tensors: Inputs) -> Call:
    """Prepares what torch's flex_attention computes when it is not compiled: the function of all scores.

    Here it has gradients, which torch's function refuses on the CPU.
    """
    function = _function(case, tensors)
    places = [torch.arange(size, device=tensors.query.device) for size in (1, case.heads, *[case.length] * 2)]
    mapped: list[Callable[..., Tensor] | None] = []
    for given, scores in ((function.score_mod, (0,)), (function.mask_mod, ())):
        made: Any = given
        for place in reversed(range(4)) if given is not None else ():
            made = torch.vmap(made, in_dims=(*scores, *(0 if n == place else None for n in range(4))))
        mapped.append(made)
    score_mod, mask_mod = mapped

    def call() -> Tensor:
        query, key, value = tensors.query, tensors.key, tensors.value
        scores = (query @ key.mT).float() * case.head_dim**-0.5
        if score_mod is not None:
            scores = score_mod(scores, *places)
        if mask_mod is not None:
            scores = scores.masked_fill(~mask_mod(*places), -torch.inf)
        return scores.softmax(-1).to(query.dtype) @ value

    return call


def _prepare_compiled(case: Case, tensors: Inputs) -> Call:
    """Prepares torch's compiled flex_attention, which has no gradients on the CPU."""
    if case.backward:
        raise NotImplementedError("no backward pass on the CPU")
    from torch._inductor import config
    from torch.nn.attention.flex_attention import flex_attention as of_torch

    function = _function(case, tensors)
    mask = _block_mask(case, function, tensors)
    given = (tensors.query, tensors.key, tensors.value, function.score_mod, mask)
    # torch writes the number of threads into the compiled loops but does not compile again when it changes.
    torch._dynamo.reset()
    with config.patch({"cpp.threads": torch.get_num_threads()}):
        compiled: Any = torch.compile(of_torch, dynamic=False)
        try:
            with torch.no_grad():
                compiled(*given)
        except Exception as error:  # a compiler may raise anything
            raise NotImplementedError(f"does not compile: {describe(error)}") from error

    def call() -> Tensor:
        with torch.no_grad():
            return compiled(*given)  # type: ignore[no-any-return]

    return call


OPTIONS = Contender("options", _prepare_options, _with_table)
EAGER = Contender("eager flex", _prepare_eager, _with_table)
COMPILED = Contender("compiled flex", _prepare_compiled, _with_table)

CONTENDERS = (Contender(OURS.name, _prepare, _with_table), OPTIONS, EAGER, COMPILED)
