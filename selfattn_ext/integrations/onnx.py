"""Translations for torch.onnx.export that it cannot find by itself.

It needs none to export this package's functions: Note [ONNX] in selfattn_ext/autograd/onnx_graphs.py has why.
With these it writes more of them as ONNX's Attention operator, which needs opset 23 or a later one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..autograd.onnx_graphs import CAPPED

__all__ = ["translations"]


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Returns a table for the argument custom_translation_table of :func:`torch.onnx.export`.

    With it, calls with ``softcap`` become ONNX's Attention operator, too.

    Raises:
        ImportError: the package onnxscript is missing.
        ValueError: by torch.onnx.export, within an error of its own, if opset_version is less than 23.

    Example:
        >>> import torch, selfattn_ext
        >>> from selfattn_ext.integrations.onnx import translations
        >>> class Capped(torch.nn.Module):
        ...     def forward(self, query):
        ...         return selfattn_ext.scaled_dot_product_attention(query, query, query, softcap=20.0)
        >>> program = torch.onnx.export(
        ...     Capped(), (torch.randn(1, 2, 4, 8),), dynamo=True, opset_version=23, verbose=False,
        ...     custom_translation_table=translations(),
        ... )
        >>> [node.op_type for node in program.model_proto.graph.node]
        ['Attention']
    """
    from onnxscript import evaluator, opset23

    def capped_attention(
        query: Any, key: Any, value: Any, mask: Any, scale: float, is_causal: bool, softcap: float
    ) -> Any:
        opset: Any = getattr(evaluator.default(), "opset", opset23)
        if opset.version < 23:
            raise ValueError(
                "selfattn_ext.integrations.onnx.translations() is for opset_version=23 and later, as "
                f"Attention is no operator of {opset.version}: leave custom_translation_table out"
            )
        options: Any = {"scale": scale, "is_causal": int(is_causal), "softcap": softcap}
        return opset23.Attention(query, key, value, mask, **options)[0]

    return {CAPPED: capped_attention}
