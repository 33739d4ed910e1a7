"""Published models as Flax layers, and the same models in float64, a token at a time."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

from jax_grouped_gemm import moe
from jax_grouped_gemm.flax import linen as of_linen
from jax_grouped_gemm.flax import nnx as of_nnx

BATCH, LENGTH, D, F, E = 4, 6, 16, 8, 8
DEEPSEEK = dict(top_k=3, scoring="sigmoid", num_groups=4, top_groups=2, scale=2.5)
LLAMA = partial(moe.route, top_k=1, scoring="sigmoid", renormalize=False)


class LinenRouter(nn.Module):
    """The router of DeepSeek-V3, whose correction bias is no parameter."""

    @nn.compact
    def __call__(self, logits):
        bias = self.variable("router", "correction_bias", jnp.zeros, logits.shape[-1:])
        return moe.route(logits, correction_bias=bias.value, **DEEPSEEK)


class NnxRouter(nnx.Module):
    def __init__(self):
        self.correction_bias = nnx.Variable(jnp.zeros(E))

    def __call__(self, logits):
        return moe.route(logits, correction_bias=self.correction_bias[...], **DEEPSEEK)


def sigmoid(x):
    return 1 / (1 + jnp.exp(-x))


def silu(gate, up):
    return gate * sigmoid(gate) * up


def clipped(gate, up):
    gate = jnp.minimum(gate, 7)
    return gate * sigmoid(1.702 * gate) * (jnp.clip(up, -7, 7) + 1)


def deepseek_v3(logits, bias):
    """Returns experts and weights of one token, from the 2 groups with the best expert pairs."""
    scores = sigmoid(logits)
    criterion = scores + bias
    groups = jnp.sort(criterion.reshape(4, 2), axis=1).sum(axis=1)
    kept = groups >= jnp.sort(groups)[-2]
    experts = jnp.argsort(jnp.where(jnp.repeat(kept, 2), criterion, -jnp.inf))[::-1][:3]
    return experts, 2.5 * scores[experts] / scores[experts].sum()


def gpt_oss(logits, bias):
    experts = jnp.argsort(logits)[::-1][:2]
    weights = jnp.exp(logits[experts] - logits.max())
    return experts, weights / weights.sum()


def llama_4(logits, bias):
    experts = jnp.argsort(logits)[::-1][:1]
    return experts, sigmoid(logits[experts])


OPTIONS = {
    "deepseek_v3": dict(top_k=3),
    "gpt_oss": dict(top_k=2, biases=True, gate_bias=True, activation="swiglu_oai"),
    "llama_4": dict(top_k=1, router=LLAMA, apply_router_weight_on_input=True),
}
BOTH = dict(biases=True, gate_bias=True, bias_init=jax.nn.initializers.normal(1.0))
ROUTERS = dict(deepseek_v3=deepseek_v3, gpt_oss=gpt_oss, llama_4=llama_4)


def parameters(rng, model):
    """Returns parameters by name. In GPT-OSS, some gates and ups exceed their limit."""
    scale = 4.0 if model == "gpt_oss" else 1.0
    gate = dict(kernel=((D, E), D**-0.5))
    shapes = dict(
        gate=gate,
        wi_0=((E, D, F), scale * D**-0.5),
        wi_1=((E, D, F), scale * D**-0.5),
        wo=((E, F, D), F**-0.5),
    )
    if model == "gpt_oss":
        gate["bias"] = ((E,), 1.0)
        shapes |= dict(wi_0_bias=((E, F), 1.0), wi_1_bias=((E, F), 1.0), wo_bias=((E, D), 1.0))
    return jax.tree.map(
        lambda leaf: jnp.asarray(leaf[1] * rng.standard_normal(leaf[0]), jnp.float32),
        shapes,
        is_leaf=lambda leaf: isinstance(leaf, tuple),
    )


def layer_of(library, model, bias, **options):
    """Returns a layer (params, x, mask) -> y, losses with this correction bias in its router."""
    options = OPTIONS[model] | options
    if library == "linen":
        router = dict(router=LinenRouter()) if model == "deepseek_v3" else {}
        layer = of_linen.MoE(F, E, **router | options)
        state = {"router": {"router": {"correction_bias": bias}}} if router else {}
        return lambda params, x, mask=None: layer.apply({"params": params} | state, x, mask)

    router = dict(router=NnxRouter()) if model == "deepseek_v3" else {}
    layer = of_nnx.MoE(D, F, E, **router | options, rngs=nnx.Rngs(0))
    if router:
        layer.router.correction_bias.set_value(bias)
    graph, of_params, rest = nnx.split(layer, nnx.Param, ...)

    def apply(params, x, mask=None):
        state = jax.tree.map(lambda a: a, of_params)
        assert jax.tree.structure(nnx.to_pure_dict(state)) == jax.tree.structure(params)
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(graph, state, rest)(x, mask)

    return apply


def exact_layer(model, bias):
    """Computes the layer in plain jax.numpy, one token and one expert at a time.

    Tokens outside of the mask affect only their own results.
    """
    hidden = clipped if model == "gpt_oss" else silu

    def of_token(params, x):
        logits = x @ params["gate"]["kernel"] + params["gate"].get("bias", 0)
        experts, weights = ROUTERS[model](logits, bias)

        def of_expert(e, weight):
            token = weight * x if model == "llama_4" else x
            gate, up, down = (
                params.get(f"{name}_bias", jnp.zeros((E, 1)))[e] for name in ("wi_0", "wi_1", "wo")
            )
            h = hidden(token @ params["wi_0"][e] + gate, token @ params["wi_1"][e] + up)
            result = h @ params["wo"][e] + down
            return result if model == "llama_4" else weight * result

        return jax.vmap(of_expert)(experts, weights).sum(axis=0), logits, experts

    def apply(params, x, mask):
        y, logits, experts = jax.vmap(partial(of_token, params))(x.reshape(-1, D))
        real = mask.reshape(-1) / mask.sum()
        share = (jax.nn.one_hot(experts, E).mean(axis=1) * real[:, None]).sum(axis=0)
        probabilities = (jax.nn.softmax(logits) * real[:, None]).sum(axis=0)
        z = (jax.nn.logsumexp(logits, axis=-1) ** 2 * real).sum()
        y = jnp.where(mask[..., None], y.reshape(x.shape), 0)
        return y, (E * (share * probabilities).sum(), z)

    return apply


def value_and_gradients(layer, cotangent, params, x, mask):
    def loss(params, x):
        y, (balance, z) = layer(params, x, mask)
        return (y * cotangent.astype(y.dtype)).sum() + balance + 0.1 * z, (y, balance, z)

    (_, values), gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(params, x)
    return values, gradients


@partial(jax.jit, static_argnums=0)
def _exact(model, bias, *given):
    return value_and_gradients(exact_layer(model, bias), *given)


def exact_value_and_gradients(model, bias, cotangent, params, x, mask):
    given = jax.tree.map(lambda a: np.asarray(a, np.float64), (bias, cotangent, params, x))
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, _exact(model, *given, np.asarray(mask)))


def assert_close(got, expected, atol=3e-5):
    """Asserts that errors of each array are small relative to its largest element."""
    for (path, b), a in zip(
        jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(got), strict=True
    ):
        error = np.abs(np.asarray(a).astype(np.float64) - b).max()
        assert error <= atol * max(np.abs(b).max(), 1), jax.tree_util.keystr(path)
