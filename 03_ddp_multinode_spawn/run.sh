#!/usr/bin/env bash
# Two machines, one process per GPU or two on the CPU; MASTER_ADDR is an address of the first:
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 bash 03_ddp_multinode_spawn/run.sh
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=10.0.0.1 bash 03_ddp_multinode_spawn/run.sh
# One machine:
#   bash 03_ddp_multinode_spawn/run.sh --epochs 5
set -eu
exec python "$(dirname "$0")/train.py" --nodes "${NNODES:-1}" --node-rank "${NODE_RANK:-0}" \
  --master-addr "${MASTER_ADDR:-127.0.0.1}" --master-port "${MASTER_PORT:-29500}" "$@"
