"""Checks, on request, of what group sizes and offsets hold when a program runs.

Ragged products take any integers: negative sizes count as zero, the running sum is cut at the
number of rows, rows that no group owns are zero. That is what makes them safe, and what hides a
mistake in the sizes.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax

from jax_grouped_gemm._src.arguments import checked_boolean


@dataclasses.dataclass(frozen=True)
class _Checks:
    unowned_rows: bool


# The context is part of the key of JAX's caches: a jitted function is traced again inside.
_context = jax.make_user_context(None)


@contextlib.contextmanager
def check_groups(*, unowned_rows: bool = False) -> Iterator[None]:
    """Context in which ragged products check their group sizes and offsets when they run.

    Sizes must not be negative, their sum must be the number of rows, and a group offset must leave
    all local groups inside the global ones. Outside of `jax.jit` a failed check raises at once.
    Inside of it, `jax.experimental.checkify` has to carry the errors out:

        with jgg.check_groups():
            error, y = checkify.checkify(jax.jit(layer))(x, weights)
        error.throw()

    Holds for `ragged_dot`, `ragged_dot_general`, `ragged_dot_accumulate`, `fp8_ragged_dot`, the
    scaled products and all that call them inside the context, Flax layers included. Costs a few
    small kernels a product. Can decorate a function.

    Args:
      unowned_rows: whether the sum may be less than the number of rows, as where rows are padding.

    Raises:
      checkify.JaxRuntimeError: by a product outside of `jax.jit`, or by `error.throw()`, with
        the sizes.
    """
    with _context(_Checks(checked_boolean("unowned_rows", unowned_rows))):
        yield


def check(
    group_sizes: jax.Array, num_rows: int, group_offset: jax.Array, num_local_groups: int
) -> None:
    """Makes the checks of the context, if there are any.

    Args:
      group_sizes: int32 [..., G].
      num_rows: m.
      group_offset: int32 [1].
      num_local_groups: g.
    """
    checks: _Checks | None = _context.value
    if checks is None:
        return
    from jax.experimental import checkify  # which brings Pallas with it

    checkify.check(
        jnp.all(group_sizes >= 0),
        "group_sizes must not be negative, got {sizes}",
        sizes=group_sizes,
    )
    # The sum saturates one past the rows, since a plain one could overflow.
    limit = num_rows + 1
    sizes = jnp.clip(group_sizes, 0, limit)
    sums = lax.associative_scan(lambda a, b: a + jnp.minimum(b, limit - a), sizes, axis=-1)
    total = sums[..., -1] if group_sizes.shape[-1] else jnp.zeros((), jnp.int32)
    rows = jnp.asarray(num_rows, jnp.int32)
    checkify.check(
        jnp.all(total <= num_rows),
        "group_sizes must not sum past the {rows} rows, got {sizes}",
        rows=rows,
        sizes=group_sizes,
    )
    if not checks.unowned_rows:
        checkify.check(
            jnp.all(total >= num_rows),
            "group_sizes must sum to the {rows} rows, got {sizes}; "
            "check_groups(unowned_rows=True) allows rows that no group owns",
            rows=rows,
            sizes=group_sizes,
        )
    last = group_sizes.shape[-1] - num_local_groups
    checkify.check(
        jnp.all((group_offset >= 0) & (group_offset <= last)),
        "group_offset must be between 0 and {last}, which leaves the local groups inside the "
        "global ones, got {offset}",
        last=jnp.asarray(last, jnp.int32),
        offset=group_offset,
    )
