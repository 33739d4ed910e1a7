"""The kernels for lists of problems, one family for each dtype and precision of operands."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_grouped_gemm._src.lists.grouped_gemm import plan, problem
from jax_grouped_gemm._src.lists.rank_k import plan as rank_k_plan
from jax_grouped_gemm._src.lists.rank_k.primitive import using_tile
from jax_grouped_gemm._src.plan import TiledKernel
from tests.support.dtypes import BF16, C64, C128, F16, F32, F64
from tests.support.float32_errors import PRODUCT_ERROR
from tests.support.products import List, draw
from tests.support.updates import Update, check_double, check_real, triangle


@dataclass(frozen=True)
class Family:
    """The operands of one family of kernels, and how exact its results are."""

    dtype: Any
    precision: str | None = None

    def __repr__(self) -> str:
        name = np.dtype(self.dtype).name
        return f"{name}-{self.precision}" if self.precision else name

    @property
    def is_double(self) -> bool:
        """Whether the FP64 tensor cores compute the products."""
        return self in DOUBLE

    @property
    def options(self) -> dict[str, Any]:
        """The options of a call that make this family run."""
        options = dict(implementation="cuda")
        return options | dict(precision=self.precision) if self.precision else options

    @property
    def kernels(self) -> list[Kernel]:
        """The kernels of the family, one for each tile."""
        dtype = np.dtype(self.dtype).name
        return [Kernel(self, choice) for choice in plan.TILES.compiled if dtype in choice.lhs]

    @property
    def schedulers(self) -> tuple[str, ...]:
        """The schedulers of `grouped_gemm` that differ for this family."""
        return problem.SCHEDULERS[-1:] if self.is_double else problem.SCHEDULERS

    @property
    def scale_dtype(self) -> Any:
        """The dtype of alpha and beta."""
        return self.dtype if self.is_double else F32

    def unpadded(self, *sides: int) -> tuple[int, ...]:
        """Returns the sides, rounded to multiples of 8 if TMA loads the operands."""
        return sides if self.is_double else tuple(8 * round(side / 8) for side in sides)

    def draw(self, rng: np.random.Generator, shape) -> np.ndarray:
        """Returns a random operand."""
        return draw(rng, shape, self.dtype)

    def scales(self, rng: np.random.Generator, shape=()) -> np.ndarray:
        """Returns random alphas or betas, which are complex if operands are."""
        return draw(rng, shape, self.scale_dtype)

    def number(self, rng: np.random.Generator) -> float | complex:
        """Returns a random Python number that the kernel takes without rounding."""
        return np.asarray(self.scales(rng)).astype(self.scale_dtype).item()

    def check_list(self, problems: List, outs) -> None:
        """Asserts that the results of a list of products are right."""
        if self.is_double:
            assert all(out.dtype == self.dtype for out in outs)
            problems.check_double(outs)
        else:
            problems.check(outs, **self._errors)

    def check_update(self, update: Update, out, a, b, c=None, **options) -> None:
        """Asserts that the result [g, n, n] of an update is right, in both triangles."""
        if self.is_double:
            check_double(update, out, a, b, c, **options)
        else:
            check_real(update, out, a, b, c, **options, **self._errors)

    @property
    def _errors(self) -> dict[str, float]:
        return dict(product_error=PRODUCT_ERROR[self.precision]) if self.precision else {}


SIXTEEN_BITS = Family(BF16), Family(F16)
FLOAT32 = Family(F32, "default"), Family(F32, "highest")
DOUBLE = Family(F64), Family(C64), Family(C128)
# Only one of the two 16-bit families is here. Tests in which the two may differ name both.
TENSOR_FLOAT = (SIXTEEN_BITS[0], *FLOAT32)
FAMILIES = (*TENSOR_FLOAT, *DOUBLE)


@dataclass(frozen=True)
class Kernel:
    """One tile of a family."""

    family: Family
    choice: TiledKernel

    def __repr__(self) -> str:
        return f"{self.family}-{self.choice.tile.tile_n}"


def label(parameter) -> str | None:
    """Returns the name of a parameter in a test's id, or None to leave the name to pytest."""
    return repr(parameter) if isinstance(parameter, Family | Kernel | Update) else None


