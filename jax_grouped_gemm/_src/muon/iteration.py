"""Newton-Schulz iterations of lists of stacks of matrices, in grouped launches.

Both methods apply the polynomials x (a + b x^2 + c x^4) to the singular values of matrices X. The
formulas here are for wide X. Tall X are not transposed: X^T X and X P replace X X^T and P X. The
standard method multiplies X in every step. Gram Newton-Schulz
(https://github.com/Dao-AILab/gram-newton-schulz) iterates on small square matrices instead, which
are polynomials of R = X X^T. These matrices commute, so their products are symmetric, and half of
each product is computed. The steps are divided into segments. Each segment computes R from X, and
multiplies X once, at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_grouped_gemm._src.arguments import Implementation
from jax_grouped_gemm._src.arrays import at_least_float32
from jax_grouped_gemm._src.lists.grouped_gemm.api import grouped_gemm
from jax_grouped_gemm._src.lists.rank_k.api import update
from jax_grouped_gemm._src.muon.coefficients import Triple

Stacks = list[jax.Array]
Scales = list[jax.Array]  # an array [g] for each stack


class Products:
    """The products of a call; the bits of a result depend only on its own matrices."""

    def __init__(self, implementation: Implementation, is_tall: Sequence[bool]):
        self._implementation = implementation
        self._is_tall = is_tall

    def _update(self, factors: dict[str, Any], c: Any = None, **options: Any) -> Stacks:
        """Computes both triangles. Tiles stay whole, as cuts depend on the number of matrices."""
        results = update(
            factors,
            c,
            symmetrize_output=True,
            whole_tiles=True,
            implementation=self._implementation,
            **options,
        )
        return list(results)

    def gram(self, xs: Stacks) -> Stacks:
        """Returns X X^T."""
        outs = list(xs)
        for is_tall in (False, True):
            own = [i for i, tall in enumerate(self._is_tall) if tall == is_tall]
            if own:
                grams = self._update({"a": [xs[i] for i in own]}, transpose=is_tall)
                for i, gram in zip(own, grams, strict=True):
                    outs[i] = gram
        return outs

    def polynomial(self, rs: Stacks, triple: Triple, scales: Scales | None = None) -> Stacks:
        """Returns a I + b R + c R^2. With `scales`, R is first multiplied by their squares."""
        a, b, c = triple
        if scales is None:
            return self._update({"a": rs}, rs, alpha=c, beta=b, diagonal=a)
        alpha, beta = ([factor * s**power for s in scales] for factor, power in ((c, 4), (b, 2)))
        return self._update({"a": rs}, rs, alpha=alpha, beta=beta, diagonal=a)

    def multiply(self, ps: Stacks, qs: Stacks, scales: Scales | None = None) -> Stacks:
        """Returns P Q, times `scales`; P and Q are polynomials of one matrix, which commute."""
        return self._update({"a": ps, "b": qs}, symm=True, alpha=1.0 if scales is None else scales)

    def apply(self, ps: Stacks, xs: Stacks, scales: Scales | None = None) -> Stacks:
        """Returns P X, times `scales`."""
        pairs = [
            (x, p) if tall else (p, x) for p, x, tall in zip(ps, xs, self._is_tall, strict=True)
        ]
        return grouped_gemm(
            [left for left, _ in pairs],
            [right for _, right in pairs],
            alpha=1.0 if scales is None else scales,
            implementation=self._implementation,
        )

    def traces(self, rs: Stacks) -> Scales:
        """Sums each diagonal, in an order that does not depend on the number of matrices."""
        rows = [jnp.diagonal(r, axis1=1, axis2=2)[:, None] for r in rs]
        sums = grouped_gemm(
            rows,
            [jnp.ones_like(row).swapaxes(1, 2) for row in rows],
            preferred_element_type=at_least_float32(rs[0].dtype),
            implementation=self._implementation,
        )
        return [x[:, 0, 0] for x in sums]


# Returns the scales of X before the first step, given R = X X^T.
Precondition = Callable[[Products, Stacks], Scales]


def frobenius(eps: Scales) -> Precondition:
    """Divides X by its Frobenius norm plus `eps`, from the trace of R.

    XLA's order of adding squares depends on the number of matrices; the kernels' order does not.
    """

    def scales(products: Products, rs: Stacks) -> Scales:
        # A matrix of zeros stays zero.
        return [
            jnp.where(trace > 0, 1 / (jnp.sqrt(trace) + own), 1)
            for trace, own in zip(products.traces(rs), eps, strict=True)
        ]

    return scales


def schatten(_: Products, rs: Stacks) -> Scales:
    """Divides X by its Schatten-4 norm, the root of the Frobenius norm of R."""
    norms = [jnp.linalg.norm(r.astype(at_least_float32(r.dtype)), axis=(-2, -1)) for r in rs]
    return [jnp.where(norm > 0, jax.lax.rsqrt(norm), 1) for norm in norms]


def standard(
    xs: Stacks,
    triples: Sequence[Triple],
    products: Products,
    precondition: Precondition | None = None,
) -> Stacks:
    """Runs the steps X <- (a I + b R + c R^2) X with R = X X^T."""
    for step, triple in enumerate(triples):
        rs = products.gram(xs)
        scales = precondition(products, rs) if precondition and step == 0 else None
        xs = products.apply(products.polynomial(rs, triple, scales), xs, scales)
    return xs


def gram(
    xs: Stacks,
    segments: Sequence[Sequence[Triple]],
    products: Products,
    precondition: Precondition | None = None,
) -> Stacks:
    """Runs the steps of each segment on R = X X^T, and then multiplies X once."""
    for segment, triples in enumerate(segments):
        rs, qs = products.gram(xs), None
        scales = precondition(products, rs) if precondition and segment == 0 else None
        for step, triple in enumerate(triples):
            own = scales if step == 0 else None
            ps = products.polynomial(rs, triple, own)
            if step < len(triples) - 1:
                twice = None if own is None else [s**2 for s in own]
                rs = products.multiply(products.multiply(rs, ps), ps, twice)
            qs = ps if qs is None else products.multiply(qs, ps)
        if qs is not None:
            xs = products.apply(qs, xs, scales)
    return xs


def traced(xs: Stacks, steps: jax.Array, triple: Triple, products: Products) -> Stacks:
    """Runs `standard` for a traced number of steps."""
    return jax.lax.fori_loop(0, steps, lambda _, xs: standard(xs, [triple], products), xs)
