"""Cost files, and their reading for a schedule."""

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from megatron_vocabpar.schedule.times.costs import PassCosts, PassTimes
from megatron_vocabpar.schedule.words.methods import METHODS
from megatron_vocabpar.schedule.words.passes import Comm, CommType, Pair, Pass, PassType
from megatron_vocabpar.schedule.words.placement import Placement
from megatron_vocabpar.schedule.words.schedule import Schedule

FILE: dict[str, Any] = {
    "F_ms": [10, 20],
    "B_ms": 6,
    "W_ms": 4,
    "IF_ms": 1,
    "p2p_ms": 0.5,
    "broadcast_ms": 0.6,
    "all_reduce_ms": 0.7,
    "layers": 4,
    "methods": {
        "vocab-2": {"S_ms": 3, "T_ms": [1, 2]},
        "interlaced": {"S_ms": 3, "T_ms": 2, "synchronous_ms": 0.5},
    },
    "baseline_last_rank_extra": {"F_ms": 7, "B_ms": 8, "W_ms": 9},
    "baseline_first_rank_extra": {"B_ms": 2},
}


def times(method: str, data: dict[str, Any] = FILE, chunks: int = 1, *, split: bool = False) -> PassTimes:
    frame = Schedule(METHODS[method], Placement(2, chunks), 4)
    return PassTimes.of(PassCosts.from_dict(data), frame, splits_w=split)


def test_backward_takes_the_weight_gradient_unless_it_is_split() -> None:
    assert times("vocab-2").passes[PassType.B] == (10, 10)
    split = times("vocab-2", split=True)
    assert (split.passes[PassType.B], split.passes[PassType.W]) == ((6, 6), (4, 4))


def test_a_chunk_takes_its_part_of_the_ranks_share() -> None:
    assert times("vocab-2", chunks=2).passes[PassType.F] == (5, 10, 5, 10)


def test_vocabulary_passes_per_rank() -> None:
    passes = times("vocab-2").passes
    assert (passes[PassType.S], passes[PassType.T], passes[PassType.IF]) == ((3, 3), (1, 2), (1, 1))


def test_interlaced_puts_the_whole_output_layer_in_s() -> None:
    assert times("interlaced").passes[PassType.S] == (5.5, 5.5)


def test_baseline_adds_the_vocabulary_layers_to_the_outer_stages() -> None:
    passes = times("baseline").passes
    assert passes[PassType.F] == (10, 27)
    assert passes[PassType.B] == (12, 27)


def test_redis_moves_layers_away_from_the_last_stage() -> None:
    even = {**FILE, "F_ms": 10}
    passes = times("redis", even).passes  # a layer takes 10 of work, the output layer 24
    assert passes[PassType.F] == (15, 12)
    assert passes[PassType.B] == (17, 22)


def test_communication_by_kind() -> None:
    comms = times("vocab-2").comms
    wanted = {"SEND_F": 0.5, "RECV_B": 0.5, "C0": 0.6, "CIB": 0.6, "C1": 0.7, "C2": 0.7, "CI": 0.7}
    assert {name: comms[CommType(name)] for name in wanted} == wanted


@pytest.mark.parametrize("p", [8, 16, 32])
@pytest.mark.parametrize("vocab", ["32k", "256k"])
def test_the_papers_settings_are_there(p: int, vocab: str) -> None:
    costs = PassCosts.paper(p, vocab)
    assert set(costs.methods) == {"vocab-1", "vocab-2", "naive", "interlaced"}
    whole = [
        sum(v for k, v in costs.methods[name].items() if k in ("S_ms", "T_ms")) for name in costs.methods
    ]
    assert max(whole) < 1.2 * min(whole), "every method does about the same work"


