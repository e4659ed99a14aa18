"""What layers take beside others, fitted to the published passes: ``python -m lab paper price``.

The model is ``plan/price.py``'s. For each published run the schedule is simulated with its own passes; the
shares of its middle ranks follow (of redis ranks 1 and 2, as it moves layers to the others). Then their
F + B is ``alone x factor``, with one time alone for each sequence length, and one slope and one number of
channels for all runs. ``fitted`` finds them by least squares of relative errors.

A prediction knows nothing of a run's own F + B: its layers take ``alone`` at first, are simulated, priced,
simulated again and priced again. The second time changes F + B by 0.06 % on average and 0.5 % at most.
``held_back`` fits without a vocabulary, and tells the errors there. There are no published runs of 64k ids in
the file; ``between`` makes their passes of those of 32k and 128k, so that they can be foretold.

Source: ``data/measured_passes.csv``, 8 A100 of one node.
Next: ``figures.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, permutations
from statistics import fmean
from typing import TYPE_CHECKING

from lab.paper.measured import MeasuredRow, play
from megatron_vocabpar.plan.price import Price, Use
from megatron_vocabpar.schedule.play.events import Events
from megatron_vocabpar.schedule.play.residence import busy_share, resident_beside_layers
from megatron_vocabpar.schedule.words.methods import METHODS

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

MULTIPROCESSORS = 108  # A100
LAYERS = ("F_us_per_rank", "B_us_per_rank")
_STEPS = 20  # of Gauss and Newton; five suffice


@dataclass(frozen=True)
class Fit:
    """A fitted price, and the ms of F + B alone by sequence length."""

    price: Price
    alone_ms: dict[int, float]

    def ms(self, row: MeasuredRow, use: Use) -> float:
        """F + B of a row's middle ranks."""
        return self.alone_ms[row.seq_length] * self.price.factor(use, MULTIPROCESSORS)


@dataclass(frozen=True)
class Priced:
    """A run's F + B by a fit, in ms: after one step from its time alone, and after two."""

    row: MeasuredRow
    use: Use
    once_ms: float
    predicted_ms: float
    iteration_ms: float

    @property
    def error(self) -> float:
        """Relative, of F + B; negative where the prediction is too fast."""
        return self.predicted_ms / layers_ms(self.row) - 1.0


def middle(row: MeasuredRow) -> range:
    """Ranks with the layers of every other method and neither end of the pipeline."""
    return range(1, 3) if row.method == "redis" else range(1, row.p - 1)


def layers_ms(row: MeasuredRow) -> float:
    """The mean F + B of a row's middle ranks."""
    return fmean(sum(row.passes_ms[name][rank] for name in LAYERS) for rank in middle(row))


def use_of(row: MeasuredRow, events: Events) -> Use:
    """The shares of a row's middle ranks."""
    shares = busy_share(events), resident_beside_layers(events)
    return Use(*(fmean(share[rank] for rank in middle(row)) for share in shares))


