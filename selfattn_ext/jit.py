"""``selfattn_ext.jit``: compiles the C++ and CUDA sources at run time; the code is in build/jit.py."""

from .build.jit import load

__all__ = ["load"]
