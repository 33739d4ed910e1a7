"""XLA's program for `ragged_dot_accumulate` on an H200: it adds in place to the accumulators."""

import re

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_grouped_gemm as jgg
from tests.support.ops import accumulation_shapes


def compiled(h200, function, *arguments, donate=()):
    """Compiles the program for an H200, with the arguments `donate` donated."""
    arguments = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(h200.mesh, P()))
        for a in arguments
    ]
    return jax.jit(function, donate_argnums=donate).lower(*arguments).compile()


def opcodes_of(text: str, array: jax.ShapeDtypeStruct) -> set[str]:
    """Returns opcodes of the instructions that make float32 arrays of the shape of `array`."""
    size = ",".join(map(str, array.shape))
    return set(re.findall(rf"= f32\[{size}\]\S* ([\w-]+)\(", text))


def copies(text: str) -> int:
    return len(re.findall(r" copy(-start)?\(", text))


def test_donated_accumulators_are_updated_where_they_are(h200):
    arguments = accumulation_shapes(512, 256, 384, 4)
    program = compiled(h200, jgg.ragged_dot_accumulate, *arguments, donate=0)
    text = program.as_text()
    (call,) = re.findall(r".*custom_call_target=.*", text)
    assert "jax_grouped_gemm.ragged_accumulate.v1" in call
    assert "output_to_operand_aliasing={{0}: (0, {})}" in call
    assert "input_output_alias={ {}: (0, {}" in text
    assert copies(text) == 0 and "fusion(" not in text and " add(" not in text
    assert program.memory_analysis().temp_size_in_bytes < 1024


def test_others_are_copied_first(h200):
    arguments = accumulation_shapes(512, 256, 384, 4)
    text = compiled(h200, jgg.ragged_dot_accumulate, *arguments).as_text()
    assert text.count("custom_call_target=") == copies(text) == 1


def test_carried_through_a_scan(h200):
    accumulator, lhs, rhs, sizes = accumulation_shapes(512, 256, 384, 4)
    batches = [jax.ShapeDtypeStruct((5, *x.shape), x.dtype) for x in (lhs, rhs, sizes)]

    def run(accumulator, *batches):
        def step(accumulator, batch):
            return jgg.ragged_dot_accumulate(accumulator, *batch), None

        return jax.lax.scan(step, accumulator, batches)[0]

    program = compiled(h200, run, accumulator, *batches, donate=0)
    text = program.as_text()
    assert "jax_grouped_gemm.ragged_accumulate.v1" in text
    size = ",".join(map(str, accumulator.shape))
    assert not re.findall(rf"= f32\[{size}\]\S* (?!parameter|get-tuple-element|bitcast)\w", text)


def test_added_outside_if_rows_have_to_be_padded(h200):
    arguments = accumulation_shapes(512, 250, 384, 4)
    text = compiled(h200, jgg.ragged_dot_accumulate, *arguments, donate=0).as_text()
    assert "jax_grouped_gemm.ragged_contracting.v4" in text
    assert "ragged_accumulate.v" not in text


def test_gradients_of_microbatches(h200):
    """The accumulator is an argument of the layer, see `docs/tutorials/accumulate.md`."""

    @jax.custom_vjp
    def project(x, w, sizes, dw):
        return jgg.ragged_dot(x, w, sizes)

    def forward(x, w, sizes, dw):
        return project(x, w, sizes, dw), (x, w, sizes, dw)

    def backward(kept, dy):
        x, w, sizes, dw = kept
        dx = jgg.ragged_dot(dy, w, sizes, transpose_rhs=True)
        return dx, None, None, jgg.ragged_dot_accumulate(dw, x, dy, sizes)

    project.defvjp(forward, backward)

    def run(dw, w, *batches):
        def step(dw, batch):
            x, sizes = batch
            return jax.grad(lambda dw: jnp.sum(jnp.sin(project(x, w, sizes, dw))))(dw), None

        return jax.lax.scan(step, dw, batches)[0]

    accumulator, lhs, _, sizes = accumulation_shapes(512, 256, 384, 4)
    weights = jax.ShapeDtypeStruct(accumulator.shape, lhs.dtype)
    batches = [jax.ShapeDtypeStruct((5, *x.shape), x.dtype) for x in (lhs, sizes)]
    text = compiled(h200, run, accumulator, weights, *batches, donate=0).as_text()
    assert "jax_grouped_gemm.ragged_accumulate.v1" in text
    assert opcodes_of(text, accumulator) <= {"parameter", "get-tuple-element", "bitcast"}
