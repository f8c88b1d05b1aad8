"""The folder of compiled functions: shared by processes, damaged, deleted, without a compiler."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import warm
from functions import flex_attention

from selfattn_ext.flex import compiler, cuda_compiler, function_cache, nvrtc
from selfattn_ext.flex.cuda_source import Headers

#: Forks stand for processes that have nothing loaded: a new process takes longer to start than to attend.
SCRIPT = """
import os, pathlib, shutil, tempfile, torch, torch._dynamo
from selfattn_ext import flex

base = tempfile.tempdir = os.getcwd()  # os._exit is quick, but deletes no temporary files
flex.kernel_calls.warn = lambda reason: os._exit(7)  # otherwise torch would now compute for seconds
query = torch.ones(1, 1, 4, 8)
functions = {1: lambda s, b, h, q, kv: s * 2 + kv, -1: lambda s, b, h, q, kv: s * 2 - kv}
def attend(folder, copies=1, sign=1, **variables):
    processes = []
    for _ in range(copies):
        if (process := os.fork()) == 0:
            os.environ.update(variables, SELFATTN_FUNCTION_CACHE=str(folder))
            out = flex.flex_attention(query, query, query, functions[sign])
            os._exit(int(out.sum().item()))
        processes.append(process)
    return [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]

folder = pathlib.Path(base, "functions")
print(attend(folder, copies=2))
(library,) = folder.glob("*.so")
written = library.stat().st_mtime_ns
print(attend(folder), library.stat().st_mtime_ns == written)
(folder / "file").touch()
print(attend(folder / "file" / "below"))
print(attend(folder, CXX="no_such"), attend(folder, CXX="no_such", sign=-1))

# From here on a program that already has the library stands in for the compiler.
whole, copy = library.read_bytes(), pathlib.Path(base, "copy.so")
copy.write_bytes(whole[:-64])
version = os.popen("c++ --version").read()
quick, idle = pathlib.Path(base, "quick"), pathlib.Path(base, "idle")
told = f"#!/bin/sh\\nif [ $1 = --version ]; then cat <<'END'\\n{version}END\\nexit; fi\\n"
quick.write_text(told + f'for last; do :; done; cp "{copy}" "$last"\\n')
idle.write_text(told)
quick.chmod(0o755), idle.chmod(0o755)

middle = len(whole) // 2
for damaged in (whole[:middle], b"", whole[:99] + bytes(len(whole) - 99), whole[:-1], whole + b"\\0"):
    library.unlink()
    library.write_bytes(damaged)
    print(attend(folder, CXX="no_such"), attend(folder, CXX=str(idle)), library.read_bytes() == damaged)
    print(attend(folder, CXX=str(quick)), library.read_bytes() == whole)
(folder / "compiler.txt").write_bytes(b"\\xff\\xfe garbled")
print(attend(folder, CXX="no_such"))

os.chdir(base)
os.environ["SELFATTN_FUNCTION_CACHE"] = "functions"
def attend_here(function):
    print(int(flex.flex_attention(query, query, query, function).sum()))
attend_here(functions[1])
shutil.rmtree(folder)
os.chdir("/")
attend_here(functions[-1])
print(len(list(folder.glob("*.so"))))
"""


def test_processes_share_the_folder(tmp_path: Path) -> None:
    done = warm.python(SCRIPT, tmp_path, os.environ)
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    # Two processes compile at once; one comes later; one has a folder that cannot be written. Two have no
    # compiler: one finds its function in the folder, the other does not.
    assert printed[:4] == ["[32, 32]", "[32] True", "[32]", "[32] [7]"]
    # Damaged files are replaced. If they cannot be, without a compiler or by an idle one, torch computes.
    assert printed[4:-3] == [*(["[7] [7] True", "[32] True"] * 5), "[7]"]
    # The folder is deleted while a process runs, whose path is relative and which has changed its directory.
    assert printed[-3:] == ["32", "32", "1"]


def test_code_of_cuda_is_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty cubin counts as complete: NVRTC makes none for devices that it does not know."""
    codes: Iterator[nvrtc.Code] = iter([nvrtc.Code(b"", b"first"), nvrtc.Code(b"", b"second")])
    monkeypatch.setenv("SELFATTN_FUNCTION_CACHE", str(tmp_path))
    monkeypatch.setattr(nvrtc, "compile_kernel", lambda *_: next(codes))

    def code() -> list[bytes]:
        return cuda_compiler._code_of(Headers("", ""), "key", "kernel<float>", 90)

    assert code() == code() == [b"first"]
    (file,) = tmp_path.glob("*.ptx")
    file.write_bytes(file.read_bytes()[:-1])
    assert code() == code() == [b"second"]
    assert {file.suffix for file in tmp_path.iterdir()} == {".cubin", ".ptx"}


class TestFolder:
    @pytest.fixture(autouse=True)
    def nothing_is_set(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.chdir(tmp_path)
        for variable in ("SELFATTN_FUNCTION_CACHE", "XDG_CACHE_HOME"):
            monkeypatch.delenv(variable, raising=False)
        function_cache._absolute.cache_clear()

    @pytest.mark.parametrize(
        ("variables", "expected"),
        [
            ({"SELFATTN_FUNCTION_CACHE": "here"}, "here"),
            ({"SELFATTN_FUNCTION_CACHE": "~/here", "HOME": "{}/home"}, "home/here"),
            ({"XDG_CACHE_HOME": "{}/xdg", "HOME": "{}/home"}, "xdg/selfattn_ext"),
            ({"XDG_CACHE_HOME": "xdg", "HOME": "{}/home"}, "home/.cache/selfattn_ext"),
            ({"HOME": "{}/home"}, "home/.cache/selfattn_ext"),
        ],
    )
    def test_is_that_of_the_variables(
        self, variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value.format(tmp_path))
        assert function_cache.write("name", b"content") == tmp_path / expected / "name"
        assert function_cache.find("name") == tmp_path / expected / "name"
        assert function_cache.read("name") == b"content"

    @pytest.mark.parametrize("variable", [{}, {"SELFATTN_FUNCTION_CACHE": "~/here"}])
    def test_without_a_home(
        self, variable: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """In some containers the user is only a number and has no home."""
        monkeypatch.delenv("HOME", raising=False)
        monkeypatch.setattr("os.getuid", lambda: 987654)
        for name, value in variable.items():
            monkeypatch.setenv(name, value)
        function_cache.write("name", b"content")
        assert function_cache.read("name") == b"content"
        assert list(tmp_path.iterdir()) == []

    def test_content_belongs_to_its_name(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("SELFATTN_FUNCTION_CACHE", str(tmp_path))
        function_cache.write("name", b"content").rename(tmp_path / "another")
        assert function_cache.read("name") is None
        assert function_cache.find("another") is None


def test_constants_are_no_reason_to_compile_again(monkeypatch: pytest.MonkeyPatch) -> None:
    query = torch.randn(1, 1, 4, 8)
    sources = set()
    original = compiler.load

    def load(source: str) -> str:
        sources.add(source)
        return original(source)

    monkeypatch.setattr(compiler, "load", load)
    outs = [
        flex_attention(query, query, query, lambda s, b, h, q, kv, c=c: s * c + (q - 3)) for c in (0.5, 2.25)
    ]
    assert len(sources) == 1
    assert not torch.equal(*outs)


def test_what_the_compiler_says_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfattn_ext.build.toolchain.compiler", lambda: ["g++", "-no-such-flag"])
    with pytest.raises(compiler.CompilerError, match="no-such-flag"):
        compiler._compiled("int x;")
