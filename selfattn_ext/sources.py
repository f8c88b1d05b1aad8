"""``selfattn_ext.sources``: the list of C++ and CUDA sources, for users' builds; see build/sources.py.

>>> from selfattn_ext import sources
>>> sources.NAMESPACE, sources.MINIMUM_TORCH
('selfattn', (2, 11))
"""

from .build.sources import (
    MINIMUM_TORCH,
    NAMESPACE,
    compile_flags,
    cuda_flags,
    definitions,
    extension_sources,
    headers,
    library_sources,
    optimisation_flags,
    root,
    supports,
    version,
)

__all__ = [
    "MINIMUM_TORCH",
    "NAMESPACE",
    "compile_flags",
    "cuda_flags",
    "definitions",
    "extension_sources",
    "headers",
    "library_sources",
    "optimisation_flags",
    "root",
    "supports",
    "version",
]
