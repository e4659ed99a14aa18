"""A whole job, in order: check, prepare the data, train with each method, report.

Nothing is written to the results folder before the checks and the preparation have passed.
Next: ``ranks.py`` (one method's processes), ``report.py`` (the results page).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from megatron_vocabpar.schedule.make.families import SEARCH
from megatron_vocabpar.schedule.plan import Plan
from megatron_vocabpar.schedule.serialize import plan_to_json
from megatron_vocabpar.train import output
from megatron_vocabpar.train.check import check, resolve_device
from megatron_vocabpar.train.config import TrainConfig
from megatron_vocabpar.train.data_files import DataFiles
from megatron_vocabpar.train.failure import Interrupted, TrainingFailed
from megatron_vocabpar.train.prepare import prepare
from megatron_vocabpar.train.ranks import WORKER_MODULE, processes
from megatron_vocabpar.train.report import write_report
from megatron_vocabpar.train.schedules import describe, plan_method

Say = Callable[[str], None]


def run_job(config: TrainConfig, say: Say, worker_module: str = WORKER_MODULE) -> None:
    """Run a job: start its processes on this machine, or be one of them under torchrun.

    Raises:
        ValueError: for a job that cannot run; nothing has been written.
        RefusedElsewhere: the same under torchrun, on the ranks other than 0.
        TrainingFailed, Interrupted: see ``launch``.
    """
    ranks = processes()
    paths = ranks.decide(lambda: open_job(config, say))
    try:
        for path in paths:
            job = TrainConfig.from_json(path.read_text())
            if ranks.leads:
                say(f"training {job.method} on {job.world_size} processes ({job.device})")
            ranks.run(job, worker_module)
    except (TrainingFailed, Interrupted) as end:
        if ranks.leads:
            with suppress(ValueError, OSError):  # no metrics, or a full disk: the failure is what counts
                say(write_report(Path(config.output)))
        hint = output.how_to_go_on(config)
        if isinstance(end, Interrupted):
            raise Interrupted(end.signal_number, hint) from end
        raise TrainingFailed(f"{end}\n{hint}" if str(end) else "") from end
    if ranks.leads:
        say(write_report(Path(config.output)))


def open_job(config: TrainConfig, say: Say) -> list[Path]:
    """Check a job, make its schedules, prepare its data, and open its folder.

    Returns:
        ``config.json`` of each method that is still to be trained; the workers' other input stands beside it.
    """
    check(config)
    config = dataclasses.replace(config, device=resolve_device(config))
    plans: dict[str, Plan] = {}
    for method in config.methods:
        if output.finished(config, method):
            say(f"{method} has done its {config.steps} steps")
            continue
        if config.family == SEARCH:
            say(f"searching for a schedule of {method}")
        plans[method] = plan_method(config, method)
        say(f"schedule of {method}: {describe(plans[method].schedule, config.family)}")
    files = prepare(config, say)
    say(f"data: {files.name}, {files.train_tokens:,} tokens ({files.valid_tokens:,} more for evaluation)")
    if config.overwrite and (Path(config.output) / output.CONFIG_FILE).is_file():
        earlier = output.read_config(Path(config.output))
        say(f"replacing the results of {', '.join(earlier.methods)} in {config.output}")
    output.open_output(config)
    paths = []
    for method, plan in plans.items():
        paths.append(output.open_method(output.method_config(config, method)))
        write_inputs(paths[-1].parent, files, plan)
    return paths


def write_inputs(folder: Path, files: DataFiles, plan: Plan) -> None:
    """Write what the workers of one method read, the data and the plan, into the method's folder."""
    (folder / output.DATA_FILE).write_text(files.to_json())
    (folder / output.SCHEDULE_DATA_FILE).write_text(plan_to_json(plan) + "\n")
