"""A copy of the checkout in which mutants are built and tested.

The copy is a git worktree, of the last commit where there is none yet, with a build folder of its own. What a
mutant's build and tests leave there goes afterwards: the build folder becomes again what it was before.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

#: A test that is silent for so many seconds hangs. Some tests compile CUDA kernels for minutes.
SILENT, SILENT_COMPILING = 180, 1500
#: Modules with these words may compile sources of csrc by themselves, and not only use the library.
_READS_SOURCES = re.compile(r"\bcsrc\b|emulat|ptx_machine|nvcc|sources\.root")
#: Folders of tests that are named otherwise than the folders that they test.
TESTS_OF = {
    "arguments": "attention", "autograd": "gradients", "bench": "benchmarks", "build": "building",
    "demo": "commands", "viz": "commands", "integrations": "with_torch", "ops": "with_torch",
    "isa": "cpu", "loops": "cpu", "pairs": "numerics", "core": "attention", "fused": "gradients",
}  # fmt: skip

_FAILED = re.compile(r"^(tests/\S+\.py::.+?) (?:FAILED|ERROR)\b", re.M)


class Outcome(NamedTuple):
    """How a run of tests ended: "" if all passed, else the first failed test, and what the run printed."""

    failed: str
    printed: str


class Copy:
    """The copy of a checkout."""

    def __init__(self, root: Path, folder: Path, junit: Path | None = None) -> None:
        self.root, self.folder = root, folder.resolve()
        #: What builds and tests find at the beginning, and the compiler.
        self.clean = folder.with_name(folder.name + "-clean").resolve()
        if not self.folder.exists():
            add = ["git", "worktree", "add", "--quiet", "--detach", str(self.folder)]
            subprocess.run(add, cwd=root, check=True)
        self.clean.mkdir(exist_ok=True)
        # Two runs in one copy would test each other's mutants.
        self.lock = (self.clean / "lock").open("w")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(f"another run uses {self.folder}")
        # A run that was killed has left its mutant.
        subprocess.run(["git", "checkout", "--quiet", "."], cwd=self.folder, check=True)
        marks = re.search(r'-m "(not [^"]+)"', (self.folder / "Makefile").read_text(encoding="utf-8"))
        self.marks = marks[1] if marks else ""
        tests = self.folder / "tests"
        paths = (path for path in sorted(tests.rglob("test_*.py")) if path.parent != tests / "clients")
        self.texts = {
            path.relative_to(self.folder).as_posix(): path.read_text(encoding="utf-8") for path in paths
        }
        self.seconds = _seconds(junit, self.texts) if junit else {}
        compiler = self.clean / "c++"
        compiler.write_text(f'#!/bin/sh\nexec {os.environ.get("CXX", "c++")} "$@" -O1\n')
        compiler.chmod(0o755)
        #: Tests that fail on the unchanged sources.
        self.failing_file = self.clean / "failing-tests"
        if not self.failing_file.exists():
            self.failing_file.touch()
            # Mutants of Python need a library, and none that is compiled quickly.
            if _contents(root / "csrc") == _contents(self.folder / "csrc"):
                _mirror(root / "selfattn_ext", self.folder / "selfattn_ext", "_C*.so")
            # Score functions that tests compile are named by their contents.
            _mirror(root / "build" / "functions", self.folder / "build" / "functions")
            self.keep()
        self.restore()

    def keep(self) -> None:
        """Keeps what has been built for :meth:`restore`."""
        _mirror(self.folder / "build", self.clean / "build")
        _mirror(self.folder / "selfattn_ext", self.clean / "library", "_C*.so")

    def restore(self) -> None:
        """Undoes what builds and tests have written since :meth:`keep`."""
        _mirror(self.clean / "build", self.folder / "build")
        _mirror(self.clean / "library", self.folder / "selfattn_ext", "_C*.so")

    def environment(self, **variables: str) -> dict[str, str]:
        path = os.pathsep.join(filter(None, [str(self.folder), os.environ.get("PYTHONPATH", "")]))
        # As in `make test` with a process for each processor.
        return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables}

    def has_library(self) -> bool:
        return bool(list((self.folder / "selfattn_ext").glob("_C*.so")))

    def build(self) -> bool:
        """Compiles what has changed, with flags that compile quickly; False if something does not compile."""
        command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
        environment = self.environment(CXX=str(self.clean / "c++"), MAX_JOBS="2")
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return process.wait() == 0
        except BaseException:
            # ninja, which is in the group, ends the compilers.
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()
            raise

    def phases(self, file: str, text: str, killers: Iterable[str]) -> list[list[str]]:
        """The test modules for a changed file: those most likely to notice, the other quick ones, the rest.

        Args:
            file: the file that is changed.
            text: what surrounds the change; tests that mention its names are likely to notice.
            killers: modules that noticed changes of the same folder.
        """
        folders, stem, noticed = file.split("/")[1:-1], Path(file).stem, Counter(killers)
        names = {name for name in re.findall(r"[A-Za-z]\w{4,}", text) if "_" in name or name != name.lower()}
        simulated = self.in_sources_alone(file)
        modules = [name for name in self.texts if not simulated or self.reads_sources(name)]
        # Simulators of CUDA take longer than other tests, and notice most.
        most, most_of_one = (200, 150) if simulated else (30, 10)

        def likelihood(module: str) -> float:
            words, body = module.split("/"), self.texts[module]
            own = 4 * (stem in words[-1]) + 2 * (re.search(rf"\b{stem}\b", body) is not None)
            near = sum(2.0 for folder in folders if folder == words[1] or TESTS_OF.get(folder) == words[1])
            kin = any(len(word) > 3 and word in words[-1] for word in stem.split("_"))
            # Attention and its gradients are what all of csrc is for.
            main = float(file.startswith("csrc/") and words[1] in ("attention", "gradients"))
            main += 6 * (simulated and re.search("test_(?:kernel|ptx|emulated)_", words[-1]) is not None)
            seen = min(4, sum(name in body for name in names))
            return own + near + 1.5 * kin + main + seen + 2 * noticed[module]

        ranked = sorted(modules, key=lambda name: (-likelihood(name), self.cost(name)))
        first: list[str] = []
        for name in ranked:
            # Modules that are skipped as a whole cost nothing, and notice nothing.
            cost = self.cost(name)
            if len(first) < 12 and 0 < cost <= most_of_one and cost + sum(map(self.cost, first)) <= most:
                first.append(name)
        rest = [name for name in ranked if name not in first]
        return [
            first,
            [name for name in rest if self.cost(name) <= 6],
            sorted((name for name in rest if self.cost(name) > 6), key=self.cost),
        ]

    def cost(self, module: str) -> float:
        """The seconds of a module; where they are unknown, a guess."""
        return self.seconds.get(module, len(self.texts.get(module, "")) / 3000)

    def in_sources_alone(self, file: str) -> bool:
        """Whether a file is no part of the library here, so that only tests that read sources can notice."""
        return file.startswith("csrc/") and "cuda" in file.split("/")

    def reads_sources(self, module: str) -> bool:
        return module.startswith("tests/cuda/") or _READS_SOURCES.search(self.texts[module]) is not None

    def warm(self) -> None:
        """Compiles what tests of sources compile by themselves, once for all mutants."""
        done = self.clean / "warm"
        readers = [name for name in self.texts if self.reads_sources(name)]
        if readers and not done.exists():
            print(
                "tests that compile sources by themselves run on the unchanged ones, for minutes", flush=True
            )
            self.test(readers, stop=False)
            self.keep()
            done.touch()

    def failing(self, tests: Iterable[str]) -> set[str]:
        """Those of some tests that fail on the unchanged sources; no mutant is asked them again."""
        asked = sorted(tests)
        printed = self.test(asked, stop=False).printed if asked else ""
        if asked and not re.search(r"\d (?:passed|failed)", printed):
            print(f"the tests that killed could not be checked on the unchanged sources:\n{printed[-500:]}")
        failed = set(_FAILED.findall(printed))
        with self.failing_file.open("a", encoding="utf-8") as file:
            file.writelines(f"{name}\n" for name in sorted(failed))
        return failed

    def test(self, tests: Sequence[str], *, stop: bool = True) -> Outcome:
        """Runs modules or single tests, with `stop` until one fails."""
        command = [sys.executable, "-m", "pytest", "-v", "-n", "0", "-p", "no:cacheprovider"]
        command += [*(["-x"] if stop else []), "-m", self.marks, *tests]
        command += [f"--deselect={name}" for name in self.failing_file.read_text().splitlines()]
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=self.environment(MAX_JOBS="2"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        # A mutant may ask for all memory; then the system is to end it rather than another program.
        Path(f"/proc/{process.pid}/oom_score_adj").write_text("1000")
        assert process.stdout is not None
        compiling = any(name not in self.texts or self.reads_sources(name) for name in tests)
        limit = SILENT_COMPILING if compiling else SILENT
        printed, hangs, last = b"", False, time.monotonic()
        try:
            while not hangs:
                if select.select([process.stdout], [], [], 5)[0]:
                    more, last = os.read(process.stdout.fileno(), 1 << 16), time.monotonic()
                    if not more:
                        break
                    printed += more
                elif process.poll() is not None:
                    break
                hangs = time.monotonic() - last > limit
            if hangs:
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        finally:
            # Processes that a test has started may still run, and all do where somebody stops this program.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        if code == -signal.SIGTERM:
            sys.exit("somebody has ended the tests")
        text = printed.decode(errors="replace")
        return Outcome("" if code in (0, 5) else failure(text, "hangs" if hangs else f"exit {code}"), text)


def failure(printed: str, otherwise: str) -> str:
    """The first failed test of pytest's output, or the one that was running when the process ended."""
    found = _FAILED.search(printed)
    if found is None:
        found = re.search(r"^ERROR (?:collecting )?(tests/\S+\.py)", printed, re.M)
    if found is not None:
        return found[1]
    begun = re.findall(r"^(tests/\S+\.py::[^\n]*?) ?$", printed, re.M)
    return f"{begun[-1]} ({otherwise})" if begun else f"import ({otherwise})"


