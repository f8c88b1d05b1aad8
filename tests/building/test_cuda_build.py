"""The plan of a build: whether it gets CUDA kernels and for which GPUs, with and without nvcc."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from selfattn_ext import info
from selfattn_ext.arguments import AttentionCall, AttentionOptions, call_checks
from selfattn_ext.build import cuda_build, library, toolchain

TORCH = "2.14.1+cu130"

# A stand-in for nvcc that answers a build's questions; ``compiles`` is what it does to compile.
NVCC = """#!/bin/sh
case "$*" in
  *--version*) echo "Cuda compilation tools, release {version}, V{version}.88" ;;
  *--dryrun*) echo "#$ _HERE_=ignored" >&2; echo "#$ TOP={home}/bin/.." >&2 ;;
  *--list-gpu-arch*) printf 'compute_%s\\n' {architectures} ;;
  *) {compiles} ;;
esac
"""


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SELFATTN_CUDA", "TORCH_CUDA_ARCH_LIST", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Makes an nvcc in a toolkit of its own, to which CUDA_HOME points."""

    def make(version: str = "13.0", known: str = "75 80 86 90 100 120 121", compiles: str = "true") -> Path:
        home = tmp_path / f"cuda {version}"  # folders may hold spaces
        (home / "bin").mkdir(parents=True, exist_ok=True)
        program = home / "bin" / "nvcc"
        program.write_text(
            NVCC.format(version=version, home=home, architectures=known, compiles=compiles), encoding="utf-8"
        )
        program.chmod(0o755)
        monkeypatch.setenv("CUDA_HOME", str(home))
        return home

    return make


