"""A layer of packed weights that is composed of Humming's products, if it is installed.

The layer is composed as in vLLM and SGLang: gate and up are one product, matrices are padded to
multiples of 128 rows and 256 columns, and Humming's heuristics choose tiles by the number of rows.
Times include a sort by expert, both products, the activation, and a weighted sum of each token's
rows, and for sorted products (`humming_grouped`) also a copy of x in the order of experts. The copy
and the activation are Humming's. It has no sort and no sum, so these are one Triton kernel each.
Times leave out the packing of weights.
"""

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.harness.peer import NotOffered, Peer, Role, as_torch, once
from benchmarks.peers.quack_moe import SeveralResults, adder_of_rows
from jax_grouped_gemm import QuantizedArray

GEMM_TYPES = {"humming": "indexed", "humming_grouped": "grouped_contiguous"}
# Humming's names of the formats of values, and the codes of zero, because integers are unsigned.
VALUES = {"mxfp4": ("float4e2m1", 0), "int4": ("uint4", 8), "int8": ("uint8", 128)}
ACTIVATION = dict(activation_type="binary_split", activation_impl="a / (1.0f + __expf(-a)) * b")
PARTS = {"process_input": "gather, activation", "humming": "products", "sum_of_rows": "combine"}


@jax.jit
def packed_words(matrices: Sequence[QuantizedArray]) -> tuple[jax.Array, jax.Array]:
    """Returns padded words [E, n, k * bits / 32] and scales [E, n, groups] of matrices in a row."""
    format = matrices[0].format
    codes, scales, _ = zip(*(q.unpack() for q in matrices), strict=True)
    codes, scales = jnp.concatenate(codes, axis=-1), jnp.concatenate(scales, axis=-1)
    (experts, k, n), more_n = codes.shape, -codes.shape[2] % 256
    if format.name == "int8":
        codes = codes.view(jnp.uint8) ^ 128
    if format.name != "mxfp4":
        scales = scales.astype(jnp.bfloat16)
    zeros = ((0, 0), (0, -k % 128), (0, more_n))
    codes = jnp.pad(codes, zeros, constant_values=VALUES[format.name][1]).mT
    if format.name != "int8":
        codes = codes[..., ::2] | codes[..., 1::2] << 4
    # Padding repeats scales, because those of zeros must only be finite.
    scales = scales.reshape(experts, -1, n)
    groups = (k + -k % 128) // format.group_size if format.group_size else 1
    more = ((0, 0), (0, groups - scales.shape[1]), (0, more_n))
    return codes.view(jnp.int32), jnp.pad(scales, more, mode="edge").mT


def product_of(
    matrices: Sequence[QuantizedArray], rows: int, gemm_type: str
) -> tuple[Callable[..., Any], Any, int]:
    """Returns a function of rows and options, Humming's configuration, and the rows of a tile."""
    import torch
    from humming.forward import humming_forward
    from humming.schema import HummingWeightSchema
    from humming.transform import prepare_layer_config, transform_humming_tensors
    from humming.tune import get_heuristics_config

    format, (experts, k, _) = matrices[0].format, matrices[0].shape
    weight, scales = map(as_torch, packed_words(matrices))
    is_mx = scales.dtype == torch.uint8
    schema, tensors = HummingWeightSchema(
        b_dtype=VALUES[format.name][0],
        bs_dtype="float8e8m0" if is_mx else None,
        weight_scale_group_size=format.group_size or 0,
    ).convert_symmetric_integer_weight(
        {"weight": weight, "weight_scale": scales.view(torch.float8_e8m0fnu) if is_mx else scales}
    )
    config = prepare_layer_config(
        sum(q.shape[2] for q in matrices), k, schema, num_experts=experts,
        pad_n_to_multiple=256, pad_k_to_multiple=128, torch_dtype=torch.bfloat16,
    )  # fmt: skip
    tiles = get_heuristics_config(config, rows, gemm_type=gemm_type)
    options = transform_humming_tensors(config, tensors, already_padded=True)
    options |= dict(compute_config=json.dumps(dict(gemm_type=gemm_type)))
    options |= dict(tuning_config=json.dumps(tiles), locks=weight.new_zeros(2048))
    return functools.partial(humming_forward, config, **options), config, tiles["block_shape"][0]


