"""Exports a MoE layer with quantised weights, and serves requests of any number of tokens.

python -m examples.serve
python -m examples.serve --preset h200 --requests 200                   # on a GPU
python -m examples.serve --preset h200 --weights mxfp4

The weights are quantised once. A server needs the exported programs and this package, but no model
code. Requests are padded to a few sizes, because XLA compiles once for each size. On a GPU of
compute capability 9.0 the programs run the kernels.

With `--weights fp8`, tokens are FP8 too, and one program with a symbolic number of tokens serves
all sizes. With "mxfp4", "int4" or "int8", tokens stay in bfloat16 and kernels read the packed
weights. The number of rows decides which kernel runs, so each size has its own program.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe


@dataclass(frozen=True)
class Config:
    """Sizes of a layer, and the numbers of tokens that requests are padded to."""

    embed: int
    hidden: int
    experts: int
    top_k: int
    buckets: tuple[int, ...]
    dtype: Any


PRESETS = {
    "cpu": Config(128, 256, 8, 2, (4, 16), jnp.float32),
    "h200": Config(2048, 768, 128, 8, (1, 16, 64, 256), jnp.bfloat16),
}


WEIGHTS = ("fp8", "mxfp4", "int4", "int8")


def quantized(config: Config, seed: int, kind: str = "fp8") -> dict[str, Any]:
    """Returns random quantised parameters in place of a checkpoint's."""
    shapes = {
        "wi_0": (config.experts, config.embed, config.hidden),
        "wi_1": (config.experts, config.embed, config.hidden),
        "wo": (config.experts, config.hidden, config.embed),
    }
    keys = jax.random.split(jax.random.key(seed), len(shapes) + 1)
    params = {"gate": jax.random.normal(keys[-1], (config.embed, config.experts))}
    for key, (name, shape) in zip(keys, shapes.items(), strict=False):
        weights = jax.random.normal(key, shape, config.dtype) * shape[1] ** -0.5
        if kind == "fp8":  # as [g, n, k], which FP8 tensor cores read
            params[name] = jgg.quantize(weights.mT, "fp8_128x128", layout="rows")
        else:
            params[name] = jgg.quantize(weights, kind)
    return params


def layer(config: Config, params: Mapping[str, Any], x: jax.Array) -> jax.Array:
    """Returns the layer's result [T, D] for tokens [T, D]."""
    routing = moe.route(x.astype(jnp.float32) @ params["gate"], config.top_k)
    weights = [params[name] for name in ("wi_0", "wi_1", "wo")]
    if weights[0].format.layout == "packed":
        return moe.dropless_mlp(x, routing, *weights)
    order = moe.sort_by_expert(routing)

    def product(rows, weights):
        return jgg.ragged_dot(
            jgg.quantize(rows, "fp8_1x128"),
            weights,
            order.group_sizes,
            transpose_rhs=True,
            preferred_element_type=config.dtype,
        )

    rows = moe.dispatch(x, order)
    hidden = moe.gated_activation(
        product(rows, params["wi_0"]), product(rows, params["wi_1"]), None
    )
    return moe.combine(product(hidden, params["wo"]), order, weights=routing.weights)


def export_layer(config: Config, params: Mapping[str, Any], tokens: int | None = None) -> bytes:
    """Returns the layer as an exported function of (parameters, tokens [T, D]) for CPUs and GPUs.

    T is `tokens`, by default any number.
    """
    shape = (
        export.symbolic_shape(f"t, {config.embed}") if tokens is None else (tokens, config.embed)
    )
    like_x = jax.ShapeDtypeStruct(shape, config.dtype)
    like = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), params)
    exported = export.export(
        jax.jit(lambda params, x: layer(config, params, x)),
        platforms=["cpu", "cuda"],
        disabled_checks=jgg.EXPORT_DISABLED_CHECKS,
    )(like, like_x)
    return bytes(exported.serialize())


class Server:
    """Answers requests with exported programs, one for each number of tokens."""

    def __init__(self, programs: Mapping[int, Path], params: Mapping[str, Any]):
        calls = {path: _call_of(path) for path in set(programs.values())}
        self.calls = {bucket: calls[path] for bucket, path in programs.items()}
        self.params = params
        self.buckets = sorted(programs)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Returns the result [T, D] for tokens [T, D], which it pads to the next bucket."""
        if len(x) > self.buckets[-1]:
            raise ValueError(f"{len(x)} tokens do not fit the largest bucket, {self.buckets[-1]}")
        size = next(bucket for bucket in self.buckets if bucket >= len(x))
        padded = np.zeros((size, x.shape[1]), x.dtype)
        padded[: len(x)] = x
        return np.asarray(self.calls[size](self.params, padded))[: len(x)]


def _call_of(program: Path) -> Any:
    return jax.jit(export.deserialize(bytearray(program.read_bytes())).call)


def programs_of(
    config: Config, params: Mapping[str, Any], kind: str, folder: Path
) -> dict[int, Path]:
    """Writes the programs of a server, and returns the file of the program of each bucket."""
    found = {}
    for bucket in config.buckets:
        found[bucket] = folder / ("layer.bin" if kind == "fp8" else f"layer_{bucket}.bin")
        if not found[bucket].exists():
            tokens = None if kind == "fp8" else bucket
            found[bucket].write_bytes(export_layer(config, params, tokens))
    return found


def main(arguments: Sequence[str] | None = None) -> dict[int, float]:
    """Serves requests, and returns the median milliseconds of a request for each bucket."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--preset", choices=PRESETS, default="cpu")
    parser.add_argument("--weights", choices=WEIGHTS, default="fp8")
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    config = PRESETS[options.preset]
    print(jgg.unavailable_reason() or "the kernels run on this machine")

    params = quantized(config, options.seed, options.weights)
    rng = np.random.default_rng(options.seed)
    with TemporaryDirectory() as folder:
        programs = programs_of(config, params, options.weights, Path(folder))
        for program in sorted(set(programs.values())):
            print(f"exported: {program.name}, {program.stat().st_size / 1e3:.0f} kB")
        server = Server(programs, params)

    for bucket in config.buckets:  # compile before the first request
        server(np.zeros((bucket, config.embed), config.dtype))
    times: dict[int, list[float]] = {bucket: [] for bucket in config.buckets}
    for _ in range(options.requests):
        bucket = int(rng.choice(config.buckets))
        count = int(rng.integers(bucket // 2, bucket, endpoint=True)) or 1
        tokens = rng.standard_normal((count, config.embed)).astype(config.dtype)
        started = time.perf_counter()
        server(tokens)
        times[bucket].append((time.perf_counter() - started) * 1e3)
    medians = {bucket: statistics.median(each) for bucket, each in times.items() if each}
    for bucket, median in medians.items():
        print(f"up to {bucket} tokens: {median:.2f} ms, with the way to the device and back")
    return medians


if __name__ == "__main__":
    main()
