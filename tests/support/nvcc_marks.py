"""Marks of tests that need nvcc."""

from __future__ import annotations

import pytest

from selfattn_ext.build import cuda_build

needs_nvcc = pytest.mark.skipif(cuda_build.find_nvcc() is None, reason="no nvcc on this machine")
#: Marks of modules that run programs of the PTX machine, each of which is compiled in one process.
runs_programs = [needs_nvcc, pytest.mark.xdist_group("ptx_machine")]
