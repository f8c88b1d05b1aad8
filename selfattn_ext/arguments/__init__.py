"""What callers give, checked and brought into the form of the operators."""

from . import (
    call_checks,
    checks,
    forced_kernel,
    overrides,
    precision,
    refusals,
    sequence_checks,
    shapes,
)
from .call import (
    DEFAULT_QUERY_OFFSET,
    DEFAULT_SOFTCAP,
    DEFAULT_WINDOW,
    AttentionCall,
    AttentionOptions,
    KVCacheCall,
    OptionalTensor,
    PackedCall,
)
from .keywords import Keywords, keywords_for, position, rules
from .prepared import (
    Prepared,
    Tensors,
    autocast,
    formula,
    is_packed,
    joined_masks,
    keywords_of,
    prepare,
    with_options,
)
from .refusals import REFUSALS, explained

__all__ = [
    "DEFAULT_QUERY_OFFSET",
    "DEFAULT_SOFTCAP",
    "DEFAULT_WINDOW",
    "REFUSALS",
    "AttentionCall",
    "AttentionOptions",
    "KVCacheCall",
    "Keywords",
    "OptionalTensor",
    "PackedCall",
    "Prepared",
    "Tensors",
    "autocast",
    "call_checks",
    "checks",
    "explained",
    "forced_kernel",
    "formula",
    "is_packed",
    "joined_masks",
    "keywords_for",
    "keywords_of",
    "overrides",
    "position",
    "precision",
    "prepare",
    "refusals",
    "rules",
    "sequence_checks",
    "shapes",
    "with_options",
]
