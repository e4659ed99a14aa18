"""How long passes and communication take: ``PassCosts``, measured or estimated, and ``PassTimes``.

``PassCosts`` does not depend on the schedule. It holds the times of a rank's *whole* share of layers, in
milliseconds, one number or one per rank. ``PassTimes`` reads them for one schedule: a chunk's pass takes
1/chunks of them, B takes B_ms + W_ms unless W is split off, and baseline and redis add the output layer to
the last stage. With F_ms 10, B_ms 11, W_ms 9 and two chunks, F takes 5 ms and B 10 ms, or 5.5 without W.

The files in ``data/`` hold the paper's settings (sequence length 2048, Tables 1 and 2), estimated from
FLOPs at the rates that its published 8-GPU runs reached.

Next: ``make/list_scheduling.py``, which plays them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import resources
from itertools import product
from math import fsum
from pathlib import Path
from typing import Any, ClassVar

from megatron_vocabpar.schedule.data.schema import check, read_costs
from megatron_vocabpar.schedule.times.per_rank import PerRank, halves_of_t, per_rank_of, spread
from megatron_vocabpar.schedule.times.redistribution import redistribute
from megatron_vocabpar.schedule.words.methods import (
    INTERLACED,
    METHODS,
    NAIVE,
    REDIS,
    VOCAB_1,
    VOCAB_2,
    Method,
)
from megatron_vocabpar.schedule.words.passes import (
    LAYERS,
    VOCABULARY_PASSES,
    CommType,
    Instruction,
    Pair,
    Pass,
    PassType,
)
from megatron_vocabpar.schedule.words.schedule import Schedule

_OUTPUT = (PassType.S, PassType.S2, PassType.T)
_TIMES = ("F_ms", "B_ms", "W_ms", "hidden_ms", "IF_ms", "IB_ms", "p2p_ms", "broadcast_ms", "all_reduce_ms")
_MOST_MS = 1e7  # of one pass
_ROUNDING = 1e-9  # of shares
_FILE_NAMES = {
    "last_rank_extra": "baseline_last_rank_extra",
    "first_rank_extra": "baseline_first_rank_extra",
}
_EXTRAS = (*_FILE_NAMES, "last_stage_extra")
_LAYERS_PER_RANK = 4  # unless a cost file says how many layers there are


@dataclass(frozen=True)
class PassCosts:
    """Measured or estimated times, in milliseconds.

    Attributes:
        F_ms: forward of a rank's whole share of layers; one number, or one per rank.
        B_ms: its input gradient alone.
        W_ms: its weight gradient alone.
        IF_ms: input forward of one microbatch on one rank's shard.
        IB_ms: input backward.
        methods: for each method that partitions the vocabulary, ``S_ms``, ``T_ms``, ``S2_ms`` (naive) and
            ``synchronous_ms`` (interlaced: the collectives inside S). ``T_ms`` is that of T and TW together,
            or of T alone beside a ``TW_ms``; in the first case each takes half. ``L_ms`` is 0 by default.
        p2p_ms: one point-to-point transfer between stages.
        broadcast_ms: C0, CG and CIB.
        all_reduce_ms: the other collectives.
        last_rank_extra: ``F_ms``, ``B_ms``, ``W_ms`` that an undivided output layer adds to the last stage.
        first_rank_extra: the times that an undivided input layer adds to the first stage.
        last_stage_extra: ``F_ms``, ``B_ms``, ``W_ms`` that the layers of multi-token prediction add to their
            stage, in any method. S, T, IF and IB take the times above for the rows of all heads.
        mtp_depths: D, how many further tokens are predicted.
        mtp_stage: the stage of these layers; by default the last.
        layers: transformer layers of the whole model, if known.
        layers_per_stage: transformer layers of each stage if they are uneven, for instance by Megatron's
            layout; the times above stay those of an even share. See ``redistribution.py``.
        hidden_ms: what F and B of a rank's whole share hide of each other when they run together, mostly
            their exchange between experts: F + B - FB, where FB is the time of the pair. One number, or one
            per rank; at most the shorter of F and B. Stages of unequal length hide what the shorter can.
        stage_ms: ``F_ms``, ``B_ms``, ``W_ms`` and ``hidden_ms`` of each stage's layers and heads as they are,
            in place of those of ranks and of ``last_stage_extra``; empty, or all of the first three.
    """

    F_ms: PerRank
    B_ms: PerRank
    W_ms: PerRank
    IF_ms: PerRank = 0.0
    IB_ms: PerRank = 0.0
    methods: Mapping[str, Mapping[str, PerRank]] = field(default_factory=dict)
    p2p_ms: float = 0.0
    broadcast_ms: float = 0.0
    all_reduce_ms: float = 0.0
    last_rank_extra: Mapping[str, float] = field(default_factory=dict)
    first_rank_extra: Mapping[str, float] = field(default_factory=dict)
    last_stage_extra: Mapping[str, float] = field(default_factory=dict)
    mtp_depths: int = 0
    mtp_stage: int | None = None
    layers: int | None = None
    layers_per_stage: tuple[int, ...] | None = None
    hidden_ms: PerRank = 0.0
    stage_ms: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    PAPER_SIZES: ClassVar = (8, 16, 32)

    def __hash__(self) -> int:
        # Tables have no hash; equality compares them, too.
        return hash((self.F_ms, self.B_ms, self.W_ms, self.hidden_ms, self.p2p_ms, self.layers_per_stage))

    def with_layers(self, factor: float) -> PassCosts:
        """These costs with F, B and W of layers (of stages, in ``stage_ms``) ``factor`` times as long."""
        if factor == 1.0:
            return self

        def longer(time: PerRank) -> PerRank:
            return tuple(factor * ms for ms in time) if isinstance(time, tuple) else factor * time

        stages = {
            name: row if name == "hidden_ms" else tuple(factor * ms for ms in row)
            for name, row in self.stage_ms.items()
        }
        times = {name: longer(getattr(self, name)) for name in ("F_ms", "B_ms", "W_ms")}
        return replace(self, **times, stage_ms=stages)  # type: ignore[arg-type]

    @property
    def hides(self) -> bool:
        """Whether F and B take less time together than one after the other, on any rank."""
        if self.stage_ms:
            return any(self.stage_ms.get("hidden_ms", ()))
        return any(self.hidden_ms) if isinstance(self.hidden_ms, tuple) else self.hidden_ms > 0.0

    @staticmethod
    def default(p: int, mtp_depths: int = 0) -> PassCosts:
        """Round numbers in the paper's proportions, for plans without measured times.

        The undivided output layer costs p times a rank's shard. Each head of multi-token prediction has the
        rows of an output layer, and a transformer layer.
        """
        heads = 1 + mtp_depths
        methods = {
            NAIVE: {"S_ms": 2.5, "S2_ms": 0.5, "T_ms": 5.0},
            VOCAB_1: {"S_ms": 2.5, "T_ms": 5.0},
            VOCAB_2: {"S_ms": 5.0, "T_ms": 2.5},
            INTERLACED: {"S_ms": 7.5, "T_ms": 0.0, "synchronous_ms": 1.0},
        }
        layers = {"F_ms": 10.0, "B_ms": 11.0, "W_ms": 9.0}
        return PassCosts(
            F_ms=layers["F_ms"],
            B_ms=layers["B_ms"],
            W_ms=layers["W_ms"],
            IF_ms=0.5 * heads,
            IB_ms=0.5 * heads,
            methods={m: {name: ms * heads for name, ms in times.items()} for m, times in methods.items()},
            p2p_ms=0.3,
            broadcast_ms=0.3,
            all_reduce_ms=0.3,
            last_rank_extra=dict.fromkeys(layers, 2.5 * p * heads),
            first_rank_extra={"B_ms": 0.5 * p},
            last_stage_extra={name: mtp_depths * ms / _LAYERS_PER_RANK for name, ms in layers.items()}
            if mtp_depths
            else {},
            mtp_depths=mtp_depths,
        )

    @staticmethod
    def from_dict(data: Mapping[str, Any], methods: Mapping[str, Method] = METHODS) -> PassCosts:
        """Read the JSON form (see ``data/p8_v256k.json``), with times for some of ``methods``.

        Raises:
            ValueError: naming the first missing, unknown or malformed entry.
        """
        check(data, "costs")
        return PassCosts._of_checked(data, methods)

    @staticmethod
    def _of_checked(data: Mapping[str, Any], methods: Mapping[str, Method]) -> PassCosts:
        rows = data.get("methods", {})
        for name in rows:
            if name not in methods:
                raise ValueError(f"costs: unknown method {name!r}; there are {', '.join(methods)}")
        names = {_FILE_NAMES.get(field_.name, field_.name): field_.name for field_ in fields(PassCosts)}
        values = {names[key]: value for key, value in data.items() if key in names}
        times = {name: per_rank_of(values[name]) for name in _TIMES if name in values}
        tables = {name: {key: per_rank_of(time) for key, time in row.items()} for name, row in rows.items()}
        extras = {name: {key: float(time) for key, time in values.get(name, {}).items()} for name in _EXTRAS}
        stages: dict[str, Any] = {
            name: tuple(values[name]) for name in ("layers_per_stage",) if name in values
        }
        stages["stage_ms"] = {key: tuple(map(float, row)) for key, row in values.get("stage_ms", {}).items()}
        return PassCosts(**{**values, **times, **extras, **stages, "methods": tables})

    def to_dict(self) -> dict[str, Any]:
        """The JSON form, which ``from_dict`` reads back."""
        data = {
            _FILE_NAMES.get(field_.name, field_.name): getattr(self, field_.name) for field_ in fields(self)
        }
        seldom = ("last_stage_extra", "mtp_depths", "hidden_ms", "stage_ms")
        return {k: value for k, value in data.items() if value is not None and (value or k not in seldom)}

    @staticmethod
    def load(path: str | Path, methods: Mapping[str, Method] = METHODS) -> PassCosts:
        """Read a cost file.

        Raises:
            ValueError: if it is missing, not JSON or malformed; the message names the file.
        """
        data = read_costs(path)
        try:
            return PassCosts._of_checked(data, methods)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def with_hidden(self, share: float, p: int) -> PassCosts:
        """These costs where pairs hide time; else with ``share`` of the shorter of F and B to hide.

        Args:
            share: above 0, at most 1.
            p: pipeline size.
        """
        if self.hides:
            return self
        if self.stage_ms:
            shorter = map(min, self.stage_ms["F_ms"], self.stage_ms["B_ms"])
            return replace(self, stage_ms={**self.stage_ms, "hidden_ms": tuple(share * ms for ms in shorter)})
        shorter = map(min, spread(self.F_ms, p, "F_ms"), spread(self.B_ms, p, "B_ms"))
        return replace(self, hidden_ms=tuple(share * ms for ms in shorter))

    @staticmethod
    def paper(p: int, vocab: str = "256k") -> PassCosts:
        """The setting for ``p`` in ``PAPER_SIZES`` and ``vocab`` 32k or 256k, sequence length 2048."""
        file = resources.files("megatron_vocabpar.schedule.data") / f"p{p}_v{vocab}.json"
        if not file.is_file():
            raise ValueError(f"no costs for p={p}, vocabulary {vocab!r}; there are p=8, 16, 32 and 32k, 256k")
        return PassCosts.from_dict(json.loads(file.read_text(encoding="utf-8")))


@dataclass(frozen=True)
class PassTimes:
    """The times of one schedule's instructions, in milliseconds.

    Attributes:
        passes: for each type, the time on each stage (F, B, W) or rank (vocabulary passes).
        comms: for each type of communication, its time.
        hidden: what the F of a stage and the B of a stage of the same rank hide of each other when they run
            together, by both stages; empty if nothing.
    """

    passes: Mapping[PassType, tuple[float, ...]]
    comms: Mapping[CommType, float]
    hidden: Mapping[tuple[int, int], float] = field(default_factory=dict)

    @staticmethod
    def of(
        costs: PassCosts, schedule: Schedule, *, splits_w: bool | None = None, pairs: bool = True
    ) -> PassTimes:
        """Read ``costs`` for one schedule, or a frame.

        ``splits_w`` says whether W is split from B; by default the schedule's passes do. Without ``pairs``,
        no F runs together with a B, and nothing is hidden.

        Raises:
            ValueError: if a list of times does not have one entry per rank, or the costs say nothing
                about the schedule's method.
        """
        placement = schedule.placement
        split = schedule.splits_w if splits_w is None else splits_w
        transformer = _transformer_times(costs, schedule)
        if not split:
            w = transformer[PassType.W]
            transformer[PassType.B] = [b + w for b, w in zip(transformer[PassType.B], w, strict=True)]
            transformer[PassType.W] = [0.0] * placement.num_stages
        passes = {type_: tuple(times) for type_, times in transformer.items()}
        passes |= _vocabulary_times(costs, schedule)
        comms = _comm_times(costs)
        rows = {type_.value: row for type_, row in passes.items()}
        rows |= {type_.value: (time,) for type_, time in comms.items()}
        for name, row in rows.items():
            if not all(0.0 <= time <= _MOST_MS for time in row):
                raise ValueError(f"costs: {name} takes {max(row)} ms; give times from 0 to {_MOST_MS:g} ms")
        return PassTimes(passes, comms, _hidden(costs, schedule, passes) if pairs else {})

    @staticmethod
    def benign(schedule: Schedule) -> PassTimes:
        """The textbook's times: F 1, B 2, short vocabulary passes, no latency; in units of a forward."""
        stages, ranks = schedule.placement.num_stages, schedule.p
        unit_ms = {PassType.F: 1.0, PassType.B: 2.0, PassType.W: 1.0}
        vocabulary = dict.fromkeys(VOCABULARY_PASSES, 0.0) | dict.fromkeys((*_OUTPUT, PassType.TW), 0.25)
        return PassTimes(
            {
                **{type_: (time,) * stages for type_, time in unit_ms.items()},
                **{type_: (time,) * ranks for type_, time in vocabulary.items()},
            },
            dict.fromkeys(CommType, 0.0),
        )

    def of_instruction(self, item: Instruction) -> float:
        """The ms that an instruction takes; a pair takes less than its two passes in turn."""
        if isinstance(item, Pair):
            return self._of_pass(item.forward) + self._of_pass(item.backward) - self.saved(item)
        return self._of_pass(item) if isinstance(item, Pass) else self.comms[item.type]

    def saved(self, pair: Pair) -> float:
        """The ms that the passes of a pair hide of each other."""
        return self.hidden.get((pair.forward.stage, pair.backward.stage), 0.0)

    def _of_pass(self, pass_: Pass) -> float:
        return self.passes[pass_.type][pass_.stage]

    def scaled(self, comm: float, passes: float = 1.0) -> PassTimes:
        """These times with communication ``comm`` times as long, and passes ``passes`` times as long."""
        return PassTimes(
            {type_: tuple(passes * time for time in times) for type_, times in self.passes.items()},
            {type_: comm * time for type_, time in self.comms.items()},
            {stages: passes * time for stages, time in self.hidden.items()},
        )


