"""What verbs share: options of a record, ``--format``, names that a shell completes, files, progress."""

from __future__ import annotations

import gc
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from megatron_vocabpar.option import Option, options_of, value_types, wrong_values
from megatron_vocabpar.schedule.data.schema import read_object, text_of
from megatron_vocabpar.schedule.plan import Plan
from megatron_vocabpar.schedule.serialize import plan_from_json
from megatron_vocabpar.schedule.times.costs import PassCosts

FORMAT = click.option(
    "--format", "output_format", type=click.Choice(["text", "json"]), default="text", help="What to print."
)


def completing(names: Iterable[str]) -> Callable[..., list[str]]:
    """For ``shell_complete``: completes the last part of what is typed to each of ``names``, in any case.

    Parts end at "," and ":", as in ``baseline,vocab-2`` and ``v-half:vocab-2``.
    """

    def complete(_: click.Context, parameter: click.Parameter, typed: str) -> list[str]:
        begun = re.split("[,:]", typed)[-1]
        before = typed.removesuffix(begun)
        return [before + name for name in names if name.lower().startswith(begun.lower())]

    return complete


def click_option(record: type, name: str, off: str = "") -> click.Option:
    """The option of a record's field; a tuple of names is one text, with commas between the names.

    Args:
        off: the flag that unsets a switch, if there is one.
    """
    each, kind, default = options_of(record)[name], value_types(record)[name], getattr(record, name)
    flag = flag_of(name, each)
    choices = f"[{'|'.join(each.choices)}]" if each.choices else None
    return click.Option(
        [f"{flag}/{off}" if off else flag, name],
        type=kind,
        **({"is_flag": False, "flag_value": each.alone} if each.alone else {"is_flag": kind is bool}),
        default=None if default == () else default,
        metavar=each.metavar or choices,
        shell_complete=completing(each.choices),
        help=each.help,
    )


def click_options(record: type) -> list[click.Parameter]:
    """The options of all fields of a record, in their order."""
    return [click_option(record, name) for name in options_of(record)]


def check_options(record: Any) -> None:
    """Refuse the first value beyond an option's limits, by ValueError with a remedy."""
    options = options_of(record)
    for wrong in wrong_values(record, lambda name, value: f"{flag_of(name, options[name])} {value}"):
        raise ValueError(f"{wrong.asked}: {wrong.against}")


def flag_of(name: str, each: Option) -> str:
    """The flag of a record's field, such as ``--micro-batch-size``."""
    return each.flag or f"--{name.replace('_', '-')}"


@contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Stop garbage collection inside: millions of passes live to the end, and scanning them is slow."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def read_plan(path: str, costs: PassCosts | None) -> Plan:
    """The plan in a file, checked; ``costs`` win over its own.

    Args:
        path: of a schedule, or of the measured plan that a training keeps beside its checkpoints; ``-`` is
            standard input.

    Raises:
        ValueError: naming the file, and what is wrong with it.
    """
    text = sys.stdin.read() if path == "-" else text_of(path, f"the schedule {path}")
    try:
        plan = plan_from_json(_plan_of_kept(text), costs)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return plan if costs is None else replace(plan, costs=costs)


def _plan_of_kept(text: str) -> str:
    """The plan alone of a file of ``megatron_lm/kept_plan.py``; another text as it is."""
    kept = read_object(text, "the schedule") if '"digest"' in text else {}
    return json.dumps(kept["plan"]) if "plan" in kept else text


def write_output(path: str, content: str, option: str = "--output") -> None:
    """Write text, with a line end at its end, to a file; ``-`` is standard output."""
    if path == "-":
        click.echo(content.removesuffix("\n"))
        return
    try:
        Path(path).write_text(content if content.endswith("\n") else content + "\n", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}; give another {option}") from error


def will_be_written(_: click.Context, option: click.Parameter, path: str | None) -> str | None:
    """Callback of an option whose file is written after long work: refuse a bad path before the work."""
    if path not in (None, "-") and (Path(path).is_dir() or not Path(path).parent.is_dir()):
        raise ValueError(
            f"cannot write {path}: it is a folder, or its folder is missing; give another {option.opts[0]}"
        )
    return path


def is_quiet() -> bool:
    """Whether ``vocabpar --quiet`` runs."""
    context = click.get_current_context(silent=True)
    return bool(context and context.find_root().params.get("quiet"))


def tell(text: str) -> None:
    """Print a line about progress to standard error, for work of more than a few seconds."""
    if not is_quiet():
        click.echo(f"vocabpar: {text}", err=True)
