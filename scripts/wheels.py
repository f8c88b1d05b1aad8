"""Makes wheels for other Pythons from the wheel of this one, and imports the library in each wheel.

    python scripts/wheels.py add build/wheel               # beside the one there, for all Pythons found
    python scripts/wheels.py add build/wheel python3.13    # for this one
    python scripts/wheels.py try dist                      # imports each wheel's library in its Python

``make wheels`` runs both. setup.py makes the libraries: their object files are the same but for those of
csrc/python, which are compiled with the headers of each Python. No other Python needs torch or setuptools for
that. To import a library, an interpreter needs no torch either: libtorch is the same for every Python, and a
module without content takes the place of torch's Python half.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "selfattn_ext"

#: The Pythons that wheels are made for, as their programs are named after ``python``.
VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14", "3.14t")

#: Where pyenv and uv install Pythons that are not on PATH.
FOLDERS = (
    Path(os.environ.get("PYENV_ROOT", "~/.pyenv"), "versions").expanduser(),
    Path(os.environ.get("UV_PYTHON_INSTALL_DIR", "~/.local/share/uv/python")).expanduser(),
)

_QUESTION = """
import json, os, sys, sysconfig
headers, version = sysconfig.get_path("include"), "%d%d" % sys.version_info[:2]
free = "t" if sysconfig.get_config_var("Py_GIL_DISABLED") else ""
print(json.dumps(["cp" + version, "cp" + version + free, sysconfig.get_config_var("EXT_SUFFIX"), headers,
                  os.path.isfile(os.path.join(headers, "Python.h"))]))
"""

#: It runs in the Python that a wheel is for.
_IMPORT = """
import ctypes, importlib.util, os, sys, sysconfig, types
library, torch_libraries, version = sys.argv[1:]
sys.modules["torch"] = torch = types.ModuleType("torch")
torch.ops = types.SimpleNamespace(selfattn=None)
for name in ("libc10.so", "libtorch_cpu.so", "libc10_cuda.so", "libtorch_cuda.so"):
    if os.path.exists(os.path.join(torch_libraries, name)):
        ctypes.CDLL(os.path.join(torch_libraries, name), ctypes.RTLD_GLOBAL)
spec = importlib.util.spec_from_file_location("selfattn_ext._C", library)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
assert module.build_info()["version"] == version, module.build_info()
assert any(kernel["available"] for kernel in module.kernel_table())
if sysconfig.get_config_var("Py_GIL_DISABLED"):
    assert not sys._is_gil_enabled(), "importing the library has enabled the GIL"
print(os.path.basename(library), "imported by Python", sys.version.split()[0])
"""


class Interpreter(NamedTuple):
    """A Python that a wheel is for."""

    program: str
    python: str  # its tag in the names of wheels, such as cp314
    abi: str  # cp314, or cp314t without a global lock
    suffix: str  # of modules
    headers: str


def ask(program: str) -> Interpreter | None:
    """What a program tells of itself; None if it is no Python that runs, or has no headers."""
    try:
        done = subprocess.run(
            [program, "-c", _QUESTION], capture_output=True, text=True, check=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError):
        return None
    *told, has_headers = json.loads(done.stdout)
    return Interpreter(program, *told) if has_headers else None


def programs(version: str) -> Iterator[str]:
    """The programs that may be a version of Python: on PATH first, then in FOLDERS, the newest first."""
    on_path = shutil.which(f"python{version}")
    if on_path is not None:
        yield on_path
    for folder in FOLDERS:
        found = folder.glob(f"*/bin/python{version}")
        yield from map(str, sorted(found, key=_numbers, reverse=True))


def _numbers(path: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", str(path))]


def interpreters(named: Sequence[str]) -> list[Interpreter]:
    """The interpreters to make wheels for: those that are named, or one of each of VERSIONS that is found.

    Raises:
        SystemExit: a named one does not run or has no headers.
    """
    if named:
        asked = {program: ask(program) for program in named}
        for program, answer in asked.items():
            if answer is None:
                sys.exit(f"{program} is no Python that runs and has headers (Debian, Ubuntu: python3-dev)")
        return [answer for answer in asked.values() if answer is not None]
    found = (next(filter(None, map(ask, programs(version))), None) for version in VERSIONS)
    return [answer for answer in found if answer is not None]


def add(folder: Path, others: Sequence[Interpreter]) -> None:
    """Adds the wheels of other Pythons to a folder that holds this Python's alone."""
    (base,) = folder.glob("*.whl")
    others = [other for other in others if other.suffix != sysconfig.get_config_var("EXT_SUFFIX")]
    with tempfile.TemporaryDirectory() as made:
        pythons = json.dumps({other.suffix: [other.headers] for other in others})
        options = ["--quiet", "build_ext", "--build-lib", made, "--pythons", pythons]
        subprocess.run([sys.executable, "setup.py", *options], cwd=ROOT, check=True)
        for other in others:
            repack(base, Path(made, PACKAGE, f"_C{other.suffix}"), other)


