"""Measures weight gradients that the kernel or XLA adds to float32 accumulators.

python -m benchmarks.accumulate --shapes main --output benchmarks/results/accumulate.json

`ours` adds in place. `ours_then_add` computes the product, which XLA adds to a donated accumulator.
`ours_product` is the product alone, in float32.
"""

import argparse
import dataclasses
import functools

import jax
import jax.numpy as jnp

import jax_grouped_gemm as jgg
from benchmarks.harness import check
from benchmarks.harness.cases import DISTRIBUTIONS, OPS, Case, Problem, select_shapes
from benchmarks.harness.command import Command, add_choices
from benchmarks.harness.inputs import Inputs, LatestInputs
from benchmarks.harness.measure import Workload, ragged_workload
from benchmarks.harness.peer import InPlaceCall, JaxPeer, Peer, Role, pinned_implementation
from benchmarks.harness.session import Job, Session
from benchmarks.peers.ours import product


class AddingPeer(JaxPeer):
    """A function of (accumulator, lhs, rhs, group_sizes) whose accumulator is donated."""

    def prepare(self, problem, start, *operands):
        call = InPlaceCall(self.function, jnp.copy(start), *operands)
        call.first = call.state + 0  # a copy, because the next call overwrites the sum
        return call


def peers(problem: Problem) -> list[Peer]:
    """Returns the kernel that adds, and the product with and without XLA's addition."""
    implementation = pinned_implementation()
    alone = product(problem, implementation)
    in_place = functools.partial(jgg.ragged_dot_accumulate, implementation=implementation)
    return [
        AddingPeer("ours", Role.OURS, in_place),
        AddingPeer("ours_then_add", Role.VARIANT, lambda total, *xs: total + alone(*xs)),
        JaxPeer("ours_product", Role.VARIANT, lambda total, *xs: alone(*xs), checked=False),
    ]


def work(case: Case, inputs: Inputs) -> Workload:
    problem = case.problem
    operands = inputs.operands(case)
    start = jax.random.normal(jax.random.key(case.seed), problem.out_shape, jnp.float32)
    expected = start + inputs.reference(case, operands)

    def judge(call: InPlaceCall) -> tuple[check.Error, bool]:
        error = check.compare(call.first, expected)
        del call.first
        return error, error.acceptable(problem)

    found = ragged_workload(case, (start, *operands), judge)
    return dataclasses.replace(
        found,
        case=f"{case.shape.name}/wgrad_add/{case.distribution}",
        description=found.description | {"op": "wgrad_add"},
        bytes=found.bytes + found.written_bytes,  # the accumulator is read too
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", nargs="+", default=["main"], metavar="NAME")
    add_choices(parser, "--distributions", DISTRIBUTIONS, ["random"])


def jobs(options: argparse.Namespace, session: Session) -> list[Job]:
    inputs = LatestInputs(lambda shape: Inputs(shape, "bfloat16", options.seed))

    def measure(case: Case) -> dict:
        of_case = work(case, inputs.of(case.shape))
        return session.compare(of_case, peers(case.problem), host=False)

    cases = [
        Case(shape, OPS["wgrad_f32"], distribution, seed=options.seed)
        for shape in select_shapes(["tiny"] if options.dry_run else options.shapes)
        for distribution in options.distributions
    ]
    return [Job(case.name, functools.partial(measure, case)) for case in cases]


COMMAND = Command("benchmarks.accumulate", __doc__, jobs, add_arguments)

if __name__ == "__main__":
    COMMAND.main()
