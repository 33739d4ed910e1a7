"""Bad input raises a Python error at trace time that names the operand and its value."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import RaggedDotDimensionNumbers

import jax_grouped_gemm as jgg
from tests.support.ops import CONTRACTING, NONCONTRACTING, OPS

M, K, N, G = 8, 4, 5, 3


def array(*shape, dtype=np.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


LHS, RHS, SIZES = array(M, K), array(G, K, N), array(G, dtype=np.int32)

# For each mistake: the operands, and the words that the message must have.
BAD_OPERANDS = {
    "k differs": ((array(M, 7), RHS, SIZES), ["lhs", "8,7", "rhs", "3,4,5"]),
    "lhs is a vector": ((array(M), RHS, SIZES), ["lhs", "8"]),
    "lhs is 3-D": ((array(2, M, 9), RHS, SIZES), ["lhs", "2,8,9"]),
    "rhs is a matrix": ((LHS, array(K, N), SIZES), ["rhs", "4,5"]),
    "rhs is 4-D": ((LHS, array(2, G, K, N), SIZES), ["rhs", "2,3,4,5"]),
    "group_sizes is a scalar": ((LHS, RHS, array(dtype=np.int32)), ["group_sizes"]),
    "group_sizes is a matrix": ((LHS, RHS, array(1, G, dtype=np.int32)), ["group_sizes", "1,3"]),
    "more groups than matrices": ((LHS, RHS, array(6, dtype=np.int32)), ["group_sizes", "6", "3"]),
    "more matrices than groups": ((LHS, RHS, array(2, dtype=np.int32)), ["group_sizes", "2", "3"]),
    "float group_sizes": ((LHS, RHS, array(G)), ["group_sizes", "float32"]),
    "bool group_sizes": ((LHS, RHS, array(G, dtype=bool)), ["group_sizes", "bool"]),
}


def without_spaces(error) -> str:
    """Returns the message without spaces after commas, so that shapes read (8,4)."""
    return re.sub(r",\s+", ",", str(error))


def raised_by(function, *arguments) -> Exception:
    with pytest.raises(Exception) as caught:
        jax.eval_shape(function, *arguments)
    return caught.value


@pytest.mark.parametrize("operands, words", BAD_OPERANDS.values(), ids=BAD_OPERANDS)
def test_operands_that_jax_rejects_too(operands, words):
    """Our error has the same type as JAX's, and its message has the given words."""
    jaxs = raised_by(jax.lax.ragged_dot, *operands)
    ours = raised_by(jgg.ragged_dot, *operands)
    assert type(ours) is type(jaxs)
    message = without_spaces(ours)
    assert all(word in message for word in words), message


@pytest.mark.parametrize("name", ["lhs", "rhs", "group_sizes"])
def test_lists_are_not_arrays(name):
    operands = dict(lhs=np.ones((M, K)), rhs=np.ones((G, K, N)), group_sizes=np.ones(G, np.int32))
    operands[name] = operands[name].tolist()
    with pytest.raises(TypeError, match=f"{name}.*list"):
        jgg.ragged_dot(**operands)


@pytest.mark.parametrize("precision", ["exact", 3])
def test_unknown_precision(precision):
    function = partial(jgg.ragged_dot, precision=precision)
    jaxs = raised_by(partial(jax.lax.ragged_dot, precision=precision), LHS, RHS, SIZES)
    ours = raised_by(function, LHS, RHS, SIZES)
    assert type(ours) is type(jaxs)
    assert str(precision) in str(ours)


@pytest.mark.parametrize("implementation", ["triton", "CUDA", True, ("cuda",)])
def test_unknown_implementation(implementation):
    function = partial(jgg.ragged_dot, implementation=implementation)
    with pytest.raises(ValueError, match="(?s)implementation.*cuda.*xla") as caught:
        jax.eval_shape(function, LHS, RHS, SIZES)
    assert repr(implementation) in str(caught.value)


def test_reference_is_another_name_of_xla():
    programs = (
        str(jax.make_jaxpr(partial(jgg.ragged_dot, implementation=name))(LHS, RHS, SIZES))
        for name in ("xla", "reference")
    )
    assert len(set(programs)) == 1


class TestGroupOffset:
    def call(self, offset, rhs=RHS, sizes=SIZES):
        return jax.eval_shape(partial(jgg.ragged_dot, group_offset=offset), LHS, rhs, sizes)

    @pytest.mark.parametrize("offset", [1.0, np.float32(0), np.zeros(1), True])
    def test_not_an_integer(self, offset):
        with pytest.raises(TypeError, match="group_offset.*(float|bool)"):
            self.call(offset)

    @pytest.mark.parametrize("shape", [(2,), (0,), (1, 1)])
    def test_shape(self, shape):
        with pytest.raises(TypeError, match="group_offset") as caught:
            self.call(np.zeros(shape, np.int32))
        assert str(shape) in str(caught.value)

    def test_more_matrices_than_groups(self):
        with pytest.raises((TypeError, ValueError), match="(?s)rhs.*group_sizes") as caught:
            self.call(0, rhs=array(5, K, N))
        assert "5" in str(caught.value) and "3" in str(caught.value)

    def test_fewer_matrices_than_groups_is_a_window(self):
        assert self.call(0, rhs=array(2, K, N)).shape == (M, N)


