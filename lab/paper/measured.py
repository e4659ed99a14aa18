"""Predicts an iteration from the measured times of its passes, to test the simulator.

A row of the file holds the measurements of one run; nothing is fitted to its iteration. The prediction has
three things that a row does not measure:

- *Baseline and redis* ran Megatron's own 1F1B, which receives between two passes and not beside them: a
  transfer starts when both ranks have reached it. Their rows have no transfer time, so it is the message's
  size over the rate of the other rows' transfers.
- *Interlaced*: all ranks leave S together, since its collectives are inside.
- *The optimizer's step* ends an iteration. Its time is the bytes that it moves over the memory's bandwidth.

Source: the measurements that were published with the paper's artifact, ``data/measured_passes.csv``:
8 A100 in one node; the columns are explained in ``docs/paper.md``.
Next: ``published.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lab.paper.rows import CsvRow, read_rows
from megatron_vocabpar.schedule.make.generate import generate
from megatron_vocabpar.schedule.plan import Plan
from megatron_vocabpar.schedule.play.events import run_events
from megatron_vocabpar.schedule.simulate import Simulation, simulate
from megatron_vocabpar.schedule.times.costs import PassCosts, PassTimes
from megatron_vocabpar.schedule.times.per_rank import PerRank
from megatron_vocabpar.schedule.words.methods import METHODS
from megatron_vocabpar.schedule.words.passes import Comm, CommType, Instruction, PassType
from megatron_vocabpar.schedule.words.schedule import Program, Schedule

_COUNTS = ("pipeline", "num_microbatches", "seq_length", "hidden", "vocab", "layers")
_PER_RANK = ("F_us_per_rank", "B_us_per_rank", "output_us_per_rank", "IF_us_per_rank", "IB_us_per_rank")
COLUMNS = ("method", *_COUNTS, "iteration_ms", *_PER_RANK, "comm_us")
"""The columns that are read; others are allowed."""

# The output layer's three products: S has one of them in Algorithm 1 and two in Algorithm 2; T the others.
_SHARE_OF_S = {"naive": 1 / 3, "vocab-1": 1 / 3, "vocab-2": 2 / 3, "interlaced": 1.0}

_BYTES = 2  # an element of a message
_TRANSFER_BYTES_PER_MS = 36.4e6  # of the published rows: 12.6 MB in 0.35 ms
_MEMORY_BYTES_PER_MS = 2.039e9  # A100 SXM 80 GB, NVIDIA's data sheet
_LAYER_PARAMETERS = 12  # of hidden squared: attention 4, MLP 8
# Bytes of a parameter that mixed-precision Adam moves in a step, half-precision gradients as in the
# published runs: zero the gradient 2; copy it to float32 6; look for infinities and unscale 8; norm 4;
# clip 8; Adam reads gradient, weight and both moments and writes all but the first 28; copy back 6.
_STEP_BYTES = 62


@dataclass(frozen=True)
class MeasuredRow:
    """One measured run, of one sequence a microbatch."""

    method: str
    p: int
    m: int
    seq_length: int
    hidden: int
    vocab: int
    layers: int
    iteration_ms: float
    passes_ms: dict[str, tuple[float, ...]]  # by column of _PER_RANK, one a rank
    comm_ms: float  # one point-to-point transfer; 0 where it was not measured

    def costs(self) -> PassCosts:
        """The times of every rank's passes; B includes the weight gradient."""
        forward, backward, output, *inputs = (self.passes_ms[name] for name in _PER_RANK)
        transfer = self.comm_ms or self.seq_length * self.hidden * _BYTES / _TRANSFER_BYTES_PER_MS
        method = METHODS[self.method]
        if method.in_step:
            output = (max(output),) * self.p
        share = _SHARE_OF_S.get(self.method, 0.0)
        times: dict[str, PerRank] = {
            "S_ms": tuple(share * ms for ms in output),
            "T_ms": tuple((1 - share) * ms for ms in output),
        }
        return PassCosts(
            F_ms=forward,
            B_ms=backward,
            W_ms=0.0,
            IF_ms=inputs[0],
            IB_ms=inputs[1],
            methods={self.method: times} if method.vocabulary_parallel else {},
            p2p_ms=transfer,
            broadcast_ms=transfer,
            all_reduce_ms=transfer,
            layers_per_stage=(1,) * self.p,  # each rank's time is that of the layers that it had
        )

    def step_ms(self) -> float:
        """The ms of the optimizer's step on the rank with most parameters."""
        embedding = self.vocab * self.hidden
        partitioned = METHODS[self.method].vocabulary_parallel
        vocabulary = 2 * embedding / self.p if partitioned else embedding
        layers = self.layers / self.p * _LAYER_PARAMETERS * self.hidden**2
        return (layers + vocabulary) * _STEP_BYTES / _MEMORY_BYTES_PER_MS


