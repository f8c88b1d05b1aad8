"""The Makefile's calls of pip, pytest and auditwheel, recorded by programs that replace them."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

import pytest

from selfattn_ext.build import library

ROOT = Path(__file__).parents[2]

Make = Callable[..., list[list[str]]]

#: A program that records its calls, and answers the question for torch's version.
PROGRAM = """#!/bin/sh
echo "$(basename "$0") $*" >> calls
case "$*" in *version*torch*) echo 2.13.0+cpu;; esac
"""

#: Variables that make reads; a make that runs these tests has set some of them.
LEFT_OUT = {"MAKEFLAGS", "MFLAGS", "MAKELEVEL", "TORCH", "CLIENTS", "PYTHON3", "PYTHONS", "ARGS"}
LEFT_OUT |= {"VIRTUAL_ENV", "CONDA_PREFIX"}


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Runs make in a copy of the project without sources, and returns the calls, split at spaces."""
    for name in ("Makefile", "pyproject.toml", "setup.py", "selfattn_ext/build/sources.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("csrc/version.h", ".pep517/build_backend.py", "selfattn_ext/build/toolchain.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "selfattn_ext" / "build" / "cuda_build.py").touch()
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("python", "auditwheel"):
        (programs / name).write_text(PROGRAM)
        (programs / name).chmod(0o755)

    def run(*arguments: str) -> list[list[str]]:
        (tmp_path / "calls").write_text("")
        environment = {name: value for name, value in os.environ.items() if name not in LEFT_OUT}
        done = subprocess.run(
            ["make", *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return [shlex.split(line) for line in (tmp_path / "calls").read_text().splitlines()]

    return run


def installing(calls: list[list[str]], what: str) -> list[list[str]]:
    return [call for call in calls if call[:4] == ["python", "-m", "pip", "install"] and what in call]


def test_clients_leave_torch_as_it_is(make: Make) -> None:
    (install,) = installing(make("test-clients"), ".[clients,bench,onnx]")
    assert "torch==2.13.0+cpu" in install
    assert {"--upgrade", "transformers", "timm", "diffusers"} <= set(install)


def test_clients_are_installed_anew_when_others_are_asked_for(make: Make) -> None:
    old = "CLIENTS=transformers==4.57.*"
    assert installing(make("test-clients"), ".[clients,bench,onnx]")
    assert not installing(make("test-clients"), ".[clients,bench,onnx]")
    (install,) = installing(make("test-clients", old), "transformers==4.57.*")
    assert "torch==2.13.0+cpu" in install
    assert not installing(make("test-clients", old), ".[clients,bench,onnx]")
    assert installing(make("test-clients"), ".[clients,bench,onnx]")


def test_build_shows_how_far_it_is(make: Make) -> None:
    """setup.py compiles first and shows its progress, which pip would hide."""
    calls = make("build")
    (install,) = installing(calls, ".[test,viz]")
    assert calls[calls.index(install) - 1] == ["python", "setup.py", "--quiet", "build_ext", "--inplace"]


@pytest.mark.parametrize(("target", "folder"), [("test", None), ("test-clients", "tests/clients")])
def test_only_test_clients_names_the_folder_of_clients(make: Make, target: str, folder: str | None) -> None:
    calls = make(target, "ARGS=-x")
    (tests,) = [call for call in calls if call[:3] == ["python", "-m", "pytest"]]
    assert ("tests/clients" in tests) == (folder is not None)
    assert tests[-1] == "-x"
    assert bool(installing(calls, ".[clients,bench,onnx]")) == (folder is not None)


def test_wheel_is_repaired(make: Make) -> None:
    *before, build, repair = make("wheel")
    assert installing(before, ".[wheel]")
    assert build[:4] == ["python", "-m", "pip", "wheel"]
    assert build[build.index("--wheel-dir") + 1] == "build/wheel"
    assert repair[:2] == ["auditwheel", "repair"]
    assert repair[repair.index("--wheel-dir") + 1] == "dist"
    assert repair[-1] == "build/wheel/*.whl"


def test_wheels_of_other_pythons_are_added_repaired_and_tried(make: Make) -> None:
    (add, repair, attempt) = make("wheels", "PYTHONS=python3.13 python3.14t")[-3:]
    assert add == ["python", "scripts/wheels.py", "add", "build/wheel", "python3.13", "python3.14t"]
    assert repair == make("wheel")[-1]
    assert attempt == ["python", "scripts/wheels.py", "try", "dist", "python3.13", "python3.14t"]


def excluded(repair: list[str]) -> list[str]:
    return [value for option, value in itertools.pairwise(repair) if option == "--exclude"]


#: System libraries that every manylinux wheel may use.
SYSTEM = ["libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6", "libdl.so.2", "librt.so.1"]
SYSTEM += ["libpthread.so.0", "ld-linux-*.so.*"]


def test_wheel_takes_in_no_library(make: Make) -> None:
    # A copy of an OpenMP library or of torch's own library would be the process's second one.
    patterns = excluded(make("wheel")[-1])
    dynamic = subprocess.run(
        ["readelf", "--dynamic", "--wide", str(library.extension().__file__)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic)
    assert "libc10.so" in needed
    assert [name for name in needed if not any(fnmatch(name, one) for one in [*patterns, *SYSTEM])] == []
    assert not any(fnmatch(name, one) for name in [*SYSTEM, "libgomp.so.1"] for one in patterns)


def test_pytest_does_not_collect_what_needs_more(pytestconfig: pytest.Config) -> None:
    assert {"clients", "site"} <= {*pytestconfig.getini("norecursedirs")}


@pytest.mark.xdist_group("grouped")
def test_pytest_keeps_groups_of_tests_in_one_process(request: pytest.FixtureRequest) -> None:
    # Incompatible versions ignore the marks silently, and then every process computes what a group shares.
    # pytest-xdist hands out tests by their names.
    if request.config.getoption("loadgroup", False):
        assert request.node.nodeid.endswith("@grouped")