def dimension_numbers(contracting, batch=((), ()), ragged=(0,), group=(0,)):
    return RaggedDotDimensionNumbers((contracting, batch), ragged, group)


class TestDimensionNumbers:
    NONCONTRACTING = (((1,), (1,)), ((), ()), (0,), (0,))

    @pytest.mark.parametrize(
        "operands, numbers",
        [
            ((LHS, RHS), dimension_numbers(((1,), (1,)), ragged=(0, 1))),
            ((LHS, RHS), dimension_numbers(((1,), (1,)), ragged=())),
            ((LHS, RHS), dimension_numbers(((1,), (1,)), ragged=(2,))),
            ((LHS, RHS), dimension_numbers(((1,), (1,)), group=())),
            ((LHS, RHS), dimension_numbers(((1,), (1,)), group=(0, 2))),
            ((LHS, RHS), dimension_numbers(((1,), (2,)))),
            ((LHS, RHS), dimension_numbers(((3,), (1,)))),
            ((LHS, array(M, N)), dimension_numbers(((0,), (0,)))),
            ((LHS, array(M + 1, N)), dimension_numbers(((0,), (0,)), group=())),
        ],
    )
    def test_that_jax_rejects_too(self, operands, numbers):
        numbers = partial(dict, ragged_dot_dimension_numbers=numbers)
        jaxs = raised_by(partial(jax.lax.ragged_dot_general, **numbers()), *operands, SIZES)
        ours = raised_by(partial(jgg.ragged_dot_general, **numbers()), *operands, SIZES)
        assert type(ours) is type(jaxs)
        assert isinstance(ours, (TypeError, ValueError))

    @pytest.mark.parametrize("numbers", [None, (((1,), (1,)), ((), ()))])
    def test_of_another_type(self, numbers):
        with pytest.raises(TypeError, match="ragged_dot_dimension_numbers"):
            jax.eval_shape(
                lambda *operands: jgg.ragged_dot_general(*operands, numbers), LHS, RHS, SIZES
            )


class TestImplementation:
    @pytest.mark.parametrize("op", OPS, ids=repr)
    @pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float32])
    def test_cuda_on_the_cpu_says_why_not(self, op, dtype):
        lhs, rhs, _ = (array(*shape, dtype=dtype) for shape in op.shapes(M, K, N, G))
        function = partial(op.call.__wrapped__, implementation="cuda")
        with pytest.raises(NotImplementedError, match="(?i)implementation='cuda'.*cpu"):
            jax.jit(function).lower(lhs, rhs, SIZES)

    def test_availability_and_its_reason_agree(self):
        reason = jgg.unavailable_reason()
        assert jgg.is_available() is (reason is None)
        assert reason is None or len(reason) > 20

    def test_the_reason_where_jax_has_no_gpu(self):
        if any(device.platform == "gpu" for device in jax.devices()):
            pytest.skip("there is a GPU")
        assert re.search("_extension|CUDA device", jgg.unavailable_reason())


@pytest.mark.parametrize("op", OPS, ids=repr)
def test_group_sizes_have_no_gradient(op):
    lhs, rhs, _ = (np.ones(shape, np.float32) for shape in op.shapes(M, K, N, G))

    def total(sizes):
        return op.call(lhs, rhs, sizes).sum()

    with pytest.raises(TypeError, match="int32"):
        jax.grad(total)(np.ones(G, np.int32))
    gradient = jax.grad(total, allow_int=True)(np.ones(G, np.int32))
    assert gradient.dtype == jax.dtypes.float0


def test_contracting_and_noncontracting_are_told_apart_by_the_ragged_dimension():
    lhs, rhs, _ = CONTRACTING.shapes(M, K, N, G)
    assert CONTRACTING.call.eval_shape(array(*lhs), array(*rhs), SIZES).shape == (G, K, N)
    assert NONCONTRACTING.call.eval_shape(LHS, RHS, SIZES).shape == (M, N)


NOT_BOOLEANS = ["no", 1.5, 1, None, np.ones(2, bool), np.array(True)]
A, B, E4 = np.ones((3, 3), np.float32), np.ones((2, 3, 3), np.float32), jnp.float8_e4m3fn
TWO = np.array([1, 2], np.int32)

