"""Tests with the programs that call attention: transformers, timm, diffusers.

`make test-clients` installs and runs them. pyproject.toml keeps `pytest` out of this folder unless named. A
module imports its client at the top, so that a missing one is an error and not a skip.
"""

from __future__ import annotations

import os

import torchvision_operators  # noqa: F401

# The models are built from their configurations with random weights: nothing is to come from a network. Read
# as the clients are imported, and inherited by the processes that tests start.
os.environ["HF_HUB_OFFLINE"] = "1"
