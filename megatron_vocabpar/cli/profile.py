"""``vocabpar profile``: a model's passes and collectives, measured on this machine, as a cost file.

Next: ``measure/model_costs.py``.
"""

from __future__ import annotations

import json
from typing import Any

import click

from megatron_vocabpar.cli.files import will_be_written, write_output
from megatron_vocabpar.cli.main import RunFailed


@click.command("profile")
@click.option("--pp", default=4, help="Pipeline stages that the model will run on.")
@click.option("--layers", default=8, help="Transformer layers, over all stages.")
@click.option("--hidden", default=256, help="Hidden size.")
@click.option("--heads", default=4, help="Attention heads.")
@click.option("--ffn", type=int, help="Feed-forward size; by default 4 × hidden.")
@click.option("--seq-length", default=128, help="Tokens per sequence.")
@click.option("--micro-batch-size", default=1, help="Sequences per microbatch.")
@click.option("--vocab-size", default=65536, help="Vocabulary.")
@click.option("--dtype", type=click.Choice(["fp32", "bf16"]), default="fp32")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto")
@click.option("--iterations", "steps", default=5, help="Measured iterations of every method.")
@click.option(
    "--output", metavar="FILE", callback=will_be_written, help="Write there instead of to the terminal."
)
def profile_command(output: str | None, **options: Any) -> None:
    """Measure a model's passes and collectives on this machine.

    Writes a cost file, which schedule, simulate, emulate and train read with --costs.
    """
    from megatron_vocabpar.measure.model_costs import profile
    from megatron_vocabpar.train.config import TrainConfig
    from megatron_vocabpar.train.failure import TrainingFailed

    try:
        text = json.dumps(profile(TrainConfig(**options)), indent=1)
    except TrainingFailed as failed:
        raise RunFailed("profile", str(failed)) from failed
    click.echo(text) if output is None else write_output(output, text)
