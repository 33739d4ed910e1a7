"""The interface of peers, and the kinds of calls that peers make."""

import ctypes
import enum
import importlib.util
import time
from collections.abc import Callable
from typing import Any

import jax
from jax.lax import RaggedDotDimensionNumbers

import jax_grouped_gemm as jgg
from benchmarks.harness.cases import Problem


class NotOffered(Exception):
    """A peer does not offer a problem; the message says what is missing."""


class Role(enum.StrEnum):
    """The meaning of a comparison with a peer."""

    OURS = "ours"
    # Our kernels with another configuration, precision or kind of operand.
    VARIANT = "variant"
    # Takes group sizes on the device, as we do. We want to be faster.
    GROUPED = "grouped"
    # Knows the group sizes on the host. We want to be as fast.
    LOOP = "loop"
    # A matmul of the same FLOPs without groups. We want to be nearly as fast.
    CEILING = "ceiling"
    # Only moves memory. No implementation moves a problem's bytes faster than this.
    BANDWIDTH = "bandwidth"

    @property
    def solves_problem(self) -> bool:
        """Whether the result is that of the problem, so that it can be checked."""
        return self in (Role.OURS, Role.VARIANT, Role.GROUPED, Role.LOOP)


class Call:
    """A prepared computation. `run` enqueues it, and `wait` waits for the result of `run`.

    If operands are rounded in another way than the case says, `reference` computes their float32
    result. `tolerance` is the error that the peer's own arithmetic may add. If a call has several
    parts, `part_of` returns the part of a kernel, given the kernels' names in the order of a call.
    The results then have the times of the parts too.
    """

    def __init__(
        self,
        run: Callable[[], Any],
        detail: str = "",
        reference: Callable[[], jax.Array] | None = None,
        tolerance: float = 0.0,
        part_of: Callable[[str], str] | None = None,
    ):
        self._run = run
        self.detail = detail
        self.reference = reference
        self.tolerance = tolerance
        self.part_of = part_of

    def run(self) -> Any:
        return self._run()

    def wait(self, result: Any) -> None:
        """Waits until the device has finished."""
        jax.block_until_ready(result)

    def to_jax(self, result: Any) -> jax.Array:
        """Returns the result as a JAX array, without a copy."""
        return result

    def elapsed_us(self) -> float:
        """Returns the microseconds of one call, by the best clock that the call has."""
        start = time.perf_counter()
        self.wait(self.run())
        return (time.perf_counter() - start) * 1e6


class TorchCall(Call):
    """A computation on PyTorch's current stream."""

    def wait(self, result: Any) -> None:
        if result.is_cuda:
            import torch

            torch.cuda.synchronize()

    def to_jax(self, result: Any) -> jax.Array:
        return jax.dlpack.from_dlpack(result)

    def elapsed_us(self) -> float:
        """Returns the microseconds between events around a call, or by the host's clock on CPUs."""
        import torch

        if not torch.cuda.is_available():
            return super().elapsed_us()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.run()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) * 1e3


class EnqueuedCall(Call):
    """Work that writes JAX arrays on the legacy default stream, which JAX does not know."""

    def wait(self, result: Any) -> None:
        if error := ctypes.CDLL("libcuda.so.1").cuCtxSynchronize():
            raise RuntimeError(f"cuCtxSynchronize: CUDA driver error {error}")

    def to_jax(self, result: Any) -> Any:
        self.wait(result)
        return result


class InPlaceCall(Call):
    """A function of a state. Each call overwrites the state that the previous call returned."""

    def __init__(self, function: Callable[..., Any], state: Any, *operands: Any):
        super().__init__(jax.jit(function, donate_argnums=0))
        self._operands = operands
        self.state = self._run(state, *operands)

    def run(self) -> Any:
        self.state = self._run(self.state, *self._operands)
        return self.state

    def wait(self, result: Any) -> None:
        # Wait for the state, because it has overwritten earlier results.
        jax.block_until_ready(self.state)


