"""scripts/cuda_loop_report.py finds loops in machine code, and the model runs them as scheduled.
scripts/hopper_loop_report.py counts the instructions that kernels for Hopper execute.
"""

from __future__ import annotations

import functools

import cuda_loop_report
import hopper_loop_report
import loop_model
import nvcc
import pytest
import sass

from selfattn_ext.build import cuda_build

COMPILER = cuda_build.find_nvcc()
DISASSEMBLER = None if COMPILER is None else nvcc.find_nvdisasm(COMPILER.command)
needs_nvcc = pytest.mark.skipif(DISASSEMBLER is None, reason="no nvcc or no nvdisasm on this machine")

PRODUCT = "HMMA.16816.F32.BF16 R4, R8, R10, R4"
LOAD = "LDSM.16.M88.4 R8, [R1]"
COPY = "LDGSTS.E.BYPASS.128 [R2], [R4.64]"
ONE_BLOCK = loop_model.Residents(blocks=1, warps=4)
TWO_BLOCKS = loop_model.Residents(blocks=2, warps=4)


def control(stall: int = 1, sets: int = 7, holds: int = 7, waits: tuple[int, ...] = ()) -> int:
    return stall | sets << 5 | holds << 8 | sum(1 << n for n in waits) << 11


def text_of(*lines: str | tuple[str, int]) -> str:
    """The output of nvdisasm for labels and instructions; an instruction is its text, or its text with its
    control bits.
    """
    printed = ['\t.section\t.text._Z1kv,"ax",@progbits']
    for line in lines:
        if isinstance(line, str) and line.startswith(".L"):
            printed.append(f"{line}:")
            continue
        words, bits = (line, control()) if isinstance(line, str) else line
        printed += [f"        /*0010*/  {words} ;  /* 0x1 */", f"        /* 0x{bits << 41:016x} */"]
    return "\n".join(printed)


def loop_of(*lines: str | tuple[str, int]) -> list[sass.Instruction]:
    (function,) = sass.parse(text_of(".L_x_0", *lines, "@P0 BRA `(.L_x_0)", "EXIT"))
    return sass.main_loop(function)


def test_instructions_and_their_control_bits() -> None:
    text = text_of(
        ("@!P3 " + LOAD, control(stall=4, sets=2, waits=(0, 5))), (PRODUCT, control(stall=0, holds=1))
    )
    (function,) = sass.parse(text)
    load, product = function.code
    assert (load.predicate, load.name, load.operands) == ("@!P3", "LDSM.16.M88.4", "R8, [R1]")
    assert (load.opcode, load.unit, load.stall, load.sets, load.holds) == ("LDSM", "LDSM", 4, 2, None)
    assert load.waits == (0, 5)
    assert (product.unit, product.stall, product.sets, product.holds) == ("tensor", 1, None, 1)
    assert product.waits == ()


def test_the_main_loop_is_the_one_with_most_products() -> None:
    text = text_of(
        PRODUCT, PRODUCT, PRODUCT,
        ".L_x_0",
        "FADD R0, R0, R0",
        "@P0 BRA `(.L_x_0)",
        ".L_x_1",
        "@P1 BRA `(.L_x_2)",
        "IADD3 R0, R0, R0", "IADD3 R0, R0, R0",  # the rare path
        ".L_x_2",
        "@P2 BRA `(.L_x_3)",
        PRODUCT, COPY,  # the usual path
        ".L_x_3",
        PRODUCT,
        "@P0 BRA `(.L_x_1)",
        "EXIT",
    )  # fmt: skip
    (function,) = sass.parse(text)
    opcodes = [instruction.opcode for instruction in sass.main_loop(function)]
    assert opcodes == ["BRA", "BRA", "HMMA", "LDGSTS", "HMMA", "BRA"]


def test_of_loops_with_as_many_products_it_is_the_shorter_one() -> None:
    text = text_of(
        ".L_x_0", PRODUCT, "FSEL R0, R0, R0, P1", "@P0 BRA `(.L_x_0)",
        ".L_x_1", PRODUCT, "@P0 BRA `(.L_x_1)",
        ".L_x_2", PRODUCT, "ISETP.GT.AND P1, PT, R0, R1, PT", "@P0 BRA `(.L_x_2)",
        "EXIT",
    )  # fmt: skip
    (function,) = sass.parse(text)
    assert [instruction.opcode for instruction in sass.main_loop(function)] == ["HMMA", "BRA"]


def test_products_that_wait_for_nothing_keep_tensor_cores_busy() -> None:
    assert loop_model.tensor_share(loop_of(*[PRODUCT] * 64), 80, ONE_BLOCK) > 0.98


