"""The list of C++ and CUDA sources, and the compiler flags, of every build.

setup.py, jit.py and CMakeLists.txt read it. It needs neither torch nor the rest of the package, so that
setup.py can load it by its path and CMake can run it: ``python selfattn_ext/build/sources.py library`` prints
the sources of the operator library.
"""

from __future__ import annotations

import os
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

#: The name of the package, and of its folder.
PACKAGE = "selfattn_ext"

#: The namespace of the compiled operators: ``torch.ops.selfattn``.
NAMESPACE = "selfattn"

#: The oldest torch that can load the library; csrc/ops/build_options.h says the same.
MINIMUM_TORCH = (2, 11)

#: Folders of csrc whose sources make the operator library: every ``*.cpp`` in them, and every ``*.cu`` in a
#: build with CUDA.
LIBRARY_FOLDERS = ("core", "cpu", "cuda", "ops", "peak")

#: Sources in folders of this name, on any level, are compiled only in builds with CUDA.
CUDA_FOLDER = "cuda"

#: The folder of the pybind11 module, which Python needs and a C++ program does not.
PYTHON_FOLDER = "python"

_EVERY_DTYPE = ("Float64", "Float32", "BFloat16", "Float16")
_SM80_DTYPES = ("BFloat16", "Float16", "Float32")
_16_BITS = ("BFloat16", "Float16")


class Instances(NamedTuple):
    """Templates of csrc/cuda, and what they are compiled for: a source for each dtype and head dim.

    No such source is kept in csrc: a build writes them, see :func:`write_instances`.
    """

    folder: str  # of csrc/cuda; it is also the namespace
    stem: str  # how the names of the sources begin
    headers: tuple[str, ...]  # of the folder, where the templates are defined
    templates: tuple[str, ...]
    dtypes: tuple[str, ...]
    dims: tuple[tuple[int, ...], ...] = ((),)  # the template arguments after the dtype
    one_source: bool = False  # all dtypes share a source

    def sources(self, csrc: Path) -> Iterator[tuple[str, str]]:
        """The name and the text of each source. They include their headers by absolute paths, because torch's
        loader is given no folder of headers.
        """
        namespace = "::".join(("selfattn", "cuda", *self.folder.split("/")))
        includes = [f'#include "{csrc.as_posix()}/cuda/{self.folder}/{header}"' for header in self.headers]
        for dtypes in [self.dtypes] if self.one_source else [(dtype,) for dtype in self.dtypes]:
            for dims in self.dims:
                # Equal dims are named once.
                parts = [*(() if self.one_source else dtypes), *dict.fromkeys(map(str, dims))]
                name = "_".join((self.stem, *parts)).lower()
                lines = []
                for template in self.templates:
                    for dtype in dtypes:
                        instance = f"{template}<{', '.join((f'DType::k{dtype}', *map(str, dims)))}>"
                        lines.append(f"template decltype({instance}) {instance};")
                text = [*includes, "", f"namespace {namespace} {{", *lines, f"}}  // namespace {namespace}"]
                yield f"{name}.cu", "\n".join((*text, ""))


_SM80_MASK = Instances(
    "sm80/backward",
    "sm80_mask",
    ("sm80_mask_gradient.cuh",),
    ("regions_of_mask", "run_mask"),
    _SM80_DTYPES,
    ((64,), (128,)),
)

