"""Helpers that the peers of other projects share."""

from __future__ import annotations

import importlib
from typing import Any

from selfattn_ext.bench.cases import Case


def load(module: str, package: str) -> Any:
    """Imports a module of an optional package.

    Raises:
        NotImplementedError: it is not installed; the message says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise NotImplementedError(
            f"{package} is not installed: pip install 'selfattn_ext[bench]' ({error})"
        ) from error


def check_plain(case: Case, *, backward: bool = False) -> None:
    """Raises NotImplementedError for dropout, and for a backward pass if ``backward`` is False."""
    if case.dropout:
        raise NotImplementedError("dropout is not compared")
    if case.backward and not backward:
        raise NotImplementedError("no backward pass")
