"""A report on the machine code of the sm80 kernels' main loops, played by a model of a GPU.

    python scripts/cuda_loop_report.py                         the bare kernels of bfloat16, 64 and 128 dims
    python scripts/cuda_loop_report.py --markdown              the table of docs/cuda-performance.md
    python scripts/cuda_loop_report.py --kernels forward-64 --archs 80
    python scripts/cuda_loop_report.py --sources ../older/csrc            of another checkout
    python scripts/cuda_loop_report.py --loop forward-64 --archs 80       the loop itself
    python scripts/cuda_loop_report.py other.cubin --archs 80 --blocks 2 --warps 4 --useful 0.97

It needs nvcc and nvdisasm, but no GPU, and takes two minutes. sass.py finds the loop, and loop_model.py plays
it on a model of a multiprocessor: nothing is measured on a device. The path through the loop is the one
without masking and without code for rare cases.
"""

from __future__ import annotations

import argparse
import re
import runpy
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import compiler_report
import loop_model
import nvcc
import sass

ROOT = Path(__file__).resolve().parents[1]
# They are loaded by path, because importing the package would load torch and the compiled library.
sources = SimpleNamespace(**runpy.run_path(str(ROOT / "selfattn_ext" / "build" / "sources.py")))
cuda_build = SimpleNamespace(**runpy.run_path(str(ROOT / "selfattn_ext" / "build" / "cuda_build.py")))
terminal = SimpleNamespace(**runpy.run_path(str(ROOT / "selfattn_ext" / "terminal.py")))

#: Bytes of shared memory and registers of a multiprocessor (CUDA C++ Programming Guide).
SHARED_BYTES = {80: 164 * 1024, 86: 100 * 1024, 89: 100 * 1024, 90: 228 * 1024}
REGISTERS = 65536
_SHARED_OF_SYSTEM = 1024  # shared memory that the system takes per block


@dataclass(frozen=True)
class Kernel:
    """An instance of a template, and how many of a tile's products its loop computes."""

    header: str
    namespace: str
    function: str
    config: str
    products: int

    @property
    def text(self) -> str:
        """Returns a source with only this instance, and variables whose values its PTX shows."""
        return f"""#include "{self.header}"
namespace {self.namespace} {{
using C = {self.config};
template __global__ void {self.function}<C>(const __grid_constant__ Plan);
extern "C" __device__ int warps_of_block = C::kThreads / 32;
extern "C" __device__ int shared_bytes = SharedLayout<C>::kBytes;
extern "C" __device__ int useful_products = {self.products} * C::kStrips * C::kColumnTiles * (C::kDim / 16);
}}
"""


def _forward(dim: int) -> Kernel:
    config = f"Config<DType::kBFloat16, {dim}, Path::kBare>"
    return Kernel("cuda/sm80/sm80_forward.cuh", "selfattn::cuda::sm80", "forward_kernel", config, 2)


def _backward(dim: int, side: str, products: int) -> Kernel:
    config = f"Config<DType::kBFloat16, {dim}, Side::{side}, Path::kBare>"
    header, namespace = "cuda/sm80/backward/sm80_gradients.cuh", "selfattn::cuda::sm80::backward"
    return Kernel(header, namespace, "backward_kernel", config, products)


KERNELS = {
    **{f"forward-{dim}": _forward(dim) for dim in (64, 128)},
    **{f"queries-{dim}": _backward(dim, "kQuery", 3) for dim in (64, 128)},
    **{f"keys-{dim}": _backward(dim, "kKeyValue", 4) for dim in (64, 128)},
}


