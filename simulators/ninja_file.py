"""Ninja's files for what the simulators compile, and runs of ninja on them.

Ninja compiles only what has changed, whichever process calls it.
"""

from __future__ import annotations

import fcntl
import os
import runpy
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[1]

# It is loaded by path, because importing the package would load the library that may be about to be built.
toolchain = SimpleNamespace(**runpy.run_path(str(ROOT / "selfattn_ext" / "build" / "toolchain.py")))


@dataclass(frozen=True)
class Tools:
    """The tools of this environment that a build needs."""

    compiler: str
    ninja: str
    torch: Path
    torch_version: str


def tools() -> Tools:
    """The compiler, ninja and torch of this environment.

    Raises:
        RuntimeError: one of them is missing.
    """
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        raise RuntimeError("torch is missing")
    compiler, folder = toolchain.compiler(), toolchain.ninja_folder()
    if compiler is None or folder is None:
        raise RuntimeError(toolchain.compiler_problem() or "ninja is missing: pip install ninja")
    return Tools(" ".join(compiler), str(Path(folder) / "ninja"), Path(torch.origin).parent, version("torch"))


class NinjaFile:
    """The text of a build.ninja with one object file per source."""

    def __init__(self, tools: Tools) -> None:
        self.lines = [
            "rule compile",
            f"  command = {tools.compiler} -MMD -MF $out.d $flags -c $in -o $out",
            "  depfile = $out.d",
            "  deps = gcc",
            "rule link",
            f"  command = {tools.compiler} $in $flags -o $out",
        ]

    def precompiled(self, header: Path, folder: str, flags: list[str]) -> str:
        """Compiles a header into `folder`, and returns the name that sources with the same flags include."""
        name = f"{folder}/{header.name}"
        self.lines += [
            f"build {name}.gch: compile {header}",
            f"  flags = {' '.join([*flags, '-x c++-header'])}",
        ]
        return name

    def objects(
        self,
        sources: Iterable[Path],
        folder: str,
        flags: list[str],
        precompiled: str | None = None,
        rule: str = "compile",
    ) -> list[str]:
        """Compiles each source into `folder`, after a precompiled header, and returns the object files."""
        needs = ""
        if precompiled is not None:
            flags, needs = [*flags, "-include", precompiled], f" | {precompiled}.gch"
        made = []
        for source in sources:
            name = str(source.relative_to(ROOT) if source.is_relative_to(ROOT) else source).strip("/")
            target = f"{folder}/{name.replace('/', '.')}.o"
            self.lines += [f"build {target}: {rule} {source}{needs}", f"  flags = {' '.join(flags)}"]
            made.append(target)
        return made

    def link(self, target: str, objects: Iterable[str], flags: list[str]) -> None:
        self.lines += [f"build {target}: link {' '.join(objects)}", f"  flags = {' '.join(flags)}"]

    def text(self) -> str:
        return "\n".join([*self.lines, ""])


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def run_ninja(
    tools: Tools, folder: Path, name: str, content: NinjaFile, output: str, jobs: int | None = None
) -> Path:
    """Brings `output` of `folder` up to date by the file of that name, and returns its path.

    Args:
        tools: what compiles.
        folder: where files go; one process at a time builds in it.
        name: the name of ninja's file in the folder.
        content: its text.
        output: what is made, relative to the folder.
        jobs: how many compilers run at a time; by default $MAX_JOBS or the number of processors.

    Raises:
        RuntimeError: something does not compile; the message holds the compilers' output.
    """
    jobs = jobs or int(os.environ.get("MAX_JOBS", 0)) or os.cpu_count() or 1
    with _locked(folder):
        file = folder / name
        if not file.exists() or file.read_text(encoding="utf-8") != content.text():
            file.write_text(content.text(), encoding="utf-8")
        command = [tools.ninja, "-C", str(folder), "-f", name, "-j", str(jobs), output]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return folder / output
