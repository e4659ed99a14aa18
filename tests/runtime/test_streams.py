"""A side stream runs beside the caller, in order, and hands errors back."""

from __future__ import annotations

import resource
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_vocabpar.runtime.streams import (
    _TO_END_S,
    CudaStream,
    communicator_options,
    limits_channels,
    named_range,
    peak_memory_mib,
    profiled,
    side_stream,
)
from tests.spawn import run_ranks

CPU = torch.device("cpu")


def test_work_runs_beside_the_caller_and_in_order() -> None:
    stream, gate, order = side_stream(CPU, "test"), threading.Event(), []

    def first() -> str:
        gate.wait(5)
        order.append("first")
        return "result"

    event = stream.submit(first)
    later = stream.submit(lambda: order.append("second"))
    assert not event.done()
    assert order == []
    gate.set()  # the caller went on while the stream waited
    assert event.wait() == "result"
    later.wait()
    assert order == ["first", "second"]
    stream.close()


def test_error_is_raised_where_it_is_waited_for() -> None:
    stream = side_stream(CPU, "test")
    event = stream.submit(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        event.wait()
    assert stream.submit(lambda: "still works").wait() == "still works"
    stream.close()


def test_a_closed_stream_leaves_no_thread() -> None:
    stream = side_stream(CPU, "to be closed")
    done = stream.submit(lambda: "done")
    stream.close()
    assert done.wait() == "done"
    assert "to be closed" not in {thread.name for thread in threading.enumerate()}
    stream.close()


_BUSY = """
import time, torch
from megatron_vocabpar.runtime.streams import side_stream
stream = side_stream(torch.device("cpu"), "busy")
stream.submit(lambda: time.sleep(1000))
raise ValueError("failed")
"""


@pytest.mark.slow
def test_a_process_that_fails_does_not_wait_for_work_that_never_ends() -> None:
    ended = subprocess.run([sys.executable, "-c", _BUSY], capture_output=True, text=True, timeout=240)
    assert (ended.returncode, ended.stderr.splitlines()[-1]) == (1, "ValueError: failed")


_COMPUTING = """
import time, torch
from megatron_vocabpar.runtime.streams import side_stream
stream, a = side_stream(torch.device("cpu"), "computing"), torch.ones(100, 100)
end = time.monotonic() + {seconds}
def compute():
    while time.monotonic() < end:
        torch.mm(a, a)
    print("done")
stream.submit(compute)
{then}
"""


@pytest.mark.slow
@pytest.mark.parametrize("then", ["", "stream.close()", "del stream"])
def test_a_process_may_end_while_a_side_stream_computes(then: str) -> None:
    """A thread that comes back from C++ when Python is ending is ended inside it, and C++ then aborts."""
    program = _COMPUTING.format(seconds=_TO_END_S + 3, then=then)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done\n", "")


def test_work_builds_no_graph() -> None:
    stream, weight = side_stream(CPU, "test"), torch.ones(2, requires_grad=True)
    assert not stream.submit(lambda: weight * 2).wait().requires_grad
    stream.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_stream_waits_for_its_producer_and_its_consumer_for_it() -> None:
    device = torch.device("cuda")
    stream = side_stream(device, "test")
    for _ in range(5):
        torch.cuda._sleep(20_000_000)  # the producer is late: a missing wait would read zeros
        x = torch.zeros(1 << 20, device=device)
        torch.cuda._sleep(20_000_000)
        x.fill_(3.0)
        event = stream.submit(lambda x=x: (torch.cuda._sleep(20_000_000), x * 2)[1])
        assert float(event.wait().sum()) == 6.0 * (1 << 20)
    stream.close()


def test_cuda_events_are_used_again_when_nobody_waits_for_them_any_more() -> None:
    made: list[object] = []

    class Stream:
        def __init__(self, priority: int = 0) -> None: ...

        def record_event(self, event: object = None) -> object:
            if event is None:
                made.append(event := object())
            return event

        def wait_event(self, event: object) -> None:
            assert event in made

    stubs = {"Stream": Stream, "stream": lambda _: nullcontext(), "current_stream": Stream}
    with mock.patch.multiple(torch.cuda, **stubs):
        stream = CudaStream()
        under_way = [stream.submit(lambda: None) for _ in range(3)]
        assert len(made) == 1 + 3  # one for all producers
        for _ in range(100):
            under_way.append(stream.submit(lambda: None))
            under_way.pop(0).wait()
    assert len(made) == 1 + 4


def test_ranges_are_for_a_profiler_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    for tool in ("NVTX_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID"):
        monkeypatch.delenv(tool, raising=False)
    assert not profiled(CPU)
    assert not profiled(cuda)
    with torch.profiler.profile() as profile:
        assert profiled(CPU)
        with named_range("a range"):
            torch.ones(1)
    assert "a range" in {event.name for event in profile.events()}
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "1")
    assert profiled(cuda)
    assert not profiled(CPU)


def _peaks(_: int) -> tuple[float, float, float]:
    before = peak_memory_mib(CPU)
    ballast = torch.ones(64 << 18)  # 64 MiB
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    resident = pages * resource.getpagesize() / 2**20 * ballast[0].item()
    return before, resident, peak_memory_mib(CPU)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs what the process holds now")
def test_peak_memory_sees_what_this_process_allocated() -> None:
    """Not less than it holds now; what it held for a moment before (imports may) can hide the ballast."""
    ((before, resident, peak),) = run_ranks(1, _peaks, fresh=True)
    slack = 32  # MiB: the kernel adds its counters up late
    assert resident > 64
    assert max(before, resident) - slack <= peak <= max(before, resident) + slack


class _Options:
    """NCCL's options as torch has them, with a limit or without."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace(max_ctas=None)


def test_channels_limit_the_blocks_of_nccls_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    assert communicator_options(None, channels=4) is None
    assert not limits_channels()
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=_Options), raising=False)
    assert limits_channels()
    assert communicator_options(None, channels=4).config.max_ctas == 4
    assert communicator_options(None).config.max_ctas is None
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=SimpleNamespace), raising=False)
    assert not limits_channels()
    with pytest.raises(ValueError, match="leave out --vocab-parallel-channels"):
        communicator_options(None, channels=4)
