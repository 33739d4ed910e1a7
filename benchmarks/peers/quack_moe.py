"""A mixture-of-experts layer made of QuACK's fused kernels, as SonicMoE composes them.

Forward: gate and up with a gathered operand and the activation, the down projection, a weighted sum
of each token's rows. Backward: the gradients of gate and up with that of the router's weights, two
weight gradients with gathered operands, the gradient of the rows of x, their sum by token. Gate and
up have their columns in turn, as QuACK wants them; weights are stored k-major, which is fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness.peer import Role, TorchCall, as_torch, missing_module, without_gpu

BLOCK = 1024  # columns that one program of the sum takes


class LayerCall(TorchCall):
    """A layer's results: y and, of a step, the gradients that `QuackLayer` returns.

    `inverse` [T, K] is the sorted row of each token's choice.
    """

    def __init__(self, run: Callable[[], Sequence[Any]], detail: str, inverse: np.ndarray):
        super().__init__(run, detail)
        self._inverse = inverse

    def wait(self, result: Sequence[Any]) -> None:
        """Returns when the device has finished."""
        super().wait(result[0])

    def to_jax(self, result: Sequence[Any]) -> tuple[jax.Array, ...]:
        """In the order and the layouts of the suite's operands."""
        arrays = [TorchCall.to_jax(self, x) for x in result]
        if len(arrays) == 1:
            return tuple(arrays)
        y, of_x, of_sorted_weights, of_in, of_out = arrays
        of_weights = of_sorted_weights.reshape(-1)[self._inverse]
        return y, of_x, of_weights, of_in[..., ::2], of_in[..., 1::2], jnp.swapaxes(of_out, 1, 2)


class QuackLayer:
    """The layer by QuACK, with its default configurations or with those that it tunes."""

    role = Role.GROUPED
    slow = False

    def __init__(self, tuned: bool):
        self.name = "quack_tuned" if tuned else "quack"
        self._tuned = tuned

    def unavailable_reason(self) -> str | None:
        """Whether PyTorch, Triton, QuACK or a GPU is missing."""
        missing = (missing_module(name) for name in ("torch", "triton", "quack"))
        return next(filter(None, missing), None) or without_gpu()

    def prepare(self, problem: Any, *operands: jax.Array) -> LayerCall:
        """Shares the operands with PyTorch, sorts the rows, and compiles the kernels."""
        import torch
        from quack.gemm_interface import gemm, gemm_act, gemm_dact

        x, experts, weights, wi_0, wi_1, wo, dy = operands
        tokens, top_k = experts.shape
        flat = np.asarray(experts).reshape(-1)
        order = np.argsort(flat, kind="stable").astype(np.int32)
        inverse = np.argsort(order).astype(np.int32)
        ends = np.cumsum(np.bincount(flat, minlength=wi_0.shape[0]))
        starts = torch.tensor(np.append(0, ends), dtype=torch.int32, device="cuda")
        rows, places, sorted_weights = (
            as_torch(jnp.asarray(a))
            for a in (order // top_k, inverse, np.asarray(weights).reshape(-1)[order])
        )
        in_turn = jnp.stack([wi_0, wi_1], axis=-1).reshape(*wi_0.shape[:2], -1)
        w_in, w_out = (as_torch(jnp.swapaxes(w, 1, 2) + 0) for w in (in_turn, wo))
        x, weights, dy = map(as_torch, (x, weights, dy))
        by_row = dict(cu_seqlens_m=starts, tuned=self._tuned)
        by_expert = dict(cu_seqlens_k=starts, A_idx=rows, tuned=self._tuned)
        add_rows = _sum_of_rows()

        def forward():
            gate_up, hidden = gemm_act(x, w_in.mT, activation="swiglu", A_idx=rows, **by_row)
            out = gemm(hidden, w_out.mT, **by_row)
            return gate_up, add_rows(out, places, tokens, weights)

        def step():
            gate_up, y = forward()
            gradient, hidden, of_weights = gemm_dact(
                dy,
                w_out,
                gate_up,
                activation="swiglu",
                A_idx=rows,
                colvec_scale=sorted_weights,
                colvec_reduce=True,
                **by_row,
            )
            of_out = gemm(dy.T, hidden, **by_expert)
            of_x = add_rows(gemm(gradient, w_in, **by_row), places, tokens)
            of_in = gemm(x.T, gradient, **by_expert)
            return y, of_x, of_weights, of_in, of_out

        def run():
            if not problem.is_step:
                return forward()[1:]
            return step()

        detail = "tuned" if self._tuned else "default configurations"
        call = LayerCall(run, detail, inverse.reshape(tokens, top_k))
        call.wait(call.run())
        return call


def _sum_of_rows():
    """A function (rows, places [T * K], T, weights?) that adds up the rows of each token."""
    import torch
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(
        rows, places, weights, out, columns,
        choices: tl.constexpr, weighted: tl.constexpr, block: tl.constexpr,
    ):  # fmt: skip
        token = tl.program_id(0).to(tl.int64)
        at = tl.program_id(1) * block + tl.arange(0, block)
        inside = at < columns
        added = tl.zeros((block,), tl.float32)
        for choice in tl.static_range(choices):
            pair = token * choices + choice
            row = tl.load(places + pair).to(tl.int64)
            terms = tl.load(rows + row * columns + at, mask=inside, other=0.0).to(tl.float32)
            if weighted:
                terms *= tl.load(weights + pair)
            added += terms
        tl.store(out + token * columns + at, added.to(out.dtype.element_ty), mask=inside)

    def add(rows, places, tokens, weights=None):
        columns = rows.shape[1]
        out = torch.empty(tokens, columns, dtype=rows.dtype, device=rows.device)
        kernel[tokens, triton.cdiv(columns, BLOCK)](
            rows,
            places,
            weights,
            out,
            columns,
            places.numel() // tokens,
            weights is not None,
            BLOCK,
        )
        return out

    return add
