"""Ids outside the vocabulary: an error on every rank, unless they are labels of tokens without a loss."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from tests.cases import rest_is_slow
from tests.pipeline import gpt
from tests.pipeline.gpt import Case

BATCH, V = gpt.batch, Case(method="vocab-2").vocab_size


def trained(rank: int, case: Case, name: str, value: int, mask: float) -> Any:
    """The losses if one token has this id as its token or label, or the error."""

    def batch(case: Case, step: int, replica: int, i: int) -> dict[str, Any]:
        fields = BATCH(case, step, replica, i)
        if i == 2:
            fields[name][1, 3], fields["loss_mask"][1, 3] = value, mask
        return fields

    with mock.patch.object(gpt, "batch", batch):
        try:
            found = gpt.train(rank, case)
        except ValueError as error:
            return str(error)
    return found.losses, found.evaluation, found.head_losses


@pytest.mark.parametrize(
    ("name", "value", "mask"),
    rest_is_slow(
        [
            ("tokens", V, 1.0),
            ("tokens", -1, 0.0),
            ("labels", 5000, 1.0),
            ("labels", V, 1.0),
            ("labels", -1, 0.5),
        ],
        ("tokens", V, 1.0),
        ("labels", V, 1.0),
    ),
)
def test_an_id_outside_the_vocabulary_is_an_error_on_every_rank(name: str, value: int, mask: float) -> None:
    what = "token id" if name == "tokens" else "label"
    said = f"{what} {value} in microbatch 2, sequence 1, position 3, is outside the vocabulary of {V} ids"
    for text in gpt.run(Case(method="vocab-2", pp=2, m=3), name, value, mask, body=trained):
        assert text.startswith(said)
        assert ("loss_mask" in text) == (name == "labels")


@pytest.mark.parametrize("heads", rest_is_slow([{}, {"mtp": 1, "position": "rope"}], {}))
def test_the_label_of_a_masked_token_may_be_any_id(heads: dict[str, Any]) -> None:
    case = Case(method="vocab-2", pp=2, m=3, steps=1, **heads)
    masked, ignored = (gpt.run(case, "labels", value, 0.0, body=trained) for value in (5000, -100))
    assert masked == ignored
    assert all(masked[-1][0])
