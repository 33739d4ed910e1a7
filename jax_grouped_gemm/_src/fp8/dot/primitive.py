"""The FP8 weight gradient of rows that each device quantises for itself.

Blocks along the rows are laid out group by group. Their number depends on how rows are split over
devices. Over auto mesh axes, this split is unknown when a program is traced, and so is the shape of
quantised rows. Both factors are then kept unquantised, and this operation quantises a device's rows
and multiplies them.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
from jax.sharding import AxisType

from jax_grouped_gemm._src.fp8.dot.plan import candidates
from jax_grouped_gemm._src.fp8.formats import NO_DERIVATIVE
from jax_grouped_gemm._src.fp8.products import Fp8Products
from jax_grouped_gemm._src.meshes import axes_of_kind
from jax_grouped_gemm._src.op import Op
from jax_grouped_gemm._src.partition import Dims
from jax_grouped_gemm._src.ragged import slices
from jax_grouped_gemm._src.ragged.plan import check_tile, plan_product
from jax_grouped_gemm._src.tile_choices import PRODUCT_OPTIONS


def may_be_split_later(x: jax.Array) -> bool:
    """Whether XLA decides how `x` is split over devices."""
    mesh = jax.typeof(x).sharding.mesh
    auto = axes_of_kind(mesh, AxisType.Auto)
    return not axes_of_kind(mesh, AxisType.Manual) and any(mesh.shape[name] > 1 for name in auto)


def weight_gradient(
    products: Fp8Products,
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array,
    dtype: np.dtype,
    *,
    num_groups: int,
) -> jax.Array:
    """Quantises lhs [m, k] and rhs [m, n], and contracts rows: [num_groups, k, n] in `dtype`."""
    return OP.bind(
        *(lhs, rhs, group_sizes, group_offset),
        products=products,
        dtype=dtype,
        num_groups=num_groups,
        implementation=products.implementation,
        **products.tiles.params("wgrad"),
    )


def _gradient(
    lhs, rhs, group_sizes, group_offset, *, products, dtype, num_groups, implementation, **_
):
    products = dataclasses.replace(products, implementation=implementation)
    recipe = products.recipe
    _, left = products.quantize_rows(
        lhs, group_sizes, recipe.forward_dtype, plain=False, transposed=True
    )
    _, right = products.quantize_rows(
        rhs, group_sizes, recipe.gradient_dtype, plain=False, transposed=True
    )
    sizes = dict(num_rows=lhs.shape[0], num_groups=num_groups)
    return products.rows_by_rows(left, right, group_sizes, group_offset, dtype, **sizes)


def _aval(*operands, dtype, num_groups, **params):
    lhs, rhs, *_ = operands
    return OP.result_aval(operands, (num_groups, lhs.shape[-1], rhs.shape[-1]), dtype)


OP = Op(
    name="quantized_weight_gradient",
    operand_ranks=(2, 2, 1, 1),
    targets=(),
    avals=_aval,
    planner=functools.partial(plan_product, candidates),
    planned=PRODUCT_OPTIONS,
    check=functools.partial(check_tile, candidates),
    composed=_gradient,
    reference=functools.partial(_gradient, implementation="xla"),
    dims=lambda *_, **params: Dims.of("mk", "mn", "G", "o", to="gkn", whole="Go"),
    localizer=slices.of_groups,
)

OP.has_no_derivative(NO_DERIVATIVE)


def _batch(operands, dims, **params):
    return jax.vmap(functools.partial(_gradient, **params), dims)(*operands), 0


OP.def_batching(_batch)
