"""Tokens and labels of every microbatch, on every rank.

Megatron gives a batch only to the first chunk of the first rank and to the last chunk of the last rank.
Before an iteration both run ``forward_step`` for every microbatch with a stand-in for the model
(``recording.py``). Then the first sends the tokens to all ranks, and the last sends the labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch

from megatron_vocabpar.layers.embedding import Ids, InputPlan, plan_input
from megatron_vocabpar.layers.partition import VocabRange
from megatron_vocabpar.layers.targets import ShardTargets
from megatron_vocabpar.runtime.comm import VocabGroups, broadcast
from megatron_vocabpar.runtime.streams import HostCopy, queue_to_device, start_to_host, to_device, to_host
from megatron_vocabpar.schedule.words.passes import Instruction, parts_of
from megatron_vocabpar.schedule.words.placement import Placement

IGNORED = -100
"""The label of a token without a loss, as in Megatron and PyTorch."""
DROPPED = torch.iinfo(torch.int64).min
"""With ``drop_masked``, the label of a token that the loss mask leaves out, in place of its own."""


@dataclass(frozen=True)
class EmbeddedTokens:
    """The tokens that the stages of one pipeline rank embed.

    Attributes:
        rank: the pipeline rank.
        shape: ``(k, b, s)``: k sets.
        plan: which member owns which of the ``[k * b * s]`` positions.
    """

    rank: int
    shape: tuple[int, int, int]
    plan: InputPlan[torch.Tensor]


@dataclass(frozen=True)
class Microbatch:
    """The ids and the plan of one microbatch, on every rank.

    The output layer gets only the ``n`` rows that count: those whose label is a true id, in the order of
    ``Microbatches.rows``, or the first row if there are none. Losses and gradients of the others are 0.

    Attributes:
        shape: ``(1 + D, b, s)`` on this context-parallel rank, with D further heads.
        embedded: the tokens that stages embed, one entry for each pipeline rank that embeds.
        owned_rows: the rows of this rank's shard of the tokens that it owns, of all entries.
        by_row: what sorts these; equal rows stay as they are.
        counted: positions ``[n]`` of these rows among ``[(1 + D) b s]``, int64; None if all count.
        counts: the number of such rows in each part into which sequence parallelism cuts the sequence.
        targets: where the ``[n]`` labels lie in this rank's shard.
    """

    shape: tuple[int, int, int]
    embedded: tuple[EmbeddedTokens, ...]
    owned_rows: torch.Tensor
    by_row: torch.Tensor
    counted: torch.Tensor | None
    counts: tuple[int, ...]
    targets: ShardTargets

    @property
    def tokens(self) -> int:
        """``n``: rows of the output layer."""
        return sum(self.counts)

    def counted_in(self, part: int) -> torch.Tensor | None:
        """The positions of the rows that count, within one part; None if all count."""
        if self.counted is None:
            return None
        start = sum(self.counts[:part])
        positions = self.counted[start : start + self.counts[part]]
        return positions - part * (prod(self.shape) // len(self.counts))

    def take(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows that count, ``[n, ...]``, of all rows ``[(1 + D) b s, ...]``."""
        return rows if self.counted is None else rows.index_select(0, self.counted)

    def spread(self, rows: torch.Tensor, part: int | None = None) -> torch.Tensor:
        """The reverse of ``take``: all rows, or those of one part, with 0 in those that don't count."""
        positions = self.counted if part is None else self.counted_in(part)
        if positions is None:
            return rows
        size = prod(self.shape) // (1 if part is None else len(self.counts))
        return rows.new_zeros((size, *rows.shape[1:])).index_copy_(0, positions, rows)


