"""The public names of the package, their entries in docs/reference, and their examples."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
from functools import reduce
from types import ModuleType
from typing import Any

from pages import ROOT

#: The public modules. Those without "None" have the names that their ``__all__`` lists.
MODULES: dict[str, tuple[str, ...] | None] = {
    "selfattn_ext": None,
    "selfattn_ext.backends": None,
    "selfattn_ext.distributed": None,
    "selfattn_ext.integrations.onnx": None,
    "selfattn_ext.integrations.torch_flex": ("activate", "restore"),
    "selfattn_ext.integrations.transformers": None,
    "selfattn_ext.jit": None,
    "selfattn_ext.masks": None,
    "selfattn_ext.nn": None,
    "selfattn_ext.reference": None,
    "selfattn_ext.sources": None,
    "selfattn_ext.viz": None,
}

_ENTRY = re.compile(r"^\.\. auto(?:function|class|data):: (\S+)$", re.M)


def names() -> dict[str, Any]:
    """Returns what the public names stand for, modules left out; a name that repeats another one, too."""
    found = {}
    for path, listed in MODULES.items():
        module = importlib.import_module(path)
        for name in module.__all__ if listed is None else listed:
            thing = getattr(module, name)
            if not isinstance(thing, ModuleType):
                found[f"{path}.{name}"] = thing
    return found


def entries() -> list[str]:
    """Returns the names that the pages of docs/reference have an entry for."""
    pages = sorted((ROOT / "docs" / "reference").glob("*.md"))
    return [name for page in pages for name in _ENTRY.findall(page.read_text(encoding="utf-8"))]


def resolved(name: str) -> Any:
    """Returns what a dotted name of the package stands for."""
    module = max((path for path in MODULES if name.startswith(f"{path}.")), key=len)
    return reduce(getattr, name.removeprefix(f"{module}.").split("."), importlib.import_module(module))


def example(name: str) -> doctest.DocTest:
    """Returns the example in the docstring of a name; for a constant, those of its module that name it."""
    thing = resolved(name)
    module, _, last = name.rpartition(".")
    is_constant = not callable(thing)
    text = inspect.getdoc(importlib.import_module(module) if is_constant else thing) or ""
    found = doctest.DocTestParser().get_doctest(text, {}, name, None, 0)
    if is_constant and not any(last in one.source for one in found.examples):
        found.examples.clear()
    return found


def run(name: str) -> None:
    """Runs the example of a name.

    Raises:
        AssertionError: something else is printed than the example says, which the message holds.
    """
    said: list[str] = []
    failed, _ = doctest.DocTestRunner().run(example(name), out=said.append)
    assert not failed, "".join(said)
