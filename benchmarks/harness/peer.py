"""The interface of a peer, and the two kinds of calls that peers make."""

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
    # Our kernels in another way: another configuration, another precision, another form of operand.
    VARIANT = "variant"
    # Takes group sizes on the device, as we do: to be beaten.
    GROUPED = "grouped"
    # Knows the group sizes on the host: to be matched.
    LOOP = "loop"
    # A matmul of the same FLOPs without groups: as close as possible.
    CEILING = "ceiling"
    # Moves memory only: its speed turns the bytes that a problem must move into a floor.
    BANDWIDTH = "bandwidth"

    @property
    def solves_problem(self) -> bool:
        """Whether the result is the problem's, so that it can be checked."""
        return self in (Role.OURS, Role.VARIANT, Role.GROUPED, Role.LOOP)


class Call:
    """A prepared computation: `run` enqueues it, `wait` waits for what `run` returned.

    Where operands are rounded otherwise than the case says, `reference` computes the float32 result
    that they should give, and `tolerance` is the error that the peer's own arithmetic may add.
    Where a call is made of several parts, `part_of` names that of a kernel by the kernel's name, or
    by the order in which it is asked; their times are then in the results besides the whole's.
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
        """Returns when the device has finished."""
        jax.block_until_ready(result)

    def to_jax(self, result: Any) -> jax.Array:
        """The result as a JAX array, without a copy."""
        return result

    def elapsed_us(self) -> float:
        """Time of one call by the best clock at hand, in microseconds."""
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
        """Time between events around the call, in microseconds; the host's clock on a CPU."""
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
    """Work on the legacy default stream, which JAX does not know of, into arrays of JAX's."""

    def wait(self, result: Any) -> None:
        if error := ctypes.CDLL("libcuda.so.1").cuCtxSynchronize():
            raise RuntimeError(f"cuCtxSynchronize: CUDA driver error {error}")

    def to_jax(self, result: Any) -> Any:
        self.wait(result)
        return result


class InPlaceCall(Call):
    """Each call of a function takes, and overwrites, the state that the call before returned."""

    def __init__(self, function: Callable[..., Any], state: Any, *operands: Any):
        super().__init__(jax.jit(function, donate_argnums=0))
        self._operands = operands
        self.state = self._run(state, *operands)

    def run(self) -> Any:
        self.state = self._run(self.state, *self._operands)
        return self.state

    def wait(self, result: Any) -> None:
        # Results of earlier calls are overwritten.
        jax.block_until_ready(self.state)


class Peer:
    """An implementation to measure, in any of the suites; `needs` names modules, or "GPU".

    Slow peers are measured in a pass of their own, with few rounds, after all others. A peer whose
    result is not the problem's has `checked` false; by default the role says so.
    """

    name: str
    role: Role
    slow: bool = False
    needs: tuple[str, ...] = ()
    checked: bool | None = None

    def unavailable_reason(self) -> str | None:
        """Why this peer cannot run on this machine at all, or None."""
        if self.role in (Role.OURS, Role.VARIANT):
            return kernels_unavailable_reason()
        missing = (without_gpu() if what == "GPU" else missing_module(what) for what in self.needs)
        return next(filter(None, missing), None)

    def prepare(self, problem: Any, *operands: Any) -> Call:
        """Compiles and does whatever else belongs outside a timed call.

        Compiled functions should be kept by problem, because operands of the same shapes may come
        again: between distributions of a ragged product only the group sizes differ.

        Args:
          problem: of the suite: what a compiled program depends on.
          operands: of the suite, on the device.

        Raises:
          NotOffered: with the reason, if the peer cannot be asked for this problem.
        """
        raise NotImplementedError


class JaxPeer(Peer):
    """A function of a suite's operands, jitted: the form of a peer that needs nothing else.

    `part_of`: see `Call`.
    """

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
    """Whether a peer's result is compared with the reference's before it is timed."""
    return peer.role.solves_problem if peer.checked is None else peer.checked


def dimension_numbers(problem: Problem) -> RaggedDotDimensionNumbers:
    """The problem in the terms of `jax.lax.ragged_dot_general`."""
    if problem.contracting:
        contracted, groups = (((0,), (0,)), ((), ())), []
    else:
        contracted, groups = (((1,), (2 if problem.transpose_rhs else 1,)), ((), ())), [0]
    return RaggedDotDimensionNumbers(
        contracted, lhs_ragged_dimensions=[0], rhs_group_dimensions=groups
    )


def jax_call(jitted: Callable[..., jax.Array], *operands: jax.Array) -> Call:
    """A call of a jitted function, compiled and run once."""
    jax.block_until_ready(jitted(*operands))
    return Call(lambda: jitted(*operands))


def once(call: Call) -> Call:
    """A call that has run once."""
    call.wait(call.run())
    return call


def missing_module(name: str) -> str | None:
    return None if importlib.util.find_spec(name) else f"{name} is not installed"


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def pinned_implementation() -> str | None:
    """The implementation of our functions: kernels on a GPU, so that nothing falls back unnoticed.

    Elsewhere None, with which the reference runs, and `explain` tells what a GPU would.
    """
    return "cuda" if on_gpu() else None


def without_gpu() -> str | None:
    return None if on_gpu() else "needs a GPU"


def kernels_unavailable_reason() -> str | None:
    """Why our kernels cannot run here, or None; without a GPU the reference is measured."""
    if on_gpu() and (reason := jgg.unavailable_reason()):
        return f"{reason} (imported from {jgg.__file__})"
    return None


def as_torch(array: jax.Array) -> Any:
    """A PyTorch tensor over the same memory."""
    import torch

    return torch.from_dlpack(jax.block_until_ready(array))
