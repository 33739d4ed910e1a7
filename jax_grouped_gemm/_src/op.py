"""`Op`, an object that defines all of JAX's rules for the primitive of an operation.

The module of an operation constructs one `Op`. The `Op` makes the primitive, and registers how it
is planned and lowered: to one call of a CUDA kernel where possible, and to the pure JAX reference
elsewhere. `ops` lists all operations.

Every operand may have a native batch dimension in front of its usual dimensions. The whole batch
shares an operand without a batch dimension.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax
from jax.interpreters import ad, batching, mlir, xla
from jax.sharding import NamedSharding, PartitionSpec

from jax_grouped_gemm._src import lowering, partition
from jax_grouped_gemm._src.arrays import align_varying
from jax_grouped_gemm._src.counts import check_counts
from jax_grouped_gemm._src.device import H200, Target
from jax_grouped_gemm._src.extension import missing_extension_reason, unsuitable_device_reason
from jax_grouped_gemm._src.fallback import with_policy
from jax_grouped_gemm._src.invariance import RULE, Invariant, is_invariant
from jax_grouped_gemm._src.plan import XLA, Plan

if TYPE_CHECKING:
    from jax.extend.core import Primitive
else:
    # Import `jax.extend.core` late: it takes a fifth of the time of importing this package, because
    # it imports Pallas.
    Primitive = type(lax.add_p)

logger = logging.getLogger(__name__)

Planner = Callable[[Sequence[Any], Mapping[str, Any], Target], Plan[Any]]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Op:
    """A primitive and the stages of its calls. The constructor registers them with JAX.

    The primitive has a parameter `implementation`: None, "cuda", "xla", "prefer_kernels" or
    "prefer_xla" (see `fallback.policy`), or an `Invariant`.

    Attributes:
      name: name of the primitive.
      operand_ranks: ranks of the operands without the batch dimension, None if their number
        varies.
      function: the public function and its operands, for messages, such as
        "ragged_dot(lhs, rhs, group_sizes, group_offset)". The default is the primitive's name, and
        the operands' numbers.
      targets: names of the custom calls that `call` makes. The end of a name is the version of its
        operands and attributes.
      avals: `avals(*operands, **params)` returns the abstract result for abstract operands, or a
        list of results with `multiple_results`.
      planner: `planner(operands, params, target)` returns the `Plan` for abstract operands and the
        device `target`.
      call: `call(plan, *operands)` computes the results, if the plan's kernel is not `XLA`.
      composed: `composed(*operands, **params)` computes the results of an operation that consists
        of other operations, each with its own plan. The plan of the operation itself is then only
        for `explain`.
      reference: `reference(*operands, **params)` computes the results in pure JAX, without
        `implementation` and the parameters in `planned`.
      planned: names of other parameters that only the planner reads.
      check: `check(operands, params)` is called with abstract operands when the primitive is bound,
        and raises an error for parameters that no plan supports.
      multiple_results: whether the primitive returns a list.
      dims: `dims(operands, results, **params)` returns the `partition.Dims` of the operation for
        abstract arrays, without a batch dimension. By default devices split only the batch
        dimension.
      localizer: `localizer(operands, params, split)` returns the operands and parameters for a
        device's slice of the results, given its slices of the operands and a `partition.Split`. By
        default they do not change.
      instead: what messages recommend if operands are split along dimensions that the operation
        needs in full on every device.
      is_matmul: whether the operation is a grouped matmul for `explain` and checkpoint policies.
      is_listed: whether `explain` lists the operation although it is not a matmul.
      computes: whether the operation computes anything. If not, it tells `explain` of a choice.
      per_row: whether each row of a result depends on one row of an operand, so that the operation
        may be batch invariant.
      primitive: the primitive, which the constructor makes.
    """

    name: str
    operand_ranks: tuple[int, ...] | None
    targets: tuple[str, ...]
    avals: Callable[..., Any]
    planner: Planner
    reference: Callable[..., Any]
    call: Callable[..., Any] | None = None
    composed: Callable[..., Any] | None = None
    planned: tuple[str, ...] = ()
    function: str = ""
    check: Callable[[Sequence[Any], Mapping[str, Any]], None] | None = None
    multiple_results: bool = False
    dims: Callable[..., partition.Dims] | None = None
    localizer: Callable[..., tuple[Sequence[Any], dict[str, Any]]] | None = None
    instead: str = "jax.shard_map, which says what each device does"
    is_matmul: bool = True
    is_listed: bool = False
    computes: bool = True
    per_row: bool = False
    primitive: Primitive = dataclasses.field(init=False)

    def __post_init__(self):
        primitive = Primitive(self.name)
        object.__setattr__(self, "primitive", primitive)
        primitive.multiple_results = self.multiple_results
        primitive.def_abstract_eval(self._typed_avals)
        primitive.def_impl(functools.partial(xla.apply_primitive, primitive))
        lowering.require_devices(primitive)
        for platform, lower in ((None, self._lower_default), ("cuda", self._lower_cuda)):
            rule = functools.partial(self._lower_split, lower)
            mlir.register_lowering(primitive, rule, platform=platform)
        ops[primitive] = self

    def bind(self, *operands: jax.Array, **params: Any) -> Any:
        """Casts operands to vary over the same manual mesh axes, and binds the primitive to them.

        Raises:
          ValueError: `check` refuses the parameters.
          NotImplementedError: an operand has more rows, columns or matrices than int32 counts.
        """
        check_counts(self.function or self.name, self.operand_ranks, operands, params)
        params = dict(with_policy(params, per_row=self.per_row))
        if self.check:
            self.check([jax.typeof(x) for x in operands], params)
        return self.primitive.bind(*align_varying(*operands), **params)

    def batch_size(self, operands: Sequence[Any]) -> int | None:
        """Returns the native batch size of `operands` (arrays or avals), None if there is none."""
        sizes = [
            x.shape[0] for x, rank in zip(operands, self._ranks(), strict=True) if x.ndim > rank
        ]
        return sizes[0] if sizes else None

    def result_aval(self, operands: Sequence[Any], shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """Returns the abstract result of unbatched `shape`, with the operands' batch dimension."""
        batch_size = self.batch_size(operands)
        shape = shape if batch_size is None else (batch_size, *shape)
        return self.unsharded_aval(operands, shape, dtype)

    def unsharded_aval(
        self, operands: Sequence[Any], shape: tuple[int, ...], dtype: np.dtype
    ) -> Any:
        """Returns the abstract result of `shape`, which varies over the operands' manual axes."""
        on_mesh = next((x for x in operands if not x.sharding.mesh.empty), operands[0])
        sharding = NamedSharding(on_mesh.sharding.mesh, PartitionSpec(*[None] * len(shape)))
        return on_mesh.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)

    def dims_of(
        self, operands: Sequence[Any], results: Sequence[Any], params: Mapping[str, Any]
    ) -> partition.Dims:
        """Returns the dimensions of a call, the native batch included."""
        if self.dims is None:
            ranks = self.operand_ranks or [x.ndim for x in operands]
            is_batched = any(x.ndim > rank for x, rank in zip(operands, ranks, strict=True))
            unbatched = [
                jax.ShapeDtypeStruct(x.shape[x.ndim - rank :], x.dtype)
                for x, rank in zip(operands, ranks, strict=True)
            ]
            of_one = [
                jax.ShapeDtypeStruct(x.shape[1:] if is_batched else x.shape, x.dtype)
                for x in results
            ]
            return partition.whole(unbatched, of_one).with_batch(operands, ranks)
        dims = self.dims(operands, results, **params)
        if is_invariant(params["implementation"]):
            dims = dims.with_whole_sums()
        return dims.with_batch(operands, self.operand_ranks) if self.operand_ranks else dims

    def localize(
        self, operands: Sequence[Any], params: dict[str, Any], split: partition.Split
    ) -> tuple[Sequence[Any], dict[str, Any]]:
        """Returns the operands and parameters for a device's slice of the results."""
        return self.localizer(operands, params, split) if self.localizer else (operands, params)

    def _typed_avals(self, *operands, **params):
        """Returns the results' types, with their sharding over explicit mesh axes."""
        results = self.avals(*operands, **params)
        if not partition.is_split_explicitly(operands):
            return results
        leaves = results if self.multiple_results else [results]
        leaves = partition.typed(self, operands, leaves, params)
        return leaves if self.multiple_results else leaves[0]

    def _lower_split(self, lower, ctx, *operands, **params):
        return lowering.lower(ctx, self, lower, operands, params)

    def bind_batched(
        self, operands: Sequence[Any], dims: Sequence[int | None], params: Mapping[str, Any]
    ) -> tuple[Any, Any]:
        """Binds with the mapped axes of `operands` as the native batch dimension.

        Returns:
          The result or results and their mapped axes, which is what a batching rule returns.
        """
        ranks = self._ranks()
        mapped = [dim is not None for dim in dims]
        operands = [
            x if dim is None else jnp.moveaxis(x, dim, 0)
            for x, dim in zip(operands, dims, strict=True)
        ]
        size = next(x.shape[0] for x, is_mapped in zip(operands, mapped, strict=True) if is_mapped)
        native = [
            x.ndim - is_mapped > rank
            for x, is_mapped, rank in zip(operands, mapped, ranks, strict=True)
        ]
        if not any(native):
            out = self.bind(*operands, **params)
            return out, jax.tree.map(lambda _: 0, out)

        batch_size = next(
            x.shape[is_mapped]
            for x, is_mapped, is_native in zip(operands, mapped, native, strict=True)
            if is_native
        )

        def merge_batches(x, is_mapped, is_native, rank):
            if not (is_mapped or is_native):
                return x
            shape = x.shape[x.ndim - rank :]
            outer, inner = (size if is_mapped else 1), (batch_size if is_native else 1)
            x = jnp.broadcast_to(x.reshape(outer, inner, *shape), (size, batch_size, *shape))
            return x.reshape(size * batch_size, *shape)

        merged = map(merge_batches, operands, mapped, native, ranks)
        out = self.bind(*merged, **params)
        out = jax.tree.map(lambda x: x.reshape(size, batch_size, *x.shape[1:]), out)
        return out, jax.tree.map(lambda _: 0, out)

    def def_jvp(self, rule: Callable[..., Any]) -> None:
        """Makes `rule(primals, tangents, **params)` differentiate the primitive."""
        ad.primitive_jvps[self.primitive] = rule

    def def_transpose(self, rule: Callable[..., Any]) -> None:
        """Makes `rule(cotangents, *operands, **params)` transpose the primitive."""

        def typed(cts, *operands, **params):
            found = rule(cts, *operands, **params)
            return [
                partition.as_type(x, operand.aval) if ad.is_undefined_primal(operand) else x
                for x, operand in zip(found, operands, strict=True)
            ]

        ad.primitive_transposes[self.primitive] = typed

    def def_batching(self, rule: Callable[..., Any]) -> None:
        """Makes `rule(operands, dims, **params)` vectorise the primitive."""
        batching.primitive_batchers[self.primitive] = rule

    def follow_reference(self) -> None:
        """Differentiates and vectorises the primitive like its reference, which must consist of
        other operations."""

        def jvp(primals, tangents, **params):
            active = [i for i, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]

            def of_active(*operands: Any):
                given = dict(enumerate(primals)) | dict(zip(active, operands, strict=True))
                return self.reference(*given.values(), **params)

            return jax.jvp(of_active, [primals[i] for i in active], [tangents[i] for i in active])

        def batch(operands, dims, **params):
            out = jax.vmap(functools.partial(self.reference, **params), dims)(*operands)
            return out, jax.tree.map(lambda _: 0, out)

        self.def_jvp(jvp)
        self.def_batching(batch)

    def has_no_derivative(self, instead: str) -> None:
        """Makes differentiation raise an error that says what to do `instead`."""

        def rule(primals, tangents, **params):
            raise NotImplementedError(f"{self.name} has no derivative: {instead}")

        self.def_jvp(rule)

    def _ranks(self) -> tuple[int, ...]:
        assert self.operand_ranks is not None, f"the operands of {self.name} vary in number"
        return self.operand_ranks

    def _lower(self, ctx, function, operands):
        lower = mlir.lower_fun(function, multiple_results=self.multiple_results)
        return lower(lowering.with_own_functions(ctx), *operands)

    def _lower_reference(self, ctx, operands, **params):
        planned = "implementation", *self.planned
        read = tuple((name, x) for name, x in params.items() if name not in planned)
        return self._lower(ctx, _traced_once(self.reference, read), operands)

    def _lower_default(self, ctx, *operands, **params):
        if params["implementation"] in ("cuda", Invariant.REQUIRED):
            platforms = ", ".join(ctx.platforms or ctx.module_context.platforms)
            self._raise_impossible(
                f"the program is compiled for the platform {platforms}", params["implementation"]
            )
        return self._lower_reference(ctx, operands, **params)

    def plan(self, avals: Sequence[Any], params: Mapping[str, Any], target: Target) -> Plan[Any]:
        """Returns the plan of a call for abstract operands `avals`."""
        plan = self.planner(avals, params, target)
        if not is_invariant(params["implementation"]):
            return plan
        return dataclasses.replace(plan, notes=(*plan.notes, RULE))

    def _lower_cuda(self, ctx, *operands, **params):
        if self.composed:
            return self._lower(ctx, functools.partial(self.composed, **params), operands)
        device = _target_device(ctx)
        target = H200 if device is None else Target.of(device)
        plan = self.plan(ctx.avals_in, params, target)
        implementation = params["implementation"]
        must_run = implementation == "cuda" or is_invariant(implementation)
        reason = plan.reason if plan.kernel == XLA else None
        if not reason and device is not None:
            reason = unsuitable_device_reason(device)
        if not reason:
            reason = missing_extension_reason()
            if reason and not must_run:
                _warn_once(reason)
        if not reason:
            assert self.call is not None
            return self._lower(ctx, functools.partial(self.call, plan), operands)
        if must_run:
            self._raise_impossible(reason, implementation)
        logger.debug("%s runs the reference: %s", self.name, reason)
        return self._lower_reference(ctx, operands, **params)

    def _raise_impossible(self, reason: str, implementation: Any) -> None:
        asked = "batch_invariant" if is_invariant(implementation) else "implementation='cuda'"
        public = self.function.partition("(")[0]
        name = self.name if public in ("", self.name) else f"{public} ({self.name})"
        raise NotImplementedError(f"{asked} is impossible for {name}: {reason}")


