"""The files that are shipped, and the messages on a machine that lacks something."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

import pytest

from selfattn_ext.build import sources

ROOT = Path(__file__).resolve().parents[2]
BACKEND = ROOT / ".pep517"


def run(*command, **environment):
    """Runs a command in the checkout with changed environment variables; None removes one."""
    variables = {**os.environ, **environment}
    return subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        env={name: value for name, value in variables.items() if value is not None},
        capture_output=True,
        text=True,
        timeout=300,
    )


def ask_backend(python, hook, *options, **environment):
    """Runs a hook as pip does, with no other environment activated that might have a torch."""
    environment = {"VIRTUAL_ENV": None, "CONDA_PREFIX": None, "PYTHONPATH": None, **environment}
    return run(
        python, *options, "-c", f"import sys; sys.path.insert(0, {str(BACKEND)!r})\n{hook}", **environment
    )


def files_below(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def bare_python(tmp_path):
    """Returns an interpreter without any packages."""
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    return tmp_path / "bare" / "bin" / "python"


def test_archive_and_package_hold_what_a_build_needs(tmp_path):
    package = tmp_path / "lib" / "selfattn_ext"
    package.mkdir(parents=True)
    (package / "of_an_earlier_build.py").touch()
    # Without --egg-base, the egg-info folder would be written to the checkout.
    commands = ["egg_info", "--egg-base", tmp_path, "sdist", "--dist-dir", tmp_path]
    done = run(sys.executable, "setup.py", "-q", *commands, "build_py", "--build-lib", tmp_path / "lib")
    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    needed = {"setup.py", "pyproject.toml", ".pep517/build_backend.py", "CMakeLists.txt", "Makefile"}
    needed |= {"LICENSE", "selfattn_ext/build/sources.py", "selfattn_ext/py.typed"}
    needed.add("tests/building/test_install.py")
    needed |= {f"csrc/{name}" for name in files_below(ROOT / "csrc")}
    assert needed <= names
    assert not [name for name in names if name.endswith((".so", ".o", ".pyc"))]

    assert not (package / "of_an_earlier_build.py").exists()
    assert files_below(package / "csrc") == files_below(ROOT / "csrc")
    assert (package / "py.typed").is_file()
    printed = run(sys.executable, package / "build" / "sources.py", "library")
    assert printed.stdout.split()
    assert all(Path(line).is_relative_to(package / "csrc") for line in printed.stdout.split())


def compiler(folder, script):
    """Returns a compiler that first runs a script of the shell."""
    program = folder / "c++"
    program.write_text(f'#!/bin/sh\n{script}\nexec {shutil.which("c++")} "$@"\n')
    program.chmod(0o755)
    return str(program)


class TestTold:
    """The messages of setup.py, which "pip install -v" shows."""

    @staticmethod
    def build(folder, **environment):
        folders = ["--build-temp", folder, "--build-lib", folder]
        return run(sys.executable, "setup.py", "-q", "build_ext", *folders, **environment)

    def test_what_will_be_built_and_why_it_was_not(self, tmp_path):
        refuses = 'case "$*" in *" -c "*) echo "no, not $#" >&2; exit 1;; esac'
        done = self.build(tmp_path, CXX=compiler(tmp_path, refuses), SELFATTN_CUDA="0")
        assert done.returncode == 1
        first, second = done.stdout.splitlines()
        assert first == "selfattn_ext: CPU only, as SELFATTN_CUDA=0 asks"
        files = len(sources.extension_sources())
        assert re.fullmatch(
            rf"selfattn_ext: compiling {files} files on \d+ processors?, about \d+ minutes?", second
        )
        assert "selfattn_ext: Error compiling objects for extension: " in done.stderr
        assert re.search(r"^no, not \d+$", done.stderr, re.M)
        assert "Traceback" not in done.stderr

    def test_that_there_must_be_cuda_kernels_and_cannot(self, tmp_path):
        done = self.build(tmp_path, SELFATTN_CUDA="1", CUDA_HOME=str(tmp_path))
        assert done.returncode != 0
        reason = "selfattn_ext: SELFATTN_CUDA=1 asks for CUDA kernels, and none can be built"
        assert done.stderr.strip().splitlines()[-1].startswith(reason)

    def test_no_lists_of_copied_files(self):
        # The output of setuptools would hide the build's progress.
        hook = "import build_backend; print(*map(build_backend._settings, [None, {'verbose': '1'}]))"
        assert ask_backend(sys.executable, hook).stdout.strip() == "{'quiet': 'true'} {'verbose': '1'}"


class TestTorchIsFound:
    def test_from_an_isolated_environment(self):
        # Like pip's isolation, -S hides site-packages from this process, but not from the Python it asks.
        done = ask_backend(
            sys.executable,
            "import build_backend; build_backend._with_torch(); import torch; print(torch.__file__)",
            "-S",
        )
        assert done.returncode == 0, done.stderr
        message, file = done.stdout.splitlines()
        assert message.startswith("selfattn_ext: compiling against torch ")
        assert file.startswith(message.partition(" in ")[2])

    def test_in_the_activated_environment_by_a_tool_with_its_own(self, bare_python):
        # The tools build and uv do this.
        done = ask_backend(
            bare_python, "import build_backend; build_backend._with_torch()", VIRTUAL_ENV=sys.prefix
        )
        assert done.returncode == 0, done.stderr
        assert f" in {sys.prefix}" in done.stdout


class TestMissing:
    """Each problem is told in one sentence on stderr, without a traceback."""

    @staticmethod
    def told(python, *options, kind="wheel", **environment):
        hook = f"import build_backend; build_backend.get_requires_for_build_{kind}()"
        done = ask_backend(python, hook, *options, **environment)
        assert done.returncode != 0
        (line,) = done.stderr.strip().splitlines()
        return line

    @pytest.mark.parametrize("kind", ["wheel", "editable"])
    def test_torch(self, bare_python, kind, tmp_path):
        line = self.told(bare_python, kind=kind, PATH=str(tmp_path))
        assert line.startswith("selfattn_ext needs PyTorch 2.11 or newer")
        assert "pip install 'torch>=2.11'" in line

    def test_torch_in_the_environment_installed_for(self, bare_python):
        # Another environment's torch would be missing at run time, even if that environment is activated.
        assert f"{bare_python} has none" in self.told(bare_python, "-S", VIRTUAL_ENV=sys.prefix)

    def test_torch_as_pip_shows_it(self, bare_python):
        pip = [sys.executable, "-m", "pip", "--python", bare_python]
        environment = {"VIRTUAL_ENV": None, "CONDA_PREFIX": None, "PATH": os.defpath}
        done = run(*pip, "install", "--no-index", "--no-build-isolation", ".", **environment)
        assert done.returncode != 0
        assert "selfattn_ext needs PyTorch 2.11 or newer" in done.stdout + done.stderr
        assert "Traceback" not in done.stdout + done.stderr

    def test_torch_too_old(self, bare_python, tmp_path):
        (packages,) = (tmp_path / "bare").glob("lib/python*/site-packages")
        (packages / "torch").mkdir()
        (packages / "torch" / "__init__.py").touch()
        (packages / "torch" / "version.py").write_text("__version__ = '2.10.1+cpu'\n")
        line = self.told(bare_python)
        assert "2.11 or newer" in line
        assert "2.10.1+cpu" in line

    def test_compiler_too_old(self, tmp_path):
        old = compiler(tmp_path, "exit 1")
        assert f"{old} compiles no C++17 program" in self.told(sys.executable, CXX=old)

    def test_python_headers(self, tmp_path):
        # This compiler finds all headers except Python.h.
        picky = compiler(tmp_path, 'case "$*" in *" -I"*) exit 1;; esac')
        line = self.told(sys.executable, CXX=picky)
        assert line.startswith("selfattn_ext needs the headers of Python")
        assert "python3-dev" in line

    def test_ninja_is_asked_for_only_where_there_is_none(self, bare_python, tmp_path):
        hook = "import build_backend; print(build_backend._requirements([]))"
        assert ask_backend(sys.executable, hook).stdout.strip() == "[]"
        assert ask_backend(bare_python, hook, PATH=str(tmp_path)).stdout.strip() == "['ninja']"
