"""Hugging Face models under context_parallel: each rank has a part of the sequence, unchanged otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchvision_operators  # noqa: F401 - in ranks, too, where there is no conftest
from processes import ranks
from transformers_models import DECODERS, NAME, built

from selfattn_ext.distributed import context_parallel, shard_sequence

pytestmark = pytest.mark.xdist_group("split_models")

LENGTH = 45


def compare(name: str, how: dict[str, Any], checkpoints: bool) -> None:
    """On a rank: the logits of its tokens, and the gradients of all ranks together."""
    model = built(DECODERS[name]()).double()
    model.set_attn_implementation(NAME)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 90, (2, LENGTH), generator=generator)
    positions = torch.arange(LENGTH).expand(2, -1)
    expected = model(ids, position_ids=positions, use_cache=False).logits
    weights = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    (expected * weights).sum().backward()
    grads = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    if checkpoints:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    layout = how.get("layout", "zigzag")
    ids, positions, weights = (shard_sequence(each, 1, layout=layout) for each in (ids, positions, weights))
    with context_parallel(**how):
        # The mask says that nothing is padding, and that jumps of the positions are not where texts begin.
        logits = model(
            ids, position_ids=positions, attention_mask=torch.ones_like(ids), use_cache=False
        ).logits
        (logits * weights).sum().backward()
    torch.testing.assert_close(logits, shard_sequence(expected, 1, layout=layout), rtol=1e-6, atol=1e-6)
    for name, parameter in model.named_parameters():
        dist.all_reduce(parameter.grad)
        torch.testing.assert_close(parameter.grad, grads[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("checkpoints", [False, True], ids=["", "checkpoints"])
@pytest.mark.parametrize(
    "how", [{}, {"method": "ulysses"}, {"layout": "contiguous", "rotate": "allgather"}], ids=str
)
@pytest.mark.parametrize("name", ["llama gqa", "mistral", "gemma2", "gpt-oss"])
def test_a_model(name: str, how: dict[str, Any], checkpoints: bool) -> None:
    ranks(2)(compare, name, how, checkpoints)


def refused(padded: bool) -> None:
    model = built(DECODERS["llama gqa"]())
    model.set_attn_implementation(NAME)
    ids = shard_sequence(torch.full((1, LENGTH), 5), 1)
    positions = shard_sequence(torch.arange(LENGTH).unsqueeze(0), 1)
    mask = torch.ones_like(ids)
    mask[:, -2:] = 0
    with context_parallel():
        model(ids, position_ids=positions, attention_mask=mask if padded else None, use_cache=False)


@pytest.mark.parametrize("padded", [False, True], ids=["jumps taken for texts", "padding"])
def test_masks_of_a_part_are_refused(padded: bool) -> None:
    for outcome in ranks(2).outcomes(refused, padded):
        with pytest.raises(ValueError, match=r"attn_mask .* keys"):
            raise outcome
