"""Starts a process anew on the PTX machine, with tensors that say that they are on "cuda:0".

A script imports it before the package.
"""

from __future__ import annotations

from .on_machine import start

start("device")
