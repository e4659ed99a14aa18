"""The benchmark of the vocabulary layers measures what it says, and refuses what is wrong."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch.nn import functional

from lab.kernels import measured as kernels
from lab.kernels.measured import Shape, measure_input, measure_output, shapes
from lab.kernels.others import ON_ANY_DEVICE, OTHERS, forward_backward
from lab.kernels.output_layer import OutputLayer
from lab.kernels.published import published_pass
from lab.kernels.record import record_table
from lab.timing import ROTATED
from lab.verbs.kernels import kernels_command
from megatron_vocabpar.doctor.environment import file_name
from megatron_vocabpar.layers.output.plain import OutputState
from megatron_vocabpar.layers.partition import VocabRange
from tests.cases import rest_is_slow
from tests.layers import reference

CPU = torch.device("cpu")
PYTORCHS = [
    name for name in ON_ANY_DEVICE if name == "pytorch" or hasattr(functional, "linear_cross_entropy")
]
SMALL = Shape(n=64, hidden=64, vocab_size=16000, p=4)


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [48, 16], weight [40, 16], and targets on every row of it."""
    random = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, 16, generator=random) for rows in (48, 40))
    return 2 * x, weight, torch.arange(48) % 40


@pytest.mark.parametrize("algorithm", [1, 2])
def test_the_published_passes_give_the_layers_result(algorithm: int) -> None:
    x, weight, targets = inputs()
    g = torch.rand(len(x)) / len(x)
    main_grad = torch.zeros_like(weight)
    loss, dx = published_pass(x, weight, targets, g, main_grad, algorithm)
    exact = reference.output_layer(x, weight, targets, g)
    torch.testing.assert_close(loss.double(), exact[0], rtol=1e-5, atol=1e-5)
    assert reference.relative_error(dx, exact[1]) < 1e-5
    assert reference.relative_error(main_grad, exact[2]) < 1e-5


@pytest.mark.parametrize("name", PYTORCHS)
def test_pytorch_gives_the_layers_result(name: str) -> None:
    x, weight, targets = inputs()
    parameter = torch.nn.Parameter(weight)
    loss, dx = forward_backward(OTHERS[name](), x, parameter, targets)
    exact = reference.output_layer(x, weight, targets, torch.full((len(x),), 1 / len(x)))
    torch.testing.assert_close(loss.double(), exact[0].mean(), rtol=1e-5, atol=1e-6)
    assert reference.relative_error(dx, exact[1]) < 1e-5
    assert parameter.grad is not None
    assert reference.relative_error(parameter.grad, exact[2]) < 1e-5


@pytest.mark.parametrize("dtype", rest_is_slow([torch.float32, torch.bfloat16], torch.bfloat16), ids=str)
def test_every_field_that_a_cpu_can_measure_is_there(dtype: torch.dtype) -> None:
    rows = measure_output(SMALL, CPU, dtype, rounds=2)
    assert [row.method for row in rows] == ["vocab-1", "vocab-2", "vocab-1-recompute"]
    for row in rows:
        assert row.refused == {}
        assert row.rows_of_weight == 4000
        for name in ("ours_ms", "s_ms", "t_ms", "three_gemms_ms", "published_ms", "pytorch_ms"):
            assert getattr(row, name) > 0, name
        assert row.peak_mib is None
        assert row.others_ms.keys() == {"frozen", *PYTORCHS} == row.speedup_over_others.keys()
        assert row.not_measured.keys() == OTHERS.keys() - row.others_ms.keys()
        assert row.dx_error_by_p_target
    (invariant,) = measure_output(SMALL, CPU, dtype, rounds=2, methods=["vocab-1-invariant"])
    assert invariant.ours_ms > 0
    assert invariant.refused == invariant.others_ms == invariant.not_measured == {}
    stored, with_a, recomputed = (row.kept_mib for row in rows)
    assert stored is not None
    assert with_a is not None
    assert recomputed is not None
    assert invariant.kept_mib is not None
    assert with_a > stored > recomputed
    assert invariant.kept_mib >= stored
    inputs = measure_input(SMALL, CPU, dtype, rounds=2)
    assert [row.method for row in inputs] == ["IF", "IB", "IF+IB"]


def test_wrong_results_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    right = OutputState.input_gradient
    monkeypatch.setattr(OutputState, "input_gradient", lambda *args: 1.01 * right(*args))
    methods = ("vocab-1", "vocab-2", "vocab-1-invariant")
    measured = measure_output(SMALL, CPU, torch.float32, 1, methods=methods, with_scaling=False)
    rows = {row.method: row for row in measured}
    for method in ("vocab-1", "vocab-2"):
        assert "row error of dX" in rows[method].refused["ours"]
    assert rows["vocab-1-invariant"].refused == {}  # whose passes are others


def test_a_gpu_gets_the_papers_shapes_and_larger_ones() -> None:
    found = {(s.p, s.hidden) for s in shapes(torch.device("cuda")) if s.n == 2048 and s.vocab_size == 131072}
    assert found == {(8, 3072), (16, 4096), (32, 5120), (64, 8192)}
    assert {s.n for s in shapes(torch.device("cuda"))} == {2048, 8192}


def test_a_shard_has_the_average_share_of_targets() -> None:
    layer = OutputLayer(64, 16, VocabRange(0, 40, 40), CPU, torch.float32)
    share = layer.with_share(8)
    assert [len(targets.owned) for targets in share.targets] == [8] * ROTATED
    assert [len(targets.owned) for targets in layer.targets] == [64] * ROTATED
    owned = share.inputs[0].targets < 40
    found = share.s(0, "vocab-1")[1].nll
    torch.testing.assert_close(found[owned], layer.s(0, "vocab-1")[1].nll[owned])


def test_shapes_are_chosen_by_size() -> None:
    done = CliRunner().invoke(kernels_command, ["--device", "cpu", "--p", "7"])
    assert done.exit_code == 2
    assert "no shape has all of these; there are: 2048 tokens, 32768 ids, p 8; " in done.output


def test_the_record_is_written_with_date_hardware_and_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "shapes", lambda _: [SMALL])
    folder = tmp_path / "results"
    done = CliRunner().invoke(
        kernels_command, ["--device", "cpu", "--rounds", "1", "--save", str(folder), "--format", "json"]
    )
    assert done.exit_code == 0, done.output
    (path,) = folder.iterdir()
    record = json.loads(path.read_text())
    assert json.loads(done.stdout) == record
    assert record["environment"]["date"] == date.today().isoformat()
    assert record["environment"]["torch"] == torch.__version__
    assert path.name == file_name(record["environment"])
    assert "liger" in record["rows"][0]["not_measured"]


def test_the_records_name_is_a_file_name() -> None:
    found = {"device": "NVIDIA H100 80GB HBM3", "date": "2026-11-21"}
    assert file_name(found) == "nvidia-h100-80gb-hbm3_2026-11-21.json"


def test_the_table_names_what_was_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "shapes", lambda _: [SMALL])
    done = CliRunner().invoke(kernels_command, ["--device", "cpu", "--rounds", "1"])
    assert done.exit_code == 0, done.output
    for name in ("liger", "cce", "quack", "megatron"):
        assert f"{name}: not measured: it needs a CUDA device" in done.output


def test_the_page_has_all_that_was_measured_on_a_gpu() -> None:
    page = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text(encoding="utf-8")
    assert [line for line in record_table() if line not in page.splitlines()] == []
