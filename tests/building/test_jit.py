"""The C++ sources compiled at run time, by ``jit.load`` and by torch's own loader."""

import os
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
import turns

from selfattn_ext.build import jit, library, sources, toolchain


def check_against_installed(module, name):
    """Asserts that a run-time build's operators have their own namespace and the installed ones' results."""
    assert module.op_namespace == name
    assert module.ops is getattr(torch.ops, name)
    assert module.ops is not library.ops()
    assert module.build_info()["version"] == sources.version()
    query, key, value = (torch.randn(2, 3, 9, 8) for _ in range(3))

    def results(ops):
        out, row_max, row_sum, *_ = ops.attention_forward(query, key, value, 0.3, is_causal=True)
        grad = torch.ones_like(out)
        backward = ops.attention_backward
        return out, row_max, *backward(grad, query, key, value, out, row_max, row_sum, 0.3, is_causal=True)

    for got, want in zip(results(module.ops), results(library.ops()), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.another_build
# torch's own loader compiles without flags, so it shares no object file with other builds of .ci/run.
@pytest.mark.parametrize(
    "loader", dict.fromkeys(turns.chosen(["jit.load", "jit.load", "jit.load", "torch's own"]))
)
def test_load(loader, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("MAX_JOBS", str(os.cpu_count()))
    if loader == "jit.load":
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
        module = jit.load("selfattn_jit_test")
        assert jit.load("selfattn_jit_test") is module
        assert list(tmp_path.glob("*/selfattn_jit_test/*.so"))
        assert module.build_info()["optimized"]
        told = [line for line in capfd.readouterr().err.splitlines() if line.startswith("selfattn_ext")]
        assert re.match(r"selfattn_ext: compiling \d+ files on \d+ processors?, about \d+ minutes?$", told[0])
        assert len(told) == 1 + 20
        check_against_installed(module, "selfattn_jit_test")
        with pytest.raises(ValueError, match=r"torch\.ops\.selfattn_jit_test holds a loaded library already"):
            jit.load("selfattn_jit_test", extra_cflags=["-DNDEBUG"])
    else:
        from torch.utils import cpp_extension

        with toolchain.environment():
            module = cpp_extension.load(
                name="plain_test", sources=sources.extension_sources(), build_directory=str(tmp_path)
            )
        check_against_installed(module, "plain_test")


class TestArguments:
    @pytest.mark.parametrize("name", ["", "my-attention", "1st", "a.b", "two words", None])
    def test_name_is_no_identifier(self, name):
        with pytest.raises(ValueError, match="name must be an identifier"):
            jit.load(name)

    def test_name_is_taken(self):
        with pytest.raises(ValueError, match=r"torch\.ops\.selfattn holds a loaded library already"):
            jit.load("selfattn")

    def test_no_compiler(self, monkeypatch):
        monkeypatch.setenv("CXX", "/nowhere/g++")
        with pytest.raises(ImportError, match=r"needs a C\+\+17 compiler, and CXX=/nowhere/g\+\+ is not"):
            jit.load("never_built")

    def test_no_home(self, tmp_path, monkeypatch):
        """Without the check, torch would make a folder named ~ in the working directory."""
        monkeypatch.chdir(tmp_path)
        for variable in ("HOME", "TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME"):
            monkeypatch.delenv(variable, raising=False)
        monkeypatch.setattr("os.getuid", lambda: 987654)
        monkeypatch.setattr("torch.utils.cpp_extension.load", lambda *arguments, **options: "module")
        with pytest.raises(ImportError, match=r"no home folder .* TORCH_EXTENSIONS_DIR"):
            jit.load("never_built")
        assert list(tmp_path.iterdir()) == []

    def test_lock_of_a_killed_process(self, tmp_path, monkeypatch):
        """torch would wait for ever for the process that made this file."""
        from torch.utils import cpp_extension

        def load(*arguments, **options):
            assert not (tmp_path / "lock").exists()
            return "module"

        (tmp_path / "lock").touch()
        monkeypatch.setattr(cpp_extension, "load", load)
        assert jit.load("another_process_began_it", build_directory=tmp_path) == "module"


class TestSources:
    def test_names_of_objects_are_unique(self, tmp_path):
        # torch's loader names object files by the source's name alone, without its folder.
        names = Counter(Path(source).stem for source in sources.extension_sources(True, tmp_path))
        assert [name for name, count in names.items() if count > 1] == []

    def test_a_build_without_cuda_has_none_of_its_sources(self, tmp_path):
        assert not [source for source in sources.extension_sources() if "cuda" in Path(source).parts[-3:]]
        assert not [source for source in sources.extension_sources() if source.endswith(".cu")]
        only = set(sources.extension_sources(True, tmp_path)) - set(sources.extension_sources())
        assert {Path(source).name for source in only} >= {"engine_cuda.cpp", "device_code.cu"}

    def test_one_list(self, tmp_path):
        for cuda in (False, True):
            extension = set(sources.extension_sources(cuda, tmp_path))
            operators = set(sources.library_sources(cuda, tmp_path))
            assert operators < extension
            assert {Path(source).parent.name for source in extension - operators} == {"python"}
        everything = {str(path) for suffix in ("cpp", "cu") for path in sources.root().rglob(f"*.{suffix}")}
        assert extension == everything | set(sources.write_instances(tmp_path))


class TestToolchain:
    def test_environment_is_put_back(self, monkeypatch):
        monkeypatch.delenv("CXX", raising=False)
        before = os.environ["PATH"]
        with toolchain.environment():
            assert os.environ["CXX"] in {"c++", "g++", "clang++"}
        assert "CXX" not in os.environ
        assert os.environ["PATH"] == before

    def test_ninja_of_an_environment_that_is_not_activated(self, monkeypatch, tmp_path):
        monkeypatch.setenv("PATH", str(tmp_path))
        folder = toolchain.ninja_folder()
        assert folder is not None
        assert (Path(folder) / "ninja").exists()
        with toolchain.environment():
            assert folder in os.environ["PATH"].split(os.pathsep)
