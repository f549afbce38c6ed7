#!/usr/bin/env bash
# One machine; run the same command again to resume:
#   bash 06_checkpointing/run.sh --checkpoint run1.pt
# Elastic, the same command on each of one or two machines with a shared disk:
#   RDZV_ENDPOINT=10.0.0.1:29400 bash 06_checkpointing/run.sh --checkpoint /shared/run1.pt
set -eu
script=$(dirname "$0")/train.py
gpus='import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 2)'
NPROC=${NPROC:-$(python -c "$gpus")} # processes on this machine
cores=$(getconf _NPROCESSORS_ONLN)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(((cores + NPROC - 1) / NPROC))} # threads per process
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # restarted processes need new addresses
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=120   # seconds to save after a signal, from torch 2.13 on

if [ -z "${RDZV_ENDPOINT:-}" ] && [ "${NNODES:-1}" = 1 ]; then
  exec torchrun --standalone --nproc-per-node="$NPROC" --max-restarts=3 "$script" "$@"
fi
exec torchrun --nnodes="${NNODES:-1:2}" --nproc-per-node="$NPROC" --max-restarts=3 \
  --rdzv-backend=c10d --rdzv-id=train --rdzv-endpoint="$RDZV_ENDPOINT" "$script" "$@"
