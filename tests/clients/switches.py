"""The two switches of torch_sdpa and sdpa_mode, as context managers for parametrized tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from torch.nn import attention

from selfattn_ext import as_sdpa


@contextmanager
def activated() -> Iterator[None]:
    """Turns torch's own switch on for a block."""
    attention.activate_flash_attention_impl("selfattn_ext")
    try:
        yield
    finally:
        attention.restore_flash_attention_impl()


SWITCHES = [pytest.param(activated, id="activated"), pytest.param(as_sdpa, id="as_sdpa")]
