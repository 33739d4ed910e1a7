"""Test environment: eight CPU devices, JAX's CPU backend unless a test asks for the GPU, seeds."""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import os
import secrets
import zlib
from pathlib import Path

# Judges in float64 are small products. With a thread for each core in each of the processes that
# share a machine, NumPy's threads wait for one another. Read when NumPy is imported, in the
# processes of pytest-xdist too.
for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

import numpy as np  # noqa: E402
import pytest  # noqa: E402

# JAX reads these when it is imported, so they are set before anything below imports it.
XLA_FLAGS = [os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8"]
if Path("/dev/nvidiactl").exists():
    # XLA would time several kernels for each product that results are compared with.
    XLA_FLAGS.append("--xla_gpu_autotune_level=0")
else:
    # Most of the time goes into compiling small programs for the CPU: unoptimised, and in one
    # thread, since the other cores have tests of their own.
    XLA_FLAGS += [
        "--xla_backend_optimization_level=0",
        "--xla_cpu_parallel_codegen_split_count=1",
    ]
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        # The older emitters take half as long as those that go through MLIR. Later releases have
        # the latter only, and abort at flags that they do not know.
        XLA_FLAGS.append("--xla_cpu_use_fusion_emitters=false")
    # The CUDA plugin can compile for a GPU that is not there, if it may load without cuDNN.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
os.environ["XLA_FLAGS"] = " ".join(XLA_FLAGS).strip()
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# Without a folder for compiled programs, their keys are computed for nothing; and nobody reads from
# which lines of Python the instructions of a test's program come.
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
    """Modules and tests stay to the end: the collector need not look at them again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)  # JAX's traces make many objects


@pytest.fixture(autouse=True)
def small_products_have_kernels(request):
    """Problems of tests are small, so that plans would leave most of them to XLA.

    A test with the marker `plans_as_users_get_them` gets those plans.
    """
    of_users = request.node.get_closest_marker("plans_as_users_get_them")
    with fallback.policy("auto" if of_users else "kernels"):
        yield


@pytest.fixture(params=reference.FORMS)
def either_form(request):
    """Both forms of the reference, which chooses masks for the small products of tests."""
    with reference.form(request.param):
        yield


@pytest.fixture
def rng(request) -> np.random.Generator:
    """Fresh random inputs in every run; the seed in the report's header repeats them."""
    test = zlib.crc32(request.node.nodeid.encode())
    return np.random.default_rng([request.config.getoption("--seed"), test])


def missing_gpu() -> str | None:
    """Why the tests marked `gpu` cannot run, or None."""
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
    """Skips a test that needs the compiled kernels, though not a GPU, where they are not built."""
    return pytest.importorskip("jax_grouped_gemm._extension", reason="the extension is not built")


@pytest.fixture(scope="session")
def h200(extension) -> aot.Target:
    """Compiles for an H200, which need not be there."""
    return aot.Target(aot.H200)


@pytest.fixture(scope="session")
def schedules():
    """Schedules and layouts as the kernels have them, run on the host by an extension that is built
    for tests alone. Skips a test that needs it where it is not built."""
    return pytest.importorskip(
        "jax_grouped_gemm._schedules", reason="the package was built without JGG_BUILD_TESTS"
    )
