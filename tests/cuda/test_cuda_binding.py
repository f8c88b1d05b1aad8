"""CUDA tensors on their way to a kernel, on machines with and without a GPU.

The tests cover fake kernels, the operators' checks, errors, and what is reported about kernels.

If a build has CUDA kernels and there is no GPU, tensors that only claim to be on one reach the operators' own
checks, and fail where they need a device.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import selfattn_ext
from selfattn_ext import backends, ops
from selfattn_ext.arguments import checks, forced_kernel, refusals
from selfattn_ext.autograd import operator_calls
from selfattn_ext.build import library

BUILD = library.extension().build_info()
needs_kernels = pytest.mark.skipif(not BUILD["cuda"], reason="this build has no CUDA kernels")


def claimed(tensor: Tensor, device: str = "cuda:0") -> Tensor:
    """A tensor that says it is on a GPU, with the memory of a tensor on the CPU."""
    storage = torch._C._construct_storage_from_data_pointer(
        tensor.data_ptr(), torch.device(device), tensor.nbytes
    )
    metadata = {
        "size": tuple(tensor.shape),
        "stride": tensor.stride(),
        "dtype": tensor.dtype,
        "storage_offset": 0,
        "device": torch.device(device),
        "layout": torch.strided,
        "requires_grad": False,
    }
    return torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata(metadata, storage)  # type: ignore[attr-defined]


class TestFake:
    """Shapes, strides and devices under FakeTensorMode, which needs no GPU."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize(
        "options", [{}, {"dropout_p": 0.5, "softcap": 3.0, "return_weights": True}], ids=str
    )
    def test_results_are_on_the_device(self, dtype: torch.dtype, options: dict[str, Any]) -> None:
        with FakeTensorMode():
            query = torch.empty(2, 9, 4, 16, device="cuda", dtype=dtype).transpose(1, 2)
            key = torch.empty(2, 2, 7, 16, device="cuda", dtype=dtype)
            value = torch.empty(2, 2, 7, 24, device="cuda", dtype=dtype)
            results = selfattn_ext.scaled_dot_product_attention(
                query, key, value, enable_gqa=True, return_lse=True, **options
            )
            out, lse = results[0], results[-1]
            assert out.shape == (2, 4, 9, 24)
            assert out.transpose(1, 2).is_contiguous()
            assert lse.dtype == torch.float32
            assert {result.device for result in results} == {torch.device("cuda:0")}

    def test_autocast(self) -> None:
        # These settings are what torch.autocast sets, but torch.autocast itself refuses without a GPU.
        before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        try:
            with FakeTensorMode():
                query = torch.empty(1, 2, 4, 8, device="cuda")
                assert selfattn_ext.scaled_dot_product_attention(query, query, query).dtype == torch.bfloat16
        finally:
            torch.set_autocast_enabled("cuda", before[0])
            torch.set_autocast_dtype("cuda", before[1])
        with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16):
            query = torch.empty(1, 2, 4, 8, device="cuda")
            assert selfattn_ext.scaled_dot_product_attention(query, query, query).dtype == torch.float32

    def test_softmax_and_scores(self) -> None:
        with FakeTensorMode():
            query = torch.empty(2, 3, 5, 8, device="cuda")
            scores = selfattn_ext.attention_scores(query, query)
            assert (scores.shape, scores.device.type) == ((2, 3, 5, 5), "cuda")
            assert selfattn_ext.masked_softmax(scores, is_causal=True).device.type == "cuda"


class TestRegistration:
    @pytest.mark.parametrize("name", [name for name in ops.__all__ if name != "NAMESPACE"])
    def test_every_operator_answers(self, name: str) -> None:
        has = torch._C._dispatch_has_kernel_for_dispatch_key(f"{ops.NAMESPACE}::{name}", "CUDA")
        assert has == BUILD["cuda"]


def arguments_of_backward() -> dict[str, Tensor]:
    """Every tensor that attention_backward takes."""
    x, rows, heads = torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 4), torch.zeros(1, 2)
    seed = torch.zeros(1, dtype=torch.int64)
    everywhere = dict.fromkeys(("grad_out", "query", "key", "value", "out", "out_residual"), x)
    of_rows = dict.fromkeys(("row_max", "row_sum", "grad_row"), rows)
    square = dict.fromkeys(("grad_weights", "attn_mask"), torch.zeros(1, 2, 4, 4))
    return everywhere | of_rows | square | {"alibi_slopes": heads, "sinks": heads, "dropout_seed": seed}


