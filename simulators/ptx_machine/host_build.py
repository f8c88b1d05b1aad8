"""Builds the package with its CUDA kernels for tensors of the CPU, which the PTX machine executes.

Any torch will do. The kernels are rows of the CPU's kernel table (on_host/adapters.cpp), and memory of the
CPU's tensors is the device's (on_host/tensor_memory.cpp). A second library has the CUDA half of the operators
instead, for tensors that say that they are on "cuda:0" (on_host/host_device.cpp).
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

from ninja_file import ROOT, NinjaFile, Tools, run_ninja, tools

from . import build as machine
from .few_instances import FEW

CSRC = machine.CSRC
ON_HOST = machine.MACHINE / "on_host"
#: Folders that a process needs on its path: the simulators, and what the tests share.
SHARED = (ROOT / "simulators", ROOT / "tests" / "support")

#: The name of the Python module, as selfattn_ext/build/library.py imports it.
MODULE = "_C"

#: Functions of the framework that the operators call and that need a GPU: host_device.cpp replaces them.
OF_A_DEVICE = (
    "aoti_torch_create_device_guard",
    "aoti_torch_delete_device_guard",
    "aoti_torch_empty_strided",
    "aoti_torch_get_current_cuda_stream",
    "aoti_torch_zero_",
    "torch_call_dispatcher",
)

sources = SimpleNamespace(**runpy.run_path(str(ROOT / "selfattn_ext" / "build" / "sources.py")))

#: Without the last two of these flags, static variables of inline functions would be shared with another
#: library of this code in the same process.
COMMON = ["-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-gnu-unique"]


def package_sources() -> list[Path]:
    """The C++ sources of the package without the CUDA kernels and without the fused CPU kernels, which take
    most of the time to compile: adapters.cpp has the loops in their place.
    """
    return [
        path
        for folder in (*sources.LIBRARY_FOLDERS, sources.PYTHON_FOLDER)
        for path in sorted((CSRC / folder).rglob("*.cpp"))
        if "cuda" not in path.relative_to(CSRC).parts and not path.name.startswith("kernels_")
    ]


def kernel_sources(csrc: Path, few: bool) -> list[Path]:
    """The CUDA sources and the instances of the kernels' templates; those that are missing are written."""
    written = ROOT / "build" / "instances" if csrc == CSRC else csrc.parent / "instances"
    instances = [Path(path) for path in sources.write_instances(written, csrc)]
    chosen = [path for path in instances if not few or path.stem in FEW]
    return sorted([*(csrc / "cuda").rglob("*.cu"), *chosen])


def _kernels(file: NinjaFile, csrc: Path, few: bool, checks: list[str]) -> list[str]:
    """The objects of the CUDA half without the operators. sm90's kernels are for 9.0 alone; the others' PTX
    runs on any device from 8.0 on.
    """
    host = [*COMMON, "-O1", "-DSELFATTN_CUDA_HOPPER", f"-I{csrc}", f"-isystem {machine.nvcc().home}/include"]
    made = file.objects(
        sorted((csrc / "cuda").rglob("*.cpp")), "checked" if checks else "host", [*host, *checks]
    )
    found = kernel_sources(csrc, few)
    hopper = [path for path in found if "sm90" in path.parts]
    for paths, architecture in ((hopper, machine.HOPPER), ([*set(found) - {*hopper}], "8.0")):
        number = architecture.replace(".", "")
        flags = ["-std=c++17", "-Xcompiler=-fPIC,-fvisibility=hidden,-fno-gnu-unique", f"-I{csrc}"]
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        made += file.objects(sorted(paths), "kernels", flags, rule="kernels")
    return made


