#!/usr/bin/env bash
# One machine:              bash 04_ddp_torchrun/run.sh --epochs 5 --amp
# Check a machine/cluster:  bash 04_ddp_torchrun/run.sh selftest.py
# Two machines:             NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 bash 04_ddp_torchrun/run.sh
# Elastic, on all of them:  NNODES=1:2 RDZV_ENDPOINT=10.0.0.1:29400 bash 04_ddp_torchrun/run.sh
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
script=train.py limit=${START_TIMEOUT:-300} # seconds to wait for all nodes
case "${1:-}" in *.py) script=$1 && shift ;; esac
case " $* " in *" --help "* | *" -h "*) exec python "$here/$script" --help ;; esac
python -c 'import importlib.util as i; raise SystemExit(not i.find_spec("torch"))' ||
  { echo "run.sh: PyTorch is not installed for this Python: pip install -r requirements.txt" >&2 && exit 1; }
gpus=$(LOCAL_WORLD_SIZE=${NPROC:-1} python "$here/$script" --check "$@") || exit # reports a wrong option once
NPROC=${NPROC:-$((gpus > 0 ? gpus : 2))} cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > NPROC ? cores / NPROC : 1))}
export MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TRIM_THRESHOLD_=1073741824 # glibc: reuse freed memory
[ "${NNODES:-1}" = 1 ] || echo "run.sh: waiting up to $limit s for $NNODES nodes at" \
  "${RDZV_ENDPOINT:-${MASTER_ADDR:?set it to an address of node 0}:${MASTER_PORT:-29500}}: is this address right, its port open (nc -zv)?" >&2
if [ -n "${RDZV_ENDPOINT:-}" ]; then
  case " $(hostname -I 2>/dev/null) " in *" ${RDZV_ENDPOINT%:*} "*) is_host=,is_host=true ;; esac
  export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # restarted processes must not find their old addresses
  exec torchrun --nnodes="${NNODES:-1}" --nproc-per-node="$NPROC" --max-restarts="${MAX_RESTARTS:-0}" \
    --rdzv-backend=c10d --rdzv-endpoint="$RDZV_ENDPOINT" --rdzv-id="${RDZV_ID:-train}" \
    --rdzv-conf="join_timeout=$limit,read_timeout=$limit,last_call_timeout=5${is_host:-}" "$here/$script" "$@"
elif [ "${NNODES:-1}${NODE_RANK:-}" != 1 ]; then
  if [ "${MAX_RESTARTS:-0}" != 0 ]; then echo "run.sh: MAX_RESTARTS needs RDZV_ENDPOINT" >&2 && exit 2; fi
  exec torchrun --nnodes="${NNODES:?set it to the number of nodes}" --node-rank="${NODE_RANK:?set it to 0, 1, ...}" \
    --nproc-per-node="$NPROC" --master-addr="${MASTER_ADDR:?}" --master-port="${MASTER_PORT:-29500}" --rdzv-conf="timeout=$limit" "$here/$script" "$@"
fi
exec torchrun --standalone --nproc-per-node="$NPROC" "$here/$script" "$@"
