"""A small GPT, its data, and two optimizer steps, in stock megatron-core or through our executor."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.multi_token_prediction import (
    MTPLossLoggingHelper,
    MultiTokenPredictionBlockSubmodules,
    get_mtp_layer_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_vocabpar.layers.bins import TopLogprobs
from megatron_vocabpar.pipeline import compat
from megatron_vocabpar.pipeline.buckets import buckets_on_any_rank
from megatron_vocabpar.pipeline.forward_backward import ForwardBackward, vocab_groups
from megatron_vocabpar.pipeline.model.chunks import chunk_positions
from megatron_vocabpar.pipeline.model.gpt import VocabParallelGPTModel
from megatron_vocabpar.pipeline.model.vocab_layers import vocab_shard
from megatron_vocabpar.pipeline.options import VocabOptions
from megatron_vocabpar.schedule.make.generate import generate
from megatron_vocabpar.schedule.plan import Plan
from megatron_vocabpar.schedule.times.costs import PassCosts
from megatron_vocabpar.schedule.words.dependencies import ranks_of
from megatron_vocabpar.schedule.words.methods import METHODS, placed
from megatron_vocabpar.schedule.words.passes import Pass, PassType
from megatron_vocabpar.schedule.words.placement import Placement
from megatron_vocabpar.schedule.words.schedule import Schedule
from megatron_vocabpar.train.core_on_cpu import megatron_on_cpu
from megatron_vocabpar.train.initial_weights import global_parameters, initialise_weights, local_part
from tests.gathered_attention import GatheredAttention, positions
from tests.pipeline.cpu_graphs import cuda_graphs_on_cpu
from tests.pipeline.delayed import delayed_spec
from tests.pipeline.experts import Experts, block_spec, experts_on_cpu
from tests.pipeline.losses import LOSSES
from tests.pipeline.teachers import teacher_of
from tests.spawn import run_ranks

BENT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "above a threshold": lambda losses: losses * (losses.detach() > 4.5),
    "below a threshold": lambda losses: losses * (losses.detach() < 4.5),
    "clamped from above": lambda losses: losses.clamp(max=4.5),
    "clamped from below": lambda losses: losses.clamp(min=4.5),
}
"""Their gradient is 0 for tokens that are not masked, on one side of about the mean loss, ln 96."""
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Names of parameters, of stock and of ours."""


@dataclass(frozen=True)
class Case:
    """One training run.

    ``teacher`` is how a distillation's teacher is given (``teachers.py``).
    ``lengths`` are those of each microbatch's sequences in turn; several are packed into one row.
    ``frozen`` vocabulary layers get no gradient, as beside adapters.
    """

    method: str = "vocab-2"
    pp: int = 1
    tp: int = 1
    dp: int = 1
    cp: int = 1
    m: int = 2
    sequence_parallel: bool = True
    tied: bool = False
    position: str = "learned_absolute"
    vocab_size: int = 96
    layers: int = 4
    hidden: int = 16
    seq_length: int = 8
    lengths: tuple[tuple[int, ...], ...] = ()
    micro_batch_size: int = 2
    steps: int = 2
    dtype: torch.dtype = torch.float32
    loss: str = "per-microbatch"
    calculate_per_token_loss: bool = False
    overlap_grad_reduce: bool = False
    seed: int = 7
    schedule: str | Schedule = "1f1b"
    chunks: int = 1
    shape: str = "standard"
    labels: str = "random"
    init_std: float = 0.3
    output_scale: float = 1.0
    mup_output_mult: float = 1.0
    fp32_head: bool = False
    output_options: VocabOptions = field(default_factory=VocabOptions)
    delayed: bool = False
    mtp: int = 0
    loss_scale: float = 1.0
    teacher: str = ""
    graphs: bool = False
    frozen: bool = False
    experts: Experts | None = None

    def unsharded(self) -> Case:
        """The same training on one process, without any of our code."""
        changes = {"method": "stock", "pp": 1, "tp": 1, "dp": 1, "cp": 1, "m": self.m * self.dp}
        options = {
            "output_options": VocabOptions(),
            "delayed": False,
            "graphs": False,
            "experts": self.experts and replace(self.experts, ep=1, planned=False, recompute=(), early=False),
        }
        return replace(self, **changes, schedule="1f1b", chunks=1, shape="standard", **options)

    @property
    def ranks(self) -> int:
        return self.pp * self.tp * self.cp * self.dp

    @property
    def packed(self) -> bool:
        return any(len(lengths) > 1 for lengths in self.lengths)

    @property
    def placement(self) -> Placement:
        return Placement(self.pp, self.chunks, self.shape)


