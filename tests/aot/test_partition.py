"""XLA's program for operands sharded over four H200: GPUs keep their parts, no rows travel."""

import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe
from tests.support import aot

BF16, F32 = jnp.bfloat16, jnp.float32
M, D, F, E, TOP = 12288, 512, 256, 16, 4
AXIS = P("x")


@pytest.fixture(scope="module")
def target(extension) -> aot.Target:
    return aot.Target(aot.H200, devices=4)


def arrays(*shapes, dtype=BF16):
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


def travelling(program) -> list[tuple[str, tuple[int, ...]]]:
    """Returns the kind of each collective, with the shape of each of its arrays."""
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    lines = re.findall(rf"= (\(.*?\)|\S+) ({kinds})(?:-start)?\(", program.hlo)
    return [
        (kind, tuple(map(int, shape.split(","))))
        for results, kind in lines
        for shape in re.findall(r"\w+\[([\d,]+)\]", results)
    ]


def test_rows_of_ragged_dot(target):
    def step(lhs, rhs, sizes, ct):
        y, pullback = jax.vjp(lambda *a: jgg.ragged_dot(*a, sizes), lhs, rhs)
        return y, *pullback(ct)

    arguments = arrays((M, D), (E, D, F)) + arrays((E,), dtype=jnp.int32) + arrays((M, F))
    program = target.compile(step, *arguments, specs=[AXIS, P(), P(), AXIS])
    assert program.kernels == {"ragged_noncontracting": 2, "ragged_contracting": 1}
    calls = " ".join(call.text for call in program.calls)
    assert f"bf16[{M // 4},{D}]" in calls and f"bf16[{M},{D}]" not in calls
    assert {shape for _, shape in travelling(program)} == {(E, D, F)}
    assert {kind for kind, _ in travelling(program)} == {"all-reduce"}


def test_rows_of_fp8_ragged_dot(target):
    """Each device quantises its own rows, for weight gradients too."""

    def step(lhs, rhs, sizes, ct):
        y, pullback = jax.vjp(lambda *a: jgg.fp8_ragged_dot(*a, sizes), lhs, rhs)
        return y, *pullback(ct)

    arguments = arrays((M, D), (E, D, F)) + arrays((E,), dtype=jnp.int32) + arrays((M, F))
    program = target.compile(step, *arguments, specs=[AXIS, P(), P(), AXIS])
    assert program.kernels["scaled_ragged_noncontracting"] == 2
    assert program.kernels["scaled_ragged_contracting"] == 1
    assert f"[{M // 4},{D}]" in program.hlo and f"[{M},{D}]" not in program.hlo
    assert travelling(program) == [("all-reduce", (E, D, F))]


@pytest.mark.parametrize("of_matrices", [P(), P(None, "x")], ids=["data", "fsdp"])
def test_tokens_of_dropless_mlp(of_matrices, target):
    def loss(x, logits, *matrices):
        y = moe.dropless_mlp(x, moe.route(logits, TOP), *matrices)
        return jnp.sum(y.astype(F32) ** 2)

    arguments = [*arrays((M, D)), *arrays((M, E), dtype=F32)]
    arguments += arrays((E, D, F), (E, D, F), (E, F, D))
    specs = [AXIS, AXIS, *[of_matrices] * 3]
    forward = target.compile(loss, *arguments, specs=specs)
    both = target.compile(jax.value_and_grad(loss, (0, 1, 2, 3, 4)), *arguments, specs=specs)
    # XLA may move the split dimension to the front, so compare numbers of elements.
    matrices = {E * D * F, E * D * F // 4}
    for program in (forward, both):
        assert f"[{M * TOP // 4}," in program.hlo and f"[{M * TOP}," not in program.hlo
        found = travelling(program)
        assert {math.prod(shape) for _, shape in found if len(shape) > 1} <= matrices
        gathers = [shape for kind, shape in found if kind == "all-gather"]
        assert bool(gathers) == (of_matrices != P())
    assert {kind for kind, _ in travelling(forward)} <= {"all-gather", "all-reduce"}


@pytest.mark.parametrize("layer", ["syrk", "muon"])
def test_stacks(layer, target):
    if layer == "syrk":

        def function(stack):
            return jgg.grouped_syrk(stack, symmetrize_output=True)
    else:
        optimiser = jgg.optim.muon(0.1)

        def function(stack):
            return optimiser.update([stack], optimiser.init([stack]), [stack])[0]

    program = target.compile(function, *arrays((16, 512, 1024)), specs=[AXIS])
    assert sum(program.kernels.values())
    assert travelling(program) == []
    assert all("[16," not in call.text for call in program.calls)


def test_muon_with_a_period(target):
    """Both kinds of updates are in the program, and nothing is gathered for either."""
    spec = P(None, None, "x")
    optimiser = jgg.optim.scale_by_muon(shardings=NamedSharding(target.mesh, spec), period=4)

    def function(stack, mu, count):
        return optimiser.update(stack, optimiser.init(stack)._replace(count=count, mu=mu))

    arguments = [*arrays(*[(16, 512, 1024)] * 2), *arrays((), dtype=jnp.int32)]
    program = target.compile(function, *arguments, specs=[spec, spec, P()])
    assert " conditional(" in program.hlo
    assert {kind for kind, _ in travelling(program)} == {"all-to-all"}


def test_gradients_are_summed_while_others_are_computed(target):
    """Several sums run during products. By default XLA runs only one, so most sums come last."""

    def loss(weights, x, sizes):
        for w in weights:
            x = jnp.tanh(jgg.ragged_dot(x, w, sizes))
        return jnp.sum(x, dtype=F32)

    arguments = arrays(*[(E, 4 * D, 4 * D)] * 6, (M, 4 * D)) + arrays((E,), dtype=jnp.int32)

    def gradients(*arguments):
        *weights, x, sizes = arguments
        return jax.grad(loss)(weights, x, sizes)

    def most_in_flight(**options) -> int:
        specs = [P()] * 6 + [AXIS, P()]
        program = target.compile(gradients, *arguments, specs=specs, **options)
        flying, found = set(), 0
        for line in program.entry:
            if line.opcode == "all-reduce-start":
                flying.add(line.name)
            elif line.opcode == "all-reduce-done":
                flying -= set(line.operands)
            elif line.kernel:
                found = max(found, len(flying))
        return found

    options = moe.data_parallel_compiler_options(target.mesh)
    assert most_in_flight(**options) > max(1, most_in_flight())