def fitted(rows: Sequence[MeasuredRow], uses: Sequence[Use]) -> Fit:
    """The fit to rows and the shares of their simulations."""
    import numpy as np  # no other table needs it

    lengths = sorted({row.seq_length for row in rows})
    measured = np.array([layers_ms(row) for row in rows])

    def fit(values: npt.NDArray[np.float64]) -> Fit:
        slope, channels, *alone = map(float, values)
        return Fit(Price(slope, channels), dict(zip(lengths, alone, strict=True)))

    def errors(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        one = fit(values)
        return np.array([one.ms(row, use) for row, use in zip(rows, uses, strict=True)]) / measured - 1.0

    start = [fmean(layers_ms(row) for row in rows if row.seq_length == length) for length in lengths]
    values = np.array([0.05, 5.0, *start])
    for _ in range(_STEPS):
        now, step = errors(values), 1e-6 * values
        moved = [(errors(values + by) - now) for by in np.diag(step)]
        slopes = [each / size for each, size in zip(moved, step, strict=True)]
        values = values - np.linalg.lstsq(np.stack(slopes, axis=1), now, rcond=None)[0]
    return fit(values)


def fit_of(rows: Sequence[MeasuredRow]) -> Fit:
    """The price, fitted to rows."""
    return fitted(rows, [use_of(row, play(row).events) for row in rows])


def priced(row: MeasuredRow, fit: Fit) -> Priced:
    """A row's F + B, and its iteration, from layers' time alone."""
    alone_ms, times_ms, use = fit.alone_ms[row.seq_length], [fit.alone_ms[row.seq_length]], Use(1.0)
    for _ in range(2):
        use = use_of(row, play(_scaled(row, times_ms[-1] / layers_ms(row))).events)
        times_ms.append(alone_ms * fit.price.factor(use, MULTIPROCESSORS))
    length_ms = play(_scaled(row, times_ms[-1] / layers_ms(row))).iteration_ms
    return Priced(row, use, times_ms[1], times_ms[2], length_ms + row.step_ms())


def _scaled(row: MeasuredRow, factor: float) -> MeasuredRow:
    """The row with its layers' passes ``factor`` times as long.

    The last rank of baseline has the output layer, too: its passes grow by as many ms as the middle's. That
    of redis has hardly any layers.
    """
    passes = dict(row.passes_ms)
    for name in LAYERS:
        longer = tuple(ms * factor for ms in passes[name])
        if not METHODS[row.method].vocabulary_parallel:
            grown = 0.0 if row.method == "redis" else fmean(passes[name][rank] for rank in middle(row))
            longer = (*longer[:-1], passes[name][-1] + grown * (factor - 1.0))
        passes[name] = longer
    return replace(row, passes_ms=passes)


def held_back(rows: Sequence[MeasuredRow]) -> Iterator[tuple[int, Fit, list[float]]]:
    """For each vocabulary, the fit without it, and the errors of its runs by that fit."""
    uses = [use_of(row, play(row).events) for row in rows]
    for vocab in sorted({row.vocab for row in rows}):
        kept = [one for one in zip(rows, uses, strict=True) if one[0].vocab != vocab]
        left = [one for one in zip(rows, uses, strict=True) if one[0].vocab == vocab]
        fit = fitted(*zip(*kept, strict=True))
        yield vocab, fit, [fit.ms(row, use) / layers_ms(row) - 1.0 for row, use in left]


def between(rows: Sequence[MeasuredRow], vocab: int) -> list[MeasuredRow]:
    """Runs with another vocabulary: each pass's time on the line through two published vocabularies.

    The iteration of such a run is not known, and stands as 0.
    """
    found = []
    for method, length in dict.fromkeys((row.method, row.seq_length) for row in rows):
        same = sorted(
            (r for r in rows if (r.method, r.seq_length) == (method, length)), key=lambda r: r.vocab
        )
        low, high = next(pair for pair in pairwise(same) if pair[1].vocab > vocab)
        share = (vocab - low.vocab) / (high.vocab - low.vocab)
        passes = {
            name: tuple(a + share * (b - a) for a, b in zip(times, high.passes_ms[name], strict=True))
            for name, times in low.passes_ms.items()
        }
        found.append(replace(low, vocab=vocab, passes_ms=passes, iteration_ms=0.0))
    return found


def gain_errors(predictions: Sequence[Priced]) -> list[float]:
    """Errors of how much faster a partitioned vocabulary is than a whole one, for equal sizes."""
    errors = []
    for ours, stock in permutations(predictions, 2):
        partitioned = [METHODS[one.row.method].vocabulary_parallel for one in (ours, stock)]
        sizes = [(one.row.vocab, one.row.seq_length) for one in (ours, stock)]
        if partitioned == [True, False] and sizes[0] == sizes[1]:
            predicted = stock.iteration_ms / ours.iteration_ms
            errors.append(predicted / (stock.row.iteration_ms / ours.row.iteration_ms) - 1.0)
    return errors
