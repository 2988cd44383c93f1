"""A CUDA device: three streams and every edge between them, pinned rings, events that are polled.

GPU thread. It never knows models, batches or tokens.

    schedule stream   pinned ring -> device ring (H2D)
    engine stream     the model and the sampler; the only one that writes device tables
    copy stream       outputs -> pinned ring (D2H)

The edges: H2D of a step -> its kernels (Staging.send); its kernels -> the next H2D into the same entry (`_read`
events); its kernels -> its D2H (fetch); its D2H -> whoever writes the output next, which is the owner's affair: he
keeps a ring of RING outputs, and at most two steps are in flight.
"""

import ctypes
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import DeviceFailed, OutOfMemory

_CUDA_FAILED = re.compile(r"CUDA error|cudaError|CUDA driver error|Triton Error")
RING = 4  # entries: two steps may be in flight, one is being filled, one is spare
STAGING_BYTES = 1 << 20  # of an entry at first; grows to what a step needs


def new_event() -> Any:
    """An event without a clock: torch's class has no types."""
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def fatal(error: BaseException) -> DeviceFailed | None:
    """DeviceFailed where the CUDA context is beyond repair; None where the step alone failed, as out of memory."""
    if is_out_of_memory(error):
        return None
    is_cuda = isinstance(error, getattr(torch, "AcceleratorError", ())) or (
        isinstance(error, RuntimeError) and _CUDA_FAILED.search(str(error)) is not None
    )
    return DeviceFailed(f"the GPU failed: {str(error).splitlines()[0]}") if is_cuda else None


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)


@contextmanager
def fatal_errors() -> Iterator[None]:
    """Turns a device's errors into ours.

    Raises:
        DeviceFailed: a CUDA error other than out of memory; every later call would raise it again.
        OutOfMemory: the step can be tried again with less in it.
    """
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise OutOfMemory("the device has no memory left for this request") from error
        if (dead := fatal(error)) is not None:
            raise dead from error
        raise


class Driver:
    """The few calls of a step, straight to the driver and without letting the GIL go.

    Each takes 1 to 5 us and never blocks with two steps in flight. torch's own let the GIL go around each, and in
    a process with a busy loop a dozen such calls cost a step 2.3 ms of waiting to get it back, for 0.3 ms of work.
    """

    READY, NOT_READY = 0, 600
    _WITHOUT_TIMING = 2

    def __init__(self) -> None:
        library = ctypes.PyDLL("libcuda.so.1")  # PyDLL: the GIL is kept
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint
        self._functions: dict[str, Any] = {}
        for name, arguments in {
            "cuMemcpyHtoDAsync_v2": (pointer, pointer, size, pointer),
            "cuMemcpyDtoHAsync_v2": (pointer, pointer, size, pointer),
            "cuEventCreate": (pointer, number),
            "cuEventRecord": (pointer, pointer),
            "cuEventQuery": (pointer,),
            "cuStreamWaitEvent": (pointer, pointer, number),
            "cuGraphLaunch": (pointer, pointer),
        }.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, ctypes.c_int
            self._functions[name] = function
        self._copy_in, self._copy_out = (self._functions[f"cuMemcpy{way}Async_v2"] for way in ("HtoD", "DtoH"))
        self._record, self._query = self._functions["cuEventRecord"], self._functions["cuEventQuery"]
        self._wait, self._launch = self._functions["cuStreamWaitEvent"], self._functions["cuGraphLaunch"]

    def new_event(self) -> int:
        event = ctypes.c_void_p()
        _check(self._functions["cuEventCreate"](ctypes.byref(event), self._WITHOUT_TIMING), "cuEventCreate")
        assert event.value is not None
        return event.value

    def copy_in(self, device: int, host: int, num_bytes: int, stream: int) -> None:
        _check(self._copy_in(device, host, num_bytes, stream), "copying to the GPU")

    def copy_out(self, host: int, device: int, num_bytes: int, stream: int) -> None:
        _check(self._copy_out(host, device, num_bytes, stream), "copying from the GPU")

    def record(self, event: int, stream: int) -> None:
        _check(self._record(event, stream), "recording an event")

    def wait(self, stream: int, event: int) -> None:
        """Let the stream wait; the host does not."""
        _check(self._wait(stream, event, 0), "waiting for an event")

    def is_over(self, event: int) -> bool:
        code = self._query(event)
        if code == self.NOT_READY:
            return False
        _check(code, "a step")
        return True

    def launch(self, graph: int, stream: int) -> None:
        _check(self._launch(graph, stream), "launching a graph")


def _check(code: int, what: str) -> None:
    if code == 2:
        raise torch.OutOfMemoryError(f"out of memory in {what}")
    if code:
        raise RuntimeError(f"CUDA driver error {code} in {what}")


class CudaPending:
    """A D2H copy; its entry of the pinned ring is read before the ring comes round."""

    def __init__(self, copied: Any, host: NDArray[np.int32]) -> None:
        self._copied = copied
        self._host = host

    def ready(self) -> bool:
        with fatal_errors():
            return bool(self._copied.query())

    def numpy(self) -> NDArray[np.int32]:
        with fatal_errors():
            if not self._copied.query():
                self._copied.synchronize()
        return self._host.copy()


