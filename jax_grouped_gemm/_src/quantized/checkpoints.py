"""Reads published checkpoints into `QuantizedArray`s, without changing the codes.

Tensors are NumPy or JAX arrays, as `safetensors.numpy` or `safetensors.flax` load them. They may
have any leading dimensions; for a layer of experts, stack the experts' tensors first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_grouped_gemm._src.arguments import as_array, checked_choice
from jax_grouped_gemm._src.arrays import cdiv
from jax_grouped_gemm._src.quantized.api import of_stored
from jax_grouped_gemm._src.quantized.array import QuantizedArray
from jax_grouped_gemm._src.quantized.format import Layout, named
from jax_grouped_gemm._src.quantized.qwix import qwix
from jax_grouped_gemm._src.quantized.stored import (
    check_order,
    check_shape,
    group_size,
    int4,
    known_values,
    matrices,
    of_awq,
    of_blocks,
    of_bytes,
    of_channels,
    of_compressed,
    of_gptq,
    of_gptq_v2,
    per_group,
)

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
    if not any(key.startswith("model.layers.") for key in tensors):
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
        name = prefix + names[field]
        blocks = matrices(name, found[field], np.uint8)
        of_scales = f"{field}_scales"
        scales = matrices(prefix + names[of_scales], found[of_scales], np.uint8)
        if blocks.ndim != 4 or blocks.shape[3] != 16 or scales.shape != blocks.shape[:3]:
            raise TypeError(
                f"{name} must be [E, columns, k / 32, 16] and its scales [E, columns, k / 32], got "
                f"{blocks.shape} and {scales.shape}"
            )
        experts, columns, groups, _ = blocks[:, rows].shape
        stored = blocks[:, rows].reshape(experts, columns, 16 * groups), scales[:, rows]
        return of_stored(of_bytes, stored, (32 * groups, columns), named("mxfp4"), (experts,))

    every, even, odd = slice(None), slice(0, None, 2), slice(1, None, 2)
    if found["wi"].ndim > 1 and found["wi"].shape[1] % 2:
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
        check_shape(prefix + names[field], found[field], shape)
        if field not in ("wi", "wo") and not jnp.issubdtype(found[field].dtype, jnp.floating):
            dtype = found[field].dtype
            raise TypeError(f"{prefix + names[field]} must be floating, got {dtype}")
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
      scales: [..., groups, n]; rounded to bfloat16. A group has 32, 64 or 128 rows; or all rows, if
        `qzeros` or `g_idx` is given.
      qzeros: int32 [..., groups, n / 8], zero points along n, or None for 8.
      g_idx: [..., k], the group of every row, or None for k // group_size. Give `qzeros` or `g_idx`
        if the checkpoint has them: without both, words of 8 bits in groups of 32 or 64 rows are
        read as words of 4 bits.
      version: 1 for "gptq", whose files store each zero point minus one; 2 for "gptq_v2".

    Raises:
      TypeError: a tensor has an unsuitable dtype or shape.
      ValueError: `version` is neither 1 nor 2, or the rows are permuted by act-order (g_idx).
    """
    qweight, scales = matrices("qweight", qweight, np.int32), as_array("scales", scales)
    zeros = None if qzeros is None else matrices("qzeros", qzeros, np.int32)
    if version not in (1, 2):
        raise ValueError(f"gptq: version must be 1 or 2, got {version!r}")
    *leading, words, n = qweight.shape
    k = 8 * words
    # Words of 8 bits look like words of 4 bits for twice as many rows, in groups twice as large.
    # The shapes of qzeros and g_idx tell them apart. Without both tensors, groups of more than 128
    # rows are refused, because they may be such words. No shape tells words of 8 bits in groups of
    # 32 or 64 rows from words of 4 bits in groups of 64 or 128.
    whole = zeros is not None or g_idx is not None
    size = group_size("gptq: scales", scales, (*leading, k, n), whole=whole)
    if g_idx is not None:
        check_order("gptq: g_idx", g_idx, leading, k, size)
    if zeros is not None:
        check_shape("qzeros", zeros, (*scales.shape[:-1], cdiv(n, 8)))
    read = of_gptq if version == 1 else of_gptq_v2
    stored = qweight, *per_group(size, k, scales, zeros)
    return of_stored(read, stored, (k, n), int4(size, zeros), tuple(leading))


