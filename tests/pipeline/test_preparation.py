"""Before an iteration: what ``forward_step`` may pass to a model, and the rows that count."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_vocabpar.layers.partition import ranges_from_sizes
from megatron_vocabpar.layers.targets import shard_targets
from megatron_vocabpar.pipeline.heads import head_labels
from megatron_vocabpar.pipeline.microbatches import Microbatches
from megatron_vocabpar.pipeline.recording import ModelCall, record_call, record_calls


def _recorded(**options: Any) -> ModelCall:
    """A call by a script's own ``forward_step``."""
    tokens = torch.arange(6).view(2, 3)

    def forward_step(_: Any, model: Any) -> tuple[torch.Tensor, Any]:
        return model(tokens, tokens, None, labels=tokens + 1, **options), lambda losses: losses.sum()

    return record_call(forward_step, None, torch.nn.Module())


@pytest.mark.parametrize("options", [{"output_processor": print}, {"compute_mtp_loss": False}])
def test_what_the_model_is_passed_is_refused_not_left_out(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ValueError, match=rf"passed (an )?{name} .* leave it out"):
        head_labels(torch.nn.Module(), _recorded(**options), None, drops_masked=False)


@pytest.mark.parametrize(("documents", "kept"), [((4, 4, 4, 4), 1), ((4, 4, 2, 4), 3), ((4, 2, 4, 4), 4)])
@pytest.mark.parametrize("by_name", [True, False])
def test_masks_that_are_alike_are_kept_once(documents: tuple[int, ...], kept: int, by_name: bool) -> None:
    """A microbatch's mask keeps each token within the first ``documents`` tokens, or within the others."""

    def mask(first: int) -> torch.Tensor:
        document = torch.arange(4) >= first
        return (document[:, None] != document).logical_or(torch.ones(4, 4).triu(1).bool())[None, None]

    def forward_step(drawn: Any, model: Any) -> tuple[torch.Tensor, Any]:
        given = mask(next(drawn))
        output = model(None, None, attention_mask=given) if by_name else model(None, None, given)
        return output, lambda losses: losses.sum()

    calls = record_calls(forward_step, iter(documents), torch.nn.Module(), len(documents))
    masks = [call.attention_mask for call in calls]
    assert len({id(each) for each in masks}) == kept
    for found, first in zip(masks, documents, strict=True):
        assert found is not None
        assert torch.equal(found, mask(first))


@pytest.mark.parametrize("member", range(3))
@pytest.mark.parametrize("embedding_ranks", [(0, 0), (0, 1)])
def test_a_plan_is_what_torch_finds(member: int, embedding_ranks: tuple[int, int]) -> None:
    """Two heads, two sequences of 300 in two parts; in the second microbatch all labels count."""
    draw = torch.Generator().manual_seed(member)
    tokens, labels = torch.randint(0, 99, (2, 2, 2, 2, 300), generator=draw)
    labels[0, torch.rand(2, 2, 300, generator=draw) > 0.9] = -100
    ranges = ranges_from_sizes((40, 7, 53), 99)
    found = Microbatches(
        shapes=[(2, 2, 300)] * 2,
        tokens=tokens.flatten(),
        labels=labels.flatten(),
        device=labels.device,
        ranges=ranges,
        member=member,
        embedding_ranks=embedding_ranks,
        parts=2,
    )
    for i in range(2):
        apart = len(set(embedding_ranks)) > 1
        sets = [tokens[i, :1], tokens[i, 1:]] if apart else [tokens[i]]
        owned = []
        for embedded, rank, ids in zip(found[i].embedded, embedding_ranks, sets, strict=False):
            owner = torch.bucketize(ids.flatten(), torch.tensor([40, 47, 100]), right=True)
            counts = tuple(torch.bincount(owner, minlength=3).tolist())
            assert (embedded.rank, embedded.shape, embedded.plan.counts) == (rank, ids.shape, counts)
            assert torch.equal(embedded.plan.order, owner.argsort(stable=True))
            owned.append(ids.flatten()[owner == member] - ranges[member].start)
        assert len(found[i].embedded) == len(sets)
        assert torch.equal(found[i].owned_rows, torch.cat(owned))
        assert torch.equal(found[i].by_row, torch.cat(owned).argsort(stable=True))
        counted = found[i].take(found.rows(i, labels[i].flatten()))
        for mine, expected in zip(found[i].targets, shard_targets(counted, ranges[member]), strict=True):
            assert torch.equal(mine, expected)
            assert mine.data_ptr() % 16 == found[i].by_row.data_ptr() % 16


@pytest.mark.parametrize("parts", [1, 2])
def test_losses_can_be_flattened(parts: int) -> None:
    """A script's loss function does that with ``view``."""
    ids = torch.arange(12)
    found = Microbatches(
        shapes=[(1, 3, 4)],
        tokens=ids,
        labels=ids,
        device=ids.device,
        ranges=ranges_from_sizes((12,), 12),
        member=0,
        parts=parts,
    )
    assert torch.equal(found.from_rows(0, found.rows(0, ids)).view(-1), ids)


def test_rows_that_count() -> None:
    """Two heads, two sequences of six in three parts; the second microbatch counts no token at all."""
    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 10, (2, 2, 2, 6), generator=draw)
    labels[0, torch.rand(2, 2, 6, generator=draw) > 0.3] = -100
    labels[0, :, :, 2:4] = -100  # all of the second part
    labels[1] = 10  # an id of the padding
    found = Microbatches(
        shapes=[(2, 2, 6)] * 2,
        tokens=torch.zeros(48, dtype=torch.int64),
        labels=labels.flatten(),
        device=labels.device,
        ranges=ranges_from_sizes((6, 6), 10),
        member=1,
        parts=3,
    )
    first, second = found[0], found[1]
    counted = labels[0] >= 0
    assert (first.tokens, first.counts[1], second.tokens, second.counts) == (
        int(counted.sum()),
        0,
        1,
        (1, 0, 0),
    )
    everywhere = found.rows(0, torch.arange(24))  # which token each of C0's rows is of
    places = [part[first.counted_in(k)] for k, part in enumerate(everywhere.chunk(3))]
    tokens = torch.cat(places)
    assert [len(part) for part in places] == list(first.counts)
    assert torch.equal(first.take(everywhere), tokens)
    assert sorted(tokens.tolist()) == counted.flatten().nonzero().flatten().tolist()
    ids = labels[0].flatten()[tokens]
    rows, owned = first.targets
    assert torch.equal(rows, torch.where(ids >= 6, ids - 6, -1))
    assert owned.tolist() == sorted((rows >= 0).nonzero().flatten().tolist(), key=rows.tolist().__getitem__)
    back = found.from_rows(0, first.spread(ids))
    assert torch.equal(back, torch.where(counted, labels[0], 0))
