"""A check that every file named in a comment, a docstring or a page exists.

    python scripts/check_references.py

It searches the sources and pages of FOLDERS, and PAGES, for names that end like a source or a page. A name
may be a path or the end of one; ``*``, ``<dtype>`` and ``{name}`` in it stand for anything.
"""

from __future__ import annotations

import ast
import io
import os
import re
import sys
import tokenize
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("csrc", "selfattn_ext", "tests", "simulators", "scripts", "benchmarks", "docs")
PAGES = ("/README.md", "/CONTRIBUTING.md")  # not CHANGELOG.md, whose files may be gone

NAME = re.compile(r"[\w*<>{}./-]*[\w*>}]\.(?:cuh|cu|cpp|h|md|py)\b(?!\(|\.\w|-\w)")
#: Strings come before comments, as they may contain what looks like one.
TOKEN = re.compile(r'"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)+\'|//[^\n]*|/\*.*?\*/', re.DOTALL)

#: Files that programs write, and files of other projects: name -> where it is.
ELSEWHERE = {
    "Python.h": "of Python",
    "table.md": "the user's, written by benchmarks/gpu_run.py --markdown",
    "gpu-results/bench.md": "written by scripts/gpu_check.sh --bench",
    "simt_forward_float32.cu": "of a build, from the table in selfattn_ext/build/sources.py",
    "path/to/the/test.py": "an example",
    "kernel.cu": "the user's, in an example",
    "llama.cpp": "another project",
}


def files_of(root: Path) -> list[str]:
    """Returns every file of the tree as a path that begins with a slash, without built or downloaded ones."""
    found = []
    for folder, folders, names in os.walk(root):
        left_out = ("__pycache__", "build", "dist") if Path(folder) == root else ("__pycache__",)
        folders[:] = [
            name
            for name in folders
            if name in (".ci", ".github", ".pep517") or not (name.startswith(".") or name in left_out)
        ]
        found += ["/" + Path(folder, name).relative_to(root).as_posix() for name in names]
    return found


def texts_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the comments and docstrings of a source, each with the number of its first line."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield 1, re.sub(r"^```.*?^```", lambda code: "\n" * code[0].count("\n"), source, flags=re.M | re.S)
        return
    if path.suffix != ".py":
        for found in TOKEN.finditer(source):
            if found[0].startswith("/"):
                yield source.count("\n", 0, found.start()) + 1, found[0]
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node, clean=False)
            if text is not None:
                yield node.body[0].lineno, text


def dangling(root: Path) -> list[str]:
    """Returns a line for each wrong name: ``file:line: no file is called name``."""
    files = files_of(root)
    problems = []
    for file in sorted(files):
        path = root / file[1:]
        if not file.startswith((*PAGES, *(f"/{folder}/" for folder in FOLDERS))):
            continue
        if path.suffix not in (".cpp", ".cu", ".cuh", ".h", ".py", ".md"):
            continue
        for first, text in texts_of(path):
            for found in NAME.finditer(text):
                if not _exists(found[0], path, root, files):
                    line = first + text.count("\n", 0, found.start())
                    problems.append(f"{file[1:]}:{line}: no file is called {found[0]}")
    return problems


def _exists(name: str, named_in: Path, root: Path, files: list[str]) -> bool:
    if name in ELSEWHERE or (named_in.parent / name).exists():
        return True
    pattern = re.sub(r"<\w+>|\{\w+\}", "*", name)
    while pattern.startswith("../"):
        pattern = pattern[3:]
    pattern = "/" + pattern.removeprefix("./").lstrip("/")
    if "*" not in pattern:
        return any(file.endswith(pattern) for file in files)
    return any(fnmatchcase(file, "*" + pattern) for file in files)


def main() -> None:
    problems = dangling(ROOT)
    print("\n".join(problems), file=sys.stderr, end="\n" if problems else "")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
