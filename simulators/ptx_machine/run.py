"""Runs the tests of the CUDA half on the PTX machine, as on a GPU, and compiles what they need.

    python simulators/ptx_machine/run.py [--quick] [--steps NAME...] [ARGUMENTS OF PYTEST...]

Needs nvcc and a torch with CUDA. `make ptx-test` and `make ptx-quick` call it with the torch of .ci/run.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2] / folder) for folder in ("tests/support", "simulators", ".")]

import modules  # noqa: E402
import turns  # noqa: E402
from ptx_machine import build  # noqa: E402

TESTS = build.ROOT / "tests"


@dataclass(frozen=True)
class Step:
    """Test modules, and the variables in the environment of their process."""

    modules: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)


#: Tests run with tensors on "cuda", whatever device they were written for.
ON_CUDA = {"SELFATTN_TEST_DEVICE": "cuda"}

#: Modules of tests/support/gpu.py whose tests take minutes each on the machine, or run whole networks.
LONG = ("test_demo.py", "test_examples.py", "test_notebook.py", "test_source_notebooks.py")

OF_CUDA = (
    "test_cuda.py",
    "test_cuda_runtime.py",
    "test_cuda_sequences.py",
    "test_cuda_capture.py",
    "test_cuda_switches.py",
    "test_cuda_functions.py",
    "test_cuda_tangents.py",
    "test_cuda_training.py",
    "test_cuda_selected.py",
    "test_cuda_selected_sequences.py",
    "test_aten_cuda.py",
)

#: Tests that count memory need torch's own allocator, and need no results.
MEMORY = Step(
    ("test_cuda_training.py", "test_cuda_sizes.py"),
    ("-k", "memory"),
    {"PYTORCH_NO_CUDA_MEMORY_CACHING": "", "SELFATTN_PTX_EXECUTE": "0"},
)

#: torch's own allocator refuses what needs too much memory. One test has torch ask for 8 GiB.
ERRORS = Step(
    ("test_errors.py", "test_memory_errors.py"),
    ("--deselect", "tests/attention/test_memory_errors.py::test_sizes_of_weights_whose_product_overflows"),
    {**ON_CUDA, "PYTORCH_NO_CUDA_MEMORY_CACHING": ""},
)

#: A kernel that runs again has the same races; tests of refusals and of choices run no other kernels. Wrong
#: lengths let sequences overlap, so that blocks write the same rows: this is harmless, but a race.
OF_NO_RACES = (
    "-k",
    "not bits and not seed and not explained and not forced and not refusals and not return "
    "and not wrong_lengths and not wild",
)


#: Tests of functions of scores, in turns.
FUNCTIONS = ("hidden or beside or 64", "sequences or kept or refused")


#: Modules of numbers and gradients, in turns.
NUMBERS = (
    ("test_special_numbers.py",),
    ("test_large_values.py", "test_double_backward.py", "test_rising_scores.py"),
    ("test_mask_gradient.py",),
)


def all_steps() -> dict[str, Step]:
    import gpu

    apart = {*LONG, *ERRORS.modules, "test_aten_cuda.py"}
    on_cuda = tuple(name for name in gpu.MODULES if name not in apart)
    races = tuple(
        f"test_cuda{name}.py" for name in ("", "_sequences", "_tangents", "_selected", "_selected_sequences")
    )
    return {
        "cuda": Step(OF_CUDA, ("-k", "not memory")),
        "memory": MEMORY,
        "device": Step(on_cuda, variables=ON_CUDA),
        "errors": ERRORS,
        "long": Step(LONG, variables=ON_CUDA),
        "races": Step(races, OF_NO_RACES, {"SELFATTN_PTX_RACES": "1", "SELFATTN_PTX_SCHEDULE": "7"}),
        "ampere": Step(races, variables={"SELFATTN_PTX_CAPABILITY": "80"}),
    }


def quick_steps() -> dict[str, Step]:
    return {
        "cuda": Step(
            ("test_cuda_capture.py", "test_cuda_switches.py", "test_cuda_runtime.py", "test_cuda_tangents.py")
        ),
        "numbers": Step(("test_cuda.py",), ("-k", "strides or layouts or see_nothing or refusals or seed")),
        "selected": Step(("test_cuda_selected.py", "test_cuda_selected_sequences.py"), ("-k", "not bits")),
        # NVRTC takes seconds for each kernel.
        "functions": Step(("test_cuda_functions.py",), ("-k", " or ".join(turns.chosen(FUNCTIONS)))),
        # Every broadcast of a mask takes minutes, and so do scores that rise at every block.
        "device": Step(
            tuple(name for names in turns.chosen(NUMBERS) for name in names),
            ("-k", "not broadcast and not groups and not scale_of and not every_block and not strip"),
            ON_CUDA,
        ),
    }


def paths(names: tuple[str, ...]) -> Iterator[str]:
    known = modules.paths()
    for name in names:
        yield str(known[name].relative_to(build.ROOT))


def run(name: str, step: Step, library: Path, arguments: list[str]) -> bool:
    """Runs a step, prints what pytest prints, and returns whether its tests passed. Tests of refusals make
    reports, too.
    """
    log = build.folder() / f"reports-{name}.txt"
    log.unlink(missing_ok=True)
    given = {
        name: value for name, value in os.environ.items() if name.startswith("SELFATTN") and "_PTX_" in name
    }
    variables = {**given, **step.variables, "SELFATTN_PTX_LOG": str(log)}
    environment = build.environment_for_torch(library, **variables)
    if not environment["PYTORCH_NO_CUDA_MEMORY_CACHING"]:
        del environment["PYTORCH_NO_CUDA_MEMORY_CACHING"]  # an empty value would count as set
    if importlib.util.find_spec("xdist") is not None:
        environment.setdefault("OMP_NUM_THREADS", "1")
        arguments = ["--numprocesses", "logical", "--maxprocesses", "8", "--dist", "loadgroup", *arguments]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *paths(step.modules)]
    command += [*step.arguments, *arguments]
    print(f"\n=== {name}: {' '.join(step.modules)}", flush=True)
    begin = time.monotonic()
    done = subprocess.run(command, cwd=build.ROOT, env=environment, check=False)
    reports = log.read_text(encoding="utf-8").count("ptx machine: ") if log.exists() else 0
    outcome = "passed" if done.returncode == 0 else "FAILED"
    print(f"=== {name}: {outcome} ({time.monotonic() - begin:.0f} s)")
    if reports:
        print(f"=== {name}: {reports} reports, in {log}")
    return done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a part of them")
    parser.add_argument("--steps", nargs="+", help=f"some of {', '.join(all_steps())}")
    arguments, of_pytest = parser.parse_known_args()
    steps = quick_steps() if arguments.quick else all_steps()
    unknown = set(arguments.steps or ()) - set(steps)
    if unknown:
        parser.error(f"no step is called {', '.join(sorted(unknown))}: there are {', '.join(steps)}")
    library = Path(os.environ.get("SELFATTN_LIBRARY") or build.build_package())
    chosen = [name for name in steps if not arguments.steps or name in arguments.steps]
    failed = [name for name in chosen if not run(name, steps[name], library, of_pytest)]
    print(f"\n{'failed: ' + ', '.join(failed) if failed else 'all steps passed'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
