"""Starts a process anew on the PTX machine, with the CUDA kernels for tensors of the CPU."""

from __future__ import annotations

import os
import sys

from .. import host_build


def start(target: str) -> None:
    """Starts this Python again with a library of host_build, unless SELFATTN_LIBRARY names one already. With
    --few among the arguments, it is the library with few instances.
    """
    if "SELFATTN_LIBRARY" in os.environ:
        return
    chosen = {name: value for name, value in os.environ.items() if name.startswith("SELFATTN")}
    environment = host_build.environment(host_build.build(target, few="--few" in sys.argv), **chosen)
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
