#!/usr/bin/env bash
# The method vocab-1 on 8 GPUs; see pretrain.sh for the variables.
exec "$(dirname "$0")/pretrain.sh" vocab-1 "$@"
