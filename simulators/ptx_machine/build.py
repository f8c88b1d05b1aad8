"""Builds the PTX machine, programs for it, and the package with the PTX of its CUDA kernels.

Ninja compiles only what has changed, whichever process calls it. Everything needs nvcc; torch's CUDA tensors
(the operators of operators/, and the package) also need a torch with CUDA.
"""

from __future__ import annotations

import functools
import os
import runpy
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ninja_file import ROOT, NinjaFile, Tools, run_ninja, tools

# It is loaded by path, because importing the package would load its library, which another build then
# replaces.
cuda_build = SimpleNamespace(**runpy.run_path(str(ROOT / "selfattn_ext" / "build" / "cuda_build.py")))

CSRC = ROOT / "csrc"
MACHINE = ROOT / "simulators" / "ptx_machine"
NVCC_TO_PTX = MACHINE / "nvcc_to_ptx"
#: Programs are compiled for these; devices of later generations run the same PTX.
ARCHITECTURES = ("7.5", "8.0")
#: The package, and programs whose names begin with "hopper", are compiled for this, which only 9.0 runs, and
#: 8.0.
HOPPER = "9.0a"

#: Sums must be those of the program text. The host's errno and traps are of no use, and checking them costs
#: time in every loop.
FLAGS = [
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wall",
    "-Wextra",
]


def nvcc() -> Any:
    """The nvcc of this machine, as cuda_build finds it.

    Raises:
        RuntimeError: there is no nvcc.
    """
    found = cuda_build.find_nvcc()
    if found is None:
        raise RuntimeError("there is no nvcc: put it on PATH or the folder of its toolkit into CUDA_HOME")
    return found


def host_level() -> str:
    """The compiler's flag for this processor, so that loops over the lanes of a warp become vector
    instructions. It names a level rather than "native", so that objects made on another machine are made
    again.
    """
    wanted = {"x86-64-v4": "avx512vl", "x86-64-v3": "avx2", "x86-64-v2": "sse4_2"}
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        flags = next((line.split() for line in file if line.startswith("flags")), [])
    return "-march=" + next((level for level, flag in wanted.items() if flag in flags), "x86-64")


def folder() -> Path:
    """The folder of the machine, which every torch shares."""
    return ROOT / "build" / "ptx_machine"


def of_torch() -> str:
    """The folder in it for files that only this torch can use."""
    return f"torch{tools().torch_version}"


def library_of(home: Path, name: str) -> Path:
    """The path of a library of the CUDA toolkit."""
    for place in (home / "lib64", home / "lib"):
        if (place / name).exists():
            return place / name
    raise RuntimeError(f"{home} has no {name}")


def program_flags(headers: Path, architectures: tuple[str, ...] = ARCHITECTURES) -> list[str]:
    """The flags with which nvcc_to_ptx compiles a program that includes the package's headers from `csrc`."""
    library = library_of(Path(nvcc().home), "libcudart.so")
    numbers = [architecture.replace(".", "") for architecture in architectures]
    return [
        "-std=c++17",
        "-O3",
        f"-I{headers}",
        "-cudart",
        "shared",
        "-Xlinker",
        f"-rpath={library.parent}",
        *(f"-gencode=arch=compute_{number},code=sm_{number}" for number in numbers),
    ]


def architectures_of(program: Path) -> tuple[str, ...]:
    """The architectures that a program is compiled for."""
    return (ARCHITECTURES[-1], HOPPER) if program.stem.startswith("hopper") else ARCHITECTURES


def machine_flags() -> list[str]:
    """The flags that the machine's own sources are compiled with."""
    return [*FLAGS, host_level(), f"-I{MACHINE}", f"-isystem{nvcc().home}/include"]


