#!/usr/bin/env bash
# Train in one process a GPU, or in two on the CPU, on this machine:
#   bash 02_ddp_spawn/run.sh
#   bash 02_ddp_spawn/run.sh --epochs 5 --amp
#   NPROC=4 bash 02_ddp_spawn/run.sh
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
export MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TRIM_THRESHOLD_=1073741824 # each step reuses the memory of the last
# OMP_NUM_THREADS, cores ÷ processes by default, is set by the script
exec python "$here/train.py" ${NPROC:+--nprocs="$NPROC"} "$@"
