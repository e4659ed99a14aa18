"""What a loss function gets of every token, against the float64 softmax of an unsharded stock model."""

from __future__ import annotations

from functools import partial
from pkgutil import resolve_name
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_vocabpar.layers import extras
from megatron_vocabpar.layers.extras.extra import Extra
from megatron_vocabpar.pipeline.forward_backward import ForwardBackward
from megatron_vocabpar.pipeline.options import METRICS, VocabOptions
from megatron_vocabpar.schedule.make.generate import generate
from megatron_vocabpar.train.core_on_cpu import megatron_on_cpu
from tests.cases import rest_is_slow
from tests.pipeline import gpt
from tests.pipeline.gpt import Case, case_of
from tests.spawn import run_ranks

Batches = list[dict[str, Any]]


def stock_logits(_: int, case: Case) -> list[np.ndarray]:
    """``[b, s, V]`` of every microbatch."""

    def forward_step(data_iterator: Any, model: Any) -> tuple[Any, Any]:
        output, _ = gpt.forward_step(data_iterator, model, case.loss, logits=True)
        return output, lambda logits, non_loss_data: logits.clone()

    with megatron_on_cpu(), gpt.parallel_groups(case), torch.no_grad():
        collected = call(
            get_forward_backward_func(), case, forward_step, [gpt.batch(case, 0, 0, i) for i in range(case.m)]
        )
        return [logits.numpy() for logits in collected]


def call(run: Any, case: Case, forward_step: Any, data: Batches, **options: Any) -> list[Any]:
    options = {"forward_only": True, "collect_non_loss_data": True} | options
    return run(
        forward_step_func=forward_step,
        data_iterator=[iter(data) for _ in range(case.chunks)],
        model=options.pop("model", None) or gpt.build_chunks(case),
        num_microbatches=case.m,
        seq_length=case.seq_length,
        micro_batch_size=case.micro_batch_size,
        **options,
    )


def per_token(losses: torch.Tensor, non_loss_data: bool, **values: torch.Tensor) -> torch.Tensor:
    return torch.stack([-losses, *(values[name] for name in ("entropy", "correct", "rank"))])


def pipelined(_: int, case: Case, data: Batches) -> tuple[list[np.ndarray], list[dict[str, Any]]]:
    """Data of every token, as a script asks for them; and the reports of an evaluation and a training.

    The first are those of an old policy or a reference, before a step of training.
    """

    def forward_step(data_iterator: Any, model: Any, kind: str) -> tuple[Any, Any]:
        output, usual = gpt.forward_step(data_iterator, model, case.loss)

        def takes_both(losses: torch.Tensor, entropy: torch.Tensor, correct: torch.Tensor) -> tuple[Any, ...]:
            *rest, report = usual(losses)
            own = {"entropy": entropy.detach(), "accuracy": correct}
            return *rest, report | {name: usual(value)[-1]["lm loss"] for name, value in own.items()}

        kinds = {
            "data": per_token,
            "takes both": takes_both,
            "takes nothing": lambda losses: usual(losses),
        }
        return output, kinds[kind]

    with megatron_on_cpu(), gpt.parallel_groups(case):
        model = gpt.build_chunks(case)
        runs = [
            ForwardBackward(
                case.method,
                gpt.vocab_groups(),
                torch.device("cpu"),
                options=VocabOptions(metrics=("entropy", "accuracy"), target_rank=ranks),
                make_plan=gpt.plan_maker(case),
            )
            for ranks in (True, False)
        ]
        values = call(runs[0], case, partial(forward_step, kind="data"), data, model=model)
        reports = []
        for forward_only, kind in (
            (True, "takes nothing"),
            (False, "takes both"),
            (False, "takes nothing"),
        ):
            step = partial(forward_step, kind=kind)
            options = {"forward_only": forward_only, "collect_non_loss_data": False}
            reports += call(runs[1], case, step, data, model=model, **options)
        return [value.numpy() for value in values], reports


@pytest.mark.parametrize(
    ("family", "method", "options"),
    [
        ("v-half", "vocab-2", {"loss": "tokens"}),
        *rest_is_slow(
            [
                ("1f1b", "vocab-1", {"loss": "tokens"}),
                ("1f1b", "vocab-2", {"tp": 2}),
                ("zb-h1", "interlaced", {"tied": True}),
            ]
        ),
    ],
)
def test_log_probabilities_entropies_and_accuracy(family: str, method: str, options: dict[str, Any]) -> None:
    """Of half the tokens the most likely id is the label; a fifth has none."""
    case = case_of(generate(method, 2, 3, family=family), micro_batch_size=4, **options)
    (logits,) = run_ranks(1, stock_logits, case.unsharded())
    data = [gpt.batch(case.unsharded(), 0, 0, i) for i in range(case.m)]
    wanted = []
    for fields, y in zip(data, logits, strict=True):
        logs = torch.from_numpy(y).double().log_softmax(-1)
        best, mask = logs.argmax(-1), fields["loss_mask"]
        fields["labels"][:, ::2] = best[:, ::2]
        logp = logs.gather(-1, fields["labels"][..., None])[..., 0]
        rows = torch.stack([logp, -(logs.exp() * logs).sum(-1), (fields["labels"] == best).double()])
        rank = (logs > logp[..., None]).sum(-1)
        rows = torch.cat([rows, rank[None]])
        wanted.append(rows * mask)
        fields["labels"] = fields["labels"].masked_fill(mask == 0, -100)
    *others, (values, reports) = run_ranks(case.ranks, pipelined, case, data)
    assert not any(others[0])
    for found, rows in zip(values, wanted, strict=True):
        np.testing.assert_allclose(found, rows, rtol=1e-5, atol=2e-6)
    for i, report in enumerate(reports):
        rows, tokens = wanted[i % case.m], data[i % case.m]["loss_mask"].sum()
        sums = dict(
            zip(
                ["lm loss", "entropy", "accuracy"],
                rows[:3].sum((1, 2)) * torch.tensor([-1, 1, 1]),
                strict=True,
            )
        )
        assert report.keys() == sums.keys()
        for name, value in sums.items():
            expected = [value, tokens] if case.loss == "tokens" else value / tokens
            np.testing.assert_allclose(report[name], expected, rtol=1e-5)


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_leads_to_its_extra(name: str) -> None:
    """A loss function may depend on those alone whose extra has a gradient, and finds it under its name."""
    extra = resolve_name(f"{extras.__name__}.{METRICS[name].extra}")()
    assert extra.reports
    assert METRICS[name].has_gradient == (type(extra).gradient is not Extra.gradient)
    assert not METRICS[name].has_gradient or extra.name == name in extra.reports