def _transformer_times(costs: PassCosts, schedule: Schedule) -> dict[PassType, list[float]]:
    """F, B and W of each stage, B without W."""
    transformer = {}
    for type_ in LAYERS:
        name = f"{type_.value}_ms"
        times = list(
            _of_stages(costs, schedule, name) if costs.stage_ms else _of_layers(costs, schedule, name)
        )
        if not schedule.method.vocabulary_parallel:
            times[-1] += costs.last_rank_extra.get(name, 0.0)
            times[0] += costs.first_rank_extra.get(name, 0.0)
        transformer[type_] = times
    return transformer


def _of_layers(costs: PassCosts, schedule: Schedule, name: str) -> list[float]:
    """The time of each stage by its share of a rank's layers, with that of the heads."""
    placement, per_rank = schedule.placement, spread(getattr(costs, name), schedule.p, name)
    shares = _shares(costs, schedule)
    times = [
        per_rank[rank] * share / schedule.chunks for rank, share in zip(placement.ranks, shares, strict=True)
    ]
    times[placement.mtp_stage] += costs.last_stage_extra.get(name, 0.0)
    return times


def _of_stages(costs: PassCosts, schedule: Schedule, name: str) -> tuple[float, ...]:
    """A row of ``stage_ms``; nothing is hidden unless it says so."""
    stages = schedule.placement.num_stages
    row = costs.stage_ms.get(name, (0.0,) * stages if name == "hidden_ms" else ())
    if len(row) != stages:
        raise ValueError(
            f"costs: stage_ms lists {len(row)} {name}, but there are {stages} stages; give {stages}"
        )
    return row


