"""The subcommand ``info``: versions, CPU features, kernels, and which kernel is chosen here.

:func:`report` gathers all of it as plain data. ``info`` prints the data as text, ``info --json`` as JSON.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from selfattn_ext import backends
from selfattn_ext.build import cuda_build, library, sources
from selfattn_ext.terminal import describe

VARIABLES = (
    "SELFATTN_KERNEL",
    "SELFATTN_CPU_ISA",
    "SELFATTN_BATCH_INVARIANT",
    "SELFATTN_CUDA",
    "TORCH_CUDA_ARCH_LIST",
    "CUDA_HOME",
    "OMP_NUM_THREADS",
    "ATEN_CPU_CAPABILITY",
)
EXTRAS = ("numpy", "matplotlib", "seaborn", "transformers")


def facts() -> dict[str, Any]:
    """Returns versions and machine as plain data, for reports and for the head of benchmark results.

    Raises:
        ImportError: there is no compiled library and none can be made.
    """
    extension = library.extension()
    build = extension.build_info()
    features = dict(extension.cpu_features())
    architecture = features.pop("architecture")
    return {
        "selfattn_ext": sources.version(),
        "library": getattr(extension, "__file__", None),
        "build": dict(build),
        "torch": torch.__version__,
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch_cuda": torch.version.cuda,
        "cuda_device": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cuda_devices": cuda_devices(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "architecture": architecture,
        "cpu": cpu_name(),
        "logical_cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "features": {name: bool(present) for name, present in features.items()},
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def cuda_devices() -> list[str]:
    """Returns the name and compute capability of every GPU that torch can use."""
    if not torch.cuda.is_available():
        return []
    described = []
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        described.append(f"{torch.cuda.get_device_name(index)} (compute capability {major}.{minor})")
    return described


def cpu_name() -> str:
    """Returns the processor's name as the operating system gives it, or the architecture if it gives none.

    Linux on arm64 has numbers instead of a name: those of who designed the core, and of the core.
    """
    told: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, said = line.partition(":")
            told.setdefault(key.strip(), said.strip())
    if "model name" in told:
        return told["model name"]
    if "CPU part" in told:
        return f"{platform.machine()}, implementer {told.get('CPU implementer')}, part {told['CPU part']}"
    if sys.platform == "darwin":
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            asked = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
            return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    return platform.processor() or platform.machine()


def report() -> dict[str, Any]:
    """Returns everything that ``info`` tells, as plain data: :func:`facts`, and what concerns this process.

    docs/troubleshooting.md describes the keys, which stay the same from version to version.

    Raises:
        ImportError: there is no compiled library and none can be made.
    """
    nvcc = cuda_build.find_nvcc()
    return {
        **facts(),
        "package": str(Path(__file__).parent),
        "executable": sys.executable,
        "nvcc": None if nvcc is None else str(nvcc),
        "extras": {name: _version(name) for name in EXTRAS},
        "kernels": {
            device: [{**asdict(kernel), "available": kernel.available} for kernel in backends.kernels(device)]
            for device in ("cpu", "cuda")
        },
        **_choices(),
    }


def _choices() -> dict[str, Any]:
    """Returns which kernels calls on the CPU take, or why none can be chosen."""
    probe = torch.zeros(1, 1, 8, 64)
    rounded = probe.bfloat16()
    try:
        chosen = {
            "float32": asdict(backends.explain(probe, probe, probe)),
            "bfloat16": asdict(backends.explain(rounded, rounded, rounded)),
        }
    except ValueError as error:
        return {"chosen": {}, "problem": describe(error)}
    return {"chosen": chosen, "problem": None}


def run(as_json: bool = False) -> int:
    """Prints everything. Returns 0, or 1 if no kernel can be chosen (a wrong SELFATTN_CPU_ISA)."""
    found = report()
    print(json.dumps(found, indent=1) if as_json else text(found))
    return 0 if found["problem"] is None else 1


def text(found: dict[str, Any]) -> str:
    """Returns a :func:`report` as text for people."""
    build = found["build"]
    features = found["features"]
    none = "none of those looked for"
    lines = [
        ("selfattn_ext", f"{found['selfattn_ext']} in {found['package']}"),
        ("library", str(found["library"])),
        (
            "built by",
            f"{build['compiler']}, torch {build['torch']}; loads under {build['torch_minimum']} and newer",
        ),
        ("optimized", _yes(build["optimized"])),
        ("CUDA", _cuda(build)),
        (
            "torch",
            f"{found['torch']}, CPU capability {found['torch_cpu_capability']}, {found['threads']} threads",
        ),
        ("nvcc", found["nvcc"] or "none"),
        ("GPU", ", ".join(found["cuda_devices"]) or "none that torch can use"),
        ("Python", f"{found['python']} ({found['executable']})"),
        ("platform", found["platform"]),
        ("CPU", f"{found['cpu']}, {found['logical_cpus']} logical, {found['architecture']}"),
        ("  has", " ".join(name for name, present in features.items() if present) or none),
        ("  lacks", " ".join(name for name, present in features.items() if not present) or none),
        (
            "variables",
            " ".join(f"{name}={value}" for name, value in found["environment"].items()) or "none set",
        ),
        (
            "extras",
            ", ".join(f"{name} {has}" if has else f"no {name}" for name, has in found["extras"].items()),
        ),
    ]
    width = max(len(name) for name, _ in lines)
    return "\n".join([*(f"{name.ljust(width)}  {value}" for name, value in lines), "", *_kernel_lines(found)])


def _kernel_lines(found: dict[str, Any]) -> Iterator[str]:
    if found["problem"] is not None:
        yield f"no kernel can be chosen: {found['problem']}"
        return
    names = {dtype: f"{taken['kernel']}/{taken['isa']}" for dtype, taken in found["chosen"].items()}
    yield (
        f"kernels, best first; on this CPU float32 takes {names['float32']}, "
        f"bfloat16 takes {names['bfloat16']}:"
    )
    for kernel in found["kernels"]["cpu"]:
        name = f"{kernel['name']}/{kernel['isa']}"
        chosen = name in names.values()
        yield f"  {'*' if chosen else ' '} {_kernel(kernel)}"
        reason = found["chosen"]["float32"]["refused"].get(name)
        if reason is not None and kernel["available"] and not chosen:
            yield f"      not taken: {reason}"
    if found["kernels"]["cuda"]:
        yield "\nkernels for CUDA, best first:"
    for kernel in found["kernels"]["cuda"]:
        yield f"    {_kernel(kernel)}"


def _kernel(row: dict[str, Any]) -> str:
    return str(backends.Kernel(**{name: value for name, value in row.items() if name != "available"}))


def _cuda(build: dict[str, Any]) -> str:
    if build["cuda"]:
        return f"kernels for compute capability {build['cuda_architectures']}, by {build['cuda_compiler']}"
    return f"no kernels: {cuda_build.ABSENT[build['cuda_absent']]}"


def _yes(flag: bool) -> str:
    return "yes" if flag else "no: compiled without optimisation, kernels rely on their own pragmas"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
