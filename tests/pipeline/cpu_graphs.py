"""CUDA graphs on the CPU, as strict as a GPU's: what stands in for ``torch.cuda`` while Megatron captures.

A captured graph is a list of operations on memory of a pool. Its tensors lie at fixed addresses; memory whose
last owner went is taken by graphs that are captured later, as by a GPU's allocator, and a weak reference owns
nothing. **A replay first fills with NaN whatever was free when its graph was captured**, since on a GPU the
graph may write there: who still reads a static tensor that a later graph has taken gets NaN, not luck.

While it captures, Megatron frees the storage of what it will compute again, by ``resize_(0)``. On a GPU that
is no operation of the graph: its pool has the memory back, and what is captured next may take it. So it is
here, and the graph fills the piece with NaN at that point. The graph of B computes it anew elsewhere in the
pool, and Megatron's own C++ puts that under the old storage.

What is not shown: kernels, streams, random numbers, which come from the CPU's one generator, and how much
memory the allocator of a GPU would need.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.distributed import Work
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from megatron_vocabpar.runtime.buffers import Buffers

POOL_BYTES = 1 << 28
_ALIGN = 64


_POOLS: weakref.WeakSet[Pool] = weakref.WeakSet()


def in_a_pool(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in the memory of graphs."""
    return any(pool.owns(tensor.untyped_storage()) for pool in _POOLS)


@contextlib.contextmanager
def handed_on_apart() -> Iterator[None]:
    """Within it nothing that a pass hands on may lie where the next graph can write."""
    put = Buffers.put

    def checked(buffers: Buffers, instruction: Any, name: str, value: Any, **options: Any) -> None:
        if torch.is_tensor(value):
            assert not in_a_pool(value), f"{instruction} hands on its {name} in the memory of graphs"
        put(buffers, instruction, name, value, **options)

    with mock.patch.object(Buffers, "put", checked):
        yield


class Pool:
    """One block of memory; the lowest piece that is free and large enough is taken first."""

    def __init__(self) -> None:
        self._memory = torch.zeros(POOL_BYTES, dtype=torch.uint8)
        self.start = self._memory.data_ptr()
        self.free = [(0, POOL_BYTES)]
        self.used = 0
        self._releases: dict[int, weakref.finalize[Any, Any]] = {}  # by address
        _POOLS.add(self)

    def owns(self, storage: torch.UntypedStorage) -> bool:
        return self.start <= storage.data_ptr() < self.start + POOL_BYTES

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the pool with the size, strides and values of ``tensor``; freed with its storage."""
        size = -(-max(tensor.untyped_storage().nbytes(), 1) // _ALIGN) * _ALIGN
        index = next(i for i, (_, length) in enumerate(self.free) if length >= size)
        offset, length = self.free.pop(index)
        if length > size:
            self.free.insert(index, (offset + size, length - size))
        self.used = max(self.used, offset + size)
        owned = at(self.start + offset, tensor).copy_(tensor)
        release = weakref.finalize(owned.untyped_storage(), self._release, offset, size)
        release.atexit = False
        self._releases[self.start + offset] = release
        return owned

    def discard(self, storage: torch.UntypedStorage) -> None:
        """Free the memory of a storage that lives on, after it has been filled with NaN."""
        offset = storage.data_ptr() - self.start
        self._memory[offset : offset + storage.nbytes()].fill_(0xFF)
        self._releases.pop(storage.data_ptr())()

    def _release(self, offset: int, size: int) -> None:
        joined: list[tuple[int, int]] = []
        for start, length in sorted([*self.free, (offset, size)]):
            if joined and sum(joined[-1]) == start:
                joined[-1] = joined[-1][0], joined[-1][1] + length
            else:
                joined.append((start, length))
        self.free = joined

    def poison(self, pieces: list[tuple[int, int]]) -> None:
        for offset, length in pieces:
            self._memory[offset : min(offset + length, self.used)] = 0xFF


def at(address: int, like: torch.Tensor) -> torch.Tensor:
    """The tensor of this size and strides at an address; it owns nothing."""
    count = 1 + sum((n - 1) * step for n, step in zip(like.shape, like.stride(), strict=True))
    if like.numel() == 0:
        return torch.empty_like(like)
    raw = (ctypes.c_char * (count * like.element_size())).from_address(address)
    return torch.frombuffer(raw, dtype=like.dtype).as_strided(like.shape, like.stride())


def weak_reference(tensor: torch.Tensor) -> torch.Tensor:
    """Transformer Engine's ``make_weak_ref``."""
    return at(tensor.data_ptr(), tensor.detach())