def _hidden(
    costs: PassCosts, schedule: Schedule, passes: Mapping[PassType, Sequence[float]]
) -> dict[tuple[int, int], float]:
    """What F of a stage and B of a stage of one rank hide of each other: as much as the shorter stage can.

    If 3 layers hide 6 ms of each other and 2 layers hide 4, then F of the 3 and B of the 2 hide 4.
    """
    if not costs.hides:
        return {}
    placement, chunks = schedule.placement, schedule.chunks
    if costs.stage_ms:
        of_stage = list(_of_stages(costs, schedule, "hidden_ms"))
    else:
        whole, shares = spread(costs.hidden_ms, schedule.p, "hidden_ms"), _shares(costs, schedule)
        of_stage = [whole[rank] * share / chunks for rank, share in zip(placement.ranks, shares, strict=True)]
    # If no stage hides more than its own F or B, no pair of two stages does.
    rows = zip(placement.ranks, of_stage, passes[PassType.F], passes[PassType.B], strict=True)
    for rank, ms, forward_ms, backward_ms in rows:
        least = min(forward_ms, backward_ms)
        if ms > least * (1.0 + _ROUNDING):
            raise ValueError(
                f"costs: hidden_ms lets F and B of a chunk on rank {rank} hide {ms:g} ms of each other, "
                f"but the shorter takes {least:g} ms; give F + B - FB, where FB is their time together"
            )
    hidden = {}
    for rank in range(schedule.p):
        of_rank = [(stage, of_stage[stage]) for stage in placement.stages_of(rank)]
        for (forward, ms), (backward, other) in product(of_rank, repeat=2):
            hidden[forward, backward] = ms if ms < other else other
    return hidden