def repack(base: Path, library: Path, other: Interpreter, platform: str | None = None) -> None:
    """Writes a wheel beside another, with that library in the place of its own, and other tags.

    ``platform`` is as the names of wheels have it; None is that of the other wheel.
    """
    wheel = [sys.executable, "-m", "wheel"]
    with tempfile.TemporaryDirectory() as unpacked:
        subprocess.run([*wheel, "unpack", "--dest", unpacked, base], check=True, stdout=subprocess.DEVNULL)
        (content,) = Path(unpacked).iterdir()
        for own in (content / PACKAGE).glob("_C.*"):
            own.unlink()
        shutil.copy(library, content / PACKAGE)
        (tags,) = content.glob("*.dist-info/WHEEL")
        tag = f"Tag: {other.python}-{other.abi}-" + (platform or r"\1")
        text = re.sub(r"(?m)^Tag: \w+-\w+-(\w+)", tag, tags.read_text())
        tags.write_text(text)
        subprocess.run(
            [*wheel, "pack", "--dest-dir", base.parent, content], check=True, stdout=subprocess.DEVNULL
        )


def try_all(folder: Path, known: Sequence[Interpreter]) -> None:
    """Imports the library of the wheel that a folder holds for each interpreter.

    Raises:
        SystemExit: one does not import, or is missing.
    """
    import torch

    version = runpy.run_path(str(ROOT / PACKAGE / "build" / "sources.py"))["version"]()
    libraries = os.path.join(os.path.dirname(torch.__file__), "lib")
    for each in known:
        wheels = list(folder.glob(f"{PACKAGE}-{version}-{each.python}-{each.abi}-*.whl"))
        if not wheels:
            sys.exit(f"{folder} has no wheel for {each.program}")
        wheel = max(wheels, key=os.path.getmtime)
        with tempfile.TemporaryDirectory() as unpacked:
            with zipfile.ZipFile(wheel) as archive:
                (name,) = [name for name in archive.namelist() if name.startswith(f"{PACKAGE}/_C.")]
                library = archive.extract(name, unpacked)
            command = [each.program, "-c", _IMPORT, library, libraries, version]
            done = subprocess.run(command, cwd=unpacked)
        if done.returncode != 0:
            sys.exit(f"{wheel} does not import")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("action", choices=("add", "try"))
    parser.add_argument("folder", type=Path, help="the folder of the wheels")
    parser.add_argument("python", nargs="*", help="programs; by default those of PATH, pyenv and uv")
    given = parser.parse_args()
    chosen = interpreters(given.python)
    if given.action == "add":
        for version in () if given.python else VERSIONS:
            if not any(f"cp{version.replace('.', '')}" == each.abi for each in chosen):
                print(f"no wheel for Python {version}: it is not found, or has no headers", flush=True)
        add(given.folder, chosen)
    else:
        try_all(given.folder, chosen)


if __name__ == "__main__":
    main()
