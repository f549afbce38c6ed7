#!/usr/bin/env bash
# Two machines, one process per GPU; MASTER_ADDR is an address of the first:
#   NODE_RANK=0 MASTER_ADDR=10.0.0.1 bash 03_ddp_multinode_spawn/run.sh
#   NODE_RANK=1 MASTER_ADDR=10.0.0.1 bash 03_ddp_multinode_spawn/run.sh
# A demonstration without NODE_RANK: two nodes of one process each on this machine, on the CPU:
#   bash 03_ddp_multinode_spawn/run.sh --epochs 5
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
python -c 'import importlib.util as i; raise SystemExit(not i.find_spec("torch"))' ||
  { echo "run.sh: PyTorch is not installed for this Python: pip install -r requirements.txt" >&2 && exit 1; }
export MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TRIM_THRESHOLD_=1073741824 # glibc: reuse freed memory

if [ -n "${NODE_RANK:-}" ]; then
  exec python "$here/train.py" --nodes="${NNODES:-2}" --node-rank="$NODE_RANK" --gpus="${NPROC:-all}" \
    --master-addr="${MASTER_ADDR:?set it to an address of node 0}" --master-port="${MASTER_PORT:-29500}" \
    --start-timeout="${START_TIMEOUT:-300}" "$@"
fi
case " $* " in *" --help "* | *" -h "*) exec python "$here/train.py" --help ;; esac
python "$here/train.py" --check --nodes=2 --gpus=1 "$@" || exit # reports a wrong option once
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} MASTER_PORT=${MASTER_PORT:-$((20000 + RANDOM % 10000))}
python "$here/train.py" --nodes=2 --gpus=1 --node-rank=0 --device=cpu "$@" & node0=$!
python "$here/train.py" --nodes=2 --gpus=1 --node-rank=1 --device=cpu "$@" & node1=$!
trap 'kill "$node0" "$node1" 2>/dev/null || true' EXIT
wait "$node0" && wait "$node1"