#: Every explicit instantiation of a CUDA kernel that the dispatchers in csrc/cuda call.
INSTANCES = (
    Instances("rows", "row_gradients", ("row_gradients.cuh",), ("prepare_of_dtype",), _EVERY_DTYPE),
    Instances("simt", "simt_forward", ("forward.cuh",), ("forward",), _EVERY_DTYPE),
    Instances("simt", "simt_backward", ("backward.cuh",), ("backward",), _EVERY_DTYPE),
    Instances(
        "simt", "simt_selected_forward", ("selected_forward.cuh",), ("selected_forward",), _EVERY_DTYPE
    ),
    Instances(
        "simt", "simt_selected_backward", ("selected_backward.cuh",), ("selected_backward",), _EVERY_DTYPE
    ),
    Instances(
        "simt",
        "simt_mask_gradient",
        ("mask_gradient.cuh",),
        ("mask_workspace", "mask_gradient"),
        _EVERY_DTYPE,
    ),
    Instances("simt", "simt_tangents", ("tangents.cuh",), ("jvp", "backward_backward"), _EVERY_DTYPE),
    Instances("simt", "simt_tangent_mask", ("tangent_mask.cuh",), ("tangent_mask",), _EVERY_DTYPE),
    Instances(
        "simt",
        "simt_captured_gradient",
        ("captured_gradient.cuh",),
        ("captured_workspace", "captured_gradients"),
        _EVERY_DTYPE,
        one_source=True,  # the library holds little more of these kernels than their names
    ),
    Instances(
        "simt",
        "simt_scores",
        ("masked_softmax.cuh", "score_matrix.cuh", "scores_backward.cuh"),
        ("weights", "scores", "scores_backward", "masked_softmax", "masked_softmax_backward"),
        _EVERY_DTYPE,
    ),
    Instances(
        "simt", "simt_statistics", ("row_statistics.cuh",), ("statistics", "weight_sums"), _EVERY_DTYPE
    ),
    Instances(
        "sm80",
        "sm80",
        ("sm80_launch.cuh",),
        ("run_forward", "run_few_queries", "run_weights"),
        _SM80_DTYPES,
        ((32,), (64,), (96,), (128,), (192,), (256,)),
    ),
    Instances(
        "sm80/backward",
        "sm80_backward",
        ("sm80_backward_launch.cuh",),
        ("run_sides",),
        _SM80_DTYPES,
        ((64,), (128,)),
    ),
    Instances(
        "sm80/backward", "sm80_backward", ("sm80_backward_launch.cuh",), ("run_sides",), _16_BITS, ((256,),)
    ),
    _SM80_MASK,
    _SM80_MASK._replace(dtypes=_16_BITS, dims=((256,),)),
    Instances(
        "sm90",
        "sm90",
        ("sm90_launch.cuh",),
        ("run_forward",),
        _16_BITS,
        ((64, 64), (96, 128), (128, 128), (192, 128), (192, 192), (256, 256)),
    ),
    Instances(
        "sm90/backward",
        "sm90_backward",
        ("sm90_backward_launch.cuh",),
        ("run_sides",),
        _16_BITS,
        ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)),
    ),
)


def root() -> Path:
    """The folder with the C++ sources: inside an installed package, beside the package in a checkout.

    Raises:
        FileNotFoundError: the sources are in neither place.

    Example:
        >>> from selfattn_ext import sources
        >>> sources.root().name
        'csrc'
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "csrc", package.parent / "csrc"):
        if (folder / "version.h").is_file():
            return folder
    raise FileNotFoundError(f"the C++ sources of selfattn_ext are neither in {package} nor beside it")


def same_as_in(package: Path) -> bool:
    """Whether another folder of this package, with its csrc inside, has the same sources and flags."""
    here = Path(__file__)
    others = package / here.parent.name / here.name
    try:
        own = root()
    except FileNotFoundError:
        return False
    return others.is_file() and _contents(package / "csrc", others) == _contents(own, here)


def _contents(folder: Path, flags: Path) -> dict[str, bytes]:
    # Files that editors leave behind are left out, as setup.py does when it copies a checkout's csrc.
    paths = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    names = [name for name in paths if not name.endswith("~") and not any(map(_hidden, Path(name).parts))]
    return {"": flags.read_bytes(), **{name: paths[name].read_bytes() for name in names}}


def _hidden(name: str) -> bool:
    return name.startswith(".")


def version() -> str:
    """The version of the package, kept in csrc/version.h so that any build of the library knows it.

    Raises:
        FileNotFoundError, RuntimeError: there are no sources, or they name no version.

    Example:
        >>> import selfattn_ext
        >>> selfattn_ext.sources.version() == selfattn_ext.__version__
        True
    """
    text = (root() / "version.h").read_text(encoding="utf-8")
    found = re.search(r'^#define SELFATTN_VERSION "([^"]+)"$', text, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"{root() / 'version.h'} defines no SELFATTN_VERSION")
    return found.group(1)


def supports(torch_version: str) -> bool:
    """Whether the compiled library works with a torch.

    Args:
        torch_version: its ``torch.__version__``.

    Returns:
        True from MINIMUM_TORCH on; False for older versions, and for what is no version.

    Example:
        >>> from selfattn_ext import sources
        >>> sources.supports("2.13.0+cpu"), sources.supports("2.10.0")
        (True, False)
    """
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


def write_instances(folder: str | os.PathLike[str], csrc: Path | None = None) -> list[str]:
    """Write the sources of :data:`INSTANCES` into a folder, in folders as in csrc/cuda; return their paths.

    A file that holds its text already is left untouched, so that ninja does not compile it again. Others are
    replaced as a whole, so that several processes may write into a folder at once.

    Args:
        folder: where they are written.
        csrc: the folder that holds ``cuda`` with the headers, by default :func:`root`.
    """
    made = []
    for instances in INSTANCES:
        for name, text in instances.sources(csrc or root()):
            path = Path(os.path.abspath(folder), instances.folder, name)
            if not path.is_file() or path.read_text(encoding="utf-8") != text:
                path.parent.mkdir(parents=True, exist_ok=True)
                new = path.with_name(f".{name}.{os.getpid()}")
                new.write_text(text, encoding="utf-8")
                new.replace(path)
            made.append(str(path))
    return sorted(made)


def _instances_folder() -> str:
    """The folder for a caller that names none: among torch's run-time builds, one for each csrc."""
    cache = os.environ.get("TORCH_EXTENSIONS_DIR")
    cache = cache or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "torch_extensions")
    return os.path.join(
        Path(cache).expanduser(), f"selfattn_ext_instances_{zlib.crc32(os.fsencode(root())):08x}"
    )


