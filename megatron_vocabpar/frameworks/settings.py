"""Checks of a framework's settings, for all doors. Standard library only. Next: ``bridge.py``."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from megatron_vocabpar.megatron_lm.flag_config import FlagConfig
from megatron_vocabpar.megatron_lm.layouts import layout_notice
from megatron_vocabpar.megatron_lm.rules.check import REVIEW_OF, UNREAD, check
from megatron_vocabpar.pipeline.rules.rule import Table

_SAME: Mapping[str, str] = MappingProxyType({})


def judge(settings: Any, config: FlagConfig, fields: Iterable[str], rules: Table) -> None:
    """Refuse what we cannot run, and warn of the rest on rank 0.

    Args:
        settings: values by the names of Megatron's arguments.
        fields: changed fields whose effect has not been read, from ``unread``.
        rules: rules about settings that the framework has and Megatron's arguments do not have.

    Raises:
        ValueError: naming everything that is refused, each with a remedy.
    """
    said = [f"{field}: {UNREAD}" for field in fields]
    warning = check(settings, config, said, title="VOCAB_PARALLEL_FLAGS", more=rules)
    if os.environ.get("RANK", "0") == "0":
        for line in filter(None, (layout_notice(settings), warning)):
            print(line, flush=True)


def unread(
    config: Any,
    fields: Iterable[dataclasses.Field[Any]],
    read: frozenset[str],
    names: Mapping[str, str] = _SAME,
) -> Iterator[str]:
    """Fields of ``config`` that a user changed and that have not been read, each with its value.

    Args:
        read: names of fields without an argument of Megatron whose effect has been read.
        names: from a field's name to its argument's, where the two differ.
    """
    for field in fields:
        name, value = names.get(field.name, field.name), getattr(config, field.name)
        if name.startswith("_") or name in REVIEW_OF or field.name in read or name in read:
            continue
        if value and value != _default(field):
            yield f"{field.name} {str(value)[:40]}"


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default
