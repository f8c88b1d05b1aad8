"""Stub libraries in the place of CUDA's, with which a torch that is built with CUDA can be loaded.

Each has the name and the versions that torch's libraries ask for, and every function that they leave to it. A
call of one returns 100, which stands for cudaErrorNoDevice.
"""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_READELF, _COMPILER = "aarch64-linux-gnu-readelf", "aarch64-linux-gnu-gcc"
_OF_CUDA = re.compile(r"lib(cu|nvrtc|nccl|nvshmem|nvJit)")
#: Which library has the functions whose names begin so, for those without a version; the first that fits.
_BY_PREFIX = {
    "cudnn": "libcudnn.", "cublasLt": "libcublasLt.", "cublas": "libcublas.", "cusparseLt": "libcusparseLt.",
    "cusparse": "libcusparse.", "cusolver": "libcusolver.", "cufft": "libcufft.", "curand": "libcurand.",
    "cuFile": "libcufile.", "nccl": "libnccl.", "nvshmem": "libnvshmem_host.", "nvrtc": "libnvrtc.",
    "cupti": "libcupti.", "cuda": "libcudart.", "__cuda": "libcudart.",
}  # fmt: skip


class _Symbols(NamedTuple):
    needed: set[str]  # libraries of CUDA
    missing: dict[str, str]  # the version of each function that no library of torch has; "" for none
    versions: dict[str, set[str]]  # of each library


def make(torch: Path, target: Path) -> None:
    """Makes the libraries of CUDA that those in the folder ``torch`` need."""
    needed, missing, versions = _symbols(torch)
    functions: dict[str, dict[str, list[str]]] = {library: defaultdict(list) for library in needed}
    owner = {version: library for library, its in versions.items() for version in its}
    for name, version in missing.items():
        library = owner.get(version) if version else _by_prefix(name, needed)
        if library is not None:
            functions[library][version].append(name)
    for library, by_version in functions.items():
        _compile(target / library, by_version, versions[library])


def _by_prefix(name: str, libraries: set[str]) -> str | None:
    beginning = next((library for prefix, library in _BY_PREFIX.items() if name.startswith(prefix)), None)
    return beginning and next((library for library in libraries if library.startswith(beginning)), None)


def _symbols(folder: Path) -> _Symbols:
    needed, defined = set(), set()
    undefined: dict[str, str] = {}
    versions: dict[str, set[str]] = defaultdict(set)
    for library in folder.glob("*.so*"):
        needed |= set(filter(_OF_CUDA.match, re.findall(r"NEEDED\).*\[(.*)\]", _readelf("-dW", library))))
        for name, version, is_defined in _dynamic_symbols(library):
            if is_defined:
                defined.add(name)
            else:
                undefined[name] = version
        for its, names in re.findall(r"File: (\S+)(.*?)(?=File: |\Z)", _readelf("-VW", library), re.DOTALL):
            if _OF_CUDA.match(its):
                versions[its] |= set(re.findall(r"Name: (\S+)\s+Flags", names))
    missing = {name: version for name, version in undefined.items() if name not in defined}
    return _Symbols(needed, missing, versions)


def _dynamic_symbols(library: Path) -> Iterator[tuple[str, str, bool]]:
    for line in _readelf("--dyn-syms", "-W", library).splitlines():
        fields = line.split()
        if len(fields) >= 8 and fields[0].rstrip(":").isdigit():
            name, _, version = fields[7].partition("@")
            yield name, version.lstrip("@"), fields[6] != "UND"


def _readelf(*arguments: str | Path) -> str:
    return subprocess.run([_READELF, *arguments], check=True, capture_output=True, text=True).stdout


def _compile(library: Path, functions: dict[str, list[str]], versions: set[str]) -> None:
    names = [name for its in functions.values() for name in its]
    source = library.with_name(library.name + ".c")
    source.write_text("".join(f"int {name}(void) {{ return 100; }}\n" for name in names), encoding="ascii")
    command = [
        _COMPILER,
        "-shared",
        "-fPIC",
        "-w",
        "-o",
        str(library),
        str(source),
        f"-Wl,-soname,{library.name}",
    ]
    script = library.with_name(library.name + ".map")
    blocks = (
        f"{version} {{ global: {' '.join(name + ';' for name in functions.get(version, []))} }};\n"
        for version in sorted(versions)
    )
    script.write_text("".join(blocks), encoding="ascii")
    if versions:
        command.append(f"-Wl,--version-script={script}")
    subprocess.run(command, check=True)
    source.unlink()
    script.unlink()
