"""Our executor behind Megatron's forward-backward signature.

``ForwardBackward`` is what ``get_forward_backward_func`` would return: called once per iteration, for
training or evaluation, with an unchanged ``forward_step``. It owns what outlives an iteration: the
groups, the side stream and the lowered schedules.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from megatron_vocabpar.layers.bins import TopLogprobs
from megatron_vocabpar.layers.extras.distillation import Teacher
from megatron_vocabpar.layers.fp8 import check_device
from megatron_vocabpar.layers.kernels.dispatch import why_not_triton
from megatron_vocabpar.pipeline import compat, graphs
from megatron_vocabpar.pipeline.call import Call
from megatron_vocabpar.pipeline.graphs import EngineGraphs, LayerGraphs
from megatron_vocabpar.pipeline.handlers import handlers_of, runs_layer_plans
from megatron_vocabpar.pipeline.iteration import Iteration, Rank
from megatron_vocabpar.pipeline.layer_hooks import watched_layers
from megatron_vocabpar.pipeline.model.built_for import check_built_for, chunk_with_shards
from megatron_vocabpar.pipeline.options import DEFAULTS, VocabOptions
from megatron_vocabpar.pipeline.output.chain import OutputChain
from megatron_vocabpar.pipeline.preparation import prepare
from megatron_vocabpar.pipeline.rules.facts import Facts
from megatron_vocabpar.pipeline.rules.graph_rules import GRAPHS
from megatron_vocabpar.pipeline.rules.model_rules import CALLS, TEACHERS, TRAINING, WHOLE
from megatron_vocabpar.pipeline.rules.option_rules import OPTIONS
from megatron_vocabpar.pipeline.rules.rule import require
from megatron_vocabpar.pipeline.split_w.weight_gradients import ChunkLayers, weight_gradients_of
from megatron_vocabpar.runtime.comm import PointToPoint, VocabGroups, create_groups, warm_up
from megatron_vocabpar.runtime.executor import Observer, execute
from megatron_vocabpar.runtime.streams import named_range, profiled, send_waiter, side_stream
from megatron_vocabpar.runtime.timeline import COLLECTIVES, Timeline
from megatron_vocabpar.schedule.make.generate import make_plan as generate_plan
from megatron_vocabpar.schedule.plan import Plan
from megatron_vocabpar.schedule.times.costs import PassCosts
from megatron_vocabpar.schedule.words.methods import method_named
from megatron_vocabpar.schedule.words.schedule import NONE_LATE, Late, Schedule


def vocab_groups(timeout: timedelta | None = None, channels: int | None = None) -> VocabGroups:
    """The vocabulary group of this process, from megatron-core's parallel state; all ranks call it.

    Args:
        timeout: of its communicators, as in ``create_groups``.
        channels: of its collectives, as there.
    """
    pipeline = parallel_state.get_pipeline_model_parallel_world_size()
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    coordinates = (
        parallel_state.get_data_parallel_rank(with_context_parallel=True),
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    return create_groups(coordinates, pipeline, tensor, timeout, channels)


@dataclass(frozen=True, kw_only=True)
class Callbacks:
    """Functions that are called when something happens in an iteration.

    Attributes:
        observers: context managers around every instruction, in addition to the range that a profiler sees.
        timeline: records when each instruction runs, while it is started.
        not_finite: called with a line on the loss function's rank if a loss of a partitioned output layer is
            not finite; with None losses are not checked.
        untested: called on rank 0 with a text that lists what is asked for and has not been run.
    """

    observers: Sequence[Observer] = ()
    timeline: Timeline | None = None
    not_finite: Callable[[str], None] | None = None
    untested: Callable[[str], None] = warnings.warn


_NO_CALLBACKS = Callbacks()


class ForwardBackward:
    """A megatron-core forward-backward function that runs our schedules.

    All ranks make one at the same time, because it connects them.

    Args:
        method: one of ``schedule.words.methods.METHODS``.
        groups: the vocabulary group of this rank.
        device: where the model lives.
        options: how partitioned vocabulary layers are computed.
        make_plan: from a number of microbatches to a plan of this method for this pipeline, the same on
            every rank; by default 1F1B with the paper's proportions of pass times.
        mtp_depths: of multi-token prediction, for the default plans.
        callbacks: what is called when something happens.

    Raises:
        ValueError: for options that cannot be combined with each other or with the method (``rules/``),
            or that the device cannot serve.
    """

    def __init__(
        self,
        method: str,
        groups: VocabGroups,
        device: torch.device,
        *,
        options: VocabOptions = DEFAULTS,
        make_plan: Callable[[int], Plan] | None = None,
        mtp_depths: int = 0,
        callbacks: Callbacks = _NO_CALLBACKS,
    ) -> None:
        self.method = method_named(method)
        self._untested = callbacks.untested
        require(Facts(options=options, method=self.method), OPTIONS, tell=self._tell)
        self.options = options
        if options.fp8_head:
            check_device(device)
        self._not_finite = callbacks.not_finite
        self.groups = groups
        self.device = device
        costs = PassCosts.default(groups.pipeline, mtp_depths)
        self._make_plan = make_plan or partial(generate_plan, self.method, groups.pipeline, costs=costs)
        self._timeline = timeline = callbacks.timeline
        self._observers = callbacks.observers
        self._side_stream = side_stream(device, COLLECTIVES)
        if timeline is not None:
            self._side_stream = timeline.watch(self._side_stream, COLLECTIVES)
        self._send_waiter = send_waiter(device)
        self._point_to_point = PointToPoint(groups, self._send_waiter)
        warm_up(groups, device)
        self._plans: dict[int, Plan] = {}
        self._layers: WeakKeyDictionary[torch.nn.Module, ChunkLayers] = WeakKeyDictionary()
        self._warmed_up = why_not_triton(device, torch.float32) is not None  # where nothing is compiled
        self._graphs = LayerGraphs()
        self._engine_graphs = EngineGraphs()

    def _tell(self, text: str) -> None:
        if dist.get_rank() == 0:
            self._untested(text)

    def plan(self, num_microbatches: int) -> Plan:
        """The plan of a training iteration with this number of microbatches; it is made once.

        Raises:
            ValueError: if ``make_plan`` returned one of another method, pipeline size or number.
        """
        if num_microbatches not in self._plans:
            plan = self._make_plan(num_microbatches)
            self._check_plan(plan.schedule, num_microbatches)
            self._plans[num_microbatches] = plan
        return self._plans[num_microbatches]

    def use(self, plan: Plan) -> None:
        """Run ``plan`` in all later calls with its number of microbatches; all ranks pass the same plan.

        Raises:
            ValueError: if it is of another method or pipeline size.
        """
        self._check_plan(plan.schedule, plan.schedule.m)
        self._plans[plan.schedule.m] = plan

    def capture_order(self, num_microbatches: int) -> list[int]:
        """The order in which Transformer Engine is to capture this rank's layers; the plan must stay then.

        Raises:
            ValueError: where the plan splits weight gradients.
        """
        return self._engine_graphs.order(self.plan(num_microbatches), self.groups.stage)

    def _check_plan(self, schedule: Schedule, num_microbatches: int) -> None:
        planned = schedule.method.name, schedule.p, schedule.m
        wanted = self.method.name, self.groups.pipeline, num_microbatches
        if planned != wanted:
            names = ("method", "stages", "microbatches")
            differ = [f"{n} {a}, not {b}" for n, a, b in zip(names, planned, wanted, strict=True) if a != b]
            raise ValueError(f"the plan has {'; '.join(differ)}; make it for this method and pipeline")

    def close(self) -> None:
        """Release the threads, or the side stream, without waiting for the work in them."""
        self._side_stream.close()
        if self._send_waiter is not None:
            self._send_waiter.close()

    def __call__(
        self,
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Iterator[Any] | list[Iterator[Any] | None] | None,
        model: torch.nn.Module | list[torch.nn.Module],
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
        p2p_communicator: Any = None,
        pg_collection: Any = None,
        force_all_reduce: bool | None = False,
        options: VocabOptions | None = None,
        teacher: Callable[[int], Teacher] | None = None,
        keep_top: Callable[[int, TopLogprobs], None] | None = None,
    ) -> list[Any]:
        """Run one iteration; the arguments are megatron-core's, and ``options`` for this call alone.

        ``teacher`` gives, on every rank, what a teacher says of a microbatch (``VocabOptions.distillation``).
        ``keep_top`` gets, on the ranks of the loss function, a microbatch's number and its most likely ids
        ``[s, b, k]`` with their float32 log-probabilities (``VocabOptions.top_logprobs``).

        Returns:
            What the loss function reported for each microbatch, on the last rank; else an empty list.

        Raises:
            ValueError: for a setting that this executor does not support, naming it and the remedy.
            InstructionError: if an instruction fails, naming rank, pass and microbatch.
        """
        chunks: list[torch.nn.Module] = model if isinstance(model, list) else [model]
        iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        config = get_model_config(chunks[0])
        given = {"teacher": teacher, "keep_top": keep_top, "adjust_tensor_shapes_fn": adjust_tensor_shapes_fn}
        options = self.options if options is None else options
        plan = self.plan(num_microbatches)
        facts = Facts(
            settings=config,
            options=options,
            method=self.method,
            p=plan.schedule.p,
            splits_w=plan.schedule.splits_w,
            graphs_are_wrong=graphs.OF_THIS_VERSION_ARE_WRONG,
            given=frozenset(name for name, value in given.items() if value is not None),
        )
        of_training = () if forward_only else (TRAINING, TEACHERS)
        require(facts, OPTIONS, CALLS, WHOLE, GRAPHS, *of_training, tell=self._tell)
        if pg_collection is None:
            pg_collection = compat.process_groups()
        shards = self.groups.tensor if config.sequence_parallel else 1
        cp_size = pg_collection.cp.size()
        call = Call(
            forward_step_func=forward_step_func,
            data_iterators=iterators,
            chunks=chunks,
            config=config,
            num_microbatches=num_microbatches,
            fixed_shape=(seq_length // cp_size // shards, micro_batch_size, config.hidden_size),
            cp_group_size=cp_size,
            forward_only=forward_only,
            collect_non_loss_data=collect_non_loss_data,
            first_microbatch_flag=first_val_step if forward_only and first_val_step is not None else True,
            options=options,
            teacher=teacher,
            keep_top=keep_top,
        )
        if facts.graphs_by_megatron:
            self._graphs.check(plan, chunks, forward_only)
        elif facts.graphs_by_engine and not forward_only:
            self._engine_graphs.check(plan)
        with _timed(config):
            iteration = self._run(call)
            if config.finalize_model_grads_func is not None and not forward_only:
                compat.finalize_gradients(config, chunks, iteration.divisor, pg_collection, force_all_reduce)
            for look in iteration.checks:
                look()
        if facts.graphs_by_megatron:
            self._graphs.capture(plan, forward_only)
        return iteration.reported

    def _run(self, call: Call) -> Iteration:
        """Run this rank's instructions; of the gradients, only Megatron's last reduction is missing then."""
        chunks, plan = call.chunks, self.plan(call.num_microbatches)
        if call.forward_only:
            plan = plan.ranking_targets if call.options.target_rank else plan.forward_only
        schedule = plan.schedule
        check_built_for(schedule, chunks, self.groups.stage, call.config)
        model_with_shards = chunk_with_shards(self.method, chunks)
        planned = runs_layer_plans(call)
        for chunk in chunks:
            if chunk not in self._layers:
                self._layers[chunk] = ChunkLayers.of(chunk)
        layers, splits_w = [self._layers[chunk] for chunk in chunks], schedule.splits_w
        with weight_gradients_of(chunks, layers, splits_w=splits_w, planned=planned) as weight_gradients:
            rank = self._rank(schedule)
            iteration = prepare(rank, call, schedule, model_with_shards, weight_gradients)
            chain = None if model_with_shards is None else OutputChain(iteration, model_with_shards)
            if chain is not None and not (call.forward_only or self._warmed_up):
                chain.warm_up()
                self._warmed_up = True
            handlers, finish = handlers_of(iteration, chain, weight_gradients)
            # Graphs of layers hide the layers: communication is launched before the pass.
            late = NONE_LATE if Facts(settings=call.config).captures_layers else plan.late
            program = plan.program[rank.pipeline_rank]
            try:
                with torch.set_grad_enabled(not call.forward_only), self._watched(iteration, late):
                    ended, number = iteration.microbatches.freed_after(program), dist.get_rank()
                    execute(number, program, handlers, self._watching(), late, iteration.between, ended)
                    finish()
            except BaseException:
                iteration.gradients.abandon()
                raise
            if call.forward_only:
                iteration.gradients.abandon()
            else:
                iteration.gradients.finish()
        return iteration

    @contextmanager
    def _watched(self, iteration: Iteration, late: Late) -> Iterator[None]:
        """The context of an iteration that launches ``late`` between layers."""
        if not late:
            yield
            return
        chunks, placement = iteration.call.chunks, iteration.rank.placement
        stages = [placement.stage_of(iteration.rank.pipeline_rank, k) for k in range(len(chunks))]
        with watched_layers(chunks, stages, iteration.between):
            yield

    def _watching(self) -> Sequence[Observer]:
        """The observers of this call: a profiler's range and the timeline cost more than a small pass."""
        profiler: list[Observer] = [lambda item: named_range(str(item))] if profiled(self.device) else []
        return (*self._observers, *profiler, *([self._recording.observe] if self._recording else []))

    @property
    def _recording(self) -> Timeline | None:
        """The timeline, if it records this call."""
        return self._timeline if self._timeline is not None and self._timeline.recording else None

    def _rank(self, schedule: Schedule) -> Rank:
        return Rank(
            method=schedule.method,
            placement=schedule.placement,
            groups=self.groups,
            device=self.device,
            side_stream=self._side_stream,
            point_to_point=self._point_to_point,
            waiting=self._recording.waiting if self._recording else contextlib.nullcontext,
            not_finite=self._not_finite,
        )


@contextmanager
def _timed(config: Any) -> Iterator[None]:
    """Megatron's timer of a forward-backward call, if it keeps timers."""
    if config.timers is not None:
        config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
    yield
    if config.timers is not None:
        config.timers("forward-backward").stop()