class Microbatches(dict[int, Microbatch]):
    """The microbatches of an iteration by number, planned when first asked for, freed when their passes end.

    Planning needs only the host, and happens while the device works on what is queued. Its results go to the
    device in one copy, for which the host does not wait. All ids stay on the host: 16 bytes a token.

    Args:
        shapes: ``(1 + D, b, s)`` of each.
        tokens, labels: ``[total]`` int64 on the host, those of all microbatches.
        device: where plans go.
        ranges: rows of every member of the vocabulary group; empty if the vocabulary is not partitioned.
        member: this rank's number among them.
        embedding_ranks: the pipeline ranks of the first stage, which embeds the first set of tokens, and of
            the layers of multi-token prediction, which embed the others.
        parts: the number of parts into which sequence parallelism cuts the hidden states.
    """

    def __init__(
        self,
        *,
        shapes: Sequence[tuple[int, int, int]],
        tokens: torch.Tensor,
        labels: torch.Tensor,
        device: torch.device,
        ranges: tuple[VocabRange, ...],
        member: int,
        embedding_ranks: tuple[int, int] = (0, 0),
        parts: int = 1,
    ) -> None:
        super().__init__()
        self.shapes = tuple(shapes)
        cuts = np.cumsum([prod(shape) for shape in shapes])[:-1]
        self._tokens, self._labels = (
            [ids.reshape(shape) for ids, shape in zip(np.split(total.numpy(), cuts), shapes, strict=False)]
            for total in (tokens, labels)
        )
        self._device = device
        self._ranges = ranges
        self._member = member
        self._embedding_ranks = embedding_ranks
        self._parts = parts
        self._stops = np.array([shard.stop for shard in ranges])
        sizes = {shard.rows for shard in ranges}
        self._even = sizes.pop() if len(sizes) == 1 else None

    def labels(self, i: int) -> torch.Tensor:
        """Target ids ``[1 + D, b, s]`` of a microbatch, on the device."""
        return queue_to_device(torch.from_numpy(self._labels[i]), self._device)

    def rows(self, i: int, values: torch.Tensor) -> torch.Tensor:
        """``[(1 + D) b s]`` in the order of C0's hidden states: by part, head, position, sequence.

        Example: one head, b = 2, s = 4, two parts. Of sequences 0 1 2 3 and 4 5 6 7 the first part has
        positions 0 and 1, so the order is 0 4 1 5, then 2 6 3 7.
        """
        k, b, _ = self.shapes[i]
        if b == k == 1:
            return values.reshape(-1)
        return values.view(k, b, self._parts, -1).permute(2, 0, 3, 1).reshape(-1)

    def of_main_head(self, i: int) -> torch.Tensor:
        """``[n]`` float32: 1 in the rows of a microbatch that are the main head's, 0 in further heads'."""
        k, b, s = self.shapes[i]
        first = torch.zeros(k, b * s, device=self._device)
        first[0] = 1.0
        return self[i].take(self.rows(i, first))

    def from_rows(self, i: int, rows: torch.Tensor) -> torch.Tensor:
        """The reverse of ``rows``: ``[1 + D, b, s]``, contiguous: loss functions flatten it."""
        k, b, s = self.shapes[i]
        if b == k == 1:
            return rows.view(1, 1, s)
        return rows.view(self._parts, k, -1, b).permute(1, 3, 0, 2).reshape(k, b, s).contiguous()

    def __missing__(self, i: int) -> Microbatch:
        self[i] = planned = self._plan(i)
        return planned

    def freed_after(self, program: Sequence[Instruction]) -> Callable[[Instruction], None]:
        """What is to be called after each of this rank's instructions: it frees plans behind their last."""
        last = {part.microbatch: instruction for instruction in program for part in parts_of(instruction)}
        freed: dict[Instruction, list[int]] = {}
        for microbatch, instruction in last.items():
            freed.setdefault(instruction, []).append(microbatch)

        def free(instruction: Instruction) -> None:
            for microbatch in freed.get(instruction, ()):
                self.pop(microbatch, None)

        return free

    def _plan(self, i: int) -> Microbatch:
        """Plan on the host, in numpy, where torch would take several times as long; ship all in one copy."""
        shard, sets = self._ranges[self._member], list(self._sets(i))
        plans = [plan_input(ids.ravel(), self._stops, self._even) for _, ids in sets]
        owned = [
            ids.ravel()[plan.positions(self._member)] for (_, ids), plan in zip(sets, plans, strict=True)
        ]
        rows = (np.concatenate(owned) if len(owned) > 1 else owned[0]) - shard.start
        labels, counted, of_parts = self._counted(i)
        targets = labels - shard.start  # as ``shard_targets`` finds them
        tokens = (targets.view(np.uint64) < shard.valid_rows).nonzero()[0]  # numbers below 0 are large ones
        inside = targets.take(tokens)
        targets.fill(-1)
        targets[tokens] = inside
        flat = [rows, _sorting(rows, shard), targets, tokens.take(_sorting(inside, shard))]
        flat += ([] if counted is None else [counted]) + [plan.order for plan in plans]
        owned_rows, by_row, *placed = to_device(flat, self._device)
        embedded = tuple(
            EmbeddedTokens(rank, ids.shape, InputPlan(order, plan.counts))
            for (rank, ids), plan, order in zip(sets, plans, placed[-len(plans) :], strict=True)
        )
        places = None if counted is None else placed[2]
        in_shard = ShardTargets(*placed[:2])
        return Microbatch(self.shapes[i], embedded, owned_rows, by_row, places, of_parts, in_shard)

    def _sets(self, i: int) -> Iterator[tuple[int, Ids]]:
        """Token ids ``[k, b, s]``, by the pipeline rank that embeds them."""
        ids, (first, heads) = self._tokens[i], self._embedding_ranks
        if first == heads or len(ids) == 1:
            yield first, ids
        else:
            yield first, ids[:1]
            yield heads, ids[1:]

    def _counted(self, i: int) -> tuple[Ids, Ids | None, tuple[int, ...]]:
        """The labels that count, their positions or None if all do, and how many are in each part."""
        (k, b, _), parts, size = self.shapes[i], self._parts, self._ranges[0].vocab_size
        labels = self._labels[i].reshape(k, b, parts, -1).transpose(2, 0, 3, 1).ravel()  # as ``rows``
        if labels.min() >= 0 and labels.max() < size:
            return labels, None, (len(labels) // parts,) * parts
        counted = np.flatnonzero((labels >= 0) & (labels < size))
        if len(counted) == 0:
            counted = np.zeros(1, np.int64)  # kernels and collectives want a row
        counts = np.bincount(counted // (len(labels) // parts), minlength=parts)
        return labels[counted], counted, tuple(counts.tolist())


def _sorting(rows: Ids, shard: VocabRange) -> Ids:
    """What sorts rows of a shard; equal ones stay as they are. 16 bits sort several times as fast."""
    return rows.astype(np.uint16 if shard.rows <= 1 << 16 else np.int64).argsort(kind="stable")


def no_microbatches() -> Microbatches:
    """The microbatches of an iteration that shares none."""
    nothing = torch.empty(0, dtype=torch.int64)
    return Microbatches(shapes=(), tokens=nothing, labels=nothing, device=nothing.device, ranges=(), member=0)


@dataclass(frozen=True)
class Batches:
    """What ``forward_step`` gave this rank, one tensor ``[1 + D, b, s]`` a microbatch; None: another rank's.

    Attributes:
        tokens: int64, on the members of the first stage.
        labels: int64, on the members that have the loss.
    """

    tokens: list[torch.Tensor] | None = None
    labels: list[torch.Tensor] | None = None


def share_microbatches(
    batches: Batches,
    *,
    groups: VocabGroups,
    ranges: tuple[VocabRange, ...],
    placement: Placement,
    num_microbatches: int,
    device: torch.device,
    parts: int,
) -> Microbatches:
    """Send tokens and labels of all microbatches to every rank of the group.

    The host waits for the device twice: for the shapes, and for all ids together.

    Args:
        batches: what this rank has of them.
        placement: where the stages are: the first has the tokens, the loss stage the labels.
        parts: the number of parts into which sequence parallelism cuts the hidden states.

    Raises:
        ValueError: on every rank, if a token id or a label is outside the vocabulary; ``IGNORED`` may be.
    """
    first_member = groups.members_of(placement.first_rank)[0]
    last_member = groups.members_of(placement.p - 1)[0]

    def share(flat: torch.Tensor, values: list[torch.Tensor] | None, member: int) -> torch.Tensor:
        if values is not None:
            flat.copy_(queue_to_device(torch.cat([value.reshape(-1) for value in values]), device))
        broadcast(groups, [flat], [member])
        return flat

    sizes = None
    if batches.tokens is not None:
        sizes = [torch.tensor([list(tokens.shape) for tokens in batches.tokens])]
    flat = share(torch.empty(3 * num_microbatches, dtype=torch.int64, device=device), sizes, first_member)
    shapes = [(int(k), int(b), int(s)) for k, b, s in to_host(flat).view(-1, 3).tolist()]
    total = sum(prod(shape) for shape in shapes)

    def share_ids(values: list[torch.Tensor] | None, member: int) -> HostCopy:
        return start_to_host(share(torch.empty(total, dtype=torch.int64, device=device), values, member))

    # Counts of the plans are sizes of messages, so the ids come to the host, all at once.
    copies = share_ids(batches.tokens, first_member), share_ids(batches.labels, last_member)
    tokens, labels = (copy.wait() for copy in copies)
    if ranges:
        vocab_size = ranges[0].vocab_size
        _check_ids("token id", tokens, shapes, vocab_size)
        _check_ids("label", labels, shapes, vocab_size, exempt=(IGNORED, DROPPED))
    return Microbatches(
        shapes=shapes,
        tokens=tokens,
        labels=labels,
        device=device,
        ranges=ranges,
        member=groups.member,
        embedding_ranks=(placement.first_rank, placement.rank_of(placement.mtp_stage)),
        parts=parts,
    )


_REMEDY = {
    "token id": "",
    "label": f"; give a token without a loss the label {IGNORED}, or mask it in the loss_mask that "
    "forward_step passes to the model",
}


def _check_ids(
    name: str,
    ids: torch.Tensor,
    shapes: Sequence[tuple[int, int, int]],
    vocab_size: int,
    exempt: Sequence[int] = (),
) -> None:
    """Raise a ValueError that names the first of ``[total]`` ids which is neither in [0, V) nor exempt."""
    outside = (ids < 0) | (ids >= vocab_size)
    for value in exempt:
        outside &= ids != value
    if not outside.any():
        return
    first = int(outside.nonzero()[0])
    i, place = 0, first
    while place >= prod(shapes[i]):
        place -= prod(shapes[i])
        i += 1
    _, b, s = shapes[i]
    raise ValueError(
        f"{name} {int(ids[first])} in microbatch {i}, sequence {place // s % b}, position {place % s}, is "
        f"outside the vocabulary of {vocab_size} ids; use the tokenizer the data was made with, or a larger "
        f"vocabulary{_REMEDY[name]}"
    )