def write_ninja(found: Tools, csrc: Path, few: bool, checks: list[str]) -> NinjaFile:
    """The rules for both libraries."""
    file = NinjaFile(found)
    file.lines += [
        "rule kernels",
        f"  command = PTX_NVCC={machine.nvcc().command} {machine.NVCC_TO_PTX} -MMD -MF $out.d $flags $\n"
        "    -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule missing",
        f"  command = {sys.executable} {machine.MACHINE / 'missing_instances.py'} $out $in",
    ]
    kernels = _kernels(file, csrc, few, checks)

    cuda = f"-isystem {machine.nvcc().home}/include"
    python = [f"-isystem {found.torch}/include", f"-isystem {sysconfig.get_path('include')}", cuda]
    names = [f"-DTORCH_EXTENSION_NAME={MODULE}", "-DSELFATTN_NAMESPACE=selfattn", "-DSELFATTN_CUDA_ON_HOST"]
    # The CPU's kernels are not under test here, so the build is to be quick rather than the kernels.
    plain = [*COMMON, "-Wall", "-Wextra", "-O1", f"-I{CSRC}", *python, *names]
    # A precompiled header saves half of the time of an operator's source, which goes into torch's headers.
    headers = file.precompiled(ON_HOST / "operators_headers.h", "package", plain)
    operators = [path for path in package_sources() if path.parent == CSRC / "ops"]
    others = [path for path in package_sources() if path not in operators]
    package = file.objects(operators, "package", plain, headers)
    package += file.objects([*others, ON_HOST / "adapters.cpp"], "package", plain)
    # torch's full headers need a newer C++ than those of its stable ABI.
    full = [*plain, "-std=c++20"]
    package += file.objects([ON_HOST / "tensor_memory.cpp"], "package", full)
    if few:
        file.lines.append(f"build missing.s: missing {' '.join([*package, *kernels])}")
        kernels.append("missing.s")
    torch = found.torch / "lib"
    shared = ["-shared", *checks[:1], f"-L{torch}", "-ltorch", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch}"]
    file.link(f"{MODULE}.so", [*package, *kernels], shared)

    half = file.objects([CSRC / "ops" / "cuda" / "engine_cuda.cpp"], "device", plain)
    half += file.objects([ON_HOST / "host_device.cpp"], "device", full)
    wrapped = [f"-Wl,--wrap={name}" for name in OF_A_DEVICE]
    file.link(f"device/{MODULE}.so", [*package, *half, *kernels], [*shared, *wrapped])
    return file


#: Flags for the host's sources of csrc/cuda, which plan launches, in a build that looks for wrong accesses.
CHECKS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g1"]


def build(
    target: str = "library",
    few: bool = False,
    *,
    checked: bool = False,
    csrc: Path = CSRC,
    folder: Path | None = None,
) -> Path:
    """Brings a library up to date and returns its path.

    Args:
        target: "library", or "device" for tensors on cuda:0.
        few: with the instances FEW alone. A call that needs another one fails.
        checked: with AddressSanitizer and UndefinedBehaviorSanitizer in the sources that plan launches; the
            process needs sanitizers() in its environment.
        csrc: the folder that holds ``cuda``, for builds of changed kernels.
        folder: where object files go; by default a folder for this Python and torch.

    Raises:
        RuntimeError: there is no nvcc, or something does not compile; the message holds the output.
    """
    found = tools()
    output = {"library": f"{MODULE}.so", "device": f"device/{MODULE}.so"}[target]
    place = folder or machine.folder() / f"{'few_' if few else ''}on_host_{machine.of_torch()}"
    content = write_ninja(found, csrc, few, CHECKS if checked else [])
    if checked:
        place = place.with_name(f"checked_{place.name}")
    return run_ninja(found, place, "build.ninja", content, output)


def sanitizers() -> dict[str, str] | None:
    """Variables that a process with a checked build needs besides; None if that cannot run here."""
    paths = []
    for name in ("libasan.so", "libubsan.so"):
        asked = [*tools().compiler.split(), f"-print-file-name={name}"]
        paths.append(subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip())
    if not all(os.path.isabs(path) for path in paths):
        return None
    # Leaks are not looked for, because Python never gives back some of its own memory. The sanitizers'
    # libraries must come first.
    machines = machine.environment()["LD_PRELOAD"]
    return {"LD_PRELOAD": ":".join([*paths, machines]), "ASAN_OPTIONS": "detect_leaks=0"}


def environment(library: Path, **variables: str) -> dict[str, str]:
    """The environment of a Python that tests a library. Of the package's variables it has only these.

    Raises:
        RuntimeError: there is no package to test.
    """
    package = find_spec("selfattn_ext")
    if package is None or package.origin is None:
        raise RuntimeError("selfattn_ext is neither installed nor in this folder")
    # The package may be installed elsewhere than in the checkout.
    path = [str(Path(package.origin).parents[1]), *map(str, SHARED), os.environ.get("PYTHONPATH", "")]
    given = {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "SELFATTN_LIBRARY": str(library),
        "OMP_NUM_THREADS": "1",
    }
    return machine.environment(**{**given, **variables})
