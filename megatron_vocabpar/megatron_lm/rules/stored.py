"""``CHECKPOINTS``: what a training starts from. Standard library only."""

from __future__ import annotations

from pathlib import Path

from megatron_vocabpar.megatron_lm.checkpoints import is_legacy, is_of_modelopt, starting_checkpoint
from megatron_vocabpar.pipeline.rules.facts import Facts
from megatron_vocabpar.pipeline.rules.rule import Rule


def _of_modelopt(facts: Facts) -> Path | None:
    checkpoint = starting_checkpoint(facts.settings)
    return checkpoint if checkpoint and is_of_modelopt(checkpoint) else None


def _legacy(facts: Facts) -> Path | None:
    checkpoint = starting_checkpoint(facts.settings)
    return checkpoint if checkpoint and not is_of_modelopt(checkpoint) and is_legacy(checkpoint) else None


CHECKPOINTS = (
    Rule("--load, --pretrained-checkpoint", _of_modelopt,
        lambda _, found: f"{found} is a checkpoint of ModelOpt (modelopt_state), which puts a model of its "
        "own in place",
        "train it without --enable-vocab-parallel"),
    Rule("--load, --pretrained-checkpoint", _legacy,
        lambda _, found: f"{found} is a legacy checkpoint (mp_rank_* files), which holds the layers of "
        "single ranks",
        "convert it once without --enable-vocab-parallel, with the parallel sizes that it was saved with: "
        "--ckpt-format torch --load OLD --ckpt-convert-format torch_dist --ckpt-convert-save NEW; then "
        "--load NEW/torch_dist"),
)  # fmt: skip
