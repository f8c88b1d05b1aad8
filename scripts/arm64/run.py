"""Builds for arm64 Linux on x86-64, and runs what is built in an emulator of single programs (qemu).

    python scripts/arm64/run.py build                       # compiles the library and the C++ unit tests
    python scripts/arm64/run.py cpp                         # the unit tests, which take minutes
    python scripts/arm64/run.py cpp --turn 1                # the short ones, and one of the long ones
    python scripts/arm64/run.py check                       # python -m selfattn_ext check
    python scripts/arm64/run.py test --every 20             # one of 20 Python tests of kernels
    python scripts/arm64/run.py wheel build/wheel           # a wheel beside the one there
    python scripts/arm64/run.py python -c "import torch"    # any program

--cpu names the processor. The emulator shows wrong results and crashes. It cannot show speed, nor what a
processor does that reorders memory accesses.
"""

from __future__ import annotations

import argparse
import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import userland
from userland import DEBIAN, FOLDER, ROOT, SITE

CMAKE = FOLDER / "cmake"
#: Processors of qemu: one of the oldest of the architecture, and one with all that qemu knows.
CPUS = ("cortex-a72", "max")
LIBRARY = FOLDER / "library" / f"_C.cpython-{userland.PYTHON.replace('.', '')}-aarch64-linux-gnu.so"
#: Unit tests that take minutes in the emulator.
LONG = ("test_kernels", "test_sequence_kernels", "test_tangent_kernels", "test_tangent_sequences")
#: The Python tests that are about numbers of kernels, and start no other program.
TESTS = ("attention", "gradients", "numerics", "varlen", "kv_cache")

_SOURCES = runpy.run_path(str(ROOT / "selfattn_ext" / "build" / "sources.py"))


