"""The compiled library: what it tells about itself, how it is found, and errors if it is not."""

import os
import re
import shutil
import textwrap
from pathlib import Path

import pytest
import torch
import warm

from selfattn_ext import build, terminal
from selfattn_ext.build import cuda_build, jit, library, ninja_build, sources, toolchain

PACKAGE = Path(library.__file__).parents[1]

# A small library, so that tests of building and loading need not compile the real one.
SMALL_LIBRARY = """
#include <pybind11/pybind11.h>
#include "../version.h"
#define STRING_OF(token) #token
#define STRING(token) STRING_OF(token)
PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("build_info", [] {
    pybind11::dict info;
    info["version"] = SELFATTN_VERSION;
    return info;
  });
  module.attr("op_namespace") = STRING(SELFATTN_NAMESPACE);
}
"""


@pytest.fixture(scope="module")
def small_checkout(tmp_path_factory):
    """Makes a checkout that was never installed, with our Python files and a library that compiles fast."""
    folder = tmp_path_factory.mktemp("checkout")
    (folder / "selfattn_ext" / "build").mkdir(parents=True)
    (folder / "selfattn_ext" / "__init__.py").touch()
    for module in (build, cuda_build, jit, library, ninja_build, sources, toolchain):
        shutil.copy(module.__file__, folder / "selfattn_ext" / "build")
    shutil.copy(terminal.__file__, folder / "selfattn_ext")
    (folder / "csrc" / "python").mkdir(parents=True)
    shutil.copy(sources.root() / "version.h", folder / "csrc")
    (folder / "csrc" / "python" / "module.cpp").write_text(SMALL_LIBRARY)
    return folder


def python(folder, code, **environment):
    """Runs code in a new process in a folder, which also holds its own cache of extensions."""
    variables = {
        **os.environ,
        "TORCH_EXTENSIONS_DIR": str(folder / "cache"),
        "PYTHONPATH": str(folder),
        **environment,
    }
    return warm.python(
        f"import warnings\nwarnings.simplefilter('ignore')\n{textwrap.dedent(code)}", folder, variables
    )


class TestIntrospection:
    def test_build_info(self):
        info = library.extension().build_info()
        assert info["version"] == sources.version()
        assert info["torch_minimum"] == ".".join(map(str, sources.MINIMUM_TORCH))
        assert info["optimized"] is True
        assert info["cuda"] is (info["cuda_compiler"] is not None) is (info["cuda_architectures"] is not None)
        assert info["cuda_absent"] in cuda_build.ABSENT
        assert info["cuda_absent"] == "" or not info["cuda"]
        assert info["cxx_standard"] >= 201703
        assert info["compiler"].partition(" ")[0] in {"gcc", "clang"}
        assert sources.supports(info["torch"])

    def test_operators(self):
        extension = library.extension()
        assert extension.op_namespace == sources.NAMESPACE
        assert extension.ops is library.ops() is torch.ops.selfattn
        assert callable(extension.ops.attention_forward)

    def test_cpu_features(self):
        features = library.extension().cpu_features()
        assert features.pop("architecture") in {"x86-64", "arm64", "other"}
        assert {type(present) for present in features.values()} == {bool}
        flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
        for name in ("avx2", "avx512f", "avx512bw"):
            if flags and features[name]:
                assert f" {name} " in flags

    def test_kernel_table(self):
        table = library.extension().kernel_table()
        assert [row["priority"] for row in table] == list(range(len(table)))
        assert all(row["dtypes"] == ("float64", "float32", "bfloat16", "float16") for row in table)
        # A call takes the table's first kernel that is automatic and available.
        best = next(row for row in table if row["automatic"] and row["available"])
        assert library.extension().choose_kernel() == best
        assert library.extension().choose_kernel("loops")["name"] == "loops"

    def test_forcing_an_instruction_set(self):
        extension = library.extension()
        before = extension.cpu_isa()
        try:
            for row in extension.kernel_table():
                if row["automatic"] and row["available"]:
                    extension.set_cpu_isa(row["isa"])
                    assert extension.cpu_isa() == row["isa"]
                    assert extension.choose_kernel() == row
        finally:
            extension.set_cpu_isa(before)

    def test_unknown_names(self):
        extension = library.extension()
        before = extension.cpu_isa()
        best = next(row["isa"] for row in extension.kernel_table() if row["automatic"])
        with pytest.raises(ValueError, match=rf"sse9.*{best}"):
            extension.set_cpu_isa("sse9")
        assert extension.cpu_isa() == before
        with pytest.raises(ValueError, match=r"fused.*loops.*magic"):
            extension.choose_kernel("magic")


class TestSupportedTorch:
    @pytest.mark.parametrize(
        "version", ["2.11.0", "2.13.0+cpu", "2.14.1", "2.15.0.dev20261101", "3.0.0a0+git1234567"]
    )
    def test_supported(self, version):
        assert sources.supports(version)

    @pytest.mark.parametrize("version", ["2.10.2+cu128", "2.2.0", "1.13.1", "unknown"])
    def test_not_supported(self, version):
        assert not sources.supports(version)


def test_the_library_uses_no_streams():
    """Some compilers link a C++ library of their own into this one. Beside torch's, its streams write numbers
    wrongly or crash, so that a refusal would end the process (seen on a machine with a GPU).
    """
    csrc = Path(__file__).resolve().parents[2] / "csrc"
    files = [path for path in csrc.rglob("*") if path.suffix in (".h", ".cpp", ".cu", ".cuh")]
    streams = re.compile(r"#include <(\w*stream|iomanip|locale)>")
    assert len(files) > 100
    assert [path.name for path in files if streams.search(path.read_text(encoding="utf-8"))] == []


