#!/usr/bin/env bash
# Build the image and train in a container; the current directory is its volume /work. Run the same
# command again to resume:
#   bash 08_docker/run.sh --epochs 5 --checkpoint docker.ckpt
# Two machines, with NODE_RANK=1 on the second; MASTER_ADDR is an address of the first:
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 bash 08_docker/run.sh
set -eu
docker build --tag mnist-ddp --file "$(dirname "$0")/Dockerfile" "$(dirname "$0")/.."
gpus=""
if command -v nvidia-smi >/dev/null; then gpus=--gpus=all; fi

# one process per GPU that the container sees, or two on the CPU
count='import torch; print(torch.cuda.device_count() or 2)'
# shellcheck disable=SC2086 # $gpus is one word or none
NPROC=${NPROC:-$(docker run --rm $gpus mnist-ddp python3 -c "$count")}
# shellcheck disable=SC2086
if [ "${NNODES:-1}" = 1 ]; then
  exec docker run --rm --init --shm-size=1g $gpus --env OMP_NUM_THREADS \
    --user "$(id -u):$(id -g)" --volume "$PWD:/work" mnist-ddp \
    torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node="$NPROC" \
    --max-restarts=3 /app/train.py "$@"
fi
# shellcheck disable=SC2086
exec docker run --rm --init --shm-size=1g $gpus --env OMP_NUM_THREADS \
  --env GLOO_SOCKET_IFNAME --env NCCL_SOCKET_IFNAME --network=host \
  --user "$(id -u):$(id -g)" --volume "$PWD:/work" mnist-ddp \
  torchrun --nnodes="$NNODES" --node-rank="$NODE_RANK" --nproc-per-node="$NPROC" \
  --master-addr="$MASTER_ADDR" --master-port="${MASTER_PORT:-29500}" /app/train.py "$@"
