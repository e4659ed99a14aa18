#!/usr/bin/env bash
# The quick experiment with one GPU: its passes are measured, 8 GPUs are simulated with them.
#
#   HARDWARE=H100 scripts/artifact/one_gpu.sh [options of vocabpar profile, which win over the sizes below]
#
# Leaves one-gpu-logs/costs.json, and the table of all methods and families, with predicted time and memory.
set -euo pipefail
vocabpar=(python3 -m megatron_vocabpar)
mkdir -p one-gpu-logs
"${vocabpar[@]}" profile --pp 8 --layers 32 --hidden 3072 --heads 24 --seq-length 4096 --vocab-size 256000 \
  --dtype bf16 --output one-gpu-logs/costs.json "$@"
"${vocabpar[@]}" plan --hardware "${HARDWARE:-A100}" --pp 8 --microbatches 128 --costs one-gpu-logs/costs.json -- --num-layers 32 \
  --hidden-size 3072 --num-attention-heads 24 --seq-length 4096 --max-position-embeddings 4096 --vocab-size 256000 \
  --micro-batch-size 1 --untie-embeddings-and-output-weights --bf16
