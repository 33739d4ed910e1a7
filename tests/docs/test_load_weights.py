"""Layers with loaded weights compute the results of Hugging Face's modules."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from tests.docs.test_examples import ROOT, blocks


@pytest.fixture
def load_moe():
    namespace = {}
    exec(blocks(ROOT / "docs" / "tutorials" / "load_weights.md", "python")[0][1], namespace)
    return namespace["load_moe"]


@pytest.mark.parametrize("normalize", [True, False])
def test_qwen3_moe(load_moe, normalize):
    torch = pytest.importorskip("torch")
    models = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
    config = models.Qwen3MoeConfig(
        hidden_size=32, moe_intermediate_size=48, num_experts=8, num_experts_per_tok=3,
        norm_topk_prob=normalize,
    )  # fmt: skip
    theirs = models.Qwen3MoeSparseMoeBlock(config)
    compare(load_moe, torch, theirs, "mlp.", "qwen3_moe", 3, normalize)


def test_mixtral(load_moe):
    torch = pytest.importorskip("torch")
    models = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    config = models.MixtralConfig(
        hidden_size=32, intermediate_size=48, num_local_experts=8, num_experts_per_tok=2
    )
    theirs = models.MixtralSparseMoeBlock(config)
    compare(load_moe, torch, theirs, "block_sparse_moe.", "mixtral", 2, True)


def compare(load_moe, torch, theirs, block, kind, top_k, normalize):
    theirs = theirs.eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_()
        x = torch.randn(2, 5, 32)
        expected = theirs(x)
    expected = expected[0] if isinstance(expected, tuple) else expected
    tensors = {
        f"model.layers.3.{block}{name}": value
        for name, value in as_published(theirs.state_dict(), kind).items()
    }
    layer = load_moe(tensors, 3, kind, top_k=top_k, renormalize=normalize, dtype=jnp.float32)
    y, _ = layer(x.numpy())
    scale = np.abs(expected.numpy()).max()
    np.testing.assert_allclose(y / scale, expected.numpy() / scale, atol=1e-4)


def as_published(state, kind) -> dict[str, np.ndarray]:
    """Returns a module's parameters as in checkpoints: a matrix for each expert and projection.

    From version 5 on, `transformers` stacks these matrices when it loads a checkpoint, with gate
    above up.
    """
    found = {name: value.numpy() for name, value in state.items()}
    if "experts.gate_up_proj" not in found:
        return found
    gate_up, down = found.pop("experts.gate_up_proj"), found.pop("experts.down_proj")
    names = {"mixtral": ("w1", "w3", "w2"), "qwen3_moe": ("gate_proj", "up_proj", "down_proj")}
    for e in range(len(down)):
        gate, up = np.split(gate_up[e], 2)
        for name, value in zip(names[kind], (gate, up, down[e]), strict=True):
            found[f"experts.{e}.{name}.weight"] = value
    return found
