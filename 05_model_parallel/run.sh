#!/usr/bin/env bash
# A network split by hand, one process for two GPUs or one on the CPU; with NPROC=2 two copies:
#   bash 05_model_parallel/run.sh --devices cuda:0,cuda:1 --chunks 8
# A pipeline of two processes; the others one process per GPU, or two on the CPU:
#   bash 05_model_parallel/run.sh pipeline.py --schedule 1f1b
#   bash 05_model_parallel/run.sh tensor_parallel.py
#   bash 05_model_parallel/run.sh fsdp.py --checkpoint fsdp-run1
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
script=train.py
case "${1:-}" in *.py) script=$1 && shift ;; esac
case " $* " in *" --help "* | *" -h "*) exec python "$here/$script" --help ;; esac
gpus=$(python -c 'import torch; print(torch.cuda.device_count())' 2>/dev/null) ||
  { echo "run.sh: PyTorch is not installed for this Python: pip install -r requirements.txt" >&2 && exit 1; }
case $script in
  train.py) default=$((gpus > 1 ? gpus / 2 : 1)) ;;
  pipeline.py) default=2 ;;
  *) default=$((gpus > 0 ? gpus : 2)) ;;
esac
NPROC=${NPROC:-$default} cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > NPROC ? cores / NPROC : 1))}
export MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TRIM_THRESHOLD_=1073741824 # glibc: reuse freed memory
LOCAL_WORLD_SIZE=$NPROC WORLD_SIZE=$NPROC python "$here/$script" --check "$@" || exit # reports an error once

exec torchrun --standalone --nproc-per-node="$NPROC" "$here/$script" "$@"
