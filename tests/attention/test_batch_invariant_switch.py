"""The switch batch_invariant(): how it is set, for whom, and for how long."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from comparisons import assert_same
from prompts import LENGTH, Prompt, prompt
from torch import Tensor

import selfattn_ext
from selfattn_ext import batch_invariant, scaled_dot_product_attention
from selfattn_ext.arguments import batch_invariance
from selfattn_ext.build import library


@pytest.fixture(autouse=True)
def invariant() -> Iterator[None]:
    with batch_invariant():
        yield


def test_it_is_a_function_and_a_context() -> None:
    with batch_invariant(False):
        batch_invariant()
        assert batch_invariance.asked
        batch_invariant(False)
        assert not batch_invariance.asked
        with batch_invariant():
            assert batch_invariance.asked
            with batch_invariant(False):
                assert not batch_invariance.asked
            assert batch_invariance.asked
            with pytest.raises(KeyError), batch_invariant(False):
                raise KeyError
            assert batch_invariance.asked
        assert not batch_invariance.asked
        later = batch_invariant()
        batch_invariant(False)
        with later:
            assert batch_invariance.asked
        assert not batch_invariance.asked
    assert batch_invariance.asked  # the fixture has set it
    with pytest.raises(TypeError, match="enabled must be a bool, but it is a int"):
        batch_invariant(1)  # type: ignore[arg-type]
    assert batch_invariance.asked


def test_it_holds_for_all_threads() -> None:
    it = prompt(torch.float32)
    found: list[tuple[Tensor, ...]] = []
    thread = threading.Thread(target=lambda: found.append(it.attend(100, 101)))
    thread.start()
    thread.join()
    assert_same(found[0][0], it.attend(0, LENGTH)[0][:, :, 100:101], "in another thread")


@pytest.mark.cpu_only(reason="gradients of few queries are computed by other sums on the CPU alone")
def test_a_gradient_keeps_what_its_forward_had(isa: str) -> None:
    it = prompt(torch.float32)
    query = it.query.requires_grad_()

    def gradient(at_forward: bool, at_backward: bool) -> Tensor:
        with batch_invariant(at_forward):
            out = it.attend(100, 103)[0]
        with batch_invariant(at_backward):
            (grad,) = torch.autograd.grad(out.sum(), query)
        return grad

    for at_forward in (False, True):
        same = gradient(at_forward, at_forward)
        assert_same(gradient(at_forward, not at_forward), same, f"set {at_forward}, then the other way")


def test_a_compiled_graph_follows_it() -> None:
    it = prompt(torch.float32)

    @torch.compile(backend="eager", fullgraph=True)
    def attend(query: Tensor) -> Tensor:
        result: Tensor = scaled_dot_product_attention(query, it.key, it.value, enable_gqa=True)
        return result

    whole = {on: rows_of(attend, it, on) for on in (True, False, True)}
    eager = {
        on: rows_of(lambda q: scaled_dot_product_attention(q, it.key, it.value, enable_gqa=True), it, on)
        for on in (True, False)
    }
    for on, rows in whole.items():
        assert_same(rows, eager[on], f"compiled, {on}")


def rows_of(attend: Callable[[Tensor], Tensor], it: Prompt, on: bool) -> Tensor:
    """Computes a single row, which is decoded unless the setting is on."""
    with batch_invariant(on):
        return attend(it.query[:, :, 7:8])


@pytest.mark.parametrize(("value", "asked"), [("1", True), ("0", False), ("", False)])
def test_the_environment_sets_it(value: str, asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(batch_invariance.VARIABLE, value)
    assert batch_invariance.of_environment() is asked


def test_a_wrong_value_in_the_environment(run_python: Callable[..., str]) -> None:
    script = "try:\n    import selfattn_ext\nexcept ValueError as error:\n    print(error)"
    printed = run_python(script, SELFATTN_BATCH_INVARIANT="yes")
    assert 'SELFATTN_BATCH_INVARIANT must be "0" or "1", but it is "yes"' in printed


def test_every_kernel_declares_it() -> None:
    """A kernel that did not would refuse calls with the setting: Note [Declared options], core/options.h."""
    extension = library.extension()
    for row in [*extension.kernel_table(), *extension.cuda_kernel_table(90)]:
        assert "batch_invariant" in row["options"], row["name"]
    assert selfattn_ext.batch_invariant is batch_invariant