#: Those of them that attention_forward takes, too.
OF_FORWARD = ("query", "key", "value", "attn_mask", "alibi_slopes", "sinks", "dropout_seed")


@needs_kernels
class TestChecks:
    """The checks in C++ are the same as for the CPU, except that tensors may be on different devices."""

    host = torch.zeros(1, 2, 4, 8)
    here, there = claimed(host) if BUILD["cuda"] else host, claimed(host, "cuda:1") if BUILD["cuda"] else host

    @pytest.mark.parametrize(
        ("operator", "name"),
        [
            *(("attention_forward", name) for name in OF_FORWARD),
            *(("attention_backward", name) for name in arguments_of_backward()),
        ],
    )
    def test_one_device(self, operator: str, name: str) -> None:
        given = arguments_of_backward()
        names = OF_FORWARD if operator == "attention_forward" else given
        tensors = {other: given[other] if other == name else claimed(given[other]) for other in names}
        message = "key is on cuda:0 and query on cpu" if name == "query" else f"{name} is on cpu"
        with pytest.raises(ValueError, match=message):
            getattr(ops, operator)(**tensors, scale=1.0, dropout_p=0.5)

    def test_one_device_for_the_other_operators(self) -> None:
        rows = claimed(torch.zeros(1, 2, 4))
        with pytest.raises(ValueError, match="key is on cuda:1 and query on cuda:0"):
            ops.attention_forward(self.here, self.there, self.here, 1.0)
        with pytest.raises(ValueError, match="row_sum is on cpu"):
            ops.attention_weights(self.here, self.here, rows, torch.zeros(1, 2, 4), 1.0)
        with pytest.raises(ValueError, match="key is on cuda:1"):
            ops.attention_scores(self.here, self.there, 1.0)
        with pytest.raises(ValueError, match="mask is on cpu"):
            ops.masked_softmax(self.here, 1.0, mask=self.host)
        with pytest.raises(ValueError, match="value is on cpu"):
            ops.basic_attention(self.here, self.here, self.host)
        with pytest.raises(ValueError, match="value is on cpu"):
            ops.attention_refusals(self.here, self.here, self.host, 1.0)

    def test_one_device_for_the_other_gradients(self) -> None:
        here, host = self.here, self.host
        with pytest.raises(ValueError, match="statistics is on cpu"):
            ops.basic_attention_backward(here, here, here, here, here, torch.zeros(2, 1, 2, 4))
        with pytest.raises(ValueError, match="grad_scores is on cpu"):
            ops.attention_scores_backward(torch.zeros(1, 2, 4, 4), here, here, 1.0)
        with pytest.raises(ValueError, match="grad_weights is on cpu"):
            ops.masked_softmax_backward(host, here, 1.0)

    def test_what_is_wrong_with_shapes_is_told_as_on_the_cpu(self) -> None:
        for tensor in (self.host, self.here):
            with pytest.raises(ValueError, match=r"scale must be a finite number, but it is inf"):
                ops.attention_forward(tensor, tensor, tensor, float("inf"))

    def test_public_functions_name_the_argument(self) -> None:
        with pytest.raises(
            ValueError, match="value is on cpu and query on cuda:0: all tensors must be on one"
        ):
            selfattn_ext.scaled_dot_product_attention(self.here, self.here, self.host)
        with pytest.raises(ValueError, match="attn_mask is on cpu and query on cuda:0"):
            selfattn_ext.scaled_dot_product_attention(self.here, self.here, self.here, torch.zeros(4, 4))

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_without_a_gpu_torch_says_so(self) -> None:
        with pytest.raises(RuntimeError, match="NVIDIA driver"):
            selfattn_ext.scaled_dot_product_attention(self.here, self.here, self.here)

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_gradients_ask_the_gpu_for_memory(self) -> None:
        """All checks pass; then allocating the results fails."""
        call = {name: claimed(tensor) for name, tensor in arguments_of_backward().items()}
        x, square = call["query"], call["grad_weights"]
        with pytest.raises(MemoryError, match=r"not enough memory for grad_mask of shape \(1, 2, 4, 4\)"):
            ops.attention_backward(**call, scale=1.0, dropout_p=0.5, need_mask_grad=True)
        statistics = claimed(torch.zeros(2, 1, 2, 4))
        with pytest.raises(MemoryError, match="grad_query"):
            ops.basic_attention_backward(x, x, x, x, x, statistics)
        with pytest.raises(MemoryError, match="grad_query"):
            ops.attention_scores_backward(square, x, x, 1.0)
        with pytest.raises(MemoryError, match="grad_scores"):
            ops.masked_softmax_backward(x, x, 1.0)
        rows, seed = call["row_max"], call["dropout_seed"]
        with pytest.raises(RuntimeError, match="NVIDIA driver"):
            operator_calls.backward(
                (x, None, None),
                (x, x, x, None, None, None, seed),
                (x, rows, rows, None, None),
                1.0,
                {},
                need_mask_grad=False,
            )


