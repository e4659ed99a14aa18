"""Options of Megatron-LM that launch lines of several tests have."""

from __future__ import annotations

from tests.megatron_lm.training import words

ENABLE = "--enable-vocab-parallel"
FROM_WEIGHTS = words("--finetune --no-load-optim --no-load-rng")
UNTIED = words("--untie-embeddings-and-output-weights")
EMBEDDINGS = {"untied": UNTIED, "tied": ()}
EIGHT_LAYERS = words("--num-layers 8")
CHUNKS = words("--num-virtual-stages-per-pipeline-rank 2")

DISTRIBUTED = "--use-distributed-optimizer"
OVERLAP = words(f"{DISTRIBUTED} --overlap-grad-reduce --overlap-param-gather")
EIGHT_BITS_GATHERED = f"--fp8-param-gather {DISTRIBUTED} --bf16"
REUSED = "--reuse-grad-buf-for-mxfp8-param-ag"

LLAMA = (
    "--disable-bias-linear --normalization RMSNorm --swiglu --position-embedding-type rope "
    "--group-query-attention --num-query-groups 2 --qk-layernorm"
)
LATENT = (
    "--disable-bias-linear --multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 8 "
    "--qk-pos-emb-head-dim 8 --v-head-dim 8 --qk-layernorm --normalization RMSNorm "
    "--position-embedding-type rope --no-rope-fusion"
)
