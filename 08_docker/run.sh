#!/usr/bin/env bash
# Build the image and train in a container, one process per GPU or two on the CPU; the current
# directory is its volume:
#   bash 08_docker/run.sh --epochs 5 --checkpoint run1.pt
#   DATA_DIR=/datasets/mnist bash 08_docker/run.sh
# Two machines, with NODE_RANK=1 on the second; MASTER_ADDR is an address of the first:
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 bash 08_docker/run.sh
# Another package index or base image:
#   BUILD_OPTIONS="--secret id=pip.conf,src=pip.conf" bash 08_docker/run.sh
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
docker info >/dev/null 2>&1 ||
  { echo "run.sh: no container engine answers (docker info): install and start Docker, join its group" >&2 && exit 1; }
echo "run.sh: building the image mnist-ddp, which takes minutes the first time" >&2
# shellcheck disable=SC2086 # BUILD_OPTIONS holds several words
DOCKER_BUILDKIT=1 docker build --quiet ${BUILD_OPTIONS:-} --tag mnist-ddp --file "$here/Dockerfile" "$here/.." >/dev/null
case " $* " in *" --help "* | *" -h "*) exec docker run --rm mnist-ddp python /app/train.py --help ;; esac
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
NPROC=${NPROC:-$((gpus > 0 ? gpus : 2))} cores=$(nproc)

options=(--rm --init --stop-timeout=60 --shm-size=1g)       # torchrun needs 30 s; memory for workers and NCCL
options+=(--read-only --tmpfs=/tmp:exec)                    # exec: --compile loads what it has compiled
options+=(--user "$(id -u):$(id -g)" --volume "$PWD:/work") # the files belong to the user, not to root
options+=(--env OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores > NPROC ? cores / NPROC : 1))}")
options+=(--env GLOO_SOCKET_IFNAME --env NCCL_SOCKET_IFNAME --env NCCL_DEBUG) # if they are set
if [ "$gpus" -gt 0 ]; then options+=(--gpus all); fi
if [ -n "${DATA_DIR:-}" ]; then
  options+=(--volume "$(cd -- "$DATA_DIR" && pwd):/data:ro")
  set -- --data-dir /data "$@"
fi
docker run "${options[@]}" mnist-ddp python /app/train.py --check "$@" >/dev/null || exit # reports an error once
if [ -t 0 ] && [ -t 1 ]; then options+=(--interactive --tty); fi # for Ctrl-C and the progress bar

if [ "${NNODES:-1}" = 1 ]; then
  exec docker run "${options[@]}" mnist-ddp \
    torchrun --standalone --nproc-per-node="$NPROC" --max-restarts=3 /app/train.py "$@"
fi
limit=${START_TIMEOUT:-300} address=${MASTER_ADDR:?set it to an address of node 0}
echo "run.sh: waiting up to $limit s for $NNODES nodes at $address: is it right, its port open (nc -zv)?" >&2
exec docker run "${options[@]}" --network=host mnist-ddp \
  torchrun --nnodes="$NNODES" --node-rank="${NODE_RANK:?set it to 0, 1, ...}" --nproc-per-node="$NPROC" \
  --master-addr="$address" --master-port="${MASTER_PORT:-29500}" --rdzv-conf="timeout=$limit" /app/train.py "$@"
