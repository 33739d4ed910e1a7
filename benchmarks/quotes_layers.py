"""Makes the quotes about whole layers, training, Muon and an H100."""

from collections.abc import Mapping

from benchmarks.harness.measure import best_grouped, geometric_mean
from benchmarks.records_by_topic import (
    GIB,
    MIB,
    case,
    cases,
    commits,
    microseconds,
    ours,
    ratio,
    span,
    table,
    time_and_rate,
)
from jax_grouped_gemm.demo.presets import PRESETS

RECIPES = ("blockwise_bf16_wgrad", "blockwise")


def layer_names(topic: str) -> list[str]:
    return list(dict.fromkeys(found["shape"]["name"] for found in cases(topic).values()))


def fp8_gains(topic: str, name: str, recipe: str) -> str:
    """Returns speeds over bfloat16, with weights quantised before the call, and in the call."""
    ratios = case(topic, f"{name}/moe_step")["ratios"]
    return ", ".join(f"{1 / ratios[f'fp8_{recipe}{when}']:.2f}" for when in ("_quantized", ""))


def layers() -> str:
    rows = []
    for name in layer_names("layers"):
        forward, both = (case("layers", f"{name}/{op}") for op in ("moe_forward", "moe_step"))
        shape = both["shape"]
        in_fp8 = case("layers_fp8", f"{name}/moe_step")["peers"]["fp8_blockwise_quantized"]
        memory = (peer["temporary_bytes"] / MIB for peer in (ours(both), in_fp8))
        sizes = f"{shape['tokens']}, {shape['embed']}, {shape['hidden']}"
        rows.append(
            [
                f"`{name}` {sizes}, {shape['top_k']} of {shape['experts']}",
                microseconds(forward),
                f"{microseconds(both)} ({ours(both)['tflops']:.0f})",
                ", ".join(f"{mebibytes:.0f}" for mebibytes in memory),
                *(fp8_gains("layers_fp8", name, recipe) for recipe in RECIPES),
            ]
        )
    header = ["layer: tokens, D, F, experts", "forward us", "with gradients us (TFLOP/s)"]
    header += ["temporaries MiB, in FP8", 'FP8, `wgrad="bf16"`', "FP8"]
    return table(header, rows)


def layers_quack() -> str:
    rows = []
    for name in layer_names("layers"):
        found = (case("layers", f"{name}/{op}") for op in ("moe_forward", "moe_step"))
        rows.append([f"`{name}`", *map(over_quack, found)])
    return table(["layer", "forward: QuACK, tuned", "with gradients: QuACK, tuned"], rows)


def over_quack(found: Mapping) -> str:
    return ", ".join(f"{found['ratios'][peer]:.2f}" for peer in ("quack", "quack_tuned"))


def layers_fp8_range() -> str:
    """Returns the range of gains of the default recipe with weights quantised before the call."""
    gains = [
        1 / case("layers_fp8", f"{name}/moe_step")["ratios"]["fp8_blockwise_quantized"]
        for name in layer_names("layers_fp8")
    ]
    return f"{min(gains):.2f} to {max(gains):.2f} times, {geometric_mean(gains):.2f} on average,"


def layers_decode() -> str:
    names = [name.rpartition("_") for name in layer_names("layers_decode")]
    tokens = list(dict.fromkeys(count for *_, count in names))

    def both(name: str) -> str:
        found = case("layers_decode", f"{name}/moe_forward")
        return ", ".join(microseconds(found, x) for x in ("ours", "fp8_blockwise_quantized"))

    rows = [
        [f"`{layer}`", *(both(f"{layer}_{t}") for t in tokens)]
        for layer in dict.fromkeys(name for name, *_ in names)
    ]
    header = [f"{t} token{'s' if t != '1' else ''}" for t in tokens]
    return table(["whole layer, us, bf16 and FP8", *header], rows)


FORMATS = {"mxfp4": "MXFP4", "int4": "int4", "int8": "int8"}


def layers_packed() -> str:
    formats = FORMATS | {"fp8": '"fp8"', "fp8_128x128": '"fp8_128x128"'}
    names = dict.fromkeys(name.partition("/")[0] for name in cases("layers_packed"))
    rows = []
    for name in names:
        found = [case("layers_packed", f"{name}/{format}") for format in formats]
        times = [microseconds(found[0], peer) for peer in ("bf16", "dequantised", "ours")]
        layer, _, tokens = name.rpartition("_")
        rows.append([f"`{layer}`, {tokens}", *times, *map(microseconds, found[1:])])
    header = ["layer, tokens", "bfloat16", "MXFP4, dequantised in each call"]
    header += formats.values()
    return table([*header[:1], *(f"{x}, us" for x in header[1:])], rows)


