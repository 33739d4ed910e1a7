"""Lowers calls of an operation so that they stay split over devices.

Over explicit axes, types say how arrays are split, and a call becomes a `jax.shard_map` of one
device's program. Over auto axes, XLA decides how arrays are split when it propagates shardings, and
a call becomes a `custom_partitioning` of the same program.

This module relies on internals of JAX: the lowering context has the devices only for primitives
that are listed in `jax._src.dispatch`. If a JAX release lacks this list, calls lower as for one
device.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from jax_grouped_gemm._src.meshes import axes_of_kind, placed
from jax_grouped_gemm._src.partition import (
    Split,
    gathers,
    is_split_explicitly,
    local,
    local_shapes,
    mesh_of,
)
from jax_grouped_gemm._src.transfers import Call, current_recorder, key_of

logger = logging.getLogger(__name__)


def lower(ctx: Any, op: Any, inner: Callable[..., Any], operands, params) -> Any:
    """Lowers a call so that it stays split; calls `inner` if nothing is or may become split."""
    if current_recorder():
        inner = _compute_nothing
    mesh = mesh_of(ctx.avals_in)
    types = getattr(mesh, "axis_types", ())
    if AxisType.Manual in types:
        return inner(ctx, *operands, **params)
    if is_split_explicitly(ctx.avals_in):
        function = _over_explicit_axes(op, ctx.avals_in, ctx.avals_out, params, mesh)
    elif _has_devices_to_split_over(ctx):
        devices = len(ctx.module_context.axis_context.device_assignment)
        function = _over_auto_axes(op, ctx.avals_in, ctx.avals_out, params, devices)
    else:
        return inner(ctx, *operands, **params)
    return mlir.lower_fun(function, multiple_results=op.multiple_results)(ctx, *operands)


def _compute_nothing(ctx, *operands, **params):
    function = _nothing([(x.shape, x.dtype) for x in ctx.avals_out])
    return mlir.lower_fun(function, multiple_results=True)(ctx, *operands)


def _nothing(results: Sequence[tuple[tuple[int, ...], Any]]) -> Callable[..., list[jax.Array]]:
    """Returns a function that returns zeros. A barrier makes XLA keep the function's operands."""

    def function(*operands):
        zeros = [jnp.zeros(shape, dtype) for shape, dtype in results]
        return lax.optimization_barrier((operands, zeros))[1]

    return function


def _over_explicit_axes(op, avals, results, params, mesh) -> Callable[..., Any]:
    dims = op.dims_of(avals, results, params)
    split = Split.of(dims, [x.sharding.spec for x in avals], dims.sizes(avals, results), mesh.shape)
    in_specs, out_specs = dims.specs(split.axes)

    def function(*operands):
        return jax.shard_map(
            local(op, dims, split, params),
            mesh=mesh,
            in_specs=tuple(in_specs),
            out_specs=out_specs if op.multiple_results else out_specs[0],
            axis_names=set(axes_of_kind(mesh, AxisType.Explicit)),
            # JAX cannot infer that a result that is not split is equal on all devices.
            check_vma=False,
        )(*(placed(x, mesh, spec) for x, spec in zip(operands, in_specs, strict=True)))

    return function


def _has_devices_to_split_over(ctx: Any) -> bool:
    """Returns whether XLA is going to partition the program and can call back into Python.

    Exported programs cannot hold a Python callback. Programs for several platforms have one module
    for all platforms, so they are not split either.
    """
    module = ctx.module_context
    context = module.axis_context
    devices = getattr(context, "device_assignment", None)
    parameters = getattr(module, "lowering_parameters", None)
    return (
        devices is not None
        and len(devices) > 1
        and not getattr(parameters, "for_export", True)
        and len(ctx.platforms or module.platforms) == 1
        and bool(getattr(jax.config, "jax_use_shardy_partitioner", True))
    )


