"""Plans of the operations of an MLP: one fused kernel, or ragged products and XLA's passes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jax_grouped_gemm._src.arrays import round_up
from jax_grouped_gemm._src.device import H200, Target
from jax_grouped_gemm._src.explain import explain
from jax_grouped_gemm._src.invariance import is_invariant
from jax_grouped_gemm._src.mlp import in_place
from jax_grouped_gemm._src.mlp.kernels import (
    DOWN_WEIGHTS_KERNELS,
    FORWARD_KERNELS,
    GRADIENT_KERNELS,
    PAIRED_KERNELS,
    WEIGHTS_KERNELS,
)
from jax_grouped_gemm._src.mlp.operands import (
    DownOperands,
    DownWeightsOperands,
    ExpertWeights,
    GradientOperands,
    MlpOperands,
    PairedWeightsOperands,
)
from jax_grouped_gemm._src.mlp.problem import MlpProblem, unsuitable_operands
from jax_grouped_gemm._src.op import Planner, op_named
from jax_grouped_gemm._src.plan import (
    AS_ASKED,
    COMPOSED,
    XLA,
    Plan,
    TiledKernel,
    able,
    choose,
    passed_over,
    refusals,
)
from jax_grouped_gemm._src.quantized.plan import TALL_TILE, PackedProblem
from jax_grouped_gemm._src.quantized.plan import plan_packed as plan_packed_product
from jax_grouped_gemm._src.ragged.plan import contracting, plan_product
from jax_grouped_gemm._src.ragged.problem import LEAST_BYTES, workspace_bytes
from jax_grouped_gemm._src.ragged.tiles import ALL_ROWS

SLAB_COLUMNS = 64  # columns of a matrix that kernels load at a time

# Columns up to which the weight gradients of gate and up are faster as one product than as two, by
# 1 to 11 % (docs/notes/moe.md). But one product keeps both gradients of the hidden layer until both
# results are written. With two products, XLA may put a result into the place of a gradient.
PAIRED_COLUMNS = 2048


@dataclasses.dataclass(frozen=True)
class MlpPlan(Plan[MlpProblem]):
    """How one operation of an MLP runs on a device of compute capability 9.0.

    One kernel computes it, or it is `COMPOSED` of ragged products and XLA's passes.

    Attributes:
      epilogue: what the fused kernel does to its accumulators, in words.
      gather: how the kernel gets the rows of tokens: "in place", where the kernel reads them from
        the tokens; "before", by a kernel that copies them; empty if x has the rows.
      target: the device.
      packed: the plans of the products of packed matrices: of gate and up, and of down.
    """

    epilogue: str = ""
    gather: in_place.Gather = ""
    target: Target = H200
    packed: tuple[Plan[PackedProblem], ...] = ()

    def compose(self, *operands: jax.Array) -> Any:
        """Computes the operation as ragged products."""
        return op_named(self.problem.op).reference(*operands, **self.problem.params)

    @functools.cached_property
    def products(self) -> tuple[Plan[Any], ...]:
        """The plans of the ragged products that run instead of a fused kernel."""
        if self.kernel_problem is not None:
            return ()
        operands = jax.tree.leaves(self.problem.operands)
        count = self.target.multiprocessors
        return explain(self.compose, *operands, multiprocessors=count).plans

    def __str__(self) -> str:
        lines = [super().__str__()]
        if self.gather:
            lines.append(f"rows of tokens are read {_GATHERS[self.gather]}")
        for product in self.products:
            lines += [f"- {line.strip()}" for line in str(product).splitlines()[:1]]
        return "\n   ".join(lines)

    def describe_launch(self) -> str:
        launch = f"tile {self.tile}, workspace {self.workspace_bytes} bytes"
        return f"{launch}\n   epilogue: {self.epilogue}"


def plan_mlp(problem: MlpProblem, target: Target) -> MlpPlan:
    """Plans an operation: with a kernel, or composed where no kernel runs it."""
    fusion = FUSIONS[problem.op]
    plan = functools.partial(MlpPlan, problem, target=target)
    if problem.params["implementation"] == "xla":
        return plan(XLA, AS_ASKED)
    if reason := unfused_reason(problem):
        return plan(COMPOSED, reason)
    kernel, asked = _kernel(fusion.kernels, problem), problem.params["tile_choices"].forward
    return fusion.finish(
        plan(
            kernel,
            kernel_problem=problem,
            workspace_bytes=0 if kernel.schedule == "few_rows" else LEAST_BYTES,
            epilogue=fusion.epilogue(problem),
            passed_over=() if asked else passed_over(refusals(fusion.kernels, problem), kernel),
        )
    )


def _gated_epilogue(problem: MlpProblem[MlpOperands]) -> str:
    operands, params = problem.operands, problem.params
    kept = ", gate and up kept" if params["residuals"] else ""
    return _epilogue(operands.experts, operands.weights, params["activation"]) + kept


def _epilogue(experts: ExpertWeights, weights: Any, activation: Any) -> str:
    """Describes the epilogue of the sums of gate and up."""
    gate, up = " + b0" * (experts.b0 is not None), " + b1" * (experts.b1 is not None)
    factors = [f"{activation}(gate{gate})"]
    if experts.has_up:
        factors.append(f"(up{up})" if up else "up")
    factors += ["weights"] * (weights is not None)
    return " * ".join(factors)


def _gathering(plan: MlpPlan) -> MlpPlan:
    """Returns the plan of a hidden layer, with `gather` set."""
    problem: MlpProblem[MlpOperands] = plan.problem
    reads = _has_few_rows(problem) or in_place.in_forward(problem)
    return dataclasses.replace(plan, gather=in_place.gather(problem.operands.rows, reads))


def plan_packed(problem: MlpProblem[MlpOperands], target: Target) -> MlpPlan:
    """Plans an MLP of packed matrices, which kernels compute."""
    operands, params = problem.operands, problem.params
    plans = tuple(
        plan_packed_product(product, target, params["implementation"])
        for product in operands.packed_products
    )
    return MlpPlan(
        problem,
        plans[0].kernel,
        kernel_problem=problem,
        grid=plans[0].grid,
        workspace_bytes=max(plan.workspace_bytes for plan in plans),
        notes=tuple(
            f"{name}: {plan.kernel.name}, {plan.prediction}"
            for name, plan in zip(("gate and up", "down"), plans, strict=False)
        ),
        epilogue=_epilogue(operands.experts, operands.weights, params["activation"]),
        gather=in_place.gather(operands.rows, reads_in_place=plans[0].tile != TALL_TILE),
        target=target,
        packed=plans,
    )


def _biased_epilogue(problem: MlpProblem[DownOperands]) -> str:
    biased = " + bo" if problem.operands.weights is None else " + weights * bo"
    return "hidden wo" + biased * (problem.operands.bo is not None)


def _gradient_epilogue(problem: MlpProblem[GradientOperands]) -> str:
    of, times = ("gate", "") if problem.operands.up is None else ("gate, up", " * up")
    return f"gradients of {of} and weights, {problem.params['activation']}(gate){times} again"


def _paired_weights(plan: MlpPlan) -> MlpPlan:
    """Completes the plan of the gradients of gate and up."""
    given, (_, kernel) = plan.problem.operands, plan.launched
    columns = given.columns
    reads = columns <= in_place.GRADIENT_COLUMNS
    both = 2 * round_up(columns, kernel.tile.tile_n)
    return _weights(plan, columns, both, in_place.gather(given.rows, reads))


def _gathering_dy(plan: MlpPlan) -> MlpPlan:
    """Returns the plan of the gradient of hidden, with `gather` set."""
    given, activation = plan.problem.operands, plan.problem.params["activation"]
    reads = given.up is not None and in_place.has_plain_gradient(activation)
    return dataclasses.replace(plan, gather=in_place.gather(given.rows, reads))


def _down_weights(plan: MlpPlan) -> MlpPlan:
    """Completes the plan of the gradient of wo from dy in place."""
    columns = plan.problem.operands.columns
    return _weights(plan, columns, columns, "in place")


def _weights(plan: MlpPlan, columns: Any, all_columns: Any, gather: in_place.Gather) -> MlpPlan:
    """Completes the plan of gradients of `columns` columns each, or composes it if XLA is faster.

    The kernel has the workspace of one product of `all_columns` columns.
    """
    problem, (_, kernel) = plan.problem, plan.launched
    one = plan_product(contracting, *_one_product(problem, columns), plan.target)
    if one.kernel == ALL_ROWS:
        return MlpPlan(problem, COMPOSED, one.reason, target=plan.target)
    whole = contracting(*_one_product(problem, all_columns)).problem
    workspace = workspace_bytes(whole, kernel, plan.target)
    return dataclasses.replace(plan, gather=gather, workspace_bytes=workspace)


def _one_product(
    problem: MlpProblem[PairedWeightsOperands | DownWeightsOperands], columns: Any
) -> tuple[list[Any], dict[str, Any]]:
    """Returns the operands and parameters of a weight gradient of `columns` columns."""
    x, rows = problem.operands.rows.x, problem.operands.rows.num_rows
    avals = [
        jax.ShapeDtypeStruct((rows, x.shape[1]), x.dtype),
        jax.ShapeDtypeStruct((rows, columns), x.dtype),
        *problem.operands.groups.indices,
    ]
    layouts = dict(transpose_lhs=False, transpose_rhs=False, preferred_element_type=x.dtype)
    params = problem.params
    return avals, {**params, **layouts, **params["tile_choices"].params("wgrad")}


def _kernel(table: Sequence[TiledKernel], problem: MlpProblem) -> TiledKernel:
    """Returns the kernel to take: the first if no kernel has the forward tile that is asked for."""
    asked = problem.params["tile_choices"].forward if table is FORWARD_KERNELS else None
    if asked is not None:
        return next((kernel for kernel in table if kernel.tile == asked), table[0])
    reasons = refusals(table, problem, problem.params["implementation"])
    return choose(able(reasons), problem, None)


def is_fused(problem: MlpProblem) -> bool:
    """Whether one kernel computes a problem. Only shapes matter, because tracing depends on it."""
    return problem.params["implementation"] != "xla" and not unfused_reason(problem)


def _has_few_rows(problem: MlpProblem) -> bool:
    return _kernel(FORWARD_KERNELS, problem).schedule == "few_rows"


def _may_take_few_rows(problem: MlpProblem) -> bool:
    """Whether the kernel for few rows may run. It may round differently than operations for more
    rows, because XLA's elementwise passes give other bits than an epilogue."""
    return _has_few_rows(problem) and not is_invariant(problem.params["implementation"])


