"""Our losses beside other frameworks' functions, under their names: values, gradients, time and memory.

Every rank of a small gloo (nccl) group loads the other framework's module from a checkout, gives both
functions copies of the same shard, and compares results and gradients. Forward and backward are timed in
turns; on the CPU it is processor time of rank 0's process, so that other work on the machine counts little.
Memory is the peak above the inputs, gradients included. Next: ``theirs.py``.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor

from lab.losses.theirs import CASES, OURS, Case, Data, Function, check, load, pretend_cuda
from lab.memory import peak_mib
from lab.timing import ratio
from megatron_vocabpar.runtime.processes import run


@dataclass(frozen=True)
class Setting:
    """What to compare on.

    Attributes:
        checkouts: framework (a key of ``theirs.MODULES``) -> root of its repository.
        tokens, hidden, vocab_size: s, H and V; V must divide by the ranks, s by twice the ranks.
        ranks: processes that share the vocabulary, or the sequence.
        dtype: name of the logits' and weights' torch dtype.
        rounds: measured rounds.
    """

    checkouts: Mapping[str, Path]
    tokens: int = 512
    hidden: int = 64
    vocab_size: int = 65536
    ranks: int = 2
    dtype: str = "float32"
    rounds: int = 7

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.rounds < 1:
            raise ValueError(f"{self.ranks} ranks, {self.rounds} rounds: give at least 1 of each")
        if self.vocab_size % self.ranks or self.tokens % (2 * self.ranks):
            raise ValueError(
                f"{self.vocab_size} ids and {self.tokens} tokens on {self.ranks} ranks: ids must divide by "
                f"{self.ranks}, tokens by {2 * self.ranks}"
            )


@dataclass(frozen=True)
class Comparison:
    """One function; times are medians, differences are relative to the largest value of theirs.

    Attributes:
        ratio: median over the rounds of their time over ours.
        value_difference, gradient_difference: largest absolute difference over the largest absolute value;
            None where there is no gradient.
        shapes_equal: whether all results have equal shapes.
        ours_writes_input, theirs_writes_input: whether a call changed its argument.
    """

    framework: str
    function: str
    dtype: str
    value_difference: float
    gradient_difference: float | None
    shapes_equal: bool
    ours_ms: float
    theirs_ms: float
    ratio: float
    ours_mib: float | None
    theirs_mib: float | None
    ours_writes_input: bool
    theirs_writes_input: bool


def measure_losses(setting: Setting) -> list[Comparison]:
    """Compare on ``setting.ranks`` new processes.

    Raises:
        ValueError: if a checkout lacks a file.
        ProcessFailed: if a process does.
    """
    for framework, checkout in setting.checkouts.items():
        check(framework, checkout)
    rows: list[Comparison] = run(_compare_all, setting, ranks=setting.ranks, quiet=True)[0]
    return rows


def _compare_all(setting: Setting) -> list[Comparison]:
    """Every case of every framework; times are this rank's."""
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    on_gpu = torch.cuda.device_count() >= setting.ranks
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if not on_gpu:
        pretend_cuda()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rows = []
    for ring in ("tensor", "context"):
        sizes = {"tensor_model_parallel_size" if ring == "tensor" else "context_parallel_size": setting.ranks}
        parallel_state.initialize_model_parallel(**sizes)
        data = _data(rank, setting, device)
        for framework, checkout in setting.checkouts.items():
            modules = load(framework, checkout)
            rows += [
                _compare(case, modules[case.module], data, setting)
                for case in CASES
                if case.framework == framework and case.ring == ring
            ]
        parallel_state.destroy_model_parallel()
    dist.barrier()
    dist.destroy_process_group()
    return rows


