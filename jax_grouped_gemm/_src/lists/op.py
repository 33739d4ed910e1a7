"""Operations on lists of problems, and the rules that products and updates share.

A problem has stacks of g matrices: the factors a and b, and c. Its result is alpha times the
product of the factors, plus beta times c, plus `diagonal` times the identity. The result is linear
in alpha, and affine in c and diagonal. The tangent consists of elementwise operations, and of
operations without c and diagonal, so that JAX transposes only operations without c and diagonal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from jax_grouped_gemm._src.arrays import at_least_float32
from jax_grouped_gemm._src.autodiff import is_zero, tangent_of
from jax_grouped_gemm._src.lists.scaling import per_matrix
from jax_grouped_gemm._src.op import Op
from jax_grouped_gemm._src.partition import Dims, whole


class Problem(NamedTuple):
    """The operands of one problem. An operand is None if the problems of the list lack it."""

    alpha: Any = None
    a: Any = None
    b: Any = None
    beta: Any = None
    c: Any = None
    diagonal: Any = None


OPTIONAL = ("alpha", "b", "beta", "c", "diagonal")
SHAPE_PARAMS = ("num_problems", *(f"has_{name}" for name in OPTIONAL))


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ListOp(Op):
    """An operation on a list of problems.

    The operands are the alphas of all problems, then all a, and so on in the order of `Problem`.

    Parameters of the primitive: num_problems; has_alpha, has_b, has_beta, has_c and has_diagonal,
    whether there are such operands; result_dtype; and the operation's own parameters.

    Attributes:
      per_problem: names of the parameters that are tuples with an entry for each problem.
      single_scales: whether scales may be [1], one number for all matrices of a stack.
    """

    operand_ranks: None = None
    multiple_results: bool = True
    dims: Callable[..., Dims] = dataclasses.field(default_factory=lambda: _dims)
    per_problem: tuple[str, ...] = ()
    single_scales: bool = False

    def bind_list(self, problems: Sequence[Problem], **params: Any) -> list[jax.Array]:
        """Binds the primitive; `params` has the parameters that do not follow from the operands."""
        operands = [x for column in zip(*problems, strict=True) for x in column if x is not None]
        flags = {f"has_{name}": getattr(problems[0], name) is not None for name in OPTIONAL}
        return self.bind(*operands, num_problems=len(problems), **flags, **params)

    def params_of(self, params: Mapping[str, Any], indices: Sequence[int]) -> dict[str, Any]:
        """Returns the parameters for some of the problems."""
        some = {name: tuple(params[name][i] for i in indices) for name in self.per_problem}
        return {**params, **some}


def _dims(operands, results, *, num_problems, **params) -> Dims:
    """Names dimensions: devices may divide the matrices of a stack, but not a scale of all."""
    dims = whole(operands, results)
    stacks = tuple(f"s{problem}" for problem in range(num_problems))

    def named(i, letters, x):
        problem = i % num_problems
        is_stack = x.shape[0] == results[problem].shape[0]
        return (stacks[problem], *letters[1:]) if is_stack else letters

    def all_named(every, arrays):
        return tuple(
            named(i, letters, x) for i, (letters, x) in enumerate(zip(every, arrays, strict=True))
        )

    return Dims(
        all_named(dims.operands, operands),
        all_named(dims.results, results),
        dims.whole,
        frozenset(stacks),
    )


def split(
    operands: Sequence[Any], params: Mapping[str, Any]
) -> tuple[list[Problem], dict[str, Any]]:
    """Returns the problems of flat operands, and the parameters that do not follow from them."""
    rest = {name: x for name, x in params.items() if name not in SHAPE_PARAMS}
    return problems_of(by_name(operands, params["num_problems"], present(**params))), rest


def problems_of(operands: Mapping[str, Sequence[Any]]) -> list[Problem]:
    """Returns problems from the operands by name, each a list with an entry for each problem."""
    columns = zip(*operands.values(), strict=True)
    return [Problem(**dict(zip(operands, factors, strict=True))) for factors in columns]


def by_name(operands: Sequence[Any], count: int, names: Sequence[str]) -> dict[str, Sequence[Any]]:
    """Splits the flat operands of `count` problems into a list for each of the `names`."""
    return {name: operands[i * count : (i + 1) * count] for i, name in enumerate(names)}


def present(**flags: Any) -> list[str]:
    """Returns, in order, the names of the operands, without those whose `has_` flag is False."""
    return [name for name in Problem._fields if flags.get(f"has_{name}", True)]


def register_jvp(
    op: ListOp,
    product_tangents: Callable[[Problem, Problem], Sequence[Problem]],
    place: Callable[..., jax.Array] = lambda scaled, outside, params: scaled,
) -> None:
    """Registers the tangent of an operation.

    Args:
      op: the operation.
      product_tangents: called as `product_tangents(problem, tangents)`, returns the problems
        without c whose sum is the tangent of the scaled product; their operands may be zeros.
      place: called as `place(scaled, outside, params)`. It returns `scaled` for the elements of the
        result that are sums of a product and beta C, and `outside` for the elements that are C
        itself. An `outside` of None means zeros.
    """

    def rule(primals, tangents, **params):
        problems, rest = split(primals, params)
        dots, _ = split(tangents, params)
        outs = op.bind_list(problems, **rest)
        sums: list[list[jax.Array]] = [[] for _ in outs]
        for terms in zip(*map(product_tangents, problems, dots), strict=True):
            live = [i for i, term in enumerate(terms) if not any(map(is_zero, term))]
            if live:
                products = op.bind_list([terms[i] for i in live], **op.params_of(rest, live))
                for i, product in zip(live, products, strict=True):
                    sums[i].append(product)
        for terms, problem, dot, out in zip(sums, problems, dots, outs, strict=True):
            if params["has_c"]:
                terms += _c_tangents(problem, dot, rest, place)
            if params["has_diagonal"] and not is_zero(dot.diagonal):
                terms.append(_on_diagonal(dot.diagonal, out))
        return outs, list(map(tangent_of, outs, sums))

    op.def_jvp(rule)


def _on_diagonal(scale: jax.Array, like: jax.Array) -> jax.Array:
    """Returns matrices shaped like `like`, with the matrix's scale on each diagonal."""
    on = jnp.eye(like.shape[-1], dtype=bool)[None]
    return jnp.where(on, per_matrix(scale, like.dtype), jnp.zeros_like(like))


