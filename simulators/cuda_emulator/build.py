"""Compiles the package with its CUDA kernels for the emulator, and programs that run in it.

``python simulators/cuda_emulator/build.py`` prints the path of the library; ``--variant`` chooses how the
kernels are compiled. Ninja compiles only what has changed, whichever process calls it.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import runpy
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[2]
EMULATOR = ROOT / "simulators" / "cuda_emulator"
CSRC = ROOT / "csrc"
#: Folders that a process needs on its path: this package, and what the tests share.
SHARED = (ROOT / "simulators", ROOT / "tests" / "support")

#: The name of the Python module, as selfattn_ext/build/library.py imports it.
MODULE = "_C"

#: Functions of the framework that the operators call and that need a GPU: host_device.cpp replaces them.
OF_A_DEVICE = (
    "aoti_torch_create_device_guard",
    "aoti_torch_delete_device_guard",
    "aoti_torch_empty_strided",
    "aoti_torch_get_current_cuda_stream",
    "aoti_torch_zero_",
    "torch_call_dispatcher",
)

# They are loaded by path, because importing the package would load the library that may be about to be built.
sources = SimpleNamespace(**runpy.run_path(str(ROOT / "selfattn_ext" / "build" / "sources.py")))
toolchain = SimpleNamespace(**runpy.run_path(str(ROOT / "selfattn_ext" / "build" / "toolchain.py")))

#: What each variant adds to the flags of the kernels and to those of the emulator. Race detection instruments
#: only the kernels, because the emulator is the judge.
VARIANTS: dict[str, tuple[list[str], list[str]]] = {
    # -O2 takes one and a half times as long to compile, more than the faster kernels save in a run.
    "plain": (["-Og"], []),
    # These, too, take longer to compile than to run.
    "race": (["-Og", "-fsanitize=thread", "-g1"], ["-DSELFATTN_EMULATOR_RACES"]),
    # AddressSanitizer finds what -fsanitize=null and object-size would find, which take a tenth of the time
    # to compile; the PTX machine checks alignment. With calls instead of inlined checks, and without the
    # check of alignment, a source compiles in half the time.
    "asan": (
        [
            "-O0",
            "-fsanitize=address,undefined",
            "-fno-sanitize=null,object-size,alignment",
            "-fno-sanitize-recover=undefined",
            "--param=asan-instrumentation-with-call-threshold=0",
            "-g1",
        ],
        ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g1"],
    ),
}


@dataclass(frozen=True)
class Tools:
    """The tools of this environment that a build needs."""

    compiler: str
    ninja: str
    torch: Path
    torch_version: str


def tools() -> Tools:
    """The compiler, ninja and torch of this environment."""
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        raise RuntimeError("torch is missing")
    compiler, folder = toolchain.compiler(), toolchain.ninja_folder()
    if compiler is None or folder is None:
        raise RuntimeError(toolchain.compiler_problem() or "ninja is missing: pip install ninja")
    return Tools(" ".join(compiler), str(Path(folder) / "ninja"), Path(torch.origin).parent, version("torch"))


def library_sources() -> list[Path]:
    """The C++ sources of the package without the CUDA kernels and without the fused CPU kernels, which take
    most of the time to compile: adapters.cpp has the loops in their place.
    """
    return [
        path
        for folder in (*sources.LIBRARY_FOLDERS, sources.PYTHON_FOLDER)
        for path in sorted((CSRC / folder).rglob("*.cpp"))
        if "cuda" not in path.relative_to(CSRC).parts and not path.name.startswith("kernels_")
    ]


def kernel_sources(folder: Path = CSRC) -> list[Path]:
    """The CUDA kernels, the C++ files beside them, and the instances of the kernels' templates."""
    found = [path for suffix in ("*.cu", "*.cpp") for path in (folder / "cuda").rglob(suffix)]
    return sorted([*found, *instances(folder)])


def instances(folder: Path = CSRC) -> list[Path]:
    """The instances of the templates in `folder`, written there if they are missing."""
    written = ROOT / "build" / "instances" if folder == CSRC else folder.parent / "instances"
    return [Path(path) for path in sources.write_instances(written, folder)]


def emulator_sources() -> list[Path]:
    """The sources of the emulator itself, without those that join it to the package."""
    joints = ("adapters.cpp", "host_device.cpp", "function_kernels.cpp")
    return sorted(path for path in EMULATOR.glob("*.cpp") if path.name not in joints)