def _data(rank: int, setting: Setting, device: torch.device) -> Data:
    group = dist.group.WORLD
    assert group is not None
    draw = torch.Generator().manual_seed(0)
    dtype = getattr(torch, setting.dtype)
    hidden = torch.randn(setting.tokens, 1, setting.hidden, generator=draw)
    weight = torch.randn(setting.vocab_size, setting.hidden, generator=draw) * 3 * setting.hidden**-0.5
    targets = torch.randint(0, setting.vocab_size, (1, setting.tokens), generator=draw)
    rows = setting.vocab_size // setting.ranks
    start, stop = rank * rows, (rank + 1) * rows
    mine = weight[start:stop].to(dtype)
    logits = (hidden[:, 0].to(dtype).float() @ mine.float().t()).to(dtype).unsqueeze(0)
    return Data(
        logits=logits.to(device),
        hidden=hidden.to(dtype).to(device),
        weight=mine.to(device),
        targets=targets.to(device),
        start=start,
        stop=stop,
        group=group,
        part=torch.randn(1, setting.tokens // setting.ranks, generator=draw).to(device),
    )


def _leaves(case: Case, data: Data) -> tuple[Tensor, ...]:
    found = tuple(getattr(data, name).clone() for name in case.inputs)
    return found if case.without_gradient else tuple(x.requires_grad_() for x in found)


def _run(case: Case, function: Function, data: Data, leaves: tuple[Tensor, ...]) -> list[Tensor]:
    """Results, then gradients of a fixed weighted sum of them."""
    found = case.call(function, data, *leaves)
    values = [found] if isinstance(found, Tensor) else [value for value in found if value is not None]
    if case.without_gradient:
        return values
    torch.stack([(value * _ramp(value)).sum() for value in values]).sum().backward()
    return [*(value.detach() for value in values), *(x.grad for x in leaves if x.grad is not None)]


def _ramp(value: Tensor) -> Tensor:
    return torch.linspace(0.5, 1.5, value.numel(), dtype=value.dtype, device=value.device).view_as(value)


def _compare(case: Case, theirs: ModuleType, data: Data, setting: Setting) -> Comparison:
    contenders: dict[str, Function] = {
        "ours": getattr(OURS[case.framework], case.function),
        "theirs": getattr(theirs, case.function),
    }
    found, writes, memory = {}, {}, {}
    for name, function in contenders.items():
        leaves = _leaves(case, data)
        found[name] = _run(case, function, data, leaves)
        writes[name] = any(
            not torch.equal(x, getattr(data, y)) for x, y in zip(leaves, case.inputs, strict=True)
        )
    count = len(found["ours"]) if case.without_gradient else len(found["ours"]) - len(case.inputs)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for r in range(-1, setting.rounds):
        for name, function in contenders.items():
            leaves = _leaves(case, data)
            dist.barrier()
            start = _now_ms(data.logits.device)
            _run(case, function, data, leaves)
            elapsed = _now_ms(data.logits.device) - start
            if r >= 0:
                times[name].append(elapsed)
    for name, function in contenders.items():
        leaves = _leaves(case, data)

        def once(f: Function = function, x: tuple[Tensor, ...] = leaves) -> object:
            found = _run(case, f, data, x)
            for leaf in x:
                leaf.grad = None
            return found

        memory[name] = peak_mib(once, data.logits.device)
    return Comparison(
        framework=case.framework,
        function=case.name,
        dtype=setting.dtype,
        value_difference=_difference(found["ours"][:count], found["theirs"][:count]),
        gradient_difference=None
        if case.without_gradient
        else _difference(found["ours"][count:], found["theirs"][count:]),
        shapes_equal=[x.shape for x in found["ours"]] == [x.shape for x in found["theirs"]],
        ours_ms=statistics.median(times["ours"]),
        theirs_ms=statistics.median(times["theirs"]),
        ratio=ratio(times["theirs"], times["ours"]),
        ours_mib=memory["ours"],
        theirs_mib=memory["theirs"],
        ours_writes_input=writes["ours"],
        theirs_writes_input=writes["theirs"],
    )


def _difference(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    worst = 0.0
    for a, b in zip(ours, theirs, strict=True):
        scale = float(b.double().abs().max().clamp(min=1e-30))
        worst = max(worst, float((a.double().flatten() - b.double().flatten()).abs().max()) / scale)
    return worst


def _now_ms(device: torch.device) -> float:
    if device.type == "cpu":
        return time.process_time() * 1e3
    torch.cuda.synchronize(device)
    return time.perf_counter() * 1e3
