"""Compiles the package with its kernels for AVX-512 and AMX for processors that have AVX2 alone.

``python simulators/avx512/build.py`` prints the path of the library, for ``SELFATTN_LIBRARY``. Vectors
come from avx512.h beside this file, tiles from simulators/amx, which must be preloaded.
"""

from __future__ import annotations

import argparse
import re
import sys
import sysconfig
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from ninja_file import ROOT, NinjaFile, Tools, run_ninja, tools

CSRC = ROOT / "csrc"
EMULATOR = ROOT / "simulators" / "avx512"

#: The name of the Python module, as selfattn_ext/build/library.py imports it.
MODULE = "_C"
#: The library of simulators/amx, beside the one of the package.
AMX = "libselfattn_amx_emulator.so"

#: The changes in the copy of the sources that is compiled: intrinsics are functions of avx512.h, target
#: regions stay below AVX-512, and the processor's features include those that are emulated.
CHANGES = [
    (re.compile(r"\b_mm512_(\w+)"), r"emulated512::\1"),
    (
        re.compile(
            r"\b_mm256_(maskz?_(?:loadu|storeu)_epi16|cmp_p[sd]_mask|(?:mask_blend|roundscale|scalef)_p[sd])\b"
        ),
        r"emulated512::\1_of_256",
    ),
    (re.compile(r"\b_mm_(cmpeq_epi8_mask)\b"), r"emulated512::\1_of_128"),
    (re.compile(r"\bavx512\w+,|,prefer-vector-width=512\b"), ""),
    # Constraints of assembler statements: the emulator has its vectors in memory, not in registers.
    (re.compile(r'"\+(?:v|Yk)"'), '"+m"'),
    (re.compile(r"#include <immintrin.h>"), '#include "avx512.h"'),
    (re.compile(r"features = detect\(\);"), "features = with_avx512(detect());"),
    (re.compile(r'#include "cpu_features.h"'), '#include "cpu_features.h"\n#include "with_avx512.h"'),
]
#: The files that are changed. All others are copied as they are.
CHANGED = ("cpu/isa/*avx512*", "cpu/isa/*amx*", "cpu/pairs/*", "peak/*avx512*", "cpu/cpu_features.cpp")


def copy_sources(to: Path) -> None:
    """Brings the changed copy of csrc up to date; a file that has not changed keeps its time."""
    changed = {path for pattern in CHANGED for path in CSRC.glob(pattern)}
    for path in CSRC.rglob("*"):
        if not path.is_file():
            continue
        text = path.read_text(encoding="utf-8")
        if path in changed:
            for pattern, new in CHANGES:
                text = pattern.sub(new, text)
        copy = to / path.relative_to(CSRC)
        if not copy.exists() or copy.read_text(encoding="utf-8") != text:
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(text, encoding="utf-8")


def write_ninja(found: Tools, csrc: Path) -> NinjaFile:
    """Describes the library of a build without CUDA, and that of the emulator of AMX."""
    file = NinjaFile(found)
    # GCC warns that AVX-512 changes how vectors of 512 bits are passed, but no part of this library uses it.
    common = ["-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-gnu-unique", "-Wno-psabi"]
    python = ["-isystem", str(found.torch / "include"), "-isystem", sysconfig.get_path("include")]
    names = [f"-DTORCH_EXTENSION_NAME={MODULE}", "-DSELFATTN_NAMESPACE=selfattn"]
    flags = [*common, f"-I{csrc}", f"-I{EMULATOR}", *python, *names]
    sources = sorted(path for path in csrc.rglob("*.cpp") if "cuda" not in path.relative_to(csrc).parts)
    amx = sorted((ROOT / "simulators" / "amx").glob("*.cpp"))
    # With more optimisation, compiling would take minutes longer than the tests would save.
    objects = file.objects(sources, "package", [*flags, "-O1"])
    # It must be preloaded: its signal handler needs storage of each thread that a library loaded later lacks.
    file.link(
        AMX,
        file.objects(amx, "amx", ["-std=c++17", "-fPIC", "-O3"]),
        ["-shared", "-ldl", f"-Wl,-soname,{AMX}"],
    )
    torch = found.torch / "lib"
    link = ["-shared", "-ldl", f"-L{torch}", "-ltorch", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch}"]
    file.link(f"{MODULE}.so", [*objects, AMX], link)
    return file


def build(jobs: int | None = None) -> Path:
    """Brings the library up to date and returns its path.

    Args:
        jobs: how many compilers run at a time; by default $MAX_JOBS or the number of processors.

    Raises:
        RuntimeError: something does not compile; the message holds the compiler's output.
    """
    found = tools()
    folder = ROOT / "build" / "avx512_emulator" / f"{sys.implementation.cache_tag}_torch{found.torch_version}"
    copy_sources(folder / "csrc")
    return run_ninja(
        found, folder, "library.ninja", write_ninja(found, folder / "csrc"), f"{MODULE}.so", jobs
    )


def environment() -> dict[str, str]:
    """Builds the library, and returns the environment variables of a process that uses it."""
    made = build()
    return {"SELFATTN_LIBRARY": str(made), "LD_PRELOAD": str(made.with_name(AMX))}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int)
    print(build(parser.parse_args().jobs))
