"""Finds and loads the compiled library.

Importing ``selfattn_ext._C`` registers the operators with torch; the rest of the package calls ``ops()`` and
``extension()``. A checkout that was installed by "pip install ." has no library of its own, and takes the
installed one as long as the sources are the same. A checkout that was never installed is compiled when it is
imported, through torch's cache of extensions. SELFATTN_LIBRARY names another file, for builds with sanitizers
or, in the tests, with the CUDA kernels on the CPU.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.machinery
import importlib.util
import os
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from . import jit, sources

_PACKAGE = Path(__file__).parents[1]
_MODULE = f"{sources.PACKAGE}._C"
_VARIABLE = "SELFATTN_LIBRARY"


def ops() -> Any:
    """The operators, ``torch.ops.selfattn``; loads the library on first use.

    Raises:
        ImportError: see :func:`extension`.
    """
    extension()
    return getattr(torch.ops, sources.NAMESPACE)


@functools.cache
def extension() -> ModuleType:
    """The pybind11 module ``_C``: build info, CPU features, kernel table; loads the library on first use.

    Raises:
        ImportError: torch is too old, the library does not load, or there is none and it cannot be compiled
            here. The message says what to do.
    """
    if not sources.supports(torch.__version__):
        wanted = ".".join(map(str, sources.MINIMUM_TORCH))
        raise ImportError(
            f"selfattn_ext needs torch {wanted} or newer, and this is {torch.__version__}: "
            f"pip install --upgrade 'torch>={wanted}'"
        )
    file = os.environ.get(_VARIABLE) or _beside() or _of_the_same_sources()
    if jit.is_registered(sources.NAMESPACE) and not (file is not None and _is_open(file)):
        # A second registration would end the process without a message.
        raise ImportError(
            f"another library has registered torch.ops.{sources.NAMESPACE} in this process; "
            "load that one under another name (-DSELFATTN_NAMESPACE=...)"
        )
    return _compile() if file is None else _import(file)


def _beside() -> str | None:
    return _in_package(_PACKAGE)


def _in_package(package: Path) -> str | None:
    # Only this folder is searched, because an editable install would offer the library of another checkout.
    spec = importlib.machinery.PathFinder.find_spec(_MODULE, [str(package)])
    return None if spec is None else spec.origin


def _of_the_same_sources() -> str | None:
    """The library that "pip install ." made from this checkout, for programs that run in the checkout."""
    return next((file for package, file in _installed() if sources.same_as_in(package)), None)


def _installed() -> Iterator[tuple[Path, str]]:
    """Other packages on the path that hold their sources and a library, as pip installs them."""
    for folder in map(Path, sys.path):
        package = folder / sources.PACKAGE
        if (package / "csrc").is_dir() and package.resolve() != _PACKAGE.resolve():
            file = _in_package(package)
            if file is not None:
                yield package, file


def _import(file: str) -> ModuleType:
    try:
        module = importlib.import_module(_MODULE) if file == _beside() else _module_in(file)
    except ImportError as error:
        raise ImportError(
            f"{file} does not load under torch {torch.__version__} ({error}); "
            "install selfattn_ext again, with --force-reinstall --no-deps"
        ) from error
    built = module.build_info()["version"]
    if built != sources.version():
        raise ImportError(
            f"{file} is of version {built} and the Python files beside it are of {sources.version()}; "
            "install selfattn_ext again, with --force-reinstall --no-deps"
        )
    return module


def _module_in(file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(_MODULE, file)
    if spec is None or spec.loader is None:
        raise ImportError("it is no compiled module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compile() -> ModuleType:
    nothing = "selfattn_ext has no compiled library here"
    try:
        folder = sources.root()
    except FileNotFoundError as error:
        raise ImportError(f"{nothing}, and {error}: install it again") from error
    why = f"no compiled library for this Python in {_PACKAGE}"
    for package, _ in _installed():
        why += f", and the sources of {package} differ"
    why += "; pip install -e . in the checkout makes one ahead of time"
    # torch's cache goes by name, so each checkout needs a name of its own.
    name = f"selfattn_ext_{zlib.crc32(os.fsencode(folder)):08x}"
    try:
        return jit.compile_and_load(name, sources.compile_flags(), why=why)
    except (ImportError, ValueError) as error:
        raise ImportError(f"{nothing}, and none can be made: {error}") from error
    except RuntimeError as error:
        raise ImportError(f"{nothing}, and its sources do not compile: {error}") from error


def _is_open(file: str) -> bool:
    """Whether the dynamic loader holds this file already, so that loading it runs no initialiser again."""
    try:
        ctypes.CDLL(file, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return False
    return True
