#!/usr/bin/env bash
# One machine; run the same command again to resume (another script: SCRIPT=my.py before bash):
#   bash 06_checkpointing/run.sh --checkpoint run1.ckpt
# Elastic, the same command on each of one or two machines with a shared disk:
#   RDZV_ID=1 RDZV_ENDPOINT=10.0.0.1:29400 bash 06_checkpointing/run.sh --checkpoint /shared/run1.ckpt
# The output of each rank in a file, and only rank 0's on the screen (torchrun reads PET_...):
#   PET_TEE=3 PET_LOG_DIR=logs PET_LOCAL_RANKS_FILTER=0 bash 06_checkpointing/run.sh
set -eu
script=${SCRIPT:-$(dirname "$0")/train.py}
if [ "${NPROC:-0}" = 0 ]; then # one process per GPU, or two on the CPU
  NPROC=$(python3 -c 'import torch; print(torch.cuda.device_count() or 2)')
fi
if [ "$NPROC" -gt 0 ] 2>/dev/null; then # a number: torchrun also takes gpu and auto
  cores=$(nproc)                         # which the processes share
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(((cores + NPROC - 1) / NPROC))}
fi
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # else restarted processes may find old addresses

if [ -z "${RDZV_ENDPOINT:-}${RDZV_ID:-}" ] && [ "${NNODES:-1}" = 1 ]; then
  exec torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node="$NPROC" --max-restarts=3 \
    "$script" "$@"
fi
exec torchrun --nnodes="${NNODES:-1:2}" --nproc-per-node="$NPROC" --max-restarts=3 \
  --rdzv-backend=c10d --rdzv-id="${RDZV_ID:?a name of this run, the same on all machines}" \
  --rdzv-endpoint="${RDZV_ENDPOINT:?an address and a port of the first machine}" "$script" "$@"
