"""Names are replaced wherever a framework holds them, and what cannot be run is refused."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
import types
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.models.gpt import gpt_model as gpt
from megatron.core.pipeline_parallel import schedules

from megatron_vocabpar.frameworks import install as installing
from megatron_vocabpar.frameworks.bridge import ADAPT, PROVIDE, UPDATE
from megatron_vocabpar.frameworks.install import config_from, install
from megatron_vocabpar.frameworks.parameter_walks import WALKS
from megatron_vocabpar.frameworks.replaced_functions import (
    FUNCTIONS,
    LABELS,
    MEGATRON,
    REFUSED,
    SAVED,
    refusing,
)
from megatron_vocabpar.frameworks.runner import StepRunner
from megatron_vocabpar.megatron_lm.bindings import DetectedMegatron
from megatron_vocabpar.megatron_lm.patch import has_name, original_of
from megatron_vocabpar.pipeline.model.stage_model import PartitionedModel
from tests.spawn import run_ranks

OF_FRAMEWORKS = (
    *(*FUNCTIONS, *LABELS, *REFUSED, *SAVED, UPDATE, PROVIDE, ADAPT),
    *(walk.binding for walk in WALKS),
)


def test_every_copy_is_reached_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[tuple[Any, str, Any]] = []
    for binding in (*filter(has_name, MEGATRON), *OF_FRAMEWORKS):
        original: Any = lambda *_: None  # noqa: E731
        if binding in MEGATRON:
            original = original_of(binding)
        for place, name in binding.places:
            if not place.startswith("megatron.core") and place != "__main__":
                module = sys.modules.get(place)
                if not isinstance(module, types.ModuleType) or not hasattr(module, "made_up"):
                    module = types.ModuleType(place)
                    module.made_up = True  # type: ignore[attr-defined]
                    monkeypatch.setitem(sys.modules, place, module)
                owner, _, name = name.rpartition(".")
                holder = vars(module).setdefault(owner, type(owner, (), {})) if owner else module
                setattr(holder, name, original)
                held.append((holder, name, original))
    patch = install(config_from({}))
    try:
        assert [f"{m.__name__}.{n}" for m, n, original in held if getattr(m, n) is original] == []
    finally:
        patch.undo()
    assert [f"{m.__name__}.{n}" for m, n, original in held if getattr(m, n) is not original] == []
    names = {f"{module.__name__}.{name}" for module, name, _ in held}
    assert {
        "verl.workers.engine.megatron.transformer_impl.get_forward_backward_func",
        "slime.backends.megatron_utils.model.get_forward_backward_func",
        "megatron.bridge.training.train.get_forward_backward_func",
        "megatron.bridge.training.eval.get_forward_backward_func",
        "megatron.bridge.models.gpt_provider.MCoreGPTModel",
        "slime.backends.megatron_utils.actor.named_params_and_buffers",
        "megatron.bridge.training.pretrain.runtime_config_update",
        "Bridge.export_weights",
    } <= names


def _write_modules(folder: Path) -> None:
    """A file for each module of ``OF_FRAMEWORKS``, with its functions and classes."""
    defined: dict[str, dict[str, list[str]]] = {}
    for binding in OF_FRAMEWORKS:
        owner, _, name = binding.name.rpartition(".")
        defined.setdefault(binding.module, {}).setdefault(owner, []).append(name)
    for module, owners in defined.items():
        path = folder.joinpath(*module.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w") as file:
            for owner, names in owners.items():
                file.write(f"class {owner}:\n" if owner else "")
                indent = "    " if owner else ""
                file.writelines(f"{indent}def {name}(model): pass\n" for name in names)


def test_what_is_imported_later_is_reached_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write_modules(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    before, finders = {*sys.modules}, [*sys.meta_path]
    patch = install(config_from({}))
    try:
        assert {*sys.modules} == before  # we import nothing of theirs
        assert importlib.util.find_spec("mbridge.core.bridge") is not None  # nor does who asks for it
        for binding in OF_FRAMEWORKS:
            importlib.import_module(binding.module)
            assert hasattr(original_of(binding), "__wrapped__"), binding
        late = sys.modules["mbridge.core.bridge"]
        assert "exec_module" not in vars(late.__loader__)
        patch.undo()
        assert [b for b in OF_FRAMEWORKS if hasattr(original_of(b), "__wrapped__")] == []
        assert sys.meta_path == finders
    finally:
        patch.undo()
        for name in {*sys.modules} - before:
            del sys.modules[name]


WITHOUT_A_DOOR = [
    ("nemo_rl", "NeMo-RL: its losses take logits"),
    ("skyrl", "SkyRL: its losses take logits"),
]


@pytest.mark.parametrize(("package", "says"), WITHOUT_A_DOOR)
def test_what_has_no_door_is_told_why(package: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
    before = gpt.GPTModel, schedules.get_forward_backward_func
    with pytest.raises(ValueError, match=says):
        install(config_from({}))
    assert before == (gpt.GPTModel, schedules.get_forward_backward_func)


@pytest.mark.parametrize(("package", "says"), WITHOUT_A_DOOR)
def test_it_is_told_so_if_it_is_imported_later(
    package: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch = install(config_from({}))
    try:
        monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
        with pytest.raises(ValueError, match=says):
            gpt.GPTModel()
    finally:
        patch.undo()


@pytest.mark.parametrize(
    "flags",
    ["--vocab-parallel-family v-half", "--vocab-parallel-family auto", "--vocab-parallel-timeline 3"],
)
def test_flags_without_a_use_are_refused(flags: str) -> None:
    assert config_from({}).method == "vocab-2"
    with pytest.raises(ValueError, match="VOCAB_PARALLEL_FLAGS"):
        config_from({"VOCAB_PARALLEL_FLAGS": flags})


@pytest.mark.parametrize(
    "flag",
    [
        "--vocab-parallel-timeline 3",
        "--vocab-parallel-costs costs.json",
        "--vocab-parallel-layout auto",
        "--vocab-parallel-metrics entropy",
        "--enable-layer-redistribution",
    ],
)
def test_a_refused_flag_is_named_as_it_is_written(flag: str) -> None:
    with pytest.raises(ValueError, match=f"and not {flag}$"):
        config_from({"VOCAB_PARALLEL_FLAGS": flag})


def test_a_registry_of_megatrons_takes_the_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of ``patches/upstream``: Megatron's own function stays where it is."""
    registered: list[Any] = []
    registry = types.ModuleType("megatron.core.pipeline_parallel.schedule_registry")

    def register(wrapper: Any) -> Any:
        registered.append(wrapper)
        return lambda: registered.remove(wrapper)

    registry.register_forward_backward_func = register  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, registry.__name__, registry)
    original = schedules.get_forward_backward_func
    model = gpt.GPTModel
    patch = install(config_from({}))
    try:
        assert schedules.get_forward_backward_func is original
        assert gpt.GPTModel is not model
        (wrapper,) = registered
        arguments = {"model": [torch.nn.Linear(1, 1)], "num_microbatches": 3}
        assert wrapper(lambda **given: [given["num_microbatches"]])(**arguments) == [3]
    finally:
        patch.undo()
    assert registered == []
    assert gpt.GPTModel is model


