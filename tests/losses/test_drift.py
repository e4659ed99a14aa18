"""The drift report names each planted fault, on cases drawn at random."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron_vocabpar.cli.main import main
from megatron_vocabpar.layers.partition import ranges_from_sizes
from megatron_vocabpar.losses.drift import compare
from megatron_vocabpar.losses.reductions import joined, masked_sum
from megatron_vocabpar.losses.runs import Run, record, write_run

FAULTS = {
    "owner-only": "log-sum-exp",
    "averaged": "log-sum-exp",
    "wrong owner": "ownership",
    "bf16 state": "dtype",
}


def faulty(fault: str, logits: torch.Tensor, targets: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Log-probabilities with one fault, written from its description alone."""
    shards = logits.double().split(sizes, dim=1)
    starts = torch.tensor([sum(sizes[:rank]) for rank in range(len(sizes))])
    owner = (targets[:, None] >= starts).sum(dim=1) - 1
    target = logits.double().gather(1, targets[:, None]).squeeze(1)
    part = torch.stack([torch.logsumexp(shard, dim=1) for shard in shards])
    whole = torch.logsumexp(part, dim=0)
    if fault == "owner-only":
        return target - part.gather(0, owner[None]).squeeze(0)
    if fault == "averaged":
        return target - part.mean(dim=0)
    if fault == "wrong owner":
        neighbour = (owner + 1) % len(sizes)
        within = targets - starts[owner]
        reach = torch.tensor(sizes)[neighbour] - 1
        return logits.double().gather(1, (starts[neighbour] + within.clamp(max=reach))[:, None])[:, 0] - whole
    largest = logits.amax(dim=1).bfloat16()
    total = sum((shard.float() - largest.float()[:, None]).exp().sum(dim=1).bfloat16() for shard in shards)
    return (target.bfloat16() - (largest + total.log())).double()


@given(
    fault=st.sampled_from(sorted(FAULTS)),
    sizes=st.lists(st.integers(3, 40), min_size=2, max_size=8),
    seed=st.integers(0, 10**6),
    spread=st.sampled_from([1.0, 3.0]),
)
def test_faults_of_log_probabilities(fault: str, sizes: list[int], seed: int, spread: float) -> None:
    draw = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(24, sum(sizes), generator=draw)
    targets = torch.randint(0, sum(sizes), (24,), generator=draw)
    one = record("TP=1", logits, targets, ranges_from_sizes([sum(sizes)], sum(sizes)))
    ranges = ranges_from_sizes(sizes, sum(sizes))
    assert compare(one, record("sharded", logits, targets, ranges)).cause == "none"
    wrong = record("wrong", logits, targets, ranges, logprobs=faulty(fault, logits, targets, sizes))
    report = compare(one, wrong)
    assume(report.drifting > 3)
    assert report.cause == FAULTS[fault], report.table()
    if report.cause == "log-sum-exp":
        assert report.detail.startswith(fault)
    assert report.owner_rank == wrong.owner(report.target)


@given(
    fault=st.sampled_from(["microbatch means", "whole length", "mask left out"]),
    seed=st.integers(0, 10**6),
    lengths=st.lists(st.integers(1, 11), min_size=2, max_size=6),
)
def test_faults_of_the_loss(fault: str, seed: int, lengths: list[int]) -> None:
    draw = torch.Generator().manual_seed(seed)
    values = torch.randn(len(lengths), 12, generator=draw) - 4
    mask = torch.arange(12) < torch.tensor(lengths)[:, None]
    right = -joined([masked_sum(row, kept) for row, kept in zip(values, mask, strict=True)])
    batch = torch.arange(len(lengths))[:, None].expand_as(mask)
    wrong = {
        "microbatch means": -torch.stack(
            [row[kept].mean() for row, kept in zip(values, mask, strict=True)]
        ).mean(),
        "whole length": -(values * mask).sum() / values.numel(),
        "mask left out": -values.mean(),
    }[fault]
    assume(abs(float(wrong - right)) > 1e-3)
    common = {
        "logprobs": values.double().flatten().tolist(),
        "targets": [0] * values.numel(),
        "mask": mask.double().flatten().tolist(),
        "microbatch": batch.flatten().tolist(),
    }
    report = compare(Run("right", loss=float(right), **common), Run("wrong", loss=float(wrong), **common))
    expected = "aggregation" if fault == "microbatch means" else "mask denominator"
    assert report.cause == expected, report.table()


@pytest.mark.parametrize(
    ("fault", "value", "detail"),
    [("owner-only", -0.4632642102, "owner-only"), ("averaged", -0.6322267505, "averaged")],
)
def test_the_published_wrong_reductions(tmp_path: Path, fault: str, value: float, detail: str) -> None:
    logits, targets = torch.tensor([[0.1, -0.2, 1.7, 0.3, 1.2, -0.5]], dtype=torch.float64), torch.tensor([4])
    wrong = faulty(fault, logits, targets, [3, 3])
    assert abs(float(wrong) - value) < 5e-11
    one = record("fsdp", logits, targets, ranges_from_sizes([6], 6))
    assert abs(one.logprobs[0] - -1.3395806963) < 5e-11
    two = record("tp2", logits, targets, ranges_from_sizes([3, 3], 6), logprobs=wrong)
    for run in (one, two):
        write_run(run, tmp_path / f"{run.name}.json")
    files = [str(tmp_path / "fsdp.json"), str(tmp_path / "tp2.json")]
    shown = CliRunner().invoke(main, ["drift", *files, "--json"])
    assert shown.exit_code == 1
    report = json.loads(shown.output)
    assert report["cause"] == "log-sum-exp"
    assert report["detail"].startswith(detail)
    assert (report["position"], report["target"], report["owner_rank"], report["tp_size"]) == (
        0,
        4,
        1,
        [1, 2],
    )
    assert CliRunner().invoke(main, ["drift", files[0], files[0]]).exit_code == 0
    assert CliRunner().invoke(main, ["drift", *files, "--tolerance", "10"]).exit_code == 0
    missing = CliRunner().invoke(main, ["drift", files[0], str(tmp_path / "none.json")])
    assert missing.exit_code == 2


def test_without_evidence_the_cause_is_unknown() -> None:
    run = Run("a", [-1.0], [3])
    report = compare(run, dataclasses.replace(run, name="b", logprobs=[-2.0]))
    assert (report.cause, report.passed) == ("unknown", False)
