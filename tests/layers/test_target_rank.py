"""How many ids are likelier than the target, and whether any is, beside whole float64 logits."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron_vocabpar.layers.extras.extra import join
from megatron_vocabpar.layers.extras.target_rank import TargetRank, ids_above_target
from megatron_vocabpar.layers.output.plain import OutputState, output_forward
from megatron_vocabpar.layers.partition import even_ranges

V, ROWS = 397, 400
LIMITS = {
    torch.bfloat16: (2**-7, 87),
    torch.float16: (2**-10, 19),
    torch.float32: (4e-5, 87),
    torch.float64: (1e-12, 700),
}
"""By how much likelier an id may be and still count as equal; how many nats below a shard's likeliest id."""


def ranks_and_wins(x: Tensor, w: Tensor, targets: Tensor, shards: int, vocab: int) -> tuple[Tensor, Tensor]:
    """[n] each; a target that wins has rank 0."""
    gathered, states, extra = [], [], TargetRank()
    for shard in even_ranges(len(w), shards, vocab):
        state, statistics = output_forward(x, w[shard.start : shard.stop], targets, shard, extras=[extra])
        assert isinstance(state, OutputState)
        states.append(state)
        gathered.append(statistics)
    softmax = join(torch.stack(gathered), [extra])
    rank = torch.stack([ids_above_target(state.stored, softmax) for state in states]).sum(0)
    wins = extra.deliver(softmax)["correct"]
    assert not (wins & (rank > 0)).any()
    return rank, wins


def row(kind: str, distance: float) -> Tensor:
    """[V] logits: multiples of 1/16, up to 4 apart but for one that is so much above, or for ties."""
    draw = torch.Generator().manual_seed(int(distance))
    logits = torch.randint(0, 64, (V,), generator=draw).double() / 16
    if kind == "ties":  # ids 100 and above
        logits[100:] = 0.5
    logits[3] = distance
    return logits


@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_ranks_equal_those_of_float64(dtype: torch.dtype, shards: int) -> None:
    """One id 20 to 200 nats above; ids as likely as the target on all shards: 297 of them."""
    rounding, depth = LIMITS[dtype]
    for kind in ("random", "ties"):
        for distance in (0, 20, 25, 30, 40, 60, 80, 90, 200):
            logits = row(kind, distance)
            # logits = 8 whole + fraction, each exact in 8 bits, and so are products and sums
            whole = (logits / 8).floor()
            w = torch.zeros(ROWS, 2, dtype=dtype)
            w[:V] = torch.stack((whole, logits - 8 * whole), 1).to(dtype)
            targets = torch.arange(V)
            x = torch.tensor([[8.0, 1.0]], dtype=dtype).expand(V, 2).contiguous()
            rank, wins = ranks_and_wins(x, w, targets, shards, V)
            gap = logits.unsqueeze(0) - logits.unsqueeze(1)  # [target, id]
            # The shard's offset leaves the target out.
            others = logits.expand(V, V).clone().fill_diagonal_(-math.inf)
            tops = [part.amax(1, keepdim=True).expand_as(part) for part in others.split(ROWS // shards, 1)]
            kept = logits > torch.cat(tops, 1) - depth
            surely = ((gap > math.log1p(rounding)) & kept).sum(1)
            at_most = (gap > 0).sum(1)
            assert bool(((surely <= rank) & (rank <= at_most)).all()), (kind, distance)
            best = logits == logits.amax()
            assert wins.equal(best), (kind, distance)
            if kind == "ties" and distance < depth:
                assert rank[V - 1] == rank[100] == (logits > 0.5).sum()


@pytest.mark.parametrize(
    ("dtype", "distance"),
    [(torch.bfloat16, 90), (torch.float32, 90), (torch.float64, 800), (torch.float16, 40)],
    ids=str,
)
def test_one_id_far_above_counts_as_one(dtype: torch.dtype, distance: int) -> None:
    """On another shard than the target it takes no digit of the target's own shard."""
    logits = torch.cat((torch.tensor([float(distance)]), torch.zeros(99), torch.arange(100.0) / 16))
    whole = (logits / 8).floor()
    w = torch.stack((whole, logits - 8 * whole), 1).to(dtype)
    x, targets = torch.tensor([[8.0, 1.0]] * 100, dtype=dtype), torch.arange(100, 200)
    rank, _ = ranks_and_wins(x, w, targets, 2, 200)
    assert rank.tolist() == [100 - i for i in range(100)]


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (torch.float64, 1.0),
        (torch.float32, 1.0),
        (torch.float32, 50.0),
        (torch.bfloat16, 1.0),
        (torch.float16, 20.0),
    ],
)
def test_the_target_wins_where_it_is_the_argmax(dtype: torch.dtype, size: float) -> None:
    draw = torch.Generator().manual_seed(0)
    x, w = (torch.randn(rows, 16, generator=draw).mul(size**0.5).to(dtype) for rows in (64, 64))
    logits = x.double() @ w[:61].double().T
    best = logits.argmax(1)
    targets = best.clone()
    targets[1::4] = torch.randint(61, (16,), generator=draw)
    targets[2::4] = logits[2::4].topk(2).indices[:, 1]  # the second
    targets[3::4] = -100
    targets[7] = 62  # padding
    _, wins = ranks_and_wins(x, w, targets, 4, 61)
    assert wins.equal(targets == best)
    assert 0 < wins.sum() < 32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_target_wins_of_equals(dtype: torch.dtype) -> None:
    """Every id has a twin, on another shard."""
    draw = torch.Generator().manual_seed(1)
    x = (20 * torch.randn(64, 16, generator=draw)).to(dtype)
    twins = torch.randn(30, 16, generator=draw).to(dtype)
    w = torch.cat([twins, twins, torch.zeros(4, 16, dtype=dtype)])
    first, second = (x.double() @ twins.double().T).topk(2).indices.T
    for target, wins in ((first, True), (first + 30, True), (second, False)):
        assert bool((ranks_and_wins(x, w, target, 4, 61)[1] == wins).all())


def test_no_id_is_above_a_missing_target() -> None:
    x, w = torch.ones(4, 2), torch.arange(16.0).view(8, 2)
    rank, wins = ranks_and_wins(x, w, torch.tensor([-100, 7, 0, 6]), 2, 7)  # 7 is padding
    assert rank.tolist() == [0, 0, 6, 0]
    assert wins.tolist() == [False, False, False, True]


def test_undefined_logits_are_no_win() -> None:
    x, w = torch.ones(2, 2), torch.zeros(8, 2)
    w[3] = torch.nan
    assert not ranks_and_wins(x, w, torch.tensor([3, 5]), 2, 8)[1].any()
