"""``TrainConfig``: everything that one training job is told, in one frozen record.

The command line's options are generated from these fields (their flag, help and default stand here and
nowhere else); the launcher hands the record to its workers as JSON.
Next: ``check.py`` (what must hold between the fields), then ``job.py`` (what is done with them).
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from megatron_vocabpar.schedule.families import SEARCH, families

POSITIONS = ("learned", "rope")
DTYPES = ("fp32", "bf16")
DEVICES = ("auto", "cpu", "cuda")
FAMILIES = (*families(), SEARCH)


def _option(
    default: Any,
    section: str,
    help: str,
    *,
    choices: tuple[str, ...] | None = None,
    off: str | None = None,
    metavar: str | None = None,
) -> Any:
    """A field and its option: section of ``--help``, help text, choices, or the flag that unsets it."""
    return field(
        default=default,
        metadata={"section": section, "help": help, "choices": choices, "off": off, "metavar": metavar},
    )


@dataclass(frozen=True)
class TrainConfig:
    """One training job. Sizes are counts; ``None`` means "derived", by the property named in the comment."""

    method: str = _option("vocab-2", "Method", "How the vocabulary layers are placed and scheduled.")
    compare: tuple[str, ...] = _option(
        (),
        "Method",
        "Train with these methods too, in schedules of the same family, and overlay the curves.",
        metavar="METHOD[,METHOD…]",
    )
    final_stage_layers: int | None = _option(
        None, "Method", "redis: transformer layers on the last stage (default: balanced by FLOPs)."
    )

    family: str = _option(
        "1f1b",
        "Schedule",
        "What the vocabulary passes are woven into, for every method of the job; search: the fastest found "
        "in all families, which takes some seconds.",
        choices=FAMILIES,
    )
    chunks: int | None = _option(
        None, "Schedule", "Model chunks on each rank (default: the family's own number; search: any)."
    )
    max_activations: float | None = _option(
        None,
        "Schedule",
        "Most microbatches whose activations a rank may hold, at least 1 (default: what the family needs; "
        "search: what 1f1b needs).",
    )
    costs: str | None = _option(
        None,
        "Schedule",
        "Times of the passes as JSON, to make the schedule for (default: the paper's proportions).",
        metavar="FILE",
    )

    pp: int = _option(4, "Processes", "Pipeline stages.")
    tp: int = _option(1, "Processes", "Tensor-parallel ranks per stage.")
    dp: int = _option(1, "Processes", "Data-parallel replicas.")
    sequence_parallel: bool = _option(
        True, "Processes", "Sequence parallelism where --tp is above 1.", off="--no-sequence-parallel"
    )
    distributed_optimizer: bool = _option(
        False, "Processes", "Shard the optimizer state over the replicas.", off="--no-distributed-optimizer"
    )
    overlap_grad_reduce: bool = _option(
        False, "Processes", "Reduce gradients while the backward runs.", off="--no-overlap-grad-reduce"
    )
    device: str = _option("auto", "Processes", "auto: a GPU a process, or the CPU.", choices=DEVICES)

    layers: int = _option(8, "Model", "Transformer layers.")
    hidden: int = _option(128, "Model", "Hidden size.")
    heads: int = _option(4, "Model", "Attention heads.")
    ffn: int | None = _option(None, "Model", "Feed-forward size (default: 4 × hidden).")
    seq_length: int = _option(128, "Model", "Tokens per sequence.")
    vocab_size: int = _option(8192, "Model", "Vocabulary of the model, at least the tokenizer's.")
    tied: bool = _option(False, "Model", "One weight for the input and output layers.", off="--untied")
    position: str = _option("learned", "Model", "Position embedding.", choices=POSITIONS)
    dtype: str = _option("fp32", "Model", "bf16 keeps main gradients in fp32.", choices=DTYPES)

    micro_batch_size: int = _option(2, "Training", "Sequences per microbatch.")
    microbatches: int = _option(8, "Training", "Microbatches per step and data-parallel replica.")
    steps: int = _option(60, "Training", "Optimizer steps in all, those before a resume included.")
    lr: float = _option(1e-3, "Training", "Learning rate.")
    warmup: int = _option(10, "Training", "Steps of linear warm-up (fewer than --steps).")
    weight_decay: float = _option(0.01, "Training", "Weight decay.")
    clip_grad: float = _option(1.0, "Training", "Largest gradient norm (0: do not clip).")
    seed: int = _option(1234, "Training", "Seed of the weights and of the order of the data.")

    text: str | None = _option(
        None,
        "Data",
        "A text file, a folder of text files, or a Megatron indexed dataset without its .bin/.idx "
        "(default: the standard library's Python source).",
        metavar="PATH",
    )
    tokenizer: str | None = _option(
        None, "Data", "A tokenizer.json (default: one is trained on the text).", metavar="PATH"
    )
    tokenizer_vocab_size: int | None = _option(
        None, "Data", "Vocabulary of the tokenizer that is trained (default: --vocab-size)."
    )
    eval_interval: int = _option(20, "Data", "Steps between evaluations (0: never).")
    eval_iters: int = _option(2, "Data", "Steps' worth of microbatches per evaluation.")

    output: str = _option("vocabpar-out", "Results", "The results folder.", metavar="FOLDER")
    resume: bool = _option(False, "Results", "Go on from the checkpoints in the folder.", off="--no-resume")
    overwrite: bool = _option(
        False, "Results", "Replace the results of an earlier job in this folder.", off="--no-overwrite"
    )
    log_interval: int = _option(1, "Results", "Steps between updates of the progress line.")
    save_interval: int = _option(0, "Results", "Steps between checkpoints (0: only at the end).")
    save: bool = _option(True, "Results", "Write a checkpoint at the end.", off="--no-save")

    @property
    def world_size(self) -> int:
        """Processes in all."""
        return self.pp * self.tp * self.dp

    @property
    def ffn_hidden(self) -> int:
        """Feed-forward size: ``ffn``, or 4 × ``hidden``."""
        return 4 * self.hidden if self.ffn is None else self.ffn

    @property
    def use_sequence_parallel(self) -> bool:
        """Whether sequences are split over tensor-parallel ranks."""
        return self.sequence_parallel and self.tp > 1

    @property
    def tokenizer_size(self) -> int:
        """Vocabulary of the tokenizer that is trained: ``tokenizer_vocab_size``, or ``vocab_size``."""
        return self.vocab_size if self.tokenizer_vocab_size is None else self.tokenizer_vocab_size

    @property
    def methods(self) -> tuple[str, ...]:
        """``method`` and those to compare it with, each once, in order."""
        return tuple(dict.fromkeys((self.method, *self.compare)))

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step sees, over all replicas."""
        return self.dp * self.microbatches * self.micro_batch_size * self.seq_length

    def to_json(self) -> str:
        """The record as indented JSON."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> TrainConfig:
        """Read ``to_json`` back.

        Raises:
            ValueError: if ``text`` is not such a record, or has fields that this version does not know.
        """
        values = json.loads(text)
        if not isinstance(values, dict):
            raise ValueError(f"a training configuration is a JSON object, not {text[:40]!r}")
        unknown = sorted(values.keys() - {f.name for f in dataclasses.fields(cls)})
        if unknown:
            raise ValueError(f"unknown fields in a training configuration: {', '.join(unknown)}")
        return cls(**{**values, "compare": tuple(values.get("compare", ()))})


def flag(name: str) -> str:
    """The command-line flag of a field, such as ``--micro-batch-size``."""
    return "--" + name.replace("_", "-")


def command_line(config: TrainConfig) -> list[str]:
    """The command that asks for ``config``: what differs from the defaults, without resume and overwrite."""
    words = ["vocabpar", "train"]
    for option in dataclasses.fields(TrainConfig):
        value = getattr(config, option.name)
        if value == option.default or option.name in ("resume", "overwrite"):
            continue
        if isinstance(value, bool):
            words.append(flag(option.name) if value else option.metadata["off"])
        else:
            words += [flag(option.name), ",".join(value) if isinstance(value, tuple) else str(value)]
    return words
