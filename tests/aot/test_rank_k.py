"""XLA's program for rank-k updates on an H200, compiled on a machine that need not have one."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm.optim import muon, orthogonalize
from tests.support.updates import SYR2K, SYRK, UPDATES

BOTH = pytest.mark.parametrize("update", [SYRK, SYR2K], ids=repr)


def assert_one_kernel(program, name="rank_k") -> None:
    """Asserts that there is only our kernel: XLA copies no operand, and writes no scales."""
    assert program.kernels == {name: 1}
    assert not program.computed_operands()


def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("symmetrize", [False, True])
@BOTH
def test_one_kernel_on_the_arrays_as_they_are(update, symmetrize, transpose, h200):
    call = partial(update, symmetrize_output=symmetrize, transpose=transpose)
    program = h200.compile(lambda a, b: call(a, b), array(3, 64, 64), array(3, 64, 64))
    assert_one_kernel(program)
    assert program.temporary_bytes <= 256


@pytest.mark.parametrize("options", [{}, dict(alpha=0.5), dict(alpha=[0.5, 2.0, 3.0])])
def test_one_kernel_for_a_list(options, h200):
    shapes = [(64, 32), (128, 8), (5, 256, 64)]
    program = h200.compile(
        lambda *a: jgg.grouped_syrk(list(a), **options), *(array(*shape) for shape in shapes)
    )
    assert_one_kernel(program)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_xla_writes_a_product_in_the_type_of_its_result(dtype, h200):
    """XLA writes 16-bit products, so the pass that masks a triangle reads half the bytes."""
    call = partial(jgg.grouped_syrk, implementation="xla")
    program = h200.compile(call, array(8, 256, 64, dtype=dtype))
    products = [i for i in program.entry if "gemm" in i.name]
    assert len(products) == 1 and products[0].type.startswith(("bf16[8,256", "f16[8,256"))
    assert program.temporary_bytes <= 8 * 256 * 256 * 2


def test_c_is_updated_in_place_if_it_may_be(h200):
    """c is not copied, because the program itself computes c and has no other use for it."""
    a = array(3, 64, 64)

    def accumulate(a, c):
        return jgg.grouped_syrk(a, c * 2, beta=0.5)

    program = h200.compile(accumulate, a, array(3, 64, 64, dtype=jnp.float32))
    (call,) = program.calls
    assert "output_to_operand_aliasing" in call.text
    assert not any(instruction.opcode == "copy" for instruction in program.entry)


@pytest.mark.parametrize("shape", [(), (3,)])
def test_traced_scales_reach_the_kernel_as_they_are(shape, h200):
    def function(a, alpha):
        return jgg.grouped_syrk(a, alpha=alpha)

    scales = array(*shape, dtype=jnp.float32)
    assert_one_kernel(h200.compile(function, array(3, 64, 64), scales))
    # One scale for all matrices stays one number, even if it is mapped over a batch.
    mapped = jax.vmap(function, in_axes=(0, 0 if shape else None))
    scales = array(*(2,) * len(shape), *shape, dtype=jnp.float32)
    assert_one_kernel(h200.compile(mapped, array(2, 3, 64, 64), scales))


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("update", UPDATES, ids=repr)
@pytest.mark.parametrize("dtype", [jnp.float64, jnp.complex128])
def test_fp64_kernel_on_the_arrays_as_they_are(dtype, update, transpose, h200):
    """The kernel takes operands of any size without padding."""
    with jax.enable_x64(True):
        arrays = [array(3, 37, 51, dtype=dtype)] * 2
        call = partial(update, transpose=transpose, implementation="cuda")
        program = h200.compile(lambda a, b: call(a, b), *arrays)
    assert program.kernels == {"rank_k_fp64": 1}
    (call,) = program.calls
    hermitian = "true" if update.hermitian and dtype == jnp.complex128 else "false"
    assert f"hermitian = {hermitian}" in call.text
    kind = {jnp.float64: "f64", jnp.complex128: "c128"}[dtype]
    assert all(f" = {kind}[3]" in text for text in program.computed_operands())
    assert program.temporary_bytes <= 512


def test_fp64_list_and_c_in_place(h200):
    def accumulate(a, b, c):
        return jgg.grouped_her2k([a], [b], [c * 2], alpha=1j, beta=0.5)

    with jax.enable_x64(True):
        shapes = (5, 7), (5, 7), (5, 5)
        program = h200.compile(accumulate, *(array(*s, dtype=jnp.complex128) for s in shapes))
    (call,) = program.calls
    assert call.kernel == "rank_k_fp64" and "output_to_operand_aliasing" in call.text
    assert not any(instruction.opcode == "copy" for instruction in program.entry)


@pytest.mark.parametrize("precision, kernels", [(None, {}), ("highest", {"rank_k_fp64": 1})])
def test_complex64_has_a_kernel_at_the_highest_precision(precision, kernels, h200):
    function = partial(jgg.grouped_herk, precision=precision)
    assert h200.compile(function, array(3, 64, 64, dtype=jnp.complex64)).kernels == kernels


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("precision, terms", [(None, 1), ("highest", 3)])
@BOTH
def test_float32_kernel_on_the_arrays_as_they_are(update, precision, terms, transpose, h200):
    """The custom call splits operands into parts itself, in a workspace that XLA allocates."""
    options = dict(precision=precision, transpose=transpose, symmetrize_output=True)
    call = partial(update, implementation="cuda", **options)
    arrays = [array(3, 64, 64, dtype=jnp.float32)] * 2
    program = h200.compile(lambda a, b: call(a, b), *arrays)
    assert_one_kernel(program, "rank_k_f32")
    assert f"terms = {terms} : i32" in program.calls[0].text
    (plan,) = jgg.explain(lambda a, b: call(a, b), *arrays).plans
    assert plan.workspace_bytes <= program.temporary_bytes <= plan.workspace_bytes + 768


def test_float32_list_and_c_in_place(h200):
    def accumulate(a, stack, c, d):
        options = dict(precision="highest", implementation="cuda")
        return jgg.grouped_syrk([a, stack], [c * 2, d * 2], beta=0.5, **options)

    shapes = (64, 32), (5, 128, 8), (64, 64), (5, 128, 128)
    program = h200.compile(accumulate, *(array(*s, dtype=jnp.float32) for s in shapes))
    assert program.kernels == {"rank_k_f32": 1}
    (call,) = program.calls
    # Each result, which the workspace precedes, has the memory of its c.
    for result, operand in ((1, 6), (2, 7)):
        assert f"{{{result}}}: ({operand}, {{}})" in call.text
    assert not any(instruction.opcode == "copy" for instruction in program.entry)


def test_float32_derivatives(h200):
    def loss(a, b):
        options = dict(precision="highest", implementation="cuda")
        return jnp.sum(jgg.grouped_syr2k(a, b, **options) ** 2)

    arrays = [array(3, 64, 64, dtype=jnp.float32)] * 4
    program = h200.compile(lambda a, b, da, db: jax.jvp(loss, (a, b), (da, db)), *arrays)
    # One kernel computes the update, and two more compute the updates of the tangents.
    assert program.kernels == {"rank_k_f32": 3}


@pytest.mark.parametrize(
    "method, updates, products",
    [
        ("standard", 2 * 5, 5),
        # Segments of three and two steps: R and P of every step, and three products between steps.
        ("gram", 1 + 3 + 3 * 2 + 1 + 2 + 3 * 1, 2),
    ],
)
def test_muon_has_a_few_kernels_for_all_matrices(method, updates, products, h200):
    """Besides kernels for all matrices, XLA runs only passes before and after the kernels."""
    shapes = [(128, 256), (256, 128), (4, 64, 128)]
    program = h200.compile(
        lambda *x: orthogonalize(list(x), method=method),
        *(array(*shape, dtype=jnp.float16) for shape in shapes),
    )
    # Wide and tall matrices have separate launches for Gram matrices: one more a step or segment.
    grams = products
    # One product adds up the traces, which are the squares of the norms.
    assert program.kernels == {"rank_k": updates + grams, "grouped_gemm": products + 1}
    assert not [i.name for i in program.entry if "copy" in i.name]


@pytest.mark.parametrize(
    "call",
    [
        lambda a: jgg.grouped_syrk(a, a, beta=0.5, diagonal=2.0, symmetrize_output=True),
        lambda a: jgg.grouped_symm_product(a, a * 2, a, beta=0.5, symmetrize_output=True),
    ],
)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_factor_that_is_added_is_not_copied(call, dtype, h200):
    def twice(a):
        result = call(a)
        return result, a + result

    program = h200.compile(twice, array(3, 64, 64, dtype=dtype))
    assert not [i.name for i in program.entry if "copy" in i.name]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("shape", [(4, 512, 256), (4, 256, 512)], ids=["tall", "wide"])
def test_a_step_of_muon_passes_over_memory_three_times(shape, dtype, h200):
    """Passes compute norms, moments with operands, and parameters. Nothing is transposed."""
    optimizer = muon(0.02, weight_decay=0.1)
    params = array(*shape, dtype=dtype)
    leaves, structure = jax.tree.flatten((params, jax.eval_shape(optimizer.init, params), params))

    def step(*leaves):
        gradient, state, params = jax.tree.unflatten(structure, leaves)
        update, state = optimizer.update(gradient, state, params)
        return jax.tree.leaves((params + update, state))

    program = h200.compile(step, *leaves)
    size = ",".join(map(str, shape))
    passes = [i for i in program.entry if i.opcode == "fusion" and f"[{size}]" in i.type]
    assert len(passes) <= 3
    assert not [
        i.name for i in program.entry if i.opcode in ("transpose", "copy") and size in i.type
    ]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(
    "shapes",
    [
        [(384, 768, 2048)],
        [(24, 4096, 14336)],
        [(4, 4096, 4096), (3, 4096, 11008)],
        [(96, 2048, 7168)],
        [(768, 512, 7168)],
    ],
    ids=repr,
)
def test_memory_of_a_step_of_muon(shapes, dtype, h200):
    """A step needs two copies of the matrices and five Gram matrices of each, all of 16 bits."""
    optimizer = muon(0.02, mu_dtype=jnp.bfloat16)
    params = [array(*shape, dtype=dtype) for shape in shapes]
    gradients = [array(*shape) for shape in shapes]

    def step(params, state, gradients):
        updates, state = optimizer.update(gradients, state, params)
        return jax.tree.map(jnp.add, params, updates), state

    state = jax.eval_shape(optimizer.init, params)
    program = h200.compile(step, params, state, gradients, donated=(0, 1))
    most = sum(2 * g * (2 * n * m + 5 * n * n) for g, n, m in shapes)
    assert program.temporary_bytes <= most


@pytest.mark.parametrize("momentum", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("gradient", [jnp.bfloat16, jnp.float32])
def test_new_momentum_has_the_memory_of_the_old_one(gradient, momentum, h200):
    optimizer = muon(0.02, mu_dtype=momentum)
    params, gradients = ([array(48, 768, 2048, dtype=dtype)] for dtype in (jnp.float32, gradient))

    def step(params, state, gradients):
        updates, state = optimizer.update(gradients, state, params)
        return jax.tree.map(jnp.add, params, updates), state

    state = jax.eval_shape(optimizer.init, params)
    program = h200.compile(step, params, state, gradients, donated=(0, 1))
    assert not [i.name for i in program.entry if i.opcode == "copy" and "768,2048]" in i.type]