def _shares(costs: PassCosts, schedule: Schedule) -> list[float]:
    """For each stage, its number of layers over the even share."""
    p, counts, stages = schedule.p, costs.layers_per_stage, schedule.placement.num_stages
    if counts is not None:
        if len(counts) != stages:
            raise ValueError(
                f"costs: layers_per_stage lists {len(counts)} stages, but there are {stages} on {p} ranks; "
                f"give {stages} numbers, or leave it out"
            )
        return [count * stages / sum(counts) for count in counts]
    if schedule.method.name != REDIS:
        return [1.0] * stages
    layers = costs.layers or _LAYERS_PER_RANK * p
    names = [f"{type_.value}_ms" for type_ in LAYERS]
    layer_work = fsum(fsum(spread(getattr(costs, name), p, name)) for name in names) / layers
    first = fsum(costs.first_rank_extra.values())
    last = fsum((*costs.last_rank_extra.values(), *costs.last_stage_extra.values()))
    counts = redistribute(layers, p, first, last, layer_work)
    return [counts[rank] * p / layers for rank in schedule.placement.ranks]


def _vocabulary_times(costs: PassCosts, schedule: Schedule) -> dict[PassType, tuple[float, ...]]:
    p = schedule.p
    times = {PassType.IF: spread(costs.IF_ms, p, "IF_ms"), PassType.IB: spread(costs.IB_ms, p, "IB_ms")}
    method = schedule.method
    if not method.vocabulary_parallel:  # L may be there, which costs do not know
        return times | dict.fromkeys(method.passes, (0.0,) * p)
    if method.name not in costs.methods:
        raise ValueError(
            f"the costs have no times for {method.name!r}; add them under 'methods' "
            f"(there are {', '.join(costs.methods) or 'none'})"
        )
    row = costs.methods[method.name]
    for type_ in _OUTPUT:
        name = f"{type_.value}_ms"
        if type_ in method.passes and name not in row:
            raise ValueError(f"the costs have no {name} for {method.name!r}; add it under 'methods'")
        times[type_] = spread(row.get(name, 0.0), p, name)
    times[PassType.L] = spread(row.get("L_ms", 0.0), p, "L_ms")
    times[PassType.T], times[PassType.TW] = halves_of_t(row, p, apart=PassType.TW in method.passes)
    times[PassType.R] = (0.0,) * p  # of evaluations alone, and not in a cost file
    for type_ in method.in_step:  # interlaced's S does T's work, too, and holds the collectives
        synchronous = spread(row.get("synchronous_ms", 0.0), p, "synchronous_ms")
        parts = zip(times[type_], times[PassType.T], synchronous, strict=True)
        times[type_] = tuple(map(fsum, parts))
    return times


def _comm_times(costs: PassCosts) -> dict[CommType, float]:
    p2p = (CommType.SEND_F, CommType.RECV_F, CommType.SEND_B, CommType.RECV_B)
    broadcast = (CommType.C0, CommType.CG, CommType.CIB)
    times = dict.fromkeys(CommType, costs.all_reduce_ms)
    return times | dict.fromkeys(p2p, costs.p2p_ms) | dict.fromkeys(broadcast, costs.broadcast_ms)
