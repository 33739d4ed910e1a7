"""Programs that many threads compile, and one thread measures.

Compilation takes nearly all of a case's time. XLA compiles without Python's lock, and its
autotuner's threads use the GPU one after the other.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

import jax_grouped_gemm as jgg
from benchmarks.harness.peer import Call, NotOffered, Peer, Role
from jax_grouped_gemm._src import fallback


@dataclasses.dataclass(frozen=True)
class Program:
    """A jitted function that is a peer in a case.

    Attributes:
      name, role: name and role of the peer.
      function: function of the case's operands.
      compiler_options: XLA's compiler options.
      left_to_xla: whether plans fall back to XLA. Not offered if XLA cannot compute the function,
        or if the plan takes XLA anyway.
      unplanned: the function with implementation None. Not offered if its plan takes a kernel,
        because `function` and `unplanned` are then the same program.
    """

    name: str
    role: Role
    function: Callable[..., Any]
    compiler_options: Mapping[str, Any] | None = None
    left_to_xla: bool = False
    unplanned: Callable[..., Any] | None = None

    def compile(self, *operands: Any) -> tuple[Callable[..., Any], str]:
        """Returns the executable for abstract `operands`, and a detail for the record."""
        function, detail = self.function, ""
        if self.unplanned and jgg.explain(self.unplanned, *operands).plans[0].kernel_problem:
            raise NotOffered("the plan takes the kernel")
        if self.left_to_xla:
            function, detail = _left_to_xla(function, *operands)
        options = dict(self.compiler_options or {}) or None
        return jax.jit(function).lower(*operands).compile(compiler_options=options), detail


def _left_to_xla(function: Callable, *operands: Any) -> tuple[Callable, str]:
    if jgg.explain(function, *operands).plans[0].kernel_problem is None:
        raise NotOffered("the plan leaves it to XLA")

    def left(*operands):
        with fallback.policy("xla"):
            return function(*operands)

    plan = jgg.explain(left, *operands).plans[0]
    if plan.kernel_problem is not None:
        raise NotOffered("XLA has no product for it")
    return left, plan.reason


class ProgramPeer(Peer):
    """A program as a peer, compiled when it is made."""

    def __init__(self, program: Program, operands: Sequence[Any]):
        self.name, self.role = program.name, program.role
        try:
            self._compiled = program.compile(*operands)
            self._error = None
        except Exception as error:
            self._error = error  # `prepare` raises it

    def prepare(self, problem, *operands):
        if self._error:
            raise self._error
        run, detail = self._compiled
        jax.block_until_ready(run(*operands))
        return Call(lambda: run(*operands), detail)
