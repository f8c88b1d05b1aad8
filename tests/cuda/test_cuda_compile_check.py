"""scripts/cuda_compile_check.py accepts correct kernels, and finds each fault that it looks for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import compiler_report
import cuda_compile_check
import kernel_limits
import nvcc
import pytest
from nvcc_marks import needs_nvcc

from selfattn_ext.build import cuda_build

COMPILER = cuda_build.find_nvcc()
DISASSEMBLER = None if COMPILER is None else nvcc.find_nvdisasm(COMPILER.command)

PLAIN = """
#include "factor.h"
__global__ void __launch_bounds__(128) plain(float* out) { out[threadIdx.x] *= FACTOR; }
"""

#: Kernels with 200 values per thread and 64 registers for them, with a local array that is indexed at run
#: time, and with an array in shared memory.
FAULTY = """
__global__ void __launch_bounds__(1024) spilling(float* out, const float* in) {
  float held[200];
#pragma unroll
  for (int i = 0; i < 200; ++i) held[i] = in[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 200; ++i) out[(199 - i) * 1024 + threadIdx.x] = held[i] * held[(i * 7 + 3) % 200];
}
__global__ void indexed(float* out, const int* at) {
  float held[64] = {};
  for (int i = 0; i < 64; ++i) held[at[i] & 63] += out[i];
  out[threadIdx.x] = held[at[threadIdx.x] & 63];
}
__global__ void shared(float* out) {
  __shared__ float held[128];
  held[threadIdx.x] = out[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = held[127 - threadIdx.x];
}
"""

#: A kernel that behaves differently on two architectures that should have the same PTX.
ASKING = """
__global__ void asking(float* out) {
#if __CUDA_ARCH__ >= 900
  out[threadIdx.x] = 1;
#endif
}
"""

WARNING = """
__global__ void warning(float* out) {
  int unused = 3;
  out[threadIdx.x] = 0;
}
"""


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Writes a source into a folder, checks it, and returns the exit code and the output."""

    def run(text: str, folder: str = "simt", arch: str = "80", *options: str) -> tuple[int, str]:
        source = tmp_path / folder / "kernel.cu"
        source.parent.mkdir(exist_ok=True)
        source.write_text(text)
        header = source.parent / "factor.h"
        if not header.exists():
            header.write_text("#define FACTOR 2\n")
        sass = [] if DISASSEMBLER is not None else ["--no-sass"]
        arguments = [str(source), "--archs", arch, "--jobs", "1", "--cache", str(tmp_path / "cache"), *sass]
        code = cuda_compile_check.main([*arguments, *options])
        return code, capsys.readouterr().out

    return run


@needs_nvcc
def test_a_sound_kernel_passes_and_is_remembered(
    check: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, printed = check(PLAIN, "simt", "75,90a", "--json", str(tmp_path / "report.json"))
    assert code == 0
    assert "passed: 2 compilations (0 remembered)" in printed
    report = json.loads((tmp_path / "report.json").read_text())
    assert [verdict["architecture"] for verdict in report] == ["75", "90a"]
    for verdict in report:
        (usage,) = verdict["kernels"].values()
        assert 0 < usage["registers"] < 20
    assert all(verdict["peak_mb"] > 10 and verdict["seconds"] > 0 for verdict in report)
    # Limits that have changed are held against what is remembered, without another compilation.
    monkeypatch.setattr(kernel_limits, "LIMITS", {"simt/*/plain": kernel_limits.Limit(registers=2)})
    code, printed = check(PLAIN, "simt", "75,90a")
    assert code == 1
    assert "2 compilations (2 remembered)" in printed
    assert re.search("simt/kernel/plain: .*registers, allowed are 2", printed)
    monkeypatch.setattr(kernel_limits, "LIMITS", {})
    assert "no limit for it" in check(PLAIN, "simt", "75,90a")[1]
    (tmp_path / "simt" / "factor.h").write_text("#define FACTOR 3\n")
    assert "2 compilations (0 remembered)" in check(PLAIN, "simt", "75,90a")[1]


@needs_nvcc
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (FAULTY, ["bytes of register spills", "bytes of local memory", "512 bytes of static shared memory"]),
        (WARNING, ['"unused" was declared but never referenced']),
        ("int nothing;", ["holds no kernel"]),
        ("__global__ void broken() { undeclared(); }", ['identifier "undeclared" is undefined']),
    ],
    ids=["resources", "warning", "no kernel", "error"],
)
def test_faults_are_found(text: str, expected: list[str], check: Callable) -> None:
    code, printed = check(text)
    assert code == 1
    assert all(fault in printed for fault in expected), printed
    assert "FAILED: 1 compilations" in printed
    # A failed source is compiled again, so that it fails again.
    assert check(text)[0] == 1


