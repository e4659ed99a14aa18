#!/usr/bin/env bash
# Train a GPT with Megatron-LM on the 8 GPUs of one machine (made for A100 with 80 GB), with the sizes of the
# paper's artifact: 32 layers of width 3072, 4096 tokens, 256k token ids, 128 sequences an iteration.
#
#   MEGATRON_LM_PATH=/path/to/Megatron-LM scripts/pretrain.sh METHOD [further arguments of pretrain_gpt.py]
#
# METHOD: baseline, redis, interlaced, vocab-1 or vocab-2. Without DATA_PATH the tokens are made up.
# Variables: MEGATRON_LM_PATH, GPUS, LAYERS, HIDDEN, HEADS, SEQ_LENGTH, GLOBAL_BATCH, VOCAB_SIZE, TRAIN_ITERS,
# DATA_PATH with TOKENIZER_MODEL, DRY_RUN=1 to print the command only. With data, the tokenizer says how many ids
# there are; redis, which counts operations, then wants their number in VOCAB_SIZE too.
set -euo pipefail

method=${1:?usage: scripts/pretrain.sh baseline|redis|interlaced|vocab-1|vocab-2 [arguments]}
shift
: "${MEGATRON_LM_PATH:?set it to a checkout of Megatron-LM}"
gpus=${GPUS:-8}

case $method in
  baseline) flags=() ;;
  redis) flags=(--enable-vocab-parallel --vocab-parallel-method redis) ;;
  interlaced | vocab-1 | vocab-2) flags=(--enable-vocab-parallel --vocab-parallel-method "$method") ;;
  *) echo "unknown method $method: choose baseline, redis, interlaced, vocab-1 or vocab-2" >&2; exit 2 ;;
esac

if [[ -n ${DATA_PATH:-} ]]; then
  : "${TOKENIZER_MODEL:?with DATA_PATH, set it to the SentencePiece model of the data}"
  data=(--data-path "$DATA_PATH" --tokenizer-type GPTSentencePieceTokenizer --tokenizer-model "$TOKENIZER_MODEL")
  if [[ $method == redis ]]; then
    data+=(--vocab-size "${VOCAB_SIZE:?with DATA_PATH, redis needs the number of ids of TOKENIZER_MODEL}")
  fi
else
  data=(--mock-data --tokenizer-type NullTokenizer --vocab-size "${VOCAB_SIZE:-255999}")
fi

model=(
  --num-layers "${LAYERS:-32}" --hidden-size "${HIDDEN:-3072}" --num-attention-heads "${HEADS:-24}"
  --seq-length "${SEQ_LENGTH:-4096}" --max-position-embeddings "${SEQ_LENGTH:-4096}"
  --untie-embeddings-and-output-weights
  --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.006
)
training=(
  --pipeline-model-parallel-size "$gpus" --tensor-model-parallel-size 1 --use-distributed-optimizer --bf16
  --micro-batch-size 1 --global-batch-size "${GLOBAL_BATCH:-128}" --train-iters "${TRAIN_ITERS:-30}"
  --lr 6.0e-5 --min-lr 6.0e-6 --lr-decay-style cosine --lr-warmup-iters 2
  --clip-grad 8.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95
  --split 98,2,0 --no-create-attention-mask-in-dataloader
  --log-interval 1 --log-throughput --eval-interval 10000 --eval-iters 0
)
command=(
  torchrun --standalone --nproc-per-node "$gpus" -m megatron_vocabpar.launch
  "$MEGATRON_LM_PATH/pretrain_gpt.py" "${model[@]}" "${training[@]}" "${data[@]}" "${flags[@]}" "$@"
)
# Every stream gets a hardware queue of its own, so that collectives overlap with computation.
export CUDA_DEVICE_MAX_CONNECTIONS=8
if [[ -n ${DRY_RUN:-} ]]; then
  printf '%q ' "${command[@]}"
  echo
else
  exec "${command[@]}"
fi
