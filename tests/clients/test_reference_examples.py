"""The examples of the reference that need transformers, or onnxscript."""

from __future__ import annotations

import public_names
import pytest
import transformers


@pytest.mark.cpu_only("the examples' models are on the CPU")
@pytest.mark.parametrize(
    "name",
    [
        name
        for name in public_names.names()
        if "integrations.transformers" in name or "integrations.onnx" in name
    ],
)
def test_example(name: str) -> None:
    assert transformers.__version__
    public_names.run(name)