@dataclass(frozen=True)
class Prediction:
    """A row and the simulator's prediction."""

    row: MeasuredRow
    predicted_ms: float

    @property
    def error(self) -> float:
        """Relative; negative where the prediction is too fast."""
        return self.predicted_ms / self.row.iteration_ms - 1.0


def predict(row: MeasuredRow) -> Prediction:
    """Simulate a row's schedule with its times, and add the optimizer's step."""
    return Prediction(row, play(row).iteration_ms + row.step_ms())


def play(row: MeasuredRow) -> Simulation:
    """A row's schedule with its times."""
    costs = row.costs()
    schedule = generate(row.method, row.p, row.m, costs=costs)
    if METHODS[row.method].vocabulary_parallel:
        return simulate(Plan.of(schedule, costs))
    times = PassTimes.of(costs, schedule)
    return Simulation(schedule, run_events(schedule, times, blocking_program(schedule)))


def blocking_program(schedule: Schedule) -> Program:
    """Stock Megatron's program: every receive directly before its pass, every send directly after it.

    The schedule has one chunk a rank, and its method does not partition the vocabulary layers.
    """
    last = schedule.placement.last_stage
    forward, backward = (CommType.RECV_F, CommType.SEND_F), (CommType.RECV_B, CommType.SEND_B)
    program = []
    for passes in schedule.ranks:
        row: list[Instruction] = []
        for item in passes:
            (receive, send), first, end = (
                (forward, 0, last) if item.type is PassType.F else (backward, last, 0)
            )
            row += [Comm(receive, item.stage, item.microbatch)] if item.stage != first else []
            row.append(item)
            row += [Comm(send, item.stage, item.microbatch)] if item.stage != end else []
        program.append(tuple(row))
    return tuple(program)


def read_measured(path: str | Path) -> list[MeasuredRow]:
    """Read a file of measured rows; a ValueError names file, line and column of the first bad entry."""
    return [_row(row) for row in read_rows(path, "measured passes", COLUMNS)]


def _row(row: CsvRow) -> MeasuredRow:
    method = row.cells["method"]
    if method not in METHODS:
        row.refuse("method", f"one of {', '.join(METHODS)}")
    p, m, seq_length, hidden, vocab, layers = (_count(row, name) for name in _COUNTS)
    (iteration_ms,) = _times(row, "iteration_ms", 1, 1.0)
    if not iteration_ms:
        row.refuse("iteration_ms", "the measured milliseconds")
    passes = {name: _times(row, name, p, 1e-3) for name in _PER_RANK}
    (comm_ms,) = _times(row, "comm_us", 1, 1e-3)
    return MeasuredRow(method, p, m, seq_length, hidden, vocab, layers, iteration_ms, passes, comm_ms)


def _count(row: CsvRow, column: str) -> int:
    text = row.cells[column]
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        row.refuse(column, "a whole number of at least 1")
    return int(text)


def _times(row: CsvRow, column: str, count: int, unit: float) -> tuple[float, ...]:
    try:
        values = tuple(float(word) * unit for word in row.cells[column].split())
    except ValueError:
        values = ()
    if len(values) != count or not all(0.0 <= value < float("inf") for value in values):
        numbers = "one number" if count == 1 else f"{count} numbers, one a rank, with spaces between them"
        row.refuse(column, f"{numbers}, none below 0")
    return values