class TestKernels:
    def test_table(self) -> None:
        kernels = backends.kernels("cuda")
        assert bool(kernels) == BUILD["cuda"]
        assert backends.kernels("meta") == []
        assert not {kernel.isa for kernel in backends.kernels()} & {"cuda"}
        for kernel in kernels:
            assert kernel.isa == "cuda"
            assert kernel.description
            if not torch.cuda.is_available():
                assert kernel.reason == "there is no GPU that torch can use"
        assert backends.available("cuda") == [kernel for kernel in kernels if kernel.available]

    @needs_kernels
    def test_capability_decides(self) -> None:
        tables = {number: library.extension().cuda_kernel_table(number) for number in (70, 75, 80, 90)}
        available = {
            number: [row["name"] for row in table if row["available"]] for number, table in tables.items()
        }
        everything = ["sm90", "sm80", "simt"]
        assert all([row["name"] for row in table] == everything for table in tables.values())
        for_hopper = "9.0" in BUILD["cuda_architectures"]
        assert available[70] == []
        assert available[75] == ["simt"]
        assert available[80] == everything[1:]
        assert available[90] == everything[not for_hopper :]
        assert tables[90][-1]["dtypes"] == ("float64", "float32", "bfloat16", "float16")
        assert all(("bfloat16" in row["dtypes"]) == row["available"] for row in tables[90])
        assert all(row["reason"] for row in tables[70])

    @needs_kernels
    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_asking_for_one_without_a_gpu(self) -> None:
        for kernel in backends.kernels("cuda"):
            with (
                pytest.raises(ValueError, match="cannot run here: there is no GPU"),
                backends.use(kernel.name),
            ):
                pass

    @pytest.mark.skipif(BUILD["cuda"], reason="this build has CUDA kernels")
    def test_asking_for_one_in_a_build_without(self) -> None:
        with pytest.raises(ValueError, match='it is "sm81"'), backends.use("sm81"):
            pass