def test_reads_a_file(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(FILE))
    assert PassCosts.load(path) == PassCosts.from_dict(FILE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"F_ms": None}, "F_ms is None"),
        ({"F_ms": -1}, "F_ms is -1"),
        ({"F_ms": [1, "2"]}, "F_ms is"),
        ({"F_ms": []}, "F_ms is"),
        ({"F_ms": True}, "F_ms is True"),
        ({"W_ms": 1e308}, "W_ms is 1e.308; give milliseconds from 0 to 1e7"),
        ({"p2p_ms": [1, 2]}, "p2p_ms is"),
        ({"methods": []}, "methods is .*; give for each method its times"),
        ({"methods": {"vocab-2": 3}}, "methods.vocab-2 is 3; give the times of its passes"),
        ({"layers": 0}, "layers is 0"),
        ({"baseline_last_rank_extra": 3}, "baseline_last_rank_extra is 3; give milliseconds for F_ms"),
        ({"baseline_last_rank_extra": {"X_ms": 1}}, "unknown entry 'X_ms' in baseline_last_rank_extra"),
        ({"methods": {"vocab-9": {}}}, "unknown method 'vocab-9'; there are baseline"),
        ({"p2p": 1}, "unknown entry 'p2p'; there are"),
        ({"layers_per_stage": [1, True]}, "layers_per_stage.1 is True"),
    ],
)
def test_malformed_costs_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PassCosts.from_dict({**FILE, **change})


@pytest.mark.parametrize("time", [float("nan"), float("inf"), -1.0, 1e308])
def test_times_that_are_none_are_refused_in_python_too(time: float) -> None:
    with pytest.raises(ValueError, match=f"costs: W takes {re.escape(str(time))} ms; give times from 0"):
        PassTimes.of(PassCosts(1.0, 1.0, time), Schedule(METHODS["baseline"], Placement(1), 1), splits_w=True)


def test_a_method_lacks_a_time() -> None:
    with pytest.raises(ValueError, match="the costs have no T_ms for 'vocab-2'; add it under 'methods'"):
        times("vocab-2", {**FILE, "methods": {"vocab-2": {"S_ms": 1}}})


def test_a_list_for_another_pipeline_is_refused() -> None:
    with pytest.raises(ValueError, match="F_ms lists 3 ranks, but the pipeline has 2"):
        times("vocab-2", {**FILE, "F_ms": [1, 2, 3]})


def test_a_method_without_times_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no times for 'naive'.*there are vocab-2, interlaced"):
        times("naive")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read costs"),
        ("{", "not JSON"),
        ("[]", "one JSON object"),
        ('{"F_ms": NaN}', "is not JSON: NaN is no number in JSON"),
        ('{"F_ms": 1, "F_ms": 2}', "is not JSON: 'F_ms' is there twice"),
        ("[" * 100_000, "nested too deep"),
        ("{}", "F_ms is missing; give one JSON object"),
    ],
)
def test_unreadable_files_are_named(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "costs.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=message):
        PassCosts.load(path)


def test_unknown_setting_of_the_paper() -> None:
    with pytest.raises(ValueError, match=r"p=7.*there are p=8, 16, 32"):
        PassCosts.paper(7)


def test_a_pair_takes_less_by_what_it_hides() -> None:
    """The whole share hides 6 ms on rank 0 and 4 ms on rank 1; each of two chunks hides half."""
    given = times("vocab-2", FILE | {"hidden_ms": [6, 4]}, chunks=2, split=True)
    assert given.hidden == {
        (f, b): 2 if f % 2 else 3 for f, b in product(range(4), repeat=2) if (f - b) % 2 == 0
    }
    pair = Pair(Pass(PassType.F, 1, 5), Pass(PassType.B, 3, 2))
    assert given.of_instruction(pair) == 20 / 2 + 6 / 2 - 2
    assert given.of_instruction(pair.forward) == 10
    assert given.of_instruction(Comm(CommType.RECV_F, 1, 0)) == 0.5
    assert given.scaled(3.0, 2.0).saved(pair) == 4


def test_nothing_is_hidden_unless_the_file_says_so() -> None:
    assert times("vocab-2").hidden == {}
    assert not PassCosts.from_dict(FILE).hides
    assert "hidden_ms" not in PassCosts.from_dict(FILE).to_dict()
    costs = PassCosts.from_dict(FILE | {"hidden_ms": [0, 4]})
    assert costs.hides
    assert PassCosts.from_dict(json.loads(json.dumps(costs.to_dict()))) == costs


@pytest.mark.parametrize(
    ("hidden", "message"),
    [
        ([6, 6.5], "on rank 1 hide 6.5 ms of each other, but the shorter takes 6 ms"),
        (11, "on rank 0 hide 11 ms of each other, but the shorter takes 6 ms"),
        ([1, 2, 3], "hidden_ms lists 3 ranks, but the pipeline has 2"),
        (-1, "hidden_ms is -1; give milliseconds"),
    ],
)
def test_a_pair_hides_no_more_than_its_shorter_pass(hidden: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        times("vocab-2", FILE | {"hidden_ms": hidden}, split=True)