def skip_unless_buildable(shape: str) -> None:
    if shape == "vshape" and not compat.COUNTS_LAYERS_BY_GROUP:
        pytest.skip("this megatron-core counts layers by the global pipeline rank")


@dataclass(frozen=True)
class Result:
    """What a run leaves on one rank; arrays by global parameter name, with the rows that they hold."""

    losses: list[float]
    evaluation: list[float]
    first_gradients: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]
    reports_loss: bool
    metrics: list[dict[str, float]] = field(default_factory=list)
    head_losses: list[list[float]] = field(default_factory=list)
    top: list[TopLogprobs] = field(default_factory=list)


def transformer_config(case: Case) -> TransformerConfig:
    config: Any = TransformerConfig(
        num_layers=case.layers,
        hidden_size=case.hidden,
        num_attention_heads=4,
        ffn_hidden_size=4 * case.hidden,
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        context_parallel_size=case.cp,
        virtual_pipeline_model_parallel_size=case.chunks if case.chunks > 1 else None,
        sequence_parallel=case.sequence_parallel and case.tp > 1,
        pipeline_dtype=case.dtype,
        params_dtype=case.dtype,
        bf16=case.dtype is torch.bfloat16,
        fp16=case.dtype is torch.float16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=case.init_std,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        calculate_per_token_loss=case.calculate_per_token_loss,
        deallocate_pipeline_outputs=True,
        batch_p2p_sync=False,
        variable_seq_lengths=len(set(map(sum, case.lengths))) > 1,
        moe_token_dispatcher_type="alltoall",  # asked for with variable lengths, experts or not
        mtp_num_layers=case.mtp or None,
        mtp_loss_scaling_factor=0.1,
        **(layer_graphs() if case.graphs else {}),
        **(case.experts.options(case.hidden, case.layers) if case.experts else {}),
    )
    if case.experts and case.experts.planned:  # when the configuration is made it would ask for 16 bits
        config.overlap_moe_expert_parallel_comm = True
        config.ep_overlap_early_attn_memory_release = case.experts.early
    if case.mup_output_mult != 1:  # versions before 0.17 have no such fields, and ignore them
        config.use_mup, config.mup_output_mult = True, case.mup_output_mult
    return config


def layer_graphs() -> dict[str, Any]:
    """What asks for CUDA graphs of single layers in this version of megatron-core."""
    named = "cuda_graph_impl" in {each.name for each in fields(TransformerConfig)}
    return {"cuda_graph_warmup_steps": 0} | (
        {"cuda_graph_impl": "local"} if named else {"enable_cuda_graph": True}
    )


def layer_spec(case: Case) -> ModuleSpec:
    """The local layers; their own attention takes whole sequences only."""
    spec = delayed_spec() if case.delayed else get_gpt_layer_local_spec()
    if case.cp > 1 or case.packed:
        spec.submodules.self_attention.submodules.core_attention = GatheredAttention
    return spec


def build_chunks(case: Case) -> list[GPTModel]:
    """This rank's model chunks."""
    rank = parallel_state.get_pipeline_model_parallel_rank()
    positions = chunk_positions(case.placement, rank, compat.model_groups())
    return [build_model(case, position.options, i == 0) for i, position in enumerate(positions)]


