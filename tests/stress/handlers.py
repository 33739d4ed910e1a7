"""Makes our custom calls with operands, results and attributes that do not fit.

python -m tests.stress.handlers --seed 0 --count 400

Each call must either be refused with an error, or run because it fits after all. No call may touch
memory outside of its operands and results. `tests.stress --sanitizer` starts this module under
compute-sanitizer, which checks this for the calls that run. The calls have their own process,
because an illegal access ends it. The last printed line then names the call.
"""

from __future__ import annotations

import argparse
import collections
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from benchmarks.harness.measure import first_line
from benchmarks.harness.peer import on_gpu
from tests.stress.calls import Aval, FfiCall, random_operand, valid_calls

THREADS = 8  # threads that compile
# Words in the errors of illegal memory accesses, after which the process can run nothing.
FATAL = ("illegal", "misaligned", "unspecified launch failure", "ILLEGAL_ADDRESS", "LAUNCH_FAILED")
DTYPES = (
    jnp.bfloat16, jnp.float16, jnp.float32, np.float64, np.complex64, np.int8, np.int32, np.int64,
    ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2,
)  # fmt: skip
OTHER_ATTRIBUTES: dict[type, list[Any]] = {
    bool: [np.int32(1), "yes", np.float32(1)],
    np.int32: [np.int32(x) for x in (-1, 0, 1, 3, 64, 127, 256, 2**31 - 1, -(2**31))]
    + [np.int64(128), np.float32(128), True, "128"],
    np.float32: [np.float32(np.nan), np.float32(np.inf), np.float64(1), np.int32(1), "1"],
    np.ndarray: [
        np.array(x, np.int64) for x in ([-16, 2, 128], [2**62, 2, 128], [0, 0, 128], [16], [0] * 9)
    ]
    + [np.array([0, 2, 128], np.int32), np.int64(0), "0"],
    str: ["", "nonsense", "pingpong", "swapped", "fine", "stream_k", "cooperative", np.int32(1)],
}


def other_avals(aval: Aval) -> Iterator[tuple[str, Aval]]:
    """Yields how another array differs from this one, and that array's shape and dtype."""
    shape, dtype = aval.shape, aval.dtype
    for i, size in enumerate(shape):
        for other in {0, 1, size - 1, size + 1, size + 3, 2 * size} - {size, -1}:
            changed = (*shape[:i], other, *shape[i + 1 :])
            yield f"dimension {i} is {other}, not {size}", Aval(changed, dtype)
    for changed in ((1, *shape), (2, *shape), (1, 1, *shape), shape[1:], shape[2:], shape[::-1]):
        if changed != shape:
            yield f"shape {changed}, not {shape}", Aval(changed, dtype)
    for other in DTYPES:
        if np.dtype(other) != dtype:
            yield f"{np.dtype(other)}, not {dtype}", Aval(shape, np.dtype(other))


def misfits(call: FfiCall) -> Iterator[tuple[str, FfiCall]]:
    """Yields calls that differ from a valid call in one thing, each after a text that names it."""
    for field in ("operands", "results"):
        avals = getattr(call, field)
        for i, aval in enumerate(avals):
            for what, other in other_avals(aval):
                changed = (*avals[:i], other, *avals[i + 1 :])
                yield f"{field[:-1]} {i}: {what}", call.replace(**{field: changed})
            if i not in (*call.aliases, *call.aliases.values()):
                yield (
                    f"without {field[:-1]} {i}",
                    call.replace(**{field: (*avals[:i], *avals[i + 1 :])}, aliases={}),
                )
        extra = Aval((8,), jnp.float32)
        yield f"one more of {field}", call.replace(**{field: (*avals, extra)})
        if avals[::-1] != avals:
            yield f"{field} in reverse", call.replace(**{field: avals[::-1]}, aliases={})
    if call.aliases:
        yield "nothing is aliased", call.replace(aliases={})
    attributes = call.attributes
    for name, value in attributes.items():
        kind = str if isinstance(value, str) else bool if isinstance(value, bool) else type(value)
        others = OTHER_ATTRIBUTES[kind] + ([not value] if kind is bool else [])
        for other in others:
            if type(other) is not type(value) or not np.array_equal(other, value):
                yield f"{name}={other!r}", call.replace(attributes=attributes | {name: other})
        rest = {key: x for key, x in attributes.items() if key != name}
        yield f"without {name}", call.replace(attributes=rest)
    yield "an attribute more", call.replace(attributes=attributes | {"extra": np.int32(1)})


