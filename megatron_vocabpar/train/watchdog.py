"""Says which ranks of a job stand still, and which one stopped first.

Next: ``failure.py``, which has the ranks' records; ``workers.py``, which asks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron_vocabpar.schedule.play.hang import places_in_step
from megatron_vocabpar.schedule.serialize import plan_from_json
from megatron_vocabpar.train.config import TrainConfig
from megatron_vocabpar.train.failure import Record, TrainingFailed
from megatron_vocabpar.train.output import LOG_FOLDER, SCHEDULE_DATA_FILE

_QUIET_S = 15.0


@dataclass
class Watchdog:
    """Says that no rank has got any further for a while, and where each rank is.

    Attributes:
        timeout_s: after which the job ends; 0 is never.
        places: gives each instruction's place in an order in which none waits for a later one.
    """

    logs: Path
    ranks: int
    timeout_s: float
    say: Callable[[str], None]
    places: Callable[[], Mapping[str, int]] = dict

    @classmethod
    def of(cls, config: TrainConfig) -> Watchdog:
        """That of a method's job."""
        folder = Path(config.output)
        schedule = folder / SCHEDULE_DATA_FILE
        say = partial(print, flush=True)
        return cls(folder / LOG_FOLDER, config.world_size, config.timeout, say, partial(_places, schedule))

    def __post_init__(self) -> None:
        self._seen: list[Record] = []
        self._since = self._said = time.monotonic()

    def look(self) -> None:
        """Call it now and then; raises ``TrainingFailed`` after ``timeout_s`` without progress."""
        now, records = time.monotonic(), [Record.read(self.logs, rank) for rank in range(self.ranks)]
        if records != self._seen or any(record.step is None for record in records):
            self._seen, self._since, self._said = records, now, now
        elif self.timeout_s and now - self._since >= self.timeout_s:
            raise TrainingFailed(f"--timeout {self.timeout_s:g}: {self._text(now)}")
        elif now - self._said >= _QUIET_S:
            self._said = now
            self.say(self._text(now))

    def stood_still(self) -> str:
        """For a job that has failed: a line on where the ranks stood, if none had got further for a while.

        NCCL's timeout ends the ranks that wait, not the one that they wait for.
        """
        now = time.monotonic()
        return f"before that: {self._text(now)}\n" if now - self._since >= _QUIET_S else ""

    def _text(self, now: float) -> str:
        places: dict[str, list[str]] = {}
        for rank, record in enumerate(self._seen):
            places.setdefault(record.place, []).append(str(rank))
        where = "; ".join(
            f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(ranks)} {place}"
            for place, ranks in places.items()
        )
        return f"no rank has got any further for {now - self._since:.0f} s: {where}{self._first()}"

    def _first(self) -> str:
        """``; rank N stopped first``: its instruction comes first in the schedule, so it waits for nobody.

        Of several in one communication the last to join does not wait there. Of ranks that stand together
        outside the schedule, or in their last instructions, nothing tells which waits for which.
        """
        places = self.places()
        behind = max(places.values(), default=0)
        stands: dict[tuple[int, int], list[int]] = {}
        for rank, record in enumerate(self._seen):
            place = places.get(record.instruction, behind) if record.instruction else -1
            stands.setdefault((record.step or 0, place), []).append(rank)
        first = min(stands)
        if len(stands[first]) > 1 and first[1] in (-1, behind):
            return ""
        return f"; rank {max(stands[first], key=lambda rank: self._seen[rank].began_s)} stopped first"


def _places(schedule: Path) -> dict[str, int]:
    """``places_in_step``, with each rank's last instruction placed after all others."""
    plan = plan_from_json(schedule.read_text())
    places = places_in_step(plan.schedule, plan.program)
    last = {row[-1] for row in plan.program}
    return {str(item): len(places) if item in last else position for item, position in places.items()}
