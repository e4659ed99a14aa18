"""Checks that a tiny training of a method has the losses of ``baseline``, stock Megatron's placement."""

from __future__ import annotations

from pathlib import Path

from megatron_vocabpar.doctor.check_runs import Finding, within
from megatron_vocabpar.schedule.words.methods import BASELINE
from megatron_vocabpar.train.config import TrainConfig
from megatron_vocabpar.train.config_checks import require_modules
from megatron_vocabpar.train.metrics import read_metrics
from megatron_vocabpar.train.output import METRICS_FILE
from megatron_vocabpar.train.tables import differences, loss_curve

LIMITS = {"fp32": 1e-4, "bf16": 2e-2}
"""Largest relative difference of a loss: after six steps on the CPU in fp32 it is 1e-7."""

_STEPS = 6
_LAYERS_A_STAGE = 2


def train(device: str, method: str, dtype: str, pp: int, folder: str, vocab_size: int = 1024) -> Finding:
    """Train ``method`` for six steps; compare its losses with those of the baseline in ``folder``."""

    def output(name: str) -> Path:
        return Path(folder) / f"{name}-{dtype}"

    def losses(name: str) -> dict[int, float]:
        return loss_curve(read_metrics(output(name) / name / METRICS_FILE))

    text = Path(folder) / "text.txt"
    text.write_text("".join(f"line {number} of a text, {number * number}\n" for number in range(3000)))
    config = TrainConfig(
        text=str(text),
        method=method,
        dtype=dtype,
        device=device,
        pp=pp,
        layers=_LAYERS_A_STAGE * pp,
        hidden=128,
        seq_length=64,
        vocab_size=vocab_size,
        micro_batch_size=1,
        microbatches=2 * pp + 1,
        steps=_STEPS,
        warmup=1,
        eval_interval=0,
        output=str(output(method)),
        save=False,
    )
    try:
        require_modules()
    except ModuleNotFoundError as error:
        return Finding("not run", reason=str(error))
    from megatron_vocabpar.train.run_job import run_job

    run_job(config, print, environment={})
    curve = losses(method)
    if method == BASELINE:
        return Finding("ok", f"{pp} stages, {dtype}: loss {curve[1]:.4f} to {curve[_STEPS]:.4f}")
    (difference,) = differences({method: curve, BASELINE: losses(BASELINE)}, BASELINE)
    figure = f"{pp} stages, {dtype}: losses differ by {difference.relative:.1e}, relative"
    return within(difference.relative, LIMITS[dtype], figure)
