"""Unchanged Hugging Face models under context_parallel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchvision_operators  # noqa: F401 - in ranks, too, where there is no conftest
from processes import ranks
from torch import Tensor, nn
from torch.distributed import init_device_mesh
from transformers_models import DECODERS, NAME, TOKENS, Trio, built, gradients

from selfattn_ext.distributed import context_parallel, shard_sequence

pytestmark = pytest.mark.xdist_group("split_models")

LENGTH = 45


def compare(name: str, how: dict[str, Any], checkpoints: bool, mesh: bool, padded: int) -> None:
    """Runs on a rank: the logits of its tokens, and the gradients of all ranks, are as accurate as with
    transformers' own attention in one process.
    """
    trio = Trio(built(DECODERS[name]()))
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 90, (2, LENGTH), generator=generator)
    positions = torch.arange(LENGTH).expand(2, -1)
    weights = torch.randn(2, LENGTH, TOKENS, generator=generator, dtype=torch.float64)
    # The padding is on the left, where tokens would see it. Its own results do not matter.
    mask = torch.ones_like(ids)
    mask[0, :padded] = 0
    weights = weights * mask.unsqueeze(-1)
    ways = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "heads")) if mesh else None

    def part(tensor: Tensor) -> Tensor:
        if ways is None:
            return shard_sequence(tensor, 1, layout=how.get("layout", "zigzag"))
        outer = shard_sequence(tensor, 1, group=ways["ring"])
        return shard_sequence(outer, 1, group=ways["heads"], layout="contiguous")

    def shown(logits: Tensor) -> Tensor:
        return torch.where(part(mask).bool().unsqueeze(-1), logits, 0.0)

    def run(model: nn.Module) -> dict[str, Tensor]:
        if model is not trio.ours:
            logits = model(ids, position_ids=positions, attention_mask=mask, use_cache=False).logits
            return {"logits": shown(part(logits)), **gradients(model, (logits * weights).sum())}
        if checkpoints:
            model.train()
            model.gradient_checkpointing_enable({"use_reentrant": False})
        own = part(ids)
        with context_parallel(ways, **how):
            # Besides the padding, the mask says that positions jump within a text.
            logits = model(
                own, position_ids=part(positions), attention_mask=part(mask), use_cache=False
            ).logits
            grads = gradients(model, (logits * part(weights)).sum())
        for grad in grads.values():
            dist.all_reduce(grad)
        return {"logits": shown(logits), **grads}

    trio.check(run)


@pytest.mark.parametrize("checkpoints", [False, True], ids=["", "checkpoints"])
@pytest.mark.parametrize(
    "how", [{}, {"method": "ulysses"}, {"layout": "contiguous", "rotate": "allgather"}], ids=str
)
@pytest.mark.parametrize("name", ["llama gqa", "mistral", "gemma2", "gpt-oss"])
def test_a_model(name: str, how: dict[str, Any], checkpoints: bool) -> None:
    ranks(2)(compare, name, how, checkpoints, False, 0)


@pytest.mark.parametrize("padded", [2, 30])
@pytest.mark.parametrize(
    ("count", "how", "mesh"),
    [(2, {}, False), (3, {"method": "ulysses", "layout": "contiguous"}, False), (4, {}, True)],
    ids=str,
)
@pytest.mark.parametrize("name", ["llama gqa", "mistral"])
def test_padding(name: str, count: int, how: dict[str, Any], mesh: bool, padded: int) -> None:
    """Some ranks have all of the padding, and some have none."""
    ranks(count)(compare, name, how, False, mesh, padded)


def refused() -> None:
    model = built(DECODERS["llama gqa"]())
    model.set_attn_implementation(NAME)
    ids = shard_sequence(torch.full((1, LENGTH), 5), 1)
    positions = shard_sequence(torch.arange(LENGTH).unsqueeze(0), 1)
    with context_parallel():
        model(ids, position_ids=positions, use_cache=False)


def test_jumps_that_are_taken_for_texts_are_refused() -> None:
    for outcome in ranks(2).outcomes(refused):
        with pytest.raises(ValueError, match=r"attn_mask .* keys"):
            raise outcome
