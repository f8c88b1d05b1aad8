"""Makes an arm64 userland in build/arm64, in which qemu runs single programs.

It has Debian's packages and PyPI's wheels. They are unpacked into a folder that qemu takes for the root of
its programs, and nothing is installed or mounted. torch for arm64 is built with CUDA, whose libraries are
gigabytes that no emulated program uses; stubs.py makes libraries with the same names and functions instead.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import stubs

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "arm64"
#: The root of the arm64 programs.
DEBIAN = FOLDER / "debian"
#: Python's packages there.
SITE = FOLDER / "site"

#: Debian 12, for its Python.
SUITE, PYTHON = "bookworm", "3.11"
PROGRAM = DEBIAN / "usr" / "bin" / f"python{PYTHON}"
COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = "qemu-aarch64-static"
_PACKAGES = f"python3-minimal,libpython{PYTHON}-stdlib,python3-distutils,libstdc++6,libpython{PYTHON}-dev"
#: torch's dependencies but those of CUDA, and what the tests need.
_WHEELS = (
    "filelock", "fsspec", "jinja2", "markupsafe", "mpmath", "networkx", "sympy", "typing-extensions", "numpy",
    "setuptools<82", "ninja", "pytest<9.2", "iniconfig", "packaging", "pluggy", "pygments",
)  # fmt: skip
#: Wheels for these platforms run there.
PLATFORMS = (
    "manylinux_2_34_aarch64",
    "manylinux_2_28_aarch64",
    "manylinux_2_17_aarch64",
    "manylinux2014_aarch64",
)

_COMMANDS = {COMPILER: "g++-aarch64-linux-gnu", EMULATOR: "qemu-user-static", "debootstrap": "debootstrap"}


def missing() -> list[str]:
    """The packages of Debian that this machine lacks."""
    return [package for command, package in _COMMANDS.items() if shutil.which(command) is None]


def make() -> None:
    """Makes what is not there yet.

    Raises:
        SystemExit: the machine lacks packages, which the message names.
    """
    if lacking := missing():
        sys.exit(f"this needs packages of Debian: apt-get install {' '.join(lacking)}")
    FOLDER.mkdir(parents=True, exist_ok=True)
    for part, unpack in {DEBIAN: _unpack_debian, SITE: _unpack_wheels}.items():
        if not part.exists():
            new = part.with_name(part.name + ".new")
            shutil.rmtree(new, ignore_errors=True)
            unpack(new)
            new.rename(part)


def _unpack_debian(target: Path) -> None:
    archives = FOLDER / "archives"
    download = [
        "debootstrap",
        "--arch=arm64",
        "--variant=minbase",
        "--download-only",
        f"--include={_PACKAGES}",
    ]
    subprocess.run([*download, SUITE, archives], check=True, stdout=subprocess.DEVNULL)
    for package in sorted(archives.glob("var/cache/apt/archives/*.deb")):
        subprocess.run(["dpkg", "-x", package, target], check=True)
    shutil.rmtree(archives)
    # torch's cpuinfo reads these; qemu has no such files.
    shutil.copy(Path(__file__).with_name("cpuinfo.txt"), _folder(target / "proc") / "cpuinfo")
    registers = _folder(target / "sys/devices/system/cpu/cpu0/regs/identification")
    (registers / "midr_el1").write_text("0x00000000413fd0c1\n", encoding="ascii")


def _unpack_wheels(target: Path) -> None:
    torch = "torch==" + metadata.version("torch").partition("+")[0]
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-compile",
        "--target",
        str(target),
    ]
    options = ["--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp"]
    abi = f"cp{PYTHON.replace('.', '')}"
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    subprocess.run([*pip, *options, "--abi", abi, "--abi", "none", *platforms, torch, *_WHEELS], check=True)
    stubs.make(target / "torch" / "lib", _folder(target / "nvidia" / "cu13" / "lib"))


def _folder(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path