# Calls with a boolean argument, whose name is the last word of the key.
BOOLEANS = {
    "ragged_dot transpose_rhs": lambda x: jgg.ragged_dot(A, B, TWO, transpose_rhs=x),
    "accumulate transpose_lhs": lambda x: jgg.ragged_dot_accumulate(B, A, A, TWO, transpose_lhs=x),
    "accumulate transpose_rhs": lambda x: jgg.ragged_dot_accumulate(B, A, A, TWO, transpose_rhs=x),
    "scaled_ragged_dot transpose_rhs": lambda x: jgg.scaled_ragged_dot(
        A.astype(E4), 1.0, B.astype(E4), 1.0, TWO, lhs_scaling="tensor", transpose_rhs=x
    ),
    "blockwise power_of_two_scales": lambda x: jgg.quantize_blockwise(A, power_of_two_scales=x),
    "weights power_of_two_scales": lambda x: jgg.quantize_weights(B, power_of_two_scales=x),
    "ragged power_of_two_scales": lambda x: jgg.quantize_ragged(A, TWO, power_of_two_scales=x),
    "Recipe power_of_two_scales": lambda x: jgg.Recipe(power_of_two_scales=x),
    "grouped_gemm sort_problems": lambda x: jgg.grouped_gemm([A], [A], sort_problems=x),
    "grouped_gemm transpose_lhs": lambda x: jgg.grouped_gemm([A], [A], transpose_lhs=x),
    "grouped_gemm transpose_rhs[0]": lambda x: jgg.grouped_gemm([A], [A], transpose_rhs=[x]),
    "grouped_syrk transpose": lambda x: jgg.grouped_syrk(B, transpose=x),
    "grouped_herk transpose": lambda x: jgg.grouped_herk(B, transpose=x),
    "grouped_syr2k symmetrize_output": lambda x: jgg.grouped_syr2k(B, B, symmetrize_output=x),
    "grouped_her2k symmetrize_output": lambda x: jgg.grouped_her2k(B, B, symmetrize_output=x),
    "route renormalize": lambda x: jgg.moe.route(A, 1, renormalize=x),
}


@pytest.mark.parametrize("value", NOT_BOOLEANS, ids=repr)
@pytest.mark.parametrize("name", BOOLEANS)
def test_only_booleans_are_booleans(name, value):
    with pytest.raises(TypeError, match=re.escape(name.split()[-1])) as caught:
        BOOLEANS[name](value)
    assert "True or False" in str(caught.value)
    BOOLEANS[name](np.True_)


@pytest.mark.parametrize(
    "name, function",
    [
        (
            "preferred_element_type",
            lambda x: jgg.ragged_dot(A, B, TWO, preferred_element_type=x),
        ),
        (
            "preferred_element_type",
            lambda x: jgg.grouped_gemm([A], [A], preferred_element_type=x),
        ),
        ("preferred_element_type", lambda x: jgg.grouped_syrk(B, preferred_element_type=x)),
        (
            "preferred_element_type",
            lambda x: jgg.fp8_ragged_dot(A, B, TWO, preferred_element_type=x),
        ),
        ("dtype", lambda x: jgg.quantize_blockwise(A, dtype=x)),
        ("forward_dtype", lambda x: jgg.Recipe(forward_dtype=x)),
    ],
)
def test_no_dtype_at_all(name, function):
    with pytest.raises(TypeError, match=f"{name} must be a dtype, got 'e4m3'"):
        function("e4m3")


@pytest.mark.parametrize("beta", [0.5, -1, np.float32(2), jnp.zeros(()), [0.5, 0.0], 1j])
@pytest.mark.parametrize(
    "function",
    [
        partial(jgg.grouped_gemm, B, B),
        partial(jgg.grouped_syrk, B),
        partial(jgg.grouped_herk, B),
        partial(jgg.grouped_syr2k, B, B),
        partial(jgg.grouped_her2k, B, B),
    ],
    ids=lambda function: function.func.__name__,
)
def test_beta_without_c(function, beta):
    with pytest.raises(ValueError, match="beta must be zero if c is None.*got beta="):
        function(beta=beta)
    function(beta=0)


@pytest.mark.parametrize("value", [None, "x", ["x", 1.0], [None, 1.0], {}], ids=repr)
@pytest.mark.parametrize("name", ["alpha", "beta"])
def test_scales_that_are_no_numbers(name, value):
    matrices = [A, A]
    for function, operands in (
        (jgg.grouped_gemm, (matrices, matrices, matrices)),
        (jgg.grouped_syr2k, (matrices, matrices, matrices)),
    ):
        with pytest.raises((TypeError, ValueError), match=name):
            function(*operands, **{name: value})


@pytest.mark.parametrize("uplo", ["U", "Upper", None, True, np.array(["lower"])], ids=repr)
def test_unknown_triangle(uplo):
    with pytest.raises(ValueError, match=r"uplo must be one of \('lower', 'upper'\)"):
        jgg.grouped_syrk(B, uplo=uplo)


@pytest.mark.parametrize("value", [{}, [{}], {"highest"}, np.ones(2)], ids=repr)
def test_precisions_that_are_none(value):
    matrices = jnp.ones((1, K, K))
    for function in (
        partial(jgg.ragged_dot, A, B, np.ones(len(B), np.int32)),
        partial(jgg.ragged_mlp, A, matrices, matrices, matrices, np.ones(1, np.int32)),
        partial(jgg.grouped_gemm, B, B),
    ):
        with pytest.raises(ValueError, match="precision must be None, a jax.lax.Precision or"):
            function(precision=value)