ops: dict[Primitive, Op] = {}
"""All operations by their primitives, in the order in which they were defined."""


def op_named(name: str) -> Op:
    """Returns the operation whose primitive is named `name`."""
    return next(op for op in ops.values() if op.name == name)


def export_disabled_checks() -> tuple[export.DisabledSafetyCheck, ...]:
    """Returns the checks of `jax.export` to disable for programs with this package's custom calls.

    Pass the result to `jax.export.export(..., disabled_checks=...)`.
    """
    targets = (target for op in ops.values() for target in op.targets)
    return tuple(map(export.DisabledSafetyCheck.custom_call, targets))


def _target_device(ctx: mlir.LoweringRuleContext) -> jax.Device | None:
    """Returns the device that the program is compiled for, None if it is not known.

    The device need not exist, because a program can be compiled for a description of a device.
    """
    context = ctx.module_context
    try:
        backend = context.get_backend(optional=True)
    except RuntimeError:  # this machine has no device of that platform
        backend = context.backend
    return backend.devices()[0] if backend else None


@functools.lru_cache(maxsize=1024)
def _traced_once(reference: Callable[..., Any], params: tuple[tuple[str, Any], ...]) -> Any:
    """Returns the reference with `params`, which JAX traces once for operands of equal types.

    Without `jax.jit`, every program with this call would trace the reference again, which takes as
    long as lowering. Programs are the same as without `jax.jit`, because it is inlined.
    """
    return jax.jit(functools.partial(reference, **dict(params)), inline=True)


@functools.cache
def _warn_once(reason: str) -> None:
    logger.warning("Grouped matmuls run the slower reference on this CUDA device: %s", reason)
