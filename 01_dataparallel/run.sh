#!/usr/bin/env bash
# One process, on all GPUs of this machine or on the CPU:
#   bash 01_dataparallel/run.sh
#   bash 01_dataparallel/run.sh --epochs 5 --batch-size 256
#   CUDA_VISIBLE_DEVICES=0 bash 01_dataparallel/run.sh --amp
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
python -c 'import importlib.util as i; raise SystemExit(not i.find_spec("torch"))' ||
  { echo "run.sh: PyTorch is not installed for this Python: pip install -r requirements.txt" >&2 && exit 1; }
export MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TRIM_THRESHOLD_=1073741824 # glibc: reuse freed memory

exec python "$here/train.py" "$@"