def build() -> None:
    """Compiles the library and the unit tests, and links the objects of the library into a Python module."""
    torch = SITE / "torch"
    settings = {
        "CMAKE_SYSTEM_NAME": "Linux",
        "CMAKE_SYSTEM_PROCESSOR": "aarch64",
        "CMAKE_CXX_COMPILER": userland.COMPILER,
        # The linker ignores which functions of CUDA torch's libraries need.
        "CMAKE_EXE_LINKER_FLAGS": "-Wl,--unresolved-symbols=ignore-in-shared-libs",
        "Python3_EXECUTABLE": sys.executable,
    }
    options = [f"-DSELFATTN_LIBTORCH={torch}", *(f"-D{name}={value}" for name, value in settings.items())]
    subprocess.run(["cmake", "-S", ROOT, "-B", CMAKE, "-G", "Ninja", *options], check=True)
    subprocess.run(["cmake", "--build", CMAKE], check=True)
    LIBRARY.parent.mkdir(exist_ok=True)
    (module,) = (ROOT / "csrc" / _SOURCES["PYTHON_FOLDER"]).glob("*.cpp")
    objects = sorted((CMAKE / "CMakeFiles" / "selfattn_objects.dir").rglob("*.o"))
    headers = DEBIAN / "usr" / "include"
    flags = [*_SOURCES["compile_flags"](), "-fPIC", "-shared", "-DTORCH_EXTENSION_NAME=_C"]
    # The headers of Python include others that depend on the architecture, which Debian keeps elsewhere.
    flags += [f"-I{torch / 'include'}", f"-I{headers / f'python{userland.PYTHON}'}", f"-idirafter{headers}"]
    libraries = [f"-L{torch / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
    subprocess.run([userland.COMPILER, *flags, module, *objects, "-o", LIBRARY, *libraries], check=True)


def python(cpu: str, *arguments: str | Path) -> int:
    """Runs Python in the emulator, and returns its exit status."""
    environment = os.environ | {
        "PYTHONHOME": str(DEBIAN / "usr"),
        "PYTHONPATH": os.pathsep.join([str(SITE), str(ROOT)]),
        "SELFATTN_LIBRARY": str(LIBRARY),
        "CXX": userland.COMPILER,
    }
    command = [userland.EMULATOR, "-cpu", cpu, "-L", DEBIAN, userland.PROGRAM, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


def cpp(cpu: str, turn: int | None) -> int:
    """Runs the unit tests, as many at a time as there are processors: all of them, or the short ones and that
    one of the others. Returns 1 if one fails.
    """
    left_out = [] if turn is None else [name for name in LONG if name != LONG[turn % len(LONG)]]
    programs = [path for path in CMAKE.glob("test_*") if path.suffix == "" and path.is_file()]
    chosen = [path for path in programs if path.name not in left_out]
    chosen.sort(key=lambda path: path.name not in LONG)  # those first
    return _at_once([[userland.EMULATOR, "-cpu", cpu, "-L", DEBIAN, path] for path in chosen])


def check(cpus: Sequence[str]) -> int:
    """Runs ``python -m selfattn_ext check`` on several processors at once. Returns 1 if one fails."""
    command = [sys.executable, __file__]
    return _at_once([[*command, "--cpu", cpu, "python", "-m", "selfattn_ext", "check"] for cpu in cpus])


def _at_once(commands: Sequence[Sequence[str | Path]]) -> int:
    """Runs programs, as many at a time as there are processors, and prints the output of each at its end."""

    def run(command: Sequence[str | Path]) -> bool:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        print("==", *command[1:], f"\n{done.stdout}", flush=True)
        return done.returncode != 0

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return int(any(list(pool.map(run, commands))))


def wheel(folder: Path) -> None:
    """Writes a wheel for arm64 Linux beside that of x86-64 for the same Python, of which it has all but the
    library.
    """
    wheels = runpy.run_path(str(ROOT / "scripts" / "wheels.py"))
    abi = f"cp{userland.PYTHON.replace('.', '')}"
    (base,) = folder.glob(f"*-{abi}-{abi}-linux_x86_64.whl")
    python_of_it = wheels["Interpreter"](str(userland.PROGRAM), abi, abi, "", "")
    wheels["repack"](base, LIBRARY, python_of_it, "linux_aarch64")


#: It runs in the emulator: pytest with every so many of the tests.
_SAMPLE = """
import sys, pytest
every, first, *arguments = sys.argv[1:]
class Sample:
    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        items[:] = items[int(first)::int(every)]
sys.exit(pytest.main(arguments, plugins=[Sample()]))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--cpu", help=f"{CPUS[0]} by default; for check, each of {', '.join(CPUS)}")
    actions = parser.add_subparsers(dest="action", required=True)
    actions.add_parser("build")
    actions.add_parser("check")
    actions.add_parser("cpp").add_argument("--turn", type=int)
    test = actions.add_parser("test")
    test.add_argument("--every", type=int, default=20)
    test.add_argument("--first", type=int, default=0)
    actions.add_parser("wheel").add_argument("folder", type=Path)
    actions.add_parser("python", add_help=False)
    given, arguments = parser.parse_known_args()
    if arguments and given.action not in ("python", "test"):
        parser.error(f"unknown: {' '.join(arguments)}")

    cpu = given.cpu or CPUS[0]
    userland.make()
    if given.action == "build":
        build()
        return 0
    if given.action == "cpp":
        return cpp(cpu, given.turn)
    if given.action == "check":
        return check([given.cpu] if given.cpu else CPUS)
    if given.action == "python":
        return python(cpu, *arguments)
    if given.action == "wheel":
        wheel(given.folder)
        return 0
    paths = arguments or [f"tests/{folder}" for folder in TESTS]
    numbers = (str(given.every), str(given.first))
    # The emulator gives out all memory that is asked for, so that a test of what fails takes the machine's.
    chosen = ("-k", "not allocation and not memory")
    return python(cpu, "-c", _SAMPLE, *numbers, "-q", "-p", "no:cacheprovider", *chosen, *paths)


if __name__ == "__main__":
    sys.exit(main())