def layers_packed_peers() -> str:
    """Returns our time, and the faster of Humming's two layers over it."""
    rows = []
    for name in dict.fromkeys(name.partition("/")[0] for name in cases("layers_packed_peers")):
        found = [case("layers_packed_peers", f"{name}/{format}") for format in FORMATS]
        ours = [f"{microseconds(x)}, {ratio(x, 'humming', 'humming_grouped')}" for x in found]
        rows.append([name.rpartition("_")[2], *ours])
    rows.sort(key=lambda row: int(row[0]))
    return table(["tokens", *(f"{x}: us, Humming" for x in FORMATS.values())], rows)


def step() -> str:
    (record,) = cases("step").values()
    peers, shape, model = record["peers"], record["shape"], PRESETS[record["shape"]["name"]].model
    found = [peers[name] for name in ("ours", "ours_fp8", "stock")]
    ms = [f"{each['median_us'] / 1e3:.0f} ms" for each in found]
    memory = [f"{each['temporary_bytes'] / GIB:.1f}" for each in found]
    parameters = peers["ours"]["run"]["num_parameters"]
    return (
        f"Training a transformer of {parameters / 1e9:.1f} billion parameters ({model.num_layers} "
        f"layers, embed {model.embed}, {model.num_experts} experts of width {model.hidden}, "
        f"{model.top_k} a token; {shape['batch']} sequences of {shape['length']} tokens a step) "
        f"takes {ms[0]} a step in bf16 and {ms[1]} in FP8, at {memory[0]} and {memory[1]} GiB of "
        f"temporary memory. With `jax.lax.ragged_dot` it takes {ms[2]} at {memory[2]} GiB in bf16"
    )


def expert_parallel() -> str:
    ways = {"ours": "", "nccl": ", by NCCL", "naive": ", all gathered"}
    ops = {"ep_forward": "forward", "ep_step": "with gradients"}
    rows = []
    for name in layer_names("expert_parallel"):
        found = (case("expert_parallel", f"{name}/{op}").get("fractions", {}) for op in ops)
        shares = (f"{x[way]:.2f}" if way in x else "-" for x in found for way in ways)
        rows.append([f"`{name}`", *shares])
    header = [f"{op}{way}" for op in ops.values() for way in ways.values()]
    return table(["of the speed without communication", *header], rows)


def training() -> str:
    found = sorted(cases("training").values(), key=lambda case: case["seed"])
    row = ["`Recipe()`", *(f"{one['loss_ratio']:.3f}" for one in found)]
    return table(
        ["FP8's held-out loss over bf16's", *(f"seed {one['seed']}" for one in found)], [row]
    )


def training_steps() -> str:
    (steps,) = {one["steps"] for one in cases("training").values()}
    return str(steps)


def milliseconds(us: float) -> str:
    return f"{us / 1e3:.1f}"


def of_muon(
    op: str, what: str, titles: Mapping[str, str], other: str, over: Mapping[str, str]
) -> str:
    """Returns a table of milliseconds of peers, and ratios of `other` to the peers of `over`."""
    cards = {"muon": "H200", "muon_steps": "H200", "muon_h100": "H100"}
    found = [
        (card, one, {name: peer.get("median_us") for name, peer in one["peers"].items()})
        for topic, card in cards.items()
        for one in cases(topic).values()
        if one["op"] == op
    ]
    names = [name for name in titles if any(us.get(name) for *_, us in found)]
    rows = []
    for card, one, us in found:
        stacks = " + ".join(f"{g} of {n} x {m}" for g, n, m in one["shape"]["stacks"])
        times = (milliseconds(us[name]) if us.get(name) else "-" for name in names)
        rows.append([stacks, card, *times, *(f"{us[other] / us[name]:.2f}" for name in over)])
    return table([what, "GPU", *(titles[name] for name in names), *over.values()], rows)


def muon() -> str:
    titles = {"ours": "ours ms", "standard": '`method="standard"`', "iteration": "iteration alone"}
    titles |= {"einsum_iteration": "einsums alone", "einsum_bf16": "einsums in bf16"}
    return of_muon("newton_schulz", "matrices", titles, "einsum_bf16", {"ours": "times ours"})


def muon_steps() -> str:
    titles = {"ours": "ours ms", "bf16_gradients": "bf16 gradients", "optax_adamw": "AdamW"}
    titles |= {"optax_muon": "`optax.contrib.muon`"}
    over = {"ours": "times ours", "bf16_gradients": "times bf16 gradients"}
    return of_muon("step", "parameters", titles, "optax_muon", over)


