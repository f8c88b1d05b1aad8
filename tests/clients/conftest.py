"""Tests with programs that call attention: transformers, timm, diffusers.

`make test-clients` installs the programs and runs the tests. pyproject.toml keeps `pytest` out of this folder
unless it is named. Modules import their clients at the top, so that a missing one is an error and not a skip.
"""

from __future__ import annotations

import os

import torchvision_operators  # noqa: F401

# Models are built from configurations with random weights, and nothing may come from a network. Clients read
# the variable when they are imported, and processes that tests start inherit it.
os.environ["HF_HUB_OFFLINE"] = "1"
