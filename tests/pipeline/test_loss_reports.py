"""Which microbatch and pass a loss that is not finite, or not linear, is reported of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.rerun_state_machine import get_rerun_state_machine

from megatron_vocabpar.pipeline import loss_reports, preparation
from megatron_vocabpar.pipeline.loss_reports import LossReports
from megatron_vocabpar.pipeline.recording import ModelCall


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 7, and a loss function whose gradient is what the losses of its first token are."""

    def loss_and_gradient(
        _call: Any, token_losses: torch.Tensor, values: dict[str, torch.Tensor], **_: Any
    ) -> Any:
        assert "correct" not in values  # given for the log of further heads, and not asked for
        slope = torch.full_like(token_losses, float(token_losses[0, 0]))
        return [{}], 0, slope, values.get("entropy")

    monkeypatch.setattr(loss_reports.dist, "get_rank", lambda: 7)
    monkeypatch.setattr(loss_reports.compat, "loss_and_gradient", loss_and_gradient)


def iteration(told: list[str] | None = None, loss_func: Any = lambda losses, entropy: None) -> Any:
    """What ``LossReports`` looks at, on the rank of the loss; announced is a gradient of 1."""
    method = SimpleNamespace(late_gradient=False)
    options = SimpleNamespace(entropy=True, entropy_gradient=False, accuracy=False, target_rank=False)
    options.distillation = None
    tell = None if told is None else told.append
    call = SimpleNamespace(
        chunks=[None], config=None, num_microbatches=4, cp_group_size=1, collect_non_loss_data=False,
        forward_only=False,
    )  # fmt: skip
    return SimpleNamespace(
        rank=SimpleNamespace(
            not_finite=tell,
            has_loss=True,
            pipeline_rank=3,
            method=method,
            output_options=options,
        ),
        call=call,
        with_loss=[SimpleNamespace(loss_func=loss_func)] * 4,
        microbatches=SimpleNamespace(gradient=lambda _: torch.ones(1, 2)),
        reported=[],
        num_tokens=0,
        checks=[],
    )


def finish(reports: LossReports) -> None:
    """What the end of an iteration has checked when everything is queued."""
    reports.finish()
    for check in reports.iteration.checks:
        check()


@pytest.mark.parametrize("watched", [True, False])
def test_the_first_loss_that_is_not_finite_is_told_where_it_is_looked_for(watched: bool) -> None:
    told: list[str] = []
    reports = LossReports(iteration(told if watched else None))
    for i, hidden, loss in ((0, 1.0, 1.0), (2, 1.0, float("inf")), (1, float("nan"), float("nan"))):
        reports.hidden(i, torch.tensor([[1.0, hidden]]))
        reports.report(i, torch.tensor([[1.0, loss]]))
    finish(reports)
    assert told == ["rank 7: the loss of microbatch 1 is not finite, first before pass 3S1"][: int(watched)]
    told.clear()
    reports = LossReports(iteration(told if watched else None))
    reports.hidden(2, torch.ones(1, 2))
    reports.report(2, torch.tensor([[1.0, float("nan")]]))
    finish(reports)
    assert told == ["rank 7: the loss of microbatch 2 is not finite, first in pass 3S2"][: int(watched)]


def test_the_first_microbatch_whose_loss_is_not_linear_is_named() -> None:
    reports = LossReports(iteration())
    for i, slope in ((0, 1.0), (2, 3.0), (1, 2.0)):
        reports.report(i, torch.tensor([[slope, 1.0]]))
    told = "rank 7, microbatch 1: the loss function is not linear.*late_gradient=True"
    with pytest.raises(ValueError, match=told):
        finish(reports)


def test_a_loss_of_entropies_whose_gradient_was_not_asked_for_is_named() -> None:
    reports = LossReports(iteration())
    for i, entropy in ((0, None), (2, torch.ones(1, 1, 2))):
        reports.report(i, torch.ones(1, 2), entropy, wins=torch.ones(1, 1, 2))
    with pytest.raises(ValueError, match="rank 7, microbatch 2: the loss depends on the entropies, whose"):
        finish(reports)


@pytest.mark.parametrize(
    ("late", "loss_func", "why"),
    [
        (True, lambda losses: None, "no parameter entropy and no correct.*: with late gradients it need not"),
        (False, lambda losses: None, "no parameter entropy and no correct.*: it reports nothing by name"),
        (
            False,
            lambda losses, entropy: None,
            "no parameter correct.*: it takes entropy; .* ask for accuracy",
        ),
        (False, lambda *losses, **options: None, "no parameter entropy and no correct.*: it reports nothing"),
        (False, print, "no parameter entropy and no correct.*: it reports nothing"),
    ],
)
def test_no_mean_of_entropies_is_made_up(late: bool, loss_func: Any, why: str) -> None:
    """Where the loss function does not take them, and need not be linear, or reports nothing."""
    given = iteration(loss_func=loss_func)
    given.rank.method.late_gradient, given.rank.output_options.accuracy = late, True
    with pytest.raises(ValueError, match=why):
        LossReports(given).report(0, torch.ones(1, 2), torch.ones(1, 1, 2), torch.ones(1, 1, 2))


def test_what_a_loss_function_reports_is_not_overwritten() -> None:
    reported = {"tokens": torch.tensor(2), "lm loss": torch.tensor(1.0)}
    loss_func = lambda losses: (losses.sum(), {"tokens": torch.tensor(2), "lm loss": losses.mean()})  # noqa: E731
    metrics = loss_reports._with_metrics(reported, loss_func, {"entropy": torch.tensor([3.0, 5.0])}, "")
    assert metrics == {**reported, "entropy": torch.tensor(4.0)}
    with pytest.raises(ValueError, match="it reports entropy of its own; give it the parameter"):
        loss_reports._with_metrics(metrics, loss_func, {"entropy": torch.ones(2)}, "")


def test_only_the_true_losses_are_validated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those of 1 whose gradient is sent ahead, nor what takes the losses' place: the host would wait."""
    monkeypatch.undo()
    looked_at: list[float] = []

    def loss_func(losses: torch.Tensor) -> Any:
        looks = lambda loss: looked_at.append(float(loss))  # noqa: E731
        get_rerun_state_machine().validate_result(result=losses.sum(), rejection_func=looks, message="loss")
        return losses.sum(), {"lm loss": losses.mean()}

    config = SimpleNamespace(
        timers=None,
        grad_scale_func=None,
        calculate_per_token_loss=False,
        num_moe_experts=None,
        mtp_num_layers=None,
    )
    call = SimpleNamespace(
        chunks=[torch.nn.Module()], config=config, num_microbatches=4, cp_group_size=1, forward_only=False
    )
    recorded = ModelCall((), {"labels": torch.zeros(1, 2, dtype=torch.int64)}, loss_func)
    announced = preparation._announced_gradient(recorded, call, [])
    assert announced.tolist() == [[[0.25, 0.25]]]
    loss_reports._with_metrics({"lm loss": torch.tensor(1.0)}, loss_func, {"entropy": torch.ones(2)}, "")
    assert looked_at == []
    loss_func(torch.tensor([2.0, 3.0]))
    assert looked_at == [5.0]
