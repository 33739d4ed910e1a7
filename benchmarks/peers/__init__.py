"""Everything that can be measured, one file a peer (and cuBLAS's two in one)."""

from __future__ import annotations

from benchmarks.peers.base import Peer
from benchmarks.peers.copy import Copy
from benchmarks.peers.cublas import CublasDense, CublasLoop
from benchmarks.peers.ours import Ours
from benchmarks.peers.pallas_mgpu import PallasMgpu
from benchmarks.peers.quack import Quack
from benchmarks.peers.stock import Stock
from benchmarks.peers.tokamax import Tokamax
from benchmarks.peers.torch_grouped_mm import TorchGroupedMm


def all_peers(pallas_sweep: int = 3, pallas_retune: bool = False) -> dict[str, Peer]:
    """Every peer by name, in the order in which the tables show them."""
    peers = (
        Ours(),
        PallasMgpu(pallas_sweep, pallas_retune),
        TorchGroupedMm(),
        Quack(),
        Tokamax(),
        Stock(),
        CublasLoop(),
        CublasDense(),
        Copy(),
    )
    return {peer.name: peer for peer in peers}
