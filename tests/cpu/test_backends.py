"""backends: the table of kernels, the choice, the ways to force one, and that it runs."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from pages import text_of

from selfattn_ext import attention_scores, backends, masked_softmax, scaled_dot_product_attention

X = torch.randn(1, 2, 8, 64).bfloat16()  # every kernel computes this itself


@pytest.mark.parametrize("page", ["choosing-kernels", "environment-variables", "cpu-kernels"])
def test_pages_name_every_instruction_set(page: str) -> None:
    text = text_of(f"docs/{page}.md")
    assert [kernel.isa for kernel in backends.kernels("cpu") if kernel.isa not in text] == []


def test_table() -> None:
    everything, here = backends.kernels(), backends.available()
    assert {kernel.name for kernel in everything} == {"fused", "loops"}
    assert [kernel for kernel in everything if kernel.available] == here
    assert "scalar" in backends.cpu_isas()
    assert {("fused", "scalar"), ("loops", "scalar")} <= {(kernel.name, kernel.isa) for kernel in here}
    for kernel in everything:
        assert kernel.description
        assert kernel.isa in str(kernel)
        assert (kernel.reason is None) == kernel.available
    assert here[0].automatic


def test_explain_names_the_best_kernel() -> None:
    explanation = backends.explain(X, X, X, is_causal=True)
    assert (explanation.kernel, explanation.isa) == ("fused", backends.cpu_isas()[0])
    assert explanation.device == "cpu"
    assert explanation.dtype == "bfloat16"
    assert len(explanation.refused) == len(backends.kernels()) - 1
    assert "asked for" in explanation.refused["loops/scalar"]
    text = str(explanation)
    assert text.startswith("fused/")
    assert all(reason in text for reason in explanation.refused.values())


def test_explain_tells_who_computes_what_a_kernel_hands_on() -> None:
    if "avx512_bf16" not in backends.cpu_isas():
        pytest.skip("this machine lacks AVX-512 BF16")
    with backends.use_cpu_isa("avx512_bf16"):
        for tensor, expected in (
            (X, "avx512_bf16"),
            (X.half(), "avx512"),
            (X.float(), "avx512"),
            (X[:, :, :4], "avx512_bf16"),
            (X[:, :, :4].half(), "avx512"),
            (X[..., :15], "avx512"),
            (X[:, :, :4, :15], "avx512"),
        ):
            explanation = backends.explain(tensor, tensor, tensor)
            assert explanation.isa == expected
            assert ("fused/avx512_bf16" in explanation.refused) == (expected != "avx512_bf16")
            assert "passes such calls on" in str(explanation) or expected == "avx512_bf16"
        assert backends.explain(X, X, X, scale=-1.0).isa == "avx512"
        assert backends.explain(X, X, X, alibi_slopes=torch.ones(2)).isa == "avx512"


def test_amx_decodes_every_dtype_itself() -> None:
    if "amx" not in backends.cpu_isas():
        pytest.skip("this machine lacks AMX")
    with backends.use_cpu_isa("amx"):
        for tensor in (X, X.half(), X.float(), X.double(), X[..., :15]):
            few = tensor[:, :, :4]
            assert backends.explain(few, few, few).isa == "amx"
        assert backends.explain(X[..., :15], X[..., :15], X[..., :15]).isa == "avx512"
        assert backends.explain(X.double(), X.double(), X.double()).isa == "avx512"


def test_forced_kernel_runs(kernel: str) -> None:
    name, _, isa = kernel.partition("-")
    explanation = backends.explain(X, X, X)
    assert explanation.kernel == name
    assert explanation.isa == (isa or "scalar")
    if isa:
        assert all(isa in reason or name != "fused" or reason for reason in explanation.refused.values())


def test_every_kernel_has_code_of_its_own() -> None:
    """Rounding tells kernels apart: two that give the same bits for all of these would be one kernel."""
    torch.manual_seed(0)
    points = [torch.randn(1, 4, 67, 64) for _ in range(3)]
    results = []
    for name, isa in [*(("fused", isa) for isa in backends.cpu_isas()), ("loops", "")]:
        result = []
        with backends.use(name), backends.use_cpu_isa(isa):
            # Some kernels differ only in what they do with bfloat16.
            for dtype in (torch.float32, torch.bfloat16):
                query, key, value = (point.to(dtype).requires_grad_() for point in points)
                scores = attention_scores(query, key)
                out = scaled_dot_product_attention(query, key, value)
                grads = torch.autograd.grad(out.sin().sum(), (query, key, value))
                result += [scores, masked_softmax(3 * scores), out, *grads]
        results.append(result)
    for index, result in enumerate(results):
        for other in results[:index]:
            for mine, theirs in zip(result, other, strict=True):
                if mine.dtype == torch.float32:
                    torch.testing.assert_close(mine, theirs)
                else:  # two roundings of the weights to bfloat16, relative to the largest of many terms
                    assert (mine - theirs).abs().max() <= 0.02 * theirs.abs().max()
            assert not all(torch.equal(*pair) for pair in zip(result, other, strict=True))


def test_use_is_undone() -> None:
    before = str(backends.explain(X, X, X))
    with backends.use("loops"):
        assert backends.explain(X, X, X).kernel == "loops"
        with backends.use(""):
            assert str(backends.explain(X, X, X)) == before
        assert backends.explain(X, X, X).kernel == "loops"
    with pytest.raises(ZeroDivisionError), backends.use("loops"), backends.use_cpu_isa("scalar"):
        1 / 0  # noqa: B018
    assert str(backends.explain(X, X, X)) == before


def test_use_is_of_one_thread() -> None:
    seen = []
    with backends.use("loops"):
        thread = threading.Thread(target=lambda: seen.append(backends.explain(X, X, X).kernel))
        thread.start()
        thread.join()
    assert seen == ["fused"]


def test_backward_takes_the_kernel_of_its_forward() -> None:
    tensors = [torch.randn(1, 2, 40, 16, requires_grad=True) for _ in range(3)]
    with backends.use("loops"):
        out = scaled_dot_product_attention(*tensors)
        inside = torch.autograd.grad(out.sin().sum(), tensors, retain_graph=True)
    outside = torch.autograd.grad(out.sin().sum(), tensors)
    assert all(torch.equal(*pair) for pair in zip(inside, outside, strict=True))
    fused = torch.autograd.grad(scaled_dot_product_attention(*tensors).sin().sum(), tensors)
    assert not all(torch.equal(*pair) for pair in zip(inside, fused, strict=True))


def test_the_loops_refuse_forward_mode_and_second_derivatives() -> None:
    refusal = (
        r'kernel "loops" \(scalar\) has no forward mode and no second derivatives; kernel "fused" has both'
    )
    x = torch.randn(1, 2, 5, 8)
    leaf = x.clone().requires_grad_()

    def attend(x: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(x, x, x)

    with backends.use("loops"):
        with pytest.raises(ValueError, match=refusal):
            torch.func.jvp(attend, (x,), (x,))
        (gradient,) = torch.autograd.grad(attend(leaf).sin().sum(), leaf, create_graph=True)
        with pytest.raises(ValueError, match=refusal):
            gradient.sin().sum().backward()
    torch.testing.assert_close(gradient, torch.autograd.grad(attend(leaf).sin().sum(), leaf)[0])


def test_environment(run_in_forks: Callable[..., list[str]]) -> None:
    script = (
        "os.environ[{!r}] = {!r}\n"
        "import selfattn_ext\n"
        "x = torch.ones(1, 1, 2, 2)\n"
        "explanation = selfattn_ext.backends.explain(x, x, x)\n"
        "print(explanation.kernel, explanation.isa, end='')\n"
    )
    settings = (("SELFATTN_CPU_ISA", "scalar"), ("SELFATTN_KERNEL", "loops"))
    printed = run_in_forks("import torch", [script.format(*setting) for setting in settings])
    assert printed == ["fused scalar", "loops scalar"]


def test_compiled_calls_take_the_forced_kernel() -> None:
    compiled = torch.compile(lambda x: scaled_dot_product_attention(x, x, x), backend="eager", fullgraph=True)
    x = torch.randn(1, 2, 40, 16)
    compiled(x)
    with backends.use("loops"):
        torch._dynamo.reset()
        assert torch.equal(compiled(x), scaled_dot_product_attention(x, x, x))
