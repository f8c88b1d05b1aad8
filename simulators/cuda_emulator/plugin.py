"""A pytest plugin with which a process tests the package on its emulated CUDA kernels.

    SELFATTN_KERNEL=simt python -m pytest -p cuda_emulator.plugin tests/attention/test_options_pairwise.py

pytest loads the plugin, and with it the package, before it collects the tests. In a script, ``import
cuda_emulator.plugin`` comes before ``import selfattn_ext``. SELFATTN_EMULATOR_VARIANT chooses the build
(build.VARIANTS).
"""

from __future__ import annotations

import os

from . import build

if "SELFATTN_LIBRARY" not in os.environ:
    variant = os.environ.get("SELFATTN_EMULATOR_VARIANT", "plain")
    os.environ["SELFATTN_LIBRARY"] = str(build.build("library", variant))
