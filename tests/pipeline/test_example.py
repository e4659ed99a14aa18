"""The example of ``ForwardBackward`` runs and learns, and every piece of Python in the documents runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_vocabpar.train.core_on_cpu import megatron_on_cpu
from tests.pipeline.gpt import Case, parallel_groups
from tests.spawn import run_ranks

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "forward_backward.py"


@pytest.mark.slow
def test_the_example_learns() -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    done = subprocess.run(
        [sys.executable, "-m", *command], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"^step \d+ loss (\S+)$", done.stdout, re.MULTILINE)]
    assert len(losses) == 4
    assert losses[-1] < losses[0] / 1.5


@pytest.mark.long
def test_grpo_raises_its_reward_and_equals_an_unsharded_model() -> None:
    """That its first steps equal those of a stock model is asserted inside."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "examples" / "grpo.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    rewards = [float(reward) for reward in re.findall(r"^step \d+ reward (\S+) ", done.stdout, re.MULTILINE)]
    assert len(rewards) == 4
    assert rewards[-1] > 1.5 * rewards[0]
    assert len(re.findall("equal the unsharded model's", done.stdout)) == 3


@pytest.mark.slow
def test_the_first_steps_of_grpo_equal_an_unsharded_model() -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "examples" / "grpo.py"), "3"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert len(re.findall("equal the unsharded model's", done.stdout)) == 3


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_notebook_runs_and_shows_what_it_says(tmp_path: Path) -> None:
    nbformat, client = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(ROOT / "examples" / "tour.ipynb", as_version=4)
    stored = pictures_of(notebook)
    run = client.NotebookClient(notebook, timeout=800, resources={"metadata": {"path": tmp_path}})
    run.execute(env=os.environ | {"PYTHONPATH": str(ROOT)})  # whichever Python opens it
    outputs = [each for cell in notebook.cells if cell.cell_type == "code" for each in cell.outputs]
    shown = "".join(each.get("text", "") for each in outputs)
    times = dict(re.findall(r"^(\S+) (\d+) ms an iteration$", shown, re.MULTILINE))
    assert int(times["vocab-2"]) < int(times["baseline"])
    assert "Recommended: " in shown
    (difference,) = re.findall(r"^largest difference of the losses of 8 steps: (\S+)$", shown, re.MULTILINE)
    assert float(difference) < 1e-5
    assert pictures_of(notebook) == stored == ["image/svg+xml", "image/svg+xml", "image/png"]


def pictures_of(notebook: Any) -> list[str]:
    """The kinds of pictures among a notebook's outputs, in order."""
    outputs = [each for cell in notebook.cells if cell.cell_type == "code" for each in cell.outputs]
    return [kind for each in outputs for kind in each.get("data", {}) if kind != "text/plain"]


PYTHON = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
SNIPPETS = [
    pytest.param(code, id=path.name)
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    for code in PYTHON.findall(path.read_text(encoding="utf-8"))
    if "init_process_group" not in code  # a program of its own, which tests/losses runs
]


def _execute(rank: int, code: str) -> None:
    """Run ``code`` as lines of a program that has initialised its groups."""
    sys.path.insert(0, str(ROOT))
    with megatron_on_cpu(), parallel_groups(Case(pp=2)):
        exec(code, {})


@pytest.mark.parametrize("code", SNIPPETS)
def test_code_in_the_documents_runs(code: str) -> None:
    run_ranks(2, _execute, code)


def test_readme_has_code() -> None:
    assert any("ForwardBackward" in snippet.values[0] for snippet in SNIPPETS)
