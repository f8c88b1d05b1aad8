"""What the tests of benchmarks share: nothing is collected before calls that are timed."""

from __future__ import annotations

import pytest

from selfattn_ext.bench import timer


@pytest.fixture(autouse=True)
def _nothing_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tests leave so much to look at that it takes a third of a second for each row."""
    monkeypatch.setattr(timer.gc, "collect", lambda: 0)
