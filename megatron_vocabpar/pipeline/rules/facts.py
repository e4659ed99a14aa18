"""``Facts``: what rules look at, the same of a launch line, of a TransformerConfig and of Bridge's container.

Settings are Megatron's, by the names of its parsed arguments: what has attributes of these names can be read.
One that a version lacks, or that is None, has its default here. Standard library only.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Generic, TypeVar

from megatron_vocabpar.option import asked_for, options_of
from megatron_vocabpar.pipeline.options import DEFAULTS, VocabOptions
from megatron_vocabpar.schedule.words.methods import Method

T = TypeVar("T")
Spelling = Callable[[str, Any], str]
"""From an option's name and value to the text by which a door writes it."""


def in_python(name: str, value: Any) -> str:
    """An option as a program spells it."""
    return f"{name}={value!r}"


def plain(value: Any) -> Any:
    """The word of a member of an enumeration: Megatron's versions have now the one, now the other."""
    if isinstance(value, enum.Enum):
        return value.value if isinstance(value.value, str) else value.name
    return [plain(item) for item in value] if isinstance(value, list) else value


class Setting(Generic[T]):
    """A setting of Megatron's, by its name here and ``others`` that it has elsewhere; else ``default``."""

    def __init__(self, default: T, *others: str) -> None:
        self._default = default
        self._names = others

    def __set_name__(self, owner: type, name: str) -> None:
        self._names = (name, *self._names)

    def __get__(self, facts: Settings, owner: type) -> T:
        values = (plain(getattr(facts.settings, name, None)) for name in self._names)
        return next((value for value in values if value is not None), self._default)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What Megatron is set to.

    Attributes:
        settings: its arguments, its configuration, or another object with settings.
    """

    settings: Any = None

    bf16 = Setting(False)
    fp16 = Setting(False)
    fp4 = Setting("")
    params_dtype = Setting[object](None)
    untied = Setting(False, "untie_embeddings_and_output_weights")
    hidden_size = Setting(0)
    num_layers = Setting(0)
    num_experts = Setting(0, "num_moe_experts")
    moe_layer_freq = Setting[int | Sequence[int]](1)
    moe_token_dispatcher_type = Setting("")
    mtp_num_layers = Setting(0)
    mtp_detach_heads = Setting(False)
    position_embedding_type = Setting("")
    expert_model_parallel_size = Setting(1)
    hybrid_layer_pattern = Setting("")
    hybrid_override_pattern = Setting("")
    transformer_impl = Setting("")
    tp_comm_overlap = Setting(False)
    tp_comm_bulk_wgrad = Setting(True)
    overlap_param_gather = Setting(False)
    reuse_grad_buf_for_mxfp8_param_ag = Setting(False)
    overlap_p2p_comm = Setting(True)
    overlap_moe_expert_parallel_comm = Setting(False)
    overlap_dispatch_backward_with_experts_wgrad = Setting(False)
    delay_wgrad_compute = Setting(False)
    defer_embedding_wgrad_compute = Setting(False)
    variable_seq_lengths = Setting(False)
    partly_checkpointed = Setting[int | None](None, "num_microbatches_with_partial_activation_checkpoints")
    recompute_granularity = Setting("")
    recompute_modules = Setting[Sequence[str]](())
    cuda_graph_impl = Setting("")
    enable_cuda_graph = Setting(False)
    external_cuda_graph = Setting(False)
    cuda_graph_warmup_steps = Setting(3)
    save = Setting("")
    load = Setting("")
    no_save_optim = Setting(False)
    no_load_optim = Setting(False)
    ckpt_format = Setting("torch_dist")
    use_dist_ckpt = Setting(False)
    ckpt_convert_format = Setting("torch_dist")
    rerun_mode = Setting("disabled")
    logit_dtype = Setting("fp32")
    sft = Setting(False)
    dataloader_inter_document_masking = Setting(False)
    iterations_to_skip = Setting[Sequence[int]](())
    result_rejected_tracker_filename = Setting("")

    def has(self, name: str) -> bool:
        """Whether this Megatron has a setting: versions are told apart by what came with them."""
        return hasattr(self.settings, name)

    def is_set(self, name: str) -> bool:
        """Whether a setting has a value that is neither 0, empty nor false."""
        return bool(getattr(self.settings, name, None))

    def any_set(self, names: str) -> bool:
        """Whether any of these settings is set; ``names`` are separated by spaces."""
        return any(map(self.is_set, names.split()))

    @property
    def pattern(self) -> str:
        """``--hybrid-layer-pattern``, or by its former name; empty where patterns have no stages."""
        known = self.has("hybrid_layer_pattern")
        return (self.hybrid_layer_pattern or self.hybrid_override_pattern) if known else ""

    def has_experts(self, layer: int) -> bool:
        """Whether a layer of the decoder, counted from 0, has experts by ``--moe-layer-freq``."""
        frequency = self.moe_layer_freq
        if isinstance(frequency, int):
            return layer % frequency == 0
        return bool(list(frequency)[layer : layer + 1] == [1])

    @property
    def is_half(self) -> bool:
        """Whether the model computes in float16."""
        return self.fp16 or str(self.params_dtype) == "torch.float16"

    @property
    def stores_optimizer(self) -> bool:
        """Whether checkpoints have the optimizer's state."""
        return bool((self.save and not self.no_save_optim) or (self.load and not self.no_load_optim))

    @property
    def since_0_17(self) -> bool:
        """Whether Megatron is 0.17 or later."""
        return self.has("use_mup")

    @property
    def since_0_19(self) -> bool:
        """Whether Megatron is 0.19 or later."""
        return self.has("mtp_detach_heads")

    @property
    def since_0_20(self) -> bool:
        """Whether Megatron is later than 0.19."""
        return self.has("output_logit_dtype")

    @property
    def graphs_by_megatron(self) -> bool:
        """Whether Megatron captures single layers: ``--cuda-graph-impl local`` or ``--enable-cuda-graph``."""
        return self.cuda_graph_impl == "local" or self.enable_cuda_graph

    @property
    def graphs_by_engine(self) -> bool:
        """Whether Transformer Engine does: ``--cuda-graph-impl transformer_engine``, or its old name."""
        return self.cuda_graph_impl == "transformer_engine" or self.external_cuda_graph

    @property
    def captures_layers(self) -> bool:
        """Whether Megatron or Transformer Engine captures layers in CUDA graphs."""
        return self.graphs_by_megatron or self.graphs_by_engine


