"""Everything that can be measured, one file a peer; cuBLAS and memory have theirs in one each."""

from __future__ import annotations

from benchmarks.peers import variants
from benchmarks.peers.bandwidth import bandwidth_peers
from benchmarks.peers.base import Peer
from benchmarks.peers.cublas import CublasDense, CublasLoop
from benchmarks.peers.cutlass import CutlassGrouped
from benchmarks.peers.ours import Ours, Variant
from benchmarks.peers.pallas_mgpu import PallasMgpu
from benchmarks.peers.quack import Quack
from benchmarks.peers.stock import Stock
from benchmarks.peers.tokamax import Tokamax
from benchmarks.peers.torch_grouped_mm import TorchGroupedMm


def all_peers(
    sweep: int = 3, retune: bool = False, configurations: bool = False
) -> dict[str, Peer]:
    """Every peer by name, in the order in which the tables show them.

    Args:
      sweep, retune: see `Sweep`.
      configurations: whether each configuration of ours is a peer too.
    """
    ops = "ragged_noncontracting", "ragged_contracting"
    count = variants.most(*ops) if configurations else 0
    peers = (
        Ours(),
        *map(Variant, range(count)),
        PallasMgpu(sweep, retune),
        TorchGroupedMm(),
        Quack(sweep, retune),
        Tokamax(sweep, retune),
        *map(CutlassGrouped, ("cooperative", "pingpong")),
        Stock(),
        CublasLoop(),
        CublasDense(),
        *bandwidth_peers(),
    )
    return {peer.name: peer for peer in peers}
