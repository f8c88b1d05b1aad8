"""Exports functions to ONNX and runs the graphs in ONNX Runtime, for tests."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

import onnxruntime
import torch
from torch import Tensor, nn


class Calls(nn.Module):
    """A module of functions of tensors: all results of all functions, in one graph.

    Results that ONNX Runtime cannot hand over as NumPy arrays are cast to float32.
    """

    def __init__(self, functions: Sequence[Callable[..., Any]]) -> None:
        super().__init__()
        self.functions = functions
        self.eval()

    def forward(self, inputs: list[list[Tensor]]) -> list[Tensor]:
        found: list[Tensor] = []
        for function, tensors in zip(self.functions, inputs, strict=True):
            results = function(*tensors)
            found += results if isinstance(results, (tuple, list)) else [results]
        return [result.float() if result.dtype == torch.bfloat16 else result for result in found]


def exported(module: nn.Module, inputs: Sequence[Any], **options: Any) -> torch.onnx.ONNXProgram:
    program = torch.onnx.export(module, tuple(inputs), dynamo=True, verbose=False, **options)
    assert program is not None
    return program


def run(program: torch.onnx.ONNXProgram, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The results of a graph, for inputs in the order of the exported function."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    text = program.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(text, options, ["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]
    given = dict(zip(names, (tensor.detach().numpy() for tensor in tensors), strict=True))
    return [torch.from_numpy(result) for result in session.run(None, given)]


def operators(program: torch.onnx.ONNXProgram) -> collections.Counter[str]:
    """How often each operator is in a graph."""
    return collections.Counter(node.op_type for node in program.model.graph)