class TestNvcc:
    def test_of_cuda_home(self, nvcc: Callable[..., Path]) -> None:
        home = nvcc("12.8")
        found = cuda_build.find_nvcc()
        assert found is not None
        assert (found.home, found.version) == (str(home), (12, 8))
        assert found.architectures == ("7.5", "8.0", "8.6", "9.0", "10.0", "12.0", "12.1")

    def test_script_on_path_tells_where_its_toolkit_is(
        self, nvcc: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        home = nvcc()
        monkeypatch.delenv("CUDA_HOME")
        (tmp_path / "bin").mkdir()
        script = tmp_path / "bin" / "nvcc"
        script.write_text(f'#!/bin/sh\nexec {shlex.quote(f"{home}/bin/nvcc")} "$@"\n', encoding="utf-8")
        script.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
        found = cuda_build.find_nvcc()
        assert found is not None
        assert (found.command, found.home) == (str(script), str(home))

    def test_none_where_cuda_home_has_none(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        # The toolkit that the user names is never replaced by another.
        monkeypatch.setenv("CUDA_HOME", str(tmp_path))
        assert cuda_build.find_nvcc() is None

    def test_torch_is_told_for_the_time_of_the_build(self, nvcc: Callable[..., Path]) -> None:
        home = nvcc()
        plan = cuda_build.plan(TORCH, "13.0", [])
        cpp_extension = SimpleNamespace(CUDA_HOME="/usr/local")
        with cuda_build.environment(plan, cpp_extension):
            assert str(home) == cpp_extension.CUDA_HOME
        assert cpp_extension.CUDA_HOME == "/usr/local"

    def test_host_compiler_is_that_of_the_build(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("NVCC_CCBIN", raising=False)
        with toolchain.environment():
            assert os.environ["NVCC_CCBIN"] == os.environ["CXX"]
        assert "NVCC_CCBIN" not in os.environ


class TestPlan:
    """Each reason for a build without CUDA, which SELFATTN_CUDA=1 makes an error."""

    @staticmethod
    def check_absent(reason: str, *words: str, **arguments: object) -> None:
        call = {"torch_version": TORCH, "torch_cuda": "13.0", "capabilities": [], **arguments}
        plan = cuda_build.plan(**call)
        assert (plan.cuda, plan.absent, plan.nvcc, plan.architectures) == (False, reason, None, ())
        assert plan.explanation.startswith("CPU only: ")
        assert all(word in plan.explanation for word in words), plan.explanation
        assert cuda_build.definitions(plan) == [f"-DSELFATTN_CUDA_ABSENT={reason}"]
        assert cuda_build.ABSENT[reason]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SELFATTN_CUDA", "1")
            if reason == "gpu":
                assert cuda_build.plan(**call).cuda
                return
            with pytest.raises(ValueError, match=r"SELFATTN_CUDA=1 asks for .*, and none can be built"):
                cuda_build.plan(**call)

    def test_torch_without_cuda(self, nvcc: Callable[..., Path]) -> None:
        nvcc()
        self.check_absent("torch", "2.13.0+cpu", torch_version="2.13.0+cpu", torch_cuda=None)

    def test_no_nvcc(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUDA_HOME", str(tmp_path))
        self.check_absent("nvcc", "no nvcc", "CUDA toolkit 13.0", "CUDA_HOME")

    def test_nvcc_of_another_major_version(self, nvcc: Callable[..., Path]) -> None:
        home = nvcc("12.8")
        self.check_absent("version", f"nvcc 12.8 in {home}", TORCH, "install the CUDA toolkit 13.0")

    def test_nvcc_that_compiles_nothing(self, nvcc: Callable[..., Path]) -> None:
        nvcc(compiles="echo 'host_config.h: error: unsupported GNU version!' >&2; exit 1")
        self.check_absent("host", "unsupported GNU version")

    def test_no_gpu_at_run_time(self, nvcc: Callable[..., Path]) -> None:
        nvcc()
        self.check_absent("gpu", "no GPU", at_run_time=True)
        assert cuda_build.plan(TORCH, "13.0", [(9, 0)], at_run_time=True).cuda

    def test_unwanted(self, nvcc: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
        nvcc()
        monkeypatch.setenv("SELFATTN_CUDA", "0")
        plan = cuda_build.plan(TORCH, "13.0", [(9, 0)])
        assert (plan.cuda, plan.absent) == (False, "unwanted")
        monkeypatch.setenv("SELFATTN_CUDA", "yes")
        with pytest.raises(ValueError, match=r"SELFATTN_CUDA must be 1 .* got 'yes'"):
            cuda_build.plan(TORCH, "13.0", [])

    @pytest.mark.parametrize("version", ["13.0", "13.2"])  # minor versions of CUDA are compatible
    def test_with_cuda(self, version: str, nvcc: Callable[..., Path]) -> None:
        home = nvcc(version)
        plan = cuda_build.plan(TORCH, "13.0", [(9, 0)])
        assert plan.cuda
        assert plan.absent == ""
        assert f"nvcc {version} in {home}" in plan.explanation
        assert "9.0a" in plan.explanation
        assert "TORCH_CUDA_ARCH_LIST" in plan.explanation
        assert "SELFATTN_CUDA=0" in plan.explanation
        assert cuda_build.definitions(plan) == ["-DSELFATTN_CUDA_HOPPER"]
        assert cuda_build.definitions(plan._replace(architectures=("8.0", "9.0+PTX"))) == []

    def test_of_this_machine(self) -> None:
        plan = cuda_build.plan_for(torch)
        assert plan.cuda or torch.version.cuda is None or plan.absent in cuda_build.ABSENT


class TestArchitectures:
    @pytest.mark.parametrize(
        ("variable", "gpus", "known", "expected"),
        [
            ("", [], "75 80 90 100 120", ("7.5", "8.0", "9.0a", "10.0", "12.0+PTX")),
            ("", [], "75 80 90", ("7.5", "8.0", "9.0a", "9.0+PTX")),  # CUDA 12.4
            ("", [(9, 0), (8, 6), (9, 0)], "80 86 90", ("8.6", "9.0a")),
            ("", [(12, 1)], "80 90", ("9.0+PTX",)),  # newer than nvcc
            ("", [(7, 0), (8, 0)], "70 75 80", ("8.0",)),  # older than the kernels
            ("", [(7, 0)], "75 80", ("7.5", "8.0+PTX")),
            ("8.0", [(9, 0)], "75 80 90", ("8.0",)),
            ("8.0 9.0a;12.0+PTX", [], "80 90 120", ("8.0", "9.0a", "12.0+PTX")),
            ("native", [(8, 6)], "80 86", ("8.6",)),
            ("Ampere;Hopper", [], "80 86 90", ("8.0", "8.6+PTX", "9.0a", "9.0+PTX")),
            ("9.0", [], "80 90", ("9.0a",)),
        ],
        ids=str,
    )
    def test_list(
        self,
        variable: str,
        gpus: list[tuple[int, int]],
        known: str,
        expected: tuple[str, ...],
        nvcc: Callable[..., Path],
    ) -> None:
        nvcc(known=known)
        found = cuda_build.find_nvcc()
        assert found is not None
        assert cuda_build.architectures_of(variable, gpus, found) == expected

    @pytest.mark.parametrize("name", ["7.0", "8.9", "sm_80", "8.0+ptx", "Volta"])
    def test_unknown(self, name: str, nvcc: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
        nvcc(known="70 75 80")
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", f"8.0;{name}")
        with pytest.raises(ValueError, match=r"TORCH_CUDA_ARCH_LIST=8\.0;.* asks for .*for 7\.5, 8\.0,"):
            cuda_build.plan(TORCH, "13.0", [])

    def test_flags(self) -> None:
        assert cuda_build.architecture_flags(["8.0", "9.0a", "12.0+PTX"]) == [
            "-gencode=arch=compute_80,code=sm_80",
            "-gencode=arch=compute_90a,code=sm_90a",
            "-gencode=arch=compute_120,code=sm_120",
            "-gencode=arch=compute_120,code=compute_120",
            "-DSELFATTN_CUDA_ARCHITECTURES=8.0/9.0/12.0",
        ]

    def test_flags_of_the_same_ptx(self) -> None:
        """The front end runs once for equal PTX, and the library names both architectures."""
        assert cuda_build.architecture_flags(["9.0a", "9.0+PTX", "10.0", "12.0+PTX"]) == [
            "-gencode=arch=compute_90a,code=sm_90a",
            "-gencode=arch=compute_90,code=compute_90",
            "-gencode=arch=compute_100,code=sm_100",
            "-gencode=arch=compute_100,code=sm_120",
            "-gencode=arch=compute_100,code=compute_100",
            "-DSELFATTN_CUDA_ARCHITECTURES=9.0/10.0/12.0",
        ]

    def test_time(self) -> None:
        """Work that architectures share counts once, also in the default list of a build without a GPU."""
        plan = cuda_build.Plan("", "", cuda_build.Nvcc("nvcc", "/cuda", (13, 0), ()))
        seconds = [
            cuda_build.processor_seconds(plan._replace(architectures=names))
            for names in (
                ("10.0",),
                ("12.0+PTX",),
                ("10.0", "12.0+PTX"),
                ("8.6",),
                cuda_build.DEFAULT_ARCHITECTURES,
            )
        ]
        host = cuda_build.CPU_SECONDS + cuda_build.CUDA_HOST_SECONDS
        of_10, of_12 = (cuda_build.CUDA_SECONDS[name] for name in ("10.0", "12.0"))
        assert seconds[:3] == [host + sum(of_10), host + sum(of_12), host + sum(of_10) + of_12[1]]
        assert seconds[3] == host + sum(cuda_build.CUDA_SECONDS["8.0"])
        assert seconds[4] > 2 * seconds[3]
        without = cuda_build.Plan("torch", "")
        assert cuda_build.processor_seconds(without) == cuda_build.CPU_SECONDS

    def test_cmake(self, nvcc: Callable[..., Path]) -> None:
        nvcc()
        found = cuda_build.find_nvcc()
        assert found is not None
        assert cuda_build.cmake_architectures(found) == ["75-real", "80-real", "90a-real", "100-real", "120"]


class TestToldToUsers:
    def test_info(self, capsys: pytest.CaptureFixture[str]) -> None:
        build = library.extension().build_info()
        info.run()
        (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("CUDA "))
        if build["cuda"]:
            assert build["cuda_architectures"] in line
            assert "nvcc" in line
        else:
            assert f"no kernels: {cuda_build.ABSENT[build['cuda_absent']]}" in line

    @pytest.mark.parametrize("reason", list(cuda_build.ABSENT))
    def test_tensors_on_cuda_without_kernels(self, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
        build = SimpleNamespace(build_info=lambda: {"cuda": False, "cuda_absent": reason})
        monkeypatch.setattr(library, "extension", lambda: build)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        with torch._subclasses.FakeTensorMode():
            tensor = torch.empty(1, 1, 2, 8, device="cuda")
        with pytest.raises(ValueError, match="query is on cuda:0, and this build") as raised:
            call_checks.attention(AttentionCall(tensor, tensor, tensor, AttentionOptions()))
        text = str(raised.value)
        assert cuda_build.ABSENT[reason] in text
        assert "Install the CUDA toolkit 13.0" in text
        assert "SELFATTN_CUDA=1" in text


def test_alone() -> None:
    """setup.py runs cuda_build.py by its path, in a Python that has no torch yet."""
    source = Path(cuda_build.__file__)
    code = f"import runpy, sys; sys.modules['torch'] = None; runpy.run_path({str(source)!r})"
    assert os.system(f"{shlex.quote(sys.executable)} -c {shlex.quote(code)}") == 0