def build_model(case: Case, position: dict[str, Any] | None = None, holds_shard: bool = True) -> GPTModel:
    config = transformer_config(case)
    config.delay_wgrad_compute = case.delayed
    position = position or {"pre_process": True, "post_process": True}
    groups = position.get(compat.GROUPS_ARGUMENT)
    spec = block_spec(config, position.get("vp_stage"), groups) if case.experts else layer_spec(case)
    options: dict[str, Any] = {
        "config": config,
        "transformer_layer_spec": spec,
        "vocab_size": case.vocab_size,
        "max_sequence_length": case.seq_length,
        **position,
        "position_embedding_type": case.position,
        "share_embeddings_and_output_weights": case.tied,
    }
    if case.mtp and options["post_process"]:
        layer = spec.layer_specs[-1] if case.experts else spec
        head = get_mtp_layer_spec(layer, use_transformer_engine=False)
        options["mtp_block_spec"] = MultiTokenPredictionBlockSubmodules(layer_specs=[head] * case.mtp)
    if case.method in METHODS and METHODS[case.method].vocabulary_parallel:
        shard = vocab_shard(case.vocab_size, invariant=case.output_options.invariant)
        model: GPTModel = VocabParallelGPTModel(
            **options, shard=shard, holds_shard=holds_shard, fp32_head=case.fp32_head
        )
    else:
        model = GPTModel(**options)
    initialise_weights(model, case.seed)
    if hasattr(model, "output_layer") and not case.tied:
        with torch.no_grad():
            model.output_layer.weight.mul_(case.output_scale)
    if case.frozen:
        for name, parameter in model.named_parameters():
            parameter.requires_grad = name not in VOCABULARY
    return model


def batch(case: Case, step: int, replica: int, i: int) -> dict[str, Any]:
    """Microbatch ``i`` of a data-parallel replica; the global order is replica-major."""
    generator = torch.Generator().manual_seed(1000 * step + replica * case.m + i)
    lengths = case.lengths[i % len(case.lengths)] if case.lengths else (case.seq_length,)
    s = sum(lengths)
    shape = (case.micro_batch_size, s)
    tokens = torch.randint(0, case.vocab_size, shape, generator=generator)
    labels = torch.randint(0, case.vocab_size, shape, generator=generator)
    mask = (torch.rand(shape, generator=generator) > 0.2).float()
    if case.labels in ("mostly ignored", "mostly masked"):
        mask = (torch.rand(shape, generator=generator) > 0.9).float()
    if case.labels in ("one masked microbatch", "mostly ignored", "mostly masked") and i == case.m - 1:
        mask = torch.zeros(shape)
    if case.labels == "all the same":
        labels = torch.full(shape, case.vocab_size - 1)
    if case.labels in ("ignored", "mostly ignored") and case.method != "stock":
        # Stock has no such label: there, a masked token's label is any id.
        labels = labels.masked_fill(mask == 0, -100)
    centre = -math.log(case.vocab_size) - 0.5
    row = {
        "old_logp": centre + 0.8 * torch.randn(shape, generator=generator),
        "reference_logp": centre + 0.8 * torch.randn(shape, generator=generator),
        "advantages": torch.randn(shape, generator=generator),
        "tokens": tokens,
        "labels": labels,
        "loss_mask": mask,
        "position_ids": torch.cat([torch.arange(length) for length in lengths]).expand(shape),
    }
    mine = positions(lengths, parallel_state.get_context_parallel_rank(), case.cp)
    fields: dict[str, Any] = {name: value[:, mine].contiguous() for name, value in row.items()}
    fields["rewards"] = torch.randn(shape[0], generator=generator)
    if case.packed:
        ends = torch.tensor([0, *lengths]).cumsum(0).int()
        packed = PackedSeqParams("thd", ends, ends, None, None, max(lengths), max(lengths))
        return fields | {"packed_seq_params": packed, "attention_mask": None}
    if case.graphs:
        return fields | {"attention_mask": None}
    return fields | {"attention_mask": torch.triu(torch.ones(s, s, dtype=torch.bool), 1)[None, None]}