def test_other_models_run_stocks_function() -> None:
    run = StepRunner(config_from({}))
    stock = lambda **arguments: ["stock's", arguments["num_microbatches"]]  # noqa: E731
    assert run(stock, model=[torch.nn.Linear(1, 1)], num_microbatches=3) == ["stock's", 3]


def test_a_release_that_has_not_been_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    patch = install(config_from({}))
    try:
        monkeypatch.setitem(sys.modules, "slime", types.ModuleType("slime"))
        with pytest.raises(ValueError, match=r"slime  has none of slime.utils.ppo_utils.*docs/frameworks.md"):
            gpt.GPTModel()
    finally:
        patch.undo()


def test_what_changes_the_model_is_refused_for_ours_alone() -> None:
    for binding, remedy in REFUSED.items():
        refuse = refusing(binding, lambda *given: ["stock's", *given])
        ours = PartitionedModel.__new__(PartitionedModel)
        torch.nn.Module.__init__(ours)
        for given in ((ours,), ("bridge", [ours])):
            with pytest.raises(ValueError, match=re.escape(remedy)):
                refuse(*given)
        other = torch.nn.Linear(1, 1)
        assert refuse(other) == ["stock's", other]


def test_verls_plugin_waits_to_be_asked() -> None:
    program = "import sys, megatron_vocabpar.frameworks.verl_plugin; sys.exit('megatron.core' in sys.modules)"
    environment = {name: value for name, value in os.environ.items() if name != "VOCAB_PARALLEL_FLAGS"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def _load_verls_plugin(_: int, flags: str) -> tuple[int, str]:
    """The code with which the process would end, and what it says; verl catches every ``Exception``."""
    os.environ["VOCAB_PARALLEL_FLAGS"] = flags
    for name in ("door", "verl_plugin"):
        sys.modules.pop(f"megatron_vocabpar.frameworks.{name}", None)
    stock, code = schedules.get_forward_backward_func, 0
    with redirect_stderr(StringIO()) as errors:
        try:
            importlib.import_module("megatron_vocabpar.frameworks.verl_plugin")
        except SystemExit as end:
            code = int(end.code or 0)
    assert (schedules.get_forward_backward_func is stock) == bool(code)
    return code, errors.getvalue()


@pytest.mark.parametrize(
    ("flags", "expected", "code"),
    [
        ("--enable-vocab-parallel", "megatron_vocabpar: on in verl: --enable-vocab-parallel", 0),
        ("--vocab-parallel-family v-half", "vocabulary parallelism in verl: VOCAB_PARALLEL_FLAGS", 1),
    ],
)
def test_verls_plugin_opens_the_door_or_ends_the_process(flags: str, expected: str, code: int) -> None:
    ((found, said),) = run_ranks(1, _load_verls_plugin, flags, fresh=True)
    assert (found, expected in said) == (code, True), said


def test_a_megatron_that_has_not_been_read_is_a_warning_and_strictly_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tomorrow = DetectedMegatron("unknown", "this version of Megatron: GPTModel.forward with news")
    monkeypatch.setattr(installing, "recognise", lambda *_, **__: tomorrow)
    with pytest.warns(UserWarning, match="not run with this version of Megatron: .* with news"):
        install(config_from({})).undo()
    strict = config_from({"VOCAB_PARALLEL_FLAGS": "--vocab-parallel-strict"})
    with pytest.raises(ValueError, match="--vocab-parallel-strict refuses this version"):
        install(strict)
