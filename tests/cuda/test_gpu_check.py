"""scripts/gpu_check.sh without a GPU: which steps run, what is kept, when it fails."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import gpu
import modules
import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_check.sh"
STEPS = ["build", "hopper", "test", "device", "suite", "check", "golden", "bench"]

Check = Callable[..., subprocess.CompletedProcess[str]]

#: This stands for Python: it prints its arguments, and fails or hangs where variables say so.
PYTHON = """#!/bin/sh
case "$*" in
  -c*) echo 90a ;;
  *$FAIL*) exit 7 ;;
  *$HANG*) sleep 30 ;;
  *probe.py*) mkdir "$3" && echo "python $*" ;;
  *) echo "python $* on ${SELFATTN_TEST_DEVICE:-cpu}" && echo "path $PYTHONPATH" ;;
esac
"""

#: This stands for nvcc: it prints its arguments, and makes programs that print ANSWER.
NVCC = """#!/bin/sh
echo "nvcc $*"
for program in "$@"; do :; done
printf '#!/bin/sh\\necho "%s $1: %s"\\n' "bfloat16" "${ANSWER:-0}" > "$program"
chmod +x "$program"
"""


@pytest.fixture
def check(tmp_path: Path) -> Check:
    """Runs the script with arguments and variables, with a Python that does nothing."""
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(NVCC)
    nvcc.chmod(0o755)

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        variables = {"PYTHON": str(python), "CUDA_HOME": str(tmp_path / "cuda"), "OUT": str(tmp_path / "out")}
        variables |= {"FAIL": "nothing", "HANG": "nothing", "PATH": os.environ["PATH"], **environment}
        return subprocess.run([SCRIPT, *arguments], env=variables, capture_output=True, text=True)

    return run


def steps_of(run: subprocess.CompletedProcess[str]) -> list[str]:
    return re.findall(r"^=== (\w+): ", run.stdout, re.M)


def test_help_names_every_step(check: Check) -> None:
    for flag in ("--help", "-h"):
        run = check(flag)
        assert run.returncode == 0
        assert all(f"--{step} " in run.stdout for step in STEPS)
    assert re.findall(r"^  --(\w+)  ", run.stdout, re.M)[: len(STEPS)] == STEPS


@pytest.mark.parametrize("arguments", [[], ["--nothing"], ["--test", "tests"], ["--quick"]], ids=str)
def test_bad_arguments(arguments: list[str], check: Check, tmp_path: Path) -> None:
    run = check(*arguments)
    assert run.returncode == 2
    assert run.stderr
    assert not (tmp_path / "out").exists()


def test_steps_run_in_order_and_once(check: Check, tmp_path: Path) -> None:
    assert steps_of(check("--all")) == STEPS
    run = check("--bench", "--build", "--bench", "--quick")
    assert run.returncode == 0
    assert steps_of(run) == ["build", "bench"]
    out = tmp_path / "out"
    benchmark = f"benchmarks/gpu_run.py --quick --json {out}/bench.json --markdown {out}/bench.md"
    assert f"python {benchmark}" in run.stdout
    # Nothing is installed: scripts find the package in the checkout.
    assert f"path {SCRIPT.parents[1]}\n" in run.stdout
    assert "--archs 90a" in check("--check").stdout
    assert re.search(
        r"pytest .*--ignore=tests/building/test_install.py .* on cuda$", check("--device").stdout, re.M
    )
    suite = check("--suite").stdout
    assert re.search(r"pytest .*--ignore=tests/cuda/test_cuda_training.py .* on cpu$", suite, re.M)
    assert "--ignore=tests/cuda/test_on_cuda.py" in suite
    run = check("--hopper")
    assert "arch=compute_90a,code=sm_90a simulators/ptx_machine/programs/hopper.cu" in run.stdout
    assert "bfloat16 products: 0\nbfloat16 boxes: 0\n" in run.stdout
    assert run.returncode == 0
    run = check("--golden")
    assert "arch=compute_90a,code=sm_90a simulators/ptx_machine/programs/probe.cu" in run.stdout
    assert re.search(r"^python simulators/ptx_machine/probe.py \S+/probe \S+/golden$", run.stdout, re.M)
    assert re.search("^golden +passed", run.stdout, re.M)
    # There is one log for all calls.
    assert sorted(path.name for path in out.iterdir()) == ["golden.tar", "log.txt"]
    assert (out / "log.txt").read_text().count("=== summary") == 7


def test_hoppers_own_numbers_are_judged(check: Check) -> None:
    run = check("--hopper", "--build", ANSWER="3")
    assert run.returncode == 1
    assert re.search("^hopper +FAILED with 1", run.stdout, re.M)


def test_failures_are_told_and_stop_nothing(check: Check) -> None:
    run = check("--build", "--test", "--bench", FAIL="setup.py", HANG="test_cuda", STEP_SECONDS="1")
    assert run.returncode == 1
    summary = run.stdout.partition("=== summary")[2]
    assert re.search(r"^build +FAILED with 7 ", summary, re.M)
    assert re.search(r"^test +FAILED: stopped after 1 s", summary, re.M)
    assert re.search(r"^bench +passed", summary, re.M)


def test_modules_that_do_not_run_on_the_gpu_have_one_reason() -> None:
    excused = [start for name in modules.paths() for start in gpu.ELSEWHERE if name.startswith(start)]
    assert set(excused) == set(gpu.ELSEWHERE)
    assert len(excused) == len(modules.paths()) - len(gpu.MODULES)


def test_a_missing_gpu_is_a_skip_with_one_reason_or_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "missing", lambda: "needs a GPU")
    monkeypatch.delenv(gpu.REQUIRE, raising=False)
    with pytest.raises(pytest.skip.Exception, match=r"^needs a GPU$"):
        gpu.need()
    monkeypatch.setenv(gpu.REQUIRE, "1")
    with pytest.raises(pytest.fail.Exception, match=f"{gpu.REQUIRE}=1: this module needs a GPU"):
        gpu.need()
    monkeypatch.setattr(gpu, "missing", lambda: None)
    gpu.need()


def test_what_it_runs_is_there() -> None:
    root, text = SCRIPT.parents[1], SCRIPT.read_text()
    files = re.findall(r"\b((?:tests|scripts|benchmarks)/[\w/]+\.(?:py|cu))", text)
    assert len(files) >= 9
    assert [path for path in files if not (root / path).is_file()] == []
