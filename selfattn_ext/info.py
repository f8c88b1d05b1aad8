"""The subcommand ``info``: versions, CPU features, kernels, and which kernel is chosen here."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
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
    """Returns the processor's name as the operating system gives it, or the architecture if it gives none."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def run() -> int:
    """Prints everything. Returns 0, or 1 if no kernel can be chosen (a wrong SELFATTN_CPU_ISA)."""
    found = facts()
    build = found["build"]
    features = found["features"]
    lines = [
        ("selfattn_ext", f"{found['selfattn_ext']} in {Path(__file__).parent}"),
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
        ("nvcc", str(cuda_build.find_nvcc() or "none")),
        ("GPU", ", ".join(found["cuda_devices"]) or "none that torch can use"),
        ("Python", f"{found['python']} ({sys.executable})"),
        ("platform", found["platform"]),
        ("CPU", f"{found['cpu']}, {found['logical_cpus']} logical, {found['architecture']}"),
        (
            "  has",
            " ".join(name for name, present in features.items() if present) or "none of those looked for",
        ),
        (
            "  lacks",
            " ".join(name for name, present in features.items() if not present) or "none of those looked for",
        ),
        (
            "variables",
            " ".join(f"{name}={value}" for name, value in found["environment"].items()) or "none set",
        ),
        ("extras", ", ".join(_installed(name) for name in EXTRAS)),
    ]
    width = max(len(name) for name, _ in lines)
    for name, text in lines:
        print(f"{name.ljust(width)}  {text}")
    return _print_kernels()


def _print_kernels() -> int:
    probe = torch.zeros(1, 1, 8, 64)
    try:
        explanation = backends.explain(probe, probe, probe)
        rounded = probe.bfloat16()
        short = backends.explain(rounded, rounded, rounded)
    except ValueError as error:
        print(f"\nno kernel can be chosen: {describe(error)}")
        return 1
    print(
        f"\nkernels, best first; on this CPU float32 takes {explanation.kernel}/{explanation.isa}, "
        f"bfloat16 takes {short.kernel}/{short.isa}:"
    )
    taken = {(explanation.kernel, explanation.isa), (short.kernel, short.isa)}
    for kernel in backends.kernels():
        chosen = (kernel.name, kernel.isa) in taken
        print(f"  {'*' if chosen else ' '} {kernel}")
        reason = explanation.refused.get(f"{kernel.name}/{kernel.isa}")
        if reason is not None and kernel.available and not chosen:
            print(f"      not taken: {reason}")
    on_cuda = backends.kernels("cuda")
    if on_cuda:
        print("\nkernels for CUDA, best first:")
    for kernel in on_cuda:
        print(f"    {kernel}")
    return 0


def _cuda(build: dict[str, Any]) -> str:
    if build["cuda"]:
        return f"kernels for compute capability {build['cuda_architectures']}, by {build['cuda_compiler']}"
    return f"no kernels: {cuda_build.ABSENT[build['cuda_absent']]}"


def _yes(flag: bool) -> str:
    return "yes" if flag else "no: compiled without optimisation, kernels rely on their own pragmas"


def _installed(name: str) -> str:
    try:
        return f"{name} {importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
        return f"no {name}"
