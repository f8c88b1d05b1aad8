"""Breaks one thing at a time that only the PTX machine sees, and says whether a test notices.

    PYTHONPATH=simulators:tests/support python -m ptx_machine.mutate [WORDS OF A NAME...]

Some mutants change texts, operands and constraints of inline PTX; the probe of wrappers asks them, and the
answers are compared with recordings, or with models in numpy. Others change the launch, on kernels of
wrong_kernels.cu that are right. A result that differs, or a report of the machine, kills a mutant. nvcc
compiles a program for each, which takes some seconds.

More mutants change how the machine itself executes Hopper's instructions: such a machine runs
tests/cuda/test_ptx_pipeline.py and test_ptx_hopper.py until a test fails.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import ninja_file

from . import build, probe, wrapper_models

PTX, DEVICE = "ptx_sm80.cuh", "device.cuh"


@dataclass(frozen=True)
class Mutant:
    name: str
    header: str
    old: str
    new: str
    #: The wrapper that is asked, or a kernel and its shared memory.
    wrapper: str = ""
    kernel: tuple[str, int] | None = None


_BF16, _F16 = "bf16.bf16.f32 {%0, %1, %2, %3}, ", "f16.f16.f32 {%0, %1, %2, %3}, "
_OPERANDS = "{%4, %5, %6, %7}, {%8, %9}, "
_X4 = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 "
_X4_TRANS = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 "
_LAUNCH = "  kernel<<<grid, block, shared_bytes, stream>>>"  # the comment above it does not match

MUTANTS = (
    Mutant(
        "pack_bfloat16: halves swapped",
        PTX,
        'bf16x2.f32 %0, %1, %2;"',
        'bf16x2.f32 %0, %2, %1;"',
        "pack_bfloat16",
    ),
    Mutant("pack_bfloat16: to zero", PTX, "cvt.rn.bf16x2", "cvt.rz.bf16x2", "pack_bfloat16"),
    Mutant(
        "pack_float16: halves swapped",
        PTX,
        'rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low)',
        'rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(low), "f"(high)',
        "pack_float16",
    ),
    Mutant("pack_float16: the other format", PTX, "cvt.rn.f16x2", "cvt.rn.bf16x2", "pack_float16"),
    Mutant("copy: 8 bytes", PTX, "valid ? 16 : 0", "valid ? 8 : 0", "copy_async_16"),
    Mutant("copy: valid or not", PTX, '"r"(valid ? 16 : 0)', '"r"(16)', "copy_async_16"),
    Mutant("copy: a group fewer is waited for", PTX, '"n"(Pending)', '"n"(Pending + 1)', "copy_async_16"),
    Mutant("copy: nothing is committed", PTX, '"cp.async.commit_group;"', '""', "copy_async_16"),
    Mutant(
        "ldmatrix: results permuted",
        PTX,
        f"{_X4}{{%0, %1, %2, %3}}",
        f"{_X4}{{%0, %2, %1, %3}}",
        "load_matrix_x4",
    ),
    Mutant("ldmatrix: transposed", PTX, _X4, _X4_TRANS, "load_matrix_x4"),
    Mutant("ldmatrix: .trans forgotten", PTX, _X4_TRANS, _X4, "load_matrix_x4_transposed"),
    Mutant(
        "ldmatrix: two matrices",
        PTX,
        f"{_X4}{{%0, %1, %2, %3}}",
        "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}",
        "load_matrix_x4",
    ),
    Mutant(
        "mma bfloat16: a swapped",
        PTX,
        _BF16 + _OPERANDS,
        _BF16 + "{%4, %6, %5, %7}, {%8, %9}, ",
        "multiply_bfloat16",
    ),
    Mutant(
        "mma float16: b swapped",
        PTX,
        _F16 + _OPERANDS,
        _F16 + "{%4, %5, %6, %7}, {%9, %8}, ",
        "multiply_float16",
    ),
    Mutant("mma bfloat16: as float16", PTX, "f32.bf16.bf16.f32", "f32.f16.f16.f32", "multiply_bfloat16"),
    Mutant("mma: the accumulator is not read", PTX, '"+f"(d[0])', '"=f"(d[0])', "multiply_bfloat16"),
    Mutant("exp2: subnormal results", PTX, "ex2.approx.ftz.f32", "ex2.approx.f32", "exp2_approx"),
    Mutant(
        "launch: too little shared memory is asked for",
        DEVICE,
        "static_cast<int>(bytes)),",
        "static_cast<int>(bytes) / 2),",
        kernel=("neighbour_in_block", 100_000),
    ),
    Mutant(
        "launch: without shared memory",
        DEVICE,
        _LAUNCH,
        "  kernel<<<grid, block, 0, stream>>>",
        kernel=("neighbour_in_block", 1024),
    ),
    Mutant(
        "launch: blocks for threads",
        DEVICE,
        _LAUNCH,
        "  kernel<<<block, grid, shared_bytes, stream>>>",
        kernel=("buffer_reused", 1024),
    ),
)


@dataclass(frozen=True)
class MachineMutant:
    name: str
    source: str
    old: str
    new: str


_MBARRIERS, _MATRIX = "execute/mbarriers.cpp", "execute/shared_matrix.cpp"
_PRODUCTS, _GROUPS = "execute/products.cpp", "execute/warpgroups.cpp"
_BOXES, _RACES = "instructions/box_copies.cpp", "execute/races_of_copies.cpp"
_DRIVER, _REGISTERS = "runtime/driver_functions.cpp", "instructions/registers.cpp"
_ENDS = "barrier.pending == 0 && barrier.bytes == 0"

MACHINE_MUTANTS = (
    MachineMutant(
        "mbarrier: a phase ends without its bytes",
        _MBARRIERS,
        _ENDS,
        "barrier.pending == 0",
    ),
    MachineMutant("mbarrier: a phase ends without its arrivals", _MBARRIERS, _ENDS, "barrier.bytes == 0"),
    MachineMutant(
        "mbarrier: the other parity",
        _MBARRIERS,
        "if ((barrier.phase & 1) == parity)",
        "if ((barrier.phase & 1) != parity)",
    ),
    MachineMutant(
        "mbarrier: the next phase needs an arrival fewer",
        _MBARRIERS,
        "    barrier.pending = barrier.arrivals;",
        "    barrier.pending = barrier.arrivals - 1;",
    ),
    MachineMutant(
        "mbarrier: copies know it without a fence", _MBARRIERS, "if (!barrier.fenced)", "if (false)"
    ),
    MachineMutant(
        "box: not swizzled",
        _MBARRIERS,
        "copy.map.swizzled ? swizzled_by_128(plain) : plain",
        "plain",
    ),
    MachineMutant(
        "box: no zeros beyond the tensor",
        _MBARRIERS,
        "std::memset(to, 0, end - byte)",
        "std::memset(to, 1, end - byte)",
    ),
    MachineMutant(
        "box: a row's bytes do not count",
        _MBARRIERS,
        "barrier.bytes -= copy.bytes();",
        "barrier.bytes -= copy.bytes() - row_bytes;",
    ),
    MachineMutant(
        "box: coordinates in the other order",
        _BOXES,
        "kFirstCoordinate + n)[copy.lane]",
        "kFirstCoordinate + ins.count - 1 - n)[copy.lane]",
    ),
    MachineMutant(
        "box: any 128 bytes may be where it goes",
        _BOXES,
        "(copy.to + kSharedBase) % kPatternBytes",
        "(copy.to + kSharedBase) % kSwizzleBytes",
    ),
    MachineMutant(
        "map: rows of any length are swizzled",
        _DRIVER,
        "map->swizzled && map->row_bytes() > kSwizzleBytes",
        "false",
    ),
    MachineMutant("matrix: not swizzled", _MATRIX, "swizzled_by_128(address)", "address"),
    MachineMutant(
        "matrix: offsets exchanged",
        _MATRIX,
        "address += row / kRowElements * leading_",
        "address += row / kRowElements * stride_",
    ),
    MachineMutant(
        "matrix: any address may be where it begins",
        _MATRIX,
        "if (start_ % kPatternBytes != in_row)",
        "if (false)",
    ),
    MachineMutant("product: adds what was there", _PRODUCTS, "adds ? d[l] : 0.0f", "d[l]"),
    MachineMutant("product: the other format", _PRODUCTS, "if (product.bfloat16)", "if (!product.bfloat16)"),
    MachineMutant(
        "product: rows of the left fragment exchanged",
        _PRODUCTS,
        "rows[l / 4 + 8 * (n % 2)][",
        "rows[l / 4 + 8 * (1 - n % 2)][",
    ),
    MachineMutant(
        "product: a group fewer is waited for",
        _PRODUCTS,
        "u64{pending_[count].group} + groups < closed_",
        "u64{pending_[count].group} + groups + 1 < closed_",
    ),
    MachineMutant(
        "product: its registers may be touched", _PRODUCTS, "if (uses_[registers[n]] != 0)", "if (false)"
    ),
    MachineMutant(
        "product: registers are touched after the fence",
        _PRODUCTS,
        "if (touched_[used] != fences_ + 1) continue;",
        "continue;",
    ),
    MachineMutant(
        "warpgroup: other operands are the same",
        _GROUPS,
        "step.first != first || step.second != second || step.third != third",
        "false",
    ),
    MachineMutant(
        "registers: what is given up is lost",
        _REGISTERS,
        "warp.block->free_registers += (warp.owned_registers - kept) * kLanes;",
        "",
    ),
    MachineMutant(
        "races: a wait for products is none",
        _RACES,
        "known = std::max(known, nth + 2);",
        "known = std::max(known, nth);",
    ),
    MachineMutant(
        "races: an mbarrier needs no order after its initialisation",
        _RACES,
        "if (ordered(before, warp, lane)) return;",
        "return;",
    ),
    MachineMutant(
        "races: proxies need no fence",
        _RACES,
        "return covers(knows_[warp.index].fenced, before) ||",
        "return true ||",
    ),
)


def changed(text: str, mutant: Mutant | MachineMutant) -> str:
    if mutant.old not in text:
        raise RuntimeError(f"{mutant.name}: there is no {mutant.old!r}")
    return text.replace(mutant.old, mutant.new, 1)


def compiled(mutant: Mutant, program: str, folder: Path) -> Path:
    """Compiles a program with the mutant's header before the package's."""
    common = folder / "cuda" / "common"
    shutil.copytree(build.CSRC / "cuda" / "common", common)
    header = common / mutant.header
    header.write_text(changed(header.read_text(encoding="utf-8"), mutant), encoding="utf-8")
    output = folder / program
    source = build.MACHINE / "programs" / f"{program}.cu"
    command = [str(build.NVCC_TO_PTX), *build.program_flags(folder), f"-I{build.CSRC}", str(source)]
    variables = {**os.environ, "PTX_NVCC": build.nvcc().command}
    subprocess.run([*command, "-o", str(output)], env=variables, capture_output=True, check=True)
    return output


def answers_wrongly(mutant: Mutant, program: Path) -> str:
    """How a wrapper gives the mutant away, or ""."""
    count, results = probe.wrappers(program)[mutant.wrapper]
    operands = probe.operands_of(mutant.wrapper, count)
    try:
        found = probe.answers(program, mutant.wrapper, operands, results, build.environment())
    except subprocess.CalledProcessError as error:
        return error.stderr.decode().partition("\n")[0]
    recorded = probe.ORACLE / f"{mutant.wrapper}-90.npz"
    if recorded.exists():
        differing = probe.differences(probe.load(recorded), found)
    else:
        differing = wrapper_models.differences(mutant.wrapper, 90, operands, found)
    return f"{differing} of {found.size} words differ" if differing else ""


def runs_wrongly(mutant: Mutant, program: Path) -> str:
    """How a kernel that is right without the mutant gives it away, or ""."""
    assert mutant.kernel is not None
    kernel, size = mutant.kernel
    right, found = (
        build.run(one, kernel, "right", str(size)) for one in (build.build("wrong_kernels"), program)
    )
    if found.returncode != 0:
        return (found.stderr or found.stdout).partition("\n")[0]
    return "the result differs" if found.stdout != right.stdout else ""


def machine_with(mutant: MachineMutant, folder: Path) -> Path:
    """Links the machine anew, with one object of its own."""
    source, machine = folder / Path(mutant.source).name, folder / "machine.so"
    text = (build.MACHINE / mutant.source).read_text(encoding="utf-8")
    source.write_text(changed(text, mutant), encoding="utf-8")
    replaced = f"simulators.ptx_machine.{mutant.source.replace('/', '.')}.o"
    objects = [path for path in (build.folder() / "machine").glob("*.o") if path.name != replaced]
    compiler = ninja_file.tools().compiler.split()
    for command in (
        [*compiler, *build.machine_flags(), "-c", source, "-o", folder / "mutant.o"],
        [*compiler, folder / "mutant.o", *objects, "-shared", "-ldl", "-o", machine],
    ):
        subprocess.run(command, capture_output=True, check=True)
    return machine


def failing_test(machine: Path) -> str:
    """The first test of Hopper's instructions that fails on the machine, or ""."""
    folder = build.ROOT / "tests" / "cuda"
    tests = [str(folder / f"test_ptx_{name}.py") for name in ("pipeline", "hopper")]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=no", "-p", "no:cacheprovider", *tests]
    variables = {**os.environ, "PTX_MACHINE": str(machine)}
    done = subprocess.run(command, cwd=build.ROOT, env=variables, capture_output=True, text=True, check=False)
    failed = re.search(r"^FAILED .*?::(\S+)", done.stdout, re.M)
    if failed is None and done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return failed[1] if failed is not None else ""


def judge(mutant: Mutant | MachineMutant) -> str:
    if isinstance(mutant, MachineMutant):
        with tempfile.TemporaryDirectory() as folder:
            return failing_test(machine_with(mutant, Path(folder)))
    with tempfile.TemporaryDirectory() as folder:
        try:
            program = compiled(mutant, "probe" if mutant.wrapper else "wrong_kernels", Path(folder))
        except subprocess.CalledProcessError as error:
            return f"nvcc: {error.stderr.decode().partition(chr(10))[0]}"
        return answers_wrongly(mutant, program) if mutant.wrapper else runs_wrongly(mutant, program)


def main(*words: str) -> int:
    build.build("machine.so")
    every = (*MUTANTS, *MACHINE_MUTANTS)
    chosen = [mutant for mutant in every if all(word in mutant.name for word in words)]
    survivors = 0
    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", 0)) or os.cpu_count()) as pool:
        for mutant, outcome in zip(chosen, pool.map(judge, chosen), strict=True):
            print(f"{mutant.name}: {outcome or 'SURVIVES'}", flush=True)
            survivors += not outcome
    print(f"{len(chosen) - survivors} of {len(chosen)} are noticed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
