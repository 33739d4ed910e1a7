"""Exported programs of this version run. Other versions raise an error that names the target."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jax_grouped_gemm as jgg

OTHER_VERSION = b"9"  # no target has this version
VERSION = re.compile(rb"(jax_grouped_gemm\.[a-z0-9_]+\.v)\d")
M, K, N, G = 200, 136, 264, 5


def of(shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def product(function, dtype=jnp.bfloat16):
    return function, of((M, K), dtype), of((G, K, N), dtype), of((G,), jnp.int32)


def one_product(a, b, **options):
    return jgg.grouped_gemm([a], [b], **options)


PROGRAMS = {
    "ragged_dot": product(jgg.ragged_dot),
    "fp8_ragged_dot": product(jgg.fp8_ragged_dot),
    "ragged_dot of float32": product(jgg.ragged_dot, jnp.float32),
    "grouped_syrk": (jgg.grouped_syrk, of((G, K, N))),
    "grouped_gemm": (one_product, of((M, K)), of((K, N))),
}


@pytest.fixture(params=PROGRAMS)
def versions(request, extension):
    """Returns a program, the program with targets of an unknown version, and these targets."""
    function, *operands = PROGRAMS[request.param]
    # Plans would leave such small products to XLA.
    function = jax.jit(functools.partial(function, implementation="cuda"))
    exported = export.export(
        function, platforms=["cuda"], disabled_checks=jgg.EXPORT_DISABLED_CHECKS
    )(*operands)
    again = export.deserialize(exported.serialize())
    module = again.mlir_module_serialized
    changed = VERSION.sub(rb"\g<1>" + OTHER_VERSION, module)
    targets = {(name + OTHER_VERSION).decode() for name in VERSION.findall(module)}
    return again, dataclasses.replace(again, mlir_module_serialized=changed), targets


def test_exported_programs_call_our_targets(versions):
    exported, other, targets = versions
    assert targets
    for target in targets:
        assert target in other.mlir_module() and target not in exported.mlir_module()


@pytest.mark.gpu
def test_another_version_is_refused_by_name(versions, rng):
    exported, other, targets = versions
    operands = [
        np.full(aval.shape, 40, np.int32)
        if aval.dtype == np.int32
        else rng.standard_normal(aval.shape, np.float32).astype(aval.dtype)
        for aval in exported.in_avals
    ]
    jax.block_until_ready(exported.call(*operands))
    with pytest.raises(Exception, match="|".join(map(re.escape, targets))):
        jax.block_until_ready(other.call(*operands))
