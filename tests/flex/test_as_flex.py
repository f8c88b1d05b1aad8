"""torch's flex_attention on this package's kernels, eager: as_flex, activate and restore."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from functions import ALL, Functions, assert_same, gradients, mask_of, tensors
from test_flex_functions import judge
from tolerances import assert_accurate
from torch import Tensor
from torch.nn.attention import flex_attention as module
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

import selfattn_ext
from selfattn_ext.integrations import torch_flex

SIZES = (2, 3, 40, 45)


@contextmanager
def activated() -> Iterator[None]:
    torch_flex.activate()
    try:
        yield
    finally:
        torch_flex.restore()


SWITCHES = [pytest.param(activated, id="activated"), pytest.param(selfattn_ext.as_flex, id="as_flex")]

Switch = Callable[[], Any]


def is_ours() -> bool:
    """Says whether a gradient on the CPU is computed, which torch's own function refuses."""
    given = tensors(SIZES)
    try:
        module.flex_attention(*given).sum().backward()
    except NotImplementedError:
        return False
    return given[0].grad is not None


def everything_touched() -> dict[str, Any]:
    """Returns all objects that the switch replaces or might replace, to be compared by identity."""
    operator = torch.ops.higher_order.flex_attention
    seen: dict[str, Any] = {}
    for name in ("code", "defaults", "kwdefaults", "dict", "globals", "closure", "module"):
        seen[name] = id(getattr(flex_attention, f"__{name}__"))
    seen |= {f"torch.nn.attention.flex_attention.{name}": id(value) for name, value in vars(module).items()}
    for table in ("py_kernels", "python_key_table", "functorch_table"):
        entries = getattr(operator, table)
        seen |= {f"{table} {key}": id(value) for key, value in entries.items()}
    seen["keys"] = operator.non_fallthrough_keys.raw_repr()
    seen["mode"] = torch.overrides._get_current_function_mode_stack()
    return seen


@pytest.mark.parametrize("switch", SWITCHES)
def test_is_restored(switch: Switch) -> None:
    before = everything_touched()
    with switch():
        assert is_ours()
        assert everything_touched() != before
    assert everything_touched() == before
    assert not is_ours()


@pytest.mark.parametrize("switch", SWITCHES)
def test_is_restored_after_an_exception(switch: Switch) -> None:
    before = everything_touched()
    with pytest.raises(ValueError, match="four dimensions"), switch():
        flex_attention(*(tensor[0] for tensor in tensors(SIZES)))
    assert everything_touched() == before


def test_blocks_may_be_nested() -> None:
    before = everything_touched()
    block = selfattn_ext.as_flex()
    with block, block:
        with selfattn_ext.as_flex():
            assert is_ours()
        assert is_ours()
    assert everything_touched() == before
    with selfattn_ext.as_flex(), activated():
        torch_flex.activate()
        torch_flex.restore()
        torch_flex.restore()
        assert is_ours()
    assert everything_touched() == before
    torch_flex.restore()
    assert everything_touched() == before


def test_decorates_functions() -> None:
    assert selfattn_ext.as_flex()(is_ours)()
    assert not is_ours()


def test_holds_in_all_threads() -> None:
    seen: list[bool] = []
    with selfattn_ext.as_flex():
        thread = threading.Thread(target=lambda: seen.append(is_ours()))
        thread.start()
        thread.join()
    assert seen == [True]


def test_leaves_what_somebody_else_put_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def other() -> None: ...

    with monkeypatch.context() as patched:
        with selfattn_ext.as_flex():
            before = everything_touched()
            patched.setattr(flex_attention, "__code__", other.__code__)
        assert flex_attention.__code__ is other.__code__
        assert everything_touched() != before
    flex_attention.__code__ = torch_flex.switch.torchs.__code__


def test_has_torchs_signature() -> None:
    before = inspect.signature(flex_attention)
    with selfattn_ext.as_flex():
        now = inspect.signature(flex_attention)
    assert list(now.parameters) == list(before.parameters)
    defaults = [[each.default for each in signature.parameters.values()] for signature in (before, now)]
    assert defaults[0] == defaults[1]


def test_another_function_of_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "flex_attention", lambda query, extra: None)
    with pytest.raises(
        RuntimeError, match=r"with the arguments query, extra: call selfattn_ext\.flex_attention"
    ):
        torch_flex._torchs()


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("name", ["documents", "learned_alibi", "of_queries_and_keys", "conjunction"])
def test_trains(switch: Switch, name: str) -> None:
    functions: Functions = ALL[name](SIZES, torch.float64)
    mask = mask_of(functions, SIZES, 16)
    given = tensors(SIZES, torch.float64)
    with switch():
        out = flex_attention(*given, functions.score_mod, mask)
    judge(name, out, given, functions)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_agrees_with_torch(dtype: torch.dtype) -> None:
    given = [tensor.detach() for tensor in tensors(SIZES, dtype)]
    capped = ALL["softcap"](SIZES, dtype)
    mask = create_block_mask(lambda b, h, q, kv: q + 5 >= kv, *SIZES, device="cpu", BLOCK_SIZE=16)
    arguments = (*given, capped.score_mod, mask, 0.3)
    right = flex_attention(*(tensor.double() for tensor in given), *arguments[3:])
    peer = flex_attention(*arguments)
    with selfattn_ext.as_flex():
        result = flex_attention(*arguments)
    assert not torch.equal(result, peer) or dtype in (torch.bfloat16, torch.float16)
    assert_accurate("out", result, right, peer)


