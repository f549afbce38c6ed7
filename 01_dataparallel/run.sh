#!/usr/bin/env bash
# Train in one process, on all GPUs or on the CPU:
#   bash 01_dataparallel/run.sh
#   bash 01_dataparallel/run.sh --epochs 5 --batch-size 256 --amp
#   CUDA_VISIBLE_DEVICES=0,1 bash 01_dataparallel/run.sh
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
exec python "$here/train.py" "$@"
