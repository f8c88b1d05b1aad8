"""The peers that this package is compared with, one file each.

To add a peer, write its ``prepare`` and put it into PEERS. ``pip install 'selfattn_ext[bench]'`` installs the
peers of other projects, which are imported when first used.
"""

from __future__ import annotations

from peers.flex import FLEX
from peers.jax_xla import JAX
from peers.onnx_runtime import ONNXRUNTIME
from peers.open_vino import OPENVINO
from peers.own import FORMULA, LOOPS
from selfattn_ext.bench.contenders import TORCH, Contender

PEERS: dict[str, Contender] = {
    peer.name: peer for peer in (TORCH, FORMULA, LOOPS, ONNXRUNTIME, OPENVINO, JAX, FLEX)
}
