#!/usr/bin/env bash
# One process per GPU of this machine, or two on the CPU, spawned by train.py:
#   bash 02_ddp_spawn/run.sh --epochs 5 --amp
#   bash 02_ddp_spawn/run.sh --nprocs 4 --device cpu
set -eu
exec python "$(dirname "$0")/train.py" "$@"
