"""Newton-Schulz iterations of lists of stacks of matrices, in grouped launches.

Both methods apply the polynomials x (a + b x^2 + c x^4) to the singular values of matrices X, which
are described as wide. Tall ones stay as they are stored: they have X^T X for X X^T and X P for P X.
The standard one multiplies X in every step. Gram Newton-Schulz
(https://github.com/Dao-AILab/gram-newton-schulz) iterates on small square matrices instead, which
are polynomials of R = X X^T: they commute, so that all products are symmetric and half of each is
computed. X is multiplied once a segment.
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
Scales = list[jax.Array]  # [g] of each stack


class Products:
    """The products of one call, with bits that depend on each matrix alone."""

    def __init__(self, implementation: Implementation, is_tall: Sequence[bool]):
        self._implementation = implementation
        self._is_tall = is_tall

    def _update(self, factors: dict[str, Any], c: Any = None, **options: Any) -> Stacks:
        """Both triangles. No tile is cut: where it is depends on how many there are."""
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
        """X X^T."""
        outs = list(xs)
        for is_tall in (False, True):
            own = [i for i, tall in enumerate(self._is_tall) if tall == is_tall]
            if own:
                grams = self._update({"a": [xs[i] for i in own]}, transpose=is_tall)
                for i, gram in zip(own, grams, strict=True):
                    outs[i] = gram
        return outs

    def polynomial(self, rs: Stacks, triple: Triple) -> Stacks:
        """a I + b R + c R^2."""
        a, b, c = triple
        return self._update({"a": rs}, rs, alpha=c, beta=b, diagonal=a)

    def multiply(self, ps: Stacks, qs: Stacks) -> Stacks:
        """P Q, of polynomials of one matrix, which commute."""
        return self._update({"a": ps, "b": qs}, symm=True)

    def apply(self, ps: Stacks, xs: Stacks, scales: Scales | None = None) -> Stacks:
        """P X, times a scale for each matrix if there are any."""
        pairs = [
            (x, p) if tall else (p, x) for p, x, tall in zip(ps, xs, self._is_tall, strict=True)
        ]
        return grouped_gemm(
            [left for left, _ in pairs],
            [right for _, right in pairs],
            alpha=1.0 if scales is None else scales,
            implementation=self._implementation,
        )


# Scales X before the first step, given R: returns the scales, and R of the scaled X.
Precondition = Callable[[Stacks], tuple[Scales, Stacks]]


def schatten(rs: Stacks) -> tuple[Scales, Stacks]:
    """Divides X by its Schatten-4 norm, the root of the Frobenius norm of R."""
    wide = [r.astype(at_least_float32(r.dtype)) for r in rs]
    # A matrix of zeros stays one.
    norms = [jnp.linalg.norm(r, axis=(-2, -1), keepdims=True) for r in wide]
    inverses = [jnp.where(norm > 0, 1 / norm, 1) for norm in norms]
    scaled = [
        (r * inverse).astype(x.dtype) for r, inverse, x in zip(wide, inverses, rs, strict=True)
    ]
    return [jnp.sqrt(inverse[:, 0, 0]) for inverse in inverses], scaled


def standard(
    xs: Stacks,
    triples: Sequence[Triple],
    products: Products,
    precondition: Precondition | None = None,
) -> Stacks:
    """Steps X <- (a I + b R + c R^2) X with R = X X^T."""
    for triple in triples:
        rs, scales = products.gram(xs), None
        if precondition:
            scales, rs = precondition(rs)
            precondition = None
        xs = products.apply(products.polynomial(rs, triple), xs, scales)
    return xs


def gram(
    xs: Stacks,
    segments: Sequence[Sequence[Triple]],
    products: Products,
    precondition: Precondition | None = None,
) -> Stacks:
    """The same steps of each segment on R = X X^T, then one product with X."""
    for triples in segments:
        if len(triples) < 2:
            # Of one step both methods are the same.
            xs = standard(xs, triples, products, precondition)
            precondition = None
            continue
        rs, scales = products.gram(xs), None
        if precondition:
            scales, rs = precondition(rs)
            precondition = None
        qs: Stacks | None = None
        for step, triple in enumerate(triples):
            ps = products.polynomial(rs, triple)
            if step < len(triples) - 1:
                rs = products.multiply(products.multiply(rs, ps), ps)
            qs = ps if qs is None else products.multiply(qs, ps)
        assert qs is not None
        xs = products.apply(qs, xs, scales)
    return xs


def traced(xs: Stacks, steps: jax.Array, triple: Triple, products: Products) -> Stacks:
    """`standard`, of a traced number of steps."""
    return jax.lax.fori_loop(0, steps, lambda _, xs: standard(xs, [triple], products), xs)
