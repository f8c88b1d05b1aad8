"""Decides whether a build gets CUDA kernels, for which GPUs, and by which nvcc.

setup.py and CMake load this file by its path and jit.py imports it, so it needs neither torch nor the rest of
the package.
By default a build includes the CUDA kernels if torch has CUDA and a usable nvcc is found, and otherwise is
for the CPU alone. ``SELFATTN_CUDA=1`` makes it an error if they cannot be built, ``SELFATTN_CUDA=0`` leaves
them out.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

VARIABLE = "SELFATTN_CUDA"
ARCHITECTURES_VARIABLE = "TORCH_CUDA_ARCH_LIST"

#: The architectures of a build on a machine without a GPU; scripts/cuda_compile_check.py compiles for all of
#: them. Code for 8.0 runs on 8.6 and 8.9, code for 12.0 on 12.1; the drivers of later GPUs compile the PTX of
#: the last one.
DEFAULT_ARCHITECTURES = ("7.5", "8.0", "9.0a", "10.0", "12.0")

#: Architectures that have the same PTX as another one, which scripts/cuda_compile_check.py verifies. If both
#: are wanted, nvcc's front end, which is over half of its work, runs once.
SAME_PTX = {"12.0": "10.0"}

#: The oldest GPUs that the kernels are written for.
MINIMUM_CAPABILITY = (7, 5)

#: About how many processor seconds a build takes: for the CPU, for the host's part of the CUDA sources, and
#: for each architecture, first to PTX and then to machine code. docs/install.md says how they were measured.
CPU_SECONDS = 130
CUDA_HOST_SECONDS = 139
CUDA_SECONDS = {
    "7.5": (64, 38),
    "8.0": (137, 106),
    "9.0a": (196, 178),
    "10.0": (135, 121),
    "12.0": (134, 109),
}

#: Why a library has no CUDA kernels, by the name of the reason that is compiled into it.
ABSENT = {
    "": "the build did not ask for them",
    "unwanted": f"it was built with {VARIABLE}=0",
    "torch": "it was built under a torch without CUDA",
    "nvcc": "there was no nvcc when it was built",
    "version": "the nvcc that built it was not of torch's version of CUDA",
    "host": "nvcc could compile nothing when it was built",
    "gpu": "there was no GPU when it was compiled at run time",
}


def install_hint(torch_cuda: str | None) -> str:
    """Tells users how to get a library with CUDA kernels. ``torch_cuda`` is ``torch.version.cuda``."""
    toolkit = f"the CUDA toolkit {torch_cuda}" if torch_cuda else "a torch with CUDA and its CUDA toolkit"
    return (
        f"Install {toolkit} (nvcc on PATH, or its folder in CUDA_HOME), then selfattn_ext again with "
        f"{VARIABLE}=1 and pip's --force-reinstall --no-deps --no-cache-dir."
    )


# TORCH_CUDA_ARCH_LIST may name generations instead of architectures.
_GENERATIONS = {
    "Turing": "7.5+PTX",
    "Ampere": "8.0;8.6+PTX",
    "Ada": "8.9+PTX",
    "Hopper": "9.0+PTX",
    "Blackwell": "10.0;10.3;12.0;12.1+PTX",
}


class Nvcc(NamedTuple):
    """An nvcc that can be run."""

    command: str
    home: str  # the folder of its toolkit, where torch looks for libraries
    version: tuple[int, int]
    architectures: tuple[str, ...]  # what it can compile for, "7.5" and so on

    def __str__(self) -> str:
        return f"nvcc {self.version[0]}.{self.version[1]} in {self.home}"


class Plan(NamedTuple):
    """The decision of a build about CUDA."""

    absent: str  # a key of ABSENT; "" where CUDA kernels are built
    explanation: str  # one line for users
    nvcc: Nvcc | None = None
    architectures: tuple[str, ...] = ()

    @property
    def cuda(self) -> bool:
        """Whether the CUDA kernels are built."""
        return self.nvcc is not None and not self.absent


def _run(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **options)


def find_nvcc() -> Nvcc | None:
    """The nvcc of $CUDA_HOME or $CUDA_PATH, else the one on PATH, else that of /usr/local/cuda."""
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    places = [str(Path(home, "bin", "nvcc")) for home in homes[:1]]
    if not homes:
        places = [found for found in [shutil.which("nvcc")] if found] + ["/usr/local/cuda/bin/nvcc"]
    for command in places:
        try:
            banner = _run([command, "--version"]).stdout
            # If nvcc on PATH is a link or a script, only nvcc itself knows where its toolkit is.
            dryrun = _run([command, "--dryrun", "-x", "cu", os.devnull]).stderr
            listed = _run([command, "--list-gpu-arch"]).stdout
        except (OSError, subprocess.TimeoutExpired):
            continue
        version = re.search(r"release (\d+)\.(\d+)", banner)
        if version is None:
            continue
        top = re.search(r"^#\$ TOP=(.+)$", dryrun, re.M)
        home = Path(top[1].strip()) if top else Path(command).resolve().parent.parent
        known = re.findall(r"^compute_(\d+)(\d)$", listed, re.M)
        architectures = tuple(f"{major}.{minor}" for major, minor in known)
        return Nvcc(command, str(home.resolve()), (int(version[1]), int(version[2])), architectures)
    return None


def _number(architecture: str) -> tuple[int, int]:
    major, minor = re.match(r"(\d+)\.(\d+)", architecture).groups()  # type: ignore[union-attr]
    return int(major), int(minor)


def _for_gpus(capabilities: Sequence[tuple[int, int]], nvcc: Nvcc) -> tuple[str, ...]:
    """Machine code for these GPUs, and PTX for those that are newer than nvcc."""
    result = []
    for capability in sorted(set(capabilities)):
        name = f"{capability[0]}.{capability[1]}"
        older = [known for known in nvcc.architectures if _number(known) <= capability]
        if capability >= MINIMUM_CAPABILITY and older:
            newest = max(older, key=_number)
            result.append(name if newest == name else f"{newest}+PTX")
    return tuple(dict.fromkeys("9.0a" if name == "9.0" else name for name in result))


def _by_default(nvcc: Nvcc) -> tuple[str, ...]:
    known = [name for name in DEFAULT_ARCHITECTURES if name.rstrip("a") in nvcc.architectures]
    if known and known[-1].endswith("a"):
        known.append(known[-1].rstrip("a"))  # PTX for 9.0a does not run on later GPUs
    return (*known[:-1], f"{known[-1]}+PTX") if known else ()


def architectures_of(variable: str, capabilities: Sequence[tuple[int, int]], nvcc: Nvcc) -> tuple[str, ...]:
    """The architectures to compile for: TORCH_CUDA_ARCH_LIST, else this machine's GPUs, else the defaults.

    Raises:
        ValueError: the variable names something that nvcc or the kernels do not know.
    """
    names = variable.replace(" ", ";").strip(";")
    if not names or names == "native":
        return _for_gpus(capabilities, nvcc) or _by_default(nvcc)
    result = []
    for name in names.split(";"):
        result += _GENERATIONS[name].split(";") if name in _GENERATIONS else [name] if name else []
    for name in result:
        number = re.fullmatch(r"(\d+\.\d)[af]?(\+PTX)?", name)
        if number is None or number[1] not in nvcc.architectures or _number(name) < MINIMUM_CAPABILITY:
            known = [known for known in nvcc.architectures if _number(known) >= MINIMUM_CAPABILITY]
            raise ValueError(
                f"{ARCHITECTURES_VARIABLE}={variable} asks for {name}, and {nvcc} can compile the kernels "
                f"for {', '.join(known)}, each with +PTX or without"
            )
    # Machine code for 9.0 uses the instructions that only these GPUs have; PTX for later GPUs does not.
    with_own = []
    for name in result:
        with_own += ["9.0a"] if name == "9.0" else ["9.0a", name] if name == "9.0+PTX" else [name]
    return tuple(dict.fromkeys(with_own))


def architecture_flags(architectures: Sequence[str]) -> list[str]:
    """nvcc's flags for a list as :func:`architectures_of` gives it."""
    flags = []
    known = [name.removesuffix("+PTX") for name in architectures]
    for name, plain in zip(architectures, known, strict=True):
        number = plain.replace(".", "")
        ptx = SAME_PTX[plain].replace(".", "") if SAME_PTX.get(plain) in known else number
        if not (number == "90" and "9.0a" in architectures):
            flags.append(f"-gencode=arch=compute_{ptx},code=sm_{number}")
        if name.endswith("+PTX"):
            flags.append(f"-gencode=arch=compute_{ptx},code=compute_{ptx}")
    # nvcc itself tells the sources only the architectures that its front end runs for.
    with_code = "/".join(dict.fromkeys(name.rstrip("a") for name in known))
    return [*flags, f"-DSELFATTN_CUDA_ARCHITECTURES={with_code}"]


