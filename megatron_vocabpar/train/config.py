"""``TrainConfig``: all options of one training job in one frozen record.

A field is an option: its flag, help and default stand here and nowhere else. Ranks read the record as JSON.
Next: ``check.py`` (rules between the fields), then ``job.py`` (what a job does).
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_vocabpar.schedule.make.families import SEARCH, families
from megatron_vocabpar.schedule.words.methods import DEFAULT, METHODS

_ONCE = ("resume", "overwrite")  # options of one run, not of the job
TRAINED_VOCABULARY = 8192  # a megabyte of text fills it


def _option(
    default: Any, help: str, starts: str = "", choices: Sequence[str] = (), metavar: str | None = None
) -> Any:
    """A field and its option: help text, the section of ``--help`` that begins with it, choices."""
    metadata = {"help": help, "starts": starts, "choices": choices, "metavar": metavar}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class TrainConfig:
    """One training job. Sizes are counts; None means that the default is derived from other fields."""

    method: str = _option(
        DEFAULT, "How the vocabulary layers are placed and scheduled.", "Method", choices=tuple(METHODS)
    )
    compare: tuple[str, ...] = _option(
        (),
        "Train with these methods too, in schedules of the same family, and overlay the curves.",
        metavar="METHOD[,METHOD…]",
    )
    final_stage_layers: int | None = _option(
        None, "redis: transformer layers on the last stage (default: balanced by FLOPs)."
    )

    family: str = _option(
        "1f1b",
        "What the vocabulary passes are woven into, for every method of the job; search: the fastest found "
        "in all families, which takes some seconds.",
        "Schedule",
        choices=(*families(), SEARCH),
    )
    chunks: int | None = _option(
        None, "Model chunks on each rank (default: the family's own number; search: any)."
    )
    max_activations: float | None = _option(
        None,
        "Most microbatches whose activations a rank may hold, at least 1 (default: what the family needs; "
        "search: what 1f1b needs).",
    )
    costs: str | None = _option(
        None,
        "Times of the passes as JSON, to make the schedule for (default: the paper's proportions).",
        metavar="FILE",
    )

    pp: int = _option(4, "Pipeline stages.", "Processes")
    tp: int = _option(1, "Tensor-parallel ranks per stage.")
    dp: int = _option(1, "Data-parallel replicas.")
    sequence_parallel: bool = _option(True, "Sequence parallelism where --tp is above 1.")
    distributed_optimizer: bool = _option(False, "Shard the optimizer state over the replicas.")
    overlap_grad_reduce: bool = _option(False, "Reduce gradients while the backward runs.")
    device: str = _option("auto", "auto: a GPU a process, or the CPU.", choices=("auto", "cpu", "cuda"))

    layers: int = _option(8, "Transformer layers.", "Model")
    hidden: int = _option(64, "Hidden size.")
    heads: int = _option(4, "Attention heads.")
    ffn: int | None = _option(None, "Feed-forward size (default: 4 × hidden).")
    seq_length: int = _option(128, "Tokens per sequence.")
    vocab_size: int = _option(65536, "Vocabulary of the model, at least the tokenizer's.")
    tied: bool = _option(False, "One weight for the input and output layers.")
    position: str = _option("learned", "Position embedding.", choices=("learned", "rope"))
    dtype: str = _option("fp32", "bf16 keeps main gradients in fp32.", choices=("fp32", "bf16"))

    micro_batch_size: int = _option(2, "Sequences per microbatch.", "Training")
    microbatches: int = _option(8, "Microbatches per step and data-parallel replica.")
    steps: int = _option(8, "Optimizer steps in all, those before a resume included.")
    lr: float = _option(3e-3, "Learning rate.")
    warmup: int = _option(3, "Steps of linear warm-up (fewer than --steps).")
    weight_decay: float = _option(0.01, "Weight decay.")
    clip_grad: float = _option(1.0, "Largest gradient norm (0: do not clip).")
    seed: int = _option(1234, "Seed of the weights and of the order of the data.")

    text: str | None = _option(
        None,
        "A text file, a folder of text files, or a Megatron indexed dataset without its .bin/.idx "
        "(default: the standard library's Python source).",
        "Data",
        metavar="PATH",
    )
    tokenizer: str | None = _option(
        None, "A tokenizer.json (default: one is trained on the text).", metavar="PATH"
    )
    tokenizer_vocab_size: int | None = _option(
        None,
        f"Vocabulary of the tokenizer that is trained (default: {TRAINED_VOCABULARY}, or --vocab-size if "
        "less; the model's other ids are padding).",
    )
    eval_interval: int = _option(4, "Steps between evaluations (0: never).")
    eval_iters: int = _option(1, "Steps' worth of microbatches per evaluation.")

    output: str = _option("vocabpar-out", "The results folder.", "Results", metavar="FOLDER")
    resume: bool = _option(False, "Go on from the checkpoints in the folder.")
    overwrite: bool = _option(False, "Replace the results of an earlier job in this folder.")
    log_interval: int = _option(1, "Steps between updates of the progress line.")
    save_interval: int = _option(0, "Steps between checkpoints (0: only at the end).")
    save: bool = _option(True, "Write a checkpoint at the end.")

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
        values = json.loads(text)
        if not isinstance(values, dict):
            raise ValueError(f"a training configuration is a JSON object, not {text[:40]!r}")
        if unknown := sorted(values.keys() - {f.name for f in dataclasses.fields(cls)}):
            raise ValueError(f"unknown fields in a training configuration: {', '.join(unknown)}")
        for name, value in values.items():
            if not _fits(value, _TYPES[name]):
                raise ValueError(f"{name} is {value!r} in a training configuration, which does not fit")
        return cls(**{**values, "compare": tuple(values.get("compare", ()))})


_TYPES = typing.get_type_hints(TrainConfig)


def _fits(value: Any, kind: Any) -> bool:
    if typing.get_origin(kind) is tuple:
        return isinstance(value, list) and all(isinstance(each, str) for each in value)
    kinds = typing.get_args(kind) or (kind,)
    return type(value) in kinds or (float in kinds and type(value) is int)


def flag(name: str) -> str:
    """The command-line flag of a field, such as ``--micro-batch-size``."""
    return "--" + name.replace("_", "-")


def off_flag(name: str) -> str:
    """The flag that unsets a field, such as ``--no-save``."""
    return "--untied" if name == "tied" else flag(f"no_{name}")


def command_line(config: TrainConfig) -> list[str]:
    """The command that asks for ``config``: what differs from the defaults, without resume and overwrite."""
    words = ["vocabpar", "train"]
    for option in dataclasses.fields(TrainConfig):
        value = getattr(config, option.name)
        if value == option.default or option.name in _ONCE:
            continue
        if isinstance(value, bool):
            words.append(flag(option.name) if value else off_flag(option.name))
        else:
            words += [flag(option.name), ",".join(value) if isinstance(value, tuple) else str(value)]
    return words
