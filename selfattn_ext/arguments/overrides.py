"""Support of __torch_function__: subclasses and modes see public functions like torch's."""

from __future__ import annotations

from typing import Any

import torch

from . import checks

__all__ = ["call", "overriding_arguments"]


def overriding_arguments(*values: Any) -> tuple[Any, ...]:
    """Returns the arguments whose types must be asked, () if neither they nor a mode override functions."""
    # A CausalBias and a jagged tensor override only torch's attention; here they are ordinary arguments.
    relevant = tuple(
        value for value in values if not checks.is_causal_bias(value) and not checks.is_jagged(value)
    )
    return relevant if torch.overrides.has_torch_function(relevant) else ()


def call(function: Any, relevant: tuple[Any, ...], given: Any) -> Any:
    """Calls the override of those types with the function's positional and keyword arguments.

    ``given`` is a call as in :mod:`selfattn_ext.arguments.call`, a named tuple with options.
    """
    values = {**given._asdict(), **given.options._asdict()}
    by_place = function.__code__.co_varnames[: function.__code__.co_argcount]
    return torch.overrides.handle_torch_function(
        function,
        relevant,
        *(values[name] for name in by_place),
        **{name: values[name] for name in function.__kwdefaults__},
    )
