#!/usr/bin/env bash
# See it work: two 'nodes' on this machine, with half of its GPUs, or one process on the CPU, each:
#   bash 03_ddp_multinode_spawn/run.sh
#   NPROC=2 bash 03_ddp_multinode_spawn/run.sh --epochs 5
# Train on two machines, with the address of the first; the second command on the other one:
#   NODE_RANK=0 MASTER_ADDR=10.0.0.1 bash 03_ddp_multinode_spawn/run.sh
#   NODE_RANK=1 MASTER_ADDR=10.0.0.1 bash 03_ddp_multinode_spawn/run.sh
# On three, of which the first has eight GPUs and the others have two:
#   NODE_RANK=0 NNODES=3 NPROC=8,2,2 MASTER_ADDR=10.0.0.1 bash 03_ddp_multinode_spawn/run.sh
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

if [ -z "${NODE_RANK:-}" ]; then # both nodes are here, each an instance of this script
  if [ -n "${MASTER_ADDR:-}" ]; then echo "run.sh: set NODE_RANK to 0, 1, ... on the nodes" >&2 && exit 2; fi
  gpus=0
  if command -v nvidia-smi >/dev/null || [ -e /dev/nvidiactl ] || [ -e /dev/kfd ]; then
    gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
  fi
  if [ "$gpus" -lt 2 ]; then set -- --device=cpu "$@"; fi
  half=$((gpus / 2))
  export NPROC=${NPROC:-$((half > 0 ? half : 1))}

  # Refuse bad options here, in one line and not in two
  check='import os, runpy, sys; del sys.argv[0]; sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0])["parse_args"](); sys.exit(100)'
  if [ $# -gt 1 ] || [ "$NPROC" != 1 ] || [ ! -w . ]; then
    python -c "$check" "$here/train.py" --nodes=2 --gpus="$NPROC" "$@" || code=$?
    if [ "${code:-0}" != 100 ]; then exit "${code:-0}"; fi
  fi

  cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN) processes=$((2 * ${NPROC%%,*}))
  free_port='import socket; print(socket.create_server(("127.0.0.1", 0)).getsockname()[1])'
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > processes ? cores / processes : 1))}
  export NNODES=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=${MASTER_PORT:-$(python -c "$free_port")}
  IFS=, read -ra devices <<<"${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $((gpus - 1)))}"
  for node in 0 1; do
    (
      trap - INT # or the nodes, being in the background, would ignore Ctrl-C
      export NODE_RANK=$node
      IFS=, # joins what follows
      if [ "$half" -gt 0 ]; then export CUDA_VISIBLE_DEVICES="${devices[*]:node*half:half}"; fi
      exec bash "${BASH_SOURCE[0]}" "$@"
    ) &
    nodes+=($!)
  done
  trap 'kill "${nodes[@]}" 2>/dev/null || true' INT TERM
  code=0
  for node in "${nodes[@]}"; do wait "$node" || code=$?; done
  exit "$code"
fi
export MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TRIM_THRESHOLD_=1073741824 # each step reuses the memory of the last
# OMP_NUM_THREADS, cores ÷ processes by default, is set by the script
options=(--nodes="${NNODES:-2}" ${NPROC:+--gpus="$NPROC"} ${START_TIMEOUT:+--start-timeout="$START_TIMEOUT"})
exec python "$here/train.py" "${options[@]}" "$@"