def optimizer() -> str:
    rows, ops = [], ("adamw/bfloat16", "apply/float32", "program/bfloat16")
    for name in layer_names("optimizer"):
        step, update, program = (case("optimizer", f"{name}/{op}") for op in ops)
        us = {peer: x["median_us"] for peer, x in program["peers"].items()}
        optax = step["peers"].get("optax_copy", {}).get("median_us")
        # The ratio of sums of parts, if the optimiser took as long as Optax's.
        parts = (us["part_bf16"] + optax) / (us["part_fp8"] + optax) if optax else None
        others = ("optax_copy", "optax_quantize", "byte_floor")
        first = [f"`{name}`, {program['parameters'] / 1e6:.0f} M", microseconds(step)]
        first += [*(ratio(step, x) for x in others), ratio(update, "byte_floor")]
        rows.append([*first, ratio(program, "bf16"), f"{parts:.2f}" if parts else "-"])
    header = ["layer, parameters", "us", "Optax", "and `quantize_mlp`", "of a copy's speed"]
    return table([*header, "update alone", "layer too", "by parts"], rows)


def data_parallel() -> str:
    names = {
        "training": "training step of the demo's model, preset",
        "muon": "`optim.muon`, split along the stack,",
        "split": "`optim.orthogonalize` of matrices that are split,",
    }
    rows = []
    for found in cases("data_parallel").values():
        times = (milliseconds(found["peers"][name]["median_us"]) for name in ("one", "ours"))
        ratios = (found["ratios"].get(name) for name in ("speedup", "einsum"))
        what = f"{names[found['op']]} {found['shape']['name']} on each GPU"
        rows.append([what, *times, *(f"{ratio:.2f}" if ratio else "-" for ratio in ratios)])
    header = ["work", "one GPU ms", "two GPUs ms", "times the work", "einsums over ours"]
    return table(header, rows)


def both(of_h100: str, of_h200: str) -> list[tuple[Mapping, Mapping, float]]:
    """Returns each case on the H200 and the H100, and our time on the H100 over the H200's."""
    others = cases(of_h200)
    return [
        (others[name], one, ours(one)["median_us"] / ours(others[name])["median_us"])
        for name, one in cases(of_h100).items()
        if name in others and "bytes" in one
    ]


def h100() -> str:
    pairs = both("h100", "ragged")
    times = [ratio for *_, ratio in pairs]
    best = [found[1] for found in (best_grouped(one) for _, one, _ in pairs) if found]
    layers = [ratio for *_, ratio in both("h100_layers", "h200_layers")]
    return (
        f"[{len(pairs)} products](#performance) take {geometric_mean(times):.2f} times as long as "
        f"on an H200 ({span(times)}), [whole layers](docs/performance.md#on-an-h100) "
        f"{geometric_mean(layers):.2f} times ({span(layers)}). The faster of PyTorch's and "
        f"Pallas's products takes {geometric_mean(best):.2f} times as long as ours ({span(best)})"
    )


def h100_products() -> str:
    rows = []
    for other, one, slower in both("h100", "ragged"):
        best = best_grouped(one)
        what, over = f"`{one['shape']['name']}` {one['op']}", f"{slower:.2f}"
        vs_best = f"{best[1]:.2f} {best[0]}" if best else "-"
        rows.append([what, time_and_rate(other), time_and_rate(one), over, vs_best])
    header = ["product", "H200 us (TFLOP/s)", "H100 us (TFLOP/s)", "H100 over H200"]
    return table([*header, f"vs best on the H100 ({commits('h100')})"], rows)


def h100_layers() -> str:
    rows = []
    for other, one, slower in both("h100_layers", "h200_layers"):
        what = f"`{one['shape']['name']}` {'step' if one['op'] == 'moe_step' else 'forward'}"
        times = (f"{ours(case)['median_us']:.0f}" for case in (other, one))
        rows.append([what, *times, f"{slower:.2f}"])
    header = ["layer", f"H200 us ({commits('h200_layers')})", f"H100 us ({commits('h100_layers')})"]
    return table([*header, "H100 over H200"], rows)


def layers_fine() -> str:
    rows = []
    for name in layer_names("layers_fine"):
        found = [case("layers_fine", f"{name}/{op}") for op in ("moe_forward", "moe_step")]
        sizes = [found[0]["shape"][x] for x in ("tokens", "embed", "hidden", "experts", "top_k")]
        times = [text(x) for x in found for text in (time_and_rate, over_quack)]
        rows.append([f"`{name}` {', '.join(map(str, sizes))}", *times])
    times = [x for op in ("forward", "step") for x in (f"{op} us (TFLOP/s)", "QuACK, tuned")]
    return table(["layer: T, D, F, E, k", *times], rows)


QUOTES = (
    layers, layers_fp8_range, layers_quack, layers_decode, layers_packed, layers_packed_peers,
    layers_fine,
    step, expert_parallel, optimizer,
    training, training_steps, muon, muon_steps, data_parallel, h100, h100_products, h100_layers,
)  # fmt: skip
