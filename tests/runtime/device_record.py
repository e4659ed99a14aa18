"""What a rank would queue on a GPU: recorded on the CPU, from the real runtime, for ``device_replay.py``.

The program runs once, eagerly; side work runs where it is submitted, and nothing is really sent, so what is
computed means nothing, and no decision of the host may depend on it. ``CudaStream`` and its events are the
real ones, on top of streams that only record. What is recorded, in the order in which the host queues it, and
on which stream:

- every operation on tensors, with the storages that it reads and writes, and the stream that allocated each;
- every storage that Python, or autograd, let go, on the stream that allocated it: from there on that stream's
  later allocations may reuse the memory, as in PyTorch's caching allocator without ``record_stream``;
- events, and the streams and the host that wait for them;
- collectives, on the current stream, as NCCL runs those that block (torch 2.8 and later);
- sends and receives, on a stream of NCCL's own for each pair of ranks and communicator, behind what the
  current stream held when they were posted. NCCL's own hold on their tensors is left out: ours must do.

The host is never told that something is done before it has waited for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as unrecorded

from megatron_vocabpar import gather
from megatron_vocabpar.runtime.comm import VocabGroups

MAIN = "main"
_READS_ON_THE_HOST = ("aten._local_scalar_dense.default", "aten.equal.default", "aten.nonzero.default")
_ALLOCATES = ("aten.empty", "aten.new_empty", "aten.empty_like", "aten.empty_strided")

Storages = dict[int, tuple[int, str, StorageWeakRef]]


@dataclass(frozen=True)
class Ref:
    """A tensor: a view of a storage."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Entry:
    """One thing that the host queues.

    Attributes:
        kind: ``op``, ``allocate``, ``free``, ``record``, ``wait``, ``host wait``, ``collective`` or ``p2p``.
        stream: where.
        what: the operation's name, the event's number, or the collective's (communicator, number).
        arguments: of the operation or collective, tensors as ``Ref``; the storage of ``free``.
        new: storages that the operation allocates, by the place of the output.
    """

    kind: str
    stream: str
    what: Any = None
    arguments: Any = ()
    new: tuple[tuple[int, int, int], ...] = ()


@dataclass
class Log:
    """What one rank queued.

    Attributes:
        constants: bytes of the storages that were there before, by number, as first touched.
        results: by name, tensors to look at in the end.
    """

    entries: list[Entry] = field(default_factory=list)
    constants: dict[int, torch.Tensor] = field(default_factory=dict)
    results: dict[str, Ref] = field(default_factory=dict)


