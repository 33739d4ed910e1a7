"""`explain`: says which kernels a function would run, without running it."""

from __future__ import annotations

import collections
import dataclasses
import math
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding

from jax_grouped_gemm._src.arguments import checked_int
from jax_grouped_gemm._src.device import H200, Target
from jax_grouped_gemm._src.extension import default_device, unsuitable_device_reason
from jax_grouped_gemm._src.meshes import axes_of_kind
from jax_grouped_gemm._src.op import Op, ops
from jax_grouped_gemm._src.partition import (
    Split,
    gathers,
    is_split_explicitly,
    local,
    local_shapes,
    mesh_of,
)
from jax_grouped_gemm._src.plan import Plan
from jax_grouped_gemm._src.transfers import (
    Call,
    Recorder,
    Transfer,
    key_of,
    megabytes,
    of_equation,
    recording,
)

if TYPE_CHECKING:
    from jax.extend.core import Jaxpr


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The plans of all grouped matmuls of a function, in program order; `str()` describes them.

    Attributes:
      plans: the plan of each grouped matmul.
      device: a description of the device that the plans are for.
      transfers: what the operations and layers of this package, and every `jax.shard_map`, move
        between devices.
      of_jax: how many products `jax.lax.ragged_dot` or `jax.lax.ragged_dot_general` computes. These
        products have no plan. Inside `adapters.replace_lax` they are the products that this package
        does not support.
    """

    plans: tuple[Plan[Any], ...]
    device: str
    transfers: tuple[Transfer, ...] = ()
    of_jax: int = 0

    @property
    def workspace_bytes(self) -> int:
        """Bytes of all workspaces. A program may need less, because kernels can share memory."""
        return sum(plan.workspace_bytes for plan in self.plans)

    def __str__(self) -> str:
        lines = [f"A plan for {self.device}; nothing ran."]
        lines += [f"{i}. {plan}" for i, plan in enumerate(self.plans, start=1)]
        if self.plans:
            most = max(plan.workspace_bytes for plan in self.plans)
            lines.append(f"workspace {self.workspace_bytes} bytes in all, {most} at a time")
        else:
            lines.append("no grouped matmuls")
        if self.of_jax:
            products = "product" if self.of_jax == 1 else "products"
            lines.append(
                f"JAX's own jax.lax.ragged_dot runs {self.of_jax} {products} without a plan; "
                "jgg.adapters.replace_lax() switches those that this package supports"
            )
        return "\n".join([*lines, *self._traffic()])

    def _traffic(self) -> Iterator[str]:
        for transfer, count in collections.Counter(self.transfers).items():
            yield f"{transfer}{f', {count} times' if count > 1 else ''}"
        totals: dict[str, int] = collections.defaultdict(int)
        for transfer in self.transfers:
            totals[transfer.kind] += transfer.bytes
        if totals:
            every = ", ".join(f"{kind} {megabytes(size)}" for kind, size in totals.items())
            yield f"each device {every} in all"


def explain(
    fn: Callable[..., Any], *args: Any, multiprocessors: int | None = None, **kwargs: Any
) -> Explanation:
    """Traces `fn(*args, **kwargs)` and plans each grouped matmul in it, nested ones included.

    The plans are for a GPU of compute capability 9.0, whatever devices this process has. Call
    `unavailable_reason` to learn whether kernels run here. A matmul inside a loop is listed once.

    If arguments are split over several devices, the plans are for the work of one device.
    `transfers` then lists the communication: operands that are gathered, and results that are
    summed over devices. Transfers of other operations, such as `jnp.dot`, are not listed. Over auto
    axes, XLA decides how operands are split when it compiles. If there are such axes, `explain`
    compiles the program, but never runs it. In the compiled program, the operations of this package
    are placeholders that compute nothing.

        jgg.explain(jgg.ragged_dot, lhs, rhs, group_sizes, precision="highest")

    Args:
      fn: the function, such as a loss or `jax.grad` of it.
      *args: its arguments. A `jax.ShapeDtypeStruct` may stand for an array, with `sharding=` if it
        is split. An argument without shape and dtype, such as a string, is passed on unchanged.
      multiprocessors: number of multiprocessors of the GPU. The default is the number of JAX's
        default device if it can run the kernels, and otherwise 132, the number of an H200 and of an
        H100 SXM.
      **kwargs: keyword arguments of `fn`, which are treated like `args`.

    Returns:
      An `Explanation` with a `Plan` for each grouped matmul. A plan has the shapes and dtypes of
      the operands as they are stored, the kernel (or what runs instead, and why), tile, cluster,
      grid, workspace bytes, the predicted time, and whether the tensor cores or memory limit it.
      The prediction is for the clock and the memory of an H200 and for groups of equal size,
      without the time of launching. The products of a ragged matmul are labelled forward, dgrad and
      wgrad. A tile from `use_tiles` is marked as overridden. The first line of the text says for
      which device the plan is.

    Raises:
      TypeError, ValueError: `multiprocessors` is not an integer, or is not positive.
    """
    if multiprocessors is None:
        target, device = _default_target()
    else:
        target = Target(checked_int("multiprocessors", multiprocessors))
        device = f"a Hopper GPU of {multiprocessors} multiprocessors {_TIMES}"
    leaves, tree = jax.tree.flatten((args, kwargs))
    is_array = [hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves]

    def of_arrays(*arrays: jax.Array) -> Any:
        rest = iter(arrays)
        given = [next(rest) if x else leaf for leaf, x in zip(leaves, is_array, strict=True)]
        args, kwargs = jax.tree.unflatten(tree, given)
        return fn(*args, **kwargs)

    arrays = [leaf for leaf, x in zip(leaves, is_array, strict=True) if x]
    if any(map(_may_be_split, arrays)):
        # XLA does not compile a cached program, and would report nothing: use a unique name.
        of_arrays.__name__ = f"explained_{uuid.uuid4().hex}"
        with recording() as recorder:
            jaxpr = jax.make_jaxpr(of_arrays)(*arrays).jaxpr
            jax.jit(of_arrays).lower(*arrays).compile()
    else:
        jaxpr, recorder = jax.make_jaxpr(of_arrays)(*arrays).jaxpr, Recorder()
    walk = _Walk(target, recorder)
    found = list(walk.over(jaxpr, "", {}))
    plans = (x for x in found if not isinstance(x, Transfer))
    transfers = (x for x in found if isinstance(x, Transfer))
    return Explanation(tuple(plans), device, (*transfers, *recorder.transfers), walk.of_jax)


_TIMES = "with the clock and the memory of an H200"


def _default_target() -> tuple[Target, str]:
    """Returns the default target of plans, and a description of it."""
    device = default_device()
    if unsuitable_device_reason(device):
        words = f"an H200 of {H200.multiprocessors} multiprocessors"
        return H200, f"{words} (the default device, {device.device_kind}, runs no kernel)"
    target = Target.of(device)
    words = f"{device.device_kind} of {target.multiprocessors} multiprocessors"
    return target, words if "H200" in device.device_kind else f"{words}, taken {_TIMES}"


def _may_be_split(x: Any) -> bool:
    """Returns whether XLA may split an array over auto axes of several devices."""
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return False
    auto = axes_of_kind(sharding.mesh, AxisType.Auto)
    return math.prod(sharding.mesh.shape[name] for name in auto) > 1


_NO_MESH = jax.sharding.AbstractMesh((), ())


@dataclasses.dataclass
class _Walk:
    """Finds the plans of grouped matmuls, and transfers between devices, in program order."""

    target: Target
    recorder: Recorder
    of_jax: int = 0

    def over(
        self, jaxpr: Jaxpr, owner: str, axis_sizes: Mapping[str, int]
    ) -> Iterator[Plan[Any] | Transfer]:
        """Yields plans and transfers of `jaxpr` and of programs in it. `owner` names the operation
        or `jax.shard_map` around it; `axis_sizes` has the sizes of manual mesh axes."""
        from jax.extend.core import jaxprs_in_params  # imported late, see `op.py`

        for eqn in jaxpr.eqns:
            if op := ops.get(eqn.primitive):
                yield from self._operation(op, eqn, axis_sizes)
            self.of_jax += eqn.primitive.name == "ragged_dot_general"
            yield from of_equation(eqn, owner, axis_sizes)
            inside, sizes = owner, axis_sizes
            if eqn.primitive.name == "shard_map":
                inside, sizes = "jax.shard_map", {**axis_sizes, **eqn.params["mesh"].shape}
            for inner in jaxprs_in_params(eqn.params):
                yield from self.over(inner, inside, sizes)

    def _operation(self, op: Op, eqn: Any, axis_sizes) -> Iterator[Plan[Any] | Transfer]:
        operands, results = ([v.aval for v in variables] for variables in (eqn.invars, eqn.outvars))
        # Under manual axes, the arrays of the program are already the slices of one device.
        call = None if axis_sizes else self._call(op, operands, results, eqn.params)
        if call and (call.split.axes or any(map(any, call.specs))):
            yield from self._split(op, operands, results, eqn.params, call)
        elif op.is_matmul or op.is_listed:
            plan = op.plan(operands, eqn.params, self.target)
            devices = math.prod(call.mesh_shape.values()) if call else 1
            if op.computes and devices > 1:
                note = f"each of {devices} devices computes all of it"
                plan = dataclasses.replace(plan, notes=(*plan.notes, note))
            yield plan

    def _call(self, op, operands, results, params) -> Call | None:
        """Returns how explicit axes or XLA split a call; None if neither types nor XLA tell."""
        if is_split_explicitly(operands):
            dims = op.dims_of(operands, results, params)
            mesh_shape = mesh_of(operands).shape
            specs = [x.sharding.spec for x in operands]
            split = Split.of(dims, specs, dims.sizes(operands, results), mesh_shape)
            return Call(split, specs, mesh_shape)
        calls = self.recorder.calls.get(key_of(op, operands, params))
        return calls.pop(0) if calls else None

    def _split(
        self, op: Op, operands: Sequence[Any], results: Sequence[Any], params, call: Call
    ) -> Iterator[Plan[Any] | Transfer]:
        dims = op.dims_of(operands, results, params)
        yield from gathers(op, dims, call.split, operands, call.specs, call.mesh_shape)
        slices = [
            jax.ShapeDtypeStruct(shape, x.dtype)
            for shape, x in zip(local_shapes(dims.operands, call.split), operands, strict=True)
        ]
        program = local(op, dims, call.split, params)
        with jax.sharding.use_abstract_mesh(_NO_MESH):
            axes = tuple(call.mesh_shape.items())
            jaxpr = jax.make_jaxpr(program, axis_env=axes)(*slices).jaxpr
        yield from self.over(jaxpr, op.name, call.mesh_shape)
