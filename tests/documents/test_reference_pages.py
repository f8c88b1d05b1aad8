"""Every public name has an entry in docs/reference, describes its arguments, and has an example that runs."""

from __future__ import annotations

import doctest
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import public_names
import pytest
import torch.distributed as dist
from pages import ROOT

import selfattn_ext

NAMES = public_names.names()
#: Examples that are not run here, or not as a whole, and the tests that do the same.
ELSEWHERE = {
    "selfattn_ext.jit.load": "tests/building/test_jit.py",
    "selfattn_ext.integrations.onnx.translations": "tests/clients/test_onnx.py",
    "selfattn_ext.integrations.transformers.attention_forward": "tests/clients/test_reference_examples.py",
    "selfattn_ext.integrations.transformers.mask_function": "tests/clients/test_reference_examples.py",
    "selfattn_ext.integrations.transformers.register": "tests/clients/test_reference_examples.py",
}


def test_every_public_module_is_known() -> None:
    modules = [name for name in selfattn_ext.__all__ if isinstance(getattr(selfattn_ext, name), ModuleType)]
    assert [name for name in modules if f"selfattn_ext.{name}" not in public_names.MODULES] == []


def test_every_name_has_one_entry() -> None:
    """A name that repeats another one, as selfattn_ext.nn does those of selfattn_ext, shares its entry."""
    entries = public_names.entries()
    assert len(entries) == len({*entries})
    described = [public_names.resolved(name) for name in entries]
    missing = [
        name
        for name, thing in NAMES.items()
        if name not in entries and not (callable(thing) and any(thing is one for one in described))
    ]
    assert missing == []


def test_every_entry_is_public() -> None:
    assert [name for name in public_names.entries() if name not in NAMES] == []


@pytest.mark.parametrize("name", NAMES)
def test_every_name_has_an_example(name: str) -> None:
    assert public_names.example(name).examples, "its docstring needs an example, of lines that begin with >>>"


@pytest.mark.parametrize("name", [name for name, thing in NAMES.items() if inspect.isfunction(thing)])
def test_every_argument_is_described(name: str) -> None:
    text = inspect.getdoc(NAMES[name]) or ""
    section = re.search(r"^Args:\n((?:    .*\n|\n)+)", text, re.M)
    lists = re.findall(r"^    ([\w*][\w*, ]*): ", section[1], re.M) if section else []
    described = {argument.strip("*") for one in lists for argument in one.split(", ")}
    assert sorted({*inspect.signature(NAMES[name]).parameters} - described) == []


@pytest.mark.parametrize("name", ELSEWHERE)
def test_examples_that_run_elsewhere(name: str) -> None:
    assert (ROOT / ELSEWHERE[name]).is_file()


def test_no_other_example_leaves_out_lines() -> None:
    examples = {name: public_names.example(name).examples for name in NAMES}
    leaving_out = [
        name for name, lines in examples.items() if any(doctest.SKIP in line.options for line in lines)
    ]
    assert leaving_out == ["selfattn_ext.jit.load"]


@pytest.fixture
def group_of_one() -> Iterator[None]:
    """The process group of a program that is one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def surroundings(request: pytest.FixtureRequest, name: str) -> Iterator[None]:
    """What an example counts on, and what it leaves behind."""
    if name.startswith("selfattn_ext.distributed."):
        request.getfixturevalue("group_of_one")
    yield
    if name.startswith("selfattn_ext.viz."):
        from matplotlib import pyplot

        pyplot.close("all")


@pytest.mark.cpu_only("examples show tensors as they are printed on the CPU")
@pytest.mark.parametrize("name", [name for name in NAMES if "clients" not in ELSEWHERE.get(name, "")])
def test_example(name: str, surroundings: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    public_names.run(name)
