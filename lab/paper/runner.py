"""Runs the unfinished experiments of a file one after another.

Every training is a child process. Its output goes to ``<folder>/<name>/stdout.log``, and its result is
written when it has ended. With several nodes, each runs this loop, over a folder that all nodes see; they
wait for each other at the rendezvous of each training. Next: ``table.py``.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.paper.command import Nodes, launch_line
from lab.paper.experiments import Experiment
from lab.paper.log import read_log
from lab.paper.results import Outcome, Result, finished, result_path, write_result

Say = Callable[[str], None]
_SHOWN_LINES = 6
_ERROR = re.compile(r"(\[rank\d+\]: )?(?!torch\.distributed\.elastic)[\w.]*(Error|Exception)\b")
_DATA_SECONDS = 1800.0


@dataclass(frozen=True)
class Site:
    """The place where experiments run: checkout, folder, machines."""

    checkout: Path  # of Megatron-LM
    folder: Path  # for the results; all nodes see it
    nodes: Nodes
    on_cpu: bool  # CPU processes instead of GPUs

    @property
    def version(self) -> str:
        """Version of the checkout; a ValueError if it is not a checkout, or its version is unknown."""
        if not (self.checkout / "pretrain_gpt.py").is_file():
            raise ValueError(f"{self.checkout} is not a checkout of Megatron-LM: it has no pretrain_gpt.py")
        from megatron_vocabpar.megatron_lm.checkout import version_of  # needs torch; the table does not

        return version_of(self.checkout)

    def data(self, experiment: Experiment) -> Path:
        """Path of an experiment's text, without ``.bin`` and ``.idx``: the same for all methods."""
        text = f"{experiment.vocab_size}-{experiment.tokens * experiment.iterations}"
        return self.folder / "data" / text / "text"

    @property
    def environment(self) -> dict[str, str]:
        paths = [str(Path(__file__).parents[2]), str(self.checkout), os.environ.get("PYTHONPATH", "")]
        variables = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "CUDA_DEVICE_MAX_CONNECTIONS": "8"}
        if self.on_cpu:
            variables |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        return os.environ | variables

    def command(self, experiment: Experiment) -> list[str]:
        data = self.data(experiment)
        return launch_line(experiment, self.checkout, data, self.version, self.nodes, self.on_cpu)


def run(experiments: Sequence[Experiment], site: Site, about: dict[str, str], say: Say) -> bool:
    """Run the unfinished experiments. Returns true if none failed.

    Args:
        about: device, versions and commits, for the records.
        say: a function that is called with lines about progress.
    """
    # All nodes choose before the first experiment starts, so that they choose alike.
    rows = [e for e in experiments if not finished(site.folder, e, site.nodes.count)]
    if len(rows) < len(experiments):
        say(f"{len(experiments) - len(rows)} of {len(experiments)} experiments are finished already")
    failed = False
    for number, experiment in enumerate(rows, 1):
        say(f"[{number}/{len(rows)}] {experiment.name}: {experiment.method} in {experiment.family}")
        result = _train(experiment, site, about)
        failed |= result.outcome == "failed"
        speed = "" if result.median_ms is None else f", {result.median_ms:.1f} ms an iteration"
        say(f"  {result.outcome}{speed}")
        if result.outcome == "failed":
            say(f"{result.reason}\n  the whole log: {site.folder / experiment.name}")
    return not failed


def _train(experiment: Experiment, site: Site, about: dict[str, str]) -> Result:
    _make_data(experiment, site)
    path = result_path(site.folder, experiment, site.nodes.rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    name = "stdout.log" if site.nodes.count == 1 else f"stdout.{site.nodes.rank}.log"
    log_file, command = path.with_name(name), site.command(experiment)
    log_file.unlink(missing_ok=True)  # a process of an earlier run may still write to the old file
    with log_file.open("a") as output:
        output.write(f"{shlex.join(command)}\n")
        output.flush()
        code = subprocess.run(
            command, env=site.environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        ).returncode
    text = log_file.read_text(errors="replace")
    log = read_log(text)
    outcome: Outcome = "done" if code == 0 else "out of memory" if log.out_of_memory else "failed"
    result = Result(
        experiment=experiment,
        outcome=outcome,
        reason="" if code == 0 else why(text),
        command=tuple(command),
        environment=about,
        iteration_ms=log.iteration_ms,
        losses=log.losses,
        allocated_mib=log.allocated_mib,
        reserved_mib=log.reserved_mib,
    )
    write_result(result, path)
    return result


def why(text: str) -> str:
    """The reason in a failed training's log: its errors in order, without torchrun's; else its last lines."""
    errors = [line for line in dict.fromkeys(text.splitlines()) if _ERROR.match(line)]
    return "\n".join(errors[:_SHOWN_LINES] or text.splitlines()[-_SHOWN_LINES:])


def _make_data(experiment: Experiment, site: Site) -> None:
    """Write the text of an experiment, once for all methods; the other nodes wait for the first."""
    data = site.data(experiment)
    index = data.with_suffix(".idx")  # the file that is written last
    deadline = time.monotonic() + _DATA_SECONDS
    while site.nodes.rank > 0 and not index.exists():
        if time.monotonic() > deadline:
            raise ValueError(f"node 0 has not made {index}; give --output a folder that all nodes see")
        time.sleep(1.0)
    if index.exists():
        return
    # Megatron looks one token ahead, so the text has one iteration more than is trained.
    tokens = experiment.tokens * (experiment.iterations + 1)
    command = [sys.executable, "-m", "lab.paper.corpus", str(data)]
    done = subprocess.run(
        [*command, str(experiment.vocab_size), str(tokens)],
        env=site.environment,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ValueError(f"the data of {experiment.name} could not be made: {last}")