class Recorder(TorchDispatchMode):
    """Records one rank's operations while it is entered; see the module."""

    def __init__(self, groups: VocabGroups) -> None:
        super().__init__()
        self.log = Log()
        self.stream = MAIN
        self._names = {
            id(groups.collectives): "collectives",
            id(groups.upward): "upward",
            id(groups.downward): "downward",
        }
        self._rank = dist.get_rank()
        self._allocated: Storages = {}
        self._constants: Storages = {}
        self._numbers = iter(range(1 << 30))
        self._counts: dict[Any, int] = {}
        self._pauses = 0
        self._kept: list[torch.Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self._note_what_was_freed()
        arguments = (self._named(args), self._named(kwargs))
        result = func(*args, **kwargs)
        new = []
        for place, output in enumerate(result if isinstance(result, (list, tuple)) else [result]):
            if isinstance(output, torch.Tensor) and not self._knows(output):
                number = self._register(output, self._allocated)
                new.append((place, number, output.untyped_storage().nbytes()))
        name = str(func)
        if new or func._schema.is_mutable:
            kind = "allocate" if name.rsplit(".", 1)[0] in _ALLOCATES else "op"
            self._add(kind, name, arguments, tuple(new))
        if name in _READS_ON_THE_HOST:
            self.host_wait(self.record(self.stream))
        return result

    def _named(self, arguments: Any) -> Any:
        """Arguments with references in the place of tensors."""
        if isinstance(arguments, torch.Tensor):
            return self.ref(arguments)
        if isinstance(arguments, dict):
            return {name: self._named(value) for name, value in arguments.items()}
        if isinstance(arguments, (list, tuple)):
            return [self._named(value) for value in arguments]
        return arguments

    def ref(self, tensor: torch.Tensor) -> Ref:
        """Name a tensor; one that was there before is copied."""
        storage = tensor.untyped_storage()
        if not self._knows(tensor):
            number = self._register(tensor, self._constants)
            bytes_ = torch.empty(0, dtype=torch.uint8)
            with unrecorded():
                self.log.constants[number] = bytes_.set_(storage, 0, (storage.nbytes(),)).clone()
        shape = (tuple(tensor.size()), tuple(tensor.stride()), tensor.storage_offset())
        known = self._allocated.get(storage._cdata) or self._constants[storage._cdata]
        return Ref(known[0], tensor.dtype, *shape)

    def _knows(self, tensor: torch.Tensor) -> bool:
        key = tensor.untyped_storage()._cdata
        return key in self._allocated or key in self._constants

    def _register(self, tensor: torch.Tensor, among: Storages) -> int:
        weak = StorageWeakRef(tensor.untyped_storage())  # while it is there, nothing else has its number
        among[weak.cdata] = (next(self._numbers), self.stream, weak)
        return among[weak.cdata][0]

    def _note_what_was_freed(self) -> None:
        expired = torch.UntypedStorage._expired
        for key in [key for key in self._allocated if expired(key)]:
            number, stream, _ = self._allocated.pop(key)
            self.log.entries.append(Entry("free", stream, arguments=number))

    def _add(self, kind: str, what: Any = None, arguments: Any = (), new: Any = (), stream: str = "") -> None:
        self._note_what_was_freed()
        self.log.entries.append(Entry(kind, stream or self.stream, what, arguments, new))

    def record(self, stream: str) -> int:
        """An event behind what ``stream`` holds."""
        event = next(self._numbers)
        self._add("record", event, stream=stream)
        return event

    def wait(self, stream: str, event: int) -> None:
        self._add("wait", event, stream=stream)

    def host_wait(self, event: int) -> None:
        self._add("host wait", event)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing, and communicate for real."""
        self._pauses += 1
        with unrecorded():
            yield
        self._pauses -= 1

    @property
    def is_paused(self) -> bool:
        return self._pauses > 0

    def count(self, key: Any) -> int:
        self._counts[key] = self._counts.get(key, -1) + 1
        return self._counts[key]

    def collective(self, group: Any, kind: str, tensors: list[torch.Tensor], more: Any = None) -> None:
        name = self._names[id(group)]
        refs = [self.ref(tensor) for tensor in tensors]
        self._add("collective", (name, self.count(name)), (kind, refs, more))

    def post(self, group: Any, tensor: torch.Tensor, source: int, target: int) -> _Work:
        """A send or a receive, on the pair's own stream."""
        pair = (self._names[id(group)], source, target)
        stream = str(pair)
        self.wait(stream, self.record(self.stream))
        self._add("p2p", (*pair, self.count(pair)), [self.ref(tensor)], stream=stream)
        return _Work(self, self.record(stream))

    def keep(self, name: str, tensor: torch.Tensor) -> None:
        """Look at this tensor in the end."""
        self._kept.append(tensor)
        with unrecorded():
            self.log.results[name] = self.ref(tensor)


class _Work:
    """What isend and irecv return."""

    def __init__(self, recorder: Recorder, event: int) -> None:
        self._recorder, self._event = recorder, event

    def wait(self) -> None:
        self._recorder.wait(self._recorder.stream, self._event)

    def is_completed(self) -> bool:
        return False


def _stream_class(recorder: Recorder) -> type:
    """Stands in for ``torch.cuda.Stream``."""

    class Stream:
        def __init__(self, name: str = "", priority: int = 0) -> None:
            self.name = name or f"side {recorder.count('streams')}"

        def record_event(self, event: Event | None = None) -> Event:
            event = event or Event()
            event.number = recorder.record(self.name)
            return event

        def wait_event(self, event: Event) -> None:
            recorder.wait(self.name, event.number)

    class Event:
        number: int

        def query(self) -> bool:
            return False

    return Stream


@contextmanager
def recording(recorder: Recorder) -> Iterator[type]:
    """Record inside this context; gives the class of the streams."""
    stream_class = _stream_class(recorder)

    @contextmanager
    def on_stream(stream: Any) -> Iterator[None]:
        before, recorder.stream = recorder.stream, stream.name
        yield
        recorder.stream = before

    cuda = {
        "Stream": stream_class,
        "stream": on_stream,
        "current_stream": lambda *_: stream_class(recorder.stream),
    }
    with ExitStack() as stack:
        stack.enter_context(patch.multiple(torch.cuda, **cuda))
        calls = _calls(recorder)
        stack.enter_context(patch.object(gather, "_all_gather_single", calls.pop("all_gather_single")))
        stack.enter_context(patch.multiple(dist, **calls))
        stack.enter_context(recorder)
        yield stream_class


def _calls(recorder: Recorder) -> dict[str, Callable[..., Any]]:
    """Stand in for torch.distributed's functions: record, but when paused."""

    def broadcast(tensor: Any, source: int, group: Any) -> None:
        recorder.collective(group, "broadcast", [tensor], source)

    def all_reduce(tensor: Any, op: Any, group: Any) -> None:
        recorder.collective(group, "maximum" if op == dist.ReduceOp.MAX else "sum", [tensor])

    def reduce(tensor: Any, target: Any, group: Any) -> None:
        recorder.collective(group, "reduce", [tensor], target)

    def all_gather_single(gathered: Any, tensor: Any, group: Any) -> None:
        recorder.collective(group, "gather", [gathered, tensor])

    def all_to_all_single(received: Any, rows: Any, receive: Any, send: Any, group: Any) -> None:
        recorder.collective(group, "exchange", [received, rows], (receive, send))

    def isend(tensor: Any, peer: int, group: Any) -> _Work:
        return recorder.post(group, tensor, recorder._rank, peer)

    def irecv(tensor: Any, peer: int, group: Any) -> _Work:
        return recorder.post(group, tensor, peer, recorder._rank)

    def unless_paused(recorded: Callable[..., Any], real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: (real if recorder.is_paused else recorded)(*args, **kwargs)

    calls = (broadcast, all_reduce, reduce, all_to_all_single, isend, irecv)
    stand_ins = {f.__name__: unless_paused(f, getattr(dist, f.__name__)) for f in calls}
    gathers = unless_paused(all_gather_single, gather._all_gather_single)
    return stand_ins | {"all_gather_single": gathers}