def awq(qweight: ArrayLike, scales: ArrayLike, qzeros: ArrayLike) -> QuantizedArray:
    """Returns the weights [..., k, n] of a 4-bit AWQ checkpoint, as "int4" with zero points.

    Args:
      qweight: int32 [..., k, n / 8]; each word has eight columns in the order 0, 2, 4, 6, 1, 3, 5,
        7.
      scales: [..., groups, n]; rounded to bfloat16. A group has 32, 64, 128 or all rows.
      qzeros: int32 [..., groups, n / 8], zero points in the same order.

    Raises:
      TypeError: a tensor has an unsuitable dtype or shape.
    """
    qweight = matrices("qweight", qweight, np.int32)
    qzeros = matrices("qzeros", qzeros, np.int32)
    scales = as_array("scales", scales)
    *leading, k, words = qweight.shape
    matrix = k, 8 * words
    size = group_size("awq: scales", scales, (*leading, *matrix), whole=True)
    check_shape("qzeros", qzeros, (*scales.shape[:-1], words))
    stored = qweight, *per_group(size, k, scales, qzeros)
    return of_stored(of_awq, stored, matrix, int4(size, qzeros), tuple(leading))


def compressed_tensors(
    tensors: Mapping[str, ArrayLike], format: str = "pack-quantized"
) -> QuantizedArray:
    """Returns the weights [..., k, n] of a compressed-tensors checkpoint.

    Args:
      tensors: the tensors of one module by name, stacked over experts:

        | `format` | tensors | format of the result |
        |---|---|---|
        | "pack-quantized" | `weight_packed` int32 [..., n, k / 8], `weight_scale` [..., n, groups], perhaps `weight_zero_point` int32 [..., n / 8, groups], perhaps `weight_shape` (n, k), once or [..., 2] | "int4" |
        | "int-quantized" | `weight` int8 [..., n, k], `weight_scale` [..., n, 1] | "int8" |
        | "float-quantized" | `weight` float8_e4m3fn [..., n, k], `weight_scale` [..., n, 1] | "fp8" |
        | "mxfp4-pack-quantized" | `weight_packed` uint8 [..., n, k / 2], `weight_scale` uint8 [..., n, k / 32] | "mxfp4" |

      format: the format in the checkpoint's configuration.

    Groups of "int4" have 32, 64 or 128 rows; or all k rows, if `weight_shape` is given. Give
    `weight_shape` if the checkpoint has it: without it and `weight_zero_point`, words of 8 bits in
    groups of 32 or 64 rows are read as words of 4 bits.

    Raises:
      KeyError: a tensor is missing.
      TypeError: a tensor has an unsuitable dtype or shape.
      ValueError: `format` is none of these, or the rows are permuted by act-order (`weight_g_idx`),
        or a format without zero points has a `weight_zero_point` other than zero.
    """  # noqa: E501 - rows of a table
    known = ("pack-quantized", "int-quantized", "float-quantized", "mxfp4-pack-quantized")
    checked_choice("format", format, known)

    def tensor(name: str) -> jax.Array:
        if name not in tensors:
            raise KeyError(f"compressed_tensors: {format} needs {name!r}, got {list(tensors)}")
        return as_array(name, tensors[name])

    scales = tensor("weight_scale")
    stored: tuple[jax.Array | None, ...]
    if format in ("int-quantized", "float-quantized"):
        is_int = format == "int-quantized"
        values = matrices("weight", tensor("weight"), np.int8 if is_int else jnp.float8_e4m3fn)
        if scales.shape != (*values.shape[:-1], 1):
            raise TypeError(
                f"weight_scale must be [..., n, 1], one scale for each channel, got {scales.shape} "
                f"for a weight of {values.shape}"
            )
        found = named("int8" if is_int else "fp8")
        *leading, n, k = values.shape
        read, stored, size = of_channels, (values, scales), k
    elif format == "mxfp4-pack-quantized":
        packed = matrices("weight_packed", tensor("weight_packed"), np.uint8)
        scales = matrices("weight_scale", scales, np.uint8)
        *leading, n, half = packed.shape
        k = 2 * half
        check_shape("weight_scale", scales, (*leading, n, cdiv(k, 32)))
        found, read, stored, size = named("mxfp4"), of_bytes, (packed, scales), 32
    else:
        words = matrices("weight_packed", tensor("weight_packed"), np.int32)
        scales = scales.mT if scales.ndim > 1 else scales
        *leading, n, eighth = words.shape
        k = 8 * eighth
        # Words of 8 bits look like words of 4 bits for twice as many rows, see `gptq`. weight_shape
        # and the shape of weight_zero_point tell them apart.
        size = group_size(
            "compressed_tensors: weight_scale, transposed,",
            scales,
            (*leading, k, n),
            whole="weight_shape" in tensors,
        )
        zeros = None
        if "weight_zero_point" in tensors:
            zeros = matrices("weight_zero_point", tensor("weight_zero_point"), np.int32)
            check_shape("weight_zero_point", zeros, (*leading, cdiv(n, 8), scales.shape[-2]))
            zeros = zeros.mT
        found, read = int4(size, zeros), of_compressed
        stored = words, *per_group(size, k, scales, zeros)
    if "weight_zero_point" in tensors and not found.zero_points:
        # Symmetric checkpoints may have zero points, which are all zero.
        if known_values("weight_zero_point", tensors["weight_zero_point"]).any():
            raise ValueError(
                f"compressed_tensors: weight_zero_point must be zero for {format}, because the "
                f"format {found} has no zero points: quantise symmetrically, or dequantise"
            )
    if "weight_shape" in tensors:
        given = known_values("weight_shape", tensors["weight_shape"])
        shapes = (2,), (*leading, 2)
        if given.shape not in shapes:
            raise TypeError(
                "compressed_tensors: weight_shape must have the shape "
                f"{' or '.join(map(str, dict.fromkeys(shapes)))}, got {given.tolist()} of shape "
                f"{given.shape}"
            )
        if (given != (n, k)).any():
            raise TypeError(
                f"compressed_tensors: weight_shape must be {(n, k)}, because the other tensors are "
                f"read as weights of {found.bits} bits, got {given.tolist()}"
            )
    if "weight_g_idx" in tensors:
        order = known_values("weight_g_idx", tensors["weight_g_idx"])
        if (order >= 0).any():  # otherwise there is no order
            check_order("compressed_tensors: weight_g_idx", order, leading, k, size)
    return of_stored(read, stored, (k, n), found, tuple(leading))


def fp8(
    weight: ArrayLike, weight_scale_inv: ArrayLike, *, layout: Layout = "packed"
) -> QuantizedArray:
    """Returns the weights [..., k, n] of an FP8 checkpoint such as DeepSeek-V3's.

    Their format is "fp8_128x128".

    Args:
      weight: float8_e4m3fn [..., n, k].
      weight_scale_inv: float32 [..., ceil(n / 128), ceil(k / 128)]. A weight is its value times the
        element for its block.
      layout: "packed" for products with bfloat16 rows; or "rows" for products with rows in FP8,
        such as those of a layer with a recipe.

    Raises:
      TypeError: a tensor has an unsuitable dtype or shape.
      ValueError: `layout` is invalid.
    """
    weight = matrices("weight", weight, jnp.float8_e4m3fn)
    scales = as_array("weight_scale_inv", weight_scale_inv)
    *leading, n, k = weight.shape
    check_shape("weight_scale_inv", scales, (*leading, cdiv(n, 128), cdiv(k, 128)))
    found = named("fp8_128x128", layout=checked_choice("layout", layout, get_args(Layout)))
    return of_stored(of_blocks, (weight, scales), (k, n), found, tuple(leading))