@dataclass(frozen=True)
class Compiled:
    """A kernel's loop, and the resources that decide how many of its blocks run at a time."""

    loop: list[sass.Instruction]
    registers: int
    shared_bytes: int
    warps: int
    useful_products: int

    def blocks(self, architecture: int) -> int:
        """Returns how many blocks run on a multiprocessor at a time."""
        of_warp = -(-self.registers // 8) * 8 * 32
        by_shared = SHARED_BYTES[architecture] // (self.shared_bytes + _SHARED_OF_SYSTEM)
        return min(by_shared, REGISTERS // (of_warp * self.warps))


class Toolchain:
    """nvcc and nvdisasm for kernels of a tree of sources."""

    def __init__(self, compiler: str, nvdisasm: str, tree: Path) -> None:
        self._compiler, self.nvdisasm, self._tree = compiler, nvdisasm, tree

    def compile(self, kernel: Kernel, architecture: str) -> Compiled:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            report = self.assemble(kernel, architecture, folder)
            numbers = _numbers((folder / "kernel.ptx").read_text(encoding="utf-8"))
            (usage,) = compiler_report.usage_of_kernels(report).values()
            loop = loop_of(self.nvdisasm, folder / "kernel.cubin")
        return Compiled(
            loop,
            usage.registers,
            numbers["shared_bytes"],
            numbers["warps_of_block"],
            numbers["useful_products"],
        )

    def assemble(self, kernel: Kernel, architecture: str, folder: Path) -> str:
        """Writes kernel.ptx and kernel.cubin into the folder. Returns what ptxas prints."""
        (folder / "kernel.cu").write_text(kernel.text, encoding="utf-8")
        self._run(folder, architecture, "compute", "-ptx", "kernel.cu", "-I", str(self._tree))
        return self._run(folder, architecture, "sm", "-cubin", "kernel.ptx", "-Xptxas", "-v")

    def _run(self, folder: Path, architecture: str, code: str, to: str, *more: str) -> str:
        target = f"arch=compute_{architecture},code={code}_{architecture}"
        output = f"kernel.{to[1:]}"
        command = [self._compiler, to, "-o", output, "-gencode", target, *sources.cuda_flags(), *more]
        run = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if run.returncode != 0:
            raise SystemExit(f"{Path(sys.argv[0]).name}: error: {' '.join(command)}\n{run.stderr}")
        return run.stdout + run.stderr


def _numbers(ptx: str) -> dict[str, int]:
    """Returns the integer variables that PTX defines."""
    return {name: int(value) for name, value in re.findall(r"\.u32 (\w+) = (\d+);", ptx)}


def function_of(nvdisasm: str, cubin: Path) -> sass.Function:
    """Returns the function with most products; kernels come before the functions that they call."""
    functions = sass.read(nvdisasm, cubin)
    return max(functions, key=lambda f: ("_kernel" in f.name, f.count(*sass.PRODUCTS)))


def loop_of(nvdisasm: str, cubin: Path) -> list[sass.Instruction]:
    return sass.main_loop(function_of(nvdisasm, cubin))


@dataclass(frozen=True)
class Figures:
    """The figures of a loop in the table."""

    instructions: float  # per HMMA
    integers: float  # those of them that are integer arithmetic or IMAD
    load_cycles: float  # from an LDSM to the first instruction that waits for it, median
    exposed: float  # the share of LDSM with fewer such cycles than they take
    tensor: float  # the share of time with useful products, by the model

    @classmethod
    def of(
        cls,
        loop: Sequence[sass.Instruction],
        architecture: int,
        residents: loop_model.Residents,
        useful: float,
    ) -> Figures:
        products = sum(instruction.opcode == "HMMA" for instruction in loop)
        loads = loop_model.load_distances(loop)
        share = loop_model.tensor_share(loop, architecture, residents)
        return cls(
            len(loop) / products,
            sum(_is_integer(instruction) for instruction in loop) / products,
            statistics.median(loads) if loads else 0,
            sum(cycles < loop_model.LDSM_CYCLES for cycles in loads) / max(1, len(loads)),
            useful * share,
        )

    def cells(self) -> list[str]:
        return [
            f"{self.instructions:.2f}",
            f"{self.integers:.2f}",
            f"{self.load_cycles:.0f} ({self.exposed:.0%})",
            f"{self.tensor:.0%}",
        ]


HEADER = ["", "blocks", "registers", "shared", "instr/HMMA", "integer", "LDSM to use (exposed)", "tensor"]


def _is_integer(instruction: sass.Instruction) -> bool:
    integers = ("IADD3", "LOP3", "SHF", "LEA", "IMNMX", "PRMT", "MOV", "VIADD", "IABS", "VIMNMX", "IMAD")
    return instruction.opcode in integers


def listing(loop: Sequence[sass.Instruction]) -> str:
    """Returns a line per instruction: its stall count, the scoreboards that it sets, holds and waits for."""
    lines = []
    for i in loop:
        marks = ["-" if n is None else str(n) for n in (i.sets, i.holds)]
        waits = "".join(map(str, i.waits)) or "-"
        lines.append(f"{i.stall:2d} {' '.join(marks)} {waits:6s} {i.predicate:5s}{i.name} {i.operands}")
    counts = Counter(i.opcode for i in loop)
    return "\n".join([*lines, ", ".join(f"{opcode} {count}" for opcode, count in counts.most_common())])


def rows_of(toolchain: Toolchain, parsed: argparse.Namespace) -> list[list[str]]:
    rows = []
    for name in parsed.kernels:
        for architecture in parsed.archs:
            number = nvcc.architecture_number(architecture)
            kernel = toolchain.compile(KERNELS[name], architecture)
            residents = loop_model.Residents(kernel.blocks(number), kernel.warps)
            products = sum(instruction.opcode == "HMMA" for instruction in kernel.loop)
            figures = Figures.of(kernel.loop, number, residents, kernel.useful_products / products)
            blocks = f"{residents.blocks} × {residents.warps} warps"
            facts = [blocks, str(kernel.registers), f"{kernel.shared_bytes:,}"]
            rows.append([f"{name}, sm_{architecture}", *facts, *figures.cells()])
    return rows


def rows_of_files(toolchain: Toolchain, parsed: argparse.Namespace) -> list[list[str]]:
    residents = loop_model.Residents(parsed.blocks, parsed.warps)
    rows = []
    for cubin in parsed.cubins:
        number = nvcc.architecture_number(parsed.archs[0])
        figures = Figures.of(loop_of(toolchain.nvdisasm, cubin), number, residents, parsed.useful)
        blocks = f"{residents.blocks} × {residents.warps} warps"
        rows.append([cubin.name, blocks, "", "", *figures.cells()])
    return rows


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parsed = _parser().parse_args(arguments)
    compiler = cuda_build.find_nvcc()
    nvdisasm = None if compiler is None else nvcc.find_nvdisasm(compiler.command)
    if compiler is None or nvdisasm is None:
        print("cuda_loop_report.py: error: no nvcc or no nvdisasm", file=sys.stderr)
        return 2
    toolchain = Toolchain(compiler.command, nvdisasm, parsed.sources.resolve())
    if parsed.loop is not None:
        print(listing(toolchain.compile(KERNELS[parsed.loop], parsed.archs[0]).loop))
        return 0
    rows = rows_of_files(toolchain, parsed) if parsed.cubins else rows_of(toolchain, parsed)
    print(markdown(HEADER, rows) if parsed.markdown else terminal.table(HEADER, rows))
    return 0


def _architecture(given: str) -> str:
    try:
        number = nvcc.architecture_number(given)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if number not in loop_model.BUSY:
        known = ", ".join(map(str, loop_model.BUSY))
        raise argparse.ArgumentTypeError(f"the model knows the architectures {known}")
    return given


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cubins", nargs="*", type=Path, metavar="FILE", help="cubins of other kernels")
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS), metavar="NAME")
    parser.add_argument("--archs", nargs="+", type=_architecture, default=["80", "90a"], metavar="N")
    parser.add_argument("--sources", type=Path, default=ROOT / "csrc", metavar="FOLDER")
    parser.add_argument("--markdown", action="store_true", help="print a table of Markdown")
    parser.add_argument("--loop", choices=KERNELS, metavar="NAME", help="print the instructions of a loop")
    parser.add_argument("--blocks", type=int, default=2, help="blocks of a FILE's kernel per multiprocessor")
    parser.add_argument("--warps", type=int, default=4, help="warps per block of a FILE's kernel")
    parser.add_argument("--useful", type=float, default=1.0, help="the share of its HMMA that is needed")
    return parser


if __name__ == "__main__":
    sys.exit(main())
