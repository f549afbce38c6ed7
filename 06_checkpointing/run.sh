#!/usr/bin/env bash
# One machine (Ctrl-C stops it, the same command resumes it); one or two (elastic, on each of them):
#   bash 06_checkpointing/run.sh --checkpoint run1.pt --save-every 50
#   NNODES=1:2 RDZV_ENDPOINT=10.0.0.1:29400 bash 06_checkpointing/run.sh --checkpoint /shared/run1.pt
# Exit code: 0 done, 75 after a signal to this script, 1 failed, 2 wrong option
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
case " $* " in *" --help "* | *" -h "*) exec python "$here/train.py" --help ;; esac
gpus=$(python -c 'import torch; print(torch.cuda.device_count())' 2>/dev/null) ||
  { echo "run.sh: PyTorch is not installed for this Python: pip install -r requirements.txt" >&2 && exit 1; }
NPROC=${NPROC:-$((gpus > 0 ? gpus : 2))} cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > NPROC ? cores / NPROC : 1))}
export MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TRIM_THRESHOLD_=1073741824 # glibc: reuse freed memory
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # restarted processes must not find their old addresses
LOCAL_WORLD_SIZE=$NPROC python "$here/train.py" --check "$@" >/dev/null || exit # reports an error once
set -m # Ctrl-C reaches only this shell, which sends torchrun one SIGTERM
if [ "${NNODES:-1}${RDZV_ENDPOINT:-}" != 1 ]; then
  limit=${START_TIMEOUT:-300} endpoint=${RDZV_ENDPOINT:?set it to an address and a port, such as 10.0.0.1:29400}
  echo "run.sh: waiting up to $limit s for nodes at $endpoint: is this address right, its port open (nc -zv)?" >&2
  case " $(hostname -I 2>/dev/null) " in *" ${endpoint%:*} "*) is_host=,is_host=true ;; esac
  torchrun --nnodes="${NNODES:-1:2}" --nproc-per-node="$NPROC" --max-restarts="${MAX_RESTARTS:-3}" \
    --rdzv-backend=c10d --rdzv-endpoint="$endpoint" --rdzv-id="${RDZV_ID:-train}" \
    --rdzv-conf="join_timeout=$limit,read_timeout=$limit,last_call_timeout=5${is_host:-}" "$here/train.py" "$@" &
else
  torchrun --standalone --nproc-per-node="$NPROC" --max-restarts="${MAX_RESTARTS:-3}" "$here/train.py" "$@" &
fi
trap 'stopped=75; kill -TERM $! 2>/dev/null || true' INT TERM HUP
while wait $! && code=0 || code=$?; do kill -0 $! 2>/dev/null || break; done # a signal ends wait early
[ -z "${stopped:-}" ] || echo "run.sh: stopped; rerun the same command to resume" >&2
exit "${stopped:-$code}"
