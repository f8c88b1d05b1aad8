"""Calls of operators on the device in the host's memory, and their comparison with those on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from . import device_plugin  # noqa: F401  (before the package)

# isort: split
import torch
from torch import Tensor

from selfattn_ext import ops
from selfattn_ext.build import library

_own = library.ops()
to_device, to_host = _own.to_device.default, _own.to_host.default

#: Whether the library has few instances of the kernels.
FEW = "--few" in sys.argv
SCALE = 0.3
#: Operators that take no kernel's name.
UNCHOSEN = ("append_to_cache", "masked_attention")

#: Results or arguments of operators, by name.
Named = dict[str, Tensor]


class Host:
    """Calls operators with tensors of the CPU."""

    def __call__(self, name: str, **arguments: Any) -> tuple[Tensor, ...]:
        results = getattr(ops, name)(**arguments)
        return (results,) if isinstance(results, Tensor) else tuple(results or ())


class Device(Host):
    """Calls operators with tensors of the device, on one kernel, and takes the results to the CPU."""

    def __init__(self, kernel: str) -> None:
        self.kernel = kernel
        self.calls = 0

    def __call__(self, name: str, **arguments: Any) -> tuple[Tensor, ...]:
        self.calls += 1
        taken = {key: to_device(it) if isinstance(it, Tensor) else it for key, it in arguments.items()}
        chosen = {"kernel_name": self.kernel} if self.kernel and name not in UNCHOSEN else {}
        results = super().__call__(name, **taken, **chosen)
        assert all(result is None or result.device.type == "cuda" for result in results), name
        return tuple(None if result is None else to_host(result) for result in results)


def compare(
    results_of: Callable[[Host], Named], judge: Callable[[Named], None], devices: list[Device]
) -> None:
    """Asserts that results are accurate on the CPU and on each device, and have the same layout."""
    expected = results_of(Host())
    judge(expected)
    for device in devices:
        found = results_of(device)
        assert found.keys() == expected.keys()
        for name, other in expected.items():
            one = found[name]
            layouts = [(it.shape, it.stride(), it.dtype) for it in (one, other)]
            assert layouts[0] == layouts[1], f"{name} on {device.kernel!r}: {layouts}"
        try:
            judge(found)
        except (AssertionError, RuntimeError) as error:
            raise AssertionError(f"on {device.kernel!r}: {error}") from error


def able(devices: list[Device], dtype: torch.dtype) -> list[Device]:
    """Those that take a dtype, of which few instances have float32 for simt and bfloat16 for tensor cores."""
    if FEW:
        return [it for it in devices if (it.kernel == "simt") == (dtype == torch.float32)]
    # The kernel for tensor cores takes no float64.
    return [it for it in devices if dtype != torch.float64 or it.kernel != "sm80"]
