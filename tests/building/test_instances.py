"""The explicit instantiations of CUDA kernels, written from the table in build/sources.py."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from selfattn_ext.build import cuda_build, sources, toolchain

#: The form of an instance in a compiler's list of symbols.
SYMBOL = re.compile(r"selfattn::cuda::([\w:]+)::(\w+)<\(selfattn::DType\)(\d)((?:, \d+)*)>\(")
DTYPES = ("Float64", "Float32", "BFloat16", "Float16")


def instances_called(folder: Path) -> set[tuple[str, ...]]:
    """Returns the undefined instances of csrc/cuda's C++ files: namespace, template and arguments."""
    compiler, nvcc = toolchain.compiler(), cuda_build.find_nvcc()
    assert compiler is not None
    assert nvcc is not None
    headers = [f"-I{sources.root()}", "-isystem", f"{nvcc.home}/include"]
    flags = ["-std=c++17", "-O0", "-DSELFATTN_CUDA_HOPPER", *headers]
    found = set()
    for number, source in enumerate(sorted((sources.root() / "cuda").rglob("*.cpp"))):
        made = folder / f"{number}.o"
        subprocess.run([*compiler, *flags, "-c", str(source), "-o", str(made)], check=True)
        listed = subprocess.run(["nm", "-uC", made], capture_output=True, text=True, check=True).stdout
        for namespace, template, dtype, dims in SYMBOL.findall(listed):
            found.add((namespace, template, f"DType::k{DTYPES[int(dtype)]}{dims}"))
    return found


@pytest.mark.skipif(cuda_build.find_nvcc() is None, reason="no headers of CUDA on this machine")
def test_the_table_has_what_the_dispatchers_call(tmp_path):
    written = set()
    for path in sources.write_instances(tmp_path / "instances"):
        text = Path(path).read_text()
        (namespace,) = re.findall(r"^namespace selfattn::cuda::([\w:]+) \{$", text, re.M)
        for template, arguments in re.findall(r"\) (\w+)<(.+)>;$", text, re.M):
            assert (namespace, template, arguments) not in written
            written.add((namespace, template, arguments))
    assert written == instances_called(tmp_path)


class TestWriting:
    def test_equal_files_stay_untouched(self, tmp_path):
        first, second, *_ = map(Path, sources.write_instances(tmp_path))
        before = second.stat()
        first.write_text("// another text")
        assert str(first) in sources.write_instances(tmp_path)
        assert first.read_text() != "// another text"
        assert (second.stat().st_mtime_ns, second.stat().st_ino) == (before.st_mtime_ns, before.st_ino)

    def test_processes_at_once(self, tmp_path):
        command = [sys.executable, sources.__file__, "library-with-cuda", str(tmp_path)]
        running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
        told = {process.communicate()[0] for process in running}
        assert [process.returncode for process in running] == [0] * 4
        (listed,) = told
        assert set(sources.write_instances(tmp_path)) <= set(listed.split("\n"))
        assert {path.suffix for path in tmp_path.rglob("*") if path.is_file()} == {".cu"}

    def test_they_include_the_headers_by_absolute_paths(self, tmp_path):
        for path in sources.write_instances(tmp_path):
            headers = re.findall(r'^#include "(.+)"$', Path(path).read_text(), re.M)
            assert headers
            assert all(Path(header).is_absolute() and Path(header).is_file() for header in headers)


class TestFolder:
    """extension_sources(cuda=True) without a folder, as torch's own loader needs it."""

    def test_is_in_the_cache_of_extensions(self, tmp_path, monkeypatch):
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
        written = {path for path in sources.extension_sources(True) if Path(path).is_relative_to(tmp_path)}
        assert len(written) == len(sources.write_instances(tmp_path / "elsewhere"))
        (folder,) = tmp_path.glob("selfattn_ext_instances_*")
        assert written == set(sources.write_instances(folder))

    def test_without_the_variable(self, tmp_path, monkeypatch):
        monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setenv("HOME", str(tmp_path))
        cache = tmp_path / ".cache" / "torch_extensions"
        written = [path for path in sources.extension_sources(True) if Path(path).is_relative_to(cache)]
        assert len(written) == len(sources.write_instances(tmp_path / "elsewhere"))
