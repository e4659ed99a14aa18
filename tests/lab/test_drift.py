"""The drift report names each planted fault, on cases drawn at random."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from hypothesis import assume, given
from hypothesis import strategies as st

from lab.__main__ import main
from lab.drift import compare
from lab.runs import Run, record, write_run
from megatron_vocabpar.losses.reductions import joined, masked_sum


def drift(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["drift", *arguments])


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


@pytest.mark.slow
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
    one, shards = record("TP=1", logits, targets), list(logits.split(sizes, dim=1))
    assert compare(one, record("sharded", shards, targets)).cause == "none"
    wrong = record("wrong", shards, targets, logprobs=faulty(fault, logits, targets, sizes))
    report = compare(one, wrong)
    assume(report.drifting > 3)
    assert report.cause == FAULTS[fault], report.table()
    if report.cause == "log-sum-exp":
        assert report.detail.startswith(fault)
    assert report.owner_rank == wrong.owner(report.target)
    as_reference = compare(wrong, one)
    assert as_reference.cause == FAULTS[fault], as_reference.table()
    assert as_reference.detail.startswith("in the reference: ")
    bare = dataclasses.replace(wrong, ranges=[], shard_lse=[], shard_max=[], shard_logits=[])
    assert compare(record("TP", shards, targets), bare).cause == FAULTS[fault]


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
    one = record("fsdp", logits, targets)
    assert abs(one.logprobs[0] - -1.3395806963) < 5e-11
    two = record("tp2", list(logits.split(3, dim=1)), targets, logprobs=wrong)
    for run in (one, two):
        write_run(run, tmp_path / f"{run.name}.json")
    files = [str(tmp_path / "fsdp.json"), str(tmp_path / "tp2.json")]
    shown = drift(*files, "--format", "json")
    assert shown.exit_code == 1
    written = tmp_path / "out.json"
    assert drift(*files, "--output", str(written)).exit_code == 1
    assert written.read_text() == shown.stdout
    report = json.loads(shown.output)
    assert report["cause"] == "log-sum-exp"
    assert report["detail"].startswith(detail)
    assert (report["position"], report["target"], report["owner_rank"], report["tp_size"]) == (
        0,
        4,
        1,
        [1, 2],
    )
    assert drift(files[0], files[0]).exit_code == 0
    assert drift(*files, "--tolerance", "10").exit_code == 0


def test_without_evidence_the_cause_is_unknown() -> None:
    run = Run("a", [-1.0], [3])
    report = compare(run, dataclasses.replace(run, name="b", logprobs=[-2.0]))
    assert (report.cause, report.passed) == ("unknown", False)


@pytest.mark.parametrize("sizes", [[60], [20, 40]], ids=str)
def test_other_logits_and_noise_are_no_fault_of_a_reduction(sizes: list[int]) -> None:
    """Also where one shard alone ran, whose owner's log-sum-exp is the whole one."""
    draw = torch.Generator().manual_seed(0)
    logits, targets = 3 * torch.randn(24, 60, generator=draw), torch.randint(0, 60, (24,), generator=draw)

    def run(logits: torch.Tensor, logprobs: torch.Tensor | None = None) -> Run:
        return record("run", list(logits.split(sizes, dim=1)), targets, logprobs=logprobs)

    one, noise = run(logits), 0.01 * torch.randn(24, generator=draw)
    bare = dataclasses.replace(one, ranges=[], shard_lse=[], shard_max=[], shard_logits=[])
    moved = logits + 0.01 * torch.randn(24, 60, generator=draw)
    assert compare(one, run(moved)).cause == "inputs differ"
    assert compare(bare, run(moved)).cause == "inputs differ"
    assert compare(one, run(logits.bfloat16())).cause == "dtype"
    assert compare(one, run(moved.bfloat16().float())).cause == "inputs differ"
    assert compare(one, run(logits, torch.tensor(one.logprobs) + noise)).cause == "unknown"
    # A sum of exponentials that was added in 16 bits, and nothing else.
    largest = logits.double().amax(dim=1, keepdim=True)
    total = (logits.double() - largest).exp().sum(dim=1).half().double()
    target = logits.double().gather(1, targets[:, None])[:, 0]
    report = compare(one, run(logits, target - largest[:, 0] - total.log()))
    assert report.cause == "dtype"
    assert "sum of the exponentials is a number of float16" in report.detail


