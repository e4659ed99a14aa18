"""Small programs that import a Megatron-LM checkout, run by the tests in processes of their own.

``python inside.py CHECKOUT`` reads jobs from its input, a JSON object a line: ``{"program": name, "argv":
Megatron's, "environment": {...}}``; runs each in a fork of itself; and prints what it returns as a line of
JSON. With a second argument, forks find Megatron imported.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import traceback
import typing
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from importlib.util import find_spec
from typing import Any

import typing_extensions

from megatron_vocabpar.megatron_lm.bindings import BINDINGS, recognise
from megatron_vocabpar.megatron_lm.flag_config import FlagConfig
from megatron_vocabpar.megatron_lm.flags import FLAGS, config_from_argv
from megatron_vocabpar.megatron_lm.model_choice import decided
from megatron_vocabpar.megatron_lm.patch import Patch, installed, live_signature
from megatron_vocabpar.megatron_lm.rules.check import declared

if not hasattr(typing, "override"):
    typing.override = typing_extensions.override  # type: ignore[attr-defined]


def _held() -> Iterator[tuple[str, str, Any]]:
    """Every place of the table that this version has: module, name and what it holds.

    A Megatron that has a registry for its schedule (``patches/upstream``) keeps all places of that.
    """
    patch = installed()
    version = recognise(live_signature).version if patch is None else patch.version
    registry = find_spec("megatron.core.pipeline_parallel.schedule_registry")
    for binding in (each for each in BINDINGS if each.is_in(version)):
        if registry is not None and binding.name == "get_forward_backward_func":
            continue
        for place, name in binding.places:
            with suppress(ImportError):
                module = importlib.import_module(place)
                if hasattr(module, name):
                    yield place, name, getattr(module, name)


def _apply(config: FlagConfig) -> Patch:
    from megatron_vocabpar.megatron_lm.replacements import apply  # imports Megatron

    return apply(config)


def _differences(before: list[tuple[str, str, Any]]) -> list[str]:
    return [f"{place}.{name}" for place, name, value in before if vars(sys.modules[place])[name] is not value]


def adaptor(_: list[str]) -> dict[str, Any]:
    """What importing the adaptor after Megatron replaces, and what is left of it after an undo."""
    before = list(_held())
    importlib.import_module("megatron_vocabpar.adaptor")
    replaced = _differences(before)
    patch = installed()
    again = patch is not None and _apply(patch.config) is patch
    if patch is not None:
        patch.undo()
    return {
        "places": [f"{place}.{name}" for place, name, _ in before],
        "replaced": replaced,
        "again": again,
        "left": _differences(before),
    }


def adaptor_first(_: list[str]) -> dict[str, Any]:
    """What modules that are imported after the adaptor take from it."""
    loaded = importlib.import_module("megatron_vocabpar.adaptor") and "megatron" in sys.modules
    held = list(_held())
    replaced = [f"{place}.{name}" for place, name, value in held if "__vocabpar_patch__" in vars(value)]
    return {"megatron was imported": loaded, "replaced": replaced}


def arguments(argv: list[str]) -> dict[str, Any]:
    """Megatron's validated arguments of a command line with our flags."""
    patch = _apply(decided(config_from_argv(argv), argv, int(os.environ["WORLD_SIZE"]))[0])
    module = importlib.import_module("megatron.training.arguments")
    args = module.parse_args(lambda parser: (parser.add_argument("--of-the-script"), parser)[1])
    assert hasattr(args, "of_the_script")
    module.validate_args(args, {"tokenizer_type": "GPT2BPETokenizer"})
    shown = [option.attribute for option in FLAGS] + ["pipeline_model_parallel_layout"]
    return {
        "method": patch.config.method,
        "version": patch.version,
        "args": {name: str(getattr(args, name)) for name in shown},
    }


def parser(_: list[str]) -> dict[str, Any]:
    """The names that Megatron's own parser has in parsed arguments."""
    module = importlib.import_module("megatron.training.arguments")
    found = declared(module.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
    return {"options": sorted(found)}


def refused(argv: list[str]) -> dict[str, Any]:
    """The message with which a command line is refused."""
    try:
        arguments(argv)
    except ValueError as error:
        return {"message": str(error)}
    return {"message": ""}


def run(job: dict[str, Any]) -> dict[str, Any]:
    """The result of a job, or ``{"error": traceback}``."""
    program = {f.__name__: f for f in (adaptor, adaptor_first, arguments, parser, refused)}[job["program"]]
    os.environ |= job["environment"]
    sys.argv = ["pretrain_gpt.py", *job["argv"]]
    try:
        with redirect_stdout(sys.stderr):
            return program(sys.argv[1:])
    except BaseException:
        return {"error": traceback.format_exc()}


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    if len(sys.argv) > 2:
        list(_held())
    for line in sys.stdin:
        if os.fork() == 0:
            print(json.dumps(run(json.loads(line))), flush=True)
            os._exit(0)
        os.wait()
