"""What is decided when a model is built, before the plans are known that run it, and what checks it later.

A search takes its schedule when the first iteration begins, a measured plan replaces it some iterations
later, and a program of your own may give any plan. So every decision of the model is checked again:

    decided when the model is built       in Megatron-LM, by      a plan that wants something else
    ------------------------------------  ----------------------  ----------------------------------------
    vocabulary layers whole or in shards  model_choice.decided    is refused: ForwardBackward.use, plan
    model chunks on a rank                Megatron                is refused: check_built_for
    which rank has which stage            open_schedules          is refused: check_built_for
    further heads, and their stage        the layout              is refused: check_built_for
    layers of a stage                     the layout              cannot: plans count the layers as built
    whether layers can delay gradients    open_schedules          with W: is refused where they cannot;
                                                                  without W: B computes them (split_w/)
    buckets of gradients on every rank    open_schedules          runs: each gradient is reported when it
                                                                  is complete (gradients.py)
    Megatron's plans of layers (pairs)    --overlap-moe-expert-   runs: the same plans, F and B by turns
                                          parallel-comm

Next: ``chunks.py``, where chunks stand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.utils import unwrap_model

from megatron_vocabpar.pipeline import heads
from megatron_vocabpar.pipeline.model.stage_model import PartitionedModel
from megatron_vocabpar.schedule.words.methods import Method
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


def check_built_for(schedule: Schedule, chunks: Sequence[torch.nn.Module], rank: int, config: Any) -> None:
    """Refuse a schedule that the model chunks of this pipeline rank were not built for.

    Args:
        config: megatron-core's configuration of the model.

    Raises:
        ValueError: naming what differs.
    """
    if len(chunks) != schedule.chunks:
        raise ValueError(
            f"the model has {len(chunks)} chunks, the schedule {schedule.chunks}; build as many chunks "
            "as the schedule has"
        )
    placement, depths = schedule.placement, heads.depths(config)
    for number, chunk in enumerate(chunks):
        stage = placement.stage_of(rank, number)
        model: Any = unwrap_model(chunk)
        for name, wanted in (("pre_process", stage == 0), ("post_process", stage == placement.last_stage)):
            if getattr(model, name, wanted) != wanted:
                raise ValueError(
                    f"the schedule has stage {stage} in chunk {number} of pipeline rank {rank} "
                    f"({placement.shape}), the model was built with {name} {not wanted} there; build it for "
                    "the placement of the schedule, or use a family with the model's"
                )
    if schedule.method.vocabulary_parallel and schedule.mtp_depths != depths:
        raise ValueError(
            f"the plan is for {schedule.mtp_depths} depths of multi-token prediction, the model has "
            f"{depths}; give mtp_depths, or a plan made with PassCosts.default(p, mtp_depths)"
        )
    if depths and placement.mtp != (built := heads.stage_of(config)):
        raise ValueError(
            f"the plan has the layers of multi-token prediction on stage {placement.mtp_stage}, "
            f"the model on {'the last' if built is None else built}; give mtp_stage in the plan's costs"
        )