class Graph:
    """``torch.cuda.CUDAGraph``."""

    replays = 0

    def __init__(self) -> None:
        self.operations: list[tuple[Any, Any, Any, list[Any]]] = []
        self.free: list[tuple[int, int]] = []
        self.pool: Pool | None = None

    def register_generator_state(self, _: Any) -> None:
        """There is one generator."""

    def reset(self) -> None:
        """Forget what was captured."""
        self.operations = []

    def replay(self) -> None:
        assert self.pool is not None
        Graph.replays += 1
        self.pool.poison(self.free)
        with torch.no_grad():
            for function, args, kwargs, static in self.operations:
                results = tree_flatten(function(*args, **kwargs))[0]
                for work in results:  # of a collective
                    if isinstance(work, torch.ScriptObject):
                        Work.unbox(work).wait()
                fresh = filter(torch.is_tensor, results)
                for kept, value in zip(static, fresh, strict=True):
                    if kept is not None:
                        kept.copy_(value)


class Capture(TorchDispatchMode):
    """``torch.cuda.graph``: runs and records; memory outside the pool that it writes gets its values back."""

    def __init__(self, cuda_graph: Graph, pool: Pool) -> None:
        super().__init__()
        self.graph, self.pool = cuda_graph, pool
        self._outside: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._resize = mock.patch.object(torch.UntypedStorage, "resize_", self._resized())

    def __enter__(self) -> Capture:
        self.graph.pool, self.graph.free = self.pool, list(self.pool.free)
        self._resize.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._resize.stop()
        for tensor, before in reversed(self._outside):
            tensor.copy_(before)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        for argument, value in zip(func._schema.arguments, args, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and isinstance(value, torch.Tensor) and not in_a_pool(value):
                self._outside.append((value.detach(), value.detach().clone()))
        given = {
            t.untyped_storage().data_ptr() for t in tree_flatten((args, kwargs))[0] if torch.is_tensor(t)
        }
        static: list[Any] = []

        def keep(output: torch.Tensor) -> torch.Tensor:
            fresh = output.untyped_storage().data_ptr() not in given and output.numel() > 0
            output = self.pool.like(output) if fresh else output
            static.append(weak_reference(output) if fresh else None)
            return output

        weak = tree_map_only(torch.Tensor, self._reference, (args, kwargs))
        result = func(*args, **kwargs)
        leaves, structure = tree_flatten(result)
        kept = [keep(leaf) if torch.is_tensor(leaf) else leaf for leaf in leaves]
        self.graph.operations.append((func, *weak, static))
        return tree_unflatten(kept, structure)

    def _resized(self) -> Any:
        """``UntypedStorage.resize_`` while this captures, which sees the filling as an operation too."""
        original = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            if not self.pool.owns(storage):
                return original(storage, size)
            assert size == 0, "only freeing is modelled"
            self.pool.discard(storage)
            return storage

        return resize_

    def _reference(self, tensor: torch.Tensor) -> torch.Tensor:
        return weak_reference(tensor) if in_a_pool(tensor) else tensor.detach()


class Allocation(TorchDispatchMode):
    """What is made within it lies in the pool."""

    def __init__(self, pool: Pool) -> None:
        super().__init__()
        self.pool = pool

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return tree_map_only(torch.Tensor, self.pool.like, func(*args, **(kwargs or {})))


class _Anything:
    """A stream, or an event: there is one queue of work."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def _of_torch() -> dict[str, Any]:
    """Names of ``torch.cuda`` that a capture needs."""
    stream = _Anything()
    statistics = {"allocated_bytes.all.current": 0, "reserved_bytes.all.current": 0}
    return {
        "CUDAGraph": Graph,
        "graph": lambda cuda_graph, pool, **_: Capture(cuda_graph, pool),
        "graph_pool_handle": Pool,
        "Stream": _Anything,
        "Event": _Anything,
        "current_stream": lambda *_: stream,
        "default_stream": lambda *_: stream,
        "set_stream": lambda *_: None,
        "synchronize": lambda *_: None,
        "memory_stats": lambda *_: statistics,
        "empty_cache": lambda: None,
        "device_count": lambda: 0,
        "current_device": lambda: "cpu",
        "get_device_capability": lambda *_: (10, 0),
    }


@contextlib.contextmanager
def _stood_in(state: list[tuple[Any, str, Any]]) -> Iterator[None]:
    """With other values of owners' names; a graph must be replayed."""
    replays = Graph.replays
    with contextlib.ExitStack() as stack:
        for owner, name, value in state:
            stack.enter_context(mock.patch.object(owner, name, value, create=True))
        yield
    assert Graph.replays > replays, "no graph was replayed"


def engine_graphs_on_cpu() -> contextlib.AbstractContextManager[None]:
    """Within it Transformer Engine's graphs are captured and replayed by this module; one must be."""
    from transformer_engine.pytorch import distributed, graph

    names = ("CUDAGraph", "graph", "graph_pool_handle", "current_stream")  # the rest is a script's on_cpu.py
    state: list[tuple[Any, str, Any]] = [(torch.cuda, name, _of_torch()[name]) for name in names]
    state += [(graph, "make_weak_ref", lambda tree: tree_map_only(torch.Tensor, weak_reference, tree))]
    state += [(graph, "_graph_pool_handle", Pool)]
    state += [(module, "graph_safe_rng_available", lambda: False) for module in (distributed, graph)]
    return _stood_in(state)


@contextlib.contextmanager
def cuda_graphs_on_cpu() -> Iterator[None]:
    """Within it Megatron's local graphs are captured and replayed by this module; one must be.

    What Megatron keeps in its classes is new, and put back afterwards.
    """
    from megatron.core.transformer import cuda_graphs

    allocations: list[Allocation] = []

    def begin(_: Any, pool: Pool) -> None:
        allocations.append(Allocation(pool))
        allocations[-1].__enter__()

    threads = {
        "_cuda_beginAllocateCurrentThreadToPool": begin,
        "_cuda_endAllocateToPool": lambda *_: allocations.pop().__exit__(None, None, None),
    }
    fp8 = mock.Mock(is_fp8_enabled=lambda: False)
    engine = {
        "HAVE_TE_GRAPHS": True,
        "make_weak_ref": weak_reference,
        "FP8GlobalStateManager": fp8,
        "is_fp8_activation_recompute_enabled": lambda: False,
        "TransformerEngineBaseModule": type("NoModule", (), {}),
    }
    record, manager = cuda_graphs._CudagraphGlobalRecord, cuda_graphs.CudaGraphManager
    reuse = getattr(cuda_graphs, "TensorReusePool", None)
    state = [(record, "cudagraph_created", False), (record, "cudagraph_record", [])]
    state += [(manager, name, None) for name in ("global_mempool", "fwd_mempools", "bwd_mempool")]
    if reuse is not None:
        state += [(reuse, "pool", []), (reuse, "tensor_strong_refs", [])]
    state += [(torch.cuda, name, value) for name, value in _of_torch().items()]
    state += [(torch._C, name, value) for name, value in threads.items()]
    state += [(cuda_graphs, name, value) for name, value in engine.items()]
    with _stood_in(state):
        yield
