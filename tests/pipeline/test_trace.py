"""One iteration at p = 8 with a vocabulary of 256k, on tensors that have shapes but no data.

Fake tensors and a fake process group: the program of a rank runs alone, in the size of a real training,
without its memory or its time. Seen are shapes, live bytes, and whatever would make the host wait for the
device inside a pass. Transformer layers are a stand-in that keeps its input. The device is called ``cpu``,
for a PyTorch without CUDA knows no other; products and row kernels allocate what those of a GPU do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import BaseTransformerLayer
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_vocabpar.layers import operands
from megatron_vocabpar.layers.gemm import row_chunks
from megatron_vocabpar.layers.kernels.dispatch import REFERENCE, use_kernels
from megatron_vocabpar.layers.kernels.reference import Exponentials
from megatron_vocabpar.layers.targets import ShardTargets
from megatron_vocabpar.pipeline import forward_backward, preparation
from megatron_vocabpar.pipeline.forward_backward import Callbacks, ForwardBackward
from megatron_vocabpar.pipeline.microbatches import Batches, Microbatch, Microbatches
from megatron_vocabpar.pipeline.model.gpt import VocabParallelGPTModel
from megatron_vocabpar.pipeline.model.vocab_layers import vocab_shard
from megatron_vocabpar.runtime.comm import PointToPoint, VocabGroups
from megatron_vocabpar.schedule.make.generate import generate
from megatron_vocabpar.schedule.plan import Plan
from megatron_vocabpar.schedule.words.passes import Instruction, PassType
from megatron_vocabpar.schedule.words.schedule import Schedule
from megatron_vocabpar.train.core_on_cpu import _REPLACED
from tests.cases import rest_is_slow, wants_fake_tensors
from tests.spawn import run_ranks

P, M, V, H, N = 8, 10, 256 * 1024, 1024, 2048
DEVICE = torch.device("cpu")
MIB = 2**20
TRANSIENT_MIB = 32
WAITS_FOR_THE_DEVICE = {"cpu", "tolist", "item", "numpy", "__bool__", "__int__", "__float__", "__index__"}
WAITS_FOR_THE_DEVICE |= {"nonzero", "masked_select", "unique", "equal", "to_host"}


class _Layer(torch.nn.Module, BaseTransformerLayer):
    """``hidden * scale``: keeps its input for the backward, as little else as can be."""

    def __init__(self, config: Any, *_: Any, **__: Any) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(config.hidden_size, dtype=torch.bfloat16, device=DEVICE))

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        return hidden_states * self.scale, None


class _Waits(TorchFunctionMode):
    """Notes what would make the host wait for the device inside an instruction."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._instruction: Instruction | None = None

    @contextmanager
    def observe(self, instruction: Instruction) -> Iterator[None]:
        self._instruction = instruction
        yield
        self._instruction = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in WAITS_FOR_THE_DEVICE and self._instruction is not None:
            self.found.append(f"{name} in {self._instruction}")
        if name == "item":
            return True  # outside of passes: the checks of what was noted
        return func(*args, **(kwargs or {}))


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of what has been allocated and is alive."""

    def __init__(self, there_before: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.peak = self._live = 0
        self._there_before = {tensor.untyped_storage()._cdata for tensor in there_before}
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        expired = torch.UntypedStorage._expired
        for key in [key for key in self._storages if expired(key)]:
            self._live -= self._storages.pop(key)[1]
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._storages and storage._cdata not in self._there_before:
            self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
            self._live += storage.nbytes()
            self.peak = max(self.peak, self._live)


def _product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """``gemm.product`` of a GPU: 16-bit operands, float32 result, nothing else."""
    assert a.shape[1] == b.shape[0]
    out = a.new_empty((a.shape[0], b.shape[1]), dtype=torch.float32) if out is None else out
    assert (*out.shape, out.dtype) == (a.shape[0], b.shape[1], torch.float32)
    return out


def _chunks(device: torch.device, rows: int, columns: int, *_: int | None) -> list[slice]:
    """``gemm.product_chunks``, by size alone."""
    return row_chunks(rows, columns, transient_bytes=TRANSIENT_MIB * MIB)


def _add_product_(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, factor: Any = None) -> None:
    assert tuple(out.shape) == (a.shape[0], b.shape[1])
    assert a.shape[1] == b.shape[0]


def _exponentials(
    logits: torch.Tensor, *_: Any, out: Any = None, stats: Any = None, **__: Any
) -> Exponentials:
    assert stats is not None
    return Exponentials(out, stats)


def _scatter_add_rows_(out: torch.Tensor, rows: torch.Tensor, *_: Any, **__: Any) -> None:
    assert out.dim() == 2
    assert rows.dim() == 1


def _scale_rows(x: torch.Tensor, scale: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    assert len(x) == len(scale)
    return torch.empty_like(x) if out is None else out


def _finish(grad: torch.Tensor, _: Any, weight: torch.Tensor, targets: ShardTargets, __: Any) -> None:
    assert len(grad) == len(targets.rows)
    assert grad.shape[1] == weight.shape[1]


def _prepare(main_grad: torch.Tensor, x: torch.Tensor, targets: ShardTargets, _: Any) -> torch.Tensor:
    assert len(x) == len(targets.rows)
    return torch.empty_like(x)


KERNELS = replace(
    REFERENCE,
    exponentials=_exponentials,
    scale_rows=_scale_rows,
    scatter_add_rows_=_scatter_add_rows_,
    finish=_finish,
    prepare=_prepare,
)


@dataclass(frozen=True)
class _Done:
    value: Any

    def wait(self) -> Any:
        return self.value

    def done(self) -> bool:
        return True


class _Stream:
    """A side stream that runs what is submitted at once."""

    def submit(self, work: Any) -> Any:
        with torch.no_grad():
            return _Done(work())


def _config() -> TransformerConfig:
    return TransformerConfig(
        num_layers=P, hidden_size=H, num_attention_heads=8, pipeline_model_parallel_size=P,
        pipeline_dtype=torch.bfloat16, params_dtype=torch.bfloat16, bf16=True, hidden_dropout=0.0,
        attention_dropout=0.0, perform_initialization=False,
        deallocate_pipeline_outputs=True, batch_p2p_sync=False,
    )  # fmt: skip


def _on_device(host: torch.Tensor) -> torch.Tensor:
    """What a copy of a real host tensor to the device would be."""
    return torch.empty(host.shape, dtype=host.dtype, device=DEVICE)


def _planned(self: Microbatches, i: int) -> Microbatch:
    """``Microbatches._plan`` on real ids, and what goes to the device from there."""
    with unset_fake_temporarily(), torch._C.DisableTorchFunction():
        real = _plan(self, i)
    assert real.counted is None
    embedded = tuple(
        replace(tokens, plan=replace(tokens.plan, order=_on_device(tokens.plan.order)))
        for tokens in real.embedded
    )
    return replace(
        real,
        embedded=embedded,
        owned_rows=_on_device(real.owned_rows),
        by_row=_on_device(real.by_row),
        targets=ShardTargets(*map(_on_device, real.targets)),
    )


_plan = Microbatches._plan


def _share(_: Batches, *, groups: VocabGroups, ranges: Any, **__: Any) -> Microbatches:
    """Random microbatches, on the host, in place of what the first and the last stage would send."""
    with unset_fake_temporarily():
        ids = torch.randint(0, V, (2, M * N), generator=torch.Generator().manual_seed(1))
        return Microbatches(
            shapes=[(1, 1, N)] * M,
            tokens=ids[0],
            labels=ids[1],
            device=ids.device,
            ranges=ranges,
            member=groups.member,
        )


def _batch() -> dict[str, Any]:
    return {name: torch.zeros((1, N), dtype=torch.int64, device=DEVICE) for name in ("tokens", "positions")}


def _forward_step(data_iterator: Any, model: Any) -> Any:
    fields = next(data_iterator) if data_iterator is not None else {}
    tokens = fields.get("tokens")
    output = model(tokens, fields.get("positions"), None, labels=tokens)
    return output, lambda losses: (losses.sum() / N, {"lm loss": losses.sum().detach()})


def _build(schedule: Schedule, rank: int, waits: _Waits) -> tuple[ForwardBackward, Any]:
    groups = VocabGroups(tuple(range(P)), P, 1, rank, *[dist.group.WORLD] * 3)
    model = VocabParallelGPTModel(
        _config(),
        ModuleSpec(module=_Layer),
        V,
        N,
        shard=vocab_shard(V),
        pre_process=rank == 0,
        post_process=rank == P - 1,
        position_embedding_type="none",
    )
    for weight in model.parameters():
        weight.main_grad = torch.zeros(weight.shape, dtype=torch.float32, device=DEVICE)
    run = ForwardBackward(
        schedule.method.name,
        groups,
        DEVICE,
        make_plan=lambda _: Plan.of(schedule),
        callbacks=Callbacks(observers=[waits.observe]),
    )
    return run, model


def _trace(_: int, schedule: Schedule, rank: int) -> tuple[int, list[str]]:
    """The peak of the rank's live bytes during an iteration, and waits inside passes."""
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=P, store=FakeStore())
    parallel_state.initialize_model_parallel(1, P, create_gloo_process_groups=False)
    waits = _Waits()
    with _environment():
        run, model = _build(schedule, rank, waits)
        live = _LiveBytes([t for p in model.parameters() for t in (p, p.main_grad)])
        with waits, live:
            run(
                forward_step_func=_forward_step,
                data_iterator=iter([_batch() for _ in range(M)]) if rank in (0, P - 1) else None,
                model=model,
                num_microbatches=M,
                seq_length=N,
                micro_batch_size=1,
            )
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    return live.peak, waits.found


