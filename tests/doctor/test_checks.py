"""The checks on the CPU, through the code that a GPU takes: what is right passes, what is broken is found."""

from __future__ import annotations

import dataclasses
import inspect
import json
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_vocabpar.doctor import communicators, environment, kernels, training
from megatron_vocabpar.doctor.check_runs import Check, run, run_all
from megatron_vocabpar.doctor.checks import DTYPES, checks
from megatron_vocabpar.layers.kernels import dispatch
from megatron_vocabpar.layers.kernels.dispatch import use_kernels
from megatron_vocabpar.runtime.comm import create_groups
from megatron_vocabpar.schedule.words.methods import METHODS
from megatron_vocabpar.train.config import TrainConfig
from megatron_vocabpar.train.output import METRICS_FILE
from tests.spawn import run_ranks
from tests.support.tiny_checks import SMALL, TINY

CPU = torch.device("cpu")


def by_name(gpus: int) -> dict[str, Check]:
    return {check.name: check for check in checks("cuda", gpus, "/folder")}


def test_every_check_can_be_called_and_follows_the_one_it_needs() -> None:
    seen: set[str] = set()
    for check in by_name(8).values():
        inspect.signature(check.function, follow_wrapped=False).bind(**check.arguments)
        assert pickle.loads(pickle.dumps(check.function)) is check.function
        assert check.after is None or check.after in seen
        seen.add(check.name)
    assert {f"training {method}, fp32" for method in METHODS} < seen


@pytest.mark.parametrize(("gpus", "processes", "pp"), [(1, 1, 1), (3, 3, 3), (8, 8, 4), (16, 8, 4)])
def test_processes_follow_the_gpus(gpus: int, processes: int, pp: int) -> None:
    found = by_name(gpus)
    assert found["communicators"].ranks == processes
    assert found["training vocab-2, bf16"].arguments["pp"] == pp


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", SMALL)
def test_kernels_that_follow_the_specification_pass(kernel: str, dtype: str) -> None:
    finding = getattr(kernels, kernel)("cpu", dtype, **SMALL[kernel])
    assert finding.outcome == "ok", finding


@pytest.mark.parametrize("kernel", [*SMALL, "large_exponentials", "large_rows"])
def test_kernels_that_do_not_are_found(kernel: str) -> None:
    """Every kernel is off by a little more than 16-bit rounding, in its last row alone."""

    def exponentials(*args, **options):
        found = dispatch.CPU.exponentials(*args, **options)
        found.e[-1] *= 1.02
        return found

    def scale_rows(*args):
        found = dispatch.CPU.scale_rows(*args)
        found[-1] *= 1.02
        return found

    def scatter_add_rows_(out, rows, *args, **options):
        dispatch.CPU.scatter_add_rows_(out, rows, *args, **options)
        out[rows.max()] *= 1.02

    def finish(grad, *args):
        dispatch.CPU.finish(grad, *args)
        grad[-1] *= 1.02

    broken = dataclasses.replace(
        dispatch.CPU,
        name="broken",
        finish=finish,
        exponentials=exponentials,
        scale_rows=scale_rows,
        scatter_add_rows_=scatter_add_rows_,
    )
    large = kernel.startswith("large")
    sizes = {"elements": 2**16} if large else SMALL[kernel]
    assert getattr(kernels, kernel)("cpu", "bfloat16", **sizes).outcome == "ok"
    with use_kernels(broken):
        finding = getattr(kernels, kernel)("cpu", "bfloat16", **sizes)
    assert finding.outcome == "failed"
    assert finding.figure.startswith("broken: largest error")


@pytest.mark.parametrize("name", ["merge", "row_gradient"])
def test_kernels_of_the_statistics(name: str) -> None:
    def wrong(*args, **options):
        result = getattr(dispatch.CPU, name)(*args, **options)
        (result.nll if name == "merge" else result.target)[-1] *= 1.001
        return result

    assert kernels.statistics("cpu", "float32", n=40).outcome == "ok"
    with use_kernels(dataclasses.replace(dispatch.CPU, **{name: wrong})):
        assert kernels.statistics("cpu", "float32", n=40).outcome == "failed"


def test_what_is_written_twice_must_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter((1.0, 1.0000001) * 2)

    def scatter(out, rows, values, scale):
        dispatch.CPU.scatter_add_rows_(out, rows, values, scale)
        out *= next(calls)

    unsteady = dataclasses.replace(dispatch.CPU, scatter_add_rows_=scatter)
    with use_kernels(unsteady), pytest.raises(ValueError, match=r"two runs of scatter_add_rows .* differ"):
        kernels.scatter_add_rows("cpu", "float32", **SMALL["scatter_add_rows"])


def test_what_lacks_memory_or_triton_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "free_bytes", lambda device: 2**30)
    finding = kernels.large_rows("cpu", "bfloat16", elements=2**31)
    assert (finding.outcome, finding.reason) == (
        "not run",
        "it needs 10.0 GiB of memory, and 1.0 GiB are free",
    )
    monkeypatch.setattr(dispatch, "why_not_triton", lambda device, dtype: "Triton is not installed")
    with use_kernels(dispatch.REFERENCE):
        finding = kernels.exponentials("cpu", "float32")
    assert (finding.outcome, finding.reason) == ("not run", "Triton is not installed")


