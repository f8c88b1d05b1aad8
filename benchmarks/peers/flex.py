"""FlexAttention: torch.nn.attention.flex_attention, compiled, which needs a C++ compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from peers.common import check_plain
from selfattn_ext.bench.cases import Case, Inputs
from selfattn_ext.bench.contenders import Contender
from selfattn_ext.terminal import describe


def _prepare(case: Case, tensors: Inputs) -> Callable[[], Tensor]:
    check_plain(case)
    from torch._inductor import config
    from torch.nn.attention.flex_attention import flex_attention

    options: dict[str, Any] = {"enable_gqa": case.kv_head_count != case.heads}
    options["block_mask"] = _block_mask(case, tensors.mask)
    if case.mask == "gradient" and tensors.mask is not None:
        options["score_mod"] = _added(tensors.mask.detach())
    # torch writes the number of threads into the compiled loops but does not compile again when it changes.
    torch._dynamo.reset()
    with config.patch({"cpp.threads": torch.get_num_threads()}):
        compiled = torch.compile(flex_attention, dynamic=False)
        try:
            with torch.no_grad():
                compiled(tensors.query, tensors.key, tensors.value, **options)
        except Exception as error:  # a compiler may raise anything
            raise NotImplementedError(f"does not compile: {describe(error)}") from error

    def call() -> Tensor:
        with torch.no_grad():
            return compiled(tensors.query, tensors.key, tensors.value, **options)

    return call


def _block_mask(case: Case, mask: Tensor | None) -> Any:
    """Returns the blocks that the positions and a bool mask leave visible; None if that is all of them."""
    from torch.nn.attention.flex_attention import create_block_mask

    if not case.causal and case.window is None and case.mask != "bool":
        return None
    offset = case.query_offset

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        found = j == j
        if case.causal:
            found = found & (j <= i + offset)
        if case.window is not None:
            found = found & (j >= i + offset - case.window)
        if case.mask == "bool" and mask is not None:
            found = found & mask[i, j]
        return found

    blocks = {"BLOCK_SIZE": 64} if case.mask == "bool" else {}
    return create_block_mask(seen, None, None, case.length, case.key_count, device="cpu", **blocks)


def _added(mask: Tensor) -> Callable[..., Tensor]:
    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s + mask[i, j]

    return score


FLEX = Contender("flex", _prepare)