def cmake_architectures(nvcc: Nvcc) -> list[str]:
    """The default list as values of CMAKE_CUDA_ARCHITECTURES."""
    names = _by_default(nvcc)
    return [
        name.removesuffix("+PTX").replace(".", "") + ("" if name.endswith("+PTX") else "-real")
        for name in names
    ]


def _host_problem(nvcc: Nvcc) -> str | None:
    """nvcc's error for a small program: its host compiler may be too new, or headers may be missing."""
    text = "#include <cuda_runtime.h>\n#include <string>\n__global__ void kernel() {}\nint main() {}\n"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cu")
        source.write_text(text, encoding="utf-8")
        try:
            done = _run([nvcc.command, "-std=c++17", "-cuda", str(source), "-o", f"{folder}/probe.ii"])
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
    lines = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line] or lines or ["no reason given"]
    return None if done.returncode == 0 else errors[0]


def plan(
    torch_version: str,
    torch_cuda: str | None,
    capabilities: Sequence[tuple[int, int]],
    *,
    at_run_time: bool = False,
) -> Plan:
    """Decide what a build against this torch does about CUDA; call it inside ``toolchain.environment()``.

    Args:
        torch_version: ``torch.__version__``.
        torch_cuda: ``torch.version.cuda``.
        capabilities: the compute capabilities of this machine's GPUs.
        at_run_time: the library is for this machine alone, so CUDA kernels are of no use without a GPU.

    Raises:
        ValueError: SELFATTN_CUDA=1 asks for what is not possible, or a variable makes no sense.
    """
    wish = os.environ.get(VARIABLE, "")
    if wish not in ("", "0", "1"):
        raise ValueError(f"{VARIABLE} must be 1 (CUDA kernels or no build), 0 (none) or unset, got {wish!r}")
    if wish == "0":
        return Plan("unwanted", f"CPU only, as {VARIABLE}=0 asks")
    found = _plan(torch_version, torch_cuda, capabilities, at_run_time and wish != "1")
    if wish == "1" and not found.cuda:
        raise ValueError(f"{VARIABLE}=1 asks for CUDA kernels, and none can be built: {found.explanation}")
    return found


