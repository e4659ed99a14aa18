"""What an iteration has held is free when it ends, without Python's collector of cycles.

A tensor that only a cycle holds stays on the device until that collector runs, with ``--manual-gc`` for long.
"""

from __future__ import annotations

import gc
import time
import weakref
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_vocabpar.layers.terms import Distillation
from megatron_vocabpar.pipeline.forward_backward import Callbacks, ForwardBackward
from megatron_vocabpar.pipeline.microbatches import Microbatch, Microbatches
from megatron_vocabpar.pipeline.options import VocabOptions
from megatron_vocabpar.pipeline.split_w.products import _SplitLinear
from megatron_vocabpar.pipeline.split_w.weight_gradients import WeightGradients
from megatron_vocabpar.runtime.comm import PointToPoint
from megatron_vocabpar.schedule.make.generate import generate
from tests.cases import rest_is_slow
from tests.pipeline import gpt
from tests.pipeline.delayed import _Product
from tests.pipeline.gpt import Case, case_of, iterate

LOOKS = Callbacks(not_finite=print)
STEPS = 5


def counted(rank: int, case: Case) -> dict[bool, list[int]]:
    """Tensors that live before each training call (key False) and each evaluation, the collector off."""
    counts: dict[bool, list[int]] = {False: [], True: []}

    def iterate_and_count(*arguments: Any, forward_only: bool = False, **beside: Any) -> list[Any]:
        counts[forward_only].append(settled(counts[forward_only][-1:]))
        return iterate(*arguments, forward_only=forward_only, **beside)

    gc.collect()
    gc.disable()
    try:
        with (
            mock.patch.object(gpt, "iterate", iterate_and_count),
            mock.patch.object(gpt, "ForwardBackward", partial(ForwardBackward, callbacks=LOOKS)),
        ):
            gpt.train(rank, case)
    finally:
        gc.enable()
    return counts


def settled(before: list[int]) -> int:
    """How many tensors live; counted anew if more than before, as a thread may just be returning some."""
    for _ in range(20):
        live = sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())
        if live <= min(before, default=live):
            break
        time.sleep(0.05)
    return live


FAMILIES = ("1f1b", "interleaved", "zb-h1", "v-half", "v-zb")


@pytest.mark.parametrize(
    ("method", "family"),
    rest_is_slow(
        product(["vocab-1", "vocab-2", "naive", "interlaced", "baseline"], FAMILIES),
        ("vocab-1", "v-zb"),
    ),
)
def test_no_tensor_outlives_its_iteration(method: str, family: str) -> None:
    check(case_of(generate(method, 2, 4, family=family), steps=STEPS))


BESIDE: dict[str, dict[str, Any]] = {
    "any loss": {"loss": "squared"},
    "heads": {"mtp": 1, "position": "rope", "output_options": VocabOptions(metrics=("accuracy",))},
    "distillation": {"teacher": "logits", "output_options": VocabOptions(distillation=Distillation())},
    "8 bits": {"output_options": VocabOptions(fp8_head=True)},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BESIDE)
def test_nor_with_what_comes_beside_the_loss(name: str) -> None:
    check(Case(method="vocab-2", pp=2, m=4, steps=STEPS, **BESIDE[name]))


def check(case: Case) -> None:
    for rank, counts in enumerate(gpt.run(case, body=counted)):
        for forward_only, live in counts.items():
            # Before the second step the optimizer and the communicators have what they keep.
            assert len(set(live[2:])) == 1, f"rank {rank}, forward_only={forward_only}: {live}"


def planned(rank: int, case: Case) -> list[tuple[int, int, int]]:
    """By call, training then evaluation: the plans made, the most held at a time, and their most bytes."""
    calls: dict[int, list[tuple[int, int]]] = {}
    kept: list[Microbatches] = []
    plan = Microbatches._plan

    def plan_and_note(self: Microbatches, i: int) -> Microbatch:
        made = plan(self, i)
        held = [*self.values(), made]
        calls.setdefault(id(self), []).append((len(held), sum(map(bytes_of, held))))
        kept.append(self)
        return made

    with mock.patch.object(Microbatches, "_plan", plan_and_note):
        gpt.train(rank, case)
    assert not any(kept)
    return [(len(held), *map(max, zip(*held, strict=True))) for held in calls.values()]


def bytes_of(microbatch: Microbatch) -> int:
    """The memory of a plan's tensors."""
    tensors = [*microbatch.targets, microbatch.owned_rows, microbatch.by_row]
    tensors += [tokens.plan.order for tokens in microbatch.embedded]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(storages.values())


def test_plans_of_microbatches_are_free_when_their_passes_are_over() -> None:
    case = Case(method="vocab-2", pp=2, m=12, steps=1)
    for calls in gpt.run(case, body=planned):
        for plans, most, held_bytes in calls:
            assert plans == case.m
            assert most <= 9  # as many as with any other number of microbatches
            assert held_bytes <= 9 * 48 * case.micro_batch_size * case.seq_length


def sent(rank: int, case: Case) -> tuple[int, int]:
    """How many tensors were sent in training and evaluation, and the most that were alive at a send."""
    tensors: list[weakref.ref[torch.Tensor]] = []
    alive = [0]
    send = PointToPoint.send

    def send_and_count(self: PointToPoint, tensor: torch.Tensor, stage: int) -> None:
        send(self, tensor, stage)
        tensors.append(weakref.ref(tensor))
        alive.append(sum(ref() is not None for ref in tensors))

    with mock.patch.object(PointToPoint, "send", send_and_count):
        gpt.train(rank, case)
    return len(tensors), max(alive)


def test_tensors_over_gloo_are_free_when_they_have_left() -> None:
    m = 12
    for rank, (number, most) in enumerate(gpt.run(Case(method="vocab-2", pp=2, m=m, steps=1), body=sent)):
        assert number >= (m if rank else 2 * m)
        assert most <= 8


def held_for_w(rank: int, case: Case) -> list[int]:
    """At each W, how many nodes of the graphs through which a B has run are alive."""
    nodes: list[weakref.ref[Any]] = []
    alive: list[int] = []
    product: Any = _Product if case.delayed else _SplitLinear
    backward, compute = product.backward, WeightGradients.compute

    def note_and_run(ctx: Any, grad_output: torch.Tensor) -> tuple[Any, ...]:
        nodes.append(weakref.ref(ctx))
        return backward(ctx, grad_output)

    def count_and_compute(self: WeightGradients, *rest: Any) -> None:
        alive.append(sum(ref() is not None for ref in nodes))
        compute(self, *rest)

    with (
        mock.patch.object(product, "backward", note_and_run),
        mock.patch.object(WeightGradients, "compute", count_and_compute),
    ):
        gpt.train(rank, case)
    assert nodes
    return alive


@pytest.mark.parametrize("delayed", [False, True])
def test_w_holds_no_graph_of_b(delayed: bool) -> None:
    """It would hold the stage's input and that one's gradient."""
    case = case_of(generate("vocab-2", 2, 8, family="v-half"), steps=1, delayed=delayed)
    for alive in gpt.run(case, body=held_for_w):
        assert alive == [0] * 2 * case.m