@contextmanager
def _environment() -> Iterator[None]:
    """megatron-core, torch.distributed and the runtime on a GPU that is not there."""
    with ExitStack() as stack:
        for owner, name, replacement, _ in _REPLACED:
            stack.enter_context(patch.object(owner, name, replacement))
        stack.enter_context(patch.multiple(operands, product=_product, add_product_=_add_product_))
        stack.enter_context(patch.object(operands, "product_chunks", _chunks))
        stack.enter_context(patch.object(forward_backward, "side_stream", lambda *_: _Stream()))
        stack.enter_context(patch.object(forward_backward, "send_waiter", lambda _: None))
        stack.enter_context(patch.object(PointToPoint, "reap", lambda link: link._in_flight.clear()))
        stack.enter_context(patch.object(preparation, "share_microbatches", _share))
        stack.enter_context(patch.object(Microbatches, "_plan", _planned))
        stack.enter_context(use_kernels(KERNELS))
        stack.enter_context(FakeTensorMode())
        yield


def _most(schedule: Schedule, rank: int, opens: PassType, closes: PassType) -> int:
    """The most microbatches between these two passes at one time."""
    live = most = 0
    for item in schedule.ranks[rank]:
        live += (item.type is opens) - (item.type is closes)
        most = max(most, live)
    return most


