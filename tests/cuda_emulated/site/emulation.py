"""Computes on the host what CUDA kernels of the stand-in do not.

Every ATen operation first runs as it is: PyTorch checks devices, shapes and dtypes, allocates, and starts
kernels that do nothing. Then the same operation is queued in the stream that it was given, on CPU tensors on
the same memory, and the stream's thread carries it out. So an operation in a stream that does not wait for
what it reads finds what is there: NaN, or other numbers.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import waits
from products import (
    PRODUCTS,
    operations_of,
    product_with_out_dtype,
    refuse_as_older_torch,
    scaled_product,
    widened,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_library = ctypes.CDLL(None)
_Callback = ctypes.CFUNCTYPE(None, ctypes.c_ulong)
_library.emulated_enqueue.argtypes = [
    ctypes.c_void_p,
    _Callback,
    ctypes.c_ulong,
    ctypes.c_size_t,
    ctypes.c_double,
]
_library.emulated_enqueue.restype = None

aten = torch.ops.aten

# Nothing is computed: they allocate, look at metadata, or are the runtime's own work.
_AS_IT_IS = {
    *(
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "resize_",
        "resize_as_",
        "set_",
    ),
    *("_local_scalar_dense", "record_stream", "is_pinned", "_pin_memory", "lift", "lift_fresh", "set_data"),
    *("_unsafe_view", "_reshape_alias", "is_same_size", "_has_compatible_shallow_copy_type"),
}
# The shape of the result depends on values, so the host waits.
_BY_VALUES = {
    *(
        "nonzero",
        "masked_select",
        "unique_dim",
        "_unique",
        "_unique2",
        "unique_consecutive",
        "equal",
        "bincount",
    ),
    "repeat_interleave",
}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}

_jobs: dict[int, Callable[[], None]] = {}
_numbers = itertools.count(1)


def _run_job(number: int) -> None:
    """In a stream's thread. An error has no caller there: it ends the process, as a kernel's fault would."""
    try:
        with torch.no_grad():
            _jobs.pop(number)()
    except BaseException:
        sys.stderr.write(f"[emulated gpu] a job of a stream failed:\n{traceback.format_exc()}")
        sys.stderr.flush()
        os._exit(98)


_run_job_from_c = _Callback(_run_job)


def queue(stream: torch.cuda.Stream, job: Callable[[], None], size: int = 0, operations: int = 0) -> None:
    """Have ``job``, of so many bytes and arithmetic ``operations``, run in the thread of ``stream``."""
    number = next(_numbers)
    _jobs[number] = job
    _library.emulated_enqueue(stream.cuda_stream, _run_job_from_c, number, size, operations)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the memory of a CUDA tensor, which it does not keep alive."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    memory = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), torch.device("cpu"), storage.nbytes()
    )
    view = torch.empty(0, dtype=tensor.dtype)
    return view.set_(memory, tensor.storage_offset(), tensor.size(), tensor.stride())


def _is_cuda(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_cuda


def _host_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any]:
    """The operation on the host, bound to memory now and carried out when it is called."""

    def place(value: Any) -> Any:
        if _is_cuda(value):
            return on_host(value)
        return torch.device("cpu") if isinstance(value, torch.device) else value

    args, kwargs = tree_map(place, (args, kwargs))
    args = tuple(None if isinstance(value, torch.Generator) else value for value in args)
    kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
    if "generator" in kwargs:
        kwargs["generator"] = None  # the CPU's own, which _drawing has set
    name = func._schema.name.removeprefix("aten::")
    if name in PRODUCTS and "dtype" in func._overloadname:
        return lambda: product_with_out_dtype(func, args, dict(kwargs))
    if name == "_scaled_mm" and func._overloadname == "default":
        return lambda: scaled_product(*args, **kwargs)

    def call() -> Any:
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            # CUDA takes float32 statistics beside 16-bit values: on the CPU all of it is float32 then.
            if func._schema.is_mutable or "expected scalar type" not in str(error):
                raise
            return func(*tree_map(widened, args), **tree_map(widened, kwargs))

    return call


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
    """Memory that the operation writes in place."""
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    values = [
        given[argument.name]
        for argument in func._schema.arguments
        if argument.name in given and argument.alias_info is not None and argument.alias_info.is_write
    ]
    return {tensor.untyped_storage().data_ptr() for tensor in tree_leaves(values) if _is_cuda(tensor)}


class Emulation(TorchDispatchMode):
    """Queues what CUDA operations compute; see the module."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = [value for value in tree_leaves((args, kwargs)) if _is_cuda(value)]
        device = inputs[0].device if inputs else _device_of(kwargs)
        name = func._schema.name
        if device is None or not name.startswith(("aten::", "prims::")):
            return func(*args, **kwargs)
        name = name.split("::")[1]
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:  # where autograd is off they are not taken apart before they come here
                return func.decompose(*args, **kwargs)
        if name in _AS_IT_IS or func.is_view:
            return func(*args, **kwargs)
        if name in ("_to_copy", "copy_"):
            return self._copy(func, args, kwargs)
        if name in PRODUCTS and "EMULATED_TORCH" in os.environ:
            refuse_as_older_torch(name, args, kwargs, os.environ["EMULATED_TORCH"])
        random = torch.Tag.nondeterministic_seeded in func.tags
        if name in _BY_VALUES or random or (name in _INDEXING and _size_by_values(*args)):
            return self._at_once(func, args, kwargs, device, random)
        return self._later(func, args, kwargs, device)

    def _later(self, func: Any, args: Any, kwargs: Any, device: torch.device) -> Any:
        result = func(*args, **kwargs)
        call, written = _host_call(func, args, kwargs), _written(func, args, kwargs)
        new = [on_host(value) if _is_cuda(value) else None for value in tree_leaves(result)]

        def job() -> None:
            for mine, computed in zip(new, tree_leaves(call()), strict=False):
                if mine is None or not isinstance(computed, torch.Tensor) or mine.numel() == 0:
                    continue
                if mine.untyped_storage().data_ptr() not in written:
                    mine.copy_(computed.reshape(mine.shape))

        size = sum(v.nbytes for v in tree_leaves((args, kwargs, result)) if _is_cuda(v))
        queue(torch.cuda.current_stream(device), job, size, operations_of(func, args, result))
        return result

    def _at_once(self, func: Any, args: Any, kwargs: Any, device: torch.device, random: bool) -> Any:
        """On the host now: what is drawn at random does not wait on a GPU, the others do."""
        if not random:
            waits.note(func._schema.name)
        with waits.uncounted():
            _library.emulated_mute(int(random))  # the host's clock stays where it is
            torch.cuda.current_stream(device).synchronize()
            _library.emulated_mute(-int(random))
            with _drawing(kwargs.get("generator"), device) if random else torch.no_grad():
                result = _host_call(func, args, kwargs)()
            if func._schema.is_mutable:
                return args[0]
            with self:
                return tree_map(lambda v: v.to(device) if isinstance(v, torch.Tensor) else v, result)

    def _copy(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Between devices and the host, and conversions; a copy of plain bytes is the runtime's own."""
        if func._schema.name == "aten::_to_copy":
            source = args[0]
            target = _device_of(kwargs) or torch.device(kwargs.get("device") or source.device)
            dtype = kwargs.get("dtype") or source.dtype
            if source.is_cuda and target == source.device:
                return self._later(func, args, kwargs, source.device)
            wait = not kwargs.get("non_blocking", False)
            here = source if target.type == "cpu" else source.to(dtype)
            pinned = target.type == "cpu" and not wait
            result = torch.empty(source.shape, dtype=here.dtype, device=target, pin_memory=pinned)
            with self:
                aten.copy_.default(result, here.contiguous(), not wait)
                return result.to(dtype)
        target, source = args[:2]
        if target.is_cuda and source.is_cuda:
            return self._later(func, args, kwargs, target.device)
        alike = target.dtype == source.dtype and target.shape == source.shape
        if alike and target.is_contiguous() and source.is_contiguous():
            return func(*args, **kwargs)
        with self:
            dense = source.to(target.dtype).expand(target.shape).contiguous()
            moved = torch.empty(target.shape, dtype=target.dtype, device=target.device)
            return target.copy_(aten.copy_.default(moved, dense, False))


# As it is written: torch wraps it for its compiler, whose import then takes seconds in every process.
Emulation.__torch_dispatch__ = Emulation.__torch_dispatch__.__wrapped__


def _device_of(kwargs: dict[str, Any]) -> torch.device | None:
    """The CUDA device that is asked for, with its number."""
    device = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
    if device is None or device.type != "cuda":
        return None
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())


