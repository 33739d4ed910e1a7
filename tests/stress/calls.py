"""Records the custom calls that our functions make when they are lowered for a GPU.

No GPU is needed. The record of a call has the shapes and dtypes of the operands and results, and
the attributes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import jax_grouped_gemm as jgg
from benchmarks.harness.peer import on_gpu
from jax_grouped_gemm import moe, optim
from jax_grouped_gemm._src.fp8.scaled import plan as plan_fp8
from jax_grouped_gemm._src.op import ops

Aval = jax.ShapeDtypeStruct
M, K, N, G = 200, 136, 264, 5
NARROW = 72
FEW_ROWS = 8
MOST_DRAWN = 1 << 20


@dataclass(frozen=True)
class FfiCall:
    """A custom call of one of our targets.

    Attributes:
      target: the name of the target.
      operands, results: shapes and dtypes.
      attributes: keyword arguments of the function that `jax.ffi.ffi_call` returns.
      aliases: the index of an operand, and of the result that takes over the operand's memory.
    """

    target: str
    operands: tuple[Aval, ...]
    results: tuple[Aval, ...]
    attributes: dict[str, Any]
    aliases: dict[int, int]

    def replace(self, **changes: Any) -> FfiCall:
        """Returns a copy of the call with some fields changed."""
        return dataclasses.replace(self, **changes)

    def lower(self) -> jax.stages.Lowered:
        """Lowers a program of this call alone for a GPU, which need not be present."""
        function = jax.ffi.ffi_call(
            self.target, list(self.results), input_output_aliases=self.aliases
        )
        traced = jax.jit(lambda *operands: function(*operands, **self.attributes)).trace(
            *self.operands
        )
        return traced.lower(lowering_platforms=None if on_gpu() else ("cuda",))


@contextlib.contextmanager
def recording() -> Iterator[list[FfiCall]]:
    """Yields a list to which every custom call that is lowered inside is added."""
    calls: list[FfiCall] = []
    original = jax.ffi.ffi_call

    def ffi_call(target, results, *, input_output_aliases=None, **options):
        function = original(target, results, input_output_aliases=input_output_aliases, **options)

        def call(*operands, **attributes):
            calls.append(
                FfiCall(
                    target,
                    tuple(Aval(x.shape, x.dtype) for x in operands),
                    tuple(Aval(x.shape, x.dtype) for x in jax.tree.leaves(results)),
                    attributes,
                    dict(input_output_aliases or {}),
                )
            )
            return function(*operands, **attributes)

        return call

    with mock.patch.object(jax.ffi, "ffi_call", ffi_call):
        yield calls


def _lower(function, *operands: Aval) -> None:
    jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",))


def _a(*shape: int, dtype=jnp.bfloat16) -> Aval:
    return Aval(shape, dtype)


def _ragged_products() -> None:
    for dtype, m in ((jnp.bfloat16, M), (jnp.float32, M), (jnp.float32, FEW_ROWS)):
        lhs, rhs, sizes = _a(m, K, dtype=dtype), _a(G, K, N, dtype=dtype), _a(G, dtype=jnp.int32)

        def loss(lhs, rhs, sizes):
            return jgg.ragged_dot(lhs, rhs, sizes).astype(jnp.float32).sum()

        _lower(jax.grad(loss, (0, 1)), lhs, rhs, sizes)
        # The last wave of this product is cut along K.
        _lower(jgg.ragged_dot, _a(2048, 8192), _a(2, 8192, 4096), _a(2, dtype=jnp.int32))
    _lower(
        jgg.ragged_dot_accumulate,
        _a(G, K, N, dtype=jnp.float32), _a(M, K), _a(M, N), _a(G, dtype=jnp.int32),
    )  # fmt: skip


def _mlps() -> None:
    def loss(x, wi_0, wi_1, wo, weights, sizes, recipe=None):
        y = jgg.ragged_mlp(x, wi_0, wi_1, wo, sizes, weights=weights, recipe=recipe)
        return y.astype(jnp.float32).sum()

    for m, n, recipe in (
        (M, N, None),
        (FEW_ROWS, N, None),
        (M, N, jgg.Recipe()),
        (M, NARROW, jgg.Recipe()),
        (M, N, jgg.Recipe(wgrad="bf16")),
    ):
        operands = _a(m, K), _a(G, K, n), _a(G, K, n), _a(G, n, K), _a(m, dtype=jnp.float32)
        function = functools.partial(loss, recipe=recipe)
        _lower(jax.grad(function, (0, 1, 2, 3, 4)), *operands, _a(G, dtype=jnp.int32))
        _lower(function, *operands, _a(G, dtype=jnp.int32))

    # The kernels of this layer read the rows of tokens and of their gradients in place.
    def of_tokens(x, logits, *matrices):
        y = moe.dropless_mlp(x, moe.route(logits, 2), *matrices)
        return y.astype(jnp.float32).sum()

    matrices = _a(G, K, N), _a(G, K, N), _a(G, N, K)
    _lower(jax.grad(of_tokens, (0, 2, 3, 4)), _a(M, K), _a(M, G, dtype=jnp.float32), *matrices)


def _packed_products() -> None:
    for name in ("mxfp4", "int4", "int8"):
        q, down = (
            jax.eval_shape(lambda w, name=name: jgg.quantize(w, name), _a(G, *shape))
            for shape in ((K, N), (N, K))
        )
        for m in (FEW_ROWS, M):
            operands = _a(m, K), q, q, down, _a(G, dtype=jnp.int32)
            _lower(jgg.ragged_mlp, *operands)
            _lower(jgg.ragged_dot, operands[0], q, operands[-1])
        _lower(jgg.dequantize, q)


def _layers_of_few_tokens() -> None:
    def layer(x, logits, experts, scores, wi_0, wi_1, wo, *biases):
        routing = moe.Routing(logits, experts, scores)
        return moe.dropless_mlp(x, routing, wi_0, wi_1, wo, biases=biases or None)

    routing = (
        _a(FEW_ROWS, G, dtype=jnp.float32), _a(FEW_ROWS, 2, dtype=jnp.int32),
        _a(FEW_ROWS, 2, dtype=jnp.float32),
    )  # fmt: skip
    for name in (None, "mxfp4", "int4", "int8"):
        wi, wo = (
            jax.eval_shape(lambda w, name=name: jgg.quantize(w, name) if name else w, _a(G, *shape))
            for shape in ((K, N), (N, K))
        )
        for biases in (), (_a(G, N), _a(G, N, dtype=jnp.float32), _a(G, K)):
            _lower(layer, _a(FEW_ROWS, K), *routing, wi, wi, wo, *biases)

    def in_fp8(quantized, x, logits, experts, scores, *matrices):
        options = dict(recipe=jgg.Recipe(), quantized=quantized)
        return moe.dropless_mlp(x, moe.Routing(logits, experts, scores), *matrices, **options)

    # TMA reads rows in FP8, so they have multiples of 16 elements.
    matrices = _a(G, 144, 272), _a(G, 144, 272), _a(G, 272, 144)
    quantized = jax.eval_shape(jgg.quantize_mlp, *matrices)
    # Kernels that quantise their rows take at most 1.5 rows an expert.
    fewer = [_a(2, *x.shape[1:], dtype=x.dtype) for x in routing]
    _lower(in_fp8, quantized, _a(2, 144), *fewer, *matrices)


def _fp8_products() -> None:
    def loss(lhs, rhs, sizes):
        return jgg.fp8_ragged_dot(lhs, rhs, sizes).astype(jnp.float32).sum()

    for m in (M, FEW_ROWS):
        _lower(jax.grad(loss, (0, 1)), _a(m, K), _a(G, K, N), _a(G, dtype=jnp.int32))
    for choice in plan_fp8.NONCONTRACTING_KERNELS:
        with jgg.use_tiles(forward=choice.tile):
            _lower(
                lambda *x: jgg.scaled_ragged_dot(*x, transpose_rhs=True),
                _a(M, K, dtype=jnp.float8_e4m3fn), _a(M, 2, dtype=jnp.float32),
                _a(G, N, K, dtype=jnp.float8_e4m3fn), _a(G, 3, 2, dtype=jnp.float32),
                _a(G, dtype=jnp.int32),
            )  # fmt: skip
    # The kernels of this MLP read tokens in place.
    _lower(
        lambda *x: jgg.ragged_mlp(*x[:-1], rows=x[-1], recipe=jgg.Recipe()),
        _a(M // 3, 512), _a(G, 512, K), _a(G, 512, K), _a(G, K, 512),
        _a(G, dtype=jnp.int32), _a(M, dtype=jnp.int32),
    )  # fmt: skip
    # With fewer rows than tokens, a kernel quantises tokens as it copies them to rows.
    _lower(
        lambda *x: jgg.ragged_mlp(*x[:-1], rows=x[-1], recipe=jgg.Recipe()),
        _a(M // 3, K), _a(G, K, N), _a(G, K, N), _a(G, N, K),
        _a(G, dtype=jnp.int32), _a(FEW_ROWS, dtype=jnp.int32),
    )  # fmt: skip
    _lower(jgg.quantize_blockwise, _a(M, K))
    _lower(lambda x: jgg.quantize_weights(x), _a(G, K, N))


def _lists() -> None:
    for dtype in (jnp.bfloat16, jnp.float32, jnp.float64, jnp.complex64):
        with jax.enable_x64(True):
            lists = [[_a(M, K, dtype=dtype), _a(3, 72, 40, dtype=dtype)],
                     [_a(K, N, dtype=dtype), _a(3, 40, 24, dtype=dtype)],
                     [_a(M, N, dtype=dtype), _a(3, 72, 24, dtype=dtype)]]  # fmt: skip
            for scheduler in ("device", "host_precomputed"):
                _lower(
                    lambda a, b, c, alpha, s=scheduler: jgg.grouped_gemm(
                        a, b, c, alpha=alpha, beta=2.0, scheduler=s
                    ),
                    *lists,
                    _a(dtype=dtype),
                )
            stack = _a(3, 264, 136, dtype=dtype)
            square = _a(3, 264, 264, dtype=dtype)
            options = dict(precision="highest", implementation="cuda")
            _lower(lambda a, options=options: jgg.grouped_syrk(a, **options), stack)
            _lower(
                lambda a, b, c, options=options: jgg.grouped_her2k(a, b, c, beta=2.0, **options),
                stack, stack, square,
            )  # fmt: skip


def _rows() -> None:
    def moved(x, y, weights, rows, tokens, experts):
        gathered = moe.gather_rows(x, tokens), moe.gather_rows(x, tokens, inverse=rows)
        total = moe.combine(y, rows, weights=weights, order=tokens)
        return *gathered, total, moe.sort_by_expert(experts, 8)

    def loss(x, y, weights, rows, tokens, experts):
        results = moved(x, y, weights, rows, tokens, experts)
        return sum(result.astype(jnp.float32).sum() for result in results[:3])

    operands = (
        _a(61, 40), _a(183, 40), _a(61, 3, dtype=jnp.float32),
        *(_a(*shape, dtype=jnp.int32) for shape in ((61, 3), (183,), (9000,))),
    )  # fmt: skip
    _lower(moved, *operands)
    _lower(jax.grad(loss, (0, 1, 2)), *operands)


def _optimizers() -> None:
    shapes = dict(wi_0=_a(G, K, N), wi_1=_a(G, K, N), wo=_a(G, N, K))
    identity = types.SimpleNamespace(
        init=lambda params: (), update=lambda g, state, params: (g, state)
    )
    for optimizer in (optim.adamw(1e-3), optim.quantized(identity)):
        for dtype in (jnp.float32, jnp.bfloat16):
            params = {name: Aval(x.shape, dtype) for name, x in shapes.items()}
            _lower(optimizer.step, params, shapes, jax.eval_shape(optimizer.init, params))


PARTS = (
    _ragged_products, _mlps, _packed_products, _layers_of_few_tokens, _fp8_products, _lists, _rows,
    _optimizers,
)  # fmt: skip


def valid_calls() -> list[FfiCall]:
    """Returns at least one call of every target. No two calls are equal."""
    with recording() as calls:
        for part in PARTS:
            part()
    return list({repr(call): call for call in calls}.values())


def targets() -> set[str]:
    """Returns the targets that our operations call."""
    return {target for op in ops.values() for target in op.targets}


def random_operand(rng: np.random.Generator, aval: Aval) -> np.ndarray:
    """Returns small values. int32 values may be sizes and indices, so some are out of range."""
    if aval.dtype == np.int32 and len(aval.shape) == 3:
        return np.zeros(aval.shape, np.int32)  # a schedule: zeros stand for the first unit
    if aval.dtype == np.int32:
        return rng.integers(-2, 40, aval.shape).astype(np.int32)
    if np.issubdtype(aval.dtype, np.integer) or aval.dtype == bool:
        return rng.integers(0, 2, aval.shape).astype(aval.dtype)
    # Repeat the drawn values, because drawing tens of millions takes seconds.
    drawn = rng.standard_normal(min(aval.size, MOST_DRAWN), np.float32).astype(aval.dtype)
    return np.resize(drawn, aval.shape)
