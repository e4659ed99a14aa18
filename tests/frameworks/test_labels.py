"""Which tokens' labels stay, with packings as verl's and slime's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_vocabpar.frameworks.labels import slime_labels, verl_forward
from megatron_vocabpar.frameworks.steps import HandleModel

TOTAL, RESPONSES = (5, 4, 6), (2, 0, 3)
IDS = [torch.arange(1, n + 1) * 10 + i for i, n in enumerate(TOTAL)]
EXPECTED = [-1, -1, 40, 50, -1, *[-1] * 4, -1, -1, 42, 52, 62, -1]


def _build_shifted_tokens(size: int, device: torch.device, tokens: list[Tensor], *_: Any) -> Tensor:
    labels = torch.zeros(size, dtype=torch.int64, device=device)
    rolled = torch.cat([torch.cat([ids[1:], ids.new_zeros(1)]) for ids in tokens])
    labels[: len(rolled)] = rolled
    return labels


def _extract_per_sample(
    values: Tensor, _: Any, total: list[int], responses: list[int], __: bool
) -> tuple[list[Tensor], list[Any]]:
    pieces = zip(values[: sum(total)].split(total), responses, strict=True)
    return [piece[len(piece) - n - 1 : -1] for piece, n in pieces], []


def test_slimes_packed_and_padded_rows() -> None:
    labels = slime_labels(_build_shifted_tokens)(
        18, torch.device("cpu"), IDS, list(TOTAL), list(RESPONSES), False
    )
    assert labels.tolist() == [*EXPECTED, -1, -1, -1]


def _forward(_: Any, ids: Tensor, *, logits_processor: Any, logits_processor_args: dict[str, Tensor]) -> Any:
    rows = logits_processor_args["label"]
    packed = torch.zeros(2 * len(TOTAL) + sum(TOTAL), dtype=torch.int64)  # two places of padding each
    start = 0
    for row in rows.unbind():
        packed[start : start + len(row)] = row
        start += len(row) + 2
    return logits_processor("logits", label=packed.roll(-1))


def _nested(values: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(values, layout=torch.jagged)


_RESPONSE = _nested([torch.arange(n) >= n - r for n, r in zip(TOTAL, RESPONSES, strict=True)])
_BATCHES: dict[str, dict[str, Tensor]] = {
    "a loss mask": {"loss_mask": _RESPONSE},
    "padded responses": {
        "responses": torch.zeros(3, 4),
        "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1, 0, 0], [0] * 8, [0, 1, 1, 1, 1, 1, 1, 0]]),
        "loss_mask": torch.ones(3, 4),
    },
    "packed responses": {"responses": _nested([torch.zeros(n) for n in RESPONSES])},
    "nothing": {},
}


@pytest.mark.parametrize("known", list(_BATCHES))
def test_verls_packed_and_padded_rows(known: str) -> None:
    ids = _nested(IDS)
    model = HandleModel(torch.nn.Module(), [{"input_ids": ids} | _BATCHES[known]], 1, torch.device("cpu"))
    forward = verl_forward(lambda config: _forward)("config")
    options = {"logits_processor": lambda logits, label: label, "logits_processor_args": {"label": ids}}
    found = forward(model, ids, **options).tolist()
    if known == "nothing":
        assert [label for label in found if label >= 0] == [*torch.cat(IDS)[1:].tolist(), 10]
        return
    expected: list[int] = []
    for row in torch.tensor(EXPECTED).split(list(TOTAL)):
        expected += [*row.tolist(), -1, -1]
    assert found == expected
    assert forward("another model", ids, **options).tolist() != expected
