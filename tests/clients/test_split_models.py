"""Hugging Face models under context_parallel: each rank has a part of the sequence, unchanged otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchvision_operators  # noqa: F401 - in ranks, too, where there is no conftest
from processes import ranks
from torch import Tensor, nn
from transformers_models import DECODERS, NAME, TOKENS, Trio, built, gradients

from selfattn_ext.distributed import context_parallel, shard_sequence

pytestmark = pytest.mark.xdist_group("split_models")

LENGTH = 45


def compare(name: str, how: dict[str, Any], checkpoints: bool) -> None:
    """On a rank: the logits of its tokens, and the gradients of all ranks together, are as accurate as with
    transformers' own attention in one process.
    """
    trio = Trio(built(DECODERS[name]()))
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 90, (2, LENGTH), generator=generator)
    positions = torch.arange(LENGTH).expand(2, -1)
    weights = torch.randn(2, LENGTH, TOKENS, generator=generator, dtype=torch.float64)

    def part(tensor: Tensor) -> Tensor:
        return shard_sequence(tensor, 1, layout=how.get("layout", "zigzag"))

    def run(model: nn.Module) -> dict[str, Tensor]:
        if model is not trio.ours:
            logits = model(ids, position_ids=positions, use_cache=False).logits
            return {"logits": part(logits), **gradients(model, (logits * weights).sum())}
        if checkpoints:
            model.train()
            model.gradient_checkpointing_enable({"use_reentrant": False})
        own = part(ids)
        with context_parallel(**how):
            # The mask says that nothing is padding, and that positions jump within a text.
            logits = model(
                own, position_ids=part(positions), attention_mask=torch.ones_like(own), use_cache=False
            ).logits
            grads = gradients(model, (logits * part(weights)).sum())
        for grad in grads.values():
            dist.all_reduce(grad)
        return {"logits": logits, **grads}

    trio.check(run)


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
