"""The kernels for AMX on a processor without it, by emulation.

The emulator of simulators/amx is preloaded into processes that force the instruction set "amx". If
AVX-512 is missing, too, they and the kernels for AVX-512 run in the library of simulators/avx512.
"""

from __future__ import annotations

import ast
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import modules
import pytest
import turns
import warm
from avx512 import build

from selfattn_ext import backends
from selfattn_ext.build import library, toolchain

TESTS = modules.TESTS
EMULATOR = TESTS.parent / "simulators" / "amx"
#: The other instructions that kernels with AMX use.
NEEDED = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16")
FEATURES = library.extension().cpu_features()
#: Whether the vectors have to be emulated, too.
EMULATES_VECTORS = not all(FEATURES[name] for name in NEEDED)
#: Modules of the suite, and which of their tests run here; one process runs all of them.
CHOSEN = {
    "test_declared_options.py": "amx",
    "test_flex_blocks.py": "every_kind and bfloat16 and 96",
    "test_flex_options.py": "statistics",
    "test_gradients.py": "fused-amx and (rounding_of_the_output and plain or mask_gradient_has)",
    "test_options_pairwise.py": "fused-amx",
    "test_paged.py": "every_option and amx",
    "test_sparse_attention.py": "amx and kinds and bfloat16",
}

#: Those that take over four seconds each in the emulator; .ci/run runs them.
LONG = {
    "test_amx_choice.py": "",
    "test_bfloat16_derivatives.py": "amx",
    "test_determinism.py": "amx",
    "test_flex_blocks.py": "every_kind",
    "test_gradient_blocks.py": "amx and not with_and_without",
    "test_pieces.py": "amx",
    "test_ragged_blocks.py": "fused-amx",
    "test_rising_scores.py": "fused-amx and not any_number",
    "test_sequences.py": "amx",
    "test_sparse_attention.py": "amx",
    "test_varlen_cache.py": "company and amx",
}

#: Tests of AVX-512 without tiles.
VECTORS = {
    "test_bfloat16_derivatives.py": "avx512",
    "test_declared_options.py": "avx512",
    "test_determinism.py": "avx512",
    "test_rising_scores.py": "fused and not any_number",
    "test_options_pairwise.py": "fused",
    "test_pieces.py": "avx512",
    "test_sequences.py": "avx512",
}


def _why_not() -> str | None:
    """Returns why nothing can be emulated here, or None."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "AMX is emulated on Linux and x86-64 only"
    if FEATURES["amx_bf16"]:
        return "this processor has AMX: all tests run on it without an emulator"
    missing = [name for name in ("avx2", "fma", "f16c") if not FEATURES[name]]
    return f"the emulated vectors need {', '.join(missing)}" if missing else None


def emulated(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test that runs in the emulator, or only on request if compiling the emulator takes minutes."""
    test = pytest.mark.skipif(_why_not() is not None, reason=str(_why_not()))(test)
    return pytest.mark.emulated_vectors(test) if EMULATES_VECTORS else test


#: Executes bytes of machine code, and asks the emulator what it has executed.
MACHINE_CODE = """
import ctypes, faulthandler, mmap

count = ctypes.CDLL(None).selfattn_amx_emulator_count
count.argtypes, count.restype = [ctypes.c_char_p], ctypes.c_uint64

def run(code):
    memory = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    memory.write(bytes.fromhex(code) + b"\\xc3")
    ctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(memory)))()
"""
ATTENTION = MACHINE_CODE + "import torch\nfrom selfattn_ext import backends, scaled_dot_product_attention\n"
TILERELEASE = "c4 e2 78 49 c0"