def write_ninja(found: Tools) -> NinjaFile:
    """The rules for the machine, programs for it, and its half for torch."""
    compiler = nvcc()
    home = Path(compiler.home)
    runtime = library_of(home, "libcudart.so")
    file = NinjaFile(found)
    file.lines += [
        "rule refuse",
        f"  command = {sys.executable} {MACHINE / 'refusals.py'} {runtime} $out $in",
        "rule nvcc",
        f"  command = PTX_NVCC={compiler.command} {NVCC_TO_PTX} $flags $in -o $out",
    ]
    sources = sorted(path for path in MACHINE.rglob("*.cpp") if not {"operators", "on_host"} & {*path.parts})
    refusals = folder() / "refusals.cpp"
    in_runtime = " ".join(str(path) for path in sources if path.parent.name == "runtime")
    file.lines.append(f"build {refusals}: refuse {in_runtime} | {MACHINE / 'refusals.py'}")
    objects = file.objects([*sources, refusals], "machine", machine_flags())
    file.link("machine.so", objects, ["-shared", "-ldl"])

    cuda = CSRC / "cuda"
    headers = " ".join(
        str(path) for folder in ("common", "mma", "sm80") for path in sorted((cuda / folder).glob("*.*h"))
    )
    for program in sorted((MACHINE / "programs").glob("*.cu")):
        file.lines += [
            f"build {program.stem}: nvcc {program} | {NVCC_TO_PTX} {headers}",
            f"  flags = {' '.join(program_flags(CSRC, architectures_of(program)))}",
        ]

    torch = found.torch
    include = [f"-isystem {torch}/include", f"-isystem {torch}/include/torch/csrc/api/include"]
    link = [f"-L{torch}/lib", f"-Wl,-rpath,{torch}/lib"]
    libraries = ["-ltorch", "-ltorch_cpu", "-ltorch_cuda", "-lc10", "-lc10_cuda"]
    flags = ["-std=c++20", "-O1", "-fPIC", "-Wall", f"-I{MACHINE}", f"-isystem {home}/include", *include]
    objects = file.objects(sorted((MACHINE / "operators").glob("*.cpp")), f"{of_torch()}/operators", flags)
    file.link(f"{of_torch()}/operators.so", objects, ["-shared", *link, *libraries])
    driver = file.objects([MACHINE / "driver" / "libcuda.cc"], "driver", ["-std=c++17", "-fPIC", "-Wall"])
    file.link("driver/libcuda.so.1", driver, ["-shared", "-Wl,-soname,libcuda.so.1"])
    return file


@functools.cache
def build(target: str) -> Path:
    """Brings `target` up to date, once in a process, and returns its path.

    Args:
        target: machine.so; driver/libcuda.so.1; operators.so in of_torch(); or the name of a program.

    Raises:
        RuntimeError: there is no nvcc, or compiling fails; the message holds the compilers' output.
    """
    found = tools()
    return run_ninja(found, folder(), f"{of_torch()}.ninja", write_ninja(found), target)


def build_package() -> Path:
    """Compiles the package's library with the PTX of its CUDA kernels, and returns its path. The library is
    for 8.0 and 9.0a; if SELFATTN_PTX_CAPABILITY says so, it is for 7.5, in a folder of its own.

    Raises:
        RuntimeError: something does not compile; the compilers have printed what.
    """
    capability = int(os.environ.get("SELFATTN_PTX_CAPABILITY", 90))
    runs = [it for it in ARCHITECTURES if int(it.replace(".", "")) <= capability]
    place = folder()
    if runs[-1] != ARCHITECTURES[-1]:
        place /= f"for_{runs[-1]}"
    command = [sys.executable, "setup.py", "--quiet", "build_ext"]
    command += ["--build-lib", str(place / "package"), "--build-temp", str(place / "temp")]
    variables = {
        "SELFATTN_CUDA": "1",
        cuda_build.ARCHITECTURES_VARIABLE: ";".join([runs[-1], HOPPER] if len(runs) > 1 else runs),
        "PTX_NVCC": nvcc().command,
    }
    # torch's build calls this instead of nvcc.
    variables["PYTORCH_NVCC"] = os.environ.get("PYTORCH_NVCC", str(NVCC_TO_PTX))
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed")
    return place / "package" / "selfattn_ext" / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"


def environment(**variables: str) -> dict[str, str]:
    """The environment of a program that runs on the machine, or on the machine that PTX_MACHINE names
    (mutate.py). The package's other variables are left out.
    """
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SELFATTN")}
    machine = os.environ.get("PTX_MACHINE") or str(build("machine.so"))
    return {**clean, "LD_PRELOAD": machine, **variables}


def run(program: Path, *arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    """Runs a program on the machine, with `options` as the machine's variables."""
    variables = {f"SELFATTN_PTX_{name.upper()}": str(value) for name, value in options.items()}
    return subprocess.run(
        [program, *arguments],
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def environment_for_torch(library: Path, **variables: str) -> dict[str, str]:
    """The environment of a Python whose torch finds the machine as its GPU, with this library."""
    operators = build(f"{of_torch()}/operators.so")
    driver = build("driver/libcuda.so.1").parent
    path = [str(MACHINE / "operators" / "site"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    defaults = {
        "LD_LIBRARY_PATH": os.pathsep.join(
            filter(None, [str(driver), os.environ.get("LD_LIBRARY_PATH", "")])
        ),
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        # Each tensor is an allocation of its own then, so that the first access outside of it is noticed.
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "SELFATTN_LIBRARY": str(library),
        "SELFATTN_REQUIRE_CUDA": "1",
        "SELFATTN_PTX_OPERATORS": str(operators),
    }
    return environment(**{**defaults, **variables})
