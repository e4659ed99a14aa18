"""Functions that walk parameters do so while the model shows whole layers, iterators as long as they run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from megatron_vocabpar.frameworks import parameter_walks
from megatron_vocabpar.frameworks.parameter_walks import Walk
from megatron_vocabpar.megatron_lm.bindings import Binding

NAME = Binding("a", "b", (), "")


def test_a_function_runs_on_whole_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Any] = []

    @contextmanager
    def shown(chunks: Any, keep: bool) -> Iterator[None]:
        events.append((chunks, keep))
        yield
        events.append("end")

    monkeypatch.setattr(parameter_walks, "whole_layers", shown)

    def load(path: str, model: Any) -> str:
        events.append(path)
        return "loaded"

    assert Walk(NAME, "model", iterates=False, writes=True).on_whole_layers(load)("path", "m") == "loaded"
    assert events == [(["m"], True), "path", "end"]

    def export(model: Any, names: str) -> Iterator[str]:
        return iter(names)  # not all are generators

    events.clear()
    walk = Walk(NAME, "model", iterates=True, writes=False).on_whole_layers(export)(
        names="xy", model=["m", "n"]
    )
    assert not events
    assert next(walk) == "x"
    assert events == [(["m", "n"], False)]
    assert list(walk) == ["y"]
    assert events[1:] == ["end"]


@dataclass(frozen=True)
class Task:
    """As Bridge's ``WeightConversionTask``, with a few of its fields."""

    param_name: str
    vp_stage: int | None
    megatron_module: torch.nn.Module | None
    param_weight: torch.Tensor | None


def test_tasks_take_the_layers_that_are_shown_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was gathered when they were prepared has been freed from the model and may be old."""
    monkeypatch.setattr(parameter_walks, "whole_layers", lambda *_: nullcontext())
    model = torch.nn.Module()
    model.output_layer, model.decoder = torch.nn.Linear(2, 3), torch.nn.Linear(2, 2)
    old = torch.nn.Linear(2, 3)
    other = Task("decoder.weight", 0, model.decoder, model.decoder.weight.detach())
    elsewhere = Task("embedding.word_embeddings.weight", None, None, None)
    tasks = [elsewhere, other, Task("output_layer.weight", 0, old, old.weight)]

    def export(model: Any, conversion_tasks: Any = None) -> Iterator[Any]:
        yield from conversion_tasks or ["prepared here"]

    walk = Walk(NAME, "model", iterates=True, writes=False).on_whole_layers(export)
    assert list(walk(model)) == ["prepared here"]
    first, second, third = walk([model], conversion_tasks=tasks)
    assert first is elsewhere
    assert second is other
    assert third.megatron_module is model.output_layer
    assert third.param_weight is model.output_layer.weight
