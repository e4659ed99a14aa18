"""A queue of work beside the computation: a CUDA stream, or a thread where there is no GPU.

Collectives of the vocabulary layers overlap with the transformer passes (paper, section 6.1). On a
GPU that takes a side stream; on the CPU the same program needs a worker that runs the collectives in
order while the main thread computes. Both look alike: ``submit`` work, ``wait`` for its event. What else the
runtime does in another way on a GPU is here too: clocks, copies to and from the host, figures of memory, and
the backend of the communication.

One rule about memory: **what outlives the work is allocated before it is submitted**, by the stream that
will use it. The work writes in place, and allocates only what it drops again. A GPU's allocator reuses
freed memory in the order of the stream that allocated it. Example: the main stream allocates the buffer of C1
and submits the collective. The event holds the work, and so the buffer, until the main stream has waited.
Only then can the main stream free it, and what reuses it runs after the collective. Without the rule every
result would need ``record_stream``, and idle memory would grow with the host's lead.

Next: ``comm.py`` (what is submitted), then ``executor.py`` (what submits it).
"""

from __future__ import annotations

import atexit
import os
import platform
import re
import resource
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Waitable(Protocol[T_co]):
    """Something under way."""

    def wait(self) -> T_co:
        """Let the caller's stream go on after it; return its result, or raise what it raised."""


class Event(Waitable[T_co], Protocol[T_co]):
    """The result of submitted work."""

    def done(self) -> bool:
        """Whether ``wait`` would return at once."""


class Stream(Protocol):
    """An in-order queue of work that runs beside the caller."""

    def submit(self, work: Callable[[], T]) -> Event[T]:
        """Queue ``work`` behind what the caller has queued so far and what this stream already holds."""

    def close(self) -> None:
        """Release the queue at once, without waiting for its work: peers may be gone."""


class _ThreadEvent(Generic[T]):
    def __init__(self, future: Future[T]) -> None:
        self._future = future

    def wait(self) -> T:
        return self._future.result()

    def done(self) -> bool:
        return self._future.done()


_Queue = SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]
_TO_END_S = 2.0  # for work that waits for peers which have gone


class ThreadStream:
    """The CPU's side stream: one thread that takes work in order.

    gloo blocks the calling thread but releases the interpreter lock, so the main thread computes meanwhile.

    A process that ends well waits for the thread. Otherwise the thread could return from C++ while the
    interpreter shuts down, and C++ would end with "terminate called without an active exception". A process
    that fails waits for two seconds only: the work may be a collective that the peers will never join.
    """

    def __init__(self, name: str) -> None:
        self._queue: _Queue = SimpleQueue()
        thread = threading.Thread(target=_serve, args=(self._queue,), name=name, daemon=True)
        thread.start()
        self._end = weakref.finalize(self, _end, self._queue, thread, _TO_END_S)
        self._end.atexit = False
        atexit.register(_end_at_exit, self._queue, thread)

    def submit(self, work: Callable[[], T]) -> Event[T]:
        future: Future[T] = Future()
        self._queue.put((work, future))
        return _ThreadEvent(future)

    def close(self) -> None:
        self._end()


def _end(queue: _Queue, thread: threading.Thread, limit_s: float | None) -> None:
    queue.put(None)
    if thread is not threading.current_thread():
        thread.join(limit_s)


def _end_at_exit(queue: _Queue, thread: threading.Thread) -> None:
    _end(queue, thread, _TO_END_S if hasattr(sys, "last_value") else None)


def _serve(queue: _Queue) -> None:
    while (item := queue.get()) is not None:
        work, future = item
        del item
        try:
            with torch.no_grad():
                result = work()
        except BaseException as error:
            future.set_exception(error)
        else:
            del work  # free what it holds before the caller, and perhaps the process, goes on
            future.set_result(result)
            del result
        del future


