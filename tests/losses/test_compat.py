"""The functions under other frameworks' names, over real ranks, against the unsharded float64 definition."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor

from tests.losses import reference
from tests.losses.reference import error
from tests.spawn import run_ranks

TOKENS, VOCAB, HIDDEN = 8, 12, 5

_EXAMPLE = Path(__file__).parents[2] / "examples" / "losses_compat.py"
nemo_rl = slime = verl = SimpleNamespace(**runpy.run_path(str(_EXAMPLE)))


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

    from megatron_vocabpar.losses.compat import roll

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


def test_nemo_rl() -> None:
    run_ranks(2, _nemo_rl)


def _slime(rank: int) -> None:
    group = dist.group.WORLD
    whole = Whole()
    full = whole.logits()
    leaf, mine = whole.shard(rank, dist.get_world_size())
    tokens = whole.targets.flatten()
    wanted = reference.logprobs(full, whole.targets).view(-1, 1)
    both = slime.calculate_log_probs_and_entropy(leaf.flatten(0, 1), tokens, group, True, 5)
    expected = wanted + 2 * reference.entropy(full).view(-1, 1)
    same(both[0] + 2 * both[1].unsqueeze(-1), expected, leaf, full, mine)
    alone, entropy = slime.calculate_log_probs_and_entropy(leaf.flatten(0, 1), tokens, group)
    same(alone, wanted, leaf, full, mine)
    assert entropy is None


def test_slime() -> None:
    run_ranks(3, _slime)


def test_verl_linear_cross_entropy() -> None:
    hidden, weight, labels = torch.randn(2, 3, 4), torch.randn(9, 4), torch.randint(0, 9, (2, 3))
    logprobs, entropy = verl.linear_cross_entropy(hidden, weight, labels, 0.8, "none", None)
    logits = (hidden.double() @ weight.double().t()).flatten(0, 1)
    assert error(logprobs, reference.logprobs(logits, labels.flatten(), 0.8)) < 1e-6
    assert error(entropy, reference.entropy(logits, 0.8)) < 1e-6
