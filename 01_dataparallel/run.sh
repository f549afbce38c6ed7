#!/usr/bin/env bash
# One process, on all GPUs of this machine or on the CPU:
#   bash 01_dataparallel/run.sh --epochs 5 --batch-size 256
#   CUDA_VISIBLE_DEVICES=0 bash 01_dataparallel/run.sh --amp
set -eu
exec python "$(dirname "$0")/train.py" "$@"