def test_means_of_sentences_and_other_masks() -> None:
    values = torch.tensor([-1.0, -2.0, -4.0, -8.0, -16.0])
    mask, sentence = torch.tensor([1.0, 0.5, 1.0, 1.0, 0.0]), torch.tensor([0, 0, 0, 1, 1])
    common = {"logprobs": values.tolist(), "targets": [0] * 5, "sentence": sentence.tolist()}
    tokens, sentences = 14.0 / 3.5, (6.0 / 2.5 + 8.0) / 2

    def run(loss: float, mask: torch.Tensor = mask) -> Run:
        return Run("run", loss=loss, mask=mask.tolist(), **common)

    report = compare(run(tokens), run(sentences))
    assert (report.cause, report.detail[:46]) == (
        "aggregation",
        "the loss is the mean of 2 means, one of each s",
    )
    assert compare(run(sentences), run(tokens)).cause == "aggregation"
    assert compare(run(tokens), run(14.0 / 5)).detail.startswith("the loss is the masked sum over 5")
    report = compare(run(tokens), run(31 / 5, torch.ones(5)))
    assert report.cause == "mask denominator"
    assert report.detail == "the masks differ on 2 tokens, first at 1: 0.5 and 1"


GOOD = {"name": "a", "logprobs": [-1.0, -2.0], "targets": [1, 2]}
WRONG = (
    {"logprobs": [1.0]}, {"logprobs": 5}, {"logprobs": ["x", "y"]}, {"logprobs": [None, None]}, {"name": 3},
    {"logprobs": [[1], [2]]}, {"targets": ["a", "b"]}, {"targets": [[1], [2]]}, {"name": []}, {"x": 1},
    {"tp_size": "2"}, {"ranges": [1, 2]}, {"ranges": [[0, 1, 2]]}, {"tp_size": 2, "ranges": [[0, 1], [1]]},
    {"mask": [1]}, {"mask": ["a", "b"]}, {"loss": "x"}, {"shard_lse": [1, 2]}, {"shard_lse": [[1]]},
    {"microbatch": ["a", "b"]}, {"ranges": [[0, 3]], "shard_lse": [[1.0]]},
)  # fmt: skip
MALFORMED = (None, "", "{", "[" * 100_000, "\xff", "[]", "7", *(json.dumps(GOOD | each) for each in WRONG))


def refused(*arguments: object) -> str:
    """What is said of bad input: one line, exit code 2."""
    shown = drift(*map(str, arguments))
    assert shown.exit_code == 2, shown.output
    (line,) = re.findall("^(?:Error|lab drift: error): .*", shown.output, re.MULTILINE)
    return line


@pytest.mark.parametrize("text", MALFORMED, ids=range(len(MALFORMED)))
def test_a_malformed_file_is_named(tmp_path: Path, text: str | None) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    write_run(Run(**GOOD), good)
    if text is not None:
        bad.write_bytes(text.encode("latin1"))
    for files in ((good, bad), (bad, good)):
        assert "bad.json" in refused(*files)


def test_bad_options_are_named(tmp_path: Path) -> None:
    run, other = tmp_path / "run.json", tmp_path / "other.json"
    write_run(Run(**GOOD), run)
    write_run(Run("b", [-1.0], [1]), other)
    assert "hold other targets (2 and 1)" in refused(run, other)
    for value in ("nan", "-1", "x"):
        assert "--tolerance" in refused(run, run, "--tolerance", value)
    for file in (tmp_path, tmp_path / "no" / "x.json"):
        assert "give another --output" in refused(run, run, "--output", file)
    assert "Is a directory" in refused(run, tmp_path)
