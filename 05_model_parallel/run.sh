#!/usr/bin/env bash
# Each process has a copy of the network, split by hand across two GPUs (without GPUs: the CPU):
#   bash 05_model_parallel/run.sh --chunks 8
# The other ways, with one process per GPU, or two on the CPU:
#   SCRIPT=05_model_parallel/fsdp.py bash 05_model_parallel/run.sh --amp --recompute
#   SCRIPT=05_model_parallel/tensor_parallel.py bash 05_model_parallel/run.sh
# A pipeline of two stages, or of three with NPROC=3:
#   SCRIPT=05_model_parallel/pipeline.py NPROC=2 bash 05_model_parallel/run.sh --schedule 1f1b
set -eu
script=${SCRIPT:-$(dirname "$0")/train.py}
if [ -z "${SCRIPT:-}" ]; then each=2; else each=1; fi # GPUs of a process
if [ "${NPROC:-0}" = 0 ]; then
  NPROC=$(python3 -c "import torch; print(torch.cuda.device_count() // $each or 2)")
fi
if [ "$NPROC" -gt 0 ] 2>/dev/null; then # a number: torchrun also takes gpu and auto
  cores=$(nproc)                         # which the processes share
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(((cores + NPROC - 1) / NPROC))}
fi
exec torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node="$NPROC" "$script" "$@"
