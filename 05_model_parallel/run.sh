#!/usr/bin/env bash
# Train a network that is cut in two by hand, in one process for two GPUs, or in one on the CPU:
#   bash 05_model_parallel/run.sh
#   bash 05_model_parallel/run.sh --devices cuda:0,cuda:1 --chunks 8
# Train two copies of it, each on its own pair of devices:
#   NPROC=2 bash 05_model_parallel/run.sh
# Train in another way, in one process a GPU, or in two on the CPU:
#   bash 05_model_parallel/run.sh pipeline.py --schedule 1f1b
#   bash 05_model_parallel/run.sh tensor_parallel.py
#   bash 05_model_parallel/run.sh fsdp.py --checkpoint fsdp-run1
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)

has_torch='import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)'
if ! python -c "$has_torch" 2>/dev/null; then
  requirements=$here/requirements.txt # beside a copy; in the repository, one level up
  [ -f "$requirements" ] || requirements=${here%/*}/requirements.txt
  echo "run.sh: no torch for python; run: python3 -m venv .venv && . .venv/bin/activate &&" \
    "pip install -r '$requirements'" >&2
  exit 1
fi

script=train.py
case "${1:-}" in *.py) script=$1 && shift ;; esac
gpus=0
if command -v nvidia-smi >/dev/null || [ -e /dev/nvidiactl ] || [ -e /dev/kfd ]; then
  gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
fi
asked=${NPROC:-}
case $script in
  train.py) default=$((gpus > 1 ? gpus / 2 : 1)) ;; # two devices each
  pipeline.py) default=2 ;;                         # one a part
  *) default=$((gpus > 0 ? gpus : 2)) ;;
esac
NPROC=${NPROC:-$default}
case $NPROC in 0* | *[!0-9]*) echo "run.sh: NPROC must be a number above 0, not '$NPROC'" >&2 && exit 2 ;; esac
cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > NPROC ? cores / NPROC : 1))}
export MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TRIM_THRESHOLD_=1073741824 # each step reuses the memory of the last

# Refuse bad options here, in one line: under torchrun each process prints it, and torchrun a report around it
if [ $# -gt 0 ] || [ -n "$asked" ] || [ ! -w . ]; then
  check='import os, runpy, sys; del sys.argv[0]; sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0])["parse_args"](); sys.exit(100)'
  LOCAL_RANK=0 LOCAL_WORLD_SIZE=$NPROC WORLD_SIZE=$NPROC python -c "$check" "$here/$script" "$@" || code=$?
  if [ "${code:-0}" != 100 ]; then exit "${code:-0}"; fi
fi

exec torchrun --standalone --nproc-per-node="$NPROC" "$here/$script" "$@"
