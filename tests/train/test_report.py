"""Comparison, summary, pictures and page, from metrics that were made up."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageColor

from megatron_vocabpar.schedule.draw import draw_trace
from megatron_vocabpar.schedule.draw.pictures import write_pictures
from megatron_vocabpar.schedule.make.generate import make_plan
from megatron_vocabpar.schedule.serialize import plan_to_json
from megatron_vocabpar.schedule.simulate import simulate
from megatron_vocabpar.train.config import TrainConfig
from megatron_vocabpar.train.output import method_config, open_method, open_output
from megatron_vocabpar.train.plots import COLOURS, plot_losses, plot_memory
from megatron_vocabpar.train.report import reported, write_report
from megatron_vocabpar.train.tables import (
    Difference,
    as_text,
    difference_table,
    differences,
    headline,
    loss_curve,
    reference_method,
    summarize,
    summary_table,
)
from tests.train.fake_results import records, write_results


def test_differences_by_hand() -> None:
    curves = {
        "baseline": {1: 8.0, 2: 4.0, 3: 2.0},
        "vocab-2": {1: 8.5, 2: 4.0, 3: 1.75},
        "naive": {2: 4.5, 9: 0.0},
    }
    vocab_2, naive = differences(curves, "baseline")
    assert (vocab_2.method, vocab_2.reference, vocab_2.steps) == ("vocab-2", "baseline", 3)
    assert (vocab_2.absolute, vocab_2.absolute_step) == (0.5, 1)
    assert (vocab_2.relative, vocab_2.relative_step) == (0.125, 3)
    assert (naive.steps, naive.absolute, naive.relative) == (1, 0.5, 0.125)


def test_a_method_has_one_colour_in_the_pictures_of_loss_and_memory(tmp_path: Path) -> None:
    curves = {name: {1: 8.0, 2: loss} for name, loss in (("baseline", 4.0), ("vocab-2", 6.0))}
    plot_losses(tmp_path / "loss.png", curves, {name: {} for name in curves}, "baseline")
    plot_memory(tmp_path / "memory.png", dict.fromkeys(curves, (3.0, 4.0)))
    for name in ("loss.png", "memory.png"):
        colours = Image.open(tmp_path / name).convert("RGB").getcolors(1 << 20)
        assert {ImageColor.getrgb(COLOURS[method]) for method in curves} <= {rgb for _, rgb in colours}


def test_methods_that_share_no_step_are_not_compared() -> None:
    (difference,) = differences({"a": {1: 2.0}, "b": {1: 0.5}, "c": {2: 1.0}}, "a")
    assert (difference.method, difference.absolute, difference.relative) == ("b", 1.5, 0.75)


@pytest.mark.parametrize(
    ("methods", "reference"), [(["vocab-2", "baseline"], "baseline"), (["vocab-2", "naive"], "vocab-2")]
)
def test_reference(methods: list[str], reference: str) -> None:
    assert reference_method(methods) == reference


def test_headline() -> None:
    run = summarize("vocab-2", records(5))
    other = replace(run, method="baseline", tokens_per_s=run.tokens_per_s / 1.5)
    assert headline([run], []) == f"vocab-2: loss {run.final_loss:.4f} after 5 steps, 2,003 tokens/s"
    difference = Difference("vocab-2", "baseline", 5, 2e-6, 3, 4e-7, 3)
    compared = "vocab-2: 1.50 times the tokens/s of baseline"
    assert headline([run, other], [difference]) == f"{compared}, losses within 4.0e-07 (relative) of its"


def test_summary() -> None:
    row = summarize("vocab-2", records(41))
    assert row.steps == 41
    assert (row.first_loss, row.final_loss) == (records(41)[0]["loss"], records(41)[40]["loss"])
    assert row.eval_loss == records(41)[39]["eval_loss"]
    assert (row.tokens_per_s, row.iteration_ms) == (2021.0, 479.0)
    assert row.peak_memory_mib == pytest.approx([404.1, 405.1, 406.1, 407.1])
    assert summarize("vocab-2", records(5)).eval_loss is None


def test_tables_as_text() -> None:
    shown = as_text(summary_table([summarize("vocab-2", records(5))]))
    assert re.search(r"vocab-2 +2,003 +400 402 402 404 .* – +5 +497 +–/–", shown)
    rows = list(differences({"baseline": {1: 8.0}, "naive": {1: 8.0001}}, "baseline"))
    assert "1.00e-04" in as_text(difference_table(rows))


def trained(tmp_path: Path, *methods: str, **values: Any) -> Path:
    """A results folder in which these methods (all, if none is named) have been trained."""
    config = TrainConfig(output=str(tmp_path / "out"), steps=40, **values)
    open_output(config)
    for method in methods or config.methods:
        job = method_config(config, method)
        open_method(job)
        write_results(job)
    return tmp_path / "out"


def results(tmp_path: Path, **values: Any) -> tuple[Path, str]:
    folder = trained(tmp_path, **values)
    return folder, write_report(folder)


def test_report_of_a_comparison(tmp_path: Path) -> None:
    output, shown = results(tmp_path, compare=("baseline",))
    (difference,) = json.loads((output / "comparison.json").read_text())
    assert difference["method"] == "vocab-2"
    assert 0 < difference["absolute"] < 2.1e-6
    assert [row["method"] for row in json.loads((output / "summary.json").read_text())] == [
        "vocab-2",
        "baseline",
    ]
    assert "Largest difference of the loss from baseline" in shown
    assert shown.endswith(f"results: {output / 'index.html'}")
    with Image.open(output / "loss.png") as picture:
        assert len(picture.convert("RGB").getcolors(1 << 20) or []) > 50


def test_report_of_one_method(tmp_path: Path) -> None:
    output, shown = results(tmp_path)
    assert not (output / "comparison.json").exists()
    assert "Largest difference" not in shown
    curve = loss_curve(records(40, noise=2e-6))
    assert f"{curve[40]:.4f}" in shown


def test_the_page_needs_no_other_file(tmp_path: Path) -> None:
    output, _ = results(tmp_path, compare=("baseline",))
    page = (output / "index.html").read_text()
    assert "<h1>vocab-2: 1.00 times the tokens/s of baseline, losses within " in page
    assert page.count("<main>") == page.count("</main>") == 1
    assert '<th scope="row">baseline</th>' in page
    assert re.findall(r"<th(?! scope=)[ >]", page) == []
    assert re.findall(r'src="(?!data:)', page) == []
    assert page.count("data:image/png;base64,") == 2  # losses and memory
    assert page.count("data:image/svg+xml;base64,") == 3  # all schedules, and that of each method
    links = re.findall(r'href="([^"]+)"', page)
    assert all((output / link).exists() for link in links if not link.startswith("https://ui.perfetto.dev"))
    assert "vocab-2/timeline.json" in links
    assert "baseline/checkpoint" in links
    assert "vocabpar train --compare baseline --steps 40 --output" in page
    assert "Largest difference of the loss from baseline" in page


def test_the_page_shows_all_schedules_on_one_time_axis_and_their_idle_time(tmp_path: Path) -> None:
    output = trained(tmp_path, pp=2, compare=("baseline",), device="cpu")
    for method in ("vocab-2", "baseline"):
        plan, folder = make_plan(method, 2, 3), output / method
        (folder / "schedule.json").write_text(plan_to_json(plan))
        slow = json.loads(draw_trace(simulate(plan)))
        for event in slow["traceEvents"]:
            if event["ph"] == "X":
                event["ts"] *= 2  # with as much idle time between as there is work
        (folder / "timeline.json").write_text(json.dumps(slow))
    shown = write_report(output)
    picture = (output / "schedules.svg").read_text()
    for summary in json.loads((output / "summary.json").read_text()):
        plan = make_plan(summary["method"], 2, 3)
        idle = sum(simulate(plan).bubble) / 2
        assert summary["idle_planned"] == pytest.approx(idle)
        assert summary["idle_measured"] > (1 + idle) / 2 - 0.1
        assert f" {100 * idle:.0f}/{100 * summary['idle_measured']:.0f}\n" in shown
        assert f"1f1b + {summary['method']}, p = 2, m = 3: {simulate(plan).iteration_ms:.1f} ms" in picture
    page = (output / "index.html").read_text()
    assert 'href="schedules.html"' in page
    assert (output / "schedules.html").is_file()
    assert "On the CPU these are figures of whole processes" in page


def test_a_method_that_was_not_trained_is_left_out(tmp_path: Path) -> None:
    output = trained(tmp_path, "baseline", compare=("baseline",))
    assert "vocab-2" not in write_report(output).split("results:")[0]
    (output / "baseline" / "metrics.jsonl").unlink()
    with pytest.raises(ValueError, match="holds no metrics of vocab-2, baseline"):
        write_report(output)


def test_the_page_of_a_job_that_ended_early_says_so(tmp_path: Path) -> None:
    """And it offers to go on only where a checkpoint is."""
    folder = trained(tmp_path, compare=("baseline",))
    write_report(folder)
    assert "ended early" not in (folder / "index.html").read_text()
    metrics = folder / "vocab-2" / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:7]))
    for checkpoints in folder.glob("*/checkpoint"):
        shutil.rmtree(checkpoints)
    write_report(folder)
    shown = (folder / "index.html").read_text()
    assert "This job ended early: vocab-2 after 7 steps." in shown
    assert "It left no checkpoint to go on from; add <code>--overwrite</code>" in shown
    complete = folder / "vocab-2" / "checkpoint" / "step_0000004"
    complete.mkdir(parents=True)
    (complete / "metadata.json").write_text("{}")
    write_report(folder)
    assert "add <code>--resume</code>." in (folder / "index.html").read_text()


def test_a_job_that_fails_is_reported_by_what_it_left(tmp_path: Path) -> None:
    """One that is refused, or fails before its first step, leaves the page as it is."""
    folder, said = tmp_path / "out", list[str]()

    def fails() -> None:
        with reported(folder, said.append):
            trained(tmp_path, compare=("baseline",))
            raise FloatingPointError

    with pytest.raises(FloatingPointError):
        fails()
    assert "<h2>Training</h2>" in (folder / "index.html").read_text()
    (folder / "index.html").write_text("old")
    with pytest.raises(KeyboardInterrupt), reported(folder, said.append):
        raise KeyboardInterrupt
    assert (folder / "index.html").read_text() == "old"
    assert said == []
    with reported(folder, said.append):
        pass
    assert said[0].endswith(f"results: {folder / 'index.html'}")


def test_the_page_shows_the_measured_timeline_below_the_plan(tmp_path: Path) -> None:
    output, plan = trained(tmp_path, pp=2, family="v-half"), make_plan("vocab-2", 2, 3, family="v-half")
    (output / "vocab-2" / "schedule.json").write_text(plan_to_json(plan))
    write_pictures(output / "vocab-2", plan, json.loads(draw_trace(simulate(plan))))
    write_report(output)
    page = (output / "index.html").read_text()
    assert page.count("data:image/svg+xml;base64,") == 2
    assert "Schedule: v-half, 2 model chunks a rank, V-shaped, W split off; planned peak activations" in page
    assert "which the plan does not know. vocab-2/timeline.html shows both" in page
    for name in ("timeline.html", "schedule.json", "timeline.json"):
        assert f'<a href="vocab-2/{name}">' in page
        assert (output / "vocab-2" / name).is_file()
