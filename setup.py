"""Builds selfattn_ext._C; pyproject.toml has the metadata, selfattn_ext/build/sources.py the sources.

``python setup.py build_ext --inplace`` rebuilds what has changed in a checkout.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import runpy
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

try:
    if "dist_info" in sys.argv:  # pip asks for the metadata first; torch takes two seconds to import
        raise ImportError
    import torch
    from torch.utils import cpp_extension
    from torch.utils.cpp_extension import BuildExtension
except ImportError:  # metadata and sdist need no torch; building says what is missing
    from setuptools.command.build_ext import build_ext as BuildExtension

    TORCH_FOUND = False
else:
    TORCH_FOUND = True

ROOT = Path(__file__).resolve().parent

# They are loaded by path, because importing the package would load the library that is about to be built.
sources, toolchain, cuda_build, ninja_build, terminal = (
    SimpleNamespace(**runpy.run_path(str(ROOT / "selfattn_ext" / f"{name}.py")))
    for name in ("build/sources", "build/toolchain", "build/cuda_build", "build/ninja_build", "terminal")
)

#: Where the explicit instantiations of CUDA kernels are written.
INSTANCES = ROOT / "build" / "instances"


def relative(paths: list[str]) -> list[str]:
    return [os.path.relpath(path, ROOT) for path in paths]


def extension(plan) -> Extension:
    """The library, with CUDA kernels or without, as the plan says."""
    make = cpp_extension.CUDAExtension if plan.cuda else cpp_extension.CppExtension
    return make(
        "selfattn_ext._C",
        relative(sources.extension_sources(plan.cuda, INSTANCES)),
        depends=relative(sources.headers()),
        extra_compile_args={
            "cxx": [*sources.compile_flags(), *cuda_build.definitions(plan)],
            "nvcc": [*sources.cuda_flags(), *cuda_build.architecture_flags(plan.architectures)],
        },
        language="c++",
    )


def begin(plan, files: int):
    """Says how much work there is, and returns a progress bar."""
    share = files / len(sources.extension_sources(plan.cuda, INSTANCES))
    work = ninja_build.estimate(files, share * cuda_build.processor_seconds(plan))
    if not terminal.is_quiet():
        print(f"selfattn_ext: compiling {work}", flush=True)
    return terminal.Progress("selfattn_ext: compiled", files, log_lines=20)


class BuildLibrary(BuildExtension):
    """torch's build_ext, which first looks for its tools and keeps its object files.

    ``--pythons`` also makes the library for other Pythons, of which it needs the headers alone: only the
    sources in csrc/python see Python, and all other object files are the same.
    """

    user_options = [  # noqa: RUF012
        *BuildExtension.user_options,
        ("pythons=", None, "other Pythons, as JSON: the folders of headers by the suffix of modules"),
    ]

    def initialize_options(self) -> None:
        super().initialize_options()
        self.pythons = "{}"

    def finalize_options(self) -> None:
        super().finalize_options()
        if self.editable_mode:
            # setuptools gives editable builds a temporary folder, where every reinstall compiles everything.
            build = self.get_finalized_command("build")
            self.build_temp = os.path.join(
                build.build_base, f"temp.{build.plat_name}-{sys.implementation.cache_tag}"
            )

    def run(self) -> None:
        if not TORCH_FOUND:
            raise SystemExit("selfattn_ext needs PyTorch to build: pip install 'torch>=2.11'")
        problem = toolchain.compiler_problem()
        if problem is not None:
            raise SystemExit(problem)
        with toolchain.environment():
            try:
                plan = cuda_build.plan_for(torch)
            except ValueError as error:
                raise SystemExit(f"selfattn_ext: {error}") from None
            print(f"selfattn_ext: {plan.explanation}", flush=True)
            shown = ninja_build.shown(cpp_extension, functools.partial(begin, plan), echo=True)
            with cuda_build.environment(plan, cpp_extension), shown:
                # Only a build needs to look for nvcc, so the declaration below has no CUDA sources.
                vars(self.extensions[0]).update(vars(extension(plan)))
                try:
                    super().run()
                except RuntimeError as error:
                    raise SystemExit(f"selfattn_ext: {error}") from None

    def build_extension(self, ext: Extension) -> None:
        super().build_extension(ext)
        for suffix, headers in json.loads(self.pythons).items():
            self._build_for_another(ext, suffix, headers)

    def _build_for_another(self, ext: Extension, suffix: str, headers: list[str]) -> None:
        """Builds the library, which has been built for this Python, for one with such modules and headers."""
        sees_python = {source: sources.PYTHON_FOLDER in Path(source).parts for source in ext.sources}
        other, objects, compiler = copy.copy(ext), self.build_temp, self.compiler
        other.sources = [source for source, sees in sees_python.items() if sees]
        shared = [source for source, sees in sees_python.items() if not sees]
        other.extra_objects = compiler.object_filenames(shared, output_dir=objects)
        with (
            mock.patch.object(self, "build_temp", os.path.join(objects, suffix.strip("."))),
            mock.patch.object(compiler, "include_dirs", headers),
            mock.patch.dict(os.environ, SETUPTOOLS_EXT_SUFFIX=suffix),  # setuptools reads it
        ):
            super().build_extension(other)


class BuildPackage(build_py):
    """A build_py that copies csrc into the package, so that an installed package can compile itself again."""

    def run(self) -> None:
        target = Path(self.build_lib) / "selfattn_ext"
        if not self.editable_mode:
            # Files of an earlier build that the checkout no longer has must not get into the wheel.
            shutil.rmtree(target, ignore_errors=True)
        super().run()
        if not self.editable_mode:
            shutil.copytree(sources.root(), target / "csrc", ignore=shutil.ignore_patterns(".*", "*~"))


setup(
    version=sources.version(),
    ext_modules=[Extension("selfattn_ext._C", relative(sources.extension_sources()))],
    cmdclass={"build_ext": BuildLibrary, "build_py": BuildPackage},
)
