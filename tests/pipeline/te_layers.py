"""W over single layers of Transformer Engine itself, in Megatron's DistributedDataParallel, on the CPU.

``python -m tests.pipeline.te_layers`` runs in a process of its own, since Megatron looks for Transformer
Engine when it is imported. It prints by case the largest relative difference of a gradient from that which
autograd computes through plain PyTorch, or what was raised.

Next: ``tests/transformer_engine/hook.py``, how Transformer Engine is imported.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_vocabpar.train import on_cpu
from tests.transformer_engine import hook

SIZE, ROWS = 16, 24  # multiples of what 8-bit products take
SPLITS = [8, 0, 16]
ORDERS = ("B0 W0 B1 W1 B2 W2", "B0 B1 B2 W0 W1 W2", "B0 B1 W0 B2 W2 W1", "")
"""Of backwards and weight gradients; without any, W is not split off, and layers that can delay must not."""
KINDS = (
    *("column", "column, bias returned", "norm and column", "norm and column, bias returned"),
    *("row", "row, bias returned", "experts' column", "experts' column with biases", "experts' row"),
    *("column twice", "column with frozen bias", "row before a frozen column", "experts twice"),
)


@dataclass(frozen=True)
class Case:
    """One layer, whether its products are added to ``main_grad`` by themselves, an order, and operands."""

    kind: str
    fused: bool
    order: str
    in_8_bits: bool = False

    def __str__(self) -> str:
        how = ", ".join(["fused" if self.fused else "not fused", *(["8 bits"] if self.in_8_bits else [])])
        return f"{self.kind}, {how}: {self.order or 'not split'}"


def _is_lost(case: Case) -> bool:
    """Whether Transformer Engine itself loses a product: B overwrites what a later run has added before."""
    return "twice" in case.kind and case.fused and not case.order


CASES = (
    *(case for each in product(KINDS, (True, False), ORDERS) if not _is_lost(case := Case(*each))),
    *(Case(kind, fused, ORDERS[2], in_8_bits=True) for kind in KINDS[:9] for fused in (True, False)),
)


def _layer(kind: str, config: Any) -> torch.nn.Module:
    """The layer of Transformer Engine that ``kind`` begins with, as Megatron builds it."""
    from megatron.core.extensions import transformer_engine as te

    name = kind.partition(",")[0]
    options = {"config": config, "init_method": torch.nn.init.xavier_normal_}
    options |= {"bias": True, "skip_bias_add": "bias returned" in kind, "is_expert": False}
    if name.startswith("experts"):
        options |= {"is_expert": True, "bias": "with biases" in kind}
        rows = name.startswith("experts' row")
        layer = te.TERowParallelGroupedLinear if rows else te.TEColumnParallelGroupedLinear
        return layer(len(SPLITS), SIZE, SIZE, **options)
    if name.startswith("row"):
        return te.TERowParallelLinear(SIZE, SIZE, input_is_parallel=True, **options)
    layer = te.TELayerNormColumnParallelLinear if name.startswith("norm") else te.TEColumnParallelLinear
    return layer(SIZE, SIZE, gather_output=False, **options)


class _Model(torch.nn.Module):
    """The layer, run as often as its kind says, perhaps before one whose weights are frozen."""

    def __init__(self, kind: str, config: Any) -> None:
        super().__init__()
        self.layer = _layer(kind, config)
        self.times = 2 if "twice" in kind else 1
        self.frozen = _layer("column", config) if "a frozen" in kind else None
        for parameter in self.parameters():
            torch.nn.init.normal_(parameter)
        if self.frozen is not None:
            self.frozen.requires_grad_(False)
        if "frozen bias" in kind:
            self.layer.bias.requires_grad_(False)

    def forward(self, x: Tensor, run: Callable[[Any, Tensor], Any] | None = None) -> Tensor:
        """``run`` instead of the layers' own forward."""
        layers = [self.layer] * self.times + ([self.frozen] if self.frozen is not None else [])
        for layer in layers:
            y, bias = (run or _run)(layer, x)
            x = torch.tanh(y if bias is None else y + bias)
        return x


def _run(layer: Any, x: Tensor) -> Any:
    return layer(x, SPLITS) if hasattr(layer, "num_gemms") else layer(x)


def _by_autograd(layer: Any, x: Tensor) -> tuple[Tensor, None]:
    given = dict(layer.named_parameters())
    if hasattr(layer, "num_gemms"):
        experts = [(given[f"weight{i}"], given.get(f"bias{i}")) for i in range(len(SPLITS))]
        parts = zip(x.split(SPLITS), experts, strict=True)
        return torch.cat([F.linear(part, *expert) for part, expert in parts]), None
    if "layer_norm_weight" in given:
        x = F.layer_norm(x, (SIZE,), given["layer_norm_weight"], given["layer_norm_bias"])
    return F.linear(x, given["weight"], given["bias"]), None


def difference(case: Case) -> float:
    """The largest of a gradient, relative to its size.

    From autograd's; in 8 bits, whose roundings it lacks, from those of the same layer that is not split.
    """
    found = _gradients(case)
    expected = _gradients(replace(case, order="")) if case.in_8_bits else _gradients(case, _by_autograd)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True))


def _gradients(case: Case, run: Callable[[Any, Tensor], Any] | None = None) -> list[Tensor]:
    """Of all trained parameters after three microbatches; with ``run``, autograd's through that."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(5)
    config = TransformerConfig(
        num_layers=1, hidden_size=SIZE, num_attention_heads=1, gradient_accumulation_fusion=case.fused
    )
    config.delay_wgrad_compute = True  # as Megatron's door sets it wherever W may be split off
    model = _Model(case.kind, config)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    inputs = [torch.randn(ROWS, SIZE, requires_grad=True) for _ in range(3)]
    if run is not None:
        losses = [model(x, run).square().sum() for x in inputs]
        return list(torch.autograd.grad(torch.stack(losses).sum(), trained))
    _train(case, model, config, inputs)
    return [parameter.main_grad for parameter in trained]  # type: ignore[attr-defined]


def _train(case: Case, model: _Model, config: Any, inputs: list[Tensor]) -> None:
    """The three forwards, then backwards and weight gradients in the order of the case."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from transformer_engine.common.recipe import Float8CurrentScaling
    from transformer_engine.pytorch import fp8_autocast

    from megatron_vocabpar.pipeline.split_w.weight_gradients import ChunkLayers, weight_gradients_of

    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    ddp.zero_grad_buffer()
    with ExitStack() as stack:
        split = stack.enter_context(
            weight_gradients_of([ddp], [ChunkLayers.of(ddp)], splits_w=bool(case.order))
        )
        outputs = []
        for x in inputs:
            with fp8_autocast(enabled=case.in_8_bits, fp8_recipe=Float8CurrentScaling()):
                outputs.append(ddp(x).square().sum())
        for step in case.order.split() or ("B0", "B1", "B2"):
            microbatch = int(step[1])
            if step[0] == "W":
                split[0].compute(microbatch)
                continue
            with split[0].left_by(microbatch) if split else nullcontext():
                outputs[microbatch].backward()


def results() -> Iterator[tuple[str, float | str]]:
    """By case."""
    for case in CASES:
        try:
            yield str(case), difference(case)
        except Exception as error:  # what is raised is the result
            yield str(case), f"{type(error).__name__}: {error}"


def main() -> None:
    folder = hook.wheel()
    assert folder is not None
    on_cpu.stand_in()
    hook.install(folder)
    from megatron_vocabpar.train.core_on_cpu import megatron_on_cpu

    with megatron_on_cpu():
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(1)
        print(json.dumps(dict(results())))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
