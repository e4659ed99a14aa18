#!/usr/bin/env bash
# One setting of the paper (8 GPUs, 4096 tokens, 256k ids), method by method; rows of quick.csv.
#
#   MEGATRON_LM_PATH=/path/to/Megatron-LM scripts/artifact/quick_exp.sh run METHOD [--smoke]
#   scripts/artifact/quick_exp.sh show-result [--smoke]
#
# METHOD: baseline, redis, interlaced, vocab-1, vocab-2, naive, v-half-baseline, v-half-vocab-1, v-half-vocab-2.
# Logs and results: quick-logs/METHOD/; --smoke runs it small on CPU processes, into quick-logs/smoke/.
set -euo pipefail
usage='usage: quick_exp.sh run METHOD [--smoke], or quick_exp.sh show-result [--smoke]'
here=$(cd "$(dirname "$0")" && pwd)
vocabpar=(python3 -m lab artifact)
case ${1:?$usage} in
  run) exec "${vocabpar[@]}" run "$here/quick.csv" --only "${2:?$usage}" --output quick-logs "${@:3}" ;;
  show-result)
    folder=quick-logs
    if [[ ${2:-} == --smoke ]]; then folder=quick-logs/smoke; fi
    exec "${vocabpar[@]}" show "$folder"
    ;;
  *) echo "$usage" >&2; exit 2 ;;
esac
