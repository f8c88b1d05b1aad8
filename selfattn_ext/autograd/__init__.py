"""Gradients of every operator: eager, under torch.func, and in the graphs of torch.compile."""

from .attention_function import CAUSAL, basic_attention, packed_attention
from .graph_operators import (
    attention_scores_with_gradient,
    attention_with_gradient,
    masked_softmax_with_gradient,
    statistics_with_gradient,
)

__all__ = [
    "CAUSAL",
    "attention_scores_with_gradient",
    "attention_with_gradient",
    "basic_attention",
    "masked_softmax_with_gradient",
    "packed_attention",
    "statistics_with_gradient",
]
