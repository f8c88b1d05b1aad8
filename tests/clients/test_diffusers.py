"""diffusers' unchanged models on this package's kernels.

A U-Net has self-attention and cross-attention, a transformer has joint attention.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel, UNet2DConditionModel
from torch import Tensor, nn
from training import SWITCHES, check


def unet() -> UNet2DConditionModel:
    torch.manual_seed(1)
    return UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        block_out_channels=(8, 16),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=12,
        attention_head_dim=4,
        norm_num_groups=4,
    )


def flux() -> FluxTransformer2DModel:
    torch.manual_seed(1)
    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=12,
        pooled_projection_dim=12,
        axes_dims_rope=(4, 4, 8),
    )


def normal(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def denoise(network: nn.Module, dtype: torch.dtype) -> Tensor:
    """Calls a U-Net with a padding mask for the text."""
    image, text = normal(2, 4, 8, 8, seed=1, dtype=dtype), normal(2, 5, 12, seed=2, dtype=dtype)
    seen = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    return network(image, torch.tensor([1, 2]), text, encoder_attention_mask=seen).sample


def transform(network: nn.Module, dtype: torch.dtype) -> Tensor:
    image, text = normal(2, 16, 4, seed=1, dtype=dtype), normal(2, 5, 12, seed=2, dtype=dtype)
    pooled, time = normal(2, 12, seed=3, dtype=dtype), torch.tensor([0.1, 0.2], dtype=dtype)
    return network(image, text, pooled, time, torch.zeros(16, 3), torch.zeros(5, 3)).sample


MODELS = [pytest.param(unet, denoise, 8, id="U-Net"), pytest.param(flux, transform, 2, id="Flux")]


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize(("make", "call", "layers"), MODELS)
def test_training(make: Any, call: Any, layers: int, switch: Any) -> None:
    check(make(), call, switch, layers)
