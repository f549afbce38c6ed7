#!/usr/bin/env bash
# Build the image if need be, and train in a container: one process a GPU, or two on the CPU. This folder is its volume:
#   bash 08_docker/run.sh
#   bash 08_docker/run.sh --epochs 5 --checkpoint run1.pt
#   DATA_DIR=/datasets/mnist bash 08_docker/run.sh
# Train on two machines; on the other one NODE_RANK=1 and the same MASTER_ADDR, that of the first:
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 bash 08_docker/run.sh
# Build on another base, or with a package index of one's own:
#   BUILD_OPTIONS="--secret id=pip.conf,src=pip.conf" bash 08_docker/run.sh
# It ends with 0 when all epochs are done, with 75 when a signal stopped it, with 1 when it failed.
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
case " $* " in
  *" --help "* | *" -h "*) # needs no engine
    sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    python3 "$here/train.py" --help 2>/dev/null || echo "The options are those of 06_checkpointing/train.py."
    exit 0
    ;;
esac
if ! command -v docker >/dev/null || ! docker info >/dev/null 2>&1; then
  echo "run.sh: no container engine answers (\`docker info\`): install Docker, start it, join its group" >&2
  exit 1
fi

image=${IMAGE:-mnist-ddp}
quiet=()
if docker image inspect "$image" >/dev/null 2>&1; then quiet=(--quiet); fi # all but the code comes from the cache
# shellcheck disable=SC2086 # several options
DOCKER_BUILDKIT=1 docker build "${quiet[@]}" ${BUILD_OPTIONS:-} --tag "$image" \
  --file "$here/Dockerfile" "${here%/*}" >/dev/null

options=(--rm --init)         # gone afterwards; process 1 passes signals on and collects what is left
options+=(--stop-timeout=60)  # seconds that docker stop waits for the checkpoint; else 10
options+=(--shm-size=1g)      # for what DataLoader's workers and NCCL pass in shared memory; else 64 MB
options+=(--read-only --tmpfs /tmp)
options+=(--user "$(id -u):$(id -g)" --mount "type=bind,source=$PWD,target=/work")
if command -v nvidia-smi >/dev/null; then options+=(--gpus all); fi
if [ "${NNODES:-1}${RDZV_ENDPOINT:-}" != 1 ]; then options+=(--network host); fi
if [ -t 0 ] && [ -t 1 ]; then options+=(--interactive --tty); fi # for Ctrl-C and the progress bar
for name in NPROC OMP_NUM_THREADS NNODES NODE_RANK MASTER_ADDR MASTER_PORT RDZV_ENDPOINT RDZV_ID START_TIMEOUT \
  MAX_RESTARTS GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME NCCL_DEBUG; do
  options+=(--env "$name") # if it is set here
done
data=()
if [ -n "${DATA_DIR:-}" ]; then
  options+=(--mount "type=bind,source=$(cd -- "$DATA_DIR" && pwd),target=/data,readonly")
  data=(--data-dir /data)
fi
exec docker run "${options[@]}" "$image" "${data[@]}" "$@"
