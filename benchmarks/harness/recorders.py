"""Device activity of calls: from CUPTI, the library below NVIDIA's own profilers, or by a clock.

CUPTI timestamps each kernel, copy and memory set on the device, whichever framework launched it. A
recording is flushed after each call, so that activities belong to a call by construction and not
by comparing clocks. https://docs.nvidia.com/cupti/ (activity API)
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


# Where CUPTI's records of kernels, copies and memory sets have their start and end, and where
# CUpti_ActivityKernel9 and later have the kernel's name.
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
    """One kernel, memory copy or memory set on the device. Times are in ns of one clock."""

    start: int
    end: int
    name: str


@dataclass(frozen=True)
class Sample:
    """Device time of one call in microseconds, and its device activities in order.

    `activities` are their names and `durations` the microseconds of each by itself, both None where
    only a clock around the call could be read.
    """

    us: float
    activities: tuple[str, ...] | None
    durations: tuple[float, ...] | None = None

    def parts(self, part_of: Callable[[str], str]) -> dict[str, float] | None:
        """Microseconds of each part; None without any. `part_of` names an activity's, in order."""
        if self.activities is None or self.durations is None:
            return None
        sums: dict[str, float] = {}
        for name, us in zip(self.activities, self.durations, strict=True):
            part = part_of(name)
            sums[part] = sums.get(part, 0.0) + us
        return sums


def summarize(activities: Iterable[Activity]) -> Sample:
    """The time in which at least one activity ran.

    Gaps between activities do not count, so that a peer with many launches is not charged for the
    host's speed here; and activities that overlap are not counted twice.
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
    """The activity in the CUPTI record at an address; None for a record of another kind."""
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
    """Records the device activity of calls while it is open; one at a time in a process."""

    name = "cupti"

    def __init__(self):
        # Attaching takes longer than a short case, so a run that measures no host time may stay so.
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
        """Detaches CUPTI from the driver, before the process ends at the latest.

        Left attached, it slows each launch, and host time is measured later in the same process.
        """
        if self._subscriber is None:
            return
        for kind in (_CONCURRENT_KERNEL, _MEMCPY, _MEMSET):
            self._call("cuptiActivityDisable", kind)
        self._call("cuptiFinalize")
        # Unchecked: some releases count the subscriber as gone once CUPTI is detached.
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
        # A framework may see its result before the driver has closed the kernel's record, and a
        # forced flush hands out open records too. Both frameworks use the primary context.
        context = ctypes.c_void_p()
        for status in (
            self._driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0),
            self._driver.cuCtxPushCurrent_v2(context),
            self._driver.cuCtxSynchronize(),
            self._driver.cuCtxPopCurrent_v2(ctypes.byref(context)),
            self._driver.cuDevicePrimaryCtxRelease_v2(0),
        ):
            if status:
                raise RuntimeError(f"CUDA driver error {status} while waiting for the device")

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
        # A buffer can come back empty.
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


def load_library(*names: str) -> ctypes.CDLL:
    """The first of NVIDIA's libraries that is on the loader's path or in NVIDIA's wheels.

    The loader first: it also finds, by name, a library that JAX or PyTorch has loaded already, and
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
    """Whatever clock a call offers: events on its stream, or the host's clock around it.

    It needs nothing, but host time is in the result where the host's clock is all there is.
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


# Each measures calls between its opening and closing, and can be opened again afterwards: `record`
# runs a call to its end, `samples` has a sample for each once the recorder is closed.
Recorder = CuptiRecorder | ClockRecorder
RECORDERS: dict[str, Callable[[], Recorder]] = {"cupti": CuptiRecorder, "clock": ClockRecorder}


def open_best(names: list[str], probe: Call) -> tuple[Recorder, list[str]]:
    """The first of the named recorders that sees the device time of a probing call."""
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
            # Anything may go wrong in a profiler, and every reason leads to the next recorder.
            reasons.append(f"{name}: {error!r}")
    raise RuntimeError(f"no way to measure device time: {'; '.join(reasons)}")
