"""Device activity of this process from CUPTI, the library below NVIDIA's own profilers.

CUPTI timestamps each kernel, copy and memory set on the device, whichever framework launched it. A
recording is flushed after each call, so that activities belong to a call by construction and not
by comparing clocks. https://docs.nvidia.com/cupti/ (activity API)
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness.device_activity import Activity, Sample, summarize
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
        self._cupti = _load_cupti()
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


def _load_cupti() -> ctypes.CDLL:
    """CUPTI of CUDA 13 or 12, from the loader's path or NVIDIA's wheels.

    The loader first: it also finds, by name, a library that JAX or PyTorch has loaded already, and
    two copies of CUPTI in a process disturb each other.
    """
    failures = []
    for library in ("libcupti.so.13", "libcupti.so.12"):
        for candidate in (library, *_in_wheels(library)):
            try:
                return ctypes.CDLL(candidate)
            except OSError as error:
                failures.append(str(error))
    raise OSError("; ".join(failures))


def _in_wheels(library: str) -> list[str]:
    spec = importlib.util.find_spec("nvidia")
    roots = spec.submodule_search_locations if spec else []
    return [str(path) for root in roots for path in Path(root).glob(f"*/lib/{library}")]
