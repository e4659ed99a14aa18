"""Before an iteration's first instruction: record and share the microbatches, suspend gradient reduction."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.utils import unwrap_model

from megatron_vocabpar.pipeline import heads
from megatron_vocabpar.pipeline.call import Call
from megatron_vocabpar.pipeline.gradients import GradientSync, Writer
from megatron_vocabpar.pipeline.iteration import Iteration, Rank
from megatron_vocabpar.pipeline.microbatches import DROPPED, IGNORED, Batches, share_microbatches
from megatron_vocabpar.pipeline.model.stage_model import PartitionedModel
from megatron_vocabpar.pipeline.recording import ModelCall, record_calls
from megatron_vocabpar.pipeline.split_w.weight_gradients import WeightGradients
from megatron_vocabpar.schedule.words.methods import Method
from megatron_vocabpar.schedule.words.passes import Pass, PassType
from megatron_vocabpar.schedule.words.placement import Placement
from megatron_vocabpar.schedule.words.schedule import Schedule


def chunk_with_shards(method: Method, chunks: Sequence[torch.nn.Module]) -> PartitionedModel | None:
    """The chunk of this rank that holds the vocabulary shards, unwrapped; None if there are none.

    Raises:
        ValueError: if the method partitions the vocabulary and the first chunk cannot.
    """
    if not method.vocabulary_parallel:
        return None
    model = unwrap_model(chunks[0])
    if not isinstance(model, PartitionedModel):
        raise ValueError(
            f"method {method.name} needs a VocabParallelGPTModel, got {type(model).__name__}; "
            "build the model with it, or use method baseline"
        )
    return model


def prepare(
    rank: Rank,
    call: Call,
    schedule: Schedule,
    model: PartitionedModel | None,
    weight_gradients: Sequence[WeightGradients],
) -> Iteration:
    """Record and share the microbatches, and suspend gradient reduction."""
    written = {
        Writer(PassType.W, chunk): gradients.parameters() for chunk, gradients in enumerate(weight_gradients)
    }
    placement = rank.placement
    if not rank.method.chain:
        return Iteration(rank, call, _gradient_sync(rank, call, schedule, written))
    recorded = _record(rank, call)
    first, last = recorded.get(0), recorded.get(placement.loss_stage)
    vocab_size = model.shard.range.vocab_size if model else None
    labels = None if last is None else [_labels(recorded, call, vocab_size) for recorded in last]
    if last is not None and labels is not None and call.options.drop_masked and not call.forward_only:
        pairs = zip(labels, last, strict=True)
        labels = [label.masked_fill(_masked(recorded, call), DROPPED) for label, recorded in pairs]
    tokens = None if first is None else [_tokens(recorded, call) for recorded in first]
    microbatches = share_microbatches(
        Batches(tokens, labels),
        groups=rank.groups,
        ranges=model.shard.ranges if model else (),
        placement=placement,
        num_microbatches=call.num_microbatches,
        device=rank.device,
        parts=rank.groups.tensor if call.config.sequence_parallel else 1,
    )
    replayed = _replayed(rank, recorded)
    if model is None:
        # The last stage is not that of the loss: it gets the labels from there.
        for i, recorded_call in enumerate(replayed.get(placement.last_stage, ())):
            true_labels = microbatches.labels(i)[0]
            replayed[placement.last_stage][i] = recorded_call.with_argument("labels", true_labels)
    else:
        written |= {
            Writer(PassType.IB): [model.word_embeddings.weight],
            Writer(rank.method.weight_pass): [model.output_weight],
        }
    return Iteration(
        rank,
        call,
        _gradient_sync(rank, call, schedule, written),
        microbatches=microbatches,
        recorded=replayed,
        with_loss=last or (),
    )


def _record(rank: Rank, call: Call) -> dict[int, list[ModelCall]]:
    """The calls that ``forward_step`` makes for the first stage, the loss stage and that before it in a V.

    Each chunk has its own data iterator, as in Megatron.
    """
    placement = rank.placement
    ends = [0] * rank.is_first + [placement.loss_stage] * rank.has_loss
    if rank.has_loss and placement.loss_stage != placement.last_stage:
        ends.append(placement.loss_stage - 1)
    return {
        stage: record_calls(
            call.forward_step_func, call.data_iterators[chunk], call.chunks[chunk], call.num_microbatches
        )
        for stage, chunk in ((stage, placement.chunk_of(stage)) for stage in dict.fromkeys(ends))
    }


def _replayed(rank: Rank, recorded: Mapping[int, list[ModelCall]]) -> dict[int, list[ModelCall]]:
    """By stage, the calls that its layers get: a batch on the model's first and last stages alone.

    ``forward_step`` takes the last rank's last chunk for the last stage and gives it the batch: tokens,
    positions, masks and ends of packed sequences. In a V-shaped placement that is a stage in the middle. So
    there the last stage gets the call of the first, which is on its rank, and the stage of the loss that of
    the stage before, which is on its rank too and in the middle for Megatron as well.
    """
    placement, calls = rank.placement, dict(recorded)
    if placement.loss_stage != placement.last_stage:
        if rank.is_last:
            calls[placement.last_stage] = list(recorded[0])
        if rank.has_loss:
            calls[placement.loss_stage] = recorded[placement.loss_stage - 1]
    return calls


def _tokens(recorded: ModelCall, call: Call) -> torch.Tensor:
    _check_given(recorded.input_ids, "input_ids")
    return heads.embedded_tokens(call.chunks[0], recorded)


def _labels(recorded: ModelCall, call: Call, vocab_size: int | None) -> torch.Tensor:
    """Target ids ``[1 + D, b, s]`` of all heads.

    Of a partitioned vocabulary, masked labels outside it become ``IGNORED``: their losses are not read. The
    mask is the one that ``forward_step`` passes to the model; what its loss function does is not known yet.
    """
    _check_given(recorded.labels, "labels")
    if recorded.kwargs.get("output_processor") is not None:
        raise ValueError(
            "forward_step passed an output_processor to the model, which would see the hidden states and the "
            "whole output layer in place of the loss; vocabulary parallelism has neither on one rank: leave "
            "it out"
        )
    if recorded.kwargs.get("compute_mtp_loss") is False:
        raise ValueError(
            "forward_step passed compute_mtp_loss False to the model, which has the heads of multi-token "
            "prediction all the same here: leave it out, or train without --mtp-num-layers"
        )
    mask = recorded.kwargs.get("loss_mask")
    if vocab_size is not None and mask is not None:
        assert recorded.labels is not None
        outside = (recorded.labels < 0) | (recorded.labels >= vocab_size)
        labels = recorded.labels.masked_fill(outside & (mask == 0), IGNORED)
        recorded = recorded.with_argument("labels", labels)
    return heads.head_labels(call.chunks[-1], recorded)


def _check_given(tensor: torch.Tensor | None, name: str) -> None:
    if tensor is None:
        raise ValueError(
            f"forward_step passed no {name} to the model; vocabulary parallelism needs token ids on the "
            "first stage and labels on the last"
        )


def _masked(recorded: ModelCall, call: Call) -> torch.Tensor:
    """Tokens ``[1 + D, b, s]`` that the batch's loss mask leaves out; none of heads that are only logged.

    Megatron shifts the mask for further heads. Its own code is asked how: by the gradient of the sum of all
    masked losses, 0 where a token has no part in it.

    Raises:
        ValueError: if ``forward_step`` passed no mask.
    """
    mask = recorded.kwargs.get("loss_mask")
    if mask is None:
        raise ValueError(
            "drop_masked, but forward_step passed no loss_mask to the model: pass it, as pretrain_gpt.py "
            "does, or give tokens without a loss labels of -100"
        )
    assert recorded.labels is not None
    shape = (1 + heads.depths(call.config), *recorded.labels.shape)
    losses = mask.new_ones(shape, dtype=torch.float32, requires_grad=True)
    with torch.enable_grad():
        total = (heads.main_loss(call.chunks[-1], recorded, losses, training=False) * mask).sum()
    (grad,) = torch.autograd.grad(total, [losses])
    masked: torch.Tensor = grad == 0
    if not getattr(call.config, "mtp_loss_scaling_factor", None):
        masked[1:] = False
    return masked


def _gradient_sync(
    rank: Rank, call: Call, schedule: Schedule, written: Mapping[Writer, Sequence[torch.nn.Parameter]]
) -> GradientSync:
    config = call.config
    no_sync = _per_chunk(config.no_sync_func or contextlib.nullcontext, len(call.chunks))
    # Megatron aligns stages as all but the first reduce in a bubble; with W there is none (``buckets.py``).
    aligned = config.grad_sync_func and not schedule.splits_w
    grad_sync = _per_chunk(config.grad_sync_func, len(call.chunks)) if aligned else []
    passes = schedule.ranks[rank.pipeline_rank]
    return GradientSync(
        chunks=call.chunks,
        no_sync_funcs=no_sync,
        grad_sync_funcs=grad_sync,
        starts_early=not grad_sync or rank.is_first,
        num_microbatches=call.num_microbatches,
        written=written,
        runs={writer: sum(_is_of(writer, pass_, rank.placement) for pass_ in passes) for writer in written},
    )


def _is_of(writer: Writer, pass_: Pass, placement: Placement) -> bool:
    """Whether this pass is one of ``writer``'s; a vocabulary pass has a rank where others have a stage."""
    if pass_.type is not writer.type:
        return False
    return pass_.type is not PassType.W or placement.chunk_of(pass_.stage) == writer.chunk


def _per_chunk(value: Any, chunks: int) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value] * chunks