def test_ptx_of_two_processes_is_the_same() -> None:
    def ptx(number: int, target: str, other: str = "") -> str:
        unnamed = f"_GLOBAL__N__7a6212ca_9_kernel_cu_05a38b86_{number}"
        name = f"_ZN4sm80{len(unnamed)}{unnamed}12merge_kernelILNS{len(unnamed)}{unnamed}4planEEv"
        return f".version 9.0\n.target {target}\n.entry {name}({other})\nmov.b64 %rd1, {name}_param_0;\n"

    assert nvcc._same(ptx(9154, "sm_80"), ptx(12345, "sm_90a"))
    assert not nvcc._same(ptx(9154, "sm_80"), ptx(9154, "sm_80", ".param .u64 a"))


@needs_nvcc
def test_architectures_share_ptx_that_is_the_same(check: Callable, tmp_path: Path) -> None:
    code, printed = check(ASKING, "simt", "80,90a")
    assert code == 1
    assert "for sm_90a: error: the PTX for sm_90a is not that for sm_80" in printed
    assert "1 with problems" in printed
    # Machine code is the same as without sharing.
    found = {}
    for name, archs in (("shared", ["80", "90a"]), ("alone", ["90a"])):
        compiler = nvcc.Compiler(COMPILER.command, DISASSEMBLER, [], tmp_path / name)
        (tmp_path / "simt" / "kernel.cu").write_text(PLAIN)
        *_, found[name] = compiler.compile(tmp_path / "simt" / "kernel.cu", archs)
    assert found["shared"].opcodes == found["alone"].opcodes
    assert DISASSEMBLER is None or sum(found["alone"].opcodes.popitem()[1].values()) > 5
    assert "for 'sm_90a'" in found["shared"].report


def test_what_is_compiled_together() -> None:
    """Kernels for Hopper have PTX of their own."""
    order = [
        (Path(folder, "a"), architecture)
        for folder in ("sm80", "sm90")
        for architecture in ("75", "80", "90a", "100", "120")
    ]
    assert cuda_compile_check.together(order) == [
        *((Path("sm80", "a"), together) for together in (["75"], ["80", "90a"], ["100", "120"])),
        *((Path("sm90", "a"), together) for together in (["75"], ["80"], ["90a"], ["100", "120"])),
    ]
    # Builds, too, make the same PTX only once.
    built = [(first.replace(".", ""), name.replace(".", "")) for name, first in cuda_build.SAME_PTX.items()]
    assert set(built) <= set(nvcc.SAME_PTX)


def of_ptxas(function: str, registers: int) -> str:
    return f"""
ptxas info    : Compiling entry function '{function}' for 'sm_80'
ptxas info    : Function properties for {function}
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used {registers} registers
"""


def judged(folder: str, report: str, opcodes: Any = None, arch: str = "80") -> cuda_compile_check.Verdict:
    """Judges a source whose compilation has taken a second and 3 GB."""
    outcome = nvcc.Outcome(0, report, 1.0, 3 * 10**9, opcodes)
    return cuda_compile_check.judge(Path("csrc", "cuda", folder, "kernel.cu"), arch, outcome)


def test_reports_of_ptxas() -> None:
    report = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z5firstPf' for 'sm_90a'
ptxas info    : Function properties for _Z5firstPf
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 8 bytes cumulative stack size, 64 bytes smem
ptxas info    : Function properties for _Z6helperv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Compiling entry function '_Z6secondPf' for 'sm_90a'
ptxas info    : Function properties for _Z6secondPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 24 registers, used 0 barriers
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized
"""
    assert compiler_report.usage_of_kernels(report) == {
        "_Z5firstPf": compiler_report.Usage(168, 8, 16, 64),
        "_Z6secondPf": compiler_report.Usage(24, 0, 0, 0),
    }
    (remark,) = compiler_report.remarks(report)
    assert "C7510" in remark
    verdict = judged("simt", report, arch="90a")
    assert remark in verdict.problems
    assert "compiling it takes 3000 MB" in verdict.problems
    assert verdict.registers == 168


def test_instances_of_a_template_are_kernels_of_their_own() -> None:
    verdict = judged("simt", of_ptxas("_Z6kernelILi1EEvv", 200) + of_ptxas("_Z6kernelILi2EEvv", 100))
    assert len(verdict.kernels) == 2
    assert verdict.registers == 200


def test_instructions_of_nvdisasm() -> None:
    sass = """
