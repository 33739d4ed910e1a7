"""Layers over several GPUs: all ways of our layer, a naive layer, and a local layer."""

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_grouped_gemm as jgg
from benchmarks.harness.peer import (
    Call,
    NotOffered,
    Peer,
    Role,
    kernels_unavailable_reason,
    pinned_implementation,
)
from benchmarks.moe import Layer
from jax_grouped_gemm import moe

FORWARD, STEP = "ep_forward", "ep_step"
AXIS = "expert"
SPLIT = P(AXIS)

STRATEGIES: dict[str, dict] = {
    "ours": dict(),
    "nccl": dict(),
    "apart": dict(overlap=False),
    "room_for_1.25": dict(buffer_factor=1.25),
    "gather_again": dict(save="nothing"),
    "chunks_2": dict(chunks=2),
    "ragged": dict(strategy="ragged_all_to_all"),
    "nccl_sms_116": dict(max_sms=116),
}
WAYS: dict[str, dict] = {
    f"all_gather-{combine}-{'beside' if overlap else 'apart'}-{save}": dict(
        strategy="all_gather", combine=combine, overlap=overlap, save=save
    )
    for combine in ("ppermute", "all_to_all")
    for overlap in (True, False)
    for save in ("x", "rows")
} | {
    f"ragged_all_to_all-{save}": dict(strategy="ragged_all_to_all", save=save)
    for save in ("x", "rows")
}
"""Every way of a layer that drops no rows and does not recompute its forward pass."""

WITH_NCCL = tuple(name for name in STRATEGIES if "nccl" in name)
"""Strategies without the package's compiler options, with which copy engines send ppermutes."""


@dataclass(frozen=True)
class Problem:
    """The static parameters of a compiled program."""

    layer: Layer
    op: str
    devices: int


def mesh_of(devices: int) -> Mesh:
    """Returns a mesh of the first GPUs of this host."""
    return Mesh(np.array(jax.devices()[:devices]), (AXIS,))


Run = Callable[..., tuple[jax.Array, ...]]


def result_and_gradients(function: Run, op: str) -> Run:
    """Returns a function of x, experts, weights, wi_0, wi_1 and wo, which returns y and, for a
    step, all gradients, with y as the cotangent of y."""

    def run(x, experts, *floats):
        def forward(x, *floats):
            return function(x, experts, *floats)

        if op == FORWARD:
            return (forward(x, *floats),)
        y, vjp = jax.vjp(forward, x, *floats)
        return y, *vjp(y)

    return run


def routing_of(experts: jax.Array, weights: jax.Array, num_experts: int) -> moe.Routing:
    """Returns a routing with these choices. Layers read only the shape of its logits."""
    return moe.Routing(jnp.zeros((*experts.shape[:-1], num_experts), jnp.float32), experts, weights)


def over_devices(problem: Problem, on_device: Run) -> Run:
    """Returns `on_device` as a function of operands that are split over all devices."""
    return jax.shard_map(
        on_device, mesh=mesh_of(problem.devices), in_specs=(SPLIT,) * 6, out_specs=SPLIT
    )


def strategy(problem: Problem, **options: object) -> Run:
    """Returns `expert_parallel_mlp` with the given options."""
    options |= dict(expert_axis=AXIS, implementation=pinned_implementation())

    def on_device(x, experts, weights, *matrices):
        routing = routing_of(experts, weights, problem.layer.experts)
        return moe.expert_parallel_mlp(x, routing, *matrices, **options)[0]

    return over_devices(problem, on_device)


def naive(problem: Problem) -> Run:
    """Returns a layer with rows of all experts on every device. Only local rows are not zero."""
    pinned = dict(implementation=pinned_implementation())

    def on_device(x, experts, weights, *matrices):
        x, experts, weights = (lax.all_gather(a, AXIS, tiled=True) for a in (x, experts, weights))
        order = moe.sort_by_expert(experts, problem.layer.experts, **pinned)
        row_weights = moe.permute_rows(weights.reshape(-1), order.order, order.inverse.reshape(-1))
        rows = moe.dispatch(x, order, **pinned)
        of_rows = dict(weights=row_weights, group_offset=lax.axis_index(AXIS) * len(matrices[0]))
        rows = jgg.ragged_mlp(rows, *matrices, order.group_sizes, **of_rows, **pinned)
        y = moe.combine(rows, order, **pinned)
        return lax.psum_scatter(y, AXIS, tiled=True)

    return over_devices(problem, on_device)


