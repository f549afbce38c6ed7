#!/usr/bin/env bash
# Two processes: two copies of a network, each split by hand across two devices
#   bash 05_model_parallel/run.sh --chunks 8
# The other ways, with NPROC processes where there are more GPUs
#   SCRIPT=fsdp.py NPROC=8 bash 05_model_parallel/run.sh --checkpoint fsdp-run1
#   SCRIPT=tensor_parallel.py bash 05_model_parallel/run.sh
#   SCRIPT=pipeline.py bash 05_model_parallel/run.sh --schedule 1f1b
set -eu
NPROC=${NPROC:-2}
cores=$(nproc)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(((cores + NPROC - 1) / NPROC))} # threads per process
exec torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node="$NPROC" \
  "$(dirname "$0")/${SCRIPT:-train.py}" "$@"
