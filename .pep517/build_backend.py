"""PEP 517 backend: setuptools, with the torch that is already installed.

If build-system.requires named torch, pip would download gigabytes into the isolated build environment, of a
version that need not be the one the extension then runs with. So torch is not a build requirement: this
backend asks the interpreter that the package is being installed for where it keeps its packages, and appends
those folders to sys.path while setup.py runs. The isolated environment's own packages still come first.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent

# This code runs in the interpreter that is asked; it does not import torch, which would take seconds.
_QUESTION = """
import importlib.util, json, os, runpy, sys
spec = importlib.util.find_spec("torch")
folders = spec and spec.submodule_search_locations
file = folders and os.path.join(folders[0], "version.py")
version = runpy.run_path(file)["__version__"] if file and os.path.exists(file) else None
print(json.dumps({"python": list(sys.version_info[:2]), "path": sys.path, "torch": version and str(version),
                  "folder": file and os.path.dirname(file)}))
"""


def _load(name: str) -> dict:
    return runpy.run_path(str(_ROOT / "selfattn_ext" / "build" / f"{name}.py"))


def _ask(python: str) -> dict | None:
    # pip and build point these at the isolated environment.
    clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONNOUSERSITE")}
    try:
        # -c also searches the working folder; in "/" Python finds no folder of the user's called torch.
        done = subprocess.run([python, "-c", _QUESTION], env=clean, cwd="/", capture_output=True, timeout=60)
        answer = json.loads(done.stdout) if done.returncode == 0 else None
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    return answer if answer and tuple(answer["python"]) == sys.version_info[:2] else None


def _candidates() -> list[str]:
    """Interpreters that may be the one to install for, the likeliest first.

    pip runs this backend with that interpreter itself. Tools such as build and uv run it with one from an
    environment of their own; there the activated environment is meant.
    """
    active = [os.environ[name] for name in ("VIRTUAL_ENV", "CONDA_PREFIX") if os.environ.get(name)]
    on_path = [folder for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
    pythons = [sys.executable, *(os.path.join(folder, "bin", "python") for folder in active)]
    pythons += [os.path.join(folder, name) for folder in on_path for name in ("python", "python3")]
    return list(dict.fromkeys(python for python in pythons if os.path.exists(python)))


def _find_torch() -> dict:
    own = _ask(sys.executable)
    if own is not None and own["torch"]:
        return own
    # pip's isolation hides the packages of the user's own interpreter; then no other interpreter will do.
    isolated_by_pip = own is not None and not set(_site_packages(own["path"])) <= set(sys.path)
    for python in [] if isolated_by_pip else _candidates()[1:]:
        answer = _ask(python)
        if answer is not None and answer["torch"]:
            return answer
    wanted = _minimum_torch()
    raise SystemExit(
        f"selfattn_ext needs PyTorch {wanted} or newer, and {sys.executable} has none: "
        f"run pip install 'torch>={wanted}' first, or activate the environment that has it"
    )


def _site_packages(path: list[str]) -> list[str]:
    return [folder for folder in path if os.path.basename(folder) in ("site-packages", "dist-packages")]


def _minimum_torch() -> str:
    return ".".join(map(str, _load("sources")["MINIMUM_TORCH"]))


@functools.cache
def _check() -> dict:
    """The answer of the interpreter whose torch is used; ends the build if it cannot work."""
    found = _find_torch()
    if not _load("sources")["supports"](found["torch"]):
        wanted = _minimum_torch()
        raise SystemExit(
            f"selfattn_ext needs PyTorch {wanted} or newer, and {found['folder']} is {found['torch']}: "
            f"run pip install --upgrade 'torch>={wanted}' first"
        )
    problem = _load("toolchain")["compiler_problem"]()
    if problem is not None:
        raise SystemExit(problem)
    return found


def _with_torch() -> None:
    found = _check()
    sys.path += [folder for folder in found["path"] if folder and folder not in sys.path]
    print(f"selfattn_ext: compiling against torch {found['torch']} in {found['folder']}", flush=True)


def _setuptools():
    # It is imported late, so that a missing torch is reported first; without build isolation setuptools may
    # be missing or old.
    try:
        import setuptools
        from setuptools import build_meta
    except ImportError:
        message = "selfattn_ext needs setuptools to build: run pip install 'setuptools>=77' first"
        raise SystemExit(message) from None
    if int(setuptools.__version__.split(".")[0]) < 77:
        raise SystemExit(
            f"selfattn_ext needs setuptools 77 or newer to build, and this is {setuptools.__version__}: "
            "run pip install --upgrade setuptools first, or leave out --no-build-isolation"
        )
    return build_meta


def _requirements(setuptools_requires: list[str]) -> list[str]:
    # ninja compiles in parallel; if the machine has one already, it is not downloaded again.
    return setuptools_requires + ([] if _load("toolchain")["ninja_folder"]() else ["ninja"])


def get_requires_for_build_sdist(config_settings=None):
    return _setuptools().get_requires_for_build_sdist(config_settings)


def get_requires_for_build_wheel(config_settings=None):
    _check()
    return _requirements(_setuptools().get_requires_for_build_wheel(config_settings))


def get_requires_for_build_editable(config_settings=None):
    _check()
    return _requirements(_setuptools().get_requires_for_build_editable(config_settings))


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    _check()
    return _setuptools().prepare_metadata_for_build_wheel(metadata_directory, _settings(config_settings))


def prepare_metadata_for_build_editable(metadata_directory, config_settings=None):
    _check()
    return _setuptools().prepare_metadata_for_build_editable(metadata_directory, _settings(config_settings))


def build_sdist(sdist_directory, config_settings=None):
    return _setuptools().build_sdist(sdist_directory, config_settings)


def _settings(given):
    # setuptools' lists of copied files would bury the progress that "pip install -v" shows.
    return given or {"quiet": "true"}


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    _with_torch()
    return _setuptools().build_wheel(wheel_directory, _settings(config_settings), metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    _with_torch()
    return _setuptools().build_editable(wheel_directory, _settings(config_settings), metadata_directory)