def chosen(seed: int, count: int) -> list[tuple[str, FfiCall]]:
    """Returns the valid calls, then about `count` misfits, equally many for each valid call."""
    rng = np.random.default_rng(seed)
    calls = valid_calls()
    found = [("as it is", call) for call in calls]
    each = -(-count // len(calls))
    for call in calls:
        all_of_it = list(misfits(call))
        picked = rng.permutation(len(all_of_it))[:each]
        found += [all_of_it[i] for i in picked]
    return found


def compiled(call: FfiCall):
    """Returns the program of a call, None without a GPU, or the error that refuses the call."""
    try:
        lowered = call.lower()
        return lowered.compile() if on_gpu() else None
    except Exception as error:
        return error


def outcome(program, call: FfiCall, rng: np.random.Generator) -> dict[str, str]:
    """Runs the program of a call on random operands, and returns the outcome."""
    if isinstance(program, Exception):
        return {"refused": first_line(program), "by": "compiler"}
    if program is None:
        return {"lowered": "no GPU to run it"}
    operands = [random_operand(rng, aval) for aval in call.operands]
    try:
        jax.block_until_ready(program(*operands))
    except Exception as error:
        kind = "fatal" if any(word in str(error) for word in FATAL) else "refused"
        return {kind: first_line(error), "by": "handler"}
    return {"ran": ""}


def attempts(
    seed: int, count: int, seconds: float, threads: int = THREADS
) -> Iterator[dict[str, Any]]:
    """Makes the calls one by one. Yields what each call is, and after the call also its outcome.

    With one thread, no program is compiled while a call runs.
    """
    end = time.monotonic() + seconds
    rng = np.random.default_rng(seed)
    with ThreadPoolExecutor(threads) as pool:
        calls = chosen(seed, count)
        compile_some = pool.map if threads > 1 else map
        for start in range(0, len(calls), 4 * threads):
            some = calls[start : start + 4 * threads]
            programs = compile_some(compiled, [call for _, call in some])
            for (what, call), program in zip(some, programs, strict=True):
                named = {"target": call.target, "change": what}
                yield named
                yield named | outcome(program, call, rng)
            if time.monotonic() > end:
                return


def summary(lines: list[dict[str, Any]], returncode: int) -> dict[str, Any]:
    """Returns counts of the outcomes that `attempts` yielded, and the failures."""
    done = [line for line in lines if len(line) > 2]
    failures = [
        f"{line['target']}, {line['change']}: {line['fatal']}" for line in done if "fatal" in line
    ]
    failures += [
        f"{line['target']} does not run as it is: {line['refused']}"
        for line in done
        if line["change"] == "as it is" and "refused" in line
    ]
    if returncode != 0:
        last = lines[-1] if lines else {"target": "nothing", "change": "at the start"}
        failures.append(f"the process ended with {returncode} at {last}")
    refused = [line["refused"] for line in done if "refused" in line]
    internal = [
        f"{line['target']}, {line['change']}: {line['refused']}"
        for line in done
        if line.get("by") == "handler"
        and "INVALID_ARGUMENT" not in line.get("refused", "INVALID_ARGUMENT")
    ]
    return {
        "calls": len(done),
        "targets": len({line["target"] for line in done}),
        "refused": len(refused),
        "refused_by_handlers": sum(line.get("by") == "handler" for line in done),
        "not_as_invalid": internal,
        "ran": sum("ran" in line for line in done),
        "ran_though_changed": [
            f"{line['target']}, {line['change']}"
            for line in done
            if "ran" in line and line["change"] != "as it is"
        ],
        "outcomes": dict(
            collections.Counter(next(iter(set(line) - {"target", "change", "by"})) for line in done)
        ),
        "failures": failures,
    }


def main(arguments: list[str] | None = None) -> None:
    """Prints a line of JSON before and after each call."""
    parser = argparse.ArgumentParser(prog="python -m tests.stress.handlers", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=400, help="calls that do not fit")
    parser.add_argument("--time-limit", type=float, default=600, metavar="SECONDS")
    parser.add_argument("--threads", type=int, default=THREADS, help="threads that compile")
    options = parser.parse_args(arguments)
    # Set this for the whole process, since programs are compiled in other threads.
    jax.config.update("jax_enable_x64", True)
    for line in attempts(options.seed, options.count, options.time_limit, options.threads):
        print(json.dumps(line), flush=True)
        if "fatal" in line:
            break


if __name__ == "__main__":
    main()
