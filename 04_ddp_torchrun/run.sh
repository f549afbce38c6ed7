#!/usr/bin/env bash
# One machine, one process per GPU, or two on the CPU:
#   bash 04_ddp_torchrun/run.sh --epochs 5 --amp
# Two machines, with NODE_RANK=1 on the second; MASTER_ADDR is an address of the first:
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 bash 04_ddp_torchrun/run.sh
set -eu
script=$(dirname "$0")/train.py
gpus='import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 2)'
NPROC=${NPROC:-$(python -c "$gpus")} # processes on this machine
cores=$(getconf _NPROCESSORS_ONLN)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(((cores + NPROC - 1) / NPROC))} # threads per process

if [ "${NNODES:-1}" = 1 ]; then
  exec torchrun --standalone --nproc-per-node="$NPROC" "$script" "$@"
fi
exec torchrun --nnodes="$NNODES" --node-rank="$NODE_RANK" --nproc-per-node="$NPROC" \
  --master-addr="$MASTER_ADDR" --master-port="${MASTER_PORT:-29500}" "$script" "$@"
