#!/usr/bin/env bash
# All experiments of a CSV file, then the table of results. The same line goes on after an interruption.
#
#   MEGATRON_LM_PATH=/path/to/Megatron-LM scripts/artifact/full_exp.sh scripts/artifact/exp_one_host.csv [--smoke]
#
# Results: full-logs/<name of the file>/. On several nodes start it on each, in a folder that all see, with NNODES,
# NODE_RANK, MASTER_ADDR and MASTER_PORT set; scripts/slurm/full_exp.sbatch does it with Slurm.
set -euo pipefail
file=${1:?usage: full_exp.sh EXPERIMENTS.csv [--smoke]}
exec python3 -m lab artifact run "$file" --output "full-logs/$(basename "$file" .csv)" "${@:2}"