class Peer:
    """An implementation to measure, in any suite. `needs` has names of modules, or "GPU".

    Peers with `slow` are measured last, in a separate pass with few rounds. `checked` says whether
    to check the result; by default the role decides.
    """

    name: str
    role: Role
    slow: bool = False
    needs: tuple[str, ...] = ()
    checked: bool | None = None

    def unavailable_reason(self) -> str | None:
        """Returns why this peer cannot run on this machine at all, or None."""
        if self.role in (Role.OURS, Role.VARIANT):
            return kernels_unavailable_reason()
        missing = (without_gpu() if what == "GPU" else missing_module(what) for what in self.needs)
        return next(filter(None, missing), None)

    def prepare(self, problem: Any, *operands: Any) -> Call:
        """Returns a call, after compiling and all other work that a timed call leaves out.

        Keep compiled functions by problem, because operands of the same shapes may come again:
        distributions of a ragged product differ only in their group sizes.

        Args:
          problem: the suite's problem, on which a compiled program depends.
          operands: the suite's operands, on the device.

        Raises:
          NotOffered: the peer does not support this problem.
        """
        raise NotImplementedError


class JaxPeer(Peer):
    """A jitted function of a suite's operands. For `part_of`, see `Call`."""

    def __init__(
        self,
        name: str,
        role: Role,
        function: Callable[..., Any],
        checked: bool | None = None,
        part_of: Callable[[str], str] | None = None,
        compiler_options: dict | None = None,
    ):
        self.name, self.role, self.function = name, role, function
        self.checked, self.part_of, self._options = checked, part_of, compiler_options

    def prepare(self, problem: Any, *operands: Any) -> Call:
        try:
            jitted = jax.jit(self.function, compiler_options=self._options)
            call = jax_call(jitted, *operands)
        except NotImplementedError as error:
            raise NotOffered(str(error)) from error
        call.name, call.part_of = self.name, self.part_of
        return call


def is_checked(peer: Peer) -> bool:
    """Returns whether a peer's result is checked before it is timed."""
    return peer.role.solves_problem if peer.checked is None else peer.checked


def dimension_numbers(problem: Problem) -> RaggedDotDimensionNumbers:
    """Returns the problem's dimension numbers for `jax.lax.ragged_dot_general`."""
    if problem.contracting:
        contracted, groups = (((0,), (0,)), ((), ())), []
    else:
        contracted, groups = (((1,), (2 if problem.transpose_rhs else 1,)), ((), ())), [0]
    return RaggedDotDimensionNumbers(
        contracted, lhs_ragged_dimensions=[0], rhs_group_dimensions=groups
    )


def jax_call(jitted: Callable[..., jax.Array], *operands: jax.Array) -> Call:
    """Returns a call of a jitted function, after running it once."""
    jax.block_until_ready(jitted(*operands))
    return Call(lambda: jitted(*operands))


def once(call: Call) -> Call:
    """Returns `call` after running it once."""
    call.wait(call.run())
    return call


def missing_module(name: str) -> str | None:
    return None if importlib.util.find_spec(name) else f"{name} is not installed"


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def pinned_implementation() -> str | None:
    """Returns "cuda" on a GPU, so that nothing falls back unnoticed, and None elsewhere."""
    return "cuda" if on_gpu() else None


def without_gpu() -> str | None:
    return None if on_gpu() else "needs a GPU"


def kernels_unavailable_reason() -> str | None:
    """Returns why our kernels cannot run here, or None. Without a GPU the reference runs."""
    if on_gpu() and (reason := jgg.unavailable_reason()):
        return f"{reason} (imported from {jgg.__file__})"
    return None


def as_torch(array: jax.Array) -> Any:
    """Returns a PyTorch tensor over the same memory."""
    import torch

    return torch.from_dlpack(jax.block_until_ready(array))
