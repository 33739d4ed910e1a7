"""The code of the page about gpt-oss computes the logits of Hugging Face's model, in float32."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.docs.test_examples import ROOT, blocks
from tests.support import weight_formats as oracle


@pytest.fixture(scope="module")
def page():
    """Returns the names that the page's code blocks define, with their values."""
    namespace = {"__name__": "page"}
    for _, block in blocks(ROOT / "docs" / "tutorials" / "gpt_oss.md", "python"):
        exec(block, namespace)
    return namespace


CONFIG = dict(
    vocab_size=70,
    hidden_size=96,
    num_hidden_layers=3,
    sliding_window=5,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=32,
    num_local_experts=4,
    num_experts_per_tok=2,
    intermediate_size=160,
    layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    rms_norm_eps=1e-5,
)
ROPE = dict(
    rope_type="yarn",
    beta_fast=32.0,
    beta_slow=1.0,
    factor=32.0,
    original_max_position_embeddings=4096,
    truncate=False,
)


def as_state(tensors, torch):
    """Returns a checkpoint as the state of Hugging Face's module, with dequantised experts."""
    state = {}
    for name, x in tensors.items():
        if name.endswith("_blocks"):
            scales = tensors[name.replace("_blocks", "_scales")]
            codes = np.stack([x & 15, x >> 4], -1).reshape(*x.shape[:3], 32)
            found = oracle.E2M1[codes] * oracle.e8m0(scales)[..., None]
            found = np.swapaxes(found.reshape(*x.shape[:2], -1), 1, 2)
            state[name.removesuffix("_blocks")] = torch.tensor(found.astype(np.float32))
        elif not name.endswith("_scales"):
            state[name] = torch.tensor(np.asarray(x, np.float32))
    return state


def test_logits_of_files(page, rng, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", minversion="4.55")
    safetensors = pytest.importorskip("safetensors.flax")
    tensors = page["random_tensors"](CONFIG, rng)
    # Write two files, because a published checkpoint consists of several.
    names = sorted(tensors)
    for i in range(2):
        part = {name: jnp.asarray(tensors[name]) for name in names[i::2]}
        safetensors.save_file(part, tmp_path / f"model-{i}.safetensors")
    described = CONFIG | dict(rope_theta=150000, rope_scaling=ROPE)
    (tmp_path / "config.json").write_text(json.dumps(described))
    config, found = page["read"](tmp_path)
    params = page["load"](config, found, jnp.float32)
    tokens = rng.integers(0, CONFIG["vocab_size"], 17)
    got = jax.jit(lambda p, t: page["logits"](p, t, config))(params, tokens)

    with_rope = dict(rope_theta=150000, rope_scaling=dict(ROPE, rope_theta=150000))
    theirs = transformers.GptOssForCausalLM(
        transformers.GptOssConfig(**CONFIG, **with_rope, attn_implementation="eager")
    )
    theirs.load_state_dict(as_state(tensors, torch))
    with torch.no_grad():
        want = theirs.float().eval()(torch.tensor(tokens)[None]).logits[0].numpy()
    scale = np.abs(want).max()
    np.testing.assert_allclose(got / scale, want / scale, atol=1e-5)


def test_a_model_without_files(page, rng):
    """Later tokens do not change earlier logits. This test needs no other library."""
    described = page["config"]
    params = page["load"](described, page["random_tensors"](described, rng), jnp.float32)
    tokens = rng.integers(0, described["vocab_size"], 12)
    whole = page["logits"](params, tokens, described)
    np.testing.assert_allclose(
        page["logits"](params, tokens[:7], described), whole[:7], atol=1e-3 * np.abs(whole).max()
    )
