"""Lets code that calls `jax.lax.ragged_dot` or tokamax use the kernels of this package.

- `replace_lax`: a context in which `jax.lax.ragged_dot` and `ragged_dot_general` run this package's
  functions; `replace_lax_always` replaces them in the whole process.
- `tokamax_ragged_dot`: an implementation to pass to `tokamax.ragged_dot`.
"""

# Replace `bind` of the primitive and not the functions, so that functions that were imported
# earlier, and traced equations that JAX evaluates again, use this package too. `bind` is not
# public, so check its operands and parameters before replacing it.

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jax_grouped_gemm._src.arguments import jax_ragged_dot_general
from jax_grouped_gemm._src.ragged.api import ragged_dot, ragged_dot_general

__all__ = ["replace_lax", "replace_lax_always", "tokamax_ragged_dot"]

_PARAMETERS = [
    "group_offset",
    "out_sharding",
    "precision",
    "preferred_element_type",
    "ragged_dot_dimension_numbers",
]
_NUMBERS = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (1,)), ((), ())),
    lhs_ragged_dimensions=(0,),
    rhs_group_dimensions=(0,),
)
# Each thread has its own value of this context. JAX traces a function again if the value changes,
# because it is part of the key of JAX's caches.
_is_replaced = jax.make_user_context(False)
_lock = threading.Lock()
# An attribute of this package's `bind`. `functools.wraps` copies it to wrappers of other packages.
_MARK = "_is_of_jax_grouped_gemm"


@contextlib.contextmanager
def replace_lax() -> Iterator[None]:
    """Returns a context in which `jax.lax.ragged_dot` and `ragged_dot_general` run this package.

    The context covers calls that this thread makes or traces inside, with their derivatives,
    `jax.vmap` and `jax.shard_map`, but not across `yield` or `await`. Functions that were jitted
    outside are traced again inside, but programs that were lowered, compiled or exported outside
    keep JAX's product. The context can decorate functions, but not generators or coroutines.

        with jgg.adapters.replace_lax():
            step(state, batch)

    Inside, both functions accept the arguments of `jax.lax`, and some that `jax.lax` refuses. They
    treat negative and too large sizes as `ragged_dot` does, and their error messages differ from
    JAX's. If no kernel can run, this package's pure JAX implementation runs. JAX's own
    implementation runs for calls that this package does not support. To export programs with
    kernels, pass `disabled_checks=jgg.EXPORT_DISABLED_CHECKS`.

    Raises:
      RuntimeError: this package does not know how the installed JAX builds these functions.
    """
    _intercept()
    with _is_replaced(True):
        yield


def replace_lax_always(replace: bool = True) -> None:
    """Switches the effect of `replace_lax` on or off, for all threads of the process.

    Args:
      replace: whether to replace the functions; False restores JAX's.

    Raises:
      TypeError: `replace` is not a boolean.
      RuntimeError: see `replace_lax`.
    """
    if not isinstance(replace, bool):
        raise TypeError(f"replace must be a boolean, got {replace!r}")
    _intercept()
    _is_replaced.set_global(replace)


def tokamax_ragged_dot(
    lhs: ArrayLike,
    rhs: ArrayLike,
    *,
    group_sizes: Any,
    ragged_dot_dimension_numbers: lax.RaggedDotDimensionNumbers | None = None,
    precision: lax.PrecisionLike = None,
    preferred_element_type: Any = None,
    group_offset: jax.Array | None = None,
    activation: Any = None,
    **options: Any,
) -> jax.Array:
    """Computes a ragged dot for tokamax, which calls it as an implementation.

        tokamax.ragged_dot(x, w, sizes, implementation=[jgg.adapters.tokamax_ragged_dot, "xla"])

    If no kernel can run, it computes the product in pure JAX. To use tokamax's own kernels in this
    case, pass this function only if `jgg.is_available()`.

    Args:
      lhs, rhs, precision, preferred_element_type, group_offset: see `ragged_dot_general`.
      group_sizes: an array, or tokamax's `GroupSizes`.
      ragged_dot_dimension_numbers: by default those of `ragged_dot`.
      activation: must be None.
      **options: must each be None.

    Returns:
      The product.

    Raises:
      NotImplementedError: an operand is quantised, or `activation` or an option is given. Then
        tokamax takes the next implementation.
    """
    given = [name for name, x in {"activation": activation, **options}.items() if x is not None]
    if given:
        raise NotImplementedError(f"jax_grouped_gemm takes no {' and no '.join(given)} of tokamax")
    for name, x in {"lhs": lhs, "rhs": rhs}.items():
        if not isinstance(x, (jax.Array, np.ndarray)):
            raise NotImplementedError(
                f"jax_grouped_gemm takes arrays from tokamax, got {name} of {type(x).__name__}"
            )
    return _product(
        lhs,
        rhs,
        jnp.asarray(getattr(group_sizes, "value", group_sizes)),
        ragged_dot_dimension_numbers or _NUMBERS,
        precision=precision,
        preferred_element_type=preferred_element_type,
        group_offset=group_offset,
    )


def _product(
    lhs: ArrayLike,
    rhs: ArrayLike,
    group_sizes: ArrayLike,
    ragged_dot_dimension_numbers: lax.RaggedDotDimensionNumbers,
    **options: Any,
) -> jax.Array:
    """Returns the product, if possible by `ragged_dot`, whose eager calls take half of the time."""
    if ragged_dot_dimension_numbers == _NUMBERS:
        return ragged_dot(lhs, rhs, group_sizes, **options)
    return ragged_dot_general(lhs, rhs, group_sizes, ragged_dot_dimension_numbers, **options)


@functools.cache
def _original() -> Any:
    """Returns the primitive of `jax.lax.ragged_dot_general`."""
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2, 2), (1, 2, 2))]
    sizes = jax.ShapeDtypeStruct((1,), jnp.int32)
    product = functools.partial(jax_ragged_dot_general, ragged_dot_dimension_numbers=_NUMBERS)
    # Hide the mesh of the context, because jax.lax infers no sharding over explicit axes.
    no_mesh = jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))
    with _is_replaced(False), no_mesh:
        equations = jax.make_jaxpr(product)(*arrays, sizes).eqns
    built = [(str(eqn.primitive), len(eqn.invars), sorted(eqn.params)) for eqn in equations]
    if [rest for _, *rest in built] != [[3, _PARAMETERS]]:
        raise RuntimeError(
            f"jax.lax.ragged_dot_general of JAX {jax.__version__} is built of {built} (primitives, "
            f"their operands and parameters); replace_lax supports one primitive of 3 operands and "
            f"the parameters {_PARAMETERS}. Call jax_grouped_gemm.ragged_dot instead."
        )
    return equations[0].primitive


def _intercept() -> None:
    with _lock:
        primitive = _original()
        bind = primitive.bind
        if hasattr(bind, _MARK):
            return

        @functools.wraps(bind)
        def bind_or_ours(*operands: Any, **params: Any) -> Any:
            if not _is_replaced.value:
                return bind(*operands, **params)
            # JAX computes calls that this package makes to `jax.lax`, and calls that it does not
            # support.
            with _is_replaced(False), contextlib.suppress(NotImplementedError):
                return _product(*operands, **params)
            return bind(*operands, **params)

        # Exclude this package, so that profiles and errors of XLA name lines of the user's code.
        from jax.extend import source_info_util  # late, because it is slow to import

        for path in (__file__, os.path.join(os.path.dirname(__file__), "_src", "")):
            source_info_util.register_exclusion(path)
        setattr(bind_or_ours, _MARK, True)
        primitive.bind = bind_or_ours