def each(*families: Family):
    """Parametrises a test over families."""
    return pytest.mark.parametrize("family", families, ids=label, indirect=True)


def each_kernel(*families: Family):
    """Parametrises a test over the tiles of families. Plans then have only this tile."""
    kernels = [kernel for family in families for kernel in family.kernels]
    return pytest.mark.parametrize("family", kernels, ids=label, indirect=True)


@contextlib.contextmanager
def use(parameter: Family | Kernel):
    """Yields the family, in x64 if it is double. For a `Kernel`, plans have only its tile."""
    family = parameter.family if isinstance(parameter, Kernel) else parameter
    with pytest.MonkeyPatch.context() as patch, jax.enable_x64(family.is_double):
        if isinstance(parameter, Kernel):
            patch.setattr(plan, "TILES", plan.TILES._replace(compiled=[parameter.choice]))
        yield family


@contextlib.contextmanager
def rank_k_tile(name: Literal["wide", "fine"] | None):
    """Makes 16-bit updates take the named tile, or the one that the plan chooses if None."""
    tiles = {None: None, "wide": rank_k_plan.RANK_K_TILE, "fine": rank_k_plan.FINE_TILE}
    with using_tile(tiles[name]):
        yield


def run_list(family: Family, problems: List, **options) -> list[jax.Array]:
    """Returns the results, in memory that held NaN, so that unwritten elements are noticed."""
    # All bits set are a NaN in every dtype.
    size = problems.num_results() * (16 if family.is_double else 4)
    jax.block_until_ready(jnp.full(size, 0xFF, jnp.uint8))
    return problems(**family.options, **options)


def check_list(family: Family, problems: List, **options) -> list[jax.Array]:
    """Runs a list of products, and asserts that its results are right."""
    outs = run_list(family, problems, **options)
    family.check_list(problems, outs)
    return outs


def run_update(family: Family, update: Update, a, b, c=None, **options):
    """Returns the result under jit, in memory that held NaN."""
    jax.block_until_ready(jnp.full(2**24, 0xFF, jnp.uint8))
    return jax.jit(partial(update, **family.options, **options))(a, b, c)


# The triangle that is not computed has zeros, c's elements, or the mirror image without or with c.
OTHER = pytest.mark.parametrize("other", [None, "c", "mirror", "mirror c"])


def check_update(
    family: Family,
    update: Update,
    rng: np.random.Generator,
    shape: tuple[int, int, int],
    *,
    other: str | None = None,
    result=None,
    uplo: str = "lower",
    transpose: bool = False,
    has_diagonal: bool = False,
) -> None:
    """Runs an update of a random stack with random scales, and asserts that it is right.

    Elements that must not be read are NaN: a triangle of c, and c where beta is zero.

    Args:
      family: the family of the kernels.
      update: which of the four functions.
      rng: draws operands and scales.
      shape: g, n and k.
      other: see `OTHER`.
      result: the dtype of the result; by default that of the operands.
      uplo: see `jgg.grouped_syrk`.
      transpose: see `jgg.grouped_syrk`.
      has_diagonal: whether a random multiple of the identity is added to each result.
    """
    g, n, k = shape
    a, b = (family.draw(rng, (g, k, n) if transpose else (g, n, k)) for _ in "ab")
    symmetrize = other in ("mirror", "mirror c")
    options = dict(uplo=uplo, transpose=transpose)
    alpha, beta = family.scales(rng, g), family.scales(rng, g)
    if update.hermitian:
        beta = beta.real
        alpha = alpha if update.two_operands else alpha.real
    c = poisoned = None
    if other in ("c", "mirror c"):
        c = draw(rng, (g, n, n), result or family.dtype)
        if symmetrize:
            c[:, ~triangle(n, uplo)] = np.nan
        poisoned = c.copy()
        if g > 1:
            beta[0] = 0
            poisoned[0, triangle(n, uplo)] = np.nan
    options |= dict(alpha=alpha, beta=beta)
    if has_diagonal:
        options["diagonal"] = (1 + k**0.5) * family.scales(rng, g)
    out = run_update(
        family, update, a, b, poisoned,
        symmetrize_output=symmetrize, preferred_element_type=result, **options,
    )  # fmt: skip
    assert out.dtype == (result or family.dtype)
    family.check_update(update, out, a, b, c, symmetrize=symmetrize, **options)