class NinjaFile:
    """The text of a build.ninja with one object file per source."""

    def __init__(self, tools: Tools) -> None:
        self.tools = tools
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
        self, sources: Iterable[Path], folder: str, flags: list[str], precompiled: str | None = None
    ) -> list[str]:
        """Compiles each source into `folder`, after a precompiled header, and returns the object files."""
        needs = ""
        if precompiled is not None:
            flags, needs = [*flags, "-include", precompiled], f" | {precompiled}.gch"
        made = []
        for source in sources:
            name = str(source.relative_to(ROOT) if source.is_relative_to(ROOT) else source).strip("/")
            target = f"{folder}/{name.replace('/', '.')}.o"
            language = ["-x", "c++"] if source.suffix == ".cu" else []
            self.lines += [
                f"build {target}: compile {source}{needs}",
                f"  flags = {' '.join([*flags, *language])}",
            ]
            made.append(target)
        return made

    def link(self, target: str, objects: Iterable[str], flags: list[str]) -> None:
        self.lines += [f"build {target}: link {' '.join(objects)}", f"  flags = {' '.join(flags)}"]

    def text(self) -> str:
        return "\n".join([*self.lines, ""])


#: Without these flags, static variables of inline functions would be shared with another library of this code
#: in the same process.
COMMON = ("-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-gnu-unique", "-Wall", "-Wextra")


def emulated_flags(kernels_in: Path) -> list[str]:
    return [
        *COMMON,
        # Tensor maps are passed as parameters; GCC warns that versions before 4.6 passed such parameters
        # differently.
        "-Wno-psabi",
        "-O2",
        "-DSELFATTN_CUDA_EMULATOR",
        "-DSELFATTN_CUDA_HOPPER",
        f"-I{kernels_in}",
        f"-I{EMULATOR}",
    ]


def emulator_objects(file: NinjaFile, variant: str, flags: list[str]) -> list[str]:
    # The emulator is little to compile, and most of the time runs in it.
    return file.objects(emulator_sources(), f"{variant}/emulator", [*flags, "-O3", *VARIANTS[variant][1]])


def write_ninja(tools: Tools, variant: str, kernels_in: Path = CSRC) -> NinjaFile:
    """The library, as kernels of the CPU and as those of a device, and small programs, in one variant."""
    kernel_flags, emulator_flags = VARIANTS[variant]
    emulated = emulated_flags(kernels_in)
    link = [flag for flag in emulator_flags if flag.startswith("-fsanitize")]

    file = NinjaFile(tools)
    emulator = emulator_objects(file, variant, emulated)
    kernels = file.objects(kernel_sources(kernels_in), f"{variant}/kernels", [*emulated, *kernel_flags])
    # The CPU's kernels are not under test here, so the build is to be quick rather than the kernels.
    python = ["-isystem", str(tools.torch / "include"), "-isystem", sysconfig.get_path("include")]
    names = [f"-DTORCH_EXTENSION_NAME={MODULE}", "-DSELFATTN_NAMESPACE=selfattn"]
    plain = [*COMMON, "-O1", "-DSELFATTN_CUDA_EMULATOR", f"-I{CSRC}", f"-I{EMULATOR}", *python, *names]
    # A precompiled header saves half of the time of an operator's source, which goes into torch's headers.
    headers = file.precompiled(EMULATOR / "operators_headers.h", "package", plain)
    operators = [path for path in library_sources() if path.parent == CSRC / "ops"]
    others = [path for path in library_sources() if path not in operators]
    package = file.objects(operators, "package", plain, headers)
    package += file.objects([*others, EMULATOR / "adapters.cpp"], "package", plain)
    torch = tools.torch / "lib"
    shared = [
        "-shared",
        *link,
        "-ldl",
        f"-L{torch}",
        "-ltorch",
        "-ltorch_cpu",
        "-lc10",
        f"-Wl,-rpath,{torch}",
    ]
    file.link(f"{variant}/{MODULE}.so", [*package, *kernels, *emulator], shared)

    # torch's full headers need a newer C++ than those of its stable ABI.
    half = file.objects([CSRC / "ops" / "cuda" / "engine_cuda.cpp"], "device", plain)
    half += file.objects([EMULATOR / "host_device.cpp"], "device", [*plain, "-std=c++20"])
    wrapped = [f"-Wl,--wrap={name}" for name in OF_A_DEVICE]
    file.link(f"{variant}/device/{MODULE}.so", [*package, *half, *kernels, *emulator], [*shared, *wrapped])
    maps = [name for name in kernels if name.endswith("tensor_map.cu.o")]
    for source in sorted((EMULATOR / "programs").glob("*.cu")):
        program = file.objects([source], f"{variant}/programs", [*emulated, *kernel_flags])
        file.link(f"{variant}/{source.stem}", [*program, *maps, *emulator], [*link, "-ldl"])
    return file


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def run_ninja(
    tools: Tools, folder: Path, name: str, content: NinjaFile, output: str, jobs: int | None
) -> Path:
    """Brings `output` of `folder` up to date by the file of that name, and returns its path; see build."""
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


