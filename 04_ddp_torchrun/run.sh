#!/usr/bin/env bash
# One machine, one process per GPU, or two on the CPU:
#   bash 04_ddp_torchrun/run.sh --epochs 5 --amp
# Two machines, with NODE_RANK=1 on the second; MASTER_ADDR is an address of the first:
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 bash 04_ddp_torchrun/run.sh
# The output of each rank in a file, and only rank 0's on the screen (torchrun reads PET_...):
#   PET_TEE=3 PET_LOG_DIR=logs PET_LOCAL_RANKS_FILTER=0 bash 04_ddp_torchrun/run.sh
set -eu
script=$(dirname "$0")/train.py
if command -v nvidia-smi >/dev/null; then NPROC=${NPROC:-gpu}; else NPROC=${NPROC:-2}; fi
if [ "$NPROC" != gpu ]; then # on GPUs torchrun's one thread per process is enough
  cores=$(nproc)
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(((cores + NPROC - 1) / NPROC))}
fi

if [ "${NNODES:-1}" = 1 ]; then
  exec torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node="$NPROC" "$script" "$@"
fi
exec torchrun --nnodes="$NNODES" --node-rank="$NODE_RANK" --nproc-per-node="$NPROC" \
  --master-addr="$MASTER_ADDR" --master-port="${MASTER_PORT:-29500}" "$script" "$@"
