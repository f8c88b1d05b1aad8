"""Compilation of a CUDA source for several architectures, with remembered outcomes."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import compiler_report

#: With these flags, warnings of every stage are errors; ptxas reports registers, and fails on spills and
#: local memory.
STRICT = ("-Werror", "all-warnings", "-Xptxas", "-v,-warn-spills,-warn-lmem-usage,-Werror")

#: Architectures for which nvcc's front end, over half of its work, makes the same PTX, unless a source asks
#: for its architecture, as those for Hopper do.
SAME_PTX = (("80", "90a"), ("100", "120"))

# Raised whenever Outcome or the way to make one changes.
_FORMAT = 3


@dataclass(frozen=True)
class Outcome:
    """The outcome of compiling one source for one architecture."""

    exit_code: int
    report: str  # everything that nvcc and its stages printed
    seconds: float
    peak_bytes: int  # memory of the largest process among nvcc and its stages
    opcodes: dict[str, dict[str, int]] | None  # by mangled function; None without nvdisasm
    remembered: bool = False


def find_nvdisasm(nvcc: str) -> str | None:
    """Returns the path of nvdisasm: beside nvcc, on PATH, or from the package nvidia-cuda-nvdisasm."""
    packages = Path(sysconfig.get_path("purelib"), "nvidia")
    places = [str(Path(nvcc).parent), os.environ.get("PATH", ""), *map(str, packages.glob("*/bin"))]
    return shutil.which("nvdisasm", path=os.pathsep.join(places))


class Compiler:
    """nvcc with the flags of the build and STRICT.

    Args:
        nvcc, nvdisasm: the programs; without nvdisasm no opcodes are counted.
        flags: the flags that the build passes to nvcc.
        cache: a folder for outcomes without an error.
    """

    def __init__(self, nvcc: str, nvdisasm: str | None, flags: Sequence[str], cache: Path) -> None:
        self._nvcc, self._nvdisasm, self._flags = nvcc, nvdisasm, [*flags, *STRICT]
        self._cache = cache
        tools = [[program, "--version"] for program in (nvcc, nvdisasm) if program is not None]
        self._versions = [subprocess.run(tool, capture_output=True, text=True).stdout for tool in tools]

    def compile(self, source: Path, architectures: Sequence[str], compare: bool = False) -> list[Outcome]:
        """Compiles, or recalls the outcome of the same text with the same compiler.

        Args:
            source: the file to compile.
            architectures: in nvcc's form without ``sm_``: one of them, or several of a group of SAME_PTX.
                The front end runs for the first that is not remembered.
            compare: run the front end for each, and fail if the PTX is not the same.
        """
        found = {name: _recall(self._record(source, name)) for name in architectures}
        missing = [name for name in architectures if found[name] is None]
        if missing:
            found.update(self._compile(source, missing, compare))
        return [outcome for outcome in found.values() if outcome is not None]

    def _compile(self, source: Path, architectures: Sequence[str], compare: bool) -> dict[str, Outcome]:
        first, *others = architectures
        with tempfile.TemporaryDirectory() as folder:
            ptx, dependencies = Path(folder, "kernels.ptx"), Path(folder, "dependencies")
            front = self._run(folder, "-ptx", source, ptx, first, "-MMD", "-MF", str(dependencies))
            if front.exit_code != 0:
                return dict.fromkeys(architectures, front)
            files = _files_of(dependencies.read_text(encoding="utf-8"))
            text = ptx.read_text(encoding="utf-8")
            found = {first: self._assemble(folder, text, front, first)}
            for name in others:
                report = ""
                if compare:
                    own = self._run(folder, "-ptx", source, ptx, name)
                    same = own.exit_code == 0 and _same(ptx.read_text(encoding="utf-8"), text)
                    report = "" if same else f"error: the PTX for sm_{name} is not that for sm_{first}\n"
                outcome = self._assemble(folder, text, Outcome(int(bool(report)), report, 0.0, 0, None), name)
                found[name] = outcome
        for name, outcome in found.items():
            if outcome.exit_code == 0:
                _remember(self._record(source, name), outcome, files)
        return found

    def _assemble(self, folder: str, text: str, front: Outcome, architecture: str) -> Outcome:
        """Assembles the PTX; returns what both halves printed, and their time and memory."""
        ptx, cubin = Path(folder, "target.ptx"), Path(folder, "kernels.cubin")
        ptx.write_text(_for_target(text, architecture), encoding="utf-8")
        back = self._run(folder, "-cubin", ptx, cubin, architecture)
        return Outcome(
            front.exit_code or back.exit_code,
            front.report + back.report,
            front.seconds + back.seconds,
            max(front.peak_bytes, back.peak_bytes),
            _opcodes(self._nvdisasm, cubin) if back.exit_code == 0 and self._nvdisasm is not None else None,
        )

    def _run(
        self, folder: str, to: str, source: Path, target: Path, architecture: str, *more: str
    ) -> Outcome:
        code = ("compute_" if to == "-ptx" else "sm_") + architecture
        command = [self._nvcc, to, "-o", str(target), "-gencode", f"arch=compute_{architecture},code={code}"]
        return _run([*command, *more, *self._flags, str(source)], Path(folder, "report"))

    def _record(self, source: Path, architecture: str) -> Path:
        what = [_FORMAT, str(source.resolve()), architecture, self._flags, self._versions]
        name = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]
        return self._cache / f"{source.stem}.{architecture}.{name}.json"


def _for_target(ptx: str, architecture: str) -> str:
    return re.sub(r"^\.target sm_\w+", f".target sm_{architecture}", ptx, count=1, flags=re.MULTILINE)


def _same(ptx: str, other: str) -> bool:
    """Tells whether two texts differ at most in their target and in the number of the compiler's process."""
    return _without_process(_for_target(ptx, "")) == _without_process(_for_target(other, ""))


