"""`Format`, which describes the elements of a quantised array, and the registry of all formats.

`register` adds a format and the functions that decode and encode one matrix. Operations look up
the functions of an operand's format in the registry; no operation knows a format by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, get_args

import jax
import numpy as np

from jax_grouped_gemm._src.arguments import checked_choice, checked_int

Layout = Literal["packed", "rows"]
Matrix = tuple[int, int]
"""k and n of one matrix."""


@dataclasses.dataclass(frozen=True)
class ScaleLayout:
    """The elements of a matrix [k, n] that share a scale.

    Attributes:
      block: numbers of elements along k and along n; None means all.
      dtype: dtype of the scales; uint8 means exponents (e8m0).
    """

    block: tuple[int | None, int | None]
    dtype: np.dtype


@dataclasses.dataclass(frozen=True)
class Format:
    """The elements of a `QuantizedArray`, and how they lie in memory.

    Attributes:
      name: "mxfp4", "int4", "int8", "fp8", "fp8_128x128", "fp8_1x128", "fp8_row", "fp8_tensor", or
        the name of a format that a program registered.
      values: dtype of `QuantizedArray.values`; uint8 where elements share a byte or are packed.
      bits: bits of one element, without its scale.
      scales: the elements that share a scale; None if only columns have scales.
      channel_scales: whether every column has a float32 scale.
      zero_points: whether groups have a zero point in addition to their scale.
      layout: "packed" for products of bf16 activations and quantised weights; "rows" for products
        of two FP8 operands.
      values_rank: number of dimensions of `values` for one matrix.
      version: version of the layout. Arrays that were saved in another version are refused.
    """

    name: str
    values: np.dtype
    bits: int
    scales: ScaleLayout | None = None
    channel_scales: bool = False
    zero_points: bool = False
    layout: Layout = "packed"
    values_rank: int = 2
    version: int = 1

    @property
    def group_size(self) -> int | None:
        """Number of elements along k that share a scale, None if whole columns do."""
        return None if self.scales is None else self.scales.block[0]

    def __str__(self) -> str:
        words = [self.name]
        if registered(self.name, self.layout).group_sizes:
            words.append(f"groups of {self.group_size}")
        if self.zero_points:
            words.append("zero points")
        if self.values != registered(self.name, self.layout).format.values:
            words.append(str(self.values))
        return ", ".join(words)


class Parts(NamedTuple):
    """The arrays of one matrix, or of a stack of them, as a format stores them."""

    values: Any
    scales: Any = None
    channel_scales: Any = None
    zero_points: Any = None


class Codes(NamedTuple):
    """A quantised matrix before it is packed.

    `codes` [..., k, n] are uint8 in 0..15 for 4-bit formats, int8 or float8_e4m3fn for others.
    `scales` have one element for each group or block, [..., ceil(k / rows), ceil(n / columns)], and
    [..., n] where only columns have scales. `zero_points` are uint8 in the shape of the scales, or
    None.
    """

    codes: Any
    scales: Any
    zero_points: Any = None


@dataclasses.dataclass(frozen=True)
class Registered:
    """A format and its functions, each of which takes one matrix.

    Attributes:
      format: the format, with the default group size.
      dequantize: `dequantize(parts, format, matrix, dtype)` returns [k, n] of `dtype`.
      quantize: `quantize(x, format)` returns the `Parts` of a float32 [k, n].
      pack: `pack(codes, format)` returns the `Parts` of `Codes`.
      unpack: `unpack(parts, format, matrix)` returns the `Codes` of `Parts`.
      group_sizes: possible values of `group_size`.
      may_have_zero_points: whether the format has the option `zero_points`.
      scales_below: scales of this magnitude and more overflow in kernels.
      dtypes: other dtypes that values may have, in addition to the format's.
      products: functions that multiply quantised rows by weights of this format, by the name of the
        public function, whose arguments they take.
    """

    format: Format
    dequantize: Callable[[Parts, Format, Matrix, np.dtype], jax.Array]
    quantize: Callable[[jax.Array, Format], Parts] | None = None
    pack: Callable[[Codes, Format], Parts] | None = None
    unpack: Callable[[Parts, Format, Matrix], Codes] | None = None
    group_sizes: tuple[int, ...] = ()
    may_have_zero_points: bool = False
    scales_below: float = 2.0**128
    dtypes: tuple[np.dtype, ...] = ()
    products: Mapping[str, Callable[..., jax.Array]] = dataclasses.field(default_factory=dict)


_REGISTRY: dict[tuple[str, Layout], Registered] = {}


def register(format: Format, **functions: Any) -> Format:
    """Registers and returns a format. It replaces any format with the same name and layout.

    Args:
      format: the format.
      **functions: the other attributes of `Registered`; `dequantize` is required.
    """
    _REGISTRY[format.name, format.layout] = Registered(format, **functions)
    return format


def registered(name: str, layout: Layout) -> Registered:
    """Returns a registered format and its functions; raises `ValueError` if there is none."""
    found = _REGISTRY.get((name, layout))
    if found is None:
        raise ValueError(f"no format {name!r} of layout {layout!r} is registered: {_known()}")
    return found


def functions_of(format: Format) -> Registered:
    """Returns the functions of a format."""
    return registered(format.name, format.layout)


def named(
    format: str | Format,
    *,
    layout: Layout | None = None,
    group_size: int | None = None,
    zero_points: bool | None = None,
    dtype: np.dtype | None = None,
) -> Format:
    """Returns the format `format`, changed by the given options.

    Raises:
      TypeError: `format` is neither a name nor a `Format`.
      ValueError: `format` is not registered, or has no such option.
    """
    if isinstance(format, Format):
        registered(format.name, format.layout)
        if layout is None and group_size is None and zero_points is None and dtype is None:
            return format
        dtype = format.values if dtype is None else dtype
        layout = layout or format.layout
        group_size = format.group_size if group_size is None else group_size
        zero_points = format.zero_points if zero_points is None else zero_points
        name = format.name
    elif isinstance(format, str):
        name = format
    else:
        raise TypeError(f"format must be a name or a Format, got {format!r}")
    if layout is None:
        layouts: tuple[Layout, ...] = get_args(Layout)
        layout = next((each for each in layouts if (name, each) in _REGISTRY), layouts[0])
    checked_choice("layout", layout, get_args(Layout))
    assert layout is not None
    found = registered(name, layout)
    changed = found.format
    if group_size is not None and checked_int("group_size", group_size) != changed.group_size:
        if group_size not in found.group_sizes:
            sizes = found.group_sizes or (changed.group_size,)
            raise ValueError(f"group_size of format {name!r} must be in {sizes}, got {group_size}")
        assert changed.scales is not None
        block = group_size, changed.scales.block[1]
        changed = dataclasses.replace(
            changed, scales=dataclasses.replace(changed.scales, block=block)
        )
    if zero_points and not found.may_have_zero_points:
        raise ValueError(f"format {name!r} has no zero points")
    if dtype is not None and dtype != changed.values:
        if dtype not in found.dtypes:
            known = " or ".join(map(str, (changed.values, *found.dtypes)))
            raise ValueError(f"values of format {name!r} in the layout {layout!r} must be {known}")
        changed = dataclasses.replace(changed, values=dtype)
    return dataclasses.replace(changed, zero_points=bool(zero_points) or changed.zero_points)


def with_values(name: str, dtype: np.dtype) -> Format:
    """Returns the format `name` in the layout that allows values of `dtype`.

    Raises:
      ValueError: as for `named`.
    """
    for layout in get_args(Layout):
        found = _REGISTRY.get((name, layout))
        if found and dtype in (found.format.values, *found.dtypes):
            return named(name, layout=layout, dtype=np.dtype(dtype))
    return named(name)


def _known() -> str:
    return "known are " + ", ".join(f"{name!r} ({layout})" for name, layout in _REGISTRY)


def as_json(format: Format, matrix: Matrix) -> dict[str, Any]:
    """Returns the static part of a `QuantizedArray` as a dictionary that JSON can store."""
    return dict(
        format=format.name,
        layout=format.layout,
        version=format.version,
        values=format.values.name,
        group_size=format.group_size,
        zero_points=format.zero_points,
        k=matrix[0],
        n=matrix[1],
    )


_KINDS: dict[str, tuple[type, ...]] = dict(
    format=(str,),
    layout=(str,),
    version=(int,),
    values=(str,),
    group_size=(int, type(None)),
    zero_points=(bool,),
    k=(int,),
    n=(int,),
)
"""The types that JSON gives the elements of `as_json`."""


def of_json(found: dict[str, Any]) -> tuple[Format, Matrix]:
    """Returns the format and the matrix from which `as_json` made a dictionary.

    Raises:
      ValueError: the format is not registered, or the array has another version of its layout, or
        `found` is not such a dictionary.
    """
    if missing := _KINDS.keys() - (found.keys() if isinstance(found, dict) else set()):
        raise ValueError(
            f"a format is described by {', '.join(_KINDS)}, but there is no "
            f"{' and no '.join(sorted(missing))}"
        )
    # Compare versions first, because another version may have other options.
    _check_kinds(found, "format", "layout", "version")
    current = registered(found["format"], found["layout"]).format
    if found["version"] != current.version:
        raise ValueError(
            f"an array of format {current.name!r} has version {found['version']} of the layout "
            f"{current.layout!r}, but this release reads version {current.version}: quantise the "
            "weights again"
        )
    _check_kinds(found, "values", "group_size", "zero_points", "k", "n")
    matrix = found["k"], found["n"]
    if min(matrix) < 0:
        raise ValueError(f"k and n of a described format must not be negative, got {matrix}")
    dtypes = {np.dtype(each).name: each for each in (current.values, *functions_of(current).dtypes)}
    if found["values"] not in dtypes:
        raise ValueError(
            f"values of format {current.name!r} in the layout {current.layout!r} must be "
            f"{' or '.join(dtypes)}, got {found['values']!r}"
        )
    format = named(
        current.name,
        layout=current.layout,
        group_size=found["group_size"],
        zero_points=found["zero_points"],
        dtype=dtypes[found["values"]],
    )
    return format, matrix


def _check_kinds(found: dict[str, Any], *names: str) -> None:
    """Raises a `ValueError` unless elements of a description have their types."""
    for name in names:
        # Instances of int would include True.
        if type(found[name]) not in _KINDS[name]:
            words = {str: "a string", int: "an integer", bool: "true or false", type(None): "null"}
            raise ValueError(
                f"{name} of a described format must be "
                f"{' or '.join(words[kind] for kind in _KINDS[name])}, got {found[name]!r}"
            )
