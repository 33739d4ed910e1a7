"""Tiles that are not compiled, for tests of how plans choose tiles."""

from __future__ import annotations

import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm._src.fp8.scaled import plan as plan_fp8
from jax_grouped_gemm._src.plan import FLOATS, FLOATS_8, Table, TiledKernel
from jax_grouped_gemm._src.ragged import plan as plan_ragged

A, B, C = (
    jgg.TileConfig(tile_m=m, tile_n=n, cluster=1) for m, n in ((192, 96), (64, 96), (192, 32))
)
NOT_COMPILED = jgg.TileConfig(tile_m=96, tile_n=96, cluster=1)


def add_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes plans choose from A, B and C too, after the tiles that exist."""
    formats = dict(lhs=(*FLOATS_8, *FLOATS), rhs=(*FLOATS_8, *FLOATS), out=FLOATS)
    more = tuple(TiledKernel(tile=tile, record=("", ""), **formats) for tile in (A, B, C))
    for name in ("NONCONTRACTING_KERNELS", "CONTRACTING_KERNELS"):
        monkeypatch.setattr(plan_fp8, name, getattr(plan_fp8, name) + more)
    compiled, xla = plan_ragged.KERNELS
    monkeypatch.setattr(plan_ragged, "KERNELS", Table((*compiled, *more), xla))