@pytest.fixture(scope="session")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Returns the environment of a process in the emulator."""
    if EMULATES_VECTORS:
        return build.environment()
    target = tmp_path_factory.mktemp("amx") / "libselfattn_amx_emulator.so"
    compiler = toolchain.compiler()
    assert compiler is not None, toolchain.compiler_problem()
    files = sorted(str(path) for path in EMULATOR.glob("*.cpp"))
    subprocess.run(
        [*compiler, "-std=c++17", "-O3", "-shared", "-fPIC", *files, "-ldl", "-o", str(target)], check=True
    )
    return {"LD_PRELOAD": str(target)}


@emulated
def test_tools_that_watch_for_faults_leave_it_alone(
    emulator: dict[str, str], run_python: Callable[..., str], tmp_path: Path
) -> None:
    """faulthandler, which pytest switches on, would take over SIGILL."""
    script = (
        "faulthandler.enable()\n"
        f"run('{TILERELEASE}')\n"
        "print(count(b'tilerelease'), count(b''), faulthandler.is_enabled(), flush=True)\n"
    )
    assert run_python(MACHINE_CODE + script, **emulator).split() == ["1", "1", "True"]
    with pytest.raises(subprocess.CalledProcessError) as error:
        run_python(MACHINE_CODE + script + "run('0f 0b')", **emulator)
    assert error.value.stdout.split() == ["1", "1", "True"]
    assert "Fatal Python error: Illegal instruction" in error.value.stderr


#: The instructions that forward and backward of one head execute with 64 queries, 64 keys and head dim 64. A
#: product of two 64 x 64 matrices is 4 x 4 tiles of the result, 2 deep: 32. The forward has two; the backward
#: has five, and delta, the diagonal of one (4 tiles, 2 deep), which 16-bit inputs take twice (for the output
#: and for its rounding error). "high" takes three products of pieces, "highest" six, float16 three, but four
#: for scores, dP and delta.
EXECUTED = {
    ("bfloat16", "highest"): (2 * 32, 5 * 32 + 2 * 8),
    ("float16", "highest"): (7 * 32, 4 * (2 * 32 + 2 * 8) + 3 * 3 * 32),
    ("float32", "medium"): (2 * 32, 5 * 32 + 8),
    ("float32", "high"): (3 * 2 * 32, 3 * (5 * 32 + 8)),
    ("float32", "highest"): (6 * 2 * 32, 6 * (5 * 32 + 8)),
    ("float64", "highest"): (0, 0),
}


@emulated
def test_every_arithmetic_executes_its_products(
    emulator: dict[str, str], run_python: Callable[..., str]
) -> None:
    """Forward mode has three products of inputs and three with weights, which are three pieces; second
    derivatives have five, with delta as above, and seven.
    """
    script = """
from torch.func import jvp

def executed(dtype, precision, queries=64, head_dim=64, **options):
    torch.set_float32_matmul_precision(precision)
    shapes = [(1, 1, length, head_dim) for length in (queries, 64, 64)]
    q, k, v = (torch.randn(shape, dtype=getattr(torch, dtype), requires_grad=True) for shape in shapes)
    start = count(b"tdpbf16ps")
    out = scaled_dot_product_attention(q, k, v, **options)
    middle = count(b"tdpbf16ps")
    out.sum().backward()
    return backends.explain(q, k, v, **options).isa, middle - start, count(b"tdpbf16ps") - middle

def of_derivatives(dtype):
    points, tangents = (tuple(torch.randn(1, 1, 64, 64).to(dtype) for _ in range(3)) for _ in range(2))
    start = count(b"tdpbf16ps")
    jvp(scaled_dot_product_attention, points, tangents)
    forward = count(b"tdpbf16ps") - start
    for point in points:
        point.requires_grad_()
    grads = torch.autograd.grad(scaled_dot_product_attention(*points).sum(), points, create_graph=True)
    start = count(b"tdpbf16ps")
    torch.autograd.grad(grads, points, tangents)
    return forward, count(b"tdpbf16ps") - start