class _CudaEvent(Generic[T]):
    """Holds the work, and so every tensor that it uses, until the waiting stream comes after it.

    Without a reference to it its CUDA event goes to ``free``: waits that are queued stay what they are.
    """

    def __init__(
        self, work: Callable[[], T], value: T, event: torch.cuda.Event, free: list[torch.cuda.Event]
    ) -> None:
        self._work: Callable[[], T] | None = work
        self._value = value
        self._event = event
        self._free = free

    def __del__(self) -> None:
        self._free.append(self._event)

    def wait(self) -> T:
        torch.cuda.current_stream().wait_event(self._event)
        self._work = None
        return self._value

    def done(self) -> bool:
        return self._event.query()


class CudaStream:
    """A side stream of the current CUDA device."""

    def __init__(self, priority: int = -1) -> None:
        self._stream = torch.cuda.Stream(priority=priority)
        self._free: list[torch.cuda.Event] = []
        self._submitted: torch.cuda.Event | None = None  # one for all: a wait is for the latest record

    def submit(self, work: Callable[[], T]) -> Event[T]:
        self._submitted = torch.cuda.current_stream().record_event(self._submitted)
        self._stream.wait_event(self._submitted)
        with torch.cuda.stream(self._stream), torch.no_grad():
            value = work()
            event = self._stream.record_event(self._free.pop() if self._free else None)
        return _CudaEvent(work, value, event, self._free)

    def close(self) -> None:
        """Do nothing: the stream belongs to the process, and its work may wait for peers for ever."""


def side_stream(device: torch.device, name: str) -> Stream:
    """A side stream for ``device``: high priority on a GPU (section 6.1), a thread on the CPU."""
    return CudaStream() if device.type == "cuda" else ThreadStream(name)


def send_waiter(device: torch.device) -> Stream | None:
    """A thread on the CPU for what waits for sends; None on a GPU, where a send tells when it is done."""
    return None if device.type == "cuda" else ThreadStream("sends")


Mark = Callable[[], float]
"""A point in time of a stream; a call returns its seconds on the host's monotonic clock."""


def clock(device: torch.device) -> Callable[[], Mark]:
    """A function that marks the present moment on the current stream of ``device``."""
    if device.type == "cuda":
        return _cuda_clock()

    def mark() -> Mark:
        now = time.monotonic()
        return lambda: now

    return mark


def _cuda_clock() -> Callable[[], Mark]:
    """Marks are CUDA events; the host waits for the first, so that its time is known on both clocks."""
    origin = _recorded_event()
    origin.synchronize()
    origin_s = time.monotonic()

    def mark() -> Mark:
        event = _recorded_event()

        def seconds() -> float:
            event.synchronize()
            return origin_s + origin.elapsed_time(event) / 1e3

        return seconds

    return mark


def _recorded_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def profiled(device: torch.device) -> bool:
    """Whether ``named_range`` is recorded: by torch's profiler, or on a GPU by a tool of Nsight."""
    return torch.autograd._profiler_enabled() or (
        device.type == "cuda" and not _NSIGHT.isdisjoint(os.environ)
    )


_NSIGHT = {"NVTX_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID"}  # with which its tools start a program


def named_range(name: str) -> AbstractContextManager[Any]:
    """A range that shows under ``name`` in torch's profiler if it runs, else in Nsight's tools (NVTX)."""
    if torch.autograd._profiler_enabled():
        return torch.profiler.record_function(name)
    return torch.cuda.nvtx.range(name)


def peak_memory_mib(device: torch.device) -> float:
    """Peak memory of this process on ``device``, in MiB: allocated on a GPU, resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resident_mib("VmHWM")


def held_memory_mib(device: torch.device) -> float:
    """Memory that this process holds on ``device`` now, in MiB; measured as the peak is."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device) / 2**20
    return resident_mib("VmRSS")


def resident_mib(field: str) -> float:
    """``VmHWM`` (the peak) or ``VmRSS`` (now) of this process on the host, in MiB; off Linux the peak."""
    status = Path("/proc/self/status")
    if status.exists():
        # getrusage would count the parent's memory at the time of the fork.
        return float(re.search(rf"{field}:\s*(\d+) kB", status.read_text())[1]) / 2**10  # type: ignore[index]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def machine(device: torch.device) -> str:
    """The kind of processor that computes on ``device``; on the CPU with the number of its cores."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()}, {os.cpu_count()} cores"


def multiprocessors(device: torch.device) -> int:
    """The multiprocessors of a GPU; on the CPU its cores."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return os.cpu_count() or 1


