"""Before an iteration's first instruction: record and share the microbatches, suspend gradient reduction."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_vocabpar.pipeline import heads
from megatron_vocabpar.pipeline.call import Call
from megatron_vocabpar.pipeline.gradients import GradientSync, Writer
from megatron_vocabpar.pipeline.iteration import Iteration, Rank
from megatron_vocabpar.pipeline.microbatches import Batches, share_microbatches
from megatron_vocabpar.pipeline.model.stage_model import PartitionedModel
from megatron_vocabpar.pipeline.recording import record_ends, replayed_calls
from megatron_vocabpar.pipeline.split_w.weight_gradients import WeightGradients
from megatron_vocabpar.schedule.words.passes import PassType
from megatron_vocabpar.schedule.words.schedule import Schedule


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
        return Iteration(rank, call, GradientSync.of(call, schedule, rank.pipeline_rank, written))
    recorded = record_ends(call, placement, rank.pipeline_rank)
    first, last = recorded.get(0), recorded.get(placement.loss_stage)
    vocab_size = model.shard.range.vocab_size if model else None
    labels = tokens = None
    if last is not None:
        drops = call.options.drop_masked and not call.forward_only
        labels = [heads.head_labels(call.chunks[-1], batch, vocab_size, drops) for batch in last]
    if first is not None:
        tokens = [heads.embedded_tokens(call.chunks[0], batch) for batch in first]
    microbatches = share_microbatches(
        Batches(tokens, labels),
        groups=rank.groups,
        ranges=model.shard.ranges if model else (),
        placement=placement,
        num_microbatches=call.num_microbatches,
        device=rank.device,
        parts=rank.groups.tensor if call.config.sequence_parallel else 1,
    )
    replayed = replayed_calls(recorded, placement, rank.pipeline_rank)
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
        GradientSync.of(call, schedule, rank.pipeline_rank, written),
        microbatches=microbatches,
        recorded=replayed,
        with_loss=last or (),
    )
