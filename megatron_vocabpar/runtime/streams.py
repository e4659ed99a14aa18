"""A queue of work beside the computation: a CUDA stream, or a thread where there is no GPU.

Collectives of the vocabulary layers overlap with the transformer passes (paper, section 6.1). On a
GPU that takes a side stream; on the CPU the same program needs a worker that runs the collectives in
order while the main thread computes. Both look alike: ``submit`` work, ``wait`` for its event. This is
the only module that asks which device it runs on.

Next: ``comm.py`` (what is submitted), then ``executor.py`` (who submits).
"""

from __future__ import annotations

import re
import resource
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Event(Protocol[T_co]):
    """The result of submitted work."""

    def wait(self) -> T_co:
        """Make what follows in the caller's stream come after the work; return its result.

        Raises:
            Exception: whatever the work raised.
        """

    def done(self) -> bool:
        """Whether ``wait`` would return at once."""


class Stream(Protocol):
    """An in-order queue of work that runs beside the caller."""

    def submit(self, work: Callable[[], T]) -> Event[T]:
        """Queue ``work`` behind what the caller has queued so far and what this stream already holds."""

    def close(self) -> None:
        """Release the queue. Work that was not waited for is abandoned."""


class _ThreadEvent(Generic[T]):
    def __init__(self, future: Future[T]) -> None:
        self._future = future

    def wait(self) -> T:
        return self._future.result()

    def done(self) -> bool:
        return self._future.done()


class ThreadStream:
    """The CPU's side stream: one thread that takes work in order.

    gloo blocks the calling thread and releases the interpreter lock while it does, so the main thread
    computes meanwhile.
    """

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    def submit(self, work: Callable[[], T]) -> Event[T]:
        return _ThreadEvent(self._pool.submit(_without_grad, work))

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def _without_grad(work: Callable[[], T]) -> T:
    with torch.no_grad():
        return work()


class _CudaEvent(Generic[T]):
    """Holds the work, and so every tensor that it uses, until the waiting stream is ordered behind it.

    Until then no memory of those tensors can be handed out again; memory that the side stream allocated
    and the waiting stream goes on using is marked with ``record_stream``.
    """

    def __init__(self, work: Callable[[], T], value: T, event: torch.cuda.Event) -> None:
        self._work: Callable[[], T] | None = work
        self._value = value
        self._event = event

    def wait(self) -> T:
        current = torch.cuda.current_stream()
        current.wait_event(self._event)
        for tensor in _tensors(self._value):
            tensor.record_stream(current)
        self._work = None
        return self._value

    def done(self) -> bool:
        return self._event.query()


class CudaStream:
    """A side stream of the current CUDA device."""

    def __init__(self, priority: int = -1) -> None:
        self._stream = torch.cuda.Stream(priority=priority)

    def submit(self, work: Callable[[], T]) -> Event[T]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), torch.no_grad():
            value = work()
            event = self._stream.record_event()
        return _CudaEvent(work, value, event)

    def close(self) -> None:
        self._stream.synchronize()


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from _tensors(getattr(value, name))


def side_stream(device: torch.device, name: str) -> Stream:
    """A side stream for ``device``: high priority on a GPU (section 6.1), a thread on the CPU."""
    return CudaStream() if device.type == "cuda" else ThreadStream(name)


class Mark(Protocol):
    """A point in time of the stream on which it was made."""

    def seconds(self) -> float:
        """Seconds since an arbitrary origin that all processes of this machine share."""


class _HostMark:
    def __init__(self) -> None:
        self._seconds = time.monotonic()

    def seconds(self) -> float:
        return self._seconds


class _CudaMark:
    def __init__(self, origin: CudaOrigin) -> None:
        self._origin = origin
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record()

    def seconds(self) -> float:
        self._event.synchronize()
        return self._origin.host_seconds + self._origin.event.elapsed_time(self._event) / 1e3


class CudaOrigin:
    """Ties the clock of CUDA events to the host's clock."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record()
        self.event.synchronize()
        self.host_seconds = time.monotonic()


def clock(device: torch.device) -> Callable[[], Mark]:
    """A function that marks the present moment on the current stream of ``device``."""
    if device.type == "cuda":
        origin = CudaOrigin()
        return lambda: _CudaMark(origin)
    return _HostMark


def named_range(device: torch.device, name: str) -> AbstractContextManager[Any]:
    """A range that profilers show under ``name`` (NVTX on a GPU, torch's profiler on the CPU)."""
    if device.type == "cuda":
        return torch.cuda.nvtx.range(name)
    return torch.profiler.record_function(name)


def peak_memory_mib(device: torch.device) -> float:
    """Peak memory of this process on ``device``, in MiB: allocated on a GPU, resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    status = Path("/proc/self/status")
    if status.exists():
        # Linux: getrusage would count what the parent held when it forked this process.
        return float(re.search(r"VmHWM:\s*(\d+) kB", status.read_text())[1]) / 2**10  # type: ignore[index]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def default_device(name: str, local_rank: int) -> torch.device:
    """The device of this process: ``cpu``, ``cuda``, or ``auto`` for a GPU where there is one."""
    if name == "cuda" or (name == "auto" and torch.cuda.is_available()):
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def backend(device: torch.device) -> str:
    """The torch.distributed backend for ``device``."""
    return "nccl" if device.type == "cuda" else "gloo"
