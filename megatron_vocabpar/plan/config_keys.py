"""The keys of a Hugging Face configuration, and which of them the planner has read.

A key that shapes a model and that nothing has read is an error, as the model would have other sizes than the
plan says: ``ConfigKeys.check``.
Next: ``model_types.py``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_SHAPES = re.compile(
    r"size|dim|width|hidden|layer|head|expert|rank|freq|interval|step|period|pattern|ind(?:ex|ices)|idxs|offset"
    r"|expand|multiple|group|top_?k|depth|(?:^|_)n(?:um)?_|window|inner|embd|types"
)
"""Parts of the names of keys that may say sizes or kinds of layers."""
_COUNT_NOTHING = """
    max_position_embeddings original_max_position_embeddings n_positions n_ctx model_max_length seq_length
    chunk_size_feed_forward chunk_size mamba_chunk_size block_size conv_kernel mamba_d_conv
    linear_conv_kernel_dim num_logits_to_keep query_pre_attn_scalar qk_head_dim rotary_dim rotary_ndims
    no_rope_layers no_rope_layer_interval rope_interleave rope_local_base_freq time_step_limit time_step_rank
    time_step_min time_step_max time_step_floor mamba_dt_rank n_group num_expert_group
    prefix_dense_sliding_window_pattern type_vocab_size top_k num_beams num_beam_groups num_return_sequences
    no_repeat_ngram_size encoder_no_repeat_ngram_size num_labels pruned_heads max_window_layers ep_size
"""
"""Keys of such names that change no count of operations or weights, or a count by less than 1 %.

They are lengths, constants of scores and positions, kernels of short convolutions, chunks of scans, and
settings of generation that earlier releases of transformers stored in each file.
"""
_IGNORED = frozenset(_COUNT_NOTHING.split())


class ConfigKeys:
    """The keys of one configuration.

    Reading a key marks it as read. What is missing or malformed is remembered, so that one error names it
    all (``check``); in its place stands 1.

    Args:
        data: the configuration, one JSON object.
        kind: its model type, for messages.
    """

    def __init__(self, data: Mapping[str, Any], kind: str) -> None:
        self._data, self._kind = data, kind
        self._read: set[str] = set()
        self._missing: list[str] = []
        self._malformed: list[str] = []

    def value(self, *names: str) -> Any:
        """The value of the first of these keys that has one, else None; all of them are read."""
        self._read.update(names)
        return next((self._data[name] for name in names if self._data.get(name) is not None), None)

    def size(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """The whole number of the first of these keys that has one.

        Args:
            names: a key and its other spellings.
            default: where no key has a value, or 0; None: a value is needed.
            least: the smallest value that is needed.
        """
        value = self.value(*names)
        if value is None:
            if default is None:
                self._missing.append(names[0])
            return 1 if default is None else default
        smallest = least if default is None else 0
        if isinstance(value, int) and not isinstance(value, bool) and value >= smallest:
            return value or default or 0
        named = next(name for name in names if self._data.get(name) is not None)
        self._malformed.append(f"{named}: {value!r}")
        return 1

    def words(self, *names: str) -> list[Any]:
        """The list of the first of these keys that has one; empty if none has."""
        value = self.value(*names)
        if value is None or isinstance(value, list):
            return value or []
        named = next(name for name in names if self._data.get(name) is not None)
        raise ValueError(f"{named}: {value!r}; give a list, a word for each layer")

    def refuse_unless(self, name: str, *allowed: Any) -> None:
        """Refuse any other value of this key, by ValueError."""
        value = self.value(name)
        if value is not None and value not in allowed:
            raise ValueError(
                f"{name}: {str(value)[:60]} of a {self._kind} is not counted by the planner; {INSTEAD}"
            )

    def check(self) -> None:
        """Raise ValueError if a key is missing or malformed, or if one that shapes a model was not read."""
        if self._missing:
            missing = ", ".join(dict.fromkeys(self._missing))
            raise ValueError(f"no {missing}; a Hugging Face config.json of {self._kind} has it")
        if self._malformed:
            raise ValueError(f"{', '.join(self._malformed)}; give whole numbers of at least 1")
        unread = [
            f"{name}: {str(value)[:40]}" for name, value in self._data.items() if self._shapes(name, value)
        ]
        if unread:
            raise ValueError(f"{', '.join(unread)}: not known for the model type {self._kind}; {INSTEAD}")

    def _shapes(self, name: str, value: Any) -> bool:
        known = name in self._read or name in _IGNORED or name.endswith(("token_id", "token_ids"))
        sized = value if isinstance(value, list) else isinstance(value, int) and not isinstance(value, bool)
        return bool(value and sized) and not known and bool(_SHAPES.search(name))


INSTEAD = "give the model as Megatron's arguments after -- instead"
"""What a user can do about a configuration that the planner cannot read."""
