"""torch's float32 matmul precision: every operator of a call is told it, and those of no other call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import gpu
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.func import grad, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from selfattn_ext import attention_weights, backends, ops, scaled_dot_product_attention
from selfattn_ext.arguments import precision

SETTINGS = ("highest", "high", "medium")


class Recorder(TorchDispatchMode):
    """Records the operators that ran, and each one's precision, None if it was left out."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str | None]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == ops.NAMESPACE:
            name = func.overloadpacket.__name__
            assert name in ops.__all__, "an operator of another name"
            # The basic operators, which take no options, stand for those that do.
            kind, _, step = name.partition("_attention")
            if kind in ("basic", "causal", "masked"):
                name = f"attention{step or '_forward'}"
            self.seen.append((name, (kwargs or {}).get("float32_precision")))
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def _restored_setting() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture(params=SETTINGS)
def setting(request: pytest.FixtureRequest) -> str:
    torch.set_float32_matmul_precision(request.param)
    return str(request.param)


def qkv(dtype: torch.dtype = torch.float32, needs_grad: bool = True) -> list[torch.Tensor]:
    return [torch.randn(2, 4, 5, 8, dtype=dtype, requires_grad=needs_grad) for _ in range(3)]


def passed(setting: str) -> str | None:
    return None if setting == "highest" else setting


@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"attn_mask": torch.zeros(5, 5)}, {"return_weights": True, "return_lse": True}],
    ids=str,
)
def test_forward_and_backward_are_told(setting: str, options: dict[str, Any]) -> None:
    with Recorder() as recorder:
        tensors = qkv()
        results = scaled_dot_product_attention(*tensors, **options)
        results = results if isinstance(results, tuple) else (results,)
        torch.autograd.grad(sum(result.sum() for result in results), tensors)
        with torch.no_grad():
            scaled_dot_product_attention(*tensors, **options)
    expected = ["attention_forward", *(["attention_weights"] if "return_weights" in options else [])]
    expected = [*expected, "attention_backward", *expected]
    assert recorder.seen == [(name, passed(setting)) for name in expected]


def test_other_shapes_and_functions_are_told(setting: str) -> None:
    query, key, value = qkv(needs_grad=False)
    with Recorder() as recorder:
        scaled_dot_product_attention(query[0, 0], key[0, 0], value[0, 0])
        scaled_dot_product_attention(query.mT.contiguous().mT, key, value)
        attention_weights(query, key)
    assert {precision for _, precision in recorder.seen} == {passed(setting)}
    # The operators refuse this layout, so the call was tried with it and then with a copy.
    assert len(recorder.seen) >= 4


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_other_dtypes_are_not(dtype: torch.dtype) -> None:
    torch.set_float32_matmul_precision("medium")
    tensors = qkv(dtype)
    with Recorder() as recorder:
        torch.autograd.grad(scaled_dot_product_attention(*tensors).sum(), tensors)
        out, weights = scaled_dot_product_attention(*tensors, return_weights=True)
        torch.autograd.grad(out.sum() + weights.sin().sum(), tensors)
    assert len(recorder.seen) >= 5
    assert {precision for _, precision in recorder.seen} == {None}


def test_autocast_leaves_nothing_to_say() -> None:
    torch.set_float32_matmul_precision("medium")
    with torch.autocast(gpu.DEVICE, torch.bfloat16), Recorder() as recorder:
        scaled_dot_product_attention(*qkv())
    assert recorder.seen == [("attention_forward", None)]


@pytest.mark.parametrize("options", [{}, {"attn_mask": torch.zeros(5, 5)}], ids=str)
def test_backward_takes_the_precision_of_its_forward(options: dict[str, Any]) -> None:
    tensors = qkv()
    torch.set_float32_matmul_precision("medium")
    out = scaled_dot_product_attention(*tensors, **options)
    torch.set_float32_matmul_precision("highest")
    other = scaled_dot_product_attention(*tensors, **options)
    torch.set_float32_matmul_precision("high")
    with Recorder() as recorder:
        torch.autograd.grad(out.sum(), tensors, retain_graph=True)
        torch.autograd.grad(other.sum(), tensors)
        torch.autograd.grad(out.sum(), tensors, create_graph=True)
    assert recorder.seen == [("attention_backward", asked) for asked in ("medium", None, "medium")]


