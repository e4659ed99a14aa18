"""Full-vocabulary distillation losses of NeMo-RL and verl on one process, and ours over a pipeline of two.

Of each framework the one file that has the loss is imported from a checkout; what it takes from its package
for other things is replaced. Neither loss is in a release: NeMo-RL's is #3978, behind v0.7.0, verl's #6194.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from lab.losses.theirs import load
from megatron_vocabpar.layers.terms import Distillation
from megatron_vocabpar.pipeline.options import VocabOptions
from tests.pipeline.gpt import Case, Result, run, train
from tests.pipeline.teachers import states_and_weight
from tests.spawn import run_ranks

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From a student's logits [b, s, V], a teacher's hidden states [b, s, H'] and weight [V, H'] to [b, s]."""


def nemo_rl(checkout: Path) -> Loss:
    module, group = load("NeMo-RL", checkout)["model_utils"], parallel_state.get_tensor_model_parallel_group()
    divergence = module.ChunkedDistributedReverseKLToFixedLogits.apply
    return lambda logits, hidden, weight: divergence(logits, hidden @ weight.t(), 3, group, False)


def verl(checkout: Path) -> Loss:
    os.environ["TORCH_COMPILE_DISABLE"] = "1"
    for name, names in {
        "verl.models.mcore.util": ("preprocess_bshd_engine", "preprocess_thd_engine"),
        "verl.workers.config": ("DistillationConfig",),
    }.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(dict.fromkeys(names))
    files = {"verl": {"loss": "verl/trainer/distillation/megatron/nitrobrew_loss.py"}}
    with patch("lab.losses.theirs.MODULES", files):
        divergence = load("verl", checkout)["loss"]._VocabParallelNitrobrewKL.apply

    def loss(logits: Tensor, hidden: Tensor, weight: Tensor) -> Tensor:
        return divergence(logits.flatten(0, 1), hidden.flatten(0, 1), weight, 20, None).view(logits.shape[:2])

    return loss


def theirs(_: int, case: Case, framework: Callable[[Path], Loss], checkout: Path) -> Result:
    """Stock, whose loss of a token is the framework's."""
    numbers, whole = count(), case.unsharded().m
    loss_of: list[Loss] = []  # it wants Megatron's groups

    def loss(_: Any, labels: Tensor, logits: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return logits.new_zeros(labels.shape)
        if not loss_of:
            loss_of.append(framework(checkout))
        hidden, weight = states_and_weight(case, *divmod(next(numbers), whole))
        return loss_of[0](logits.transpose(0, 1).contiguous(), hidden.transpose(0, 1).contiguous(), weight)

    with patch.object(GPTModel, "compute_language_model_loss", loss):
        return train(0, case.unsharded())


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("framework", "variable", "kind"), [(nemo_rl, "NEMO_RL_PATH", "reverse"), (verl, "VERL_PATH", "forward")]
)
def test_teacher_states_train_as_theirs(
    framework: Callable[[Path], Loss], variable: str, kind: str, tied: bool
) -> None:
    if variable not in os.environ:
        pytest.skip(f"set {variable}")
    options = VocabOptions(distillation=Distillation(kind, weight=1.0))
    case = Case(pp=2, m=3, tied=tied, vocab_size=97, teacher="states", output_options=options)
    (expected,) = run_ranks(1, theirs, case, framework, Path(os.environ[variable]), fresh=True)
    results = run(case, expected)
    losses = [result.losses for result in results if result.reports_loss]
    np.testing.assert_allclose(np.mean(losses, axis=0), expected.losses, rtol=1e-5)
    for result in results:
        assert result.first_gradients
        assert max(result.first_gradients.values()) <= 1e-5
        assert max(result.weights.values()) <= 3e-5