def _plan(
    torch_version: str, torch_cuda: str | None, capabilities: Sequence[tuple[int, int]], only_here: bool
) -> Plan:
    if torch_cuda is None:
        return Plan("torch", f"CPU only: torch {torch_version} is a build without CUDA")
    if only_here and not capabilities:
        return Plan("gpu", "CPU only: there is no GPU that torch can use")
    nvcc = find_nvcc()
    if nvcc is None:
        return Plan(
            "nvcc",
            f"CPU only: there is no nvcc; for GPUs, install the CUDA toolkit {torch_cuda} and put its nvcc "
            "on PATH or its folder into CUDA_HOME",
        )
    if nvcc.version[0] != int(torch_cuda.split(".")[0]):
        return Plan(
            "version",
            f"CPU only: {nvcc} is not of the CUDA of torch {torch_version}, which is {torch_cuda}; for GPUs, "
            f"install the CUDA toolkit {torch_cuda} and set CUDA_HOME to its folder",
        )
    problem = _host_problem(nvcc)
    if problem is not None:
        return Plan("host", f"CPU only: {nvcc} compiles nothing here ({problem})")
    architectures = architectures_of(os.environ.get(ARCHITECTURES_VARIABLE, ""), capabilities, nvcc)
    text = (
        f"CPU and CUDA, for compute capability {', '.join(architectures)}, by {nvcc}; "
        f"{ARCHITECTURES_VARIABLE} chooses others or fewer, {VARIABLE}=0 leaves CUDA out"
    )
    return Plan("", text, nvcc, architectures)


def plan_for(torch: Any, *, at_run_time: bool = False) -> Plan:
    """:func:`plan` for an imported torch and the GPUs that it sees."""
    gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    capabilities = [torch.cuda.get_device_capability(gpu) for gpu in gpus]
    return plan(torch.__version__, torch.version.cuda, capabilities, at_run_time=at_run_time)


def processor_seconds(plan: Plan) -> float:
    """About how many seconds all files of a build take on one processor."""
    total = CPU_SECONDS + (CUDA_HOST_SECONDS if plan.cuda else 0)
    known = [name.removesuffix("+PTX") for name in plan.architectures]
    for name in dict.fromkeys(known):
        to_ptx, to_code = CUDA_SECONDS.get(name, CUDA_SECONDS["8.0"])
        total += to_code + (0 if SAME_PTX.get(name) in known else to_ptx)
    return total


def definitions(plan: Plan) -> list[str]:
    """Compiler flags that tell the library why it has no CUDA kernels, or which of them it has."""
    if plan.absent:
        return [f"-DSELFATTN_CUDA_ABSENT={plan.absent}"]
    return ["-DSELFATTN_CUDA_HOPPER"] if "9.0a" in plan.architectures else []


@contextlib.contextmanager
def environment(plan: Plan, cpp_extension: Any) -> Iterator[None]:
    """Make torch's build code, the module torch.utils.cpp_extension, use the plan's nvcc.

    torch guesses the toolkit's folder when that module is first imported, and guesses wrong if nvcc on PATH
    is a script.
    """
    if plan.nvcc is None:
        yield
        return
    before = cpp_extension.CUDA_HOME
    cpp_extension.CUDA_HOME = plan.nvcc.home
    try:
        yield
    finally:
        cpp_extension.CUDA_HOME = before


if __name__ == "__main__":
    if sys.argv[1:] != ["cmake-architectures"]:
        sys.exit(f"usage: python {sys.argv[0]} cmake-architectures")
    _found = find_nvcc()
    if _found is None:
        sys.exit("there is no nvcc: put it on PATH or the folder of its toolkit into CUDA_HOME")
    print("\n".join(cmake_architectures(_found)))
