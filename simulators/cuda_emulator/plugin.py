"""A pytest plugin: the process tests the package with its CUDA kernels in the emulator.

    SELFATTN_KERNEL=simt python -m pytest -p cuda_emulator.plugin tests/attention/test_options_pairwise.py

pytest loads it before the tests are collected, and with them the package. In a script, ``import
cuda_emulator.plugin`` comes before ``import selfattn_ext``. SELFATTN_EMULATOR_VARIANT chooses the build
(build.VARIANTS).
"""

from __future__ import annotations

import os

from . import build

if "SELFATTN_LIBRARY" not in os.environ:
    variant = os.environ.get("SELFATTN_EMULATOR_VARIANT", "plain")
    os.environ["SELFATTN_LIBRARY"] = str(build.build("library", variant))