def _sources(folders: tuple[str, ...], cuda: bool, instances_in: str | os.PathLike[str] | None) -> list[str]:
    written = write_instances(instances_in or _instances_folder()) if cuda else []
    return _in_folders(folders, cuda) + written


def library_sources(cuda: bool = False, instances_in: str | os.PathLike[str] | None = None) -> list[str]:
    """Absolute paths of the operator library's sources, without the pybind11 module.

    Args:
        cuda, instances_in: as :func:`extension_sources` takes them.

    Returns:
        The paths, sorted.

    Example:
        >>> from selfattn_ext import sources
        >>> all(path.endswith(".cpp") for path in sources.library_sources())
        True
    """
    return _sources(LIBRARY_FOLDERS, cuda, instances_in)


def extension_sources(cuda: bool = False, instances_in: str | os.PathLike[str] | None = None) -> list[str]:
    """Absolute paths of all sources of the Python extension module.

    They compile as they are with ``torch.utils.cpp_extension.load(name=..., sources=extension_sources())``,
    and with ``cuda=True`` where torch has CUDA and nvcc is found. No macro tells the other sources that a
    build has CUDA: linking the CUDA sources does.

    Args:
        cuda: with the CUDA kernels. Their explicit instantiations, a file for each dtype and head dim, are
            written first.
        instances_in: the folder for these files; by default one in torch's cache of extensions
            (``TORCH_EXTENSIONS_DIR``), so that the package itself may be read-only.

    Returns:
        The paths.

    Example:
        >>> from selfattn_ext import sources
        >>> len(sources.extension_sources()) > len(sources.library_sources())  # with the pybind11 module
        True
    """
    return _sources((*LIBRARY_FOLDERS, PYTHON_FOLDER), cuda, instances_in)


def headers() -> list[str]:
    """Absolute paths of all files of csrc that sources include.

    Example:
        >>> from selfattn_ext import sources
        >>> any(path.endswith("version.h") for path in sources.headers())
        True
    """
    return sorted(str(path) for pattern in ("*.h", "*.cuh", "*.inc") for path in root().rglob(pattern))


def definitions() -> list[str]:
    """The macro definitions of the installed library, without a leading ``-D``.

    Example:
        >>> from selfattn_ext import sources
        >>> sources.definitions()
        ['SELFATTN_NAMESPACE=selfattn']
    """
    return [f"SELFATTN_NAMESPACE={NAMESPACE}"]


def optimisation_flags() -> list[str]:
    """Compiler flags of every build by setup.py and jit.py, for gcc and clang.

    Instruction sets are chosen by regions in the sources and at run time, never by ``-march`` here.
    ``-g0`` undoes the ``-g`` that many Python builds pass on, which makes the library ten times larger.
    Most Python builds also pass on ``-fwrapv``; with it here all builds give the same code.

    Example:
        >>> from selfattn_ext import sources
        >>> sources.optimisation_flags()
        ['-std=c++17', '-O3', '-g0', '-fwrapv', '-fvisibility=hidden']
    """
    return ["-std=c++17", "-O3", "-g0", "-fwrapv", "-fvisibility=hidden"]


def cuda_flags() -> list[str]:
    """Flags of nvcc in every build by setup.py and jit.py, without those that name architectures.

    ``--use_fast_math`` is not among them: kernels call approximate functions by name where they want them.

    Example:
        >>> from selfattn_ext import sources
        >>> sources.cuda_flags()
        ['-std=c++17', '-O3', '-Xcompiler=-fvisibility=hidden']
    """
    return ["-std=c++17", "-O3", "-Xcompiler=-fvisibility=hidden"]


def compile_flags() -> list[str]:
    """All compiler flags of the installed library.

    Example:
        >>> from selfattn_ext import sources
        >>> sources.compile_flags()[-1]
        '-DSELFATTN_NAMESPACE=selfattn'
    """
    return [*optimisation_flags(), *(f"-D{definition}" for definition in definitions())]


if __name__ == "__main__":
    _LISTS: dict[str, Callable[..., list[str]]] = {
        "library": library_sources,
        "library-with-cuda": lambda folder="": library_sources(True, folder),
        "definitions": definitions,
        "version": lambda: [version()],
    }
    question, *folder = sys.argv[1:] or [""]
    if question not in _LISTS or len(folder) > (question == "library-with-cuda"):
        sys.exit(
            f"usage: python {sys.argv[0]} {{{','.join(_LISTS)}}} [folder of library-with-cuda's instances]"
        )
    print("\n".join(_LISTS[question](*folder)))