def _loss(
    fields: dict[str, Any], output: torch.Tensor, kind: str, entropy: torch.Tensor | None = None, **_: Any
) -> tuple[Any, ...]:
    """``kind`` names one of ``LOSSES`` or a plain one; with ``tokens`` at its end, divided by Megatron."""
    if output.dim() == 3:  # the stock model's logits
        softmax = torch.distributions.Categorical(logits=output.double())
        output, entropy = -softmax.log_prob(fields["labels"]), softmax.entropy().float()
    if entropy is not None:
        fields = fields | {"entropy": entropy}
    losses, metrics = output.float(), {}
    mask, name = fields["loss_mask"], kind.removesuffix("tokens").rstrip("-")
    if name in LOSSES:
        losses, metrics = LOSSES[name](fields, -losses)
    elif name == "squared":
        losses = losses**2
    elif name in BENT:
        losses = BENT[name](losses)
    total = losses.sum() if name == "unmasked" else (losses * mask).sum()
    metrics = {key: value.detach().clone() for key, value in metrics.items()}
    if not kind.endswith("tokens"):
        mean = total / mask.sum().clamp(min=1)
        if name == "constant of masked" and not mask.any():
            mean = torch.zeros(())
        return mean, {"lm loss": mean.detach().clone(), **metrics}
    tokens = mask.sum().to(torch.int)
    report = torch.stack([total.detach(), tokens.float()])
    return total, tokens, {"lm loss": report.clone(), **metrics}


def forward_step(
    data_iterator: Iterator[Any] | None, model: Any, kind: str, logits: bool = False
) -> tuple[Any, Any]:
    """As Megatron's: middle stages have no batch. The loss function gets losses, or ``logits``."""
    fields: dict[str, Any] = {} if data_iterator is None else next(data_iterator)
    output = model(
        fields.get("tokens"),
        fields.get("position_ids"),
        fields.get("attention_mask"),
        labels=None if logits else fields.get("labels"),
        loss_mask=fields.get("loss_mask"),
        packed_seq_params=fields.get("packed_seq_params"),
    )
    return output, partial(_loss, fields, kind=kind)


def _summary(reported: list[Any]) -> float:
    values = [r["lm loss"] for r in reported]
    if values and values[0].dim():
        return float(torch.stack(values).sum(0)[0])
    return float(sum(values)) / max(len(values), 1)


