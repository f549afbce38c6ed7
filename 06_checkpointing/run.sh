#!/usr/bin/env bash
# Train in one process a GPU, or in two on the CPU, on this machine; stop it with Ctrl-C, and the same command goes on:
#   bash 06_checkpointing/run.sh
#   bash 06_checkpointing/run.sh --checkpoint run1.pt --save-every 50
#   bash 06_checkpointing/run.sh --resume never
# Train on two machines with a shared disk, on each of them; one that is lost is done without, until it comes back:
#   NNODES=1:2 RDZV_ENDPOINT=10.0.0.1 bash 06_checkpointing/run.sh --checkpoint /shared/run1.pt
# It ends with 0 when all epochs are done, with 75 when a signal stopped it, with 1 when it failed.
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
NPROC=${NPROC:-$((gpus > 0 ? gpus : 2))}
case $NPROC in 0* | *[!0-9]*) echo "run.sh: NPROC must be a number above 0, not '$NPROC'" >&2 && exit 2 ;; esac
cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > NPROC ? cores / NPROC : 1))}
export MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TRIM_THRESHOLD_=1073741824 # each step reuses the memory of the last

# Refuse bad options here, in one line: under torchrun each process prints it, and torchrun a report around it
if [ $# -gt 0 ] || [ -n "$asked" ] || [ ! -w . ] || [ -e checkpoint.pt ]; then
  check='import os, runpy, sys; del sys.argv[0]; sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0])["parse_args"](); sys.exit(100)'
  LOCAL_RANK=0 LOCAL_WORLD_SIZE=$NPROC python -c "$check" "$here/$script" "$@" || code=$?
  if [ "${code:-0}" != 100 ]; then exit "${code:-0}"; fi
fi

# torchrun; but a signal is no failure, so it ends with a code of its own and without a traceback
torchrun='import sys
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.run import main
try: main()
except SignalException: sys.exit(75)'

launch=(python -c "$torchrun" --standalone)
restarts=3 # of processes that fail; each goes on from the last checkpoint
if [ "${NNODES:-1}${RDZV_ENDPOINT:-}" != 1 ]; then
  launch=(python "$here/join.py") # torchrun on several nodes, within a time limit
  if [ -z "${RDZV_ENDPOINT:-}" ]; then restarts=0; fi # at MASTER_ADDR, processes that start again cannot meet
fi
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # or restarted processes read the addresses of those before them
launch+=(--max-restarts="${MAX_RESTARTS:-$restarts}" --signals-to-handle="SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1")
exec "${launch[@]}" --nproc-per-node="$NPROC" "$here/$script" "$@"