def unfused_reason(problem: MlpProblem) -> str:
    """Returns why no fused kernel computes a problem, an empty string if one does."""
    fusion = FUSIONS[problem.op]
    if not fusion.kernels:
        return "no kernel computes tangents, only gradients"
    return unsuitable_operands(problem, fusion.kernels[0]) or fusion.unfused(problem)


def _unfused_gated(problem: MlpProblem[MlpOperands]) -> str:
    wi = problem.operands.experts.wi
    if wi is None or not wi.shape[2] % (2 * SLAB_COLUMNS) or _may_take_few_rows(problem):
        return ""
    return (
        f"gate and up in one matrix {list(wi.shape)} need a multiple of {SLAB_COLUMNS} columns each"
    )


def _unfused_biased(problem: MlpProblem[DownOperands]) -> str:
    has_bias = problem.operands.bo is not None
    few_rows = _may_take_few_rows(problem) if has_bias else _has_few_rows(problem)
    return "" if few_rows else "the ragged product has a kernel for groups of this many rows"


def _unfused_paired_weights(problem: MlpProblem[PairedWeightsOperands]) -> str:
    columns, asked = problem.operands.columns, problem.params["tile_choices"].wgrad
    if columns > PAIRED_COLUMNS:
        return f"two products of {columns} columns are as fast, and may take less memory"
    is_compiled = asked in (None, PAIRED_KERNELS[0].tile)
    return "" if is_compiled else f"no kernel for both has the tile {asked}"


