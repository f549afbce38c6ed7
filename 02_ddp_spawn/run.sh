#!/usr/bin/env bash
# One process per GPU of this machine, or two on the CPU, spawned by train.py:
#   bash 02_ddp_spawn/run.sh
#   bash 02_ddp_spawn/run.sh --nprocs 4 --epochs 5 --amp
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
python -c 'import importlib.util as i; raise SystemExit(not i.find_spec("torch"))' ||
  { echo "run.sh: PyTorch is not installed for this Python: pip install -r requirements.txt" >&2 && exit 1; }
export MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TRIM_THRESHOLD_=1073741824 # glibc: reuse freed memory

exec python "$here/train.py" ${NPROC:+--nprocs="$NPROC"} "$@"
