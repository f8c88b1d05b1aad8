"""A report on the instructions in the main loops of kernels for Hopper, for the same work.

    python scripts/hopper_loop_report.py                       our bare kernels of bfloat16, 64 and 128 dims
    python scripts/hopper_loop_report.py --markdown            as a table of Markdown
    python scripts/hopper_loop_report.py --loop forward-64     the loop itself
    python scripts/hopper_loop_report.py first.cubin:64 second.cubin:128:5      kernels of another library

A FILE is followed by the head dim of its kernel and by how many products make up a tile: 2 in a forward, the
default, 5 in a backward. The report counts what one warp executes in one iteration of the loop that sass.py
finds, on the path without masking and without code for rare cases. Figures are for 64 x 128 scores of a
warpgroup; the sizes of an iteration's products tell how many scores it has. Stall counts are ptxas's
(sass.py), in cycles, the least time of a warp alone. It needs nvcc and nvdisasm, but no GPU.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import cuda_loop_report
import nvcc
import sass

ARCHITECTURE = "90a"
SCORES = 64 * 128  # the figures are for this many scores

DIMS = (64, 128)
_FORWARD = {
    f"forward-{dim}": cuda_loop_report.Kernel(
        "cuda/sm90/sm90_forward.cuh",
        "selfattn::cuda::sm90",
        "forward_kernel",
        f"Config<DType::kBFloat16, {dim}, {dim}, true>",
        2,
    )
    for dim in DIMS
}
_BACKWARD = {
    f"{side}-{dim}": cuda_loop_report.Kernel(
        "cuda/sm90/backward/sm90_gradients.cuh",
        "selfattn::cuda::sm90::backward",
        "backward_kernel",
        f"Config<DType::kBFloat16, {dim}, {dim}, Side::{name}, true>",
        products,
    )
    for dim in DIMS
    for side, name, products in (("queries", "kQuery", 3), ("keys", "kKeyValue", 4))
}
KERNELS = _FORWARD | _BACKWARD

#: Opcodes by purpose. Those of the uniform datapath begin with U.
KINDS = {
    "HGMMA": ("HGMMA",),
    "MUFU": ("MUFU",),
    "FFMA, FMUL, FADD": ("FFMA", "FMUL", "FADD"),
    "FMNMX": ("FMNMX",),
    "F2FP": ("F2FP",),
    "HMMA": ("HMMA",),
    "integer": ("IADD3", "IMAD", "LOP3", "SHF", "LEA", "PRMT", "MOV", "VIADD", "IMNMX", "VIMNMX"),
    "R2UR, uniform": ("R2UR", "U"),
    "compare, select": ("ISETP", "FSETP", "PLOP3", "SEL", "FSEL"),
    "SHFL, shared memory": ("SHFL", "LDS", "STS", "LDSM", "STSM"),
    "local memory": ("LDL", "STL"),
    "barriers, waits": ("SYNCS", "BAR", "WARPGROUP", "WARPSYNC", "DEPBAR", "MEMBAR", "FENCE"),
}
OTHERS = "others"
_ALL_KINDS = (*KINDS, OTHERS)


def kind_of(instruction: sass.Instruction) -> str:
    opcode = "U" if instruction.unit == "uniform" else instruction.opcode
    return next((kind for kind, opcodes in KINDS.items() if opcode in opcodes), OTHERS)


@dataclass(frozen=True)
class Column:
    """The column of a kernel in the table."""

    name: str
    registers: int  # per computing thread
    loop: list[sass.Instruction]
    scores: float  # per iteration and warpgroup

    @classmethod
    def of(cls, name: str, function: sass.Function, dim: int, products: int) -> Column:
        loop = sass.main_loop(function)
        multiplications = sum(math.prod(_shape(i)) for i in loop if i.opcode == "HGMMA")
        return cls(name, _most_registers(function), loop, multiplications / (products * dim))

    def cells(self) -> dict[str, str]:
        counts = Counter(map(kind_of, self.loop))
        share = SCORES / self.scores
        return {
            "registers": str(self.registers),
            "scores of an iteration": f"64 × {self.scores / 64:g}",
            "instructions of an iteration": str(len(self.loop)),
            "stall counts": f"{sum(i.stall for i in self.loop) * share:.0f}",
            "instructions": f"{len(self.loop) * share:.0f}",
            **{kind: f"{counts[kind] * share:.0f}" for kind in _ALL_KINDS},
        }


def _shape(product: sass.Instruction) -> list[int]:
    """Returns the sizes of a product: 64, 128, 16 for HGMMA.64x128x16.F32.BF16."""
    return [int(size) for size in product.name.split(".")[1].split("x")]


def _most_registers(function: sass.Function) -> int:
    """Returns the most registers per thread that a warpgroup takes after it has begun."""
    taken = [i.operands for i in function.code if i.opcode == "USETMAXREG"]
    return max((int(re.findall(r"0x[0-9a-f]+", operands)[-1], 16) for operands in taken), default=0)


def columns_of(toolchain: cuda_loop_report.Toolchain, names: Sequence[str]) -> list[Column]:
    found = []
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            toolchain.assemble(KERNELS[name], ARCHITECTURE, Path(folder))
            function = cuda_loop_report.function_of(toolchain.nvdisasm, Path(folder, "kernel.cubin"))
        found.append(Column.of(name, function, int(name.split("-")[1]), KERNELS[name].products))
    return found


def _column_of_file(toolchain: cuda_loop_report.Toolchain, given: tuple[Path, int, int]) -> Column:
    cubin, dim, products = given
    function = cuda_loop_report.function_of(toolchain.nvdisasm, cubin)
    return Column.of(cubin.stem, function, dim, products)


def table(columns: Sequence[Column]) -> tuple[list[str], list[list[str]]]:
    """Returns the header and a row per figure; a kind that no loop has is left out."""
    cells = [column.cells() for column in columns]
    rows = [
        [figure, *(found[figure] for found in cells)]
        for figure in cells[0]
        if figure not in _ALL_KINDS or any(found[figure] != "0" for found in cells)
    ]
    return ["", *(column.name for column in columns)], rows


def main(arguments: Sequence[str] | None = None) -> int:
    parsed = _parser().parse_args(arguments)
    compiler = cuda_loop_report.cuda_build.find_nvcc()
    nvdisasm = None if compiler is None else nvcc.find_nvdisasm(compiler.command)
    if compiler is None or nvdisasm is None:
        print("hopper_loop_report.py: error: no nvcc or no nvdisasm", file=sys.stderr)
        return 2
    toolchain = cuda_loop_report.Toolchain(compiler.command, nvdisasm, parsed.sources.resolve())
    if parsed.loop is not None:
        print(cuda_loop_report.listing(columns_of(toolchain, [parsed.loop])[0].loop))
        return 0
    columns = columns_of(toolchain, parsed.kernels)
    columns += [_column_of_file(toolchain, given) for given in parsed.cubins]
    header, rows = table(columns)
    show = cuda_loop_report.markdown if parsed.markdown else cuda_loop_report.terminal.table
    print(show(header, rows))
    return 0


def _cubin(given: str) -> tuple[Path, int, int]:
    found = re.fullmatch(r"(.+?):(\d+)(?::(\d+))?", given)
    if found is None:
        raise argparse.ArgumentTypeError(
            f"a FILE must be a cubin and its head dim, such as other.cubin:128, got {given!r}"
        )
    return Path(found[1]), int(found[2]), int(found[3] or 2)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cubins", nargs="*", type=_cubin, metavar="FILE:DIM[:PRODUCTS]")
    parser.add_argument("--kernels", nargs="*", choices=KERNELS, default=list(KERNELS), metavar="NAME")
    parser.add_argument("--sources", type=Path, default=cuda_loop_report.ROOT / "csrc", metavar="FOLDER")
    parser.add_argument("--markdown", action="store_true", help="print a table of Markdown")
    parser.add_argument("--loop", choices=KERNELS, metavar="NAME", help="print the instructions of a loop")
    return parser


if __name__ == "__main__":
    sys.exit(main())
