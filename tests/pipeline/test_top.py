"""``top_logprobs``: every token's most likely ids equal those of a stock model's logits in float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from megatron.core.models.gpt import GPTModel

from megatron_vocabpar.layers.bins import TopLogprobs
from megatron_vocabpar.pipeline.options import VocabOptions
from megatron_vocabpar.pipeline.rules.facts import Facts
from megatron_vocabpar.pipeline.rules.model_rules import TEACHERS, TRAINING
from megatron_vocabpar.pipeline.rules.rule import require
from megatron_vocabpar.schedule.make.generate import generate
from megatron_vocabpar.schedule.words.methods import METHODS
from tests.cases import covering
from tests.pipeline.gpt import Case, Result, case_of, run, train
from tests.spawn import run_ranks
from tests.support.equality import layers


def _unsharded(_: int, case: Case) -> tuple[Result, list[TopLogprobs]]:
    """A stock training, and the top k of the logits that its loss gets in training."""
    found = []
    stock = GPTModel.compute_language_model_loss

    def loss(self: Any, labels: torch.Tensor, logits: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            logs = logits.detach().double().log_softmax(2)
            top = logs.topk(min(case.output_options.top_logprobs, case.vocab_size))
            found.append(TopLogprobs(top.values, top.indices))
        return stock(self, labels, logits)

    with patch.object(GPTModel, "compute_language_model_loss", loss):
        return train(0, case.unsharded()), found


def check(case: Case) -> None:
    ((reference, expected),) = run_ranks(1, _unsharded, case)
    results = [result for result in run(case, reference) if result.reports_loss]
    losses = np.mean([result.losses for result in results], axis=0)
    np.testing.assert_allclose(losses, reference.losses, rtol=1e-5)
    of_replicas = zip(*[iter(results)] * case.tp, strict=True)
    steps = [expected[step * case.m * case.dp :][: case.m * case.dp] for step in range(case.steps)]
    for replica, members in enumerate(of_replicas):
        mine = [each for step in steps for each in step[replica * case.m :][: case.m]]
        for result in members:
            assert len(result.top) == len(mine) == case.steps * case.m
            for top, true in zip(result.top, mine, strict=True):
                k = true.ids.shape[2]
                assert top.ids[..., :k].tolist() == true.ids.tolist()
                np.testing.assert_allclose(top.logprobs[..., :k], true.logprobs, rtol=2e-5)
                assert bool((top.ids[..., k:] == -1).all())  # such entries count in no divergence


@covering(
    ("method", ["vocab-1", "vocab-2"]),
    ("pp", [1, 2, 3, 4]),
    ("tied", [False, True]),
    further={"pp": [1, 3, 4]},
)
def test_equals_unsharded(method: str, pp: int, tied: bool) -> None:
    options = VocabOptions(top_logprobs=5)
    sizes = {"pp": pp, "m": pp + 1, "layers": layers(pp), "vocab_size": 97, "steps": 1}
    check(Case(method, tied=tied, output_options=options, **sizes))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("k", "options"),
    [
        (40, {"vocab_size": 33, "pp": 4}),  # more than there are; the last shard has no id
        (5, {"pp": 2, "tp": 2, "dp": 2}),
    ],
)
def test_with_other_options(k: int, options: dict[str, Any]) -> None:
    check(Case(m=3, output_options=VocabOptions(top_logprobs=k), **options))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "method"), [("v-half", "vocab-2"), ("zb-h1", "vocab-1")])
def test_in_other_families(family: str, method: str) -> None:
    schedule = generate(METHODS[method], 2, 4, family=family)
    check(case_of(schedule, output_options=VocabOptions(top_logprobs=3)))


def test_tokens_without_a_label_are_refused() -> None:
    with pytest.raises(AssertionError, match="tokens whose label is no id"):
        run(Case(pp=2, m=3, labels="ignored", output_options=VocabOptions(top_logprobs=3)))


def test_the_option_and_the_call_need_each_other() -> None:
    options, given = VocabOptions(top_logprobs=3), frozenset({"keep_top"})
    with pytest.raises(ValueError, match=r"top_logprobs=3 and the call's keep_top: .* give both"):
        require(Facts(options=options), TRAINING)
    with pytest.raises(ValueError, match=r"^top_logprobs=0 and the call's keep_top: .* give both"):
        require(Facts(given=given), TRAINING)
    require(Facts(options=options, given=given), TRAINING, TEACHERS)
    with pytest.raises(ValueError, match="top_logprobs=3 with multi-token prediction"):
        require(Facts(options=options, settings=SimpleNamespace(mtp_num_layers=1)), TEACHERS)