"""
    calls = [f"executed{name}" for name in EXECUTED]
    few = [f"executed({dtype!r}, {precision!r}, 4)" for dtype, precision in EXECUTED]
    elsewhere = ["executed('bfloat16', 'highest', head_dim=15)", "executed('float16', 'highest', scale=-1.0)"]
    derivatives = [f"of_derivatives(torch.{dtype})" for dtype in ("bfloat16", "float16", "float32")]
    script += f"print([{', '.join(calls + few + elsewhere + derivatives)}])"
    printed = run_python(ATTENTION + script, **emulator, SELFATTN_CPU_ISA="amx")
    expected = [
        ("amx" if forward else "avx512", forward, backward) for forward, backward in EXECUTED.values()
    ]
    # The scores of up to 16 queries and 64 keys are 4 x 1 tiles, 2 deep; the values take as many.
    expected += [("amx", 16 if name[0] == "bfloat16" else 0, 0) for name in EXECUTED]
    expected += [("avx512", 0, 0)] * len(elsewhere)
    of_pairs = ((3 + 3 * 3) * 32, 5 * 32 + 2 * 8 + 7 * 3 * 32)
    assert ast.literal_eval(printed) == [*expected, of_pairs, (0, 0), (0, 0)]


@pytest.mark.skipif("amx" not in backends.cpu_isas(), reason="this processor lacks AMX")
def test_a_processor_with_amx_leaves_it_nothing_to_do(
    emulator: dict[str, str], run_python: Callable[..., str]
) -> None:
    script = """
q = torch.randn(1, 1, 64, 64, dtype=torch.bfloat16)
out = scaled_dot_product_attention(q, q, q)
print(backends.explain(q, q, q).isa, count(b""), bool(out.isfinite().all()))
"""
    printed = run_python(ATTENTION + script, **emulator, SELFATTN_CPU_ISA="amx")
    assert printed.split() == ["amx", "0", "True"]


RUN_TESTS = """
import pytest, sys

for path, chosen in {chosen}:
    before = count(b"tdpbf16ps")
    if pytest.main(["-q", "-p", "no:cacheprovider", path, "-k", chosen]) != 0:
        sys.exit(1)
    print("products of tiles:", count(b"tdpbf16ps") - before, flush=True)
"""


def run_tests(chosen: dict[str, str], isa: str, emulator: dict[str, str]) -> list[int]:
    """Runs the chosen tests of modules in one process in the emulator, asserts success, and returns how many
    products of tiles each module has executed.
    """
    script = RUN_TESTS.format(chosen=[(str(modules.paths()[name]), which) for name, which in chosen.items()])
    run = subprocess.run(
        [sys.executable, "-c", MACHINE_CODE + script],
        env=warm.variables(SELFATTN_CPU_ISA=isa, **emulator),
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return [int(number) for number in re.findall(r"^products of tiles: (\d+)$", run.stdout, re.MULTILINE)]


@emulated
def test_tests_pass_in_the_emulator(emulator: dict[str, str]) -> None:
    executed = run_tests(CHOSEN, "amx", emulator)
    assert len(executed) == len(CHOSEN)
    assert all(executed), dict(zip(CHOSEN, executed, strict=True))


@emulated
@pytest.mark.thorough
@(turns.only_in(2, 3) if EMULATES_VECTORS else lambda test: test)
@pytest.mark.parametrize("module", LONG)
def test_long_tests_pass_in_the_emulator(module: str, emulator: dict[str, str]) -> None:
    (executed,) = run_tests({module: LONG[module]}, "amx", emulator)
    assert executed > 0


@emulated
@pytest.mark.skipif(not EMULATES_VECTORS, reason="this processor has AVX-512: all tests run on it")
@pytest.mark.parametrize("isa", ["avx512", "avx512_bf16"])
@pytest.mark.parametrize("module", VECTORS)
def test_tests_pass_with_emulated_vectors(module: str, isa: str, emulator: dict[str, str]) -> None:
    # "avx512" alone would also match "avx512_bf16".
    of_isa = f"avx512 and {'not ' if isa == 'avx512' else ''}bf16"
    run_tests({module: f"({VECTORS[module]}) and {of_isa}"}, isa, emulator)
