#!/usr/bin/env bash
# Two processes; each has a copy of the network, split by hand across two devices:
#   bash 05_model_parallel/run.sh --chunks 8
# The other ways, with one process per GPU, or two on the CPU:
#   SCRIPT=fsdp.py bash 05_model_parallel/run.sh --amp --recompute
#   SCRIPT=tensor_parallel.py bash 05_model_parallel/run.sh
# A pipeline of two stages, or of three with NPROC=3:
#   SCRIPT=pipeline.py bash 05_model_parallel/run.sh --schedule 1f1b
set -eu
script=${SCRIPT:-train.py}
if [ "$script" = train.py ] || [ "$script" = pipeline.py ]; then NPROC=${NPROC:-2}; fi
if command -v nvidia-smi >/dev/null; then NPROC=${NPROC:-gpu}; else NPROC=${NPROC:-2}; fi
if [ "$NPROC" != gpu ]; then # with GPUs, torchrun's default of one thread is enough
  cores=$(nproc)
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(((cores + NPROC - 1) / NPROC))}
fi
exec torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node="$NPROC" \
  "$(dirname "$0")/$script" "$@"
