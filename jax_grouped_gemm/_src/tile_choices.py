"""`use_tiles`: kernel configurations other than the default.

A ragged product reads the choices of the context when it is called, and keeps them as parameters
of its primitive: `product`, its name; `tile`, its own tile; and `tile_choices`, the tiles of its
cotangents. So a plan depends only on a primitive's operands and parameters, and gradients follow
the choices of the forward pass, wherever they are computed.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from jax_grouped_gemm._src.plan import Product, TileConfig

OPTIONS = ("tile_choices", "zeroes_unowned", "max_sms")
"""Parameters of products of rows and groups that only planners read: the choices of `use_tiles`;
whether rows that no local group owns are zero (True, the default) or undefined, so that kernels
neither read nor write them; and the most multiprocessors that a kernel uses, None for all."""
PRODUCT_OPTIONS = ("product", "tile", *OPTIONS)
"""The options of one ragged product: its name, and the tile that it must take."""


@dataclasses.dataclass(frozen=True)
class TileChoices:
    """The tiles given to `use_tiles`, None for others."""

    forward: TileConfig | None = None
    dgrad: TileConfig | None = None
    wgrad: TileConfig | None = None

    def params(self, product: Product) -> dict[str, Any]:
        """Returns the parameters of a primitive that computes a product, its name included."""
        chosen: dict[str, Any] = {"product": product}
        if (tile := getattr(self, product)) is not None:
            chosen["tile"] = tile
        # A cotangent's own cotangents have no name, so they have no choices.
        if product == "forward" and self != TileChoices():
            chosen["tile_choices"] = self
        return chosen


using_tiles = jax.make_user_context(TileChoices())
"""Makes choices the current ones: `with using_tiles(choices)`. They are part of the key of JAX's
caches, so that a jitted function is traced again under other choices."""


def current_tiles() -> TileChoices:
    """Returns the choices of the innermost `use_tiles` and of those around it."""
    return using_tiles.value


def for_cotangent(params: Mapping[str, Any], product: Product) -> dict[str, Any]:
    """Returns `params` with the choices for one of the product's cotangents, not its own."""
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
    """Context in which ragged products take the given kernel configurations.

    The context covers the products that this thread calls or traces inside, also in Flax layers and
    in functions under `jax.jit`. It covers their gradients even if those are computed outside. A
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
    that product. Any other configuration raises a `ValueError` with this list at trace time.

    Raises:
      TypeError: an argument is of another type.
    """
    given = dict(forward=forward, dgrad=dgrad, wgrad=wgrad)
    changes = {name: tile for name, tile in given.items() if tile is not None}
    for name, tile in changes.items():
        if not isinstance(tile, TileConfig):
            raise TypeError(f"{name} must be a jax_grouped_gemm.TileConfig, got {tile!r}")
    with using_tiles(dataclasses.replace(current_tiles(), **changes)):
        yield
