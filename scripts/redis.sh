#!/usr/bin/env bash
# The method redis on 8 GPUs; see pretrain.sh for the variables.
exec "$(dirname "$0")/pretrain.sh" redis "$@"
