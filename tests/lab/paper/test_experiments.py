"""Rows of a CSV file, their launch lines, and which of them are finished; bad rows are in tests/faults."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from lab.paper.checks import published
from lab.paper.command import Nodes, launch_line, method_arguments
from lab.paper.corpus import documents
from lab.paper.experiments import read_experiments, small
from lab.paper.results import Result, finished, read_results, result_path, write_result

TABLES = Path(__file__).parents[3] / "scripts" / "artifact"
QUICK = TABLES / "quick.csv"


@pytest.mark.parametrize(
    ("file", "rows", "published_rows"),
    [
        ("quick.csv", 9, 5),
        ("exp_one_host.csv", 72, 40),
        ("exp_two_hosts.csv", 72, 56),
        ("exp_three_hosts.csv", 24, 16),
        ("exp_four_hosts.csv", 72, 56),
        ("convergence.csv", 6, 3),
    ],
)
def test_the_shipped_files_have_the_papers_rows(file: str, rows: int, published_rows: int) -> None:
    experiments = read_experiments(TABLES / file)
    assert len(experiments) == rows
    known = [published(e) for e in experiments if e.microbatches == 128]
    assert sum(cell is not None for cell in known) == published_rows


def test_a_published_cell_is_that_of_the_table() -> None:
    rows = {e.name: e for e in read_experiments(TABLES / "exp_two_hosts.csv")}
    row = rows["g16-s4096-v128k-vocab-1"]
    cell = published(row)
    assert cell is not None
    assert (cell.mfu_percent, cell.peak_memory_gb) == (50.71, 40.31)
    assert published(replace(row, hidden=5120)) is None


def test_smoke_takes_each_family_and_method_once() -> None:
    rows = small(read_experiments(TABLES / "exp_one_host.csv"))
    assert [row.name for row in rows] == [
        *(f"1f1b-{method}" for method in ("baseline", "redis", "interlaced", "vocab-1", "vocab-2", "naive")),
        *(f"v-half-{method}" for method in ("baseline", "vocab-1", "vocab-2")),
    ]


def test_the_launch_line_of_two_nodes() -> None:
    row = next(e for e in read_experiments(TABLES / "exp_two_hosts.csv") if e.method == "vocab-2")
    nodes = Nodes.of({"SLURM_NNODES": "2", "SLURM_NODEID": "1", "MASTER_ADDR": "first"})
    line = launch_line(row, Path("/mlm"), Path("/data/text"), "0.16", nodes, on_cpu=False)
    words = " ".join(line)
    assert "--nnodes 2 --node-rank 1 --master-addr first --master-port 29500 --nproc-per-node 8" in words
    assert "-m lab.paper.rank megatron_vocabpar.launch /mlm/pretrain_gpt.py" in words
    assert "--pipeline-model-parallel-size 16" in words
    assert "--vocab-size 31999" in words  # the tokenizer adds the end of a document
    with pytest.raises(ValueError, match="3 nodes cannot share 16 GPUs evenly"):
        launch_line(row, Path("/mlm"), Path("/data/text"), "0.16", replace(nodes, count=3), on_cpu=False)
    with pytest.raises(ValueError, match="2 nodes need MASTER_ADDR"):
        Nodes.of({"NNODES": "2"})


def test_stock_megatron_gets_none_of_our_flags() -> None:
    by_name = {e.name: e for e in read_experiments(QUICK)}
    assert method_arguments(by_name["baseline"]) == []
    assert "--num-virtual-stages-per-pipeline-rank" in method_arguments(by_name["v-half-baseline"])


def test_a_row_is_finished_when_all_of_its_results_are_whole(tmp_path: Path) -> None:
    row = read_experiments(QUICK)[0]
    results = [
        Result(row, "done", "", (), {}, ms, (1.5,) if ms else (), {rank: 1024.0 + rank}, {rank: 2048.0})
        for rank, ms in enumerate([(), (9.0,) * 10 + (1.0, 3.0, 2.0)])
    ]
    for node, result in enumerate(results):
        assert not finished(tmp_path, row, 2)
        path = result_path(tmp_path, row, node)
        path.parent.mkdir(exist_ok=True)
        write_result(result, path)
    assert finished(tmp_path, row, 2)
    assert not finished(tmp_path, replace(row, lr=1.0), 2)
    (merged,) = read_results(tmp_path)
    assert (merged.median_ms, merged.peak_allocated_gib) == (2.0, 1025 / 1024)
    path.write_text(path.read_text()[:-20])
    assert not finished(tmp_path, row, 2)
    write_result(replace(results[1], outcome="failed"), path)
    assert not finished(tmp_path, row, 2)
    write_result(replace(results[1], outcome="out of memory"), path)
    assert finished(tmp_path, row, 2)


def test_the_text_is_the_same_again_and_can_be_learned() -> None:
    first, again = (list(documents(1000, 1 << 20)) for _ in range(2))
    assert first == again
    assert sum(map(len, first)) >= 1 << 20
    assert {document[-1] for document in first} == {999}
    followers = [b for document in first for a, b in pairwise(document) if a == 500]
    assert max(map(followers.count, set(followers))) > 0.4 * len(followers)