@dataclass(frozen=True, kw_only=True)
class Facts(Settings):
    """What rules look at.

    Attributes:
        options: of the vocabulary layers.
        method: how they are computed; None where it is not known yet.
        spell: how the door that asks writes an option.
        family: the family of schedules, as asked for, also ``search`` and ``auto``; empty if unknown.
        p: stages of the pipeline.
        chunks: model chunks on each rank; no whole number if layers do not divide.
        splits_w: weight gradients are passes of their own, or may be.
        has_pairs: F and B may run in pairs.
        in_v: stages are placed in a V.
        redistributes: transformer layers move away from the last stage.
        final_stage_layers: how many stay there; None: it follows from operation counts.
        profile_iterations: iterations of which the passes are timed, to plan again.
        graphs_are_wrong: Megatron's own graphs of layers gave wrong gradients in this version.
        given: what a call has been given, of ``teacher``, ``keep_top`` and ``adjust_tensor_shapes_fn``.
    """

    options: VocabOptions = DEFAULTS
    method: Method | None = None
    spell: Spelling = in_python
    family: str = ""
    p: int = 0
    chunks: Fraction = Fraction(1)
    splits_w: bool = False
    has_pairs: bool = False
    in_v: bool = False
    redistributes: bool = False
    final_stage_layers: int | None = None
    profile_iterations: int = 0
    graphs_are_wrong: bool = False
    given: frozenset[str] = frozenset()

    def spelled(self, *names: str) -> str:
        """The options of ``names`` that are asked for, as the door writes them; empty if none is."""
        fields = ("metrics" if name == "gradients" else name for name in asked_for(self.options, names))
        return " and ".join(self.spell(name, getattr(self.options, name)) for name in fields)

    @property
    def option(self) -> dict[str, str]:
        """Every option as the door writes it, asked for or not."""
        return {name: self.spell(name, getattr(self.options, name)) for name in options_of(self.options)}

    @property
    def partitions(self) -> bool:
        """Whether the vocabulary layers are partitioned."""
        return self.method is not None and self.method.vocabulary_parallel

    @property
    def runs_ours(self) -> bool:
        """Whether a schedule of ours runs in the place of Megatron's."""
        return self.partitions or self.family != "1f1b"

    @property
    def family_flag(self) -> str:
        """The flag of the family, or what stands for it in a program."""
        return f"--vocab-parallel-family {self.family}" if self.family else "this schedule"