def test_a_load_right_before_its_product_stalls_it() -> None:
    at_once = [(LOAD, control(sets=0)), (PRODUCT, control(waits=(0,)))]
    ahead = [(LOAD, control(sets=0)), *[PRODUCT] * 6, (PRODUCT, control(waits=(0,)))]
    loops = [loop_of(*lines * 8) for lines in (at_once, ahead)]
    shares = [loop_model.tensor_share(loop, 80, ONE_BLOCK) for loop in loops]
    # At once, a product of 8 cycles takes 31. Ahead, each load has 7 products, the first of which hide it.
    assert 0.15 < shares[0] < 0.3
    assert shares[1] > 0.9
    assert loop_model.tensor_share(loops[0], 80, TWO_BLOCKS) > 1.8 * shares[0]


def test_how_far_loads_are_ahead() -> None:
    loop = loop_of(
        (LOAD, control(stall=2, sets=0)),
        (PRODUCT, control(stall=12)),
        (PRODUCT, control(stall=10, waits=(0,))),
        (LOAD, control(stall=1, sets=1)),
        (PRODUCT, control(stall=3, waits=(1,))),
    )
    assert loop_model.load_distances(loop) == [14, 1]


def test_barriers_and_copies_hold_warps_up() -> None:
    products = [PRODUCT] * 32
    waits = [COPY, "LDGDEPBAR", "DEPBAR.LE SB0, 0x0"]
    free = loop_model.tensor_share(loop_of(*products), 80, ONE_BLOCK)
    barriers = loop_model.tensor_share(loop_of(*products, "BAR.SYNC 0x0"), 80, ONE_BLOCK)
    copies = loop_model.tensor_share(loop_of(*products, *waits), 80, ONE_BLOCK)
    assert free > barriers > copies
    assert copies < 0.4  # 256 cycles of products, 500 of a copy


def test_blocks_that_fit() -> None:
    kernel = cuda_loop_report.Compiled([], 254, 82_944, 4, 1)
    assert kernel.blocks(80) == 2
    assert kernel.blocks(86) == 1
    assert cuda_loop_report.Compiled([], 254, 82_945, 4, 1).blocks(80) == 1
    assert cuda_loop_report.Compiled([], 168, 1024, 4, 1).blocks(80) == 3


def test_counts_are_those_for_the_same_work() -> None:
    text = text_of(
        "USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xf0",
        ".L_x_0",
        *["HGMMA.64x32x16.F32.BF16 R24, gdesc[UR8], R24"] * 4,  # the scores of 32 keys at 64 dims
        *["HGMMA.64x64x16.F32.BF16 R88, R180, gdesc[UR8].tnspB, R88"] * 2,
        ("MUFU.EX2 R5, R5", control(stall=8)),
        "R2UR UR6, R18",
        "UIADD3 UR6, UR7, 0x2, URZ",
        "@!P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R0+URZ+0x20], RZ",
        "@P0 BRA `(.L_x_0)",
        "USETMAXREG.DEALLOC.CTAPOOL 0x18",
        "EXIT",
    )  # fmt: skip
    (function,) = sass.parse(text)
    cells = hopper_loop_report.Column.of("forward", function, 64, 2).cells()
    assert {kind: cell for kind, cell in cells.items() if cell != "0"} == {
        "registers": "240",
        "scores of an iteration": "64 × 32",
        "instructions of an iteration": "11",
        "stall counts": "72",
        "instructions": "44",
        "HGMMA": "24",
        "MUFU": "4",
        "R2UR, uniform": "8",
        "barriers, waits": "4",
        "others": "4",
    }


@needs_nvcc
def test_the_report_for_hopper(capsys: pytest.CaptureFixture[str]) -> None:
    assert hopper_loop_report.main(["--kernels", "forward-64", "--markdown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    cells = dict([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    assert cells["scores of an iteration"] == "64 × 128"
    assert cells["HGMMA"] == "12"
    assert 64 <= int(cells["MUFU"]) < 80
    assert "local memory" not in cells


def test_a_cubin_comes_with_its_head_dim(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        hopper_loop_report.main(["other.cubin"])
    assert "such as other.cubin:128" in capsys.readouterr().err


@needs_nvcc
def test_the_report_of_a_kernel(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    toolchain = cuda_loop_report.Toolchain(COMPILER.command, DISASSEMBLER, cuda_loop_report.ROOT / "csrc")
    once = functools.cache(toolchain.compile)  # both calls need the same
    monkeypatch.setattr(cuda_loop_report.Toolchain, "compile", lambda self, *kernel: once(*kernel))
    assert cuda_loop_report.main(["--kernels", "forward-64", "--archs", "80", "--markdown"]) == 0
    *_, row = capsys.readouterr().out.splitlines()
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[0] == "forward-64, sm_80"
    assert cells[1] == "2 × 4 warps"
    assert 2 < float(cells[4]) < 10
    assert 30 < float(cells[7].rstrip("%")) < 100
    assert cuda_loop_report.main(["--loop", "forward-64", "--archs", "80"]) == 0
    assert "HMMA.16816.F32.BF16" in capsys.readouterr().out


def test_bad_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cuda_loop_report.main(["--archs", "75"])
    assert end.value.code == 2
    assert "the model knows the architectures 80, 90" in capsys.readouterr().err
