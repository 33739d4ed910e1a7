"""An optimiser of Flax NNX models that writes the quantised weights of their layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Container
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_grouped_gemm import optim
from jax_grouped_gemm._src.mlp.fp8.weights import QuantizedMlp
from jax_grouped_gemm._src.optimizer.weights import Path, at, nested
from jax_grouped_gemm.flax._experts import as_dict, from_dict
from jax_grouped_gemm.flax.nnx.layer import MATRICES, MoE, Quantized, put, quantize


class Optimizer(nnx.Module):
    """Optimises a model with an optimiser of `optim`, and updates its layers' quantised weights.

    It has the interface of `nnx.Optimizer`:

        optimizer = Optimizer(model, optim.adamw(1e-3, recipe=recipe), wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer, batch):
            gradients = nnx.grad(loss)(optimizer.compute_model(model), batch)
            optimizer.update(model, gradients)

    It quantises the same layers as `quantize` would without a format, and ignores the attribute
    `select` of `optimizer`. The quantised weights are in the layers, as variables of the type
    `Quantized`. Layers that share parameters share their quantised weights too.

    Attributes:
      step: number of calls of `update`.
      optimizer: the optimiser.
      opt_state: the optimiser's state, as `nnx.OptState` variables, without the quantised weights.
      wrt: the filter.

    Args:
      model: an NNX module.
      optimizer: a result of `optim.adamw` or `optim.quantized`.
      wrt: filter of the variables to optimise, as for `nnx.grad`.

    Raises:
      TypeError: `optimizer` is not an optimiser of `optim`.
      ValueError: layers share some of their weights but not all, or `wrt` leaves some weights out,
        or a layer's recipe quantises weights differently from the optimiser's.
    """

    def __init__(self, model: nnx.Module, optimizer: optim.Optimizer, *, wrt: Any = nnx.Param):
        if not isinstance(optimizer, optim.Optimizer):
            raise TypeError(
                "Optimizer: optimizer must be a result of optim.adamw or optim.quantized, got "
                f"{optimizer!r}; nnx.Optimizer takes Optax's optimisers"
            )
        self.optimizer = optimizer
        self.wrt = wrt
        self.step = nnx.OptState(jnp.array(0, jnp.uint32))
        quantize(model)
        for layers in _layers(model, wrt).values():
            for layer in layers:
                if layer.recipe and optimizer.recipe.weights != layer.recipe.weights:
                    raise ValueError(
                        "Optimizer: the recipe of the optimiser must quantise weights as that of "
                        f"the layers does, {layer.recipe}, got {optimizer.recipe}"
                    )
            for layer in layers[1:]:
                layer.quantized = layers[0].quantized
        # Make the state from variables, so that it has the parameters' metadata.
        state = self._selecting(()).init(nnx.state(model, wrt))
        self.opt_state = nnx.data(_as_opt_state((state.inner, state.master)))

    def compute_model(self, model: nnx.Module) -> Any:
        """Returns a copy of `model` for `nnx.grad`, which then gives 16-bit gradients of experts.

        If a quantised layer has a `dtype` of 16 bits, the copies of its matrices have this dtype.
        XLA removes the casts, because the layer reads the quantised weights. If the loss changes
        the copy, for example its statistics, `model` itself does not change.
        """
        copy = nnx.clone(model)
        for layers in _layers(copy, self.wrt).values():
            dtype = layers[0].dtype
            if dtype is not None and jnp.dtype(dtype).itemsize == 2:
                for name in MATRICES:
                    variable = getattr(layers[0], name)
                    variable.set_value(variable[...].astype(dtype))
        return copy

    def update(self, model: nnx.Module, gradients: Any, **options: Any) -> None:
        """Takes a step: changes the parameters and the quantised weights of `model`.

        Args:
          model: the model.
          gradients: gradients from `nnx.grad`.
          **options: options of `optim.Optimizer.step`, such as `factor`.
        """
        layers = _layers(model, self.wrt)
        params = nnx.as_pure(nnx.state(model, self.wrt))
        inner, master = nnx.as_pure(self.opt_state)
        quantized = {
            path: from_dict(
                jax.tree.map(lambda x: x.get_value(), of_path[0].quantized, is_leaf=_is_variable)
            )
            for path, of_path in layers.items()
        }
        params, state = self._selecting(layers).step(
            params,
            nnx.as_pure(nnx.state(gradients, self.wrt)),
            optim.OptimizerState(inner, master, nested(quantized)),
            **options,
        )
        nnx.update(model, params)
        nnx.update(self.opt_state, nnx.state((state.inner, state.master)))
        for path, of_path in layers.items():
            put(of_path[0], as_dict(at(state.quantized, path)))
        self.step[...] += 1

    def _selecting(self, paths: Container[Path]) -> optim.Optimizer:
        """Returns the optimiser that quantises the layers at `paths`."""

        def select(path: Path, leaf: Any) -> bool:
            return bool(path) and path[:-1] in paths and path[-1] in MATRICES

        return dataclasses.replace(self.optimizer, select=select)


def quantized_state(quantized: Any) -> nnx.State:
    """Returns the `Quantized` variables of a model, from `optim.OptimizerState.quantized`.

    Use it in functions that take `nnx.State`s:

        quantize(model)  # so that the graph has `Quantized` variables
        graph, params, _ = nnx.split(model, nnx.Param, Quantized)
        model = nnx.merge(graph, params, quantized_state(state.quantized))
    """

    def of(node: Any) -> dict[Any, Any]:
        if isinstance(node, QuantizedMlp):
            return {"quantized": jax.tree.map(Quantized, as_dict(node))}
        return {name: of(value) for name, value in node.items()}

    return nnx.State(of(quantized))


def _is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


def _as_opt_state(tree: Any) -> Any:
    """Returns `nnx.OptState` variables for arrays or variables, with the variables' metadata."""

    def of(x: Any) -> nnx.Variable:
        if not _is_variable(x):
            return nnx.OptState(x)
        metadata = x.get_metadata()
        return nnx.OptState(x.get_value(), **metadata)

    return jax.tree.map(of, tree, is_leaf=_is_variable)


def _layers(model: nnx.Module, wrt: Any) -> dict[Path, list[MoE]]:
    """Returns the quantised layers, by the paths of their parameters in the state."""
    place = {id(x): path for path, x in nnx.to_flat_state(nnx.state(model, wrt))}
    layers: dict[Path, list[MoE]] = {}
    for _, module in nnx.iter_graph(model):
        # Take the layers that `quantize` chose. A new choice could differ if the mesh has changed.
        if not isinstance(module, MoE) or module.quantized is None or module.formats is not None:
            continue
        paths = [place.get(id(getattr(module, name)), ()) for name in MATRICES]
        (node, *others) = {path[:-1] for path in paths}
        if others or () in paths:
            raise ValueError(
                "Optimizer: wi_0, wi_1 and wo of a layer in FP8 must be optimised, and layers must "
                f"share all or none of them; got a layer with parameters at {paths}"
            )
        layers.setdefault(node, []).append(module)
    return layers
