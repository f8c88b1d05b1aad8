"""Measurement of the processor seconds that compiling the CUDA kernels takes per architecture.

    python scripts/cuda_build_seconds.py                   every source, as a build without a GPU
    python scripts/cuda_build_seconds.py --every 3 --archs 8.0 9.0a
    TORCH_CUDA_ARCH_LIST=8.0 python scripts/cuda_build_seconds.py

nvcc lists the commands that make an object file, and the script runs and measures each alone. The host's code
belongs to no architecture, and the work to PTX also serves later GPUs. If only a part of the sources is
measured, the sum is an estimate, by how many there are. The script needs nvcc, but no GPU and no torch.
"""

from __future__ import annotations

import argparse
import os
import re
import runpy
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[1]
# They are loaded by path, because importing the package would load torch and the compiled library.
sources, cuda_build, terminal = (
    SimpleNamespace(**runpy.run_path(str(ROOT / "selfattn_ext" / f"{name}.py")))
    for name in ("build/sources", "build/cuda_build", "terminal")
)

#: The parts of an architecture's work, and of the host's.
FRONT, BACK, HOST = "to PTX", "to machine code", "host"


def seconds_of(nvcc: str, source: str, flags: list[str]) -> dict[tuple[str, str], float]:
    """Processor seconds by architecture, which is "" for the host, and by part."""
    found: dict[tuple[str, str], float] = defaultdict(float)
    with tempfile.TemporaryDirectory() as folder:
        command = [nvcc, "--dryrun", "--keep", f"--keep-dir={folder}", *flags, "-c", source]
        told = subprocess.run(
            [*command, "-o", f"{folder}/object.o"], capture_output=True, text=True, check=True, cwd=folder
        ).stderr
        environment = dict(os.environ)
        for line in re.findall(r"^#\$ (.*)$", told, re.M):
            assigned = re.fullmatch(r"(\w+)=(\S*) *", line)
            if assigned is not None:
                environment[assigned[1]] = assigned[2]
            elif re.match(r"\w+=", line) is None:
                found[_of(line)] += _weighed(line, environment, folder)
    return found


def _of(command: str) -> tuple[str, str]:
    """The architecture and the part of the work that a command belongs to."""
    back = re.match(r"ptxas .*-arch=sm_(\d+a?)", command)
    if back is not None:
        return back[1], BACK
    front = re.search(r"cicc.* -arch compute_(\d+a?)", command)
    if front is not None:
        return front[1], FRONT
    return "", HOST


def _weighed(command: str, environment: dict[str, str], folder: str) -> float:
    process = subprocess.Popen(["bash", "-c", command], env=environment, cwd=folder)
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        sys.exit(f"{command} failed")
    process.returncode = 0
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--every", type=int, default=1, help="measure one of so many sources (all)")
    parser.add_argument("--first", type=int, default=0, help="number of the first source (0)")
    parser.add_argument("--archs", nargs="+", help='compute capabilities, as "8.0" or "9.0a"')
    arguments = parser.parse_args()

    found = cuda_build.find_nvcc()
    if found is None:
        sys.exit("there is no nvcc: put it on PATH, or set CUDA_HOME to the folder of its toolkit")
    wanted = ";".join(arguments.archs or []) or os.environ.get(cuda_build.ARCHITECTURES_VARIABLE, "")
    architectures = cuda_build.architectures_of(wanted, [], found)
    flags = [*sources.cuda_flags(), *cuda_build.architecture_flags(architectures), "-Xcompiler=-fPIC"]
    listed = sources.extension_sources(cuda=True, instances_in=ROOT / "build" / "instances")
    everything = [path for path in listed if path.endswith(".cu")]
    some = everything[arguments.first :: arguments.every]

    total: dict[tuple[str, str], float] = defaultdict(float)
    with terminal.Progress("compiling", len(some)) as progress:
        for done, source in enumerate(some, 1):
            for part, seconds in seconds_of(found.command, source, flags).items():
                total[part] += seconds * len(everything) / len(some)
            progress.update(done, Path(source).name)

    names = sorted({name for name, _ in total if name}, key=lambda name: int(name.rstrip("a")))
    rows = [(f"sm_{name}", *(f"{total[name, part]:.0f}" for part in (FRONT, BACK))) for name in names]
    print(f"processor seconds of {len(everything)} CUDA sources, from {len(some)}, by {found}")
    print(terminal.table(("architecture", FRONT, BACK), rows))
    print(f"and {total['', HOST]:.0f} for the code of the host")


if __name__ == "__main__":
    main()
