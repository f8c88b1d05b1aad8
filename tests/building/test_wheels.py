"""scripts/wheels.py, which makes wheels for other Pythons and imports them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import wheels

from selfattn_ext.build import library, sources

ROOT = Path(__file__).parents[2]
OTHER = wheels.Interpreter("python3.14t", "cp314", "cp314t", ".cpython-314t-x86_64-linux-gnu.so", "/nowhere")


def own() -> wheels.Interpreter:
    found = wheels.ask(sys.executable)
    assert found is not None
    return found


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A wheel of this Python, with the installed library and nothing else."""
    content, tag = tmp_path / "content", f"{own().python}-{own().abi}-linux_x86_64"
    info = content / f"selfattn_ext-{sources.version()}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: selfattn_ext\n")
    (info / "WHEEL").write_text(f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {tag}\n")
    (content / "selfattn_ext").mkdir()
    (content / "selfattn_ext" / "__init__.py").touch()
    file = Path(library.extension().__file__ or "")
    (content / "selfattn_ext" / f"_C{own().suffix}").write_bytes(file.read_bytes())
    (tmp_path / "dist").mkdir()
    command = [sys.executable, "-m", "wheel", "pack", "--dest-dir", tmp_path / "dist", content]
    subprocess.run(command, check=True, capture_output=True)
    (made,) = (tmp_path / "dist").iterdir()
    return made


def test_a_wheel_for_another_python(base: Path, tmp_path: Path) -> None:
    (tmp_path / f"_C{OTHER.suffix}").write_text("another library")
    wheels.repack(base, tmp_path / f"_C{OTHER.suffix}", OTHER)
    (made,) = set(base.parent.iterdir()) - {base}
    assert made.name == f"selfattn_ext-{sources.version()}-cp314-cp314t-linux_x86_64.whl"
    # Unpacking compares the files with their digests.
    command = [sys.executable, "-m", "wheel", "unpack", "--dest", tmp_path / "unpacked", made]
    subprocess.run(command, check=True, capture_output=True)
    (content,) = (tmp_path / "unpacked").iterdir()
    assert [file.name for file in (content / "selfattn_ext").glob("_C*")] == [f"_C{OTHER.suffix}"]
    assert (content / "selfattn_ext" / "__init__.py").exists()
    (tags,) = content.glob("*/WHEEL")
    assert "Tag: cp314-cp314t-linux_x86_64\n" in tags.read_text()


def test_the_library_of_a_wheel_is_imported(base: Path, capfd: pytest.CaptureFixture[str]) -> None:
    wheels.try_all(base.parent, [own()])
    assert f"_C{own().suffix} imported by Python {sys.version.split()[0]}" in capfd.readouterr().out


def test_a_wheel_that_does_not_import_is_an_error(base: Path, tmp_path: Path) -> None:
    damaged = tmp_path / f"_C{own().suffix}"
    damaged.write_text("no library")
    wheels.repack(base, damaged, own())
    with pytest.raises(SystemExit, match=f"{base} does not import"):
        wheels.try_all(base.parent, [own()])
    with pytest.raises(SystemExit, match=r"has no wheel for python3\.14t"):
        wheels.try_all(base.parent, [OTHER])


def test_pythons_are_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert own().suffix == sysconfig.get_config_var("EXT_SUFFIX")
    assert Path(own().headers, "Python.h").is_file()
    assert wheels.ask("/nowhere/python3") is None
    with pytest.raises(SystemExit, match="/nowhere/python3 is no Python that runs and has headers"):
        wheels.interpreters([sys.executable, "/nowhere/python3"])
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(wheels, "FOLDERS", (tmp_path / "versions",))
    for version in ("3.14.2", "3.14.10"):
        (tmp_path / "versions" / version / "bin").mkdir(parents=True)
        (tmp_path / "versions" / version / "bin" / "python3.14").touch()
    folders = [Path(program).parts[-3] for program in wheels.programs("3.14")]
    assert folders == ["3.14.10", "3.14.2"]


def test_pythons_that_are_missing_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    version, made = ".".join(map(str, sys.version_info[:2])), []
    monkeypatch.setattr(wheels, "VERSIONS", (version, "3.99"))
    monkeypatch.setattr(wheels, "programs", lambda it: [sys.executable] if it == version else [])
    monkeypatch.setattr(wheels, "add", lambda folder, pythons: made.append((folder, pythons)))
    monkeypatch.setattr(sys, "argv", ["wheels.py", "add", "folder"])
    wheels.main()
    assert made == [(Path("folder"), [own()])]
    assert capsys.readouterr().out == "no wheel for Python 3.99: it is not found, or has no headers\n"


def test_pythons_share_object_files() -> None:
    """Only the sources of one folder may see Python: those are compiled for each."""
    csrc = sources.root()
    sees = {
        path.relative_to(csrc).parts[0]
        for path in csrc.rglob("*")
        if path.suffix in (".cpp", ".h", ".cu", ".cuh")
        and any(name in path.read_text() for name in ("<Python.h>", "<pybind11/", "torch/extension.h"))
    }
    assert sees == {sources.PYTHON_FOLDER}


#: A compiler that writes down what it is asked to make, and makes empty files.
COMPILER = """#!/bin/sh
case " $* " in *" -o "*) ;; *) exec c++ "$@" ;; esac
echo "$*" >> "$CALLS"
while [ "$1" != -o ]; do shift; done
: > "$2"
"""


def test_only_one_folder_is_compiled_for_another_python(tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    variables = {"CXX": str(compiler), "CALLS": str(tmp_path / "calls"), "SELFATTN_CUDA": "0"}
    command = ["setup.py", "-q", "build_ext", "--build-temp", tmp_path / "temp"]
    command += ["--build-lib", tmp_path / "lib", "--pythons", json.dumps({OTHER.suffix: [OTHER.headers]})]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert {file.name for file in (tmp_path / "lib" / "selfattn_ext").iterdir()} == {
        f"_C{own().suffix}",
        f"_C{OTHER.suffix}",
    }
    calls = [line.split() for line in (tmp_path / "calls").read_text().splitlines()]
    compiled = [call for call in calls if "-c" in call]
    assert len(compiled) == len(sources.extension_sources()) + 1
    for_other = [call for call in compiled if f"-I{OTHER.headers}" in call]
    assert [Path(call[call.index("-o") + 1]).name for call in for_other] == ["module.o"]
    assert f"-I{own().headers}" not in for_other[0]
    first, second = ({name for name in call if name.endswith(".o")} for call in calls if "-shared" in call)
    assert len(first) == len(second) == len(sources.extension_sources())
    assert {Path(name).name for name in first ^ second} == {"module.o"}
