"""What the pages say of whole layers and of training: tables and numbers from the records."""

from __future__ import annotations

from benchmarks.harness.measure import geometric_mean
from benchmarks.harness.quoting import microseconds, table
from benchmarks.records_by_topic import GIB, MIB, case, cases, ours
from jax_grouped_gemm.demo.presets import PRESETS

RECIPES = ("blockwise_bf16_wgrad", "blockwise")


def layer_names(topic: str) -> list[str]:
    """The layers of a topic's records, in their order."""
    return list(dict.fromkeys(found["shape"]["name"] for found in cases(topic).values()))


def layers() -> str:
    """Layers in bfloat16, and what FP8 gains."""
    rows = []
    for name in layer_names("layers"):
        forward, both = (case("layers", f"{name}/{op}") for op in ("moe_forward", "moe_step"))
        shape = both["shape"]
        in_fp8 = case("layers_fp8", f"{name}/moe_step")["peers"]["fp8_blockwise_quantized"]
        memory = (peer["temporary_bytes"] / MIB for peer in (ours(both), in_fp8))
        row = [
            f"`{name}` {shape['tokens']}, {shape['embed']}, {shape['hidden']}, "
            f"{shape['top_k']} of {shape['experts']}",
            microseconds(forward),
            f"{microseconds(both)} ({ours(both)['tflops']:.0f})",
            ", ".join(f"{mebibytes:.0f}" for mebibytes in memory),
        ]
        for recipe in RECIPES:
            gains = (f"{fp8_gain(name, recipe, when):.2f}" for when in ("_quantized", ""))
            row.append(", ".join(gains))
        rows.append(row)
    header = ["layer: tokens, D, F, experts", "forward us", "with gradients us (TFLOP/s)"]
    header += ["temporaries MiB, in FP8", 'FP8, `wgrad="bf16"`', "FP8"]
    return table(header, rows)


def layers_quack() -> str:
    """Layers beside those of QuACK's fused kernels, of one run."""
    rows = []
    for name in layer_names("layers_quack"):
        row = [f"`{name}`"]
        for op in ("moe_forward", "moe_step"):
            found = case("layers_quack", f"{name}/{op}")
            ratios = (found["ratios"][peer] for peer in ("quack", "quack_tuned"))
            row += [microseconds(found), ", ".join(f"{ratio:.2f}" for ratio in ratios)]
        rows.append(row)
    header = ["forward us", "QuACK, tuned", "with gradients us", "QuACK, tuned"]
    return table(["layer", *header], rows)


def fp8_gain(name: str, recipe: str, when: str) -> float:
    """How many times as fast as in bfloat16 a layer with gradients is by a recipe."""
    return case("layers_fp8", f"{name}/moe_step")["ratios"][f"fp8_{recipe}{when}"] ** -1


def layers_recipes() -> str:
    """What each recipe gains over bfloat16, weights quantised before, and in the step."""
    recipes = ("blockwise", "rowwise", "rowwise_fast", "tensorwise")
    rows = []
    for name in layer_names("layers_recipes"):
        ratios = case("layers_recipes", f"{name}/moe_step")["ratios"]
        gains = (
            ", ".join(f"{1 / ratios[f'fp8_{recipe}{when}']:.2f}" for when in ("_quantized", ""))
            for recipe in recipes
        )
        rows.append([f"`{name}`", *gains])
    named = ("`blockwise()`", "`rowwise()`", "`rowwise(fast_accumulation=True)`", "`tensorwise()`")
    return table(["times bf16's speed", *named], rows)


def layers_fp8_range() -> str:
    """What the default recipe gains, weights quantised before."""
    gains = [fp8_gain(name, "blockwise", "_quantized") for name in layer_names("layers_fp8")]
    return f"{min(gains):.2f} to {max(gains):.2f} times, {geometric_mean(gains):.2f} in the mean,"


def layers_decode() -> str:
    """Layers of few tokens, in bf16 and in FP8 with weights quantised before."""
    names = layer_names("layers_decode")
    tokens = list(dict.fromkeys(name.rpartition("_")[2] for name in names))

    def both(name: str) -> str:
        found = case("layers_decode", f"{name}/moe_forward")
        peers = "ours", "fp8_blockwise_quantized"
        return ", ".join(microseconds(found, peer) for peer in peers)

    rows = [
        [f"`{layer}`", *(both(f"{layer}_{t}") for t in tokens)]
        for layer in dict.fromkeys(name.rpartition("_")[0] for name in names)
    ]
    header = [
        "whole layer, us, bf16 and FP8",
        *(f"{t} token{'s' if t != '1' else ''}" for t in tokens),
    ]
    return table(header, rows)


def step() -> str:
    """A step of training the demo's model."""
    (record,) = cases("step").values()
    peers, shape, model = record["peers"], record["shape"], PRESETS[record["shape"]["name"]].model
    found = [peers[name] for name in ("ours", "ours_fp8", "stock")]
    ms = [f"{each['median_us'] / 1e3:.0f} ms" for each in found]
    memory = [f"{each['temporary_bytes'] / GIB:.1f}" for each in found]
    parameters = peers["ours"]["run"]["num_parameters"]
    return (
        f"Training a transformer of {parameters / 1e9:.1f} billion parameters ({model.num_layers} "
        f"layers, embed {model.embed}, {model.num_experts} experts of width {model.hidden}, "
        f"{model.top_k} a token; {shape['batch']} sequences of {shape['length']} bytes a step) "
        f"takes {ms[0]} a step in bf16 and {ms[1]} in FP8, at {memory[0]} and {memory[1]} GiB of "
        f"temporary memory. With `jax.lax.ragged_dot` it takes {ms[2]} at {memory[2]} GiB in bf16"
    )


def expert_parallel() -> str:
    """Layers over several GPUs: shares of the speed without communication."""
    rows = []
    for name in layer_names("expert_parallel"):
        row = [f"`{name}`"]
        for op in ("ep_forward", "ep_step"):
            found = case("expert_parallel", f"{name}/{op}")
            fractions = found.get("fractions", {})
            for way in ("ours", "nccl", "tokens_fp8", "naive"):
                row.append(f"{fractions[way]:.2f}" if way in fractions else "-")
        rows.append(row)
    ways = ("", ", by NCCL", ", tokens in FP8", ", all gathered")
    header = [f"{op}{way}" for op in ("forward", "with gradients") for way in ways]
    return table(["of the speed without communication", *header], rows)


def training() -> str:
    """FP8's held-out loss over bf16's, by recipe and seed."""
    found = sorted(cases("training").values(), key=lambda case: case["seed"])
    by_recipe: dict[str, list[str]] = {}
    for one in found:
        by_recipe.setdefault(one["recipe"], []).append(f"{one['loss_ratio']:.3f}")
    seeds = dict.fromkeys(f"seed {one['seed']}" for one in found)
    rows = [[f"`Recipe.{name}()`", *ratios] for name, ratios in by_recipe.items()]
    return table(["FP8's held-out loss over bf16's", *seeds], rows)


def training_steps() -> str:
    """How long it was trained."""
    (steps,) = {one["steps"] for one in cases("training").values()}
    return str(steps)
