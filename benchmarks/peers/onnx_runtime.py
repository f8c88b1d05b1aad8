"""ONNX Runtime: its MultiHeadAttention if that takes the case, else Attention of opset 23.

Inputs are in the operator's layout and the output is written into memory allocated before, so that only the
operator is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from peers.common import check_plain, load
from selfattn_ext.bench.cases import Case, Inputs
from selfattn_ext.bench.contenders import Contender, rules

# The types that the operators take, by numpy's names.
_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bool: "bool"}


def _prepare(case: Case, tensors: Inputs) -> Callable[[], Tensor]:
    check_plain(case)
    if case.dtype not in _NAMES:
        raise NotImplementedError(f"no {case.dtype_name} attention on CPU")
    is_causal, mask = rules(case, tensors)
    same_heads = case.kv_head_count == case.heads and case.value_dimension == case.head_dim
    if case.dtype == torch.float32 and mask is None and same_heads:
        return _multi_head_attention(case, tensors, is_causal)
    return _attention(case, tensors, is_causal, mask)


def _multi_head_attention(case: Case, tensors: Inputs, is_causal: bool) -> Callable[[], Tensor]:
    found = {
        name: tensor.transpose(1, 2).flatten(2).contiguous()
        for name, tensor in (("query", tensors.query), ("key", tensors.key), ("value", tensors.value))
    }
    attributes = {"num_heads": case.heads, "unidirectional": int(is_causal), "domain": "com.microsoft"}
    out = torch.empty_like(found["query"])
    run = _session("MultiHeadAttention", found, out, attributes)
    shown = out.view(case.batch, case.length, case.heads, case.head_dim).transpose(1, 2)

    def call() -> Tensor:
        run()
        return shown

    return call


def _attention(case: Case, tensors: Inputs, is_causal: bool, mask: Tensor | None) -> Callable[[], Tensor]:
    found = {"query": tensors.query, "key": tensors.key, "value": tensors.value}
    if mask is not None:
        found["mask"] = mask.detach().contiguous()
    out = torch.empty(*case.shape[:3], case.value_dimension, dtype=case.dtype)
    run = _session("Attention", found, out, {"is_causal": int(is_causal)})

    def call() -> Tensor:
        run()
        return out

    return call


def _session(
    operator: str, found: dict[str, Tensor], out: Tensor, attributes: dict[str, Any]
) -> Callable[[], None]:
    """Returns a call of an operator that reads ``found`` and writes ``out``, on torch's number of threads."""
    numpy = load("numpy", "numpy")
    helper = load("onnx.helper", "onnx")
    runtime = load("onnxruntime", "onnxruntime")

    def kind(tensor: Tensor) -> Any:
        return numpy.dtype(_NAMES[tensor.dtype])

    def described(name: str, tensor: Tensor) -> Any:
        element = helper.np_dtype_to_tensor_dtype(kind(tensor))
        return helper.make_tensor_value_info(name, element, tuple(tensor.shape))

    graph = helper.make_graph(
        [helper.make_node(operator, list(found), ["out"], **attributes)],
        "attention",
        [described(name, tensor) for name, tensor in found.items()],
        [described("out", out)],
    )
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=11)
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    session = runtime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    binding = session.io_binding()
    for name, tensor in found.items():
        binding.bind_input(name, "cpu", 0, kind(tensor), tuple(tensor.shape), tensor.data_ptr())
    binding.bind_output("out", "cpu", 0, kind(out), tuple(out.shape), out.data_ptr())
    kept = list(found.values())  # the session holds only their addresses

    def run() -> None:
        session.run_with_iobinding(binding)
        assert kept

    return run


ONNXRUNTIME = Contender("onnxruntime", _prepare)