def _c_tangents(problem, dot, params, place) -> list[jax.Array]:
    """Returns the tangents of the part of the result that depends on beta and c."""
    dtype = at_least_float32(params["result_dtype"])
    tangents = []
    if dot.beta is not None and not is_zero(dot.beta):
        scaled = per_matrix(dot.beta, dtype) * problem.c.astype(dtype)
        tangents.append(place(scaled, None, params))
    if not is_zero(dot.c):
        c_dot = dot.c.astype(dtype)
        beta = params["beta"] if problem.beta is None else per_matrix(problem.beta, dtype)
        tangents.append(place(beta * c_dot, c_dot, params))
    return [tangent.astype(params["result_dtype"]) for tangent in tangents]


def register_transpose(op: ListOp, **cotangents: Callable[..., Sequence[jax.Array]]) -> None:
    """Registers the transposition of an operation without c.

    Args:
      op: the operation.
      **cotangents: functions named alpha, a and b, which return the cotangents of the operand of
        that name. They are called as `alpha(cts, problems, params)`, with the results' cotangents
        `cts` and with problems that lack the operand.
    """

    def rule(cts, *operands, **params):
        if params["has_c"] or params["has_diagonal"]:
            raise NotImplementedError(
                f"{op.name} with c or a diagonal is not linear in its operands"
            )
        problems, rest = split(operands, params)
        found = []
        for name in present(**params):
            column: list[jax.Array | None] = [None] * len(cts)
            wanted = [
                i
                for i, (ct, problem) in enumerate(zip(cts, problems, strict=True))
                if ad.is_undefined_primal(getattr(problem, name)) and not is_zero(ct)
            ]
            if wanted:
                results = cotangents[name](
                    [cts[i] for i in wanted],
                    [problems[i] for i in wanted],
                    op.params_of(rest, wanted),
                )
                for i, result in zip(wanted, results, strict=True):
                    column[i] = result
            found += column
        return found

    op.def_transpose(rule)


Unfold = Callable[[jax.Array], jax.Array]


def register_batching(
    op: ListOp, fold: Callable[..., tuple[Problem, Unfold] | None] = lambda *_: None
) -> None:
    """Registers vmap: a mapped axis becomes part of each problem, in the same launch.

    Args:
      op: the operation.
      fold: called as `fold(problem, dims, size, params)` for a problem with a mapped axis of
        `size`. It returns the problem with this axis folded in, and a function that unfolds the
        result. If it returns None, the axis becomes part of the stack.
    """

    def rule(operands, dims, **params):
        problems, rest = split(operands, params)
        problem_dims, _ = split(dims, params)
        folded, unfolds = [], []
        for i, (problem, mapped) in enumerate(zip(problems, problem_dims, strict=True)):
            size = _mapped_size(problem, mapped)
            unfold = None
            if size is not None:
                problem, unfold = fold(
                    problem, mapped, size, op.params_of(rest, [i])
                ) or _fold_into_stack(problem, mapped, size, op.single_scales)
            folded.append(problem)
            unfolds.append(unfold)
        outs = [
            unfold(out) if unfold else out
            for unfold, out in zip(unfolds, op.bind_list(folded, **rest), strict=True)
        ]
        # An entry without mapped operands gets no new axis.
        return outs, [0 if unfold else None for unfold in unfolds]

    op.def_batching(rule)


def _mapped_size(problem: Problem, dims: Problem) -> int | None:
    """Returns the size of the axis over which vmap maps a problem, None if it does not map it."""
    sizes = (x.shape[dim] for x, dim in zip(problem, dims, strict=True) if dim is not None)
    return next(sizes, None)


def _fold_into_stack(
    problem: Problem, dims: Problem, size: int, single_scales: bool
) -> tuple[Problem, Unfold]:
    """Makes the stack `size` times as long, and broadcasts operands that are not mapped."""

    def fold(x, dim, is_scale):
        if x is None or (is_scale and single_scales and dim is None and x.shape == (1,)):
            return x
        x = jnp.broadcast_to(x, (size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)
        if is_scale:
            # A number for the whole stack becomes one for each of its matrices.
            x = jnp.broadcast_to(x, (size, g))
        return x.reshape(size * x.shape[1], *x.shape[2:])

    g = problem.a.shape[1 if dims.a == 0 else 0]
    folded = Problem(
        alpha=fold(problem.alpha, dims.alpha, is_scale=True),
        a=fold(problem.a, dims.a, is_scale=False),
        b=fold(problem.b, dims.b, is_scale=False),
        beta=fold(problem.beta, dims.beta, is_scale=True),
        c=fold(problem.c, dims.c, is_scale=False),
        diagonal=fold(problem.diagonal, dims.diagonal, is_scale=True),
    )
    return folded, lambda out: out.reshape(size, g, *out.shape[1:])