class TestExplain:
    """Tests the Python half with a given answer of the operator."""

    @staticmethod
    def explained(
        monkeypatch: pytest.MonkeyPatch, answer: list[str], forced: str = "", **options: Any
    ) -> Any:
        asked: dict[str, Any] = {}

        def refusals(*tensors: Tensor, **keywords: Any) -> str:
            asked.update(keywords, tensors=tensors)
            return "\n".join(answer)

        rows = [
            backends.Kernel(name, "cuda", "", ("float32",), automatic=True, reason=None)
            for name in ("sm80", "simt")
        ]
        monkeypatch.setattr(ops, "attention_refusals", refusals)
        monkeypatch.setattr(backends, "kernels", lambda device="cpu": rows)
        monkeypatch.setattr(forced_kernel, "current", lambda: forced)
        monkeypatch.setattr(checks, "_has_kernels", lambda *arguments: None)
        with FakeTensorMode():
            x = torch.empty(2, 4, 8, device="cuda", dtype=torch.bfloat16)
            return backends.explain(x, x, x, **options), asked

    def test_best_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        explanation, asked = self.explained(monkeypatch, ["", ""], is_causal=True, window_size=(3, -1))
        assert (explanation.kernel, explanation.isa, explanation.device) == ("sm80", "cuda", "cuda:0")
        assert explanation.refused == {"simt/cuda": "sm80 is faster"}
        assert str(explanation).startswith("sm80/cuda on cuda:0, bfloat16\n")
        assert asked["tensors"][0].shape == (1, 2, 4, 8)
        assert (asked["is_causal"], asked["window_left"]) == (True, 3)

    def test_refusal_is_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        options = {"dropout_p": 0.5, "softcap": 2.0, "query_offset": 1}
        explanation, asked = self.explained(monkeypatch, ["its rows are too wide", ""], **options)
        assert explanation.kernel == "simt"
        assert explanation.refused == {"sm80/cuda": "its rows are too wide"}
        assert asked.items() >= options.items()
        assert asked["dropout_seed"].dtype == torch.int64

    def test_forced(self, monkeypatch: pytest.MonkeyPatch) -> None:
        explanation, _ = self.explained(monkeypatch, ["", ""], forced="simt")
        assert (explanation.kernel, explanation.refused) == ("simt", {"sm80/cuda": "simt is asked for"})
        with pytest.raises(
            ValueError, match='"sm80" is asked for and does not take this call: no tensor cores'
        ):
            self.explained(monkeypatch, ["no tensor cores", ""], forced="sm80")
        with pytest.raises(ValueError, match=r'"fused" .* none of the kernels for CUDA, "sm80", "simt"'):
            self.explained(monkeypatch, ["", ""], forced="fused")


class TestOutOfMemory:
    def test_on_the_cpu_it_is_what_it_was(self) -> None:
        error = MemoryError("not enough memory")
        assert refusals.out_of_memory(error, torch.zeros(1)) is error

    @pytest.mark.parametrize("refused", [RuntimeError("CUDA error: an illegal memory access"), None], ids=str)
    def test_on_cuda_it_is_torchs(self, refused: Exception | None, monkeypatch: pytest.MonkeyPatch) -> None:
        with FakeTensorMode():
            tensor = torch.empty(1, device="cuda")
        tried = []

        def empty(size: int, **options: Any) -> None:
            tried.append((size, options["device"]))
            if refused is not None:
                raise refused

        monkeypatch.setattr(torch, "empty", empty)
        error = refusals.out_of_memory(
            MemoryError("not enough memory for out of shape (9,) (36 bytes)"), tensor
        )
        assert tried == [(36, torch.device("cuda:0"))]
        if refused is not None:
            assert error is refused
        else:
            assert isinstance(error, torch.OutOfMemoryError)
            assert "CUDA out of memory: not enough memory for out" in str(error)

    @pytest.mark.parametrize(
        ("name", "call"),
        [
            ("basic_attention_backward", lambda x: selfattn_ext.scaled_dot_product_attention(x, x, x)),
            (
                "causal_attention_backward",
                lambda x: selfattn_ext.scaled_dot_product_attention(x, x, x, is_causal=True),
            ),
            (
                "masked_attention_backward",
                lambda x: selfattn_ext.scaled_dot_product_attention(x, x, x, torch.ones(4, 4)),
            ),
            ("direct_backward", lambda x: selfattn_ext.scaled_dot_product_attention(x, x, x, softcap=1.0)),
            ("attention_backward", lambda x: selfattn_ext.scaled_dot_product_attention(x, x, x, x @ x.mT)),
            ("attention_scores_backward", lambda x: selfattn_ext.attention_scores(x, x)),
            ("masked_softmax_backward", lambda x: selfattn_ext.masked_softmax(x)),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_in_gradients(self, name: str, call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        def fails(*arguments: Any, **options: Any) -> None:
            raise MemoryError("not enough memory for grad_query (36 bytes)")

        def of_torch(error: MemoryError, tensor: Tensor) -> Exception:
            return torch.OutOfMemoryError(f"{error} on {tensor.device}")

        out = call(torch.randn(1, 2, 4, 4, requires_grad=True))
        monkeypatch.setattr(ops, name, fails)
        monkeypatch.setattr(refusals, "out_of_memory", of_torch)
        with pytest.raises(torch.OutOfMemoryError, match=r"grad_query \(36 bytes\) on cpu"):
            out.sum().backward()