@dataclasses.dataclass(frozen=True)
class Fusion:
    """An operation of an MLP that one kernel may compute.

    Attributes:
      kernels: the kernel table of the operation.
      epilogue: what a kernel does to its sums, in words.
      unfused: why no kernel computes a problem with suitable operands, empty if one does.
      finish: completes a plan with a kernel.
    """

    kernels: tuple[TiledKernel, ...] = ()
    epilogue: Callable[[Any], str] = lambda problem: ""
    unfused: Callable[[Any], str] = lambda problem: ""
    finish: Callable[[MlpPlan], MlpPlan] = lambda plan: plan


FUSIONS = {
    "gated_ragged_dot": Fusion(FORWARD_KERNELS, _gated_epilogue, _unfused_gated, _gathering),
    "biased_ragged_dot": Fusion(FORWARD_KERNELS, _biased_epilogue, _unfused_biased),
    "gated_ragged_dot_transpose": Fusion(
        GRADIENT_KERNELS, _gradient_epilogue, finish=_gathering_dy
    ),
    "paired_ragged_dot": Fusion(PAIRED_KERNELS, lambda problem: "none, two products in one sum"),
    "paired_weight_gradients": Fusion(
        WEIGHTS_KERNELS,
        lambda problem: "none, two results",
        _unfused_paired_weights,
        _paired_weights,
    ),
    "down_weight_gradient": Fusion(
        DOWN_WEIGHTS_KERNELS, lambda problem: "none, stored as its transpose", finish=_down_weights
    ),
    "ragged_mlp_tangent": Fusion(),
}


def planner(op: str, plan_of: Callable[[Any, Target], MlpPlan] = plan_mlp) -> Planner:
    """Returns the planner of the primitive `op`."""

    def plan(avals: Sequence[Any], params: Mapping[str, Any], target: Target) -> MlpPlan:
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]
        return plan_of(MlpProblem(op, params["tree"].unflatten(shapes), params), target)

    return plan


_GATHERS = {"before": "by a kernel before", "in place": "where they are"}
