"""``TrainConfig``: all options of one training job in one frozen record.

A field is an option, and its flag, help, default and limits are defined here alone. Ranks read the record
as JSON.

Next: ``config_checks.py`` (rules between the fields), then ``run_job.py`` (what a job does).
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from megatron_vocabpar.option import asked_for, option, options_of
from megatron_vocabpar.schedule.make.families import SEARCH, families
from megatron_vocabpar.schedule.words.methods import DEFAULT, METHODS

_ONCE = ("resume", "overwrite")  # options of one run, not of the job
TRAINED_VOCABULARY = 8192  # a megabyte of text fills it


@dataclass(frozen=True)
class TrainConfig:
    """One training job. Sizes are counts; None means that the default is derived from other fields."""

    method: str = option(
        DEFAULT,
        "How the vocabulary layers are placed and scheduled.",
        section="Method",
        choices=tuple(METHODS),
    )
    compare: tuple[str, ...] = option(
        (),
        "Train with these methods too, in schedules of the same family, and overlay the curves.",
        metavar="METHOD[,METHOD…]",
        choices=tuple(METHODS),
    )
    final_stage_layers: int | None = option(
        None, "redis: transformer layers on the last stage (default: balanced by FLOPs)."
    )

    family: str = option(
        "1f1b",
        "The schedule into which the vocabulary passes are inserted, for every method of the job; search: "
        "the fastest of all families, which takes some seconds.",
        section="Schedule",
        choices=(*families(), SEARCH),
    )
    chunks: int | None = option(
        None,
        "Model chunks on each rank (default: the family's own number; search: any).",
        least=1,
    )
    max_activations: float | None = option(
        None,
        "Most microbatches whose activations a rank may hold, at least 1 (default: the family's own number; "
        "search: that of 1f1b).",
        least=1,
    )
    costs: str | None = option(
        None,
        "Times of the passes as JSON, to make the schedule for (default: the paper's proportions).",
        metavar="FILE",
    )

    pp: int = option(4, "Pipeline stages.", section="Processes", least=1)
    tp: int = option(1, "Tensor-parallel ranks per stage.", least=1)
    dp: int = option(1, "Data-parallel replicas.", least=1)
    sequence_parallel: bool = option(True, "Sequence parallelism where --tp is above 1.")
    distributed_optimizer: bool = option(False, "Shard the optimizer state over the replicas.")
    overlap_grad_reduce: bool = option(False, "Reduce gradients while the backward runs.")
    device: str = option("auto", "auto: one GPU per process, or the CPU.", choices=("auto", "cpu", "cuda"))
    share_gpus: bool = option(
        False, "With --device cuda: let several processes take turns on a GPU where there are fewer GPUs."
    )

    layers: int = option(8, "Transformer layers.", section="Model", least=1)
    hidden: int = option(64, "Hidden size.", least=1)
    heads: int = option(4, "Attention heads.", least=1)
    ffn: int | None = option(None, "Feed-forward size (default: 4 × hidden).", least=1)
    seq_length: int = option(128, "Tokens per sequence.", least=1)
    vocab_size: int = option(65536, "Vocabulary of the model, at least the tokenizer's.", least=1)
    tied: bool = option(False, "One weight for the input and output layers.")
    position: str = option("learned", "Position embedding.", choices=("learned", "rope"))
    dtype: str = option("fp32", "bf16 keeps main gradients in fp32.", choices=("fp32", "bf16"))

    micro_batch_size: int = option(2, "Sequences per microbatch.", section="Training", least=1)
    microbatches: int = option(8, "Microbatches per step and data-parallel replica.", least=1)
    steps: int = option(8, "Optimizer steps in all, those before a resume included.", least=1)
    lr: float = option(3e-3, "Learning rate.", above=0)
    warmup: int = option(3, "Steps of linear warm-up (fewer than --steps).", least=0)
    weight_decay: float = option(0.01, "Weight decay.", least=0)
    clip_grad: float = option(1.0, "Largest gradient norm (0: do not clip).", least=0)
    seed: int = option(1234, "Seed of the weights and of the order of the data.", least=0, most=2**31 - 1)

    text: str | None = option(
        None,
        "A text file, a folder of text files, or a Megatron indexed dataset without its .bin/.idx "
        "(default: the standard library's Python source).",
        section="Data",
        metavar="PATH",
    )
    tokenizer: str | None = option(
        None, "A tokenizer.json (default: one is trained on the text).", metavar="PATH"
    )
    tokenizer_vocab_size: int | None = option(
        None,
        f"Vocabulary of the tokenizer that is trained (default: {TRAINED_VOCABULARY}, or --vocab-size if "
        "less; the model's other ids are padding).",
    )
    eval_interval: int = option(4, "Steps between evaluations (0: never).", least=0)
    eval_iters: int = option(1, "Steps' worth of microbatches per evaluation.", least=1)

    output: str = option("vocabpar-out", "The results folder.", section="Results", metavar="FOLDER")
    resume: bool = option(False, "Go on from the checkpoints in the folder.")
    overwrite: bool = option(False, "Replace the results of an earlier job in this folder.")
    log_interval: int = option(1, "Steps between updates of the progress line.", least=1)
    save_interval: int = option(0, "Steps between checkpoints (0: only at the end).", least=0)
    save: bool = option(True, "Write a checkpoint at the end.")

    @property
    def world_size(self) -> int:
        return self.pp * self.tp * self.dp

    @property
    def ffn_hidden(self) -> int:
        return 4 * self.hidden if self.ffn is None else self.ffn

    @property
    def use_sequence_parallel(self) -> bool:
        return self.sequence_parallel and self.tp > 1

    @property
    def tokenizer_size(self) -> int:
        """Vocabulary of the tokenizer that is trained."""
        default = min(self.vocab_size, TRAINED_VOCABULARY)
        return default if self.tokenizer_vocab_size is None else self.tokenizer_vocab_size

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.method, *self.compare)))

    @property
    def tokens_per_step(self) -> int:
        return self.dp * self.microbatches * self.micro_batch_size * self.seq_length

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> TrainConfig:
        """Read ``to_json`` back."""
        config = cls(**json.loads(text))
        return dataclasses.replace(config, compare=tuple(config.compare))


def flag(name: str) -> str:
    """The command-line flag of a field, such as ``--micro-batch-size``."""
    return "--" + name.replace("_", "-")


def off_flag(name: str) -> str:
    """The flag that sets a field to False, such as ``--no-save``."""
    return "--untied" if name == "tied" else flag(f"no_{name}")


def written(value: Any) -> str:
    """A value as an option of ``vocabpar train`` takes it."""
    return ",".join(value) if isinstance(value, tuple) else str(value)


def command_line(config: TrainConfig) -> list[str]:
    """The command line of ``config``: the options that are not defaults, without resume and overwrite."""
    words = ["vocabpar", "train"]
    for name in asked_for(config, options_of(config)):
        value = getattr(config, name)
        if name in _ONCE:
            continue
        if isinstance(value, bool):
            words.append(flag(name) if value else off_flag(name))
        else:
            words += [flag(name), written(value)]
    return words