@cache
def _schedule(method: str) -> Schedule:
    return generate(method, P, M)


@wants_fake_tensors
@pytest.mark.parametrize("rank", rest_is_slow([0, P // 2, P - 1], P - 1))
@pytest.mark.parametrize("method", rest_is_slow(["vocab-1", "vocab-2"], "vocab-2"))
def test_live_bytes_are_what_the_schedule_stores_and_no_pass_waits(method: str, rank: int) -> None:
    ((peak, waits),) = run_ranks(1, _trace, _schedule(method), rank)
    schedule = _schedule(method)
    hidden_16, hidden_32, exponentials = 2 * N * H, 4 * N * H, 2 * N * V // P
    stored = exponentials + hidden_16 + (hidden_32 if method == "vocab-2" else 0)
    waiting = _most(schedule, P - 1, PassType.T, PassType.B) if method == "vocab-1" else 1
    bound = (
        _most(schedule, rank, PassType.S, schedule.method.weight_pass) * stored  # E and X; A of vocab-2
        + _most(schedule, rank, PassType.F, PassType.B) * hidden_16  # what a layer keeps
        + 2 * TRANSIENT_MIB * MIB  # logits of two chunks of tokens
        + (1 + waiting) * hidden_32  # parts of the input gradient
        + 5 * hidden_16  # received, sent or broadcast
    )
    assert 0.8 * bound <= peak <= bound
    assert waits == []