def test_transforms_are_told(setting: str) -> None:
    tensors = qkv(needs_grad=False)
    with Recorder() as recorder:
        grad(lambda *tensors: scaled_dot_product_attention(*tensors).sum(), argnums=(0, 1, 2))(*tensors)
        vmap(scaled_dot_product_attention)(*tensors)
    names = ("attention_forward", "attention_backward", "attention_forward")
    assert recorder.seen == [(name, passed(setting)) for name in names]


@pytest.fixture
def compiled() -> Iterator[tuple[Callable[..., Any], list[str]]]:
    """Gives a compiled attention, and the list of the precisions of the graphs that have run."""
    runs: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        of_graphs = getattr(torch.ops, ops.NAMESPACE).attention_with_gradient.default
        (call,) = (node for node in graph.graph.nodes if node.target is of_graphs)

        def run(*inputs: Any) -> Any:
            runs.append(call.kwargs.get("float32_precision", "highest"))
            return graph(*inputs)

        return run

    torch._dynamo.reset()
    yield torch.compile(scaled_dot_product_attention, backend=backend, fullgraph=True), runs
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "order",
    [("highest", "high", "medium", "high", "highest"), ("medium", "high", "highest", "medium")],
    ids=str,
)
def test_compiled_calls_follow_the_setting(order: tuple[str, ...], compiled: Any) -> None:
    function, runs = compiled
    tensors = qkv(needs_grad=False)
    for asked in order:
        torch.set_float32_matmul_precision(asked)
        function(*tensors)
    assert runs == list(order)


def test_a_graph_without_a_guard_is_exact(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch._dynamo.source.CallFunctionNoArgsSource")
    function, runs = compiled
    torch.set_float32_matmul_precision("medium")
    function(*qkv(needs_grad=False))
    assert runs == ["highest"]


#: A statement that sets devices differently -> the precisions on the CPU and on CUDA afterwards.
APART = {
    "torch.set_float32_matmul_precision('high')": "high high",
    "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'": "medium highest",
    "torch.backends.mkldnn.matmul.fp32_precision = 'tf32'": "high highest",
    "torch.backends.mkldnn.matmul.fp32_precision = 'ieee'": "highest highest",
    "torch.backends.cuda.matmul.fp32_precision = 'tf32'": "highest high",
}


def test_devices_set_apart(run_in_forks: Callable[..., list[str]]) -> None:
    """torch.get_float32_matmul_precision raises in this case, but attention must not."""
    imports = (
        "import torch\n"
        "from selfattn_ext import scaled_dot_product_attention\n"
        "from selfattn_ext.arguments import precision"
    )
    script = (
        "\nx = torch.ones(1, 1, 2, 2)\n"
        "scaled_dot_product_attention(x, x, x)\n"
        "print(precision.current(), precision.current_on_cuda(), end='')\n"
    )
    assert run_in_forks(imports, [change + script for change in APART]) == list(APART.values())


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"dropout_p": 0.5}], ids=str)
def test_tensors_on_cuda_have_a_setting_of_their_own(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_all_devices() -> str:
        raise RuntimeError("devices are set differently")

    monkeypatch.setattr(precision, "_setting", of_all_devices)
    monkeypatch.setattr(precision, "current_on_cuda", lambda: "medium")
    with FakeTensorMode():
        for device, asked in (("cuda", "medium"), ("cpu", "highest")):
            x = torch.empty(1, 2, 3, 4, device=device)
            with Recorder() as recorder:
                scaled_dot_product_attention(x, x, x, **options)
            assert {precision for _, precision in recorder.seen} == {passed(asked)}


def test_explained(setting: str) -> None:
    tensors = qkv(needs_grad=False)
    explanation = backends.explain(*tensors)
    assert explanation.float32_precision == setting == precision.current()
    assert f"float32 ({setting})" in str(explanation)
    explanation = backends.explain(*(tensor.double() for tensor in tensors))
    assert explanation.float32_precision is None
    assert setting not in str(explanation).splitlines()[0]
