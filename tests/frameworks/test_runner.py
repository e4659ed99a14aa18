"""Steps of made-up frameworks through our schedules, beside the same steps on the logits of a stock model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_vocabpar.frameworks.install import config_from
from megatron_vocabpar.frameworks.replaced_functions import FUNCTIONS, answering
from megatron_vocabpar.frameworks.runner import StepRunner
from megatron_vocabpar.train.core_on_cpu import megatron_on_cpu
from tests.cases import covering
from tests.pipeline.gpt import Case, _arrays, _differences, batch, build_chunks, parallel_groups
from tests.spawn import run_ranks


def _log_probs(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)


def _entropy(logits: Tensor) -> Tensor:
    return torch.distributions.Categorical(logits=logits).entropy()


def _both(logits: Tensor, tokens: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    return _log_probs(logits, tokens).unsqueeze(-1), _entropy(logits.detach())


_ORIGINALS = {
    "vocab_parallel_log_probs_from_logits": _log_probs,
    "vocab_parallel_entropy": _entropy,
    "vocab_parallel_entropy_with_chunking": _entropy,
    "calculate_log_probs_and_entropy": _both,
}
_FUNCTIONS = {binding.name: answering(binding, _ORIGINALS[binding.name]) for binding in FUNCTIONS}


def in_forward_step(iterator: Iterator[dict[str, Any]], model: Any) -> tuple[Any, Callable[..., Any]]:
    """As verl: divides in place, asks at once; its loss has an entropy term."""
    fields = next(iterator)
    output = _model(model, fields)
    if not _has_loss(model):
        return output, lambda _: None
    output.div_(0.7)
    kept = output.clone()
    entropy = _FUNCTIONS["vocab_parallel_entropy_with_chunking"](output)
    log_probs = _FUNCTIONS["vocab_parallel_log_probs_from_logits"](kept, fields["labels"])
    return {"log_probs": log_probs, "entropy": entropy}, lambda found: _loss(fields, 0.3, **found)


def in_loss_func(iterator: Iterator[dict[str, Any]], model: Any) -> tuple[Any, Callable[..., Any]]:
    """As slime: the loss function asks, about rows of tokens; of some it reads nothing."""
    fields = next(iterator)

    def loss_func(logits: Any) -> tuple[Tensor, dict[str, Tensor]]:
        tokens = fields["labels"].masked_fill(fields["loss_mask"] == 0, -1).squeeze(0)
        found, entropy = _FUNCTIONS["calculate_log_probs_and_entropy"](
            logits.squeeze(0) / 0.7, tokens, None, with_entropy=True, with_entropy_grad=False
        )
        return _loss(fields, 0.0, found.view(1, -1), entropy.view(1, -1))

    return _model(model, fields), loss_func


def _has_loss(model: Any) -> bool:
    return bool(
        getattr(model, "post_process", None) or getattr(getattr(model, "module", model), "post_process", 0)
    )


def _model(model: Any, fields: dict[str, Any]) -> Any:
    names = {"input_ids": "tokens", "position_ids": "position_ids", "attention_mask": "attention_mask"}
    return model(**{name: fields[field] for name, field in names.items()})


def _loss(
    fields: dict[str, Any], coefficient: float, log_probs: Tensor, entropy: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    read = fields["loss_mask"] != 0
    log_probs, entropy, advantages = log_probs[read], entropy[read], fields["advantages"][read]
    ratio = (log_probs - fields["old_logp"][read]).exp()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
    loss = loss - coefficient * entropy.mean()
    return loss, {
        "log_probs": log_probs.detach().clone(),
        "entropy": entropy.detach().clone(),
        "loss": loss.detach().clone(),
    }


def step(_: int, case: Case, name: str, reference: Any = None) -> Any:
    """Reports of a training and an evaluation, and gradients, or how far they are from the reference's."""
    with megatron_on_cpu(), parallel_groups(case):
        [module] = build_chunks(case)
        module.config.finalize_model_grads_func = finalize_model_grads
        options = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        model = DistributedDataParallel(module.config, options, module)
        stock = case.method == "stock"
        theirs = get_forward_backward_func()
        run = theirs if stock else partial(StepRunner(config_from({})), theirs)
        reports = []
        for forward_only in (False, True):
            batches = [batch(case, 0, 0, i) for i in range(case.m)]
            reports += run(
                forward_step_func=globals()[name],
                data_iterator=[iter(batches)],
                model=[model],
                num_microbatches=case.m,
                seq_length=case.seq_length,
                micro_batch_size=case.micro_batch_size,
                forward_only=forward_only,
            )
        gradients = _arrays([module], gradients=True)
        return reports, gradients if reference is None else _differences([module], gradients, reference)


@covering((("name", "rows"), [("in_forward_step", 2), ("in_loss_func", 1)]), ("pp", [1, 2]))
def test_a_step_equals_that_on_logits(name: str, rows: int, pp: int) -> None:
    case = Case("vocab-2", pp=pp, m=3, micro_batch_size=rows)
    [(expected, gradients)] = run_ranks(1, step, case.unsharded(), name)
    *others, last = run_ranks(pp, step, case, name, gradients)
    assert [reports for reports, _ in others] == [[]] * len(others)
    for mine, theirs in zip(last[0], expected, strict=True):
        for key, value in theirs.items():
            torch.testing.assert_close(mine[key], value, rtol=1e-5, atol=1e-5)
    for _, differences in (*others, last):
        assert max(differences.values()) < 1e-5, differences