def local(problem: Problem) -> Run:
    """Returns the layer of one GPU with its share of tokens and experts."""

    def run(x, experts, weights, *matrices):
        routing = routing_of(experts, weights, matrices[0].shape[0])
        implementation = pinned_implementation()
        return moe.dropless_mlp(x, routing, *matrices, implementation=implementation)

    return run


def share_of_first_device(problem: Problem, operands: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the tokens of the first device, uniform choices of its experts, and its weights."""
    x, experts, *rest = (a.addressable_shards[0].data for a in operands)
    here = problem.layer.experts // problem.devices
    rng = np.random.default_rng(0)
    scores = rng.random((len(x), here))
    chosen = np.argsort(scores, axis=1)[:, : problem.layer.top_k].astype(np.int32)
    return [x, jax.device_put(chosen, x.device), *rest]


class QueuedCall(Call):
    """A call that is timed in a queue of calls, so that host time does not count."""

    def __init__(self, run: Callable[[], object]):
        super().__init__(run)
        start = time.perf_counter()
        self.wait(run())
        self._queue = int(np.clip(0.03 / (time.perf_counter() - start), 2, 16))

    def elapsed_us(self) -> float:
        start = time.perf_counter()
        for _ in range(self._queue):
            result = self.run()
        self.wait(result)
        return (time.perf_counter() - start) * 1e6 / self._queue


class MeshPeer(Peer):
    """A function of operands split over the devices; with `alone`, of the first device's share."""

    def __init__(
        self,
        name: str,
        role: Role,
        make: Callable[[Problem], Run],
        alone: bool = False,
        copy_engines: bool = True,
    ):
        self.name, self.role = name, role
        self.temporary_bytes: dict[Problem, int] = {}
        self._make = make
        self._alone = alone
        self._copy_engines = copy_engines
        self._compiled: dict[Problem, jax.stages.Compiled] = {}

    def unavailable_reason(self):
        return kernels_unavailable_reason()

    def prepare(self, problem, *operands):
        if self._alone:
            operands = share_of_first_device(problem, operands)
        compiled = self._compiled.pop(problem, None) or self._compile(problem, *operands)
        memory = compiled.memory_analysis()
        if memory is not None:
            self.temporary_bytes[problem] = memory.temp_size_in_bytes
        jax.block_until_ready(compiled(*operands))
        return QueuedCall(lambda: compiled(*operands))

    def compile_before(self, problem: Problem, *operands: jax.ShapeDtypeStruct) -> None:
        """Compiles the function for abstract operands, for a later call of `prepare`."""
        with contextlib.suppress(NotOffered):  # `prepare` raises it
            self._compiled[problem] = self._compile(problem, *operands)

    def _compile(self, problem: Problem, *operands) -> jax.stages.Compiled:
        function = jax.jit(result_and_gradients(self._make(problem), problem.op))
        mesh = mesh_of(problem.devices)
        options = moe.expert_parallel_compiler_options(mesh) if self._copy_engines else {}
        try:
            return function.lower(*operands).compile(options)
        except NotImplementedError as error:
            raise NotOffered(str(error)) from error


def of_strategies(options: dict[str, dict]) -> list[MeshPeer]:
    """Returns a peer for each name, with its options of the layer."""
    return [
        MeshPeer(
            name,
            Role.OURS if name == "ours" else Role.VARIANT,
            functools.partial(strategy, **of_name),
            copy_engines=name not in WITH_NCCL,
        )
        for name, of_name in options.items()
    ]


def ways() -> list[MeshPeer]:
    """Returns the layer with its own choice, and every way that it could choose."""
    return of_strategies({"ours": {}, **WAYS})


def peers() -> list[MeshPeer]:
    """Returns all strategies, the naive layer, and the layer without communication."""
    return [
        *of_strategies(STRATEGIES),
        MeshPeer("naive", Role.GROUPED, naive, copy_engines=False),
        MeshPeer("local", Role.CEILING, local, alone=True, copy_engines=False),
    ]
