"""Where the shards of one vocabulary live, and how their numbers meet.

The losses compute on the shards of this process and hand small tensors of each shard to an ``Exchange``.
``InProcess`` has every shard in this process (tests, one GPU); ``OverGroup`` has one shard per rank of a
``torch.distributed`` group, such as a tensor-parallel or a pipeline group. Both combine in rank order.
Next: ``sources.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vocabpar.gather import all_gather
from megatron_vocabpar.layers.partition import VocabRange, check_cover, ranges_from_sizes


@dataclass(frozen=True, slots=True)
class InProcess:
    """All ``size`` shards are in this process.

    The argument ``parts`` has one tensor for each shard of this process, in rank order, all of one shape.
    """

    size: int

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks of the shards of this process."""
        return tuple(range(self.size))

    def gather(self, parts: Sequence[Tensor]) -> Tensor:
        """[R, ...] the tensors of all shards, in rank order."""
        return torch.stack(list(parts))

    def total(self, parts: Sequence[Tensor]) -> Tensor:
        """The sum over all shards."""
        result = parts[0].clone()
        for part in parts[1:]:
            result += part
        return result


@dataclass(frozen=True, slots=True)
class OverGroup:
    """A process group with one shard on each rank; all ranks make the same calls in one order."""

    group: dist.ProcessGroup

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def members(self) -> tuple[int, ...]:
        return (dist.get_rank(self.group),)

    def gather(self, parts: Sequence[Tensor]) -> Tensor:
        return all_gather(parts[0], self.group)

    def total(self, parts: Sequence[Tensor]) -> Tensor:
        result = parts[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(result, op=dist.ReduceOp.SUM, group=self.group)
        return result


Exchange = InProcess | OverGroup


def make_exchange(group: dist.ProcessGroup | None, shards: int) -> Exchange:
    """The exchange of a call that was given so many shards; without a group they are all.

    Raises:
        ValueError: for several shards and a group.
    """
    if group is None:
        return InProcess(shards)
    if shards != 1:
        raise ValueError(f"{shards} shards and a process group: with a group, pass this rank's shard alone")
    return OverGroup(group)


def local_ranges(
    exchange: Exchange,
    widths: Sequence[int],
    ranges: Sequence[VocabRange] | VocabRange | None,
    vocab_size: int | None,
    device: torch.device,
) -> tuple[VocabRange, ...]:
    """The ranges of this process's shards.

    Args:
        exchange: where the shards are.
        widths: rows of each shard of this process.
        ranges: of all ranks; or, with a group, of this rank alone; None: shards in this process follow one
            another, and the ranks of a group have equal widths.
        vocab_size: true ids if ``ranges`` is None; None counts every row.
        device: of the shards. If each rank of a group gives its own range, the CPU gathers and checks them;
            on a GPU the host would wait for it.

    Raises:
        ValueError: if the number of ranges or a width does not fit; for gaps and overlaps.
    """
    if ranges is None:
        all_widths = list(widths) if isinstance(exchange, InProcess) else [widths[0]] * exchange.size
        ranges = ranges_from_sizes(all_widths, sum(all_widths) if vocab_size is None else vocab_size)
    if isinstance(ranges, VocabRange):
        if len(exchange.members) != 1:
            raise ValueError(f"one range for {len(exchange.members)} shards: give the range of each")
        local: tuple[VocabRange, ...] = (ranges,)
    else:
        if len(ranges) != exchange.size:
            raise ValueError(f"{len(ranges)} ranges for {exchange.size} shards: give the range of each rank")
        local = tuple(ranges[member] for member in exchange.members)
    for member, width, shard in zip(exchange.members, widths, local, strict=True):
        if width != shard.rows:
            raise ValueError(
                f"rank {member} has {width} vocabulary entries, its range [{shard.start}, {shard.stop}) has "
                f"{shard.rows}: pass `ranges` with the true sizes (uneven shards are allowed)"
            )
    if not isinstance(ranges, VocabRange):
        check_cover(ranges)
    elif device.type == "cpu":
        edges = torch.tensor([ranges.start, ranges.stop, ranges.vocab_size])
        check_cover(VocabRange(*edge) for edge in exchange.gather([edges]).tolist())
    return local
