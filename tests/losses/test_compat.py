"""The functions under other frameworks' names, over real ranks, against the unsharded float64 definition."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vocabpar.losses.compat import nemo_rl, slime
from tests.losses import reference
from tests.losses.reference import error
from tests.spawn import run_ranks

TOKENS, VOCAB, HIDDEN = 8, 12, 5


class Whole:
    """The unsharded case: hidden [b, s, H], weight [V, H], logits [b, s, V] of them, targets [b, s]."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(7)
        self.hidden = torch.randn(2, TOKENS, HIDDEN, generator=draw, dtype=torch.float64)
        self.weight = torch.randn(VOCAB, HIDDEN, generator=draw, dtype=torch.float64)
        self.targets = torch.randint(0, VOCAB, (2, TOKENS), generator=draw)

    def logits(self) -> Tensor:
        return (self.hidden @ self.weight.t()).requires_grad_()

    def shard(self, rank: int, size: int) -> tuple[Tensor, slice]:
        mine = slice(rank * VOCAB // size, (rank + 1) * VOCAB // size)
        return self.logits().detach()[..., mine].clone().requires_grad_(), mine


def weighted(x: Tensor) -> Tensor:
    return (x * torch.linspace(-1, 2, x.numel(), dtype=x.dtype).view_as(x)).sum()


def same(found: Tensor, expected: Tensor, leaf: Tensor, full: Tensor, mine: slice) -> None:
    """Values, and gradients of one weighted sum of them."""
    assert error(found, expected) < 1e-13
    leaf.grad = full.grad = None
    weighted(found).backward()
    weighted(expected).backward(retain_graph=True)
    assert error(leaf.grad, full.grad[..., mine]) < 1e-13


def _from_megatron(rank: int) -> None:
    from megatron.core import parallel_state

    from megatron_vocabpar.losses.compat import roll, verl

    size = dist.get_world_size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    whole = Whole()
    full = whole.logits()
    leaf, mine = whole.shard(rank, size)
    targets = whole.targets
    same(roll.vocab_parallel_logprobs(leaf, targets), reference.logprobs(full, targets), leaf, full, mine)
    same(roll.vocab_parallel_entropy(leaf, True, False), reference.entropy(full), leaf, full, mine)
    ahead = (full > full.gather(-1, targets.unsqueeze(-1))).sum(dim=-1)
    assert torch.equal(roll.vocab_parallel_target_rank(leaf, targets), ahead)
    same(verl.vocab_parallel_entropy(leaf), reference.entropy(full), leaf, full, mine)
    same(
        verl.vocab_parallel_log_probs_from_logits(leaf, targets),
        reference.logprobs(full, targets),
        leaf,
        full,
        mine,
    )
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(context_parallel_size=size)
    chunk = TOKENS // (2 * size)
    held = [*range(rank * chunk, (rank + 1) * chunk)]
    held += [*range((2 * size - 1 - rank) * chunk, (2 * size - rank) * chunk)]
    part = whole.hidden[:, held].clone().requires_grad_()
    gathered = roll.context_parallel_gather(part, 1)
    assert torch.equal(gathered, whole.hidden)
    gathered.square().sum().backward()
    assert torch.equal(part.grad, 2 * whole.hidden[:, held])


def test_roll_and_verl() -> None:
    run_ranks(2, _from_megatron)


def _nemo_rl(rank: int) -> None:
    group, size = dist.group.WORLD, dist.get_world_size()
    whole = Whole()
    full = whole.logits()
    leaf, mine = whole.shard(rank, size)
    ids = (mine.start, mine.stop, group)
    expected = reference.logprobs(full[:, :-1], whole.targets[:, 1:])
    for chunk in (None, 3):
        found = nemo_rl.from_parallel_logits_to_logprobs(leaf, whole.targets, *ids, chunk_size=chunk)
        same(found, expected, leaf, full, mine)
    # logits padded behind the sequence
    padded = torch.cat((leaf, torch.full_like(leaf[:, :2], torch.nan)), dim=1)
    found = nemo_rl.from_parallel_logits_to_logprobs(padded, whole.targets, *ids)
    assert error(found, expected) < 1e-13
    assert torch.equal(nemo_rl.vocab_parallel_argmax(leaf, tp_group=group), full.argmax(dim=-1))
    # sequence-parallel hidden states
    hidden = whole.hidden.transpose(0, 1).chunk(size)[rank].clone().requires_grad_()
    weight = whole.weight[mine].clone().requires_grad_()
    found = nemo_rl.from_parallel_hidden_states_to_logprobs(
        hidden, weight, True, whole.targets, *ids, chunk_size=3
    )
    assert error(found, expected) < 1e-13
    weighted(found).backward()
    full_x, full_w = whole.hidden.clone().requires_grad_(), whole.weight.clone().requires_grad_()
    weighted(reference.logprobs((full_x @ full_w.t())[:, :-1], whole.targets[:, 1:])).backward()
    assert error(hidden.grad, full_x.grad.transpose(0, 1).chunk(size)[rank]) < 1e-13
    assert error(weight.grad, full_w.grad[mine]) < 1e-13
    with pytest.raises(ValueError, match="top-k"):
        nemo_rl.from_parallel_logits_to_logprobs(
            leaf, whole.targets, *ids, sampling_params=SimpleNamespace(top_k=5)
        )
    # context parallelism: each rank's own group for the vocabulary
    own = [dist.new_group([r]) for r in range(size)][rank]
    chunk = TOKENS // (2 * size)
    chunks = whole.logits().detach().split(chunk, dim=1)
    leaf = torch.cat((chunks[rank], chunks[2 * size - 1 - rank]), dim=1).requires_grad_()
    found = nemo_rl.from_parallel_logits_to_logprobs(leaf, whole.targets, 0, VOCAB, own, cp_group=group)
    assert error(found, expected) < 1e-13
    weighted(found).backward()
    full.grad = None
    weighted(expected).backward()
    grads = full.grad.split(chunk, dim=1)
    # NeMo-RL adds the ranks' gradients of the gathered sequence.
    assert error(leaf.grad, size * torch.cat((grads[rank], grads[2 * size - 1 - rank]), dim=1)) < 1e-13
    with pytest.raises(ValueError, match="context parallelism"):
        nemo_rl.from_parallel_hidden_states_to_logprobs(
            hidden, weight, True, whole.targets, *ids, cp_group=group
        )


def test_nemo_rl() -> None:
    run_ranks(2, _nemo_rl)


def _slime(rank: int, named: bool) -> None:
    size = dist.get_world_size()
    group = dist.group.WORLD if named else None  # None means all ranks there
    whole = Whole()
    full = whole.logits()
    leaf, mine = whole.shard(rank, size)
    tokens = whole.targets.flatten()
    keep = torch.rand(2 * TOKENS, VOCAB, generator=torch.Generator().manual_seed(1)) < 0.5
    forced = keep.clone()
    forced[torch.arange(2 * TOKENS), tokens] = True
    masked = full.flatten(0, 1).masked_fill(~forced, -torch.inf)
    entropy_wanted = reference.entropy(full).flatten()
    for mask, wanted in (
        (None, reference.logprobs(full, whole.targets).view(-1, 1)),
        (keep[:, mine], reference.logprobs(masked, tokens).view(-1, 1)),
    ):
        for with_grad in (True, False):
            logprob, entropy = slime.calculate_log_probs_and_entropy(
                leaf.flatten(0, 1), tokens, group, True, 5, mask, with_grad
            )
            assert logprob.shape == (2 * TOKENS, 1)
            assert entropy.requires_grad == with_grad
            assert error(entropy, entropy_wanted) < 1e-13
            value, expected = logprob.squeeze(-1), wanted.squeeze(-1)
            if with_grad:
                value, expected = value + 2 * entropy, expected + 2 * entropy_wanted
            leaf.grad = full.grad = None
            weighted(value).backward()
            weighted(expected).backward(retain_graph=True)
            assert error(value, expected) < 1e-13
            assert error(leaf.grad, full.grad[..., mine]) < 1e-13
    logprob, entropy = slime.calculate_log_probs_and_entropy(leaf.flatten(0, 1), tokens, group)
    assert entropy is None
    for result in slime.calculate_log_probs_and_entropy(leaf.flatten(0, 1)[:0], tokens[:0], group, True):
        assert result.shape == (0,)


@pytest.mark.parametrize("named", [True, False])
def test_slime(named: bool) -> None:
    run_ranks(3, _slime, named)