\t.section\t.text._Z5firstPf,"ax",@progbits
_Z5firstPf:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/              @!P0 HMMA.16816.F32.BF16 R4, R8, R10, R4 ;
        /*0020*/             @!UPT UIADD3 UR4, URZ, URZ, URZ ;
        /*0030*/              @P1  LDL.64 R2, [R1] ;
.L_x_1:
        /*0040*/                   STL [R1+0x8], R3 ;
        /*0050*/                   STG.E.128 desc[UR4][R2.64], R4 ;
        /*0060*/                   STG.E desc[UR4][R2.64], R4 ;
\t.section\t.text._Z6secondPf,"ax",@progbits
        /*0000*/                   EXIT ;
"""
    assert compiler_report.instructions(sass) == {
        "_Z5firstPf": {"MOV": 1, "HMMA": 1, "UIADD3": 1, "LDL": 1, "STL": 1, "STG": 2, "STG.128": 1},
        "_Z6secondPf": {"EXIT": 1},
    }
    verdict = judged("sm80", of_ptxas("_Z5firstPf", 24), compiler_report.instructions(sass))
    assert verdict.tensor_instructions == 1
    assert "sm80/kernel/first: 2 accesses to local memory" in verdict.problems
    assert not any("HMMA" in problem for problem in verdict.problems)


def test_tensor_cores_are_demanded_from_ampere_on() -> None:
    for arch, demanded in (("75", False), ("80", True)):
        verdict = judged("sm80", of_ptxas("_Z5firstPf", 24), {"_Z5firstPf": {"FFMA": 8}}, arch)
        assert any("no HMMA instruction" in problem for problem in verdict.problems) == demanded


@pytest.mark.parametrize(("source", "demanded"), [("sm80_bfloat16_64", True), ("sm80_float32_64", False)])
def test_16_bit_results_are_stored_16_bytes_at_a_time(source: str, demanded: bool) -> None:
    usage = compiler_report.Usage(24, 0, 0, 0)
    for store, wide in (("STG", False), ("STG.128", True)):
        problems = cuda_compile_check._problems(
            f"sm80/{source}/forward_kernel", "80", usage, {"HMMA": 8, store: 1}
        )
        assert problems == (["no store of 16 bytes"] if demanded and not wide else [])


def test_sparse_runs_meet_every_source_and_every_architecture() -> None:
    files = [Path(name) for name in "abcdefgh"]
    archs = cuda_compile_check.ARCHITECTURES
    assert {"75", "80", "90a", "100", "120"} <= set(archs)
    everything = cuda_compile_check.tasks(files, archs, sparse=False)
    assert len(everything) == len(set(everything)) == len(files) * len(archs)
    some = cuda_compile_check.tasks(files, archs, sparse=True)
    assert len(some) == 2 * len(files)
    assert set(some) < set(everything)
    assert {(file, "80") for file in files} < set(some)
    assert {arch for _, arch in some} == set(archs)
    assert cuda_compile_check.tasks(files[:1], ("80", "90a"), sparse=True) == [
        (files[0], "80"),
        (files[0], "90a"),
    ]


def test_kernels_for_hopper_are_compiled_for_it() -> None:
    files = [Path("sm90", name) for name in "abcd"]
    some = cuda_compile_check.tasks(files, cuda_compile_check.ARCHITECTURES, sparse=True)
    assert {(file, "90a") for file in files} < set(some)
    assert len(some) == 2 * len(files)


def test_turns_meet_every_pair() -> None:
    files = [Path(name) for name in "abcdefgh"]
    archs = cuda_compile_check.ARCHITECTURES
    met = set()
    for turn in range(6 * (len(archs) - 1)):
        some = cuda_compile_check.tasks(files, archs, sparse=True, turn=turn)
        assert {(file, "80") for file in files[-turn % 4 :: 4]} < set(some)
        assert len(some) in (2 + 1, 2 + 2)
        met |= set(some)
    assert met == set(cuda_compile_check.tasks(files, archs, sparse=False))


def test_names_of_functions() -> None:
    names = {
        "_Z5firstPf": "first",
        "_ZN12_GLOBAL__N_15innerEv": "inner",
        "_ZN8selfattn4cuda4sm8014forward_kernelILi64EEEvNS1_4ArgsE": "forward_kernel",
    }
    assert compiler_report.function_names(names) == names


@pytest.mark.parametrize(
    ("arguments", "expected"), [(["--archs", "sm_80"], "architecture must"), (["none.cu"], "no such file")]
)
def test_bad_arguments(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = cuda_compile_check.main(arguments)
    except SystemExit as end:
        code = end.code
    assert code == 2
    printed = capsys.readouterr().err
    assert expected in printed or "no nvcc" in printed or "no nvdisasm" in printed
