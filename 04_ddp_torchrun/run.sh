#!/usr/bin/env bash
# Train in one process a GPU, or in two on the CPU, on this machine:
#   bash 04_ddp_torchrun/run.sh
#   bash 04_ddp_torchrun/run.sh --epochs 5 --amp
#   NPROC=4 bash 04_ddp_torchrun/run.sh
# Check the machine, or a whole cluster, before you train on it:
#   bash 04_ddp_torchrun/run.sh selftest.py
# Train on two machines; on the other one NODE_RANK=1 and the same MASTER_ADDR, that of the first:
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 bash 04_ddp_torchrun/run.sh
# The same with ranks as the nodes come, on each of them; one may come later or be lost, and what fails starts again:
#   NNODES=2 RDZV_ENDPOINT=10.0.0.1 bash 04_ddp_torchrun/run.sh
#   NNODES=1:2 MAX_RESTARTS=3 RDZV_ENDPOINT=10.0.0.1 bash 04_ddp_torchrun/run.sh
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
if [ $# -gt 0 ] || [ -n "$asked" ] || [ ! -w . ]; then
  check='import os, runpy, sys; del sys.argv[0]; sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0])["parse_args"](); sys.exit(100)'
  LOCAL_RANK=0 LOCAL_WORLD_SIZE=$NPROC python -c "$check" "$here/$script" "$@" || code=$?
  if [ "${code:-0}" != 100 ]; then exit "${code:-0}"; fi
fi

launch=(torchrun --standalone)
if [ "${NNODES:-1}${RDZV_ENDPOINT:-}" != 1 ]; then launch=(python "$here/join.py"); fi # torchrun, within a time limit
if [[ ${MAX_RESTARTS:-0} != 0 || ${NNODES:-1} = *:* ]]; then
  export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # or restarted processes read the addresses of those before them
  launch+=(--max-restarts="${MAX_RESTARTS:-0}")
fi
exec "${launch[@]}" --nproc-per-node="$NPROC" "$here/$script" "$@"
