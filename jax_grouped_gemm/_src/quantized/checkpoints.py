"""Reads published checkpoints into `QuantizedArray`s, without changing the codes.

Tensors are NumPy or JAX arrays, as `safetensors.numpy` or `safetensors.flax` load them. They may
have any leading dimensions; for a layer of experts, stack the experts' tensors first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jax_grouped_gemm._src.arguments import as_array, checked_choice
from jax_grouped_gemm._src.quantized.api import of_stored
from jax_grouped_gemm._src.quantized.array import QuantizedArray
from jax_grouped_gemm._src.quantized.format import Codes, Format, Layout, named
from jax_grouped_gemm._src.quantized.qwix import qwix

__all__ = ["Layer", "awq", "compressed_tensors", "fp8", "gpt_oss", "gptq", "qwix"]


class Layer(NamedTuple):
    """The weights of a mixture-of-experts layer, in the shapes that `moe.dropless_mlp` takes."""

    wi_0: QuantizedArray  # [E, D, F], the gate
    wi_1: QuantizedArray  # [E, D, F], up
    wo: QuantizedArray  # [E, F, D]
    biases: tuple[jax.Array, jax.Array, jax.Array]  # of wi_0, wi_1, wo: [E, F], [E, F], [E, D]
    gate: jax.Array  # the router [D, E]
    gate_bias: jax.Array  # [E]


# The tensor of each field, in Hugging Face's files and in OpenAI's.
_HUGGING_FACE = dict(
    wi="experts.gate_up_proj_blocks",
    wi_scales="experts.gate_up_proj_scales",
    wi_bias="experts.gate_up_proj_bias",
    wo="experts.down_proj_blocks",
    wo_scales="experts.down_proj_scales",
    wo_bias="experts.down_proj_bias",
    gate="router.weight",
    gate_bias="router.bias",
)
_OPENAI = dict(
    wi="mlp1_weight.blocks",
    wi_scales="mlp1_weight.scales",
    wi_bias="mlp1_bias",
    wo="mlp2_weight.blocks",
    wo_scales="mlp2_weight.scales",
    wo_bias="mlp2_bias",
    gate="gate.weight",
    gate_bias="gate.bias",
)


def gpt_oss(tensors: Mapping[str, ArrayLike], layer: int) -> Layer:
    """Returns the experts and the router of a layer of gpt-oss, in the published MXFP4.

        layer = jgg.checkpoints.gpt_oss(tensors, 0)
        routing = moe.route(x @ layer.gate + layer.gate_bias, top_k=4)
        y = moe.dropless_mlp(
            x, routing, *layer[:3], biases=layer.biases, activation="swiglu_oai"
        )

    The columns of gate and up alternate in the files. The result has separate arrays.

    Args:
      tensors: tensors by name, from Hugging Face's files ("model.layers.0.mlp.experts.
        gate_up_proj_blocks" and so on) or OpenAI's ("block.0.mlp.mlp1_weight.blocks" and so on).
      layer: the number of the layer.

    Raises:
      KeyError: a tensor is missing.
      TypeError: a tensor has an unsuitable dtype or shape.
    """
    prefix, names = f"model.layers.{layer}.mlp.", _HUGGING_FACE
    if not any(key.startswith(prefix) for key in tensors):
        prefix, names = f"block.{layer}.mlp.", _OPENAI
    found = {}
    for field, name in names.items():
        if prefix + name not in tensors:
            raise KeyError(
                f"gpt_oss: there is no tensor {prefix + name!r}; layer {layer} needs "
                f"{', '.join(prefix + each for each in names.values())}"
            )
        found[field] = as_array(prefix + name, tensors[prefix + name])

    def matrix(field: str, rows: slice) -> QuantizedArray:
        blocks, scales = found[field], found[f"{field}_scales"]
        name = prefix + names[field]
        _check_dtype(name, blocks, np.uint8)
        _check_dtype(prefix + names[f"{field}_scales"], scales, np.uint8)
        if blocks.ndim != 4 or blocks.shape[3] != 16 or scales.shape != blocks.shape[:3]:
            raise TypeError(
                f"{name} must be [E, columns, k / 32, 16] and its scales [E, columns, k / 32], got "
                f"{blocks.shape} and {scales.shape}"
            )
        experts, columns, groups, _ = blocks[:, rows].shape
        stored = blocks[:, rows].reshape(experts, columns, 16 * groups), scales[:, rows]
        return of_stored(_of_bytes, stored, (32 * groups, columns), named("mxfp4"), (experts,))

    every, even, odd = slice(None), slice(0, None, 2), slice(1, None, 2)
    if found["wi"].shape[1] % 2:
        raise TypeError(f"{prefix + names['wi']} must have gate and up, got {found['wi'].shape}")
    gate, up, wo = matrix("wi", even), matrix("wi", odd), matrix("wo", every)
    experts, both, embed = *found["wi"].shape[:2], found["wo"].shape[1]
    shapes = {
        "wi": (experts, both, -(-embed // 32), 16),
        "wo": (experts, embed, -(-both // 64), 16),
        "wi_bias": (experts, both),
        "wo_bias": (experts, embed),
        "gate": (experts, embed),
        "gate_bias": (experts,),
    }
    for field, shape in shapes.items():
        _check_shape(prefix + names[field], found[field], shape)
    bias = found["wi_bias"]
    return Layer(
        gate,
        up,
        wo,
        (bias[:, even], bias[:, odd], found["wo_bias"]),
        found["gate"].T,
        found["gate_bias"],
    )


def gptq(
    qweight: ArrayLike,
    scales: ArrayLike,
    qzeros: ArrayLike | None = None,
    g_idx: ArrayLike | None = None,
    *,
    version: int = 1,
) -> QuantizedArray:
    """Returns the weights [..., k, n] of a 4-bit GPTQ checkpoint, as "int4".

    Args:
      qweight: int32 [..., k / 8, n]; each word has eight codes along k, the lowest bits first.
      scales: [..., groups, n]; rounded to bfloat16.
      qzeros: int32 [..., groups, n / 8], zero points along n, or None for 8.
      g_idx: [..., k], the group of every row, or None for k // group_size.
      version: 1 for "gptq", whose files store each zero point minus one; 2 for "gptq_v2".

    Raises:
      TypeError: a tensor has an unsuitable dtype or shape.
      ValueError: `version` is neither 1 nor 2, or the rows are permuted by act-order (g_idx).
    """
    qweight, scales = _words("qweight", qweight), as_array("scales", scales)
    zeros = None if qzeros is None else _words("qzeros", qzeros)
    if version not in (1, 2):
        raise ValueError(f"gptq: version must be 1 or 2, got {version!r}")
    *leading, words, n = qweight.shape
    k = 8 * words
    size = _group_size("gptq", scales, (*leading, k, n))
    if g_idx is not None:
        expected = np.arange(k) // size
        given = np.asarray(g_idx)
        if given.shape[-1:] != (k,) or (given != expected).any():
            raise ValueError(
                "gptq: g_idx is not k // group_size. Act-order (desc_act) permutes the rows of "
                "each expert differently, so no single product can read all experts: quantise "
                "without act-order, or dequantise the checkpoint"
            )
    if zeros is not None:
        _check_shape("qzeros", zeros, (*scales.shape[:-1], -(-n // 8)))
    read = _of_gptq if version == 1 else _of_gptq_v2
    return of_stored(read, (qweight, scales, zeros), (k, n), _int4(size, zeros), tuple(leading))


def awq(qweight: ArrayLike, scales: ArrayLike, qzeros: ArrayLike) -> QuantizedArray:
    """Returns the weights [..., k, n] of a 4-bit AWQ checkpoint, as "int4" with zero points.

    Args:
      qweight: int32 [..., k, n / 8]; each word has eight columns in the order 0, 2, 4, 6, 1, 3, 5,
        7.
      scales: [..., groups, n]; rounded to bfloat16.
      qzeros: int32 [..., groups, n / 8], zero points in the same order.

    Raises:
      TypeError: a tensor has an unsuitable dtype or shape.
    """
    qweight, qzeros = _words("qweight", qweight), _words("qzeros", qzeros)
    scales = as_array("scales", scales)
    *leading, k, words = qweight.shape
    matrix = k, 8 * words
    size = _group_size("awq", scales, (*leading, *matrix))
    _check_shape("qzeros", qzeros, (*scales.shape[:-1], words))
    stored = qweight, scales, qzeros
    return of_stored(_of_awq, stored, matrix, _int4(size, qzeros), tuple(leading))


def compressed_tensors(
    tensors: Mapping[str, ArrayLike], format: str = "pack-quantized"
) -> QuantizedArray:
    """Returns the weights [..., k, n] of a compressed-tensors checkpoint.

    Args:
      tensors: the tensors of one module by name, stacked over experts:

        | `format` | tensors | format of the result |
        |---|---|---|
        | "pack-quantized" | `weight_packed` int32 [..., n, k / 8], `weight_scale` [..., n, groups], perhaps `weight_zero_point` int32 [..., n / 8, groups] | "int4" |
        | "int-quantized" | `weight` int8 [..., n, k], `weight_scale` [..., n, 1] | "int8" |
        | "float-quantized" | `weight` float8_e4m3fn [..., n, k], `weight_scale` [..., n, 1] | "fp8" |
        | "mxfp4-pack-quantized" | `weight_packed` uint8 [..., n, k / 2], `weight_scale` uint8 [..., n, k / 32] | "mxfp4" |

      format: the format in the checkpoint's configuration.

    Raises:
      KeyError: a tensor is missing.
      TypeError: a tensor has an unsuitable dtype or shape.
      ValueError: `format` is none of these, or the rows are permuted by act-order (`weight_g_idx`).
    """  # noqa: E501 - rows of a table
    known = ("pack-quantized", "int-quantized", "float-quantized", "mxfp4-pack-quantized")
    checked_choice("format", format, known)

    def tensor(name: str) -> jax.Array:
        if name not in tensors:
            raise KeyError(f"compressed_tensors: {format} needs {name!r}, got {list(tensors)}")
        return as_array(name, tensors[name])

    scales = tensor("weight_scale")
    if format in ("int-quantized", "float-quantized"):
        values = tensor("weight")
        is_int = format == "int-quantized"
        _check_dtype("weight", values, np.int8 if is_int else jnp.float8_e4m3fn)
        if scales.shape != (*values.shape[:-1], 1):
            raise TypeError(
                f"weight_scale must be [..., n, 1], one scale for each channel, got {scales.shape} "
                f"for a weight of {values.shape}"
            )
        found = named("int8" if is_int else "fp8")
        *leading, n, k = values.shape
        return of_stored(_of_channels, (values, scales), (k, n), found, tuple(leading))
    if format == "mxfp4-pack-quantized":
        packed = tensor("weight_packed")
        _check_dtype("weight_packed", packed, np.uint8)
        _check_dtype("weight_scale", scales, np.uint8)
        *leading, n, half = packed.shape
        matrix = 2 * half, n
        _check_shape("weight_scale", scales, (*leading, n, -(-half // 16)))
        return of_stored(_of_bytes, (packed, scales), matrix, named("mxfp4"), tuple(leading))
    words = _words("weight_packed", tensor("weight_packed"))
    *leading, n, eighth = words.shape
    k = 8 * eighth
    size = _group_size("compressed_tensors", scales.mT, (*leading, k, n))
    if "weight_g_idx" in tensors:
        given = np.asarray(tensors["weight_g_idx"])
        if (given >= 0).any() and (given != np.arange(k) // size).any():
            raise ValueError(
                "compressed_tensors: weight_g_idx is not k // group_size, because act-order "
                "permutes the rows of each expert: quantise without act-order"
            )
    zeros = None
    if "weight_zero_point" in tensors:
        zeros = _words("weight_zero_point", tensor("weight_zero_point"))
        _check_shape("weight_zero_point", zeros, (*leading, -(-n // 8), scales.shape[-1]))
    stored = words, scales, zeros
    return of_stored(_of_compressed, stored, (k, n), _int4(size, zeros), tuple(leading))


def fp8(
    weight: ArrayLike, weight_scale_inv: ArrayLike, *, layout: Layout = "packed"
) -> QuantizedArray:
    """Returns the weights [..., k, n] of an FP8 checkpoint such as DeepSeek-V3's.

    Their format is "fp8_128x128".

    Args:
      weight: float8_e4m3fn [..., n, k].
      weight_scale_inv: float32 [..., ceil(n / 128), ceil(k / 128)]. A weight is its value times the
        element for its block.
      layout: "packed" for products with bfloat16 rows, which dequantise the weights first; or
        "rows" for products with rows in FP8, such as those of a layer with a recipe.

    Raises:
      TypeError: a tensor has an unsuitable dtype or shape.
      ValueError: `layout` is invalid.
    """
    weight, scales = as_array("weight", weight), as_array("weight_scale_inv", weight_scale_inv)
    _check_dtype("weight", weight, jnp.float8_e4m3fn)
    *leading, n, k = weight.shape
    _check_shape("weight_scale_inv", scales, (*leading, -(-n // 128), -(-k // 128)))
    found = named("fp8_128x128", layout=checked_choice("layout", layout, get_args(Layout)))
    return of_stored(_of_blocks, (weight, scales), (k, n), found, tuple(leading))


# These functions return the codes of one matrix from its tensors.


def _of_bytes(stored: Any) -> Codes:
    packed, scales = stored
    return Codes(_nibbles(packed).T, scales.T)


def _of_channels(stored: Any) -> Codes:
    values, scales = stored
    return Codes(values.T, scales[:, 0])


def _of_blocks(stored: Any) -> Codes:
    values, scales = stored
    return Codes(values.T, scales.T)


def _of_gptq(stored: Any) -> Codes:
    """Returns codes with zero points + 1, modulo 16; files store each zero point minus 1."""
    codes = _of_gptq_v2(stored)
    zeros = codes.zero_points
    return codes._replace(zero_points=None if zeros is None else (zeros + 1) & 15)


def _of_gptq_v2(stored: Any) -> Codes:
    words, scales, zeros = stored
    return Codes(_words_along(words, 0), scales, None if zeros is None else _words_along(zeros, 1))


def _of_awq(stored: Any) -> Codes:
    words, scales, zeros = stored
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return Codes(_words_along(words, 1, order), scales, _words_along(zeros, 1, order))


def _of_compressed(stored: Any) -> Codes:
    words, scales, zeros = stored
    if zeros is not None:
        zeros = _words_along(zeros, 0).T
    return Codes(_words_along(words, 1).T, scales.T, zeros)


def _int4(size: int, zeros: jax.Array | None) -> Format:
    return named("int4", group_size=size, zero_points=zeros is not None or None)


def _check_dtype(name: str, x: jax.Array, dtype: Any) -> None:
    if x.dtype != dtype:
        raise TypeError(f"{name} must be {np.dtype(dtype)}, got {x.dtype} of shape {x.shape}")


def _check_shape(name: str, x: jax.Array, shape: tuple[int, ...]) -> None:
    if x.shape != shape:
        raise TypeError(f"{name} must have the shape {shape}, got {x.shape}")


def _words(name: str, x: ArrayLike) -> jax.Array:
    x = as_array(name, x)
    _check_dtype(name, x, np.int32)
    if x.ndim < 2:
        raise TypeError(f"{name} must have two dimensions at least, got {x.shape}")
    return x


def _words_along(words: jax.Array, axis: int, order: tuple[int, ...] = tuple(range(8))) -> Any:
    """Unpacks eight codes of each word along `axis`. Nibble j of a word is its code `order[j]`."""
    unsigned = lax.bitcast_convert_type(words, jnp.uint32)
    places = [order.index(i) for i in range(8)]
    codes = [(unsigned >> 4 * place & 15).astype(jnp.uint8) for place in places]
    axis %= words.ndim
    shape = (*words.shape[:axis], 8 * words.shape[axis], *words.shape[axis + 1 :])
    return jnp.stack(codes, axis + 1).reshape(shape)


def _nibbles(packed: jax.Array) -> jax.Array:
    """Returns the codes [..., k] of bytes [..., k / 2], the low nibble first."""
    both = jnp.stack([packed & 15, packed >> 4], axis=-1)
    return both.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def _group_size(function: str, scales: jax.Array, shape: tuple[int, ...]) -> int:
    """Returns how many rows of matrices of `shape` share an element of `scales` [..., groups, n].

    Raises:
      TypeError: the number is not 32, 64 or 128.
    """
    *leading, k, n = shape
    for size in (32, 64, 128):
        if scales.shape == (*leading, -(-k // size), n):
            return size
    raise TypeError(
        f"{function}: scales must be [..., groups, {n}] for groups of 32, 64 or 128 of {k} rows of "
        f"4 bits, got {scales.shape}"
    )