class CudaStaging:
    """One entry of the staging ring: a pinned and a device buffer of the same bytes."""

    def __init__(self, device: "CudaDevice") -> None:
        self._device = device
        self._sent = new_event()  # this entry's last H2D
        self._read = new_event()  # the last kernel that read this entry
        self._grow(STAGING_BYTES)

    def _grow(self, num_bytes: int) -> None:
        # Views of the old buffers keep them alive; the allocator gives device memory back in the engine's order.
        self._host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        self._np = self._host.numpy()
        self._dev = torch.empty(num_bytes, dtype=torch.uint8, device=self._device.torch_device)
        self._chunks: list[tuple[Tensor, Tensor, int]] = []
        self._used = 0

    def begin(self) -> "CudaStaging":
        """Take the entry for a new step. Both waits are over by now unless more than RING steps are in flight."""
        if not self._sent.query():
            self._sent.synchronize()
        self._chunks.clear()
        self._used = 0
        return self

    def put(self, array: NDArray[np.generic]) -> Tensor:
        array = np.ascontiguousarray(array)
        num_bytes = array.nbytes
        begin, self._used = self._used, self._used + -(-num_bytes // 16) * 16
        if self._used > len(self._np):
            self._overflow(begin, num_bytes)
            begin = 0
        self._np[begin : begin + num_bytes] = array.reshape(-1).view(np.uint8)
        dtype = torch.from_numpy(array[:0]).dtype
        return self._dev[begin : begin + num_bytes].view(dtype).view(array.shape)

    def _overflow(self, used: int, num_bytes: int) -> None:
        old = (self._host, self._dev, used)
        chunks = [*self._chunks, old]
        self._grow(max(2 * len(self._np), 2 * num_bytes))
        self._chunks, self._used = chunks, -(-num_bytes // 16) * 16

    def send(self) -> None:
        device = self._device
        with torch.cuda.stream(device.schedule_stream):
            device.schedule_stream.wait_event(self._read)
            for host, dev, used in [*self._chunks, (self._host, self._dev, self._used)]:
                dev[:used].copy_(host[:used], non_blocking=True)
            self._sent.record(device.schedule_stream)
        device.engine_stream.wait_event(self._sent)

    def finish(self) -> None:
        """Everything that reads this entry has been launched."""
        self._read.record(self._device.engine_stream)


class CudaDevice:
    """The Device of one GPU. Made and used by one thread, whose current stream is the engine's from then on."""

    name = "cuda"

    def __init__(self, index: int = 0) -> None:
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(self.torch_device)
        self.schedule_stream, self.engine_stream, self.copy_stream = _distinct_streams(self.torch_device)
        torch.cuda.set_stream(self.engine_stream)
        self._staging: list[CudaStaging] = []
        self._current: CudaStaging | None = None
        self._next_entry = self._next_fetch = 0
        self._done = [new_event() for _ in range(RING)]
        self._copied = [new_event() for _ in range(RING)]
        self._outputs: list[Tensor] = []

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.torch_device)

    def staging(self) -> CudaStaging:
        if not self._staging:
            self._staging = [CudaStaging(self) for _ in range(RING)]
        self._current = self._staging[self._next_entry % RING]
        self._next_entry += 1
        return self._current.begin()

    @contextmanager
    def compute(self) -> Iterator[None]:
        with fatal_errors(), torch.cuda.stream(self.engine_stream):
            yield
            if self._current is not None:
                self._current.finish()

    def assert_on_engine_stream(self) -> None:
        # The raw handle: torch.cuda.current_stream() takes 24 us.
        current = torch._C._cuda_getCurrentRawStream(self.torch_device.index)
        assert current == self.engine_stream.cuda_stream, "launched on a foreign stream"

    def fetch(self, tensor: Tensor) -> CudaPending:
        """tensor: int32, at most as long as the longest fetched so far or 4096."""
        entry = self._next_fetch % RING
        self._next_fetch += 1
        if not self._outputs or self._outputs[entry].numel() < tensor.numel():
            size = max(4096, tensor.numel())
            self._outputs = [torch.empty(size, dtype=torch.int32, pin_memory=True) for _ in range(RING)]
        host = self._outputs[entry][: tensor.numel()]
        done, copied = self._done[entry], self._copied[entry]
        done.record(self.engine_stream)
        self.copy_stream.wait_event(done)
        torch.cuda.set_stream(self.copy_stream)
        try:
            host.copy_(tensor.view(-1), non_blocking=True)
        finally:
            torch.cuda.set_stream(self.engine_stream)
        copied.record(self.copy_stream)
        return CudaPending(copied, host.numpy())

    def synchronize(self) -> None:
        for stream in (self.schedule_stream, self.engine_stream, self.copy_stream):
            stream.synchronize()


def _distinct_streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream, torch.cuda.Stream]:
    """Three streams that are three. torch deals them from a pool of 32 in turn, so two can be one and the same,
    which would undo the overlap without a word."""
    streams: dict[int, torch.cuda.Stream] = {}
    for _ in range(64):
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        streams.setdefault(stream.cuda_stream, stream)
        if len(streams) == 3:
            schedule, engine, copy = streams.values()
            return schedule, engine, copy
    raise RuntimeError("torch gave out fewer than three different streams")
