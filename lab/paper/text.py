"""The output of ``python -m lab paper``: text tables and JSON records."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import groupby
from statistics import mean

from lab.paper.figures import Figure
from lab.paper.measured import Prediction
from lab.paper.price import Fit, Priced, gain_errors, layers_ms
from lab.paper.simulated import Compared, Scaling


def predictions_json(predictions: Iterable[Prediction]) -> list[dict[str, object]]:
    """An object for each row: the run, ``predicted_ms``, ``measured_ms`` and the relative ``error``."""
    names = {"method": "method", "p": "pipeline", "m": "num_microbatches"}
    names |= {name: name for name in ("seq_length", "hidden", "vocab", "layers")}
    return [
        {name: getattr(one.row, field) for field, name in names.items()}
        | {"predicted_ms": one.predicted_ms, "measured_ms": one.row.iteration_ms, "error": one.error}
        for one in predictions
    ]


def predictions_text(predictions: Sequence[Prediction]) -> str:
    """A line for each row, then the mean and the worst error."""
    lines = [
        f"{'method':<12}{'p':>4}{'m':>6}{'s':>7}{'V':>9}{'predicted ms':>15}{'measured ms':>14}{'error %':>9}"
    ]
    for one in predictions:
        row = one.row
        lines.append(
            f"{row.method:<12}{row.p:>4}{row.m:>6}{row.seq_length:>7}{row.vocab:>9}{one.predicted_ms:>15,.1f}"
            f"{row.iteration_ms:>14,.1f}{100 * one.error:>+9.2f}"
        )
    return "\n".join([*lines, _errors("predicted time", [one.error for one in predictions])])


def price_json(fit: Fit, runs: Sequence[Priced]) -> dict[str, object]:
    """The fit, and F + B of each run."""
    return {
        **asdict(fit),
        "runs": [
            {
                "method": one.row.method,
                "vocab": one.row.vocab,
                "seq_length": one.row.seq_length,
                **asdict(one.use),
                "predicted_ms": one.predicted_ms,
                "measured_ms": layers_ms(one.row) if one.row.iteration_ms else None,
            }
            for one in runs
        ],
    }


def price_text(fit: Fit, runs: Sequence[Priced]) -> str:
    """The price, and a line for each run: F + B of the middle ranks in ms."""
    alone = ", ".join(f"{ms:.2f} ms at s {length}" for length, ms in fit.alone_ms.items())
    lines = [
        f"slope {fit.price.slope:.4f}, channels {fit.price.channels:.2f}; alone {alone}",
        f"{'method':<12}{'V':>9}{'s':>7}{'busy':>7}{'resident':>10}{'F+B ms':>9}{'measured':>10}"
        f"{'error %':>9}",
    ]
    for one in runs:
        row, use, known = one.row, one.use, bool(one.row.iteration_ms)
        lines.append(
            f"{row.method:<12}{row.vocab:>9}{row.seq_length:>7}{use.busy:>7.3f}{use.resident:>10.3f}"
            f"{one.predicted_ms:>9.2f}"
            + (f"{layers_ms(row):>10.2f}{100 * one.error:>+9.2f}" if known else f"{'–':>10}{'–':>9}")
        )
    compared = [one for one in runs if one.row.iteration_ms]
    lines.append(_errors("F + B", [one.error for one in compared]))
    if gains := gain_errors(compared):
        lines.append(_errors("gain over a whole vocabulary", gains))
    return "\n".join(lines)


def scaling_text(entries: Sequence[Scaling]) -> str:
    """A line for each entry of Table 3."""
    lines = [f"{'layer':<18}{'s':>6}{'GPUs':>6}{'published %':>13}{'measured %':>12}  from"]
    for one in entries:
        head = f"{one.layer:<18}{one.seq_length:>6}{one.gpus:>6}{one.published:>13.2f}"
        if one.measured is None:
            lines.append(f"{head}{'–':>12}  no published passes")
        else:
            other = "" if one.vocab == 256000 else "; the table's is 256,000"
            lines.append(f"{head}{one.measured:>12.2f}  passes at V {one.vocab:,}{other}")
    return "\n".join(lines)


def compared_json(compared: Sequence[Compared]) -> list[dict[str, object]]:
    """An object for each cell; published numbers and errors are null if it ran out of memory."""
    return [
        {
            **asdict(one.cell),
            "simulated_mfu_percent": one.mfu_percent,
            "mfu_error": one.error(memory=False),
            "simulated_peak_gb": one.peak_gib,
            "memory_error": one.error(memory=True),
            "from": one.source,
        }
        for one in compared
    ]


def compared_text(compared: Sequence[Compared], figure: Figure) -> str:
    """For each setup, method and vocabulary: simulated, published, and the error in per cent."""
    kinds = [figure.memory] if figure.title else [False, True]  # a figure shows memory or MFU, a table both
    return "\n\n".join(_section(compared, memory) for memory in kinds)


def _section(compared: Sequence[Compared], memory: bool) -> str:
    lines = ["Peak memory, GiB" if memory else "MFU, %", "simulated, published, error in %", ""]
    for (gpus, length), panel in groupby(compared, lambda one: (one.cell.gpus, one.cell.seq_length)):
        rows = list(panel)
        vocabs = dict.fromkeys(one.cell.vocab_k for one in rows)
        title = f"{gpus} GPUs, s {length}"
        lines.append(f"{title:<16}" + "".join(f"{f'{vocab}k':^16}" for vocab in vocabs))
        for method, group in groupby(rows, lambda one: one.cell.method):
            lines.append(f"  {method:<14}" + "".join(_cell(one, memory) for one in group))
        lines.append("")
    errors: dict[str, list[float]] = {}
    for one in compared:
        error = one.error(memory)
        if error is not None:
            errors.setdefault("memory" if memory else f"MFU from {one.source}", []).append(error)
    return "\n".join([*lines, *(_errors(kind, values) for kind, values in errors.items())])


def _cell(one: Compared, memory: bool) -> str:
    (simulated, published), error = one.pair(memory), one.error(memory)
    if published is None or error is None:
        return f"{simulated:>5.1f}{'–':>5}{'':>6}"
    return f"{simulated:>5.1f}{published:>5.1f}{100 * error:>+6.1f}"


def _errors(kind: str, errors: Sequence[float]) -> str:
    sizes = [abs(error) for error in errors]
    return f"error of {kind}: mean {100 * mean(sizes):.2f} %, worst {100 * max(sizes):.2f} %"