def _wrong(rank: int) -> tuple[list[str], list[str]]:
    groups = create_groups((0, rank, 0), 2, 1)
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(communicators, "all_reduce", lambda groups, tensor, *op: tensor)
    monkeypatch.setattr(
        communicators, "PointToPoint", lambda groups: SimpleNamespace(
            send=lambda message, stage: None,
            receive=lambda shape, dtype, device, stage: SimpleNamespace(wait=lambda: torch.zeros(shape)),
            drain=lambda: None,
        )
    )  # fmt: skip
    return communicators.wrong_collectives(groups, CPU), communicators.wrong_links(groups, CPU)


def test_what_communicators_do_wrong_is_named() -> None:
    first, second = run_ranks(2, _wrong, fresh=True)
    assert first == (
        ["all-reduce, sum gave [0.0]", "all-reduce, maximum gave [0.0]"],
        ["the message of stage 1 has arrived with other values"],
    )
    assert second == ([], ["the message of stage 0 has arrived with other values"])


@pytest.mark.slow
def test_communicators() -> None:
    (check,) = (check for check in checks("cpu", 3, "/folder", TINY) if check.name == "communicators")
    result = run(check)
    assert result.outcome == "ok", result
    assert result.figure.startswith("3 ranks, warm-up ")


def test_one_gpu_has_no_communicators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    finding = communicators.communicators("cpu")
    assert (finding.outcome, finding.reason) == ("not run", "it needs two GPUs, and this machine has one")


def _trains(losses: dict[str, list[float]], monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of a training job: writes these losses, by method."""

    def run_job(config: TrainConfig, _: object, environment: object) -> None:
        folder = Path(config.output, config.method)
        folder.mkdir(parents=True)
        steps = enumerate(losses[config.method], 1)
        rest = {"tokens_per_s": 9.0, "iteration_ms": 9.0, "peak_memory_mib": [9]}
        lines = (json.dumps({"step": step, "loss": loss} | rest) + "\n" for step, loss in steps)
        (folder / METRICS_FILE).write_text("".join(lines))

    monkeypatch.setattr("megatron_vocabpar.train.run_job.run_job", run_job)


@pytest.mark.parametrize(("change", "reason"), [(1.00001, ""), (1.001, "an error of 0.001 is above 0.0001")])
def test_losses_are_compared_with_the_baselines(
    change: float, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = [7.0, 6.9, 6.8, 6.7, 6.6, 6.5]
    _trains({"baseline": stock, "naive": [*stock[:5], 6.5 * change]}, monkeypatch)
    where = ("fp32", 2, str(tmp_path))
    finding = training.train("cuda", "baseline", *where)
    assert (finding.outcome, finding.figure) == ("ok", "2 stages, fp32: loss 7.0000 to 6.5000")
    finding = training.train("cuda", "naive", *where)
    assert (finding.outcome, finding.reason) == ("failed" if reason else "ok", reason)


@pytest.mark.long
@pytest.mark.parametrize("pp", [1, 2])
def test_training(pp: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VOCABPAR_CACHE", str(tmp_path / "cache"))
    where = {"device": "cpu", "dtype": "fp32", "pp": pp, "folder": str(tmp_path), "vocab_size": 300}
    for method in ("baseline", "vocab-2"):  # in a process that is a rank itself, as the doctor runs it
        result = run(Check(method, training.train, {"method": method, **where}, 300))
        assert result.outcome == "ok", result


def test_variables_that_matter_are_shown() -> None:
    assert environment.variables({"HOME": "/"}).figure == "none is set"
    finding = environment.variables({"CUDA_LAUNCH_BLOCKING": "1", "TORCH_NCCL_BLOCKING_WAIT": "0"})
    assert finding.outcome == "failed"
    assert finding.figure == "CUDA_LAUNCH_BLOCKING=1, TORCH_NCCL_BLOCKING_WAIT=0"
    assert "share one queue" in environment.variables({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}).figure


def test_versions_name_what_is_installed_and_what_is_not() -> None:
    figure = environment.versions("cpu").figure
    assert f"torch {torch.__version__}" in figure
    assert "megatron-core 0." in figure.partition("; not installed:")[0]
    assert "fused_weight_gradient_mlp_cuda" in figure.partition("; not installed:")[2]


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_whole_list_in_processes_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VOCABPAR_CACHE", str(tmp_path / "cache"))
    every = checks("cpu", 2, str(tmp_path), TINY)
    trained = ("training baseline", "training vocab-2")
    chosen = [c for c in every if not c.name.startswith("training") or c.name.startswith(trained)]
    found = {result.check: result for result in run_all(chosen, print)}
    of_gpus = {"GPUs", "row kernels in use"}
    assert {name for name, result in found.items() if result.outcome == "not run"} == of_gpus
    for name, result in found.items():
        assert result.figure or name in of_gpus, result
        assert result.outcome == "ok" or name in of_gpus, result
