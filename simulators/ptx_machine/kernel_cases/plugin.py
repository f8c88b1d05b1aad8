"""A pytest plugin with which a process tests the package on its CUDA kernels, with tensors of the CPU.

    SELFATTN_KERNEL=simt python -m pytest -p ptx_machine.kernel_cases.plugin tests/attention/test_masks.py

pytest loads the plugin before it collects the tests. In a script, the plugin is imported before the package.
"""

from __future__ import annotations

from .on_machine import start

start("library")
