"""OpenVINO: a model of one scaled_dot_product_attention, compiled for the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from peers.common import check_plain, load
from selfattn_ext.bench.cases import Case, Inputs
from selfattn_ext.bench.contenders import Contender, rules


def _prepare(case: Case, tensors: Inputs) -> Callable[[], Tensor]:
    check_plain(case)
    if case.kv_head_count != case.heads:
        raise NotImplementedError("fewer kv heads than heads are not compared")
    ov = load("openvino", "openvino")
    operators = load("openvino.opset13", "openvino")
    elements = {torch.float32: ov.Type.f32, torch.bfloat16: ov.Type.bf16}
    if case.dtype not in elements:
        raise NotImplementedError(f"it computes {case.dtype_name} in another type")
    is_causal, mask = rules(case, tensors)
    found = [tensors.query, tensors.key, tensors.value]
    if mask is not None:
        found.append(mask.detach())
    out = torch.empty(*case.shape[:3], case.value_dimension, dtype=case.dtype)
    elements[torch.bool] = ov.Type.boolean

    parameters = [operators.parameter(list(tensor.shape), elements[tensor.dtype]) for tensor in found]
    model = ov.Model(
        [operators.scaled_dot_product_attention(*parameters, causal=is_causal)], parameters, "attention"
    )
    settings = {
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "INFERENCE_PRECISION_HINT": elements[case.dtype],
        "PERFORMANCE_HINT": "LATENCY",
    }
    request = ov.Core().compile_model(model, "CPU", settings).create_infer_request()

    def shared(tensor: Tensor) -> Any:
        # numpy has no bfloat16, so the bits are passed as int16 and the type is named separately.
        bits = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
        if tensor.dtype == torch.bfloat16:
            return ov.Tensor(bits.numpy(), ov.Shape(list(tensor.shape)), ov.Type.bf16)
        return ov.Tensor(bits.numpy(), shared_memory=True)

    kept = [tensor.contiguous() for tensor in found]  # the request's tensors point into these
    for index, tensor in enumerate(kept):
        request.set_input_tensor(index, shared(tensor))
    request.set_output_tensor(0, shared(out))

    def call() -> Tensor:
        request.infer()
        assert kept
        return out

    return call


OPENVINO = Contender("openvino", _prepare)
