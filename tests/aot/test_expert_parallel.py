"""XLA's program for a layer over 2 and 8 H200: collectives, overlapped work and memory."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe
from tests.support import aot

# A device has so many tokens that XLA does not combine collectives.
T, D, F, E, K = 8192, 4096, 768, 64, 4
BF16, F32 = jnp.bfloat16, jnp.float32
COLLECTIVES = (
    "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "all-reduce",
    "collective-permute",
)  # fmt: skip
# The kernel of gate and up reads tokens in place, so no kernel copies them.
FORWARD = dict(sort_by_expert=1, gated_ragged_dot=1, ragged_noncontracting=1, combine_rows=1)


@pytest.fixture(scope="module", params=[2, 8])
def target(request, extension) -> aot.Target:
    return aot.Target(aot.H200, devices=request.param)


def collectives(program) -> Counter:
    """Returns how many collectives of each kind there are, asynchronous or not."""
    found = Counter()
    for instruction in program.entry:
        kind = re.sub(r"-start$", "", instruction.opcode)
        if kind in COLLECTIVES:
            found[kind] += 1
    return found


def kernels_beside(program, kind) -> list[set[str]]:
    """Returns which of our kernels run between start and done of each collective of `kind`."""
    pending, beside = {}, []
    for instruction in program.entry:
        if instruction.opcode == f"{kind}-start":
            pending[instruction.name] = set()
        elif instruction.opcode == f"{kind}-done":
            beside.append(pending.pop(instruction.operands[0]))
        elif instruction.kernel:
            for kernels in pending.values():
                kernels.add(instruction.kernel)
    return beside


def compile_layer(target, *, step, tokens=T, **options):
    def on_device(x, experts, weights, *matrices):
        routing = moe.Routing(jnp.zeros((*experts.shape[:-1], E), F32), experts, weights)
        return moe.expert_parallel_mlp(x, routing, *matrices, expert_axis="x", **options)[0]

    layer = jax.shard_map(on_device, mesh=target.mesh, in_specs=(P("x"),) * 6, out_specs=P("x"))

    def run(x, experts, *floats):
        if not step:
            return layer(x, experts, *floats)
        y, vjp = jax.vjp(lambda x, *floats: layer(x, experts, *floats), x, *floats)
        return y, vjp(jnp.sin(y))

    rows = tokens * target.mesh.size
    shapes = [
        ((rows, D), BF16),
        ((rows, K), jnp.int32),
        ((rows, K), F32),
        ((E, D, F), BF16),
        ((E, D, F), BF16),
        ((E, F, D), BF16),
    ]
    operands = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    return target.compile(run, *operands, specs=[P("x")] * 6)


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("combine", ["all_to_all", "ppermute"])
def test_gathered_forward(chunks, combine, target):
    """One collective exchanges all choices. Each chunk takes two more: one gathers tokens, and one
    returns results. With ppermute, there is a collective for each other device instead of one."""
    options = dict(strategy="all_gather", chunks=chunks, combine=combine)
    program = compile_layer(target, step=False, **options)
    expected = {"all-gather": 1, "all-to-all": 2 * chunks}
    kernels = dict.fromkeys(FORWARD, chunks)
    if chunks == 1 and target.mesh.size == 2:
        kernels["dispatch_rows"] = 1  # copies own tokens while those of the other device travel
    if combine == "ppermute":
        devices = target.mesh.size
        expected = {"collective-permute": (1 + 2 * chunks) * (devices - 1)}
        kernels["combine_rows"] *= devices
        # Results for other devices travel while those of this one are added up.
        *_, last = kernels_beside(program, "collective-permute")
        assert last == {"combine_rows"}
    assert collectives(program) == expected
    assert program.kernels == kernels
    assert not any(i.opcode == "copy" for i in program.entry)


@pytest.mark.parametrize("combine", ["all_to_all", "ppermute"])
def test_gathered_step(combine, target):
    """Choices, tokens and cotangents are gathered. Results, and gradients of tokens and of router
    weights, are scattered. No collective runs during a product, which would lose multiprocessors.
    """
    options = dict(strategy="all_gather", chunks=1, combine=combine, overlap=False)
    program = compile_layer(target, step=True, **options)
    expected = {"all-gather": 1, "reduce-scatter": 1, "all-to-all": 4}
    if combine == "ppermute":
        expected = {"collective-permute": 6 * (target.mesh.size - 1)}
    assert collectives(program) == expected
    of_rows = [call for call in program.calls if "zeroes_unowned" in call.text]
    assert {call.kernel for call in of_rows} == {
        "gated_ragged_dot",
        "gated_ragged_dot_transpose",
        "paired_ragged_dot",
        "ragged_noncontracting",
    }
    for call in of_rows:  # buffers have room for all rows, so most rows are unowned
        assert "zeroes_unowned = false" in call.text
    for kind in COLLECTIVES:
        for kernels in kernels_beside(program, kind):
            assert not {name for name in kernels if name.endswith(("dot", "contracting"))}


def test_gradients_of_tokens_travel_beside_products(target):
    """Gradients of tokens travel during products of weight gradients, not during other products."""
    program = compile_layer(target, step=True, strategy="all_gather", overlap=True)
    assert collectives(program) == {"collective-permute": 6 * (target.mesh.size - 1)}
    *before, last = kernels_beside(program, "collective-permute")
    assert last & {"ragged_contracting", "paired_weight_gradients"}
    products = {"gated_ragged_dot", "gated_ragged_dot_transpose", "ragged_noncontracting"}
    assert not any(products & beside for beside in before)


def test_products_beside_travelling_gradients_are_limited(target):
    """`max_sms` limits only the product that computes the gradients of gate and up."""
    options = dict(strategy="all_gather", overlap=True)
    program = compile_layer(target, step=True, max_sms=116, **options)
    limited = [call for call in program.calls if "max_sms = 116 : i32" in call.text]
    *_, last = kernels_beside(program, "collective-permute")
    assert {call.kernel for call in limited} == {"paired_weight_gradients"} <= last
    assert "max_sms" not in compile_layer(target, step=True, **options).hlo


def test_copy_engines_are_asked_for(target):
    """XLA takes the options for described GPUs too, and marks ppermutes for copy engines."""
    options = moe.expert_parallel_compiler_options(target.mesh)
    x = jax.ShapeDtypeStruct((64 * target.mesh.size, 128), BF16)
    pairs = [(i, i ^ 1) for i in range(target.mesh.size)]

    def swap(x):
        return jax.lax.ppermute(x, "x", pairs)

    split = jax.shard_map(swap, mesh=target.mesh, in_specs=P("x"), out_specs=P("x"))
    marked, unmarked = (
        target.compile(split, x, specs=[P("x")], **given).hlo for given in (options, {})
    )
    assert "COLLECTIVES_PEER_MEMORY" in marked
    assert "COLLECTIVES_PEER_MEMORY" not in unmarked


@pytest.mark.parametrize("step", [False, True])
def test_exchange(step, target):
    """One gather collects the choices of all tokens. Derivatives need no other one for offsets."""
    program = compile_layer(target, step=step, strategy="ragged_all_to_all", chunks=1)
    expected = {"all-gather": 1, "ragged-all-to-all": 2}
    if step:
        expected |= {"ragged-all-to-all": 4, "reduce-scatter": 1}
    assert collectives(program) == expected
    # Receive buffers are neither filled nor copied.
    rows = rf"bf16\[\d+,{D}\]"
    written = [i.text for i in program.entry if re.match(rows, i.type)]
    assert not [text for text in written if " broadcast(" in text or " copy(" in text]
    # XLA has removed the zeros that `vmap` needs in the route (`exchange.py`).
    assert "bf16[1,1]" not in program.hlo


def test_sends_as_many_updates_as_it_takes(target):
    """A device sends at least 32 updates to each peer: the parts that XLA copies separately."""
    program = compile_layer(target, step=False, strategy="ragged_all_to_all", chunks=1)
    starts = [i for i in program.entry if i.opcode.startswith("ragged-all-to-all")]
    sizes = re.findall(r"s64\[(\d+)\]", starts[0].type)
    assert sizes and all(int(size) >= 32 * target.mesh.size for size in sizes)


def test_statistics_that_nobody_looks_at_cost_nothing(target):
    program = compile_layer(target, step=False, strategy="all_gather")
    assert "all-reduce" not in collectives(program)


@pytest.fixture(scope="module")
def fp8_step(extension) -> aot.Program:
    """Returns a step of a layer with weights quantised before, on two devices of an FSDP axis."""
    pytest.importorskip("jax_plugins.xla_cuda13", reason="the CUDA plugin is not installed")
    target = aot.Target(aot.H200, devices=2)
    target.mesh = jax.sharding.Mesh(target.mesh.devices.reshape(2, 1), ("fsdp", "expert"))
    layer = moe.expert_parallel(
        target.mesh, expert_axis="expert", fsdp_axis="fsdp", token_axes="fsdp", recipe=jgg.Recipe()
    )

    def step(x, experts, weights, matrices, quantized):
        def of(x, weights, *matrices):
            routing = moe.Routing(jnp.zeros((len(x), E), F32), experts, weights)
            return layer(x, routing, *matrices, quantized=quantized)[0]

        y, vjp = jax.vjp(of, x, weights, *matrices)
        return y, vjp(jnp.sin(y))

    wi, wo = (jax.ShapeDtypeStruct(shape, BF16) for shape in ((E, D, F), (E, F, D)))
    quantized = jax.eval_shape(jgg.quantize_mlp, wi, wi, wo)
    x = jax.ShapeDtypeStruct((T, D), BF16)
    choices = [jax.ShapeDtypeStruct((T, K), dtype) for dtype in (jnp.int32, F32)]
    return target.compile(step, x, *choices, (wi, wi, wo), quantized)


def test_quantised_weights_are_gathered_in_8_bits(fp8_step):
    gathered = [i.text for i in fp8_step.entry if i.opcode.startswith("all-gather-start")]
    assert any("f8e4m3fn" in text for text in gathered)
    assert not any("bf16" in text for text in gathered)
    assert "quantize_weights" not in fp8_step.kernels


def test_rows_are_not_copied_in_fp8(fp8_step):
    """Tokens, and the gradients of results, are quantised before they are copied to rows."""
    copies = [call.text for call in fp8_step.calls if call.kernel == "dispatch_rows"]
    assert copies and not any("bf16" in text for text in copies)  # scales are float32
    assert fp8_step.kernels["combine_rows"] == 2