def _over_auto_axes(op, avals, results, params, devices) -> Callable[..., Any]:
    from jax.experimental.custom_partitioning import custom_partitioning

    dims = op.dims_of(avals, results, params)
    sizes = dims.sizes(avals, results)
    recorder = current_recorder()

    def partition(mesh, operands, result):
        leaves = list(result) if op.multiple_results else [result]
        shardings = [x.sharding for x in (*operands, *leaves)]
        if not all(isinstance(x, NamedSharding) for x in shardings):
            # Without a mesh, every device gets all operands in full.
            (devices,) = {x._device_assignment for x in shardings if x is not None}
            whole = type(shardings[0]).get_replicated(devices)
            given, returned = [whole] * len(operands), [whole] * len(leaves)
            call = Call(Split({}, {}, sizes), [()] * len(operands), {})
        else:
            specs = [x.spec for x in shardings]
            split = Split.of(dims, specs, sizes, mesh.shape)
            given, returned = (
                [NamedSharding(mesh, spec) for spec in specs] for specs in dims.specs(split.axes)
            )
            call = Call(split, specs[: len(operands)], mesh.shape)
        if logger.isEnabledFor(logging.DEBUG):
            for transfer in gathers(op, dims, call.split, operands, call.specs, call.mesh_shape):
                logger.debug("%s", transfer)
        program = _without_types(local(op, dims, call.split, params))
        if recorder:
            recorder.calls[key_of(op, avals, params)].append(call)
            shapes = local_shapes(dims.results, call.split)
            nothing = _nothing([(s, x.dtype) for s, x in zip(shapes, leaves, strict=True)])
            program = nothing if op.multiple_results else lambda *x: nothing(*x)[0]
        return mesh, program, returned if op.multiple_results else returned[0], tuple(given)

    whole = custom_partitioning(functools.partial(op.primitive.bind, **params))
    whole.def_partition(
        partition=partition, sharding_rule=lambda *_: dims.sharding_rule(sizes, devices)
    )
    return whole


_NO_MESH = AbstractMesh((), ())
_PROGRAM = type(lax.add_p)("program_of_a_device")


def _without_types(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function`, traced and lowered as if there were no mesh.

    JAX 0.12 traces the program of a device under the mesh of `jax.set_mesh`. The types over its
    explicit axes would become sharding constraints in a module that is not partitioned again.
    """

    def traced(*operands):
        with jax.sharding.use_abstract_mesh(_NO_MESH):
            types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
            jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(*types)
        results = _PROGRAM.bind(*operands, jaxpr=jaxpr)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return traced


def _lower_program(ctx, *operands, jaxpr):
    ctx = ctx.replace(avals_in=jaxpr.in_avals, avals_out=jaxpr.out_avals)
    with jax.sharding.use_abstract_mesh(_NO_MESH):
        program = functools.partial(jax.core.eval_jaxpr, jaxpr.jaxpr, jaxpr.consts)
        return mlir.lower_fun(program, multiple_results=True)(ctx, *operands)


_PROGRAM.multiple_results = True
_PROGRAM.def_abstract_eval(lambda *_, jaxpr: jaxpr.out_avals)
mlir.register_lowering(_PROGRAM, _lower_program)


def require_devices(primitive: Any) -> None:
    """Makes JAX pass the devices to the lowering rule of `primitive`."""
    try:
        from jax._src.dispatch import prim_requires_devices_during_lowering as primitives
    except ImportError:  # `lower` then sees no devices, and splits nothing over auto axes
        return
    primitives.add(primitive)


def with_own_functions(ctx: mlir.LoweringRuleContext) -> mlir.LoweringRuleContext:
    """Returns `ctx` with a separate cache of lowered functions for its platforms.

    JAX lowers a function inside `jax.jit` once for a program, whatever platforms a rule is for. So
    the CPU would run a function that a rule for CUDA had lowered for the GPU.

    Raises:
      NotImplementedError: this release of JAX keeps the cache in an unknown place.
    """
    module = ctx.module_context
    if ctx.platforms is None or len(ctx.platforms) == len(module.platforms):
        return ctx
    if not hasattr(module, "cached_primitive_lowerings"):
        raise NotImplementedError(
            f"Lowering for several platforms ({', '.join(module.platforms)}) is not implemented "
            f"for JAX {jax.__version__}; lower or export for one platform at a time."
        )
    functions = module.cached_primitive_lowerings.setdefault((__name__, *ctx.platforms), {})
    return ctx.replace(module_context=module.replace(cached_primitive_lowerings=functions))
