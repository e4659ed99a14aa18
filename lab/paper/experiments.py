"""The experiments of a CSV file: one row a training, with the sizes of the paper's Tables 1, 2 and 7.

Next: ``command.py``, the launch line of a row.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lab.paper.rows import CsvRow, read_rows
from megatron_vocabpar.schedule.make.families import family_named
from megatron_vocabpar.schedule.words.methods import METHODS

_SMALL: dict[str, Any] = {
    "gpus": 2,
    "tp": 1,
    "layers": 4,
    "hidden": 32,
    "heads": 4,
    "seq_length": 64,
    "vocab_k": 16,  # a multiple of 128 ids, so that stock pads nothing
    "microbatches": 8,
    "iterations": 8,
    "warmup": 2,
    "lr": 1e-3,
}


@dataclass(frozen=True)
class Experiment:
    """One training."""

    name: str  # its folder among the results; unique in a file
    gpus: int  # pipeline stages times tp
    tp: int
    family: str  # baseline in 1f1b is stock Megatron
    method: str
    layers: int
    hidden: int
    heads: int
    seq_length: int
    vocab_k: int  # thousands of ids, the end-of-document id included
    micro_batch: int
    microbatches: int
    iterations: int  # of which the first ``warmup`` do not count for times
    warmup: int
    lr: float

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"unknown method {self.method!r}; choose one of {', '.join(METHODS)}")
        family_named(self.family)
        for name, value in vars(self).items():
            if not isinstance(value, str) and not (math.isfinite(value) and (value > 0 or name == "warmup")):
                raise ValueError(f"{name} is {value}; give a number above 0")
        if not self.name or Path(self.name).name != self.name:
            raise ValueError(f"the name {self.name!r} cannot be a folder's; give a word")
        if self.gpus % self.tp:
            raise ValueError(f"{self.gpus} GPUs are not a multiple of {self.tp} tensor-parallel ranks")
        if self.hidden % self.heads:
            raise ValueError(f"hidden {self.hidden} is not a multiple of {self.heads} heads")
        if not 0 <= self.warmup < self.iterations:
            raise ValueError(f"{self.warmup} warm-up iterations of {self.iterations}; leave one to measure")

    @property
    def vocab_size(self) -> int:
        return 1000 * self.vocab_k

    @property
    def tokens(self) -> int:
        return self.microbatches * self.micro_batch * self.seq_length

    @property
    def setting(self) -> Experiment:
        """The experiment's sizes; equal for the same training by another method."""
        return replace(self, name="setting", method="baseline", iterations=1, warmup=0)


def read_experiments(path: Path) -> list[Experiment]:
    """The rows of a CSV file whose header names the fields of ``Experiment``."""
    experiments: dict[str, Experiment] = {}
    for row in read_rows(path, "experiments", [field.name for field in dataclasses.fields(Experiment)]):
        experiment = _experiment(row)
        if experiment.name in experiments:
            raise ValueError(f"{row.where}: a second {experiment.name!r}; rename it")
        experiments[experiment.name] = experiment
    return list(experiments.values())


def small(experiments: list[Experiment]) -> list[Experiment]:
    """The experiments of ``--smoke``: each family and method of the rows once, for two CPU processes."""
    return [
        Experiment(name=f"{family}-{method}", family=family, method=method, micro_batch=1, **_SMALL)
        for family, method in dict.fromkeys((e.family, e.method) for e in experiments)
    ]


def _experiment(row: CsvRow) -> Experiment:
    values: dict[str, Any] = {}
    for name, kind in typing.get_type_hints(Experiment).items():
        try:
            values[name] = kind(row.cells[name])
        except ValueError:
            row.refuse(name, "a number")
    try:
        return Experiment(**values)
    except ValueError as error:
        raise ValueError(f"{row.where}: {error}") from error
