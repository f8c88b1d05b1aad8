"""The numbers that score functions compute, without attention: many are compiled at once."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from selfattn_ext.build import sources
from selfattn_ext.flex import compiler
from selfattn_ext.flex.nodes import Node
from selfattn_ext.flex.operations import C_TYPES
from selfattn_ext.flex.ranges import Ranges, largest_places
from selfattn_ext.flex.statements import Body, Function
from selfattn_ext.flex.tracing import trace

_AT_ONCE = 50  # recorded functions per C++ function, because long ones compile slowest

_HEAD = """#include "core/score_function.h"
#include "core/score_function_math.h"
using namespace selfattn;
using namespace selfattn::score_function;
"""
_PART = """static void part{number}(const FunctionInputs* inputs, int64_t wanted, int32_t query, int32_t key,
                   double* real, int64_t* whole) {{
const int32_t batch = 0, head = 0;
const {kind} grad = 1;  // of a result
(void)query, (void)key, (void)grad;
{lines}
}}
"""
_MAIN = """extern "C" __attribute__((visibility("default")))
void compute(const FunctionInputs* inputs, int64_t wanted, int64_t first_query, int64_t queries,
             int64_t first_key, int64_t keys, double* real, int64_t* whole) {{
for (int64_t i = first_query; i < first_query + queries; ++i) {{
for (int64_t j = first_key; j < first_key + keys; ++j, ++real, ++whole) {{
switch (wanted / {at_once}) {{
{cases}
}}
}}
}}
}}
"""


class _Tensor(ctypes.Structure):
    _fields_ = [*((name, ctypes.c_void_p) for name in ("data", "size", "stride")), ("rank", ctypes.c_int64)]


class _Inputs(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("tensors", "numbers", "out_of_range")]


def number_of(function: Callable[..., Any]) -> tuple[Node, Sequence[Tensor], Sequence[Any]]:
    """Records a function of (q_idx, kv_idx): its result, the tensors it captures, its constants."""
    with torch.no_grad():
        traced = trace(
            lambda s, b, h, q, kv: function(q, kv), None, torch.float64, torch.device("cpu"), False
        )
    return traced.function.score, traced.tensors, traced.function.numbers


class Written:
    """Many functions of (q_idx, kv_idx), compiled for indices of queries and keys below ``sizes``."""

    def __init__(
        self,
        recorded: Sequence[tuple[Node, Sequence[Tensor], Sequence[Any]]],
        sizes: tuple[int, int],
        dtype: torch.dtype = torch.float64,
    ):
        self.nodes = [node for node, _, _ in recorded]
        tensors = list({id(tensor): tensor for _, given, _ in recorded for tensor in given}.values())
        numbers = [number for _, _, given in recorded for number in given]
        self.ranges = Ranges(largest_places((1, 1, *sizes)))
        function = Function(dtype, self.nodes[0], None, None, [], tensors, numbers, self.ranges)
        parts, cases = [], []
        for first in range(0, len(self.nodes), _AT_ONCE):
            body = Body(function, by_levels=False)
            lines = []
            for wanted, node in enumerate(self.nodes[first : first + _AT_ONCE], first):
                result = "*real" if node.dtype.is_floating_point else "*whole"
                lines.append(f"if (wanted == {wanted}) {result} = {body.use(node, 0)};")
            number = first // _AT_ONCE
            parts.append(
                _PART.format(number=number, kind=C_TYPES[dtype], lines="\n".join([*body.beginning(), *lines]))
            )
            call = (
                f"part{number}(inputs, wanted, static_cast<int32_t>(i), static_cast<int32_t>(j), real, whole)"
            )
            cases.append(f"case {number}: {call}; break;")
        self.source = "".join([_HEAD, *parts, _MAIN.format(at_once=_AT_ONCE, cases="\n".join(cases))])
        self._library = _compiled(self.source)
        self._alive: list[Any] = [tensors]
        self._inputs = self._keep(_Inputs())
        described = self._keep((_Tensor * max(len(tensors), 1))())
        for into, tensor in zip(described, tensors, strict=False):
            size, stride = (
                self._keep((ctypes.c_int64 * max(tensor.dim(), 1))(*numbers))
                for numbers in (tensor.shape, tensor.stride())
            )
            into.data, into.rank = tensor.data_ptr(), tensor.dim()
            into.size, into.stride = ctypes.addressof(size), ctypes.addressof(stride)
        values = self._keep(
            (ctypes.c_double * max(len(numbers), 1))(*(float(each.value) for each in numbers))
        )
        self._inputs.tensors, self._inputs.numbers = ctypes.addressof(described), ctypes.addressof(values)

    def _keep(self, made: Any) -> Any:
        self._alive.append(made)
        return made

    def compute(self, number: int, queries: range, keys: range = range(1)) -> Tensor:
        """Returns a function's results (queries, keys), in float64 or int64."""
        real = torch.zeros(len(queries), len(keys), dtype=torch.float64)
        whole = torch.zeros(len(queries), len(keys), dtype=torch.int64)
        places = (number, queries.start, len(queries), keys.start, len(keys))
        given = [ctypes.c_int64(each) for each in places]
        results = [ctypes.c_void_p(each.data_ptr()) for each in (real, whole)]
        self._library.compute(ctypes.byref(self._inputs), *given, *results)
        return real if self.nodes[number].dtype.is_floating_point else whole


def _compiled(source: str) -> ctypes.CDLL:
    """Compiles with the flags of score functions, except for optimisations."""
    flags = [flag for flag in compiler._flags() if flag != "-O3"]
    with tempfile.TemporaryDirectory() as folder:
        text, made = Path(folder, "written.cpp"), Path(folder, "written.so")
        text.write_text(source, encoding="utf-8")
        command = [*compiler._compiler(), *flags, f"-I{sources.root()}", str(text), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[:4000]
        return ctypes.CDLL(str(made))
