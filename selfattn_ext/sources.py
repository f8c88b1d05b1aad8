"""The one list of C++ and CUDA sources and of compiler flags.

setup.py, jit.py and CMakeLists.txt read it, each in its own way, so this file needs neither torch nor the
rest of the package: it is importable alone, and ``python selfattn_ext/sources.py library`` prints a list
for CMake.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

#: The name of the package, and of its folder.
PACKAGE = "selfattn_ext"

#: The namespace of the compiled operators: ``torch.ops.selfattn``.
NAMESPACE = "selfattn"

#: The oldest torch that can load the library, as csrc/ops/build_options.h has it.
MINIMUM_TORCH = (2, 11)

#: Folders of csrc whose sources make the operator library; every ``*.cpp`` in them is compiled, and every
#: ``*.cu`` in a build with CUDA.
LIBRARY_FOLDERS = ("core", "cpu", "cuda", "ops", "peak")

#: What lies in a folder of this name, on whatever level, belongs to builds with CUDA alone.
CUDA_FOLDER = "cuda"

#: The folder of the pybind11 module, which Python needs and a C++ program does not.
PYTHON_FOLDER = "python"


def root() -> Path:
    """The folder with the C++ sources: inside an installed package, beside the package in a checkout.

    Raises:
        FileNotFoundError: the sources are in neither place.
    """
    package = Path(__file__).resolve().parent
    for folder in (package / "csrc", package.parent / "csrc"):
        if (folder / "version.h").is_file():
            return folder
    raise FileNotFoundError(f"the C++ sources of selfattn_ext are neither in {package} nor beside it")


def same_as_in(package: Path) -> bool:
    """Whether another folder of this package, with its csrc inside, has the same sources and flags."""
    here = Path(__file__)
    try:
        own = root()
    except FileNotFoundError:
        return False
    return _contents(package / "csrc", package / here.name) == _contents(own, here)


def _contents(folder: Path, flags: Path) -> dict[str, bytes]:
    # Without what editors leave behind, as setup.py copies a checkout's.
    paths = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    names = [name for name in paths if not name.endswith("~") and not any(map(_hidden, Path(name).parts))]
    return {"": flags.read_bytes(), **{name: paths[name].read_bytes() for name in names}}


def _hidden(name: str) -> bool:
    return name.startswith(".")


def version() -> str:
    """The version of the package, kept in csrc/version.h so that any build of the library knows it."""
    text = (root() / "version.h").read_text(encoding="utf-8")
    found = re.search(r'^#define SELFATTN_VERSION "([^"]+)"$', text, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"{root() / 'version.h'} defines no SELFATTN_VERSION")
    return found.group(1)


def supports(torch_version: str) -> bool:
    """Whether the compiled library works with this torch, told by ``torch.__version__``."""
    found = re.match(r"(\d+)\.(\d+)", torch_version)
    return found is not None and (int(found[1]), int(found[2])) >= MINIMUM_TORCH


def _in_folders(folders: tuple[str, ...], cuda: bool) -> list[str]:
    base = root()
    paths = [
        path
        for folder in folders
        for path in (base / folder).rglob("*")
        if path.suffix in (".cpp", ".cu")
        and (cuda or CUDA_FOLDER not in path.relative_to(base).parts)
        and not path.name.startswith(".")
    ]
    # Sorted, so that two builds link in the same order and give the same library.
    return sorted(map(str, paths))


def library_sources(cuda: bool = False) -> list[str]:
    """Absolute paths of the operator library's sources, without the pybind11 module."""
    return _in_folders(LIBRARY_FOLDERS, cuda)


def extension_sources(cuda: bool = False) -> list[str]:
    """Absolute paths of all sources of the Python extension module.

    They compile as they are with ``torch.utils.cpp_extension.load(name=..., sources=extension_sources())``,
    and with ``cuda=True`` where torch has CUDA and nvcc is found. The sources that only a build with CUDA has
    tell the others by being there; no macro does.
    """
    return _in_folders((*LIBRARY_FOLDERS, PYTHON_FOLDER), cuda)


def headers() -> list[str]:
    """Absolute paths of every file of csrc that sources include."""
    return sorted(str(path) for pattern in ("*.h", "*.cuh", "*.inc") for path in root().rglob(pattern))


def definitions() -> list[str]:
    """The macro definitions of the installed library, without a leading ``-D``."""
    return [f"SELFATTN_NAMESPACE={NAMESPACE}"]


def optimisation_flags() -> list[str]:
    """Compiler flags of every build by setup.py and jit.py, for gcc and clang.

    The instruction sets are chosen by regions in the sources and at run time, never by ``-march`` here.
    ``-g0`` takes back the ``-g`` that many Python builds hand on, which makes the library ten times larger.
    ``-fwrapv`` is handed on by most of them: with it all builds are the same code.
    """
    return ["-std=c++17", "-O3", "-g0", "-fwrapv", "-fvisibility=hidden"]


def cuda_flags() -> list[str]:
    """Flags of nvcc in every build by setup.py and jit.py, without those that name architectures.

    No ``--use_fast_math``: kernels name the approximate functions that they want.
    """
    return ["-std=c++17", "-O3", "-Xcompiler=-fvisibility=hidden"]


def compile_flags() -> list[str]:
    """All compiler flags of the installed library."""
    return [*optimisation_flags(), *(f"-D{definition}" for definition in definitions())]


if __name__ == "__main__":
    _LISTS = {
        "library": library_sources,
        "library-with-cuda": lambda: library_sources(cuda=True),
        "definitions": definitions,
        "version": lambda: [version()],
    }
    if len(sys.argv) != 2 or sys.argv[1] not in _LISTS:
        sys.exit(f"usage: python {sys.argv[0]} {{{','.join(_LISTS)}}}")
    print("\n".join(_LISTS[sys.argv[1]]()))
