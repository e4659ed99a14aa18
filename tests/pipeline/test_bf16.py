"""In 16 bits with fp32 main gradients, our error against float64 is that of stock Megatron, or smaller."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import Float16Module

from megatron_vocabpar.pipeline import compat
from megatron_vocabpar.pipeline.options import VocabOptions
from megatron_vocabpar.schedule.make.generate import generate
from megatron_vocabpar.train.core_on_cpu import megatron_on_cpu
from megatron_vocabpar.train.initial_weights import global_parameters, initialise_weights
from tests.cases import rest_is_slow
from tests.pipeline import gpt
from tests.pipeline.gpt import Case, Result, batch, build_model, case_of, parallel_groups, run, train
from tests.spawn import run_ranks

CASE = Case(pp=2, m=2, dtype=torch.bfloat16, hidden=64, seq_length=32, vocab_size=256, steps=1, init_std=0.05)
CONFIDENT = 0.999
NEAR_THE_OUTPUT = ("decoder.layers.3.", "decoder.final_layernorm.")


def float64_run(
    _: int, case: Case, confident: bool
) -> tuple[list[dict[str, np.ndarray]], float, dict[str, np.ndarray]]:
    """The batches, their loss and its gradients in float64, from the bf16 weights.

    With ``confident`` the labels are what the model predicts, and only tokens with p_target > 0.999 count.
    """
    with megatron_on_cpu(), parallel_groups(case):
        model = build_model(replace(case, dtype=torch.float32)).bfloat16().double()
        batches, losses = [], []
        for i in range(case.m):
            fields = batch(case, 0, 0, i)
            logits = model(fields["tokens"], fields["position_ids"], fields["attention_mask"]).double()
            if confident:
                fields["labels"] = logits.argmax(-1)
                probability = logits.softmax(-1).amax(-1)
                fields["loss_mask"] = (probability > CONFIDENT).float()
                assert fields["loss_mask"].sum() >= 8
            token_losses = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), fields["labels"].flatten(), reduction="none"
            )
            mask = fields["loss_mask"].flatten().double()
            losses.append((token_losses * mask).sum() / mask.sum())
            batches.append({name: value.numpy() for name, value in fields.items()})
        loss = sum(losses) / case.m
        loss.backward()
        return batches, float(loss), {n: p.grad.numpy() for n, p in global_parameters(model)}


def errors(results: list[Result], expected: dict[str, np.ndarray]) -> dict[str, float]:
    """Norm of the gradient's error over the norm of the gradient, by parameter."""
    pieces: dict[str, list[np.ndarray]] = {}
    for result in results:
        for name, gradient in result.first_gradients.items():
            pieces.setdefault(name, []).append(gradient)
    return {
        name: float(np.linalg.norm(np.concatenate(parts) - expected[name]) / np.linalg.norm(expected[name]))
        for name, parts in pieces.items()
    }


@pytest.mark.parametrize(
    ("method", "confident", "dtype"),
    rest_is_slow(
        [
            *product(["vocab-1", "vocab-2", "naive"], [False, True], [torch.bfloat16]),
            *product(["vocab-1", "vocab-2"], [False], [torch.float16]),
        ],
        ("vocab-2", True, torch.bfloat16),
    ),
)
def test_error_is_no_larger_than_stocks(method: str, confident: bool, dtype: torch.dtype) -> None:
    """With fp16 the loss is scaled, so that gradients don't underflow."""
    scale = 1024.0 if dtype is torch.float16 else 1.0
    case = replace(CASE, output_scale=64.0 if confident else 1.0, dtype=dtype, loss_scale=scale)
    arrays, loss, expected = run_ranks(1, float64_run, replace(case, method="stock", pp=1), confident)[0]
    given = [{name: torch.from_numpy(value) for name, value in fields.items()} for fields in arrays]
    stock = run(replace(case, method="stock"), None, given)
    ours = run(replace(case, method=method), None, given)
    expected = {name: gradient * scale for name, gradient in expected.items()}
    stock_errors, our_errors = errors(stock, expected), errors(ours, expected)
    assert our_errors.keys() == stock_errors.keys()
    # Where the output layer's rounding arrives first, ours is smaller.
    assert our_errors["output_layer.weight"] <= stock_errors["output_layer.weight"]
    near = [name for name in our_errors if name.startswith(NEAR_THE_OUTPUT)]
    # Of a few parameters luck decides 1.4 %, on a processor without vector instructions to our disadvantage.
    assert np.mean([our_errors[n] for n in near]) <= 1.03 * np.mean([stock_errors[n] for n in near])
    # Further down, and in the loss, the same bf16 transformer layers dominate: luck decides a few percent.
    assert np.mean(list(our_errors.values())) <= 1.1 * np.mean(list(stock_errors.values()))
    assert abs(ours[-1].losses[0] - loss) <= 1.1 * abs(stock[-1].losses[0] - loss) + 1e-6