def _without_process(text: str) -> str:
    """Removes names of unnamed namespaces, such as "53_GLOBAL__N__", which contain that number."""
    return re.sub(r"(\d\d)(_GLOBAL__N__\w+)", lambda found: _without_process(found[2][int(found[1]) :]), text)


def _run(command: Sequence[str], output: Path) -> Outcome:
    start = time.perf_counter()
    with output.open("w+", encoding="utf-8", errors="replace") as file:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        # wait4 reports the resources of this child and its children alone, even if many jobs run at once.
        _, status, resources = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    report = output.read_text(encoding="utf-8", errors="replace")
    seconds = time.perf_counter() - start
    return Outcome(process.returncode, report, seconds, resources.ru_maxrss * 1024, None)


def _opcodes(nvdisasm: str, cubin: Path) -> dict[str, dict[str, int]]:
    text = subprocess.run([nvdisasm, "-c", str(cubin)], capture_output=True, text=True, check=True).stdout
    return {name: dict(counts) for name, counts in compiler_report.instructions(text).items()}


def _files_of(dependencies: str) -> list[str]:
    """Returns the files of a rule for make, "target : first \\ second"."""
    return shlex.split(dependencies.partition(" :")[2].replace("\\\n", " "))


def _digest(path: str) -> str | None:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return None


def _remember(record: Path, outcome: Outcome, files: Sequence[str]) -> None:
    record.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"files": {path: _digest(path) for path in files}, "outcome": asdict(outcome)})
    # The file gets its name when it is complete, as two runs may write it, or one may be interrupted.
    with tempfile.NamedTemporaryFile("w", dir=record.parent, delete=False, encoding="utf-8") as file:
        file.write(text)
    os.replace(file.name, record)


def _recall(record: Path) -> Outcome | None:
    try:
        found = json.loads(record.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    if any(_digest(path) != digest for path, digest in found["files"].items()):
        return None
    return replace(Outcome(**found["outcome"]), remembered=True)


def architecture_number(architecture: str) -> int:
    """Returns the number of an architecture, 90 for "90a"."""
    found = re.fullmatch(r"(\d+)[af]?", architecture)
    if found is None:
        raise ValueError(f"an architecture must be a number such as 80, 90a or 120, got {architecture!r}")
    return int(found[1])
