"""The operands of an expert MLP, and of its parts.

Each class is a pytree. Its leaves, in the order of the fields, are the operands of a primitive, and
a field that is None is an operand that is not given. In a plan the leaves are abstract arrays.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_grouped_gemm._src.arrays import align_varying
from jax_grouped_gemm._src.fp8.prediction import Dot, Layer
from jax_grouped_gemm._src.quantized.array import QuantizedArray
from jax_grouped_gemm._src.quantized.plan import PackedProblem

BIASES = ("b0", "b1", "bo")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Groups:
    """The assignment of rows to groups.

    Attributes:
      sizes: int32 [G], rows of each group.
      offset: int32 [1], the group of the first local matrix. If the implementation is a function,
        `offset` is the caller's argument, which may be None.
    """

    sizes: jax.Array
    offset: jax.Array | None

    @property
    def indices(self) -> tuple[jax.Array, jax.Array]:
        """Returns sizes and offset, as the primitives take them."""
        assert self.offset is not None
        return self.sizes, self.offset


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows sorted by group, or the tokens that they are copies of.

    Attributes:
      x: tokens [T, D] with `rows`, else the rows [m, D].
      rows: integers [m], the token of each row. A row whose token is out of range is zero.
      inverse: integers [T, k], the rows of each token, if they are known.
      count: int32 [1], the number of valid rows if not all are valid. Later rows are undefined.
        Only rows with an `inverse` may have a count.
      sources: number of devices whose tokens these are, in equal parts. This device's part is
        the first.
    """

    x: jax.Array
    rows: jax.Array | None = None
    inverse: jax.Array | None = None
    count: jax.Array | None = None
    sources: int = dataclasses.field(default=1, metadata=dict(static=True))

    @property
    def num_rows(self) -> int:
        """The number of rows, m."""
        return (self.x if self.rows is None else self.rows).shape[0]

    def of(self, x: jax.Array) -> Rows:
        """Returns the same rows of other tokens, such as tangents."""
        return dataclasses.replace(self, x=x)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExpertWeights:
    """The matrices and biases of the local experts.

    Each matrix may be a `QuantizedArray` until `Experts` computes with it.

    Attributes:
      wi: gate and up projections next to each other [g, D, 2 F]; None where `wi_0` is given.
      wi_0, wi_1: gate and up projections [g, D, F]; `wi_1` is None for experts without an up.
      b0, b1: biases of gate and up [g, F].
      wo: down projections [g, F, D]; None for hidden layers alone.
      bo: biases of wo [g, D].
    """

    wi: jax.Array | None = None
    wi_0: jax.Array | None = None
    wi_1: jax.Array | None = None
    b0: jax.Array | None = None
    b1: jax.Array | None = None
    wo: jax.Array | None = None
    bo: jax.Array | None = None

    @property
    def projections(self) -> list[jax.Array]:
        """The matrices of gate and up: one if they are joined, or if there is no up."""
        return [x for x in (self.wi, self.wi_0, self.wi_1) if x is not None]

    @property
    def matrices(self) -> list[jax.Array]:
        """All matrices."""
        return self.projections + ([] if self.wo is None else [self.wo])

    @property
    def quantized(self) -> dict[str, QuantizedArray]:
        """The matrices that are quantised, by name."""
        return {name: x for name, x in named(self).items() if isinstance(x, QuantizedArray)}

    @property
    def has_biases(self) -> bool:
        """Whether there is any bias."""
        return any(x is not None for x in self.biases)

    @property
    def biases(self) -> tuple[jax.Array | None, ...]:
        """The biases of gate, up and down."""
        return self.b0, self.b1, self.bo

    @property
    def has_up(self) -> bool:
        """Whether a hidden layer has a gate and an up projection, in one matrix or in two."""
        return self.wi is not None or self.wi_1 is not None

    @property
    def count(self) -> int:
        """The number of local experts, g."""
        return self.projections[0].shape[0]

    @property
    def hidden_columns(self) -> int:
        """The number of hidden features, F."""
        columns = self.projections[0].shape[2]
        return columns if self.wi is None else columns // 2

    @property
    def halves(self) -> tuple[jax.Array, jax.Array | None]:
        """wi_0 and wi_1, cut out of `wi` if they are joined."""
        if self.wi is not None:
            gate, up = jnp.split(self.wi, 2, axis=2)
            return gate, up
        assert self.wi_0 is not None
        return self.wi_0, self.wi_1

    def result_dtype(self, x: jax.Array) -> np.dtype:
        """Returns the dtype to which x and the matrices that are not quantised promote."""
        arrays = [x for x in self.matrices if not isinstance(x, QuantizedArray)]
        return np.dtype(jnp.result_type(x, *arrays))

    def layer(self, x: Any, rows: int, groups: int, *, are_copies: bool) -> Layer:
        """Returns the layer's sizes, with these experts' share of all rows, x or copies of x."""
        share = Dot.of(rows, self.projections[0].shape, groups)
        return Layer(
            share.g,
            share.m,
            math.prod(x.shape[:-1]) if are_copies else 0,
            x.shape[-1],
            self.hidden_columns,
            1 + self.has_up,
            self.wo is not None,
        )

    def astype(self, dtype: np.dtype) -> ExpertWeights:
        """Returns the weights with matrices of `dtype`, and unchanged biases."""
        names = "wi", "wi_0", "wi_1", "wo"
        given = {name: x for name, x in named(self).items() if name in names}
        return dataclasses.replace(self, **{name: x.astype(dtype) for name, x in given.items()})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MlpOperands:
    """The operands of an MLP, and of a hidden layer, for which `wo` and `bo` are None.

    `weights` are weights of rows [m], such as the router's; None for ones.
    """

    rows: Rows
    experts: ExpertWeights
    weights: jax.Array | None
    groups: Groups

    @property
    def num_rows(self) -> int:
        """The number of rows, m."""
        return self.rows.num_rows

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the result, to which x and the matrices promote."""
        return self.experts.result_dtype(self.rows.x)

    @property
    def packed_products(self) -> list[PackedProblem]:
        """The problems of products by quantised matrices: gate and up as one, and down."""
        quantized, sizes = self.experts.quantized, (self.num_rows, self.groups.sizes.shape[0])
        dtypes, is_bound = dtypes_of(self), self.rows.count is not None
        products = dict(wi_0=len(self.experts.projections), wo=1)
        return [
            PackedProblem.of(dtypes, quantized[name], dtypes, *sizes, count, is_bound)
            for name, count in products.items()
            if name in quantized
        ]

    def aligned(self) -> MlpOperands:
        """Returns all operands, cast to vary over the same manual mesh axes."""
        leaves, tree = jax.tree.flatten(self)
        return jax.tree.unflatten(tree, align_varying(*leaves))

    def promoted(self) -> MlpOperands:
        """Returns the operands, with x and the matrices in the dtype to which they promote."""
        rows, experts = self.rows.of(self.rows.x.astype(self.dtype)), self.experts
        return dataclasses.replace(self, rows=rows, experts=experts.astype(self.dtype))

    def with_experts(self, **changes: jax.Array | None) -> MlpOperands:
        """Replaces the matrices or biases of these names."""
        return dataclasses.replace(self, experts=dataclasses.replace(self.experts, **changes))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeOperands:
    """The operands of a layer of tokens that are not sorted by expert."""

    x: jax.Array  # [T, D]
    chosen: jax.Array  # int32 [T, k], the experts of each token
    scores: jax.Array  # [T, k], the router's weights
    experts: ExpertWeights
    offset: jax.Array  # int32 [1], the first local expert

    def of_rows(self, num_experts: int) -> MlpOperands:
        """Returns the abstract operands of the MLP of sorted rows."""
        struct: Any = jax.ShapeDtypeStruct
        pairs = (self.chosen.size,)
        rows = Rows(self.x, struct(pairs, jnp.int32), self.chosen)
        groups = Groups(struct((num_experts,), jnp.int32), self.offset)
        return MlpOperands(rows, self.experts, struct(pairs, self.scores.dtype), groups)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DownOperands:
    """The operands of hidden wo + weights bo."""

    hidden: jax.Array  # [m, F]
    wo: jax.Array
    bo: jax.Array | None
    weights: jax.Array | None
    groups: Groups

    @property
    def num_rows(self) -> int:
        """The number of rows, m."""
        return self.hidden.shape[0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GradientOperands:
    """The operands of the gradients of a hidden layer."""

    rows: Rows  # the rows of dy
    wo: jax.Array
    gate: jax.Array  # [m, F]
    up: jax.Array | None
    weights: jax.Array | None
    groups: Groups


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PairedOperands:
    """The operands of a0 w0^T + a1 w1^T, of [m, F] and [g, D, F]."""

    a0: jax.Array
    a1: jax.Array
    w0: jax.Array
    w1: jax.Array
    groups: Groups


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PairedWeightsOperands:
    """The operands of x^T d0 and x^T d1; d0 and d1 are [m, F]."""

    rows: Rows
    d0: jax.Array
    d1: jax.Array
    groups: Groups

    @property
    def columns(self) -> Any:
        return self.d0.shape[1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DownWeightsOperands:
    """The operands of hidden^T dy."""

    rows: Rows  # the rows of dy
    hidden: jax.Array  # [m, F]
    groups: Groups

    @property
    def columns(self) -> Any:
        return self.hidden.shape[1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Differentials:
    """Tangents or cotangents of the operands of an MLP. A field is None if it is zero."""

    b0: jax.Array | None = None
    b1: jax.Array | None = None
    bo: jax.Array | None = None
    weights: jax.Array | None = None
    wi: jax.Array | None = None
    wi_0: jax.Array | None = None
    wi_1: jax.Array | None = None
    wo: jax.Array | None = None
    x: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TangentOperands:
    """The tangents of an MLP's operands, and the values on which the tangent of y depends."""

    dots: Differentials
    gate: jax.Array  # [m, F]
    up: jax.Array | None
    primals: MlpOperands  # without b0 and b1

    @property
    def groups(self) -> Groups:
        """The groups of the rows."""
        return self.primals.groups


def named(operands: Any) -> dict[str, Any]:
    """Returns the leaves by name, in order, for messages; a tangent's name ends in "_dot"."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(operands):
        x = getattr(operands, field.name)
        if isinstance(x, Groups | Rows | ExpertWeights | MlpOperands | Differentials):
            dots = "_dot" * (field.name == "dots")
            found |= {f"{name}{dots}": leaf for name, leaf in named(x).items()}
        elif x is not None and not field.metadata.get("static"):
            found[field.name] = x
    return found


def dtypes_of(operands: Any) -> str:
    """Names the dtypes of arrays, except for float32 biases, which kernels take with any dtype."""
    arrays = {name: x for name, x in named(operands).items() if not isinstance(x, QuantizedArray)}
    found = {
        x.dtype.name
        for name, x in arrays.items()
        if x.ndim > 1 and name != "inverse" and (name not in BIASES or x.dtype != jnp.float32)
    }
    return " and ".join(sorted(found))