def _trained_and_seen(rank: int, case: Case, casts: bool) -> tuple[Result, set[torch.dtype]]:
    """A training whose last stage's output is cast to float32 or not; the dtypes of stages' outputs in B."""
    seen: set[torch.dtype] = set()
    backward = compat.backward_step

    def step(stage_input: Any, output: torch.Tensor, grad: torch.Tensor, config: Any) -> Any:
        assert grad.dtype == output.dtype
        seen.add(output.dtype)
        return backward(stage_input, output, grad, config)

    kept = (lambda _: {}) if casts else compat.in_half_precision
    with patch.multiple(compat, backward_step=step, in_half_precision=kept):
        return train(rank, case), seen


@pytest.mark.skipif(not compat._CASTS_IF_ASKED, reason="this Megatron always casts the last stage's output")
@pytest.mark.parametrize(
    ("method", "family", "dtype"),
    rest_is_slow(
        [
            ("vocab-2", "1f1b", torch.bfloat16),
            ("vocab-1", "v-half", torch.bfloat16),
            ("interlaced", "1f1b", torch.bfloat16),
            ("vocab-1", "1f1b", torch.float16),
        ],
        ("vocab-1", "v-half", torch.bfloat16),
    ),
)
def test_hidden_states_stay_in_16_bits_and_nothing_else_changes(
    method: str, family: str, dtype: torch.dtype
) -> None:
    case = case_of(generate(method, 2, 3, family=family), dtype=dtype, loss_scale=64.0)
    both = zip(run(case, False, body=_trained_and_seen), run(case, True, body=_trained_and_seen), strict=True)
    for (ours, seen), (cast, _) in both:
        assert seen == {dtype}
        assert (ours.losses, ours.evaluation) == (cast.losses, cast.evaluation)
        for kind in ("first_gradients", "weights"):
            for name, values in getattr(cast, kind).items():
                np.testing.assert_array_equal(getattr(ours, kind)[name], values, name)


def _unsharded_fp32_head(_: int, case: Case) -> Result:
    """Stock, whose output layer multiplies float32 hidden states by a float32 weight."""

    def convert(config: Any, model: GPTModel) -> Float16Module:
        wrapped, layer = Float16Module(config, model), model.output_layer
        layer.weight.data = layer.weight.data.float()
        initialise_weights(model, case.seed)  # once more, without rounding
        layer.register_forward_pre_hook(lambda _, inputs: (inputs[0].float(), *inputs[1:]))
        return wrapped

    with patch.object(gpt, "Float16Module", convert):
        return train(0, case.unsharded())


INVARIANT: dict[str, Any] = {"output_options": VocabOptions(invariant=True), "vocab_size": 512}


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("vocab-2", {}),
        *rest_is_slow([("vocab-1", {}), *product(["vocab-1", "vocab-2"], [INVARIANT])]),
    ],
)
def test_fp32_head(method: str, options: dict[str, Any]) -> None:
    """The weight is neither rounded at the start nor after a step, and multiplied as it is."""
    case = replace(CASE, method=method, steps=2, fp32_head=True, **options)
    (expected,) = run_ranks(1, _unsharded_fp32_head, case)
    results = run(case, expected)
    np.testing.assert_allclose(results[-1].losses[0], expected.losses[0], rtol=1e-6)
    np.testing.assert_allclose(results[-1].evaluation, expected.evaluation, rtol=1e-4)
    for result in results:
        assert result.first_gradients["output_layer.weight"] < 1e-6  # of the norm of the whole
        assert result.weights["output_layer.weight"] < 5e-4  # 16 bits: 2e-3


@pytest.mark.parametrize(
    ("method", "recompute"),
    rest_is_slow(product(["vocab-1", "vocab-2", "interlaced"], [False, True]), ("vocab-2", False)),
)
def test_fp8_head(method: str, recompute: bool) -> None:
    """Trains with 8-bit products: as with 16 bits, but for what they cost in accuracy."""
    options = VocabOptions(fp8_head=True, recompute=recompute)
    case = replace(CASE, method=method, output_options=options)
    plain = run(replace(case, output_options=VocabOptions()))
    results = run(case)
    for name in ("losses", "evaluation"):
        assert getattr(results[-1], name)[0] == pytest.approx(getattr(plain[-1], name)[0], rel=2e-3)
    output = "output_layer.weight"
    expected = np.concatenate([result.first_gradients[output] for result in plain])
    gradients = [
        replace(result, first_gradients={output: result.first_gradients[output]}) for result in results
    ]
    assert 1e-3 < errors(gradients, {output: expected})[output] < 0.03