class MainGradAdam:
    """AdamW on fp32 copies of the weights, from ``main_grad``; the same arithmetic on every partition."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._masters = [p.detach().float().clone().requires_grad_() for p in parameters]
        self._adam = torch.optim.AdamW(self._masters, lr=1e-2, eps=1e-3, weight_decay=0.1)

    def step(self, loss_scale: float = 1.0) -> None:
        for master, parameter in zip(self._masters, self._parameters, strict=True):
            master.grad = parameter.main_grad.float() / loss_scale  # type: ignore[attr-defined]
        self._adam.step()
        with torch.no_grad():
            for master, parameter in zip(self._masters, self._parameters, strict=True):
                parameter.copy_(master)


def train(
    _: int,
    case: Case,
    reference: Result | None = None,
    given: list[dict[str, torch.Tensor]] | None = None,
) -> Result:
    """Two steps on this rank of ``case.pp * case.tp * case.dp``, each with an evaluation before the update.

    With a reference, ``first_gradients`` and ``weights`` of the result are the differences from this rank's
    part of the reference's, relative to the norm of the reference's whole tensor. Given batches replace
    the random ones.
    """
    graphs = cuda_graphs_on_cpu() if case.graphs else contextlib.nullcontext()
    experts = experts_on_cpu() if case.experts else contextlib.nullcontext()
    with experts, megatron_on_cpu(), graphs, parallel_groups(case):
        modules = build_chunks(case)
        config = modules[0].config
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, overlap_grad_reduce=case.overlap_grad_reduce, bucket_size=1000
        )
        half = config.bf16 or config.fp16
        wrapped = [Float16Module(config, module) if half else module for module in modules]
        splits_w = isinstance(case.schedule, Schedule) and case.schedule.splits_w
        with buckets_on_any_rank() if splits_w else contextlib.nullcontext():
            model = [DistributedDataParallel(config, ddp_config, module) for module in wrapped]
        for module in modules:
            module.config.finalize_model_grads_func = finalize_model_grads
            if case.loss_scale != 1.0:
                module.config.grad_scale_func = partial(torch.mul, torch.tensor(case.loss_scale))
            if case.overlap_grad_reduce:
                no_sync = [ddp.no_sync for ddp in model]
                module.config.no_sync_func = no_sync if case.chunks > 1 else no_sync[0]
        run = (
            get_forward_backward_func()
            if case.method == "stock"
            else ForwardBackward(
                case.method,
                vocab_groups(),
                torch.device("cpu"),
                options=case.output_options,
                make_plan=plan_maker(case),
                mtp_depths=case.mtp,
            )
        )
        optimizer = MainGradAdam([p for module in modules for p in module.parameters() if p.requires_grad])
        replica = parallel_state.get_data_parallel_rank()
        rank = parallel_state.get_pipeline_model_parallel_rank()
        ends = (0, case.placement.loss_stage)
        has_batch = [case.placement.stage_of(rank, chunk) in ends for chunk in range(case.chunks)]
        losses: list[float] = []
        evaluation: list[float] = []
        head_losses: list[list[float]] = []
        metrics: list[dict[str, float]] = []
        top: list[TopLogprobs] = []
        for step in range(case.steps):
            MTPLossLoggingHelper.tracker.clear()
            for ddp in model:
                ddp.zero_grad_buffer()
            for forward_only, record in ((False, losses), (True, evaluation)):
                data = given or [batch(case, step, replica, i) for i in range(case.m)]
                iterators = [iter(data) if has else None for has in has_batch]
                with torch.set_grad_enabled(not forward_only):  # as Megatron's evaluate() calls it
                    beside: dict[str, Any] = {}
                    found: dict[int, TopLogprobs] = {}
                    if case.output_options.top_logprobs and not forward_only:
                        beside = {"keep_top": found.__setitem__}
                    if case.teacher and case.method != "stock" and not forward_only:
                        beside = {"teacher": teacher_of(case, step, replica, modules[0].shard.range)}
                    reported = iterate(run, case, model, iterators, forward_only=forward_only, **beside)
                record.append(_summary(reported))
                top += [found[i] for i in sorted(found)]
                if not forward_only:  # stock logs in evaluation, too, where nobody calls eval()
                    head_losses.append(MTPLossLoggingHelper.tracker.get("values", torch.empty(0)).tolist())
                metrics += [{key: float(value.sum()) for key, value in row.items()} for row in reported]
            if step == 0:
                first = _arrays(modules, gradients=True)
            optimizer.step(case.loss_scale)
        weights = _arrays(modules, gradients=False)
        if reference is not None:
            first = _differences(modules, first, reference.first_gradients)
            weights = _differences(modules, weights, reference.weights)
        return Result(losses, evaluation, first, weights, rank == case.pp - 1, metrics, head_losses, top)


def iterate(
    run: Callable[..., list[Any]],
    case: Case,
    model: list[Any],
    iterators: Sequence[Iterator[Any] | None],
    forward_only: bool = False,
    **beside: Any,
) -> list[Any]:
    """One call of a forward-backward function, as Megatron's training loop makes it."""
    return run(
        forward_step_func=partial(
            forward_step, kind=case.loss, logits=case.loss == "entropy" and case.method == "stock"
        ),
        data_iterator=iterators,
        model=model,
        num_microbatches=case.m,
        seq_length=case.seq_length,
        micro_batch_size=case.micro_batch_size,
        forward_only=forward_only,
        **beside,
    )


