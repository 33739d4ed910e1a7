"""A mixture-of-experts layer of QuACK's fused kernels, composed as in SonicMoE.

The forward pass computes gate and up with a gathered operand and the activation, the down
projection, and a weighted sum of each token's rows. The backward pass computes the gradients of
gate, up and the router's weights, two weight gradients with gathered operands, and the gradient of
the rows of x and its sums by token. QuACK needs alternating columns of gate and up. Weights are
stored k-major, which is fastest.
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness.peer import Peer, Role, TorchCall, as_torch, once
from benchmarks.peers import quack
from benchmarks.peers.sweep import Sweep

BLOCK = 1024  # columns that a Triton program sums

# The products, in the order of a step.
KINDS = ("gate_up", "down", "gate_up_gradient", "down_weights", "x_gradient", "gate_up_weights")
# Products that gather an operand, and products whose epilogue works on pairs of columns.
GATHERED = ("gate_up", "gate_up_gradient", "down_weights", "gate_up_weights")
PAIRED = ("gate_up", "gate_up_gradient")
# Results of two configurations may differ by this much, relative to the norm of a result.
TOLERANCE = 0.01


@dataclass(frozen=True)
class Config(quack.Config):
    """A configuration that also says whether blocks take tiles from a counter (dynamic)."""

    is_dynamic_persistent: bool = False

    def __str__(self) -> str:
        return super().__str__() + ", dynamic" * self.is_dynamic_persistent


def candidates(kind: str) -> list[Config]:
    """Returns the configurations that QuACK's autotuner would try for a kind, its default first.

    The gradient of gate and up has dynamic and static tile schedulers, because QuACK's default is
    dynamic, but SonicMoE's scheduler is static.
    """
    return [
        Config(**asdict(tiles), is_dynamic_persistent=dynamic)
        for tiles in quack.CONFIGS
        for dynamic in ((True, False) if kind == "gate_up_gradient" else (False,))
        # Each block gathers rows for itself, so blocks of a cluster cannot share them.
        if kind not in GATHERED or (tiles.cluster_n == 1 and tiles.tile_n != 208)
        if kind not in PAIRED or tiles.tile_n % 32 == 0
    ]


# Computes a product from a configuration (None for QuACK's default) and other products' results.
Function = Callable[..., Sequence[Any]]
# Computes the product of a kind from other products' results.
Choice = Callable[..., Sequence[Any]]


def functions(
    x: Any, dy: Any, rows: Any, starts: Any, weights: Any, w_in: Any, w_out: Any
) -> dict[str, Function]:
    """Returns QuACK's products by kind, for PyTorch tensors.

    Args:
      x, dy: [T, D].
      rows: [T * K], the token of each sorted row.
      starts: [E + 1], the first sorted row of each expert.
      weights: [T * K], the router's weights of the sorted rows.
      w_in, w_out: [E, 2 F, D] with alternating gate and up, and [E, D, F].
    """
    import torch
    from quack.gemm_interface import gemm_act, gemm_dact, gemm_tuned

    by_row = dict(cu_seqlens_m=starts)
    by_expert = dict(cu_seqlens_k=starts, A_idx=rows)

    def pinned(config: Config | None) -> Any:
        return config and quack.gemm_config(config)

    def plain(config: Config | None, a: Any, b: Any, *shape: int, **ragged: Any) -> tuple:
        # Call the function under the autotuner, as QuACK's public `gemm(tuned=False)` does.
        out = torch.empty(shape, dtype=a.dtype, device=a.device)
        gemm_tuned.fn(a, b, out, config=pinned(config), **ragged)
        return (out,)

    def gate_up(config: Config | None) -> tuple:
        options = dict(tuned=False, config=pinned(config))
        return gemm_act(x, w_in.mT, activation="swiglu", A_idx=rows, **by_row, **options)

    def gate_up_gradient(config: Config | None, gate_up: Any) -> tuple:
        return gemm_dact(
            dy,
            w_out,
            gate_up,
            activation="swiglu",
            A_idx=rows,
            colvec_scale=weights,
            colvec_reduce=True,
            tuned=False,
            config=pinned(config),
            # QuACK's default is dynamic. A configuration has its own setting.
            dynamic_scheduler=config is None,
            **by_row,
        )

    (experts, d, f), m = w_out.shape, rows.shape[0]
    return {
        "gate_up": gate_up,
        "down": lambda config, a: plain(config, a, w_out.mT, m, d, **by_row),
        "gate_up_gradient": gate_up_gradient,
        "down_weights": lambda config, a: plain(config, dy.T, a, experts, d, f, **by_expert),
        "x_gradient": lambda config, a: plain(config, a, w_in, m, d, **by_row),
        "gate_up_weights": lambda config, a: plain(config, x.T, a, experts, d, 2 * f, **by_expert),
    }


def products(experts: int, m: int, d: int, f: int) -> dict[str, str]:
    """Returns the products' names in the file of configurations, by kind."""
    sizes = zip(KINDS, ((d, 2 * f), (f, d), (d, f), (d, f), (2 * f, d), (d, 2 * f)), strict=True)
    return {kind: f"{kind}/{experts}x{m}x{k}x{n}/bfloat16" for kind, (k, n) in sizes}


