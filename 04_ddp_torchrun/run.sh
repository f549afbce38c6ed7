#!/usr/bin/env bash
# One machine, one process per GPU, or two on the CPU:
#   bash 04_ddp_torchrun/run.sh --epochs 5 --amp
# Two machines, with NODE_RANK=1 on the second; MASTER_ADDR is an address of the first:
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 bash 04_ddp_torchrun/run.sh
# The output of each rank in a file, and only rank 0's on the screen (torchrun reads PET_...):
#   PET_TEE=3 PET_LOG_DIR=logs PET_LOCAL_RANKS_FILTER=0 bash 04_ddp_torchrun/run.sh
set -eu
script=$(dirname "$0")/train.py
if [ "${NPROC:-0}" = 0 ]; then # one process per GPU, or two on the CPU
  NPROC=$(python3 -c 'import torch; print(torch.cuda.device_count() or 2)')
fi
if [ "$NPROC" -gt 0 ] 2>/dev/null; then # a number: torchrun also takes gpu and auto
  cores=$(nproc)                         # which the processes share
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(((cores + NPROC - 1) / NPROC))}
fi

if [ "${NNODES:-1}" = 1 ]; then
  exec torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node="$NPROC" "$script" "$@"
fi
exec torchrun --nnodes="$NNODES" --node-rank="$NODE_RANK" --nproc-per-node="$NPROC" \
  --master-addr="$MASTER_ADDR" --master-port="${MASTER_PORT:-29500}" "$script" "$@"