def set_time(path: Path, nanoseconds: int) -> None:
    """Gives a file its old time, which build programs compare with those of their results."""
    os.utime(path, ns=(nanoseconds, nanoseconds))


def processor_seconds() -> float:
    """The processor seconds of all processes that this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _seconds(junit: Path, modules: Iterable[str]) -> dict[str, float]:
    """The seconds of each module, from a file that pytest --junitxml wrote."""
    found = dict.fromkeys(modules, 0.0)
    for case in ElementTree.parse(junit).iter("testcase"):
        parts = case.get("classname", "").split(".")
        name = next((n for n, part in enumerate(parts) if part.startswith("test_")), 0)
        module = "/".join(parts[: name + 1]) + ".py"
        found[module] = found.get(module, 0.0) + float(case.get("time", 0))
    return found


def _contents(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _mirror(source: Path, target: Path, pattern: str = "**/*") -> None:
    """Makes a folder hold another's files that match a pattern, with their times, which ninja compares."""
    wanted = {path.relative_to(source): path for path in source.glob(pattern) if path.is_file()}
    for path in [path for path in target.glob(pattern) if path.is_file()]:
        if path.relative_to(target) not in wanted:
            path.unlink()
    for name, path in wanted.items():
        copy, state = target / name, path.stat()
        if copy.exists():
            other = copy.stat()
            if (other.st_mtime_ns, other.st_size) == (state.st_mtime_ns, state.st_size):
                continue
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.unlink(missing_ok=True)
        shutil.copy2(path, copy)
