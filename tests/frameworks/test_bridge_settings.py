"""Megatron Bridge's configuration is judged by the rules for Megatron's arguments; Bridge is not needed."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_vocabpar.frameworks.bridge import Checks, as_arguments, unread_in
from megatron_vocabpar.frameworks.install import config_from

CONFIG = config_from({})


class Backend(enum.Enum):
    """As ``AttnBackend``."""

    FLASH = 1


@dataclass
class GPTModelProvider:
    """As Bridge's, with a few of its fields."""

    num_layers: int = 4
    pipeline_model_parallel_size: int = 2
    virtual_pipeline_model_parallel_size: int | None = None
    pipeline_model_parallel_layout: Any = None
    share_embeddings_and_output_weights: bool = False
    attention_backend: Backend = Backend.FLASH
    num_moe_experts: int | None = None
    transformer_impl: str = "local"
    of_tomorrow: list[int] = field(default_factory=list)

    def provide(self) -> None:
        """The model."""


class AdaptedProvider(GPTModelProvider):
    """Builds the same model."""


class VisionProvider(GPTModelProvider):
    """Builds a model of its own."""

    def provide(self) -> None:
        """Another model."""


@dataclass
class HybridModelProvider(AdaptedProvider):
    """As Bridge's, which has a ``provide`` of its own."""

    hybrid_layer_pattern: str = "*-*-"

    def provide(self) -> None:
        """The model."""


@dataclass
class HybridModelConfig:
    """As Bridge's: without ``provide``, and the transformer's fields are in it."""

    transformer: GPTModelProvider = field(default_factory=GPTModelProvider)


@dataclass
class Buffers:
    """As ``DistributedDataParallelConfig``."""

    overlap_param_gather: bool = True
    average_in_collective: bool = True
    grad_reduce_in_fp32: bool = False


@dataclass
class Optimizer:
    """As ``OptimizerConfig``."""

    overlap_param_gather: bool = False
    lr: float = 1e-3


def container(model: Any = None, **sections: Any) -> SimpleNamespace:
    parts = {"model": model or GPTModelProvider(), "ddp": Buffers(), "optimizer": Optimizer(), "peft": None}
    parts["checkpoint"] = SimpleNamespace(ckpt_format="torch_dist")
    return SimpleNamespace(**parts | sections)


def test_fields_have_the_names_of_megatrons_arguments() -> None:
    rows = [["embedding", "decoder"], ["decoder", "mtp", "loss"]]
    model = AdaptedProvider(pipeline_model_parallel_layout=rows, num_moe_experts=8)
    args = as_arguments(container(model))
    assert args.num_experts == 8
    assert args.pipeline_model_parallel_layout == "Et|tmL"
    assert args.overlap_param_gather  # of the buffers, though the optimizer's is not set
    assert args.ddp_average_in_collective
    assert args.untie_embeddings_and_output_weights
    assert args.attention_backend == "FLASH"
    assert args.own_model is None


def test_what_is_refused_is_named_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    updated: list[Any] = []
    update = Checks(CONFIG).updating(updated.append)
    update(container(GPTModelProvider(pipeline_model_parallel_layout="Ettt|tL")))
    assert "as even as can be: Ett|ttL" in capsys.readouterr().out
    assert len(updated) == 1
    model = VisionProvider(virtual_pipeline_model_parallel_size=2, of_tomorrow=[1])
    checkpoint = SimpleNamespace(inprocess_restart=True)
    with pytest.raises(ValueError, match="VOCAB_PARALLEL_FLAGS") as error:
        update(container(model, peft=SimpleNamespace(), checkpoint=checkpoint))
    for reason in (
        "a provider with a model of its own",
        "--inprocess-restart",
        "--vocab-parallel",
    ):
        assert reason in str(error.value)


def test_a_hybrid_has_one_model_chunk_on_each_rank(capsys: pytest.CaptureFixture[str]) -> None:
    check = Checks(CONFIG).updating(lambda _: None)
    check(container(HybridModelProvider()))
    assert "outside" not in capsys.readouterr().out
    check(container(HybridModelProvider(hybrid_layer_pattern="*-|*-")))
    interleaved = config_from({"VOCAB_PARALLEL_FLAGS": "--vocab-parallel-family interleaved"})
    for config, model in (
        (CONFIG, HybridModelProvider(virtual_pipeline_model_parallel_size=2)),
        (CONFIG, HybridModelProvider(hybrid_layer_pattern="*|-|*|-")),
        (interleaved, HybridModelProvider()),
    ):
        with pytest.raises(ValueError, match="HybridModelProvider with several model chunks: it builds one"):
            Checks(config).updating(lambda _: None)(container(model))
    with pytest.raises(ValueError, match="a provider with a model of its own"):
        check(container(HybridModelConfig()))


class LoRA:
    """Adapters, as Bridge's."""


def test_adapters_go_with_weight_gradients_in_b(capsys: pytest.CaptureFixture[str]) -> None:
    sections = {"peft": LoRA(), "model": GPTModelProvider()}
    Checks(CONFIG).updating(lambda _: None)(container(**sections))
    split = config_from({"VOCAB_PARALLEL_FLAGS": "--vocab-parallel-family zb-h1"})
    with pytest.raises(ValueError, match="peft: --vocab-parallel-family zb-h1 splits off weight gradients"):
        Checks(split).updating(lambda _: None)(container(**sections))
    Checks(CONFIG).updating(lambda _: None)(container(peft=SimpleNamespace()))
    assert "  peft other than LoRA: other adapters have not been read" in capsys.readouterr().out


def test_a_changed_field_that_has_not_been_read_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(unread_in(container())) == []
    assert list(unread_in(container(ddp=Buffers(grad_reduce_in_fp32=True)))) == []
    changed = container(GPTModelProvider(of_tomorrow=[1]))
    assert list(unread_in(changed)) == ["model.of_tomorrow [1]"]
    Checks(CONFIG).updating(lambda _: None)(changed)
    assert "  model.of_tomorrow [1]: its effect" in capsys.readouterr().out
    strict = config_from({"VOCAB_PARALLEL_FLAGS": "--vocab-parallel-strict"})
    with pytest.raises(ValueError, match=r"model.of_tomorrow \[1\]: its effect"):
        Checks(strict).updating(lambda _: None)(changed)


def test_a_provider_without_a_container_is_checked_with_its_adapter(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As verl makes it; one of a container has been checked."""
    checks = Checks(config_from({"VOCAB_PARALLEL_FLAGS": "--vocab-parallel-family zb-h1"}))
    made: list[Any] = []
    provide = checks.providing(lambda provider, ddp_config=None, **_: made.append(provider))
    adapt = checks.adapting(lambda peft, **_: peft)
    model = GPTModelProvider(of_tomorrow=[1])
    provide(model, ddp_config=Buffers(), bf16=True)
    assert "  model.of_tomorrow [1]: its effect" in capsys.readouterr().out
    adapt(LoRA(), training=True)
    wrong = GPTModelProvider(virtual_pipeline_model_parallel_size=2)
    with pytest.raises(ValueError, match="peft: --vocab-parallel-family zb-h1") as error:
        provide(wrong, wrap_with_ddp=False)
    assert "needs 1 model chunks per rank, not 2" in str(error.value)
    provide(GPTModelProvider())  # its next model has none
    assert capsys.readouterr().out == ""
    provide(HybridModelProvider())
    assert "  model: HybridModelProvider outside Bridge's own training: such" in capsys.readouterr().out
    assert len(made) == 3
    checks.updating(lambda _: None)(container(model))
    capsys.readouterr()
    provide(model)
    assert capsys.readouterr().out == ""