def default_device(name: str, local_rank: int, *, shared: bool = False) -> torch.device:
    """The device of this process: ``cpu``, ``cuda``, or ``auto`` for a GPU where there is one.

    Args:
        shared: processes may share a GPU. NCCL refuses two ranks of one host on a GPU, so each is told that
            it is on a host of its own; they then talk over the loopback interface.
    """
    if name == "cuda" or (name == "auto" and torch.cuda.is_available()):
        if shared:
            of_nccl = {"HOSTID": f"rank-{local_rank}", "SOCKET_IFNAME": "lo", "IB_DISABLE": "1"}
            os.environ |= {f"NCCL_{variable}": value for variable, value in of_nccl.items()}
            local_rank %= torch.cuda.device_count()
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def backend(device: torch.device) -> str:
    """The torch.distributed backend for ``device``."""
    return "nccl" if device.type == "cuda" else "gloo"


def limits_channels() -> bool:
    """Whether communicators are NCCL's, and this build of torch passes a limit of channels to it."""
    if dist.get_backend() != "nccl":
        return False
    return hasattr(getattr(dist.ProcessGroupNCCL.Options(), "config", None), "max_ctas")


def communicator_options(timeout: timedelta | None, channels: int | None = None) -> Any:
    """Options of ``new_group`` for a communicator beside the computation; None for other backends than NCCL.

    NCCL sends and receives in streams of its own, which get high priority like the side streams. A kernel of
    a collective has one block for each of its channels, ``channels`` at most.

    Raises:
        ValueError: if this build of torch cannot limit them.
    """
    if dist.get_backend() != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if channels is not None:
        if not limits_channels():
            raise ValueError(
                f"{channels} channels: this build of torch passes no limit to NCCL; leave out "
                "--vocab-parallel-channels, or set NCCL_MAX_CTAS, which limits all communicators"
            )
        options.config.max_ctas = channels
    if timeout is not None:
        options._timeout = timeout  # new_group warns where the two differ
    return options


@dataclass(frozen=True)
class HostCopy:
    """A tensor on its way to the host.

    Attributes:
        tensor: on the host, in pinned memory.
        arrived: an event after the copy; None if the tensor was on the host already.
    """

    tensor: torch.Tensor
    arrived: torch.cuda.Event | None = None

    def wait(self) -> torch.Tensor:
        """The tensor, when its values have arrived; the host does not wait for work queued after the copy."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.tensor


def start_to_host(tensor: torch.Tensor) -> HostCopy:
    """Queue the copy of ``tensor`` to the host."""
    if tensor.device.type == "cpu":
        return HostCopy(tensor)
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    return HostCopy(host, torch.cuda.current_stream(tensor.device).record_event())


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` on the host; waits for it."""
    return start_to_host(tensor).wait()


def queue_to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``tensor`` on ``device``; a copy from the host goes through pinned memory, without a wait."""
    if device.type == "cpu" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)  # the host's allocator keeps it until then


def to_device(arrays: Sequence[NDArray[np.int64]], device: torch.device) -> Sequence[torch.Tensor]:
    """Flat arrays of the host on ``device``: one copy, for which the host does not wait.

    Each begins at a multiple of 16 bytes: a kernel is compiled anew for an address that is none.
    """
    pieces: list[NDArray[np.int64]] = []
    places = []
    for array in arrays:
        places.append(len(pieces))
        pieces += [array, array[:1]] if len(array) % 2 else [array]
    sizes = [len(piece) for piece in pieces]
    staged = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=device.type != "cpu")
    np.concatenate(pieces, out=staged.numpy())
    # The host's allocator keeps the staged memory until the copy is done. ``split`` would take twice as long.
    there = staged.to(device, non_blocking=True).split_with_sizes(sizes)
    return [there[place] for place in places]