def _size_by_values(_: torch.Tensor, indices: Any, value: Any = None, accumulate: bool = False) -> bool:
    """Whether a tensor among indices is a mask, or on the host, so that places are to be counted.

    ``x[mask] = 0.0`` does neither: the number comes as a tensor of the host, and PyTorch fills by the mask.
    """
    fills = value is not None and value.numel() == 1 and not value.is_cuda and not accumulate
    tensors = [index for index in indices if index is not None]
    masks = [index.dtype in (torch.bool, torch.uint8) for index in tensors]
    return (any(masks) and not fills) or any(not index.is_cuda for index in tensors)


class _drawing:
    """The CPU's generator in the state that the GPU's is in; the GPU's moves on."""

    def __init__(self, generator: torch.Generator | None, device: torch.device) -> None:
        self._generator = generator or torch.cuda.default_generators[device.index]

    def __enter__(self) -> None:
        self._state = torch.default_generator.get_state()
        offset = self._generator.get_offset()
        self._generator.set_offset(offset + 4)
        torch.default_generator.manual_seed((self._generator.initial_seed() * 10007 + offset) % 2**63)

    def __exit__(self, *_: object) -> None:
        torch.default_generator.set_state(self._state)


def install() -> None:
    """Enter the mode in this thread and in every one that Python starts; once, when torch is imported."""
    Emulation().__enter__()
    run, initialise = threading.Thread.run, torch.cuda._lazy_init

    def run_with_mode(thread: threading.Thread) -> None:
        with Emulation():
            run(thread)

    def initialise_and_watch() -> None:
        fresh = not torch.cuda._initialized
        initialise()
        if fresh and os.environ.get("EMULATED_POISON") != "0":
            ctypes.CDLL(str(Path(__file__).parents[1] / "build/libfreed.so")).emulated_watch_allocator()

    show = torch._tensor_str._str

    def shown(tensor: torch.Tensor, **options: Any) -> str:
        if tensor.is_cuda:  # torch leaves all modes before it prints
            with Emulation(), waits.uncounted():
                tensor = tensor.detach().cpu()
        return show(tensor, **options)

    torch._tensor_str._str = shown
    # Asked through torch, the number would leave every fork without GPUs (jobs.py).
    torch._C._cuda_getDeviceCount = lambda: _library.emulated_devices()
    threading.Thread.run = run_with_mode
    torch.cuda._lazy_init = initialise_and_watch
    # Fused attention has kernels of its own, which do nothing.
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    waits.install()
