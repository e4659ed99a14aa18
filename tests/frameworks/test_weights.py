"""Functions that walk parameters do so while the model shows whole layers, iterators as long as they run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from megatron_vocabpar.frameworks import weights
from megatron_vocabpar.frameworks.weights import Walk
from megatron_vocabpar.megatron_lm.bindings import Binding

NAME = Binding("a", "b", (), "")


def test_a_function_runs_on_whole_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Any] = []

    @contextmanager
    def shown(chunks: Any, keep: bool) -> Iterator[None]:
        events.append((chunks, keep))
        yield
        events.append("end")

    monkeypatch.setattr(weights, "whole_layers", shown)

    def load(path: str, model: Any) -> str:
        events.append(path)
        return "loaded"

    assert Walk(NAME, "", "model", iterates=False, writes=True).on_whole_layers(load)("path", "m") == "loaded"
    assert events == [(["m"], True), "path", "end"]

    def export(model: Any, names: str) -> Iterator[str]:
        return iter(names)  # not all are generators

    events.clear()
    walk = Walk(NAME, "", "model", iterates=True, writes=False).on_whole_layers(export)(
        names="xy", model=["m", "n"]
    )
    assert not events
    assert next(walk) == "x"
    assert events == [(["m", "n"], False)]
    assert list(walk) == ["y"]
    assert events[1:] == ["end"]


def test_tasks_prepared_on_another_view_are_refused() -> None:
    def export(model: Any, conversion_tasks: Any = None) -> Iterator[str]:
        raise AssertionError("it would export shards")

    walk = Walk(NAME, "", "model", iterates=True, writes=False).on_whole_layers(export)
    with pytest.raises(ValueError, match="conversion_tasks: they were prepared before"):
        next(walk("m", conversion_tasks=["task"]))