class TestCheckoutWithoutLibrary:
    @pytest.mark.another_build
    def test_compiles_and_says_so(self, small_checkout):
        code = """
            from selfattn_ext.build import library
            extension = library.extension()
            assert extension is library.extension()
            print(extension.op_namespace, extension.build_info()["version"])
        """
        done = python(small_checkout, code)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == ["selfattn", sources.version()]
        # torch may print lines of its own, for instance about a CUDA toolkit without a GPU.
        why, what, *progress = (line for line in done.stderr.splitlines() if line.startswith("selfattn_ext"))
        assert why.startswith(f"selfattn_ext: no compiled library for this Python in {small_checkout}")
        assert why.endswith("; pip install -e . in the checkout makes one ahead of time")
        assert re.fullmatch(r"selfattn_ext: compiling 2 files on \d+ processors?, about \d+ minutes?", what)
        assert re.fullmatch(r"selfattn_ext: compiled 1/2(  [\d:]+ left)?  module\.cpp", progress[0])
        assert re.fullmatch(r"selfattn_ext: compiled 2/2  in [\d:]+", "\n".join(progress[1:]))  # linking
        # The second process finds the first one's library, and links a damaged one again. It does not wait
        # for a killed process, which leaves torch's lock behind.
        (compiled,) = (small_checkout / "cache").rglob("*.so")
        before = compiled.stat().st_mtime_ns
        (compiled.parent / "lock").touch()
        done = python(small_checkout, code)
        assert (done.returncode, done.stderr.count("selfattn_ext")) == (0, 0), done.stderr
        assert compiled.stat().st_mtime_ns == before
        compiled.write_bytes(compiled.read_bytes()[: compiled.stat().st_size // 2])
        done = python(small_checkout, code)
        assert done.returncode == 0, done.stderr
        assert "selfattn_ext: compiling 1 file on" in done.stderr

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ("sources.root().joinpath('version.h').unlink()", "sources of selfattn_ext are neither in"),
            ("sources.root().joinpath('python/module.cpp').write_text('!')", "sources do not compile"),
        ],
    )
    def test_cannot_compile(self, small_checkout, tmp_path, change, message):
        shutil.copytree(small_checkout, tmp_path / "copy", ignore=shutil.ignore_patterns("cache"))
        code = f"""
            import re
            from selfattn_ext.build import library, sources
            {change}
            for attempt in range(2):
                try:
                    library.extension()
                except ImportError as error:
                    assert str(error).startswith("selfattn_ext has no compiled library here"), error
                    assert re.search({message!r}, str(error)), error
                else:
                    raise AssertionError("no ImportError")
        """
        done = python(tmp_path / "copy", code)
        assert done.returncode == 0, done.stderr


class TestCheckoutOfAnInstalledPackage:
    """After "pip install .", the checkout has no library, and the package has one and its sources."""

    @pytest.fixture
    def installed(self, small_checkout, tmp_path):
        package = tmp_path / "site" / "selfattn_ext"
        shutil.copytree(small_checkout / "selfattn_ext", package)
        shutil.copytree(small_checkout / "csrc", package / "csrc")
        # This file stands in for the compiled module, because Python finds it by the same name.
        (package / "_C.py").write_text(
            f'def build_info():\n    return {{"version": "{sources.version()}"}}\n'
        )
        return package

    @staticmethod
    def run(small_checkout, installed, code, **environment):
        path = os.pathsep.join([str(small_checkout), str(installed.parent)])
        return python(small_checkout, code, PYTHONPATH=path, **environment)

    def test_takes_its_library(self, small_checkout, installed):
        code = """
            from selfattn_ext.build import library
            print(library.__file__, library.extension().__file__)
        """
        done = self.run(small_checkout, installed, code, CXX="/nowhere/g++")
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == [
            str(small_checkout / "selfattn_ext" / "build" / "library.py"),
            str(installed / "_C.py"),
        ]

    @pytest.mark.parametrize("changed", ["csrc/python/module.cpp", "csrc/more.h", "build/sources.py"])
    def test_unless_the_sources_differ(self, small_checkout, installed, changed):
        with (installed / changed).open("a") as file:
            file.write("\n")
        code = """
            from selfattn_ext.build import jit, library
            def compile_and_load(name, flags, why):
                print(why)
                raise ValueError
            jit.compile_and_load = compile_and_load
            library.extension()
        """
        done = self.run(small_checkout, installed, code)
        assert done.returncode == 1
        assert f"in {small_checkout / 'selfattn_ext'}, and the sources of {installed} differ" in done.stdout


class TestLoading:
    def test_namespace_taken_by_another_library(self):
        # The check must come first, because a second registration in C++ would abort the process.
        code = """
            import torch
            other = torch.library.Library("selfattn", "DEF")
            other.define("attention_forward(Tensor query) -> Tensor")
            import selfattn_ext
        """
        done = python(PACKAGE.parent, code)
        assert done.returncode == 1
        assert "ImportError: another library has registered torch.ops.selfattn" in done.stderr

    def test_loading_again_is_harmless(self):
        code = """
            import sys
            from selfattn_ext.build import library
            first = library.extension()
            del sys.modules["selfattn_ext._C"]
            assert library.extension.__wrapped__().op_namespace == first.op_namespace
        """
        done = python(PACKAGE.parent, code)
        assert done.returncode == 0, done.stderr
