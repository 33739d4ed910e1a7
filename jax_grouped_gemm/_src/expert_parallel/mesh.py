"""`expert_parallel`: the layer for code under `jax.jit`, which works on whole arrays."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from jax_grouped_gemm._src.activations import as_activation
from jax_grouped_gemm._src.arguments import canonical_precision, checked_implementation
from jax_grouped_gemm._src.arrays import varying_axes
from jax_grouped_gemm._src.expert_parallel.api import (
    check_invariant,
    checked_limit,
    expert_parallel_mlp,
)
from jax_grouped_gemm._src.expert_parallel.group import Axes, AxisNames, axis_names
from jax_grouped_gemm._src.expert_parallel.options import Wanted
from jax_grouped_gemm._src.expert_parallel.stats import ExpertParallelStats
from jax_grouped_gemm._src.fp8.formats import BLOCK
from jax_grouped_gemm._src.fp8.quantize.api import QuantizedWeights
from jax_grouped_gemm._src.fp8.recipe import checked_recipe
from jax_grouped_gemm._src.meshes import gathered, names_of, placed
from jax_grouped_gemm._src.mlp.fp8.weights import QuantizedMlp
from jax_grouped_gemm._src.quantized.array import QuantizedArray
from jax_grouped_gemm._src.quantized.weights import as_weights, specs_of_weights
from jax_grouped_gemm._src.rows.operands import Biases, checked_biases
from jax_grouped_gemm._src.rows.routing import Routing, check_routing

FUNCTION = "expert_parallel"

Layer = Callable[..., tuple[jax.Array, ExpertParallelStats]]


def expert_parallel(
    mesh: Mesh | AbstractMesh | None = None,
    *,
    expert_axis: AxisNames,
    tensor_axis: AxisNames | None = None,
    fsdp_axis: AxisNames | None = None,
    token_axes: AxisNames | None = None,
    **options: Any,
) -> Layer:
    """Returns `expert_parallel_mlp` as a function of whole arrays, for code under `jax.jit`.

    For example:

        mesh = jax.make_mesh((2, 4), ("data", "expert"), (jax.sharding.AxisType.Auto,) * 2)
        layer = moe.expert_parallel(mesh, expert_axis="expert")

        @jax.jit
        def apply(x, gate, wi_0, wi_1, wo):
            y, stats = layer(x, moe.route(x @ gate, top_k=2), wi_0, wi_1, wo)
            return y

    wi_0 and wi_1 are sharded as ``P(expert_axis, fsdp_axis, tensor_axis)``, and wo as
    ``P(expert_axis, tensor_axis, fsdp_axis)``: MaxText calls these logical axes exp, embed and mlp.
    Arrays with another sharding are moved to this one.

    Args:
      mesh: the devices, with auto or explicit axes; by default the mesh of `jax.set_mesh`.
      expert_axis: the mesh axis, or axes, along which experts are divided.
      tensor_axis: the axes along which hidden features are divided. Tokens are the same along
        them, unless `token_axes` names them too.
      fsdp_axis: the axes along which the matrices' embed dimension is divided. Matrices are
        gathered before each use. Each device gets its slice of the sum of their gradients.
      token_axes: the axes along which the first dimension of the tokens is divided; by default all
        axes of the mesh except `tensor_axis`.
      **options: options of `expert_parallel_mlp`.

    Returns:
      A function of x [B, ..., D], routing, wi_0 [E, D, F], wi_1 (or None), wo [E, F, D],
      optionally `biases` of these three and the `quantized` result of
      `jax_grouped_gemm.quantize_mlp`. It returns y [B, ..., D] and `ExpertParallelStats` of the
      whole mesh: the sums of `rows_per_device` and of `overflow`, and the largest `max_over_mean`.

    Raises:
      TypeError, ValueError: the mesh lacks an axis, an axis has two meanings, or an option is
        invalid. The returned function raises these errors if a dimension is not a multiple of the
        number of devices that divide it, if slices along `fsdp_axis` are not whole blocks of
        `quantized`, and for the reasons of `expert_parallel_mlp`.
    """
    named = dict(expert_axis=expert_axis, tensor_axis=tensor_axis, fsdp_axis=fsdp_axis)
    check_options(
        expert_axis=expert_axis,
        tensor_axis=tensor_axis,
        fsdp_axis=fsdp_axis,
        token_axes=token_axes,
        **options,
    )
    if mesh is None:
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty:
            raise ValueError(f"{FUNCTION}: give a mesh, or set one with jax.set_mesh")
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(f"{FUNCTION}: mesh must be a jax.sharding.Mesh, got {mesh!r}")
    axes = {name: _axes(name, value, mesh) for name, value in named.items()}
    experts, tensor, fsdp = axes.values()
    if token_axes is None:
        tokens = tuple(name for name in mesh.axis_names if name not in tensor)
    else:
        tokens = _axes("token_axes", token_axes, mesh)
    if missing := [name for name in fsdp if name not in tokens]:
        raise ValueError(
            f"{FUNCTION}: devices along fsdp_axis must have different tokens, but token_axes "
            f"{tokens} lack {', '.join(missing)}"
        )

    wi, wo_spec = P(experts, fsdp or None, tensor or None), P(experts, tensor or None, fsdp or None)
    bias, bias_out = P(experts, tensor or None), P(experts, fsdp or None)

    def layer(x, routing, wi_0, wi_1, wo, biases=None, quantized=None):
        check_routing(FUNCTION, routing)
        every = dict(x=P(tokens), wi_0=wi, wi_1=wi, wo=wo_spec, b0=bias, b1=bias, bo=bias_out)
        every |= dict.fromkeys(routing._fields, P(tokens))
        specs, operands = {}, {}

        def take(name, operand):
            x = as_weights(name, operand)
            _check_divisible(name, x, every[name], mesh)
            specs[name] = specs_of_weights(f"{FUNCTION}: {name}", x, every[name], mesh)
            operands[name] = jax.tree.map(lambda x, spec: placed(x, mesh, spec), x, specs[name])
            return x

        tokens_array = take("x", x)
        gate, down = take("wi_0", wi_0), take("wo", wo)
        up = None if wi_1 is None else take("wi_1", wi_1)
        checked = checked_biases(FUNCTION, biases, tokens_array, gate, up, down)
        of_experts = zip(("b0", "b1", "bo"), checked, strict=True)
        for name, operand in (*of_experts, *routing._asdict().items()):
            if operand is not None or name in routing._fields:
                take(name, operand)
        if quantized is not None:
            specs["quantized"] = _specs_of_quantized(experts, fsdp or None)
            _check_quantized(quantized, specs["quantized"], mesh)
            operands["quantized"] = jax.tree.map(
                lambda x, spec: placed(x, mesh, spec), quantized, specs["quantized"]
            )
        on_device = functools.partial(
            _on_device, experts=experts, tensor=tensor, fsdp=fsdp, options=options
        )
        mapped = jax.shard_map(on_device, mesh=mesh, in_specs=(specs,), out_specs=(P(tokens), P()))
        return mapped(operands)

    return layer


def _on_device(operands, *, experts: Axes, tensor: Axes, fsdp: Axes, options):
    given = dict(operands)
    if fsdp:
        # These specs name the dimension to gather: the embed dimension of every matrix.
        wi, out = P(None, fsdp, None), P(None, None, fsdp)
        for name, spec in dict(wi_0=wi, wi_1=wi, wo=out, bo=P(None, fsdp)).items():
            if name in given:
                x = given[name]
                specs = x.specs(spec) if isinstance(x, QuantizedArray) else spec
                given[name] = jax.tree.map(gathered, x, specs)
        if quantized := given.get("quantized"):
            specs = _specs_of_quantized(None, fsdp)
            given["quantized"] = jax.tree.map(gathered, quantized, specs)
    biases: Biases = given.get("b0"), given.get("b1"), given.get("bo")
    y, stats = expert_parallel_mlp(
        given["x"],
        Routing(*(given[name] for name in Routing._fields)),
        given["wi_0"],
        given.get("wi_1"),
        given["wo"],
        biases=None if all(bias is None for bias in biases) else biases,
        quantized=given.get("quantized"),
        expert_axis=experts,
        tensor_axis=tensor or None,
        **options,
    )
    return y, _of_mesh(stats)


def _specs_of_quantized(experts: Axes | None, fsdp: Axes | None) -> Any:
    """Returns a `QuantizedMlp` with the spec of each of its arrays."""
    columns: Any = P(experts, None, fsdp)
    rows: Any = P(experts, fsdp, None)
    of_wi = QuantizedWeights(rows, rows, columns, columns)
    of_wo = QuantizedWeights(columns, columns, rows, rows)
    return QuantizedMlp(of_wi, of_wo)


def _check_quantized(quantized: Any, specs: Any, mesh: Mesh | AbstractMesh) -> None:
    """Raises an error unless the quantised matrices can be divided among the devices."""
    if not isinstance(quantized, QuantizedMlp):
        raise TypeError(
            f"{FUNCTION}: quantized must be a QuantizedMlp, as quantize_mlp returns it, got "
            f"{type(quantized).__name__}"
        )
    for matrix, forms in quantized._asdict().items():
        if not isinstance(forms, QuantizedWeights):
            raise TypeError(
                f"{FUNCTION}: quantized.{matrix} must be QuantizedWeights, as quantize_mlp returns "
                f"them, got {type(forms).__name__}"
            )
    rows = quantized.wi.values.shape[1]
    devices = math.prod(mesh.shape[axis] for axis in names_of(specs.wi.values[1]))
    if devices > 1 and rows % (devices * BLOCK):
        raise ValueError(
            f"{FUNCTION}: D must be a multiple of {BLOCK} for each of the {devices} devices along "
            f"fsdp_axis, so that they have whole blocks of quantized, got {rows}"
        )
    for matrix, forms in specs._asdict().items():
        for form, spec in forms._asdict().items():
            x = getattr(getattr(quantized, matrix), form)
            _check_divisible(f"quantized.{matrix}.{form}", x, spec, mesh)


def _of_mesh(stats: ExpertParallelStats) -> ExpertParallelStats:
    """Returns the statistics of all groups of the mesh together."""
    others = tuple(sorted(varying_axes(*stats)))
    if not others:
        return stats
    return ExpertParallelStats(
        lax.psum(stats.rows_per_device, others),
        lax.pmax(stats.max_over_mean, others),
        lax.psum(stats.overflow, others),
    )


def check_options(
    *,
    expert_axis: AxisNames,
    tensor_axis: AxisNames | None = None,
    fsdp_axis: AxisNames | None = None,
    token_axes: AxisNames | None = None,
    **options: Any,
) -> None:
    """Raises the errors of `expert_parallel` that depend neither on a mesh nor on operands."""
    named = dict(expert_axis=expert_axis, tensor_axis=tensor_axis, fsdp_axis=fsdp_axis)
    of_matrices = {
        name: () if axes is None else axis_names(name, axes) for name, axes in named.items()
    }
    if not of_matrices["expert_axis"]:
        raise ValueError(f"{FUNCTION}: expert_axis must name a mesh axis, got {expert_axis!r}")
    names = sum(of_matrices.values(), ())
    if len(set(names)) < len(names):
        raise ValueError(f"{FUNCTION}: a mesh axis has two meanings in {named}")
    if token_axes is not None:
        names = axis_names("token_axes", token_axes)
        if len(set(names)) < len(names):
            raise ValueError(f"{FUNCTION}: token_axes names a mesh axis twice: {token_axes!r}")
    # The returned function takes `biases` and `quantized`, so they are no options here.
    known = inspect.signature(expert_parallel_mlp).parameters.keys() - {"biases", "quantized"}
    if unknown := [name for name in options if name not in known]:
        raise TypeError(f"{FUNCTION}: no option is called {', '.join(unknown)}")
    as_activation(options.get("activation", "silu"))
    fields = [field.name for field in dataclasses.fields(Wanted)]
    Wanted.checked(None, **{name: options[name] for name in fields if name in options})
    if options.get("batch_invariant"):
        check_invariant(of_matrices["tensor_axis"])
    checked_limit(options.get("max_sms"))
    if options.get("recipe") is not None:
        checked_recipe(options["recipe"])
    if not callable(implementation := options.get("implementation")):
        checked_implementation(implementation)
        canonical_precision(options.get("precision"))


def _axes(argument: str, axes: AxisNames | None, mesh: Mesh | AbstractMesh) -> Axes:
    if axes is None:
        return ()
    names = axis_names(argument, axes)
    for name in names:
        if name not in mesh.axis_names:
            raise ValueError(
                f"{FUNCTION}: {argument} {name!r} is no axis of the mesh {mesh.axis_names}"
            )
    return names


def _check_divisible(name: str, x: jax.Array, spec: P, mesh: Mesh | AbstractMesh) -> None:
    if x.ndim < len(spec):
        raise TypeError(
            f"{FUNCTION}: {name} must have {len(spec)} dimensions or more, got {x.shape}"
        )
    for dimension, axes in enumerate(spec):
        axes = names_of(axes)
        devices = math.prod(mesh.shape[axis] for axis in axes)
        if x.shape[dimension] % devices:
            raise ValueError(
                f"{FUNCTION}: dimension {dimension} of {name} {x.shape} must be a multiple of the "
                f"{devices} devices along {', '.join(axes)}"
            )