class HummingLayer(Peer):
    """Humming's products that gather rows, or its products of sorted rows, by the peer's name."""

    role, needs = Role.GROUPED, ("torch", "triton", "humming", "GPU")

    def __init__(self, name: str):
        self.name = name

    def prepare(self, problem, arrays, packed):
        from humming.forward import may_process_input

        if packed[0].format.name not in VALUES:
            raise NotOffered(packed[0].format.name)
        x, experts, weights = map(as_torch, arrays[:3])
        gemm_type, (tokens, top_k) = GEMM_TYPES[self.name], experts.shape
        found = (product_of(w, tokens * top_k, gemm_type) for w in (packed[:2], packed[2:]))
        (gate_up, config, first), (down, _, second) = found
        tiles = [first, second] if gemm_type == "indexed" else [1, 1]
        sort, add_rows = sorter(problem.layer.experts), adder_of_rows()
        process = functools.partial(may_process_input, config)

        def run() -> tuple:
            of_tile = {tile: sort(experts, tile) for tile in set(tiles)}
            (places, options), (_, others) = map(of_tile.get, tiles)
            rows = x
            if gemm_type != "indexed":
                rows, *_ = process(x, layout="scatter", scatter_idx=places.view(tokens, top_k))
            hidden, *_ = process(gate_up(rows, top_k=top_k, **options), **ACTIVATION)
            return (add_rows(down(hidden, **others), places, tokens, weights),)

        padded = f", places padded to {tiles} rows" if gemm_type == "indexed" else ""
        call = SeveralResults(run, gemm_type + padded)
        call.part_of = lambda kernel: next((PARTS[x] for x in PARTS if x in kernel), "sort")
        return once(call)


def sorter(count: int) -> Callable[..., Any]:
    """Returns a function that sorts choices of `count` experts, with tiles of one expert each.

    It returns the row of each choice in a product's result, and the tables that Humming needs.
    """
    import triton
    import triton.language as tl

    @triton.jit
    def sort_rows(
        experts, order, places, starts, owners, pairs,
        count: tl.constexpr, bins: tl.constexpr, tile: tl.constexpr, block: tl.constexpr,
    ):  # fmt: skip
        expert, lanes, each = tl.program_id(0), tl.arange(0, block), tl.arange(0, bins)
        sizes = tl.zeros((bins,), tl.int32)
        for at in range(0, pairs, block):
            inside = at + lanes < pairs
            sizes += tl.histogram(tl.load(experts + at + lanes, mask=inside, other=count), bins)
        sizes = (sizes + tile - 1) // tile * tile
        row = tl.sum(tl.where(each < expert, sizes, 0), 0)
        end = row + tl.sum(tl.where(each == expert, sizes, 0), 0)
        tl.store(starts + expert, row)
        tl.store(starts + expert + 1, end)
        for at in range(row // tile, end // tile, block):
            tl.store(owners + at + lanes, expert, mask=at + lanes < end // tile)
        for at in range(0, pairs, block):
            choices = at + lanes
            here = tl.load(experts + choices, mask=choices < pairs, other=count) == expert
            sorted_rows = row + tl.cumsum(here.to(tl.int32), 0) - 1
            tl.store(order + sorted_rows, choices, mask=here)
            # An indexed product writes results in the order of choices.
            tl.store(places + choices, choices if tile > 1 else sorted_rows, mask=here)
            row += tl.sum(here.to(tl.int32), 0)
        tl.store(order + row + lanes, pairs, mask=row + lanes < end)

    def sort(experts, tile):
        pairs, bins = experts.numel(), triton.next_power_of_2(count + 1)
        tiles = pairs // tile + min(pairs, count)
        found = [experts.new_empty(size) for size in (tiles * tile, pairs, count + 1, tiles)]
        sort_rows[(count,)](experts, *found, pairs, count, bins, tile, 1024)
        order, places, starts, owners = found
        tables = dict(sorted_ids=order, expert_ids=owners, num_tokens_padded=starts[-1:])
        return places, tables | dict(expert_layout=starts)

    return sort
