"""What is stored: ``LOGITS``, a teacher's numbers, and ``CHECKPOINTS``, what a training starts from.

``check.py`` takes ``--logits-load-dir`` for the option ``distillation`` and ``--logits-save-dir`` for
``top_logprobs``, so the rows on these count too. Standard library only.
"""

from __future__ import annotations

from pathlib import Path

from megatron_vocabpar.megatron_lm.checkpoints import is_legacy, is_of_modelopt, starting_checkpoint
from megatron_vocabpar.pipeline.rules.facts import Facts
from megatron_vocabpar.pipeline.rules.rule import Rule

_ONE = "leave out one"


def _saved_with(other: str, setting: str, why: str) -> Rule:
    return Rule(
        f"--logits-save-dir with {other}", lambda f: f.logits_save_dir and f.is_set(setting), why, _ONE
    )


LOGITS = (
    Rule("--logits-load-ignore-errors",
        lambda f: f.logits_load_dir and f.is_set("logits_load_ignore_errors"),
        "one rank would go on without a teacher"),
    Rule("--logits-load-dir", lambda f: f.logits_load_dir and f.options.needs_exponentials,
        "its loss function takes no metrics", "leave out --vocab-parallel-metrics"),
    Rule("--logits-load-kd-loss-alpha {f.logits_load_kd_loss_alpha}",
        lambda f: f.logits_load_dir and not 0 <= f.logits_load_kd_loss_alpha <= 1,
        "it is the part of the loss that the teacher has", "give 0 to 1"),
    _saved_with("--logits-load-dir", "logits_load_dir", "a student's loss is not 0"),
    _saved_with("--use-mup", "use_mup", "stock stores logits without its factor"),
    _saved_with("--sft", "sft", "tokens without a label are not in the output layer"),
    # Known by an option that came later than 0.19.
    Rule("--logits-save-dir with --freeze-all-layers",
        lambda f: f.logits_save_dir and f.freeze_all_layers and f.has("logit_dtype"),
        "Megatron then runs no step of training, which finds ids", _ONE),
    Rule("--logits-save-dir with --vocab-parallel-metrics",
        lambda f: f.logits_save_dir and f.options.needs_exponentials, "the loss function has none to give",
        _ONE),
    Rule("--logits-save-dir with --vocab-parallel-logit-scale",
        lambda f: f.logits_save_dir and f.options.logit_scale != 1, "stock stores logits without it", _ONE),
)  # fmt: skip


def _of_modelopt(facts: Facts) -> Path | None:
    checkpoint = starting_checkpoint(facts.settings)
    return checkpoint if checkpoint and is_of_modelopt(checkpoint) else None


def _legacy(facts: Facts) -> Path | None:
    checkpoint = starting_checkpoint(facts.settings)
    return checkpoint if checkpoint and not is_of_modelopt(checkpoint) and is_legacy(checkpoint) else None


CHECKPOINTS = (
    Rule("--load, --pretrained-checkpoint", _of_modelopt,
        "{found} is a checkpoint of ModelOpt (modelopt_state), which puts a model of its own in place",
        "train it without --enable-vocab-parallel"),
    Rule("--load, --pretrained-checkpoint", _legacy,
        "{found} is a legacy checkpoint (mp_rank_* files), which holds the layers of single ranks",
        "convert it once without --enable-vocab-parallel, with the parallel sizes that it was saved with: "
        "--ckpt-format torch --load OLD --ckpt-convert-format torch_dist --ckpt-convert-save NEW; then "
        "--load NEW/torch_dist"),
)  # fmt: skip
