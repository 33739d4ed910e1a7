"""Records the device time of calls, with CUPTI, which NVIDIA's profilers use too, or with a clock.

CUPTI timestamps each kernel, copy and memory set on the device, whichever framework launched it.
The recording is flushed after each call, so that it is certain which activities belong to a call.
https://docs.nvidia.com/cupti/ (activity API)
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.peer import Call

# Values of enums in cupti_activity.h and cupti_result.h.
_MEMCPY, _MEMSET, _CONCURRENT_KERNEL = 1, 2, 10
_FLUSH_FORCED = 1
_MAX_LIMIT_REACHED = 12

_BUFFER_BYTES = 1 << 20


# Offsets in CUPTI's records: of start and end of kernels, copies and memory sets, and of a kernel's
# name in CUpti_ActivityKernel9 and later.
_START, _END, _NAME = 16, 24, 104

_RequestBuffer = ctypes.CFUNCTYPE(
    None,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.POINTER(ctypes.c_size_t),
    ctypes.POINTER(ctypes.c_size_t),
)
_CompleteBuffer = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t
)


@dataclass(frozen=True, order=True)
class Activity:
    """A kernel, memory copy or memory set on the device. Times are nanoseconds of one clock."""

    start: int
    end: int
    name: str


@dataclass(frozen=True)
class Sample:
    """Device time of one call in microseconds, and its device activities in order.

    `activities` are the names of the activities, and `durations` their microseconds. Both are None
    if only a clock measured the call.
    """

    us: float
    activities: tuple[str, ...] | None
    durations: tuple[float, ...] | None = None

    def parts(self, part_of: Callable[[str], str]) -> dict[str, float] | None:
        """Returns microseconds of each part, None without activities; for `part_of` see `Call`."""
        if self.activities is None or self.durations is None:
            return None
        sums: dict[str, float] = {}
        for name, us in zip(self.activities, self.durations, strict=True):
            part = part_of(name)
            sums[part] = sums.get(part, 0.0) + us
        return sums


def summarize(activities: Iterable[Activity]) -> Sample:
    """Returns the sample of a call, with the time in which at least one activity ran.

    So gaps between activities, which depend on the host's speed, do not count, and overlapping
    activities count once.
    """
    ordered = sorted(activities)
    busy, past = 0, 0
    for activity in ordered:
        busy += max(0, activity.end - max(activity.start, past))
        past = max(past, activity.end)
    return Sample(
        busy / 1000,
        tuple(activity.name for activity in ordered),
        tuple((activity.end - activity.start) / 1000 for activity in ordered),
    )


def read_activity(record: int) -> Activity | None:
    """Returns the activity in the CUPTI record at an address, None for other kinds of records."""
    kind = ctypes.c_uint32.from_address(record).value
    if kind == _CONCURRENT_KERNEL:
        name = ctypes.c_char_p.from_address(record + _NAME).value.decode()
    elif kind in (_MEMCPY, _MEMSET):
        name = "memcpy" if kind == _MEMCPY else "memset"
    else:
        return None
    start, end = (ctypes.c_uint64.from_address(record + at).value for at in (_START, _END))
    return Activity(start, end, name)


class CuptiRecorder:
    """Records the device activity of calls while it is open. A process can open one at a time."""

    name = "cupti"

    def __init__(self):
        # Attaching takes longer than a short case, so a run without host times may stay attached.
        self.stays_attached = False
        self._subscriber: ctypes.c_void_p | None = None
        self._cupti = load_library("libcupti.so.13", "libcupti.so.12")
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._buffers: dict[int, ctypes.Array] = {}
        self._free: list[ctypes.Array] = []
        # CUPTI keeps these pointers for the life of the process.
        self._callbacks = _RequestBuffer(self._request), _CompleteBuffer(self._complete)

    def __enter__(self) -> CuptiRecorder:
        self._samples, self._activities, self._failure = [], [], None
        if self._subscriber is not None:
            return self
        subscriber = ctypes.c_void_p()
        self._call("cuptiSubscribe", ctypes.byref(subscriber), None, None)
        self._subscriber = subscriber
        self._call("cuptiActivityRegisterCallbacks", *self._callbacks)
        for kind in (_CONCURRENT_KERNEL, _MEMCPY, _MEMSET):
            self._call("cuptiActivityEnable", kind)
        return self

    def __exit__(self, *_) -> None:
        self._drain()
        if not self.stays_attached:
            self.detach()

    def detach(self) -> None:
        """Detaches CUPTI from the driver, because it slows launches, and so changes host times."""
        if self._subscriber is None:
            return
        for kind in (_CONCURRENT_KERNEL, _MEMCPY, _MEMSET):
            self._call("cuptiActivityDisable", kind)
        self._call("cuptiFinalize")
        # Do not check the status, because in some releases detaching removes the subscriber.
        self._cupti.cuptiUnsubscribe(self._subscriber)
        self._subscriber = None

    def record(self, call: Call) -> None:
        self._drain()
        call.wait(call.run())
        self._samples.append(summarize(self._drain()))

    def samples(self) -> list[Sample]:
        return self._samples

    def _drain(self) -> list[Activity]:
        self._synchronize()
        self._call("cuptiActivityFlushAll", _FLUSH_FORCED)
        if self._failure:
            raise RuntimeError(self._failure)
        drained, self._activities = self._activities, []
        return drained

    def _synchronize(self) -> None:
        # Wait, because a result may come before the driver has closed the kernel's record, and a
        # forced flush also returns open records.
        in_primary_context(self._driver, "waiting for the device", self._driver.cuCtxSynchronize)

    def _request(self, buffer, size, max_records) -> None:
        memory = self._free.pop() if self._free else ctypes.create_string_buffer(_BUFFER_BYTES)
        address = ctypes.addressof(memory)
        self._buffers[address] = memory
        buffer[0], size[0], max_records[0] = address, _BUFFER_BYTES, 0

    def _complete(self, context, stream, buffer, size, valid_bytes) -> None:
        # An exception cannot pass through CUPTI, so a failure waits for the next drain.
        try:
            self._activities += filter(None, map(read_activity, self._records(buffer, valid_bytes)))
            dropped = ctypes.c_size_t()
            where = ctypes.c_void_p(context), ctypes.c_uint32(stream), ctypes.byref(dropped)
            self._call("cuptiActivityGetNumDroppedRecords", *where)
            if dropped.value:
                self._failure = f"CUPTI dropped {dropped.value} records"
        except Exception as error:
            self._failure = f"reading CUPTI's records failed: {error!r}"
        self._free.append(self._buffers.pop(buffer))

    def _records(self, buffer: int, valid_bytes: int) -> Iterator[int]:
        record = ctypes.c_void_p()
        while valid_bytes:
            status = self._cupti.cuptiActivityGetNextRecord(
                ctypes.c_void_p(buffer), ctypes.c_size_t(valid_bytes), ctypes.byref(record)
            )
            if status == _MAX_LIMIT_REACHED:
                return
            self._check("cuptiActivityGetNextRecord", status)
            yield record.value

    def _call(self, function: str, *arguments) -> None:
        self._check(function, getattr(self._cupti, function)(*arguments))

    def _check(self, function: str, status: int) -> None:
        if status:
            message = ctypes.c_char_p()
            self._cupti.cuptiGetErrorMessage(status, ctypes.byref(message))
            raise RuntimeError(f"{function}: {(message.value or b'?').decode()} ({status})")


def in_primary_context(driver: ctypes.CDLL, doing: str, *calls: Callable[[], int]) -> None:
    """Calls the driver in the context that JAX and PyTorch use, until a call fails."""
    context = ctypes.c_void_p()
    for call in (
        lambda: driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0),
        lambda: driver.cuCtxPushCurrent_v2(context),
        *calls,
        lambda: driver.cuCtxPopCurrent_v2(ctypes.byref(context)),
        lambda: driver.cuDevicePrimaryCtxRelease_v2(0),
    ):
        if status := call():
            raise RuntimeError(f"CUDA driver error {status} while {doing}")


def load_library(*names: str) -> ctypes.CDLL:
    """Loads the first of NVIDIA's libraries `names` that is on the loader's path or in its wheels.

    It asks the loader first, which finds a library that JAX or PyTorch has loaded already, because
    two copies of CUPTI in a process disturb each other.
    """
    spec = importlib.util.find_spec("nvidia")
    roots = spec.submodule_search_locations if spec else []
    failures = []
    for name in names:
        for candidate in (name, *(x for root in roots for x in Path(root).glob(f"*/lib/{name}"))):
            try:
                return ctypes.CDLL(str(candidate))
            except OSError as error:
                failures.append(str(error))
    raise OSError("; ".join(failures))


class ClockRecorder:
    """Records with the clock of a call: events on its stream, or else the host's clock around it.

    With the host's clock, the result includes host time.
    """

    name = "clock"

    def __enter__(self) -> ClockRecorder:
        self._samples: list[Sample] = []
        return self

    def __exit__(self, *_) -> None:
        pass

    def record(self, call: Call) -> None:
        self._samples.append(Sample(call.elapsed_us(), None))

    def samples(self) -> list[Sample]:
        return self._samples


# A recorder measures calls while it is open, and can be opened again. `record` runs a call to its
# end. After closing, `samples` returns the sample of each call.
Recorder = CuptiRecorder | ClockRecorder
RECORDERS: dict[str, Callable[[], Recorder]] = {"cupti": CuptiRecorder, "clock": ClockRecorder}


def open_best(names: list[str], probe: Call) -> tuple[Recorder, list[str]]:
    """Returns the first named recorder that measures `probe`, and why earlier ones do not."""
    reasons = []
    for name in names:
        try:
            recorder = RECORDERS[name]()
            # Twice, because every case opens the recorder anew.
            for _ in range(2):
                with recorder:
                    recorder.record(probe)
                if recorder.samples()[0].us <= 0:
                    raise RuntimeError("recorded no device activity")
            return recorder, reasons
        except Exception as error:
            # A profiler may fail in any way, so try the next recorder after any exception.
            reasons.append(f"{name}: {error!r}")
    raise RuntimeError(f"no way to measure device time: {'; '.join(reasons)}")
