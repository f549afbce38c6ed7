#!/usr/bin/env bash
# What a container runs: torchrun, on one node or as one of several, as the environment says (see run.sh)
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)

gpus=0
if [ -e /dev/nvidiactl ] || [ -e /dev/kfd ]; then
  gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
fi
NPROC=${NPROC:-$((gpus > 0 ? gpus : 2))}
case $NPROC in 0* | *[!0-9]*) echo "entrypoint.sh: NPROC must be a number above 0, not '$NPROC'" >&2 && exit 2 ;; esac
cores=$(nproc)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > NPROC ? cores / NPROC : 1))}
export MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TRIM_THRESHOLD_=1073741824 # each step reuses the memory of the last

# Refuse bad options here, in one line: under torchrun each process prints it, and torchrun a report around it
check='import os, runpy, sys; del sys.argv[0]; sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0])["parse_args"](); sys.exit(100)'
LOCAL_RANK=0 LOCAL_WORLD_SIZE=$NPROC python -c "$check" "$here/train.py" "$@" || code=$?
if [ "${code:-0}" != 100 ]; then exit "${code:-0}"; fi

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
exec "${launch[@]}" --nproc-per-node="$NPROC" "$here/train.py" "$@"
