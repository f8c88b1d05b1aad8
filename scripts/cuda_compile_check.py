"""A check that compiles every CUDA kernel for every architecture and judges the result.

    python scripts/cuda_compile_check.py                     every source, every architecture
    python scripts/cuda_compile_check.py --archs 90a --jobs 1
    python scripts/cuda_compile_check.py --sparse            two architectures per source
    python scripts/cuda_compile_check.py --sparse --turn 7   sm_80 for a quarter, another for a sixth
    python scripts/cuda_compile_check.py merge_splits.cu --json report.json

It needs nvcc and, to read the machine code, nvdisasm (pip install nvidia-cuda-nvdisasm), but no GPU and no
torch. Warnings are errors. No kernel may spill registers, use local or static shared memory, or exceed its
limit of registers; kernels for tensor cores must hold their instructions. The limits are in kernel_limits.py.
Results are remembered by the content of the sources, so a second run takes seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace

import compiler_report
import kernel_limits
import nvcc

ROOT = Path(__file__).resolve().parents[1]
# They are loaded by path, because importing the package would load torch and the compiled library.
sources = SimpleNamespace(**runpy.run_path(str(ROOT / "selfattn_ext" / "build" / "sources.py")))
cuda_build = SimpleNamespace(**runpy.run_path(str(ROOT / "selfattn_ext" / "build" / "cuda_build.py")))
terminal = SimpleNamespace(**runpy.run_path(str(ROOT / "selfattn_ext" / "terminal.py")))

#: The architectures of a build on a machine without a GPU, in nvcc's notation: "80", "90a".
ARCHITECTURES = tuple(name.replace(".", "") for name in cuda_build.DEFAULT_ARCHITECTURES)
#: The architecture that every source is compiled for if not all pairs are.
_EVERYWHERE = "80"
#: How many turns it takes until every source has been compiled for it, and for another one.
_COMMON_TURNS, _OTHER_TURNS = 4, 6
# The oldest architecture that has the instructions of the sm80 kernels, which are empty on older ones.
_AMPERE = 80
# The only architecture that has the instructions of the sm90 kernels, which are empty on others.
_HOPPER = "90a"
_HOPPERS_OWN = {
    "HGMMA": "its products are not those of warpgroups",
    "UTMALDG": "its copies do not go by tensor maps",
    "USETMAXREG": "its warpgroups do not hand over registers",
}


@dataclass(frozen=True)
class Verdict:
    """One source compiled for one architecture."""

    source: str
    architecture: str
    kernels: dict[str, compiler_report.Usage]  # by mangled name, as instances of a template share the others
    tensor_instructions: int
    problems: list[str]
    seconds: float
    peak_mb: float
    remembered: bool

    @property
    def registers(self) -> int:
        """The registers of the kernel that uses most."""
        return max((usage.registers for usage in self.kernels.values()), default=0)


#: Sources that hold functions of the host alone.
WITHOUT_KERNELS = ("tensor_map.cu",)


def judge(source: Path, architecture: str, outcome: nvcc.Outcome) -> Verdict:
    """The verdict on one outcome, with everything that is wrong with it."""
    problems = [*compiler_report.remarks(outcome.report)]
    if outcome.exit_code != 0:
        problems += compiler_report.errors(outcome.report) or [f"nvcc ended with {outcome.exit_code}"]
    if outcome.peak_bytes > kernel_limits.COMPILER_BYTES:
        problems.append(f"compiling it takes {outcome.peak_bytes / 1e6:.0f} MB")
    usages = compiler_report.usage_of_kernels(outcome.report)
    if outcome.exit_code == 0 and not usages and source.name not in WITHOUT_KERNELS:
        problems.append("holds no kernel")
    tensor_instructions = 0
    for mangled, function in compiler_report.function_names(usages).items():
        usage = usages[mangled]
        opcodes = None if outcome.opcodes is None else outcome.opcodes.get(mangled, {})
        kernel = f"{source.parent.name}/{source.stem}/{function}"
        problems += [f"{kernel}: {problem}" for problem in _problems(kernel, architecture, usage, opcodes)]
        tensor_instructions += (opcodes or {}).get("HMMA", 0)
    return Verdict(
        str(source),
        architecture,
        usages,
        tensor_instructions,
        problems,
        outcome.seconds,
        outcome.peak_bytes / 1e6,
        outcome.remembered,
    )


def _problems(
    kernel: str, architecture: str, usage: compiler_report.Usage, opcodes: dict[str, int] | None
) -> list[str]:
    found = []
    limit = kernel_limits.limit_of(kernel)
    if limit is None:
        return ["scripts/kernel_limits.py has no limit for it"]
    if usage.registers > limit.registers:
        found.append(f"{usage.registers} registers, allowed are {limit.registers}")
    if usage.spill_bytes:
        found.append(f"{usage.spill_bytes} bytes of register spills")
    if usage.stack_bytes:
        found.append(f"{usage.stack_bytes} bytes of local memory")
    if usage.static_shared_bytes:
        found.append(
            f"{usage.static_shared_bytes} bytes of static shared memory; kernels take it dynamically"
        )
    if opcodes is not None:
        if accesses := opcodes.get("LDL", 0) + opcodes.get("STL", 0):
            found.append(f"{accesses} accesses to local memory")
        tensor_cores = limit.tensor_cores and nvcc.architecture_number(architecture) >= _AMPERE
        if tensor_cores and not opcodes.get("HMMA"):
            found.append("no HMMA instruction: its products do not run on tensor cores")
        if limit.hopper and architecture == _HOPPER:
            found += [
                f"no {opcode} instruction: {why}"
                for opcode, why in _HOPPERS_OWN.items()
                if not opcodes.get(opcode)
            ]
            tensor_cores = True
        if tensor_cores and kernel_limits.stores_16_bytes(kernel) and not opcodes.get("STG.128"):
            found.append("no store of 16 bytes")
    return found


def _for_hopper(source: Path) -> bool:
    """Whether its kernels are empty for other architectures, whose PTX is then not that for sm_90a."""
    return "sm90" in source.parts


def tasks(
    files: Sequence[Path], architectures: Sequence[str], sparse: bool, turn: int | None = None
) -> list[tuple[Path, str]]:
    """Pairs of a source and an architecture to compile it for: all of them, or if sparse, every source for
    sm_80 and one other. Kernels that are empty elsewhere are compiled for sm_90a instead of sm_80.

    Sources are instances of few templates, so that an error on one architecture shows in most of them. With a
    turn only a quarter of the sources are compiled for sm_80 and a sixth for another architecture; the next
    turn takes other sources. Six turns for each other architecture meet all pairs.
    """
    if not sparse or len(architectures) < 3:
        return [(file, architecture) for file in files for architecture in architectures]

    def chosen(index: int) -> set[str]:
        wanted = _HOPPER if _for_hopper(files[index]) else _EVERYWHERE
        common = wanted if wanted in architectures else architectures[0]
        others = [architecture for architecture in architectures if architecture != common]
        if turn is None:
            return {common, others[index % len(others)]}
        found = {common} if (index + turn) % _COMMON_TURNS == 0 else set()
        if (index - turn) % _OTHER_TURNS == 0:
            found.add(others[(index + turn // _OTHER_TURNS) % len(others)])
        return found

    return [
        (file, architecture)
        for index, file in enumerate(files)
        for architecture in architectures
        if architecture in chosen(index)
    ]


def together(order: Sequence[tuple[Path, str]]) -> list[tuple[Path, list[str]]]:
    """The tasks, with those of a source joined that have the same PTX."""
    found: dict[tuple[Path, Sequence[str]], list[str]] = {}
    for source, architecture in order:
        groups = [names for names in nvcc.SAME_PTX if not (_for_hopper(source) and _HOPPER in names)]
        same = next((names for names in groups if architecture in names), (architecture,))
        found.setdefault((source, same), []).append(architecture)
    return [(source, architectures) for (source, _), architectures in found.items()]


def check(compiler: nvcc.Compiler, order: Sequence[tuple[Path, str]], jobs: int) -> list[Verdict]:
    """Compiles and judges each task, with a progress bar; verdicts are in the order of the tasks.

    Architectures that have the same PTX share the compiler's front end. That it is the same is verified with
    the first source of each folder, because the sources of a folder are instances of the same templates.
    """
    verdicts = {}
    folders = {source.parent: source for source, _ in reversed(order)}
    with (
        ThreadPoolExecutor(jobs) as pool,
        terminal.Progress("compiling", len(order)) as progress,
    ):
        running = {
            pool.submit(compiler.compile, source, names, folders[source.parent] == source): (source, names)
            for source, names in together(order)
        }
        for future in as_completed(running):
            source, names = running[future]
            for name, outcome in zip(names, future.result(), strict=True):
                verdicts[source, name] = judge(source, name, outcome)
            progress.update(len(verdicts), f"{source.name} sm_{names[-1]}")
    return [verdicts[task] for task in order]


def text(verdicts: Sequence[Verdict]) -> str:
    """Returns a line per source: registers for each architecture, HMMA instructions, cost of compiling."""
    architectures = sorted({verdict.architecture for verdict in verdicts}, key=nvcc.architecture_number)
    rows = []
    for source in dict.fromkeys(verdict.source for verdict in verdicts):
        found = {verdict.architecture: verdict for verdict in verdicts if verdict.source == source}
        cells = [_registers(found.get(architecture)) for architecture in architectures]
        most = max(found.values(), key=lambda verdict: verdict.tensor_instructions)
        rows.append(
            [
                _shown(source),
                *cells,
                str(most.tensor_instructions or "-"),
                f"{sum(verdict.seconds for verdict in found.values()):.1f}",
                f"{max(verdict.peak_mb for verdict in found.values()):.0f}",
            ]
        )
    header = ["registers", *(f"sm_{name}" for name in architectures), "HMMA", "seconds", "MB"]
    lines: str = terminal.table(header, rows)
    return lines


def _registers(verdict: Verdict | None) -> str:
    if verdict is None:
        return ""
    return f"{verdict.registers or ''}{'!' if verdict.problems else ''}"


def _shown(source: str) -> str:
    path = Path(source)
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def _cost(verdicts: Sequence[Verdict]) -> str:
    """How long one core takes to compile everything for one architecture."""
    seconds: dict[str, float] = {}
    for verdict in verdicts:
        seconds[verdict.architecture] = seconds.get(verdict.architecture, 0.0) + verdict.seconds
    return "compiler seconds: " + ", ".join(f"sm_{name} {total:.0f}" for name, total in seconds.items())


def summary(verdicts: Sequence[Verdict], elapsed: float) -> str:
    """Returns the problems, the cost, and one line about the whole."""
    lines = [
        f"{_shown(verdict.source)} for sm_{verdict.architecture}: {problem}"
        for verdict in verdicts
        for problem in verdict.problems
    ]
    remembered = sum(verdict.remembered for verdict in verdicts)
    failed = bool(lines)
    lines += [
        _cost(verdicts),
        f"{'FAILED' if failed else 'passed'}: {len(verdicts)} compilations ({remembered} remembered) in "
        f"{elapsed:.0f} s, {sum(bool(v.problems) for v in verdicts)} with problems",
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parsed = _parser().parse_args(arguments)
    found = cuda_build.find_nvcc()
    if found is None:
        return _usage_error("no nvcc in $CUDA_HOME, on PATH or in /usr/local/cuda: install CUDA")
    nvdisasm = None if parsed.no_sass else nvcc.find_nvdisasm(found.command)
    if nvdisasm is None and not parsed.no_sass:
        return _usage_error("no nvdisasm: pip install nvidia-cuda-nvdisasm, or leave it out with --no-sass")
    files = [_found(path.resolve(), parsed.cache) for path in parsed.files] or kernel_sources(parsed.cache)
    if missing := [str(path) for path in files if not path.is_file()]:
        return _usage_error(f"no such file: {', '.join(missing)}")
    start = time.perf_counter()
    compiler = nvcc.Compiler(found.command, nvdisasm, sources.cuda_flags(), parsed.cache)
    verdicts = check(compiler, tasks(files, parsed.archs, parsed.sparse, parsed.turn), parsed.jobs)
    print(text(verdicts), summary(verdicts, time.perf_counter() - start), sep="\n\n")
    if parsed.json is not None:
        parsed.json.write_text(json.dumps([asdict(v) for v in verdicts], indent=1) + "\n", encoding="utf-8")
    return int(any(verdict.problems for verdict in verdicts))


def kernel_sources(cache: Path) -> list[Path]:
    """All CUDA sources; the instances of templates are written into a folder of the cache."""
    listed = sources.extension_sources(cuda=True, instances_in=cache / "instances")
    return [Path(path) for path in listed if path.endswith(".cu")]


def _found(path: Path, cache: Path) -> Path:
    """A file, or else the CUDA source of this name."""
    if path.is_file():
        return path
    return next((source for source in kernel_sources(cache) if source.name == path.name), path)


def _usage_error(message: str) -> int:
    print(f"cuda_compile_check.py: error: {message}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "files", nargs="*", type=Path, metavar="FILE", help="sources, or their names (default: all)"
    )
    parser.add_argument(
        "--archs",
        type=_architectures,
        default=list(ARCHITECTURES),
        metavar="N,N",
        help=f"architectures (default: {','.join(ARCHITECTURES)})",
    )
    parser.add_argument(
        "--sparse",
        action="store_true",
        help=f"every source for sm_{_EVERYWHERE} and one other architecture, not for all of them",
    )
    parser.add_argument(
        "--turn", type=int, metavar="N", help="with --sparse: compile only a part of the pairs, chosen by N"
    )
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="compilers that run at once"
    )
    parser.add_argument("--no-sass", action="store_true", help="leave out the checks that need nvdisasm")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything to this file")
    parser.add_argument(
        "--cache",
        type=Path,
        default=ROOT / "build" / "compile-check",
        metavar="FOLDER",
        help="where results are remembered (default: build/compile-check)",
    )
    return parser


def _architectures(given: str) -> list[str]:
    names = given.split(",")
    for name in names:
        try:
            nvcc.architecture_number(name)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return names


if __name__ == "__main__":
    sys.exit(main())