def build_function(name: str, headers: dict[str, str], variant: str = "plain") -> Path:
    """A library of kernels that contain a function of scores; the headers are given by file name.

    Raises:
        RuntimeError: something does not compile; the message holds the compiler's output.
    """
    found, place = tools(), objects_folder()
    own = place / "functions" / name
    own.mkdir(parents=True, exist_ok=True)
    for header, text in headers.items():
        if not (own / header).exists() or (own / header).read_text(encoding="utf-8") != text:
            (own / header).write_text(text, encoding="utf-8")
    file, flags = NinjaFile(found), emulated_flags(CSRC)
    emulator = emulator_objects(file, variant, flags)
    with_function = [*flags, "-DSELFATTN_FUNCTION", f"-I{own}", *VARIANTS[variant][0]]
    needed = ("rows/*.cu", "rows/*.cpp", "function/*.cu", "split/*.cu", "mma/**/*.cpp")
    shared = [path for pattern in (*needed, "mma/**/*.cu") for path in (CSRC / "cuda").glob(pattern)]
    shared += [path for path in instances() if path.parent.name == "rows"]
    kernels = file.objects(
        [*sorted(shared), EMULATOR / "function_kernels.cpp"], f"{variant}/functions/{name}", with_function
    )
    library = f"{variant}/functions/{name}.so"
    file.link(library, [*kernels, *emulator], ["-shared", "-ldl"])
    return run_ninja(found, place, f"{variant}_{name}.ninja", file, library, None)


def objects_folder() -> Path:
    """The folder of object files for this Python and torch, in the checkout's build folder."""
    return ROOT / "build" / "cuda_emulator" / f"{sys.implementation.cache_tag}_torch{tools().torch_version}"


def build(
    target: str,
    variant: str = "plain",
    *,
    kernels_in: Path = CSRC,
    folder: Path | None = None,
    jobs: int | None = None,
) -> Path:
    """Brings `target` up to date and returns its path.

    Args:
        target: "library"; "device", for tensors on cuda:0; or the name of a program.
        variant: one of VARIANTS.
        kernels_in: the folder that holds ``cuda``, for builds of changed kernels.
        folder: where object files go; by default objects_folder().
        jobs: how many compilers run at a time; by default $MAX_JOBS or the number of processors.

    Raises:
        RuntimeError: something does not compile; the message holds the compiler's output.
    """
    found = tools()
    folder = folder or objects_folder()
    libraries = {"library": f"{variant}/{MODULE}.so", "device": f"{variant}/device/{MODULE}.so"}
    output = libraries.get(target, f"{variant}/{target}")
    return run_ninja(found, folder, f"{variant}.ninja", write_ninja(found, variant, kernels_in), output, jobs)


def environment(library: Path, **variables: str) -> dict[str, str]:
    """The environment of a process that tests a build. Of the package's variables it has only these.

    Raises:
        RuntimeError: there is no package to test.
    """
    package = find_spec("selfattn_ext")
    if package is None or package.origin is None:
        raise RuntimeError("selfattn_ext is neither installed nor in this folder")
    # The package may be installed elsewhere than in the checkout.
    path = [str(Path(package.origin).parents[1]), *map(str, SHARED), os.environ.get("PYTHONPATH", "")]
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("SELFATTN")},
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "SELFATTN_LIBRARY": str(library),
        "OMP_NUM_THREADS": "1",
        **variables,
    }


def run(program: Path, *arguments: str, **options: str) -> subprocess.CompletedProcess[str]:
    """Runs a program in the emulator with `options` as its variables, and without the package's other
    variables.
    """
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SELFATTN")}
    variables = {f"SELFATTN_EMULATOR_{name.upper()}": value for name, value in options.items()}
    return subprocess.run(
        [program, *arguments],
        env={**clean, **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def sanitizers() -> dict[str, str] | None:
    """Variables that a process with the asan variant needs besides; None if that cannot run here."""
    compiler = tools().compiler.split()
    paths = []
    for name in ("libasan.so", "libubsan.so"):
        asked = [*compiler, f"-print-file-name={name}"]
        paths.append(subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip())
    if not all(os.path.isabs(path) for path in paths):
        return None
    # Leaks are not looked for, because Python never gives back some of its own memory.
    return {"LD_PRELOAD": ":".join(paths), "ASAN_OPTIONS": "detect_leaks=0"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", choices=VARIANTS, default="plain")
    parser.add_argument("--target", default="library")
    parser.add_argument("--jobs", type=int)
    arguments = parser.parse_args()
    print(build(arguments.target, arguments.variant, jobs=arguments.jobs))


if __name__ == "__main__":
    main()
