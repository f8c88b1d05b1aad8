"""Compiles the C++ and CUDA sources at run time, by ``torch.utils.cpp_extension.load``.

It is for experiments with the kernels: edit csrc, call :func:`load` in a new process, and the changed kernels
are ``module.ops``, beside those of the installed library. The sources need no special flags, so the plain

    torch.utils.cpp_extension.load(name="my_attention", sources=selfattn_ext.sources.extension_sources())

does the same, without optimising the code between the kernels.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch

from ..terminal import Progress, is_quiet
from . import cuda_build, ninja_build, sources, toolchain

_loaded: dict[tuple[object, ...], ModuleType] = {}
#: A build changes environment variables and torch's own functions, so one thread at a time builds.
_lock = threading.Lock()


def is_registered(namespace: str) -> bool:
    """Whether a loaded library has registered our operators in ``torch.ops.<namespace>``.

    A second library in the same namespace would end the process, so this is asked before one is loaded.
    """
    return hasattr(getattr(torch.ops, namespace), "attention_forward")


def load(
    name: str = "selfattn_jit",
    *,
    extra_cflags: Sequence[str] = (),
    extra_cuda_cflags: Sequence[str] = (),
    build_directory: str | os.PathLike[str] | None = None,
    verbose: bool = False,
) -> ModuleType:
    """Compile the package's sources and load them under a name of their own.

    They include the CUDA kernels if torch has CUDA, there is an nvcc and there is a GPU. SELFATTN_CUDA=0
    leaves the kernels out; SELFATTN_CUDA=1 compiles them also without a GPU.

    The first call takes a few minutes, and shows its progress on stderr, unless SELFATTN_QUIET=1 is set;
    later ones, in other processes, compile only what has changed. A second call in one process returns the
    module of the first.

    Args:
        name: name of the module, and namespace of its operators: ``torch.ops.<name>``.
        extra_cflags: compiler flags after the package's own, for instance ``["-DNDEBUG"]``.
        extra_cuda_cflags: the same for nvcc, for instance ``["-lineinfo"]``.
        build_directory: where object files and library go; by default a folder of this Python, torch and name
            in torch's cache of extensions (``TORCH_EXTENSIONS_DIR``).
        verbose: print the compiler's commands and output.

    Returns:
        The pybind11 module; its ``ops`` are the operators, its ``op_namespace`` is their namespace.

    Raises:
        ValueError: the name is no identifier, its operators are registered already, or environment variables
            ask for CUDA kernels that cannot be built.
        ImportError: there is no compiler, no ninja or no home folder; the message says what to do.
        RuntimeError: the sources do not compile; the message holds the compiler's output.

    Example:
        >>> import torch, selfattn_ext
        >>> module = selfattn_ext.jit.load("my_attention")  # doctest: +SKIP
        >>> query = key = value = torch.randn(2, 8, 128, 64)
        >>> module.ops.attention_forward(query, key, value, 0.125, is_causal=True)[0].shape  # doctest: +SKIP
        torch.Size([2, 8, 128, 64])
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(
            f"name must be an identifier, for a module and its namespace of operators; got {name!r}"
        )
    folder = None if build_directory is None else os.path.abspath(build_directory)
    key = (name, tuple(extra_cflags), tuple(extra_cuda_cflags), folder)
    with _lock:
        if key not in _loaded:
            if is_registered(name):
                raise ValueError(f"torch.ops.{name} holds a loaded library already; choose another name")
            flags = [*sources.optimisation_flags(), *extra_cflags]
            _loaded[key] = compile_and_load(name, flags, extra_cuda_cflags, build_directory, verbose)
        return _loaded[key]


def compile_and_load(
    name: str,
    flags: Sequence[str],
    extra_cuda_cflags: Sequence[str] = (),
    build_directory: str | os.PathLike[str] | None = None,
    verbose: bool = False,
    why: str = "",
) -> ModuleType:
    """``torch.utils.cpp_extension.load`` on the package's sources, after a look at the tools it needs.

    ``why`` is printed in a line of its own before anything is compiled.

    Raises:
        ImportError: there is no compiler, no ninja or no home folder; the message says what to do.
        RuntimeError: the sources do not compile.
        ValueError: environment variables ask for CUDA kernels that cannot be built.
    """
    problem = toolchain.compiler_problem()
    if problem is None and toolchain.ninja_folder() is None:
        problem = "selfattn_ext needs ninja to compile its sources: pip install ninja"
    if problem is not None:
        raise ImportError(problem)

    # Imported late: it brings in setuptools, which takes longer than the rest of the package.
    from torch.utils import cpp_extension

    with toolchain.environment(), contextlib.ExitStack() as stack:
        plan = cuda_build.plan_for(torch, at_run_time=True)
        stack.enter_context(cuda_build.environment(plan, cpp_extension))
        if build_directory is None:
            root = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
            if "~" in Path(root).parts:
                raise ImportError(
                    "there is no home folder to keep what is compiled: name a folder in TORCH_EXTENSIONS_DIR"
                )
            # Each Python needs a module of its own, and each torch a folder: in a shared one it would compile
            # everything again.
            build_directory = Path(root) / f"{sys.implementation.cache_tag}_torch{torch.__version__}" / name
        folder = Path(build_directory)
        folder.mkdir(parents=True, exist_ok=True)
        kept_open = stack.enter_context(ninja_build.alone_in(folder))
        files = sources.extension_sources(plan.cuda, folder / "instances")
        if not verbose:
            begin = functools.partial(_begin, plan, why, len(files) + 1)  # the library is a file, too
            stack.enter_context(ninja_build.shown(cpp_extension, begin, kept_open=kept_open))
        library = folder / f"{name}.so"
        ninja_build.remove_damaged(library)
        try:
            module = cpp_extension.load(
                name,
                files,
                extra_cflags=[*flags, *cuda_build.definitions(plan)],
                extra_cuda_cflags=[
                    *sources.cuda_flags(),
                    *cuda_build.architecture_flags(plan.architectures),
                    *extra_cuda_cflags,
                ],
                build_directory=str(folder),
                verbose=verbose,
            )
        except BaseException:
            # torch remembers a failed build as done, so a second attempt would look for the missing library.
            cpp_extension.JIT_EXTENSION_VERSIONER.entries.pop(name, None)
            raise
        ninja_build.seal(library)
        return module


def _begin(plan: cuda_build.Plan, why: str, of: int, files: int) -> Progress:
    work = ninja_build.estimate(files, files / of * cuda_build.processor_seconds(plan))
    lines = [f"selfattn_ext: {why}"] if why else []
    lines.append(f"selfattn_ext: compiling {work}")
    if not is_quiet():
        print("\n".join(lines), file=sys.stderr, flush=True)
    return Progress("selfattn_ext: compiled", files, log_lines=20)
