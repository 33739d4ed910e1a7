"""`use_tiles`, which chooses kernel configurations other than the default.

When a ragged product is called, it reads the choices of the context and keeps them as parameters of
its primitive: `product`, the name of the product; `tile`, its tile; and `tile_choices`, the tiles
of its cotangents. So a plan depends only on a primitive's operands and parameters, and gradients
follow the choices of the forward pass, wherever they are computed.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from jax_grouped_gemm._src.plan import Product, TileConfig

OPTIONS = ("tile_choices", "zeroes_unowned", "max_sms")
"""Parameters of ragged operations that only planners read. `tile_choices` are the choices of
`use_tiles`. `zeroes_unowned` says whether rows that no local group owns are zero (True, the
default) or undefined, in which case kernels neither read nor write them. `max_sms` is the most
multiprocessors that a kernel uses, None for all."""
PRODUCT_OPTIONS = ("product", "tile", *OPTIONS)
"""`OPTIONS`, and the parameters of a single product: its name, and the tile that it must take."""


@dataclasses.dataclass(frozen=True)
class TileChoices:
    """The tiles that `use_tiles` chose, None for products without a choice."""

    forward: TileConfig | None = None
    dgrad: TileConfig | None = None
    wgrad: TileConfig | None = None

    def params(self, product: Product) -> dict[str, Any]:
        """Returns the parameters of the primitive that computes `product`."""
        chosen: dict[str, Any] = {"product": product}
        if (tile := getattr(self, product)) is not None:
            chosen["tile"] = tile
        # A cotangent's own cotangents have no name, so they have no choices.
        if product == "forward" and self != TileChoices():
            chosen["tile_choices"] = self
        return chosen


using_tiles = jax.make_user_context(TileChoices())
"""Context of the current choices, used as `with using_tiles(choices)`. They are part of the key of
JAX's caches, so a jitted function is traced again under other choices."""


def current_tiles() -> TileChoices:
    """Returns the choices of the innermost `use_tiles` and of the contexts around it."""
    return using_tiles.value


def for_cotangent(params: Mapping[str, Any], product: Product) -> dict[str, Any]:
    """Returns a product's `params` with the choices for its cotangent `product` instead."""
    own = ("product", "tile", "tile_choices")
    rest = {name: value for name, value in params.items() if name not in own}
    if params.get("product") != "forward":
        return rest
    return rest | params.get("tile_choices", TileChoices()).params(product)


@contextlib.contextmanager
def use_tiles(
    *,
    forward: TileConfig | None = None,
    dgrad: TileConfig | None = None,
    wgrad: TileConfig | None = None,
) -> Iterator[None]:
    """Returns a context in which ragged products take the given kernel configurations.

    The context covers the products that this thread calls or traces inside, also in Flax layers and
    in functions under `jax.jit`. It covers their gradients even if they are computed outside. A
    jitted function is traced and compiled again for each set of choices. An inner context takes
    precedence over an outer one. Choices that the inner context leaves out come from the outer
    context, or else from the plans' defaults. The context can decorate a function. It does not
    affect symmetric updates and products that no kernel runs (see `explain`).

    Args:
      forward: the configuration of all products that are called: `ragged_dot`,
        `ragged_dot_general`, `scaled_ragged_dot`, `scaled_ragged_dot_contracting`,
        `fp8_ragged_dot`.
      dgrad: the configuration of the cotangents of these products' first operands.
      wgrad: the configuration of the cotangents of these products' second operands, and of
        `ragged_dot_accumulate`.

    The `candidates` of a plan that `explain` returns are the configurations that are compiled for
    the plan's product. At trace time, any other configuration raises a `ValueError` with this list.

    Raises:
      TypeError: an argument is neither a `TileConfig` nor None.
    """
    given = dict(forward=forward, dgrad=dgrad, wgrad=wgrad)
    changes = {name: tile for name, tile in given.items() if tile is not None}
    for name, tile in changes.items():
        if not isinstance(tile, TileConfig):
            raise TypeError(f"{name} must be a jax_grouped_gemm.TileConfig, got {tile!r}")
    with using_tiles(dataclasses.replace(current_tiles(), **changes)):
        yield
