"""Where the virtual pipeline stages live: (rank, chunk) -> stage and back.

A rank holds ``chunks`` model chunks; chunk ``c`` of rank ``r`` is one virtual stage. In the ``standard``
placement (1F1B, interleaved) every chunk runs from rank 0 to rank p-1, so the stage is ``c * p + r``. In the
``vshape`` placement (V-Half and its relatives) odd chunks run back, so with two chunks rank 0 holds the first
and the last stage.

Source: section 5 and appendix D; Qi et al., Pipeline Parallelism with Controllable Memory (2024).
Next: ``schedule.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Shape = Literal["standard", "vshape"]

MOST_CHUNKS = 64  # on a rank


@dataclass(frozen=True, slots=True)
class Placement:
    """The map between stages and ranks: pipeline size, model chunks on each rank, and shape.

    ``mtp`` is the stage of the layers of multi-token prediction, if it is another than the last.

    Raises:
        ValueError: if a size or ``mtp`` is out of range, or the shape is unknown.
    """

    p: int
    chunks: int = 1
    shape: Shape = "standard"
    mtp: int | None = None

    def __post_init__(self) -> None:
        if self.p < 1:
            raise ValueError(f"pipeline size {self.p} is below 1; use at least one rank")
        if self.chunks < 1:
            raise ValueError(f"{self.chunks} chunks per rank is below 1; use at least one")
        if self.chunks > MOST_CHUNKS:
            raise ValueError(f"{self.chunks} chunks per rank is above {MOST_CHUNKS}; use fewer")
        if self.shape not in ("standard", "vshape"):
            raise ValueError(f"unknown placement {self.shape!r}; choose standard or vshape")
        if self.mtp is not None and not 0 <= self.mtp < self.num_stages:
            raise ValueError(
                f"multi-token prediction on stage {self.mtp}: choose one of 0 to {self.last_stage}"
            )

    @property
    def num_stages(self) -> int:
        return self.p * self.chunks

    @property
    def last_stage(self) -> int:
        return self.num_stages - 1

    @property
    def ranks(self) -> tuple[int, ...]:
        """The rank of each stage."""
        forwards = tuple(range(self.p))
        back = forwards[::-1] if self.shape == "vshape" else forwards
        return ((forwards + back) * self.chunks)[: self.num_stages]

    @property
    def first_rank(self) -> int:
        return self.rank_of(0)

    @property
    def last_rank(self) -> int:
        return self.rank_of(self.last_stage)

    @property
    def mtp_stage(self) -> int:
        """The stage with the layers of multi-token prediction; later stages pass on the rows of all heads."""
        return self.last_stage if self.mtp is None else self.mtp

    @property
    def loss_stage(self) -> int:
        """The stage of the last rank's last chunk: there Megatron's training loops keep labels and loss.

        In a V-shaped placement this is not the last stage: with two ranks, it is stage 2 of 0 to 3.
        """
        return self.stage_of(self.p - 1, self.chunks - 1)

    def chunk_of(self, stage: int) -> int:
        """The number of a stage's chunk on its rank."""
        return stage // self.p

    def rank_of(self, stage: int) -> int:
        chunk, position = divmod(stage, self.p)
        return self.p - 1 - position if self._backwards(chunk) else position

    def stage_of(self, rank: int, chunk: int = 0) -> int:
        return chunk * self.p + (self.p - 1 - rank if self._backwards(chunk) else rank)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, first chunk first."""
        return tuple(self.stage_of(rank, chunk) for chunk in range(self.chunks))

    def _backwards(self, chunk: int) -> bool:
        return self.shape == "vshape" and chunk % 2 == 1
