"""Which microbatch and pass a loss is reported of that is not finite, or has no means of metrics."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.rerun_state_machine import get_rerun_state_machine

from megatron_vocabpar.pipeline import loss_reports
from megatron_vocabpar.pipeline.loss_reports import LossReports
from megatron_vocabpar.pipeline.microbatches import DROPPED

ENTROPY = {"entropy": "entropy"}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 7, and a loss function whose gradient is what the losses of its first token are."""

    def loss_and_gradient(
        call: Any, token_losses: torch.Tensor, values: dict[str, torch.Tensor], **_: Any
    ) -> Any:
        assert "correct" not in values  # given for the log of further heads, and not asked for
        slope = torch.full_like(token_losses, float(token_losses[0, 0]))
        return [call.reported], 0, slope, values

    monkeypatch.setattr(loss_reports.dist, "get_rank", lambda: 7)
    monkeypatch.setattr(loss_reports.compat, "loss_and_gradient", loss_and_gradient)


def iteration(told: list[str] | None = None, loss_func: Any = lambda losses, entropy: None) -> Any:
    """What ``LossReports`` looks at, on the rank of the loss; of two tokens the second is dropped."""
    tell = None if told is None else told.append
    call = SimpleNamespace(
        chunks=[None], config=None, num_microbatches=4, cp_group_size=1, collect_non_loss_data=False,
        forward_only=False, reported={}, options=SimpleNamespace(drop_masked=False),
    )  # fmt: skip
    return SimpleNamespace(
        rank=SimpleNamespace(
            not_finite=tell,
            has_loss=True,
            pipeline_rank=3,
        ),
        call=call,
        with_loss=[SimpleNamespace(loss_func=loss_func)] * 4,
        microbatches=SimpleNamespace(labels=lambda _: torch.tensor([[1, DROPPED]])),
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
        reports.hidden(i, torch.tensor([[1.0, hidden], [2.0, -3.0]]).bfloat16())
        reports.report(i, torch.tensor([[1.0, loss]]))
    finish(reports)
    assert told == ["rank 7: the loss of microbatch 1 is not finite, first before pass 3S1"][: int(watched)]
    told.clear()
    reports = LossReports(iteration(told if watched else None))
    reports.hidden(2, torch.ones(1, 2))
    reports.report(2, torch.tensor([[1.0, float("nan")]]))
    finish(reports)
    assert told == ["rank 7: the loss of microbatch 2 is not finite, first in pass 3S2"][: int(watched)]


def test_the_first_microbatch_whose_metrics_are_no_means_is_named() -> None:
    """The second call gets entropies: of the linear loss function twice as many give twice the loss."""
    powers = iter([1, 1, 2, 2, 2, 2])  # two calls for each of microbatches 0, 2 and 1

    def loss_func(losses: torch.Tensor) -> Any:
        loss = (losses ** next(powers)).sum()
        return loss, {"lm loss": loss}

    given = iteration(loss_func=loss_func)
    given.call.reported["lm loss"] = torch.ones(())
    reports = LossReports(given, ENTROPY)
    for i in (0, 2, 1):
        reports.report(i, torch.ones(1, 2), {"entropy": torch.ones(1, 1, 2)})
    told = "rank 7, microbatch 1: the loss function is not linear.* no mean of them; give it a parameter"
    with pytest.raises(ValueError, match=told):
        finish(reports)


def test_a_gradient_of_a_dropped_token_is_named() -> None:
    given = iteration()
    given.call.options.drop_masked = True
    reports = LossReports(given)
    reports.report(0, torch.zeros(1, 2))  # gives every token a gradient of 0
    reports.report(1, torch.ones(1, 2))
    with pytest.raises(ValueError, match="microbatch 1: the loss depends on tokens that the batch"):
        finish(reports)


def test_a_loss_of_entropies_whose_gradient_was_not_asked_for_is_named() -> None:
    reports = LossReports(iteration(), ENTROPY)
    for i, numbers in ((0, {}), (2, {"entropy": torch.ones(1, 1, 2)})):
        reports.report(i, torch.ones(1, 2), {**numbers, "correct": torch.ones(1, 1, 2)})
    with pytest.raises(
        ValueError, match=r"rank 7, microbatch 2: the loss depends on the tokens' entropy, whose"
    ):
        finish(reports)


@pytest.mark.parametrize(
    ("loss_func", "why"),
    [
        (lambda losses: None, "no parameter entropy and no correct.*: it reports nothing by name"),
        (lambda losses, entropy: None, "no parameter correct.*: it takes entropy; .* ask for accuracy"),
        (lambda *losses, **options: None, "no parameter entropy and no correct.*: it reports nothing"),
        (print, "no parameter entropy and no correct.*: it reports nothing"),
    ],
)
def test_no_mean_of_entropies_is_made_up(loss_func: Any, why: str) -> None:
    """Where the loss function does not take them, or takes only some, or reports nothing."""
    given = iteration(loss_func=loss_func)
    numbers = dict.fromkeys(("entropy", "correct"), torch.ones(1, 1, 2))
    with pytest.raises(ValueError, match=why):
        LossReports(given, {**ENTROPY, "correct": "accuracy"}).report(0, torch.ones(1, 2), numbers)


def test_what_a_loss_function_reports_is_not_overwritten() -> None:
    reported = {"tokens": torch.tensor(2), "lm loss": torch.tensor(1.0)}
    loss_func = lambda losses: (losses.sum(), {"tokens": torch.tensor(2), "lm loss": losses.mean()})  # noqa: E731
    entropy = torch.tensor([3.0, 5.0])
    metrics, linear = loss_reports._with_metrics(reported, loss_func, {"entropy": entropy}, ["entropy"], "")
    assert metrics == {**reported, "entropy": torch.tensor(4.0)}
    assert linear
    with pytest.raises(ValueError, match="it reports entropy of its own; give it the parameter"):
        loss_reports._with_metrics(metrics, loss_func, {"entropy": torch.ones(2)}, ["entropy"], "")


def test_only_the_true_losses_are_validated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what takes the losses' place: the host would wait."""
    monkeypatch.undo()
    looked_at: list[float] = []

    def loss_func(losses: torch.Tensor) -> Any:
        looks = lambda loss: looked_at.append(float(loss))  # noqa: E731
        get_rerun_state_machine().validate_result(result=losses.sum(), rejection_func=looks, message="loss")
        return losses.sum(), {"lm loss": losses.mean()}

    reported, values = {"lm loss": torch.tensor(1.0)}, {"entropy": torch.ones(2)}
    loss_reports._with_metrics(reported, loss_func, values, ["entropy"], "")
    assert looked_at == []
    loss_func(torch.tensor([2.0, 3.0]))
    assert looked_at == [5.0]