def test_gives_what_torch_gives_beside_the_output() -> None:
    given = tensors(SIZES)
    detached = [tensor.detach() for tensor in given]
    with selfattn_ext.as_flex():
        out, lse = flex_attention(*given, return_lse=True)
        again, aux = flex_attention(*given, return_aux=AuxRequest(lse=True, max_scores=True))
        only_largest = flex_attention(*given, return_aux=AuxRequest(max_scores=True))[1]
    right, right_aux = flex_attention(*detached, return_aux=AuxRequest(lse=True))
    assert torch.equal(out, again)
    assert torch.equal(lse, aux.lse)
    assert only_largest.lse is None
    assert_accurate("out", out.detach(), right.double())
    assert_accurate("lse", lse.detach(), right_aux.lse.double())
    scores = detached[0] @ detached[1].mT * 0.25
    for largest in (aux.max_scores, only_largest.max_scores):
        assert_accurate("largest", largest, scores.amax(-1).double())
    assert lse.requires_grad
    assert type(aux) is module.AuxOutput


def test_checkpointing_computes_gradients_of_captured_tensors() -> None:
    given, slopes = tensors(SIZES), torch.randn(3, requires_grad=True)
    leaves = [*given, slopes]

    def layer(*given: Tensor) -> Any:
        sizes = slopes.exp()
        return flex_attention(*given, lambda s, b, h, q, kv: s - sizes[h] * (q - kv).abs())

    with selfattn_ext.as_flex():
        right = gradients(layer(*given), leaves)
        out = torch.utils.checkpoint.checkpoint(layer, *given, use_reentrant=False)
        assert_same(gradients(out, leaves), right)


@pytest.mark.filterwarnings("error:selfattn_ext does not compile")
def test_functions_as_programs_write_them() -> None:
    """These index tensors one dimension at a time, partly by constants, and divide by captured integers."""
    given = [tensor.detach() for tensor in tensors(SIZES)]
    mask, widths = torch.randn(2, 1, 40, 45), torch.tensor([3, 4, 5])

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return s + mask[b][0][q][kv] - (q - kv) // widths[h]

    with selfattn_ext.as_flex():
        result = flex_attention(*given, score_mod)
    assert_accurate("out", result, flex_attention(*(tensor.double() for tensor in given), score_mod))


def test_out_has_the_querys_layout() -> None:
    """A program that transposes out back can view it without a copy."""
    query, key, value = torch.randn(3, 2, 40, 3, 16).transpose(2, 3)
    with selfattn_ext.as_flex():
        out = flex_attention(query, key, value)
    assert out.stride() == flex_attention(query, key, value).stride()
    out.transpose(1, 2).view(2, 40, 48)


class Subclass(Tensor):
    pass


def nested() -> list[Tensor]:
    parts = [torch.randn(2, 5, 8), torch.randn(2, 7, 8)]
    return [torch.nested.nested_tensor(parts, layout=torch.strided) for _ in range(3)]


def detached(*dtypes: torch.dtype) -> list[Tensor]:
    return [tensor.detach().to(dtype) for tensor, dtype in zip(tensors(SIZES), dtypes, strict=True)]


NOT_TAKEN: dict[str, Callable[[], list[Tensor]]] = {
    "another device": lambda: [tensor.to("meta") for tensor in detached(*[torch.float32] * 3)],
    "integers": lambda: detached(*[torch.int64] * 3),
    "unlike dtypes": lambda: detached(torch.float32, torch.float32, torch.float64),
    "nested": nested,
}


def outcome(given: list[Tensor]) -> Any:
    try:
        return flex_attention(*given).tolist()
    except Exception as refusal:
        return type(refusal), str(refusal)


@pytest.mark.parametrize("name", NOT_TAKEN)
def test_what_is_not_taken_stays_torchs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_flex, "flex_attention", None)
    given = NOT_TAKEN[name]()
    before = outcome(given)
    with selfattn_ext.as_flex():
        assert outcome(given) == before


def test_subclasses_stay_torchs() -> None:
    given = [tensor.detach().as_subclass(Subclass) for tensor in tensors(SIZES)]
    right = flex_attention(*given)
    with selfattn_ext.as_flex():
        assert torch.equal(flex_attention(*given), right)
        with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
            flex_attention(*(tensor.requires_grad_() for tensor in given))