def _differences(
    modules: list[GPTModel], arrays: dict[str, np.ndarray], reference: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    parameters = {n: (module, p) for module in modules for n, p in global_parameters(module)}
    differences = {}
    for name, array in arrays.items():
        # A tied output weight of the stock last stage is the reference's embedding.
        whole = torch.from_numpy(reference[name if name in reference else "embedding.word_embeddings.weight"])
        module, parameter = parameters[name]
        part = local_part(module, name, parameter, whole)
        differences[name] = (torch.from_numpy(array) - part).norm().numpy() / max(float(whole.norm()), 1e-30)
    return differences


def _arrays(modules: list[GPTModel], gradients: bool) -> dict[str, np.ndarray]:
    parameters = [(name, p) for module in modules for name, p in global_parameters(module)]
    for name, p in parameters:
        assert p.requires_grad or (p.grad is None and not hasattr(p, "main_grad")), f"{name} is frozen"
    return {
        name: (p.main_grad if gradients else p).detach().float().numpy().copy()  # type: ignore[attr-defined]
        for name, p in parameters
        if p.requires_grad or not gradients
    }


@contextlib.contextmanager
def parallel_groups(case: Case) -> Iterator[None]:
    experts = (
        {"expert_model_parallel_size": case.experts.ep, "expert_tensor_parallel_size": 1}
        if case.experts
        else {}
    )
    parallel_state.initialize_model_parallel(
        case.tp, case.pp, context_parallel_size=case.cp, create_gloo_process_groups=False, **experts
    )
    # The generators that CUDA graphs take are a GPU's; those for inference draw nothing.
    model_parallel_cuda_manual_seed(case.seed, inference_rng_tracker=case.graphs, force_reset_rng=True)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


def run(case: Case, *arguments: Any, body: Callable[..., Any] = train) -> list[Any]:
    """``body(rank, case, *arguments)`` on all ranks, with the schedule that each would generate."""
    if case.schedule == "1f1b" and case.method != "stock":
        case = replace(case, schedule=_generated(case.method, case.pp, case.m, case.mtp))
    return run_ranks(case.ranks, body, case, *arguments, fresh=case.experts is not None)


@cache
def _generated(method: str, p: int, m: int, mtp: int) -> Schedule:
    return generate(method, p, m, costs=PassCosts.default(p, mtp))


def plan_maker(case: Case) -> Callable[[int], Plan]:
    """How the case's plans are made; ``sequential`` is one microbatch after the other, W split off.

    All launch communication between layers, where a stage has several.
    """
    costs, stages = PassCosts.default(case.pp, case.mtp), case.placement.num_stages

    @cache
    def plan(m: int) -> Plan:
        schedule = case.schedule
        if schedule == "sequential":
            schedule = sequential(case, m)
        elif schedule == "1f1b":
            schedule = generate(case.method, case.pp, m, costs=costs)
        assert isinstance(schedule, Schedule)
        return Plan.of(schedule, costs).launched_late([case.layers // stages] * stages)

    return plan


def case_of(schedule: Schedule, **options: Any) -> Case:
    """The training run of a given schedule, with as many layers as it has stages; ``options`` are Case's."""
    return Case(
        schedule.method.name,
        pp=schedule.p,
        m=schedule.m,
        schedule=schedule,
        chunks=schedule.chunks,
        shape=schedule.placement.shape,
        layers=schedule.placement.num_stages,
        **options,
    )


def sequential(case: Case, m: int) -> Schedule:
    """The slowest valid schedule: each microbatch goes through all passes before the next starts."""
    frame = Schedule(placed(METHODS[case.method], case.placement), case.placement, m)
    ranks: list[list[Pass]] = [[] for _ in range(case.pp)]
    stages = range(frame.placement.num_stages)
    for i in range(m):
        order = [Pass(PassType.IF, rank, i) for rank in range(case.pp)]
        order += [Pass(PassType.F, stage, i) for stage in stages]
        order += [Pass(type_, rank, i) for type_ in frame.method.passes for rank in ranks_of(type_, frame)]
        order += [Pass(PassType.B, stage, i) for stage in reversed(stages)]
        order += [Pass(PassType.W, stage, i) for stage in stages]
        order += [Pass(PassType.IB, rank, i) for rank in range(case.pp)]
        for item in order:
            ranks[frame.rank_of(item)].append(item)
    return replace(frame, ranks=tuple(map(tuple, ranks)))


def unwrap(model: torch.nn.Module) -> GPTModel:
    """The model inside DDP and the half-precision wrapper."""
    while not isinstance(model, GPTModel):
        model = model.module
    return model
