"""A request to the planner, and a choice: one schedule that could answer it, with its time and memory.

Next: ``layer_counts.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf

from megatron_vocabpar.plan.hardware import Hardware
from megatron_vocabpar.plan.job import OVERLAP, Job
from megatron_vocabpar.plan.model import Model
from megatron_vocabpar.plan.pattern import layers_in
from megatron_vocabpar.plan.price import Price, Use, usual_price
from megatron_vocabpar.plan.stage_memory import GIB, Held, StageMemory
from megatron_vocabpar.plan.times import StageLayers, can_pair, costs_of_stages, estimated_costs
from megatron_vocabpar.schedule.make.families import family_named
from megatron_vocabpar.schedule.times.costs import PassCosts
from megatron_vocabpar.schedule.words.methods import BASELINE

STOCK = "stock"  # the method of a choice that is Megatron's own
_LEAST = 16  # microbatches, if two a rank are not more
_LIGHTER = 1.02  # factor on the memory limit after a quick play: the whole schedule may hold a little less


@dataclass(frozen=True)
class Request:
    """The question to the planner: a model, a job and GPUs.

    Attributes:
        limit_gib: the most GiB that a GPU may hold.
        measured: measured times, which replace the estimates.
        price: how much longer layers take beside other work.
        max_activations: the most microbatches whose activations a rank may hold; by default what each
            family needs.
    """

    model: Model
    job: Job
    hardware: Hardware
    limit_gib: float
    measured: PassCosts | None = None
    price: Price = field(default_factory=usual_price)
    max_activations: float | None = None

    def costs(self, factor: float = 1.0) -> PassCosts:
        """The times of all passes, for even layers; those of layers ``factor`` times as long."""
        if self.measured is None:
            if factor == 1.0:
                return self._estimated  # all layouts of a search ask for it
            return estimated_costs(self.model, self.job, self.hardware, factor)
        costs = self.measured if can_pair(self.model, self.job) else replace(self.measured, hidden_ms=0.0)
        return costs.with_layers(factor)

    @cached_property
    def _estimated(self) -> PassCosts:
        return estimated_costs(self.model, self.job, self.hardware)

    def factor(self, use: Use, price: Price | None = None) -> float:
        """The time of layers over that in ``costs()``, which are those of busy GPUs; ``price`` or its own.

        Measured passes run one after another, so their GPU is always busy.
        """
        reference = Use(1.0 if self.measured else self.hardware.rates.busy)
        return (price or self.price).longer(use, reference, self.hardware.multiprocessors)

    @property
    def trial_microbatches(self) -> int:
        """The microbatches of a quick play."""
        return min(self.job.m, max(_LEAST, 2 * self.job.p))


@dataclass(frozen=True)
class Choice:
    """One method in one family, after a quick play or a full one.

    Attributes:
        request: the request that it answers.
        layers: transformer layers of each stage.
        iteration_ms: the iteration's time, with the optimizer's step.
        idle: the share of the schedule in which the mean rank waits.
        stages: the memory of each rank at its peak.
        held: what each rank holds at its peak.
        problem: the reason why it cannot run; the other fields are then empty.
        is_full: it was simulated for all microbatches.
        exact: it was simulated in full, and its time includes all that collectives take from layers.
        flags: for stock Megatron, the flags that place its layers.
        tail_ms: the part of the iteration after the schedule: gradients, weights and the optimizer's step.
        use: how much of the time other work runs beside layers.
        layers_share: the share of passes' time that layers take.
        channels: the channels of NCCL that suffice for our collectives; 0 without collectives, or unless
            ``exact``.
        needed_gib: the GiB that the job would need without its memory savers, or the limit if they are
            unknown; 0 without memory savers.
    """

    request: Request = field(hash=False)
    method: str
    family: str
    layers: tuple[int, ...] = ()
    iteration_ms: float = 0.0
    idle: float = 0.0
    stages: tuple[StageMemory, ...] = ()
    held: tuple[Held, ...] = field(default=(), repr=False)
    problem: str = ""
    is_full: bool = False
    exact: bool = False
    flags: tuple[str, ...] = ()
    tail_ms: float = 0.0
    use: Use = field(default_factory=Use)
    layers_share: float = 1.0
    channels: int = 0
    needed_gib: float = 0.0

    @property
    def stock(self) -> bool:
        """Whether Megatron runs it without this package."""
        return self.method == STOCK or (self.method, self.family) == (BASELINE, "1f1b")

    @property
    def pairs(self) -> bool:
        """Whether F and B run together, which hides the exchange between experts."""
        return OVERLAP[0] in self.flags if self.method == STOCK else family_named(self.family).pairs

    @property
    def name(self) -> str:
        return f"{self.method} in {self.family}"

    @property
    def peak_gib(self) -> float:
        return max((stage.total for stage in self.stages), default=0.0) / GIB

    @property
    def fits(self) -> bool:
        return not self.problem and self.peak_gib <= self.request.limit_gib

    @property
    def known_ms(self) -> float:
        """The iteration's time as ``choose`` compares it: ``inf`` for what cannot fit."""
        limit_gib = self.request.limit_gib * (1.0 if self.is_full else _LIGHTER)
        return self.iteration_ms if not self.problem and self.peak_gib <= limit_gib else inf

    def at_ms(self, price: Price) -> float:
        """The iteration's time at another price; exact where waits grow as the passes do."""
        factors = (self.request.factor(self.use, of) for of in (price, self.request.price))
        at, now = (1.0 + self.layers_share * (factor - 1.0) for factor in factors)
        return (self.iteration_ms - self.tail_ms) * at / now + self.tail_ms

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of all GPUs together."""
        job = self.request.job
        tokens = job.m * job.d * job.micro_batch * self.request.model.seq_length
        return tokens / self.iteration_ms * 1e3

    @property
    def mfu(self) -> float:
        """The model's operations over the peak of all GPUs in the precision of the layers' products."""
        request = self.request
        job, gpu = request.job, request.hardware
        peak = gpu.fp4_tflops if job.fp4 else gpu.fp8_tflops if job.fp8 else gpu.tflops
        return self.tokens_per_s * request.model.step_flops / (job.gpus * peak * 1e12)


def costs_of(request: Request, layers: tuple[int, ...], factor: float = 1.0) -> PassCosts:
    """The request's costs with the layers of each stage; the last has heads, if any."""
    costs, model = request.costs(factor), request.model
    if not model.pattern:
        return costs if len(set(layers)) == 1 else replace(costs, layers_per_stage=layers)
    stages = [StageLayers(layers_in(stage.pattern) if count else []) for count, stage in model.stages(layers)]
    stages[-1] = stages[-1]._replace(heads=model.mtp_depths)
    return costs_of_stages(costs, model, request.job, request.hardware, stages)


def costs_of_choice(choice: Choice) -> PassCosts:
    """The times of the choice's passes, as ``vocabpar schedule --costs`` reads them."""
    request = choice.request
    factor = request.factor(choice.use)
    if choice.method == STOCK:
        return request.costs(factor)
    return costs_of(request, choice.layers, factor)


def priced_ms(request: Request, length_ms: float, layers_share: float, use: Use) -> float:
    """The ms of a schedule that takes ``length_ms`` where layers have the factor 1.

    ``layers_share`` is the share of passes' time that layers take. Exact where waits grow as the passes do:
    for a schedule that is played again, within 0.1 %.
    """
    return length_ms * (1.0 + layers_share * (request.factor(use) - 1.0))
