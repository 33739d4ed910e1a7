"""Command line: weight gradients added to float32 accumulators, by the kernel and by XLA.

python -m benchmarks.accumulate --shapes main --output benchmarks/results/accumulate.json

`ours` adds in place; `ours_then_add` computes the product and has XLA add it, to an accumulator
that is donated too; `ours_product` is the product alone, into float32.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jax_grouped_gemm as jgg
from benchmarks import check
from benchmarks.cases import (
    DISTRIBUTIONS,
    OPS,
    Case,
    flops,
    select_shapes,
    unavoidable_bytes,
    written_bytes,
)
from benchmarks.inputs import Inputs, LatestInputs
from benchmarks.measure import Contender, measure_contenders, record
from benchmarks.peers.base import Call, Role, dimension_numbers, jax_call, on_gpu
from benchmarks.peers.ours import kernels_unavailable_reason
from benchmarks.session import Job, Session, add_options, open_session, use_dry_run

Adding = Callable[..., jax.Array]


class RunningSum(Call):
    """A call that takes the result of the one before it as its accumulator."""

    def __init__(self, add: Adding, accumulator: jax.Array, *operands: jax.Array):
        super().__init__(self._add)
        self._compiled = jax.jit(add, donate_argnums=0)
        self._operands = operands
        self._sum = self._compiled(accumulator, *operands)
        self.first = self._sum + 0  # a copy: the sum is given away

    def _add(self) -> jax.Array:
        self._sum = self._compiled(self._sum, *self._operands)
        return self._sum

    def wait(self, result: Any) -> None:
        """Returns when the device has finished: of earlier results, nothing is left."""
        jax.block_until_ready(self._sum)


def measure_sum(case: Case, inputs: Inputs, session: Session) -> dict:
    """A record of the results."""
    problem = case.problem
    operands = inputs.operands(case)
    start = jax.random.normal(jax.random.key(case.seed), problem.out_shape, jnp.float32)
    expected = start + inputs.reference(case, operands)
    implementation = "cuda" if on_gpu() else "reference"

    def product(lhs, rhs, group_sizes):
        return jgg.ragged_dot_general(
            lhs,
            rhs,
            group_sizes,
            dimension_numbers(problem),
            preferred_element_type=jnp.float32,
            implementation=implementation,
        )

    def then_add(accumulator, *operands):
        return accumulator + product(*operands)

    in_place = functools.partial(jgg.ragged_dot_accumulate, implementation=implementation)

    def checked(call: RunningSum) -> tuple[check.Error, bool]:
        error = check.compare(call.first, expected)
        del call.first
        return error, error.acceptable(problem)

    def contender(role: Role, add: Adding) -> Contender:
        def prepare() -> Call:
            return RunningSum(add, jnp.copy(start), *operands)

        return Contender(role, prepare, checked, kernels_unavailable_reason())

    results = measure_contenders(
        {
            "ours": contender(Role.OURS, in_place),
            "ours_then_add": contender(Role.VARIANT, then_add),
            "ours_product": Contender(
                Role.VARIANT,
                lambda: jax_call(jax.jit(product), *operands),
                None,
                kernels_unavailable_reason(),
            ),
        },
        session.recorder,
        rounds=session.options.rounds,
        flush=session.flush,
        seed=case.seed,
        measure_host=False,
    )
    return record(
        f"{case.shape.name}/wgrad_add/{case.distribution}",
        shape=dataclasses.asdict(case.shape),
        op="wgrad_add",
        distribution=case.distribution,
        dtype=case.dtype,
        out_dtype=problem.out_dtype,
        flops=flops(problem, case.group_sizes),
        # The accumulator is read too.
        bytes=unavoidable_bytes(problem, case.group_sizes) + written_bytes(problem),
        written_bytes=written_bytes(problem),
        results=results,
    )


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accumulate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser, rounds=12, time_limit=240)
    parser.add_argument("--shapes", nargs="+", default=["main"], metavar="NAME")
    parser.add_argument(
        "--distributions", nargs="+", default=["random"], choices=DISTRIBUTIONS, metavar="NAME"
    )
    options = parser.parse_args(arguments)
    if options.dry_run:
        use_dry_run(options)
        options.shapes = ["tiny"]
    return options


def plan_jobs(options: argparse.Namespace, session: Session) -> list[Job]:
    """A job a case."""
    inputs = LatestInputs(lambda shape: Inputs(shape, "bfloat16", options.seed))
    cases = [
        Case(shape, OPS["wgrad_f32"], distribution, seed=options.seed)
        for shape in select_shapes(options.shapes)
        for distribution in options.distributions
    ]
    return [
        Job(case.name, lambda case=case: measure_sum(case, inputs.of(case.shape), session))
        for case in cases
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point."""
    options = parse_arguments(arguments)
    command = ["benchmarks.accumulate", *(sys.argv[1:] if arguments is None else arguments)]
    with open_session(command, options) as session:
        session.measure(plan_jobs(options, session))


if __name__ == "__main__":
    main()
