"""Sets up tests: eight CPU devices, the CPU for all tests not marked `gpu`, and random seeds."""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import os
import secrets
import zlib
from pathlib import Path

# Use one thread in NumPy, whose products in tests are small. If each process of pytest-xdist had a
# thread for each core, the threads would wait for one another. NumPy reads these variables when it
# is imported.
for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

import numpy as np  # noqa: E402
import pytest  # noqa: E402

# JAX reads these variables when it is imported, so set them before the imports below.
XLA_FLAGS = [os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8"]
if Path("/dev/nvidiactl").exists():
    # XLA would otherwise time several kernels for each product that serves as a reference.
    XLA_FLAGS.append("--xla_gpu_autotune_level=0")
else:
    # Most of the time goes into compiling small programs for the CPU. Compile them without
    # optimisation, and in one thread, because the other cores run other tests.
    XLA_FLAGS += [
        "--xla_backend_optimization_level=0",
        "--xla_cpu_parallel_codegen_split_count=1",
    ]
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        # The older emitters take half as long as the emitters that use MLIR. Later releases have
        # only those that use MLIR, and abort if a flag is unknown.
        XLA_FLAGS.append("--xla_cpu_use_fusion_emitters=false")
    # Let the CUDA plugin load without cuDNN, so that it can compile for a GPU that is not present.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
os.environ["XLA_FLAGS"] = " ".join(XLA_FLAGS).strip()
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# Compute no cache keys, because no folder keeps compiled programs. Record no Python lines for the
# instructions of programs, because nobody reads these lines in tests.
os.environ.setdefault("JAX_ENABLE_COMPILATION_CACHE", "false")
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")

import jax  # noqa: E402

pytest.register_assert_rewrite("tests.support")
from jax_grouped_gemm._src import fallback  # noqa: E402
from jax_grouped_gemm._src.ragged import reference  # noqa: E402
from tests.support import aot  # noqa: E402

GPU_TESTS = Path(__file__).parent / "gpu"


def pytest_addoption(parser):
    parser.addoption("--seed", type=int, default=None, help="repeat a run's random inputs")


def pytest_configure(config):
    if config.getoption("--seed") is None:
        config.option.seed = secrets.randbits(32)


def pytest_report_header(config):
    return f"random inputs: --seed={config.getoption('--seed')}"


def pytest_collection_modifyitems(items):
    for item in items:
        if GPU_TESTS in item.path.parents:
            item.add_marker(pytest.mark.gpu)


def pytest_collection_finish():
    """Excludes modules and tests from garbage collection, because they live until the end."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)  # JAX's traces make many objects


@pytest.fixture(autouse=True)
def small_products_have_kernels(request):
    """Makes plans choose kernels for the small problems of tests, instead of leaving them to XLA.

    A test with the marker `plans_as_users_get_them` gets the same plans as users.
    """
    of_users = request.node.get_closest_marker("plans_as_users_get_them")
    with fallback.policy("auto" if of_users else "kernels"):
        yield


@pytest.fixture(params=reference.FORMS)
def either_form(request):
    """Runs a test with both forms of the reference, as "auto" never tiles small products."""
    with reference.form(request.param):
        yield


@pytest.fixture
def rng(request) -> np.random.Generator:
    """Draws new inputs in every run. `--seed`, as the report's header prints it, repeats them."""
    test = zlib.crc32(request.node.nodeid.encode())
    return np.random.default_rng([request.config.getoption("--seed"), test])


def missing_gpu() -> str | None:
    """Returns why the tests marked `gpu` cannot run, or None."""
    try:
        device = jax.devices("cuda")[0]
    except RuntimeError as error:
        return f"JAX has no CUDA device: {str(error).splitlines()[0]}"
    if device.compute_capability != "9.0":
        return f"{device.device_kind} has compute capability {device.compute_capability}, not 9.0"
    if importlib.util.find_spec("jax_grouped_gemm._extension") is None:
        return "jax_grouped_gemm was built without its extension"
    return None


@pytest.fixture(autouse=True)
def default_device(request):
    """Runs a test marked `gpu` on the GPU, or skips it; any other test on the CPU."""
    gpu = request.node.get_closest_marker("gpu") is not None
    if gpu and (reason := missing_gpu()):
        pytest.skip(reason)
    with jax.default_device(jax.devices("cuda" if gpu else "cpu")[0]):
        yield


@pytest.fixture(scope="session")
def extension():
    """Returns the extension, which needs no GPU here. If it is not built, the test is skipped."""
    return pytest.importorskip("jax_grouped_gemm._extension", reason="the extension is not built")


@pytest.fixture(scope="session")
def h200(extension) -> aot.Target:
    """Returns a compiler for an H200, which need not be present."""
    return aot.Target(aot.H200)


@pytest.fixture(scope="session")
def schedules():
    """Returns the extension that runs the kernels' schedules and layouts on the host.

    It is built only for tests. A test that needs it is skipped if it is not built.
    """
    return pytest.importorskip(
        "jax_grouped_gemm._schedules", reason="the package was built without JGG_BUILD_TESTS"
    )