def parts_in_order(kinds: Sequence[str]) -> Callable[[str], str]:
    """Returns a `part_of` that distinguishes products by their order, because names are equal."""
    products, others = itertools.cycle(kinds), {"sum_of_rows": "combine"}
    return lambda kernel: next(products) if "cutlass" in kernel else others.get(kernel, "PyTorch")


class SeveralResults(TorchCall):
    """A call with several results, which waits for the first one."""

    def wait(self, result: Sequence[Any]) -> None:
        super().wait(result[0])

    def to_jax(self, result: Sequence[Any]) -> tuple[jax.Array, ...]:
        return tuple(map(super().to_jax, result))


class LayerCall(SeveralResults):
    """A call of a layer, whose results are y and, for a step, the gradients.

    `inverse` [T, K] is the sorted row of each token's choice.
    """

    def __init__(self, run: Callable[[], Sequence[Any]], detail: str, inverse: np.ndarray):
        super().__init__(run, detail)
        self._inverse = inverse

    def to_jax(self, result: Sequence[Any]) -> tuple[jax.Array, ...]:
        arrays = super().to_jax(result)
        if len(arrays) == 1:
            return arrays
        y, of_x, of_sorted_weights, of_in, of_out = arrays
        of_weights = of_sorted_weights.reshape(-1)[self._inverse]
        return y, of_x, of_weights, of_in[..., ::2], of_in[..., 1::2], jnp.swapaxes(of_out, 1, 2)


def tuned(
    sweep: Sweep,
    compose: Callable[[Choice], object],
    of_kind: Mapping[str, Function],
    named: Mapping[str, str],
) -> dict[str, Config]:
    """Returns the fastest configuration of each product of `compose`, and sweeps if it is unknown.

    A configuration whose result differs from that of QuACK's default does not count.
    """
    configs: dict[str, Config] = {}

    def swept(kind: str, *inputs: Any) -> Sequence[Any]:
        def function(config: Config | None) -> Callable[[], Sequence[Any]]:
            return functools.partial(of_kind[kind], config, *inputs)

        expected = functools.cache(function(None))

        def prepare(config: Config) -> SeveralResults:
            call = SeveralResults(function(config), str(config))
            call.config = config
            if any(map(differ, call.run(), expected())):
                raise ValueError(f"{config} gives another result than the default")
            return call

        best = sweep.best(named[kind], candidates(kind), prepare)
        configs[kind] = best.config
        return best.run()

    compose(swept)
    return configs


def differ(one: Any, other: Any) -> bool:
    """Returns whether two tensors differ by more than rounding, or have NaN."""
    import torch

    error, norm = (x.norm(dtype=torch.float32) for x in (one - other, other))
    return not error <= TOLERANCE * norm


class QuackLayer(Peer):
    """QuACK's layer, with its default configurations, or with a sweep for each product."""

    role = Role.GROUPED
    needs = ("torch", "triton", "quack", "GPU")

    def __init__(self, sweep: Sweep | None = None):
        self.name = "quack_tuned" if sweep else "quack"
        self._sweep = sweep

    def prepare(self, problem: Any, *operands: jax.Array) -> LayerCall:
        """Shares the operands with PyTorch, sorts the rows, and compiles the kernels."""
        import torch

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
        of_kind = functions(x, dy, rows, starts, sorted_weights, w_in, w_out)
        add_rows = adder_of_rows()

        def forward(product: Choice) -> tuple:
            gate_up, hidden = product("gate_up")
            (out,) = product("down", hidden)
            return gate_up, add_rows(out, places, tokens, weights)

        def step(product: Choice) -> tuple:
            gate_up, y = forward(product)
            gradient, hidden, of_weights = product("gate_up_gradient", gate_up)
            (of_out,) = product("down_weights", hidden)
            (of_rows,) = product("x_gradient", gradient)
            of_x = add_rows(of_rows, places, tokens)
            (of_in,) = product("gate_up_weights", gradient)
            return y, of_x, of_weights, of_in, of_out

        def compose(product: Choice) -> tuple:
            return step(product) if problem.is_step else forward(product)[1:]

        configs: dict[str, Config] = {}
        detail = "default configurations"
        if self._sweep:
            named = products(wo.shape[0], order.size, *w_out.shape[1:])
            configs = tuned(self._sweep, compose, of_kind, named)
            detail = "; ".join(f"{kind}: {config}" for kind, config in configs.items())

        def run() -> tuple:
            return compose(lambda kind, *inputs: of_kind[kind](configs.get(kind), *inputs))

        call = LayerCall(run, detail, inverse.reshape(tokens, top_k))
        call.part_of = parts_in_order(KINDS if problem.is_step else KINDS[:2])
        return once(call)


def adder_of_rows():
    """Returns a function of (rows, places [T * K], T, weights) that sums the rows of each token."""
    import torch
    import triton
    import triton.language as tl

    @triton.jit
    def sum_of_rows(
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
        top_k, grid = places.numel() // tokens, (tokens, triton.cdiv(columns, BLOCK))
        sum_of_rows[grid](rows, places, weights, out, columns, top_k, weights is not None, BLOCK)
        return out

    return add
