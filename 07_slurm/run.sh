#!/usr/bin/env bash
# Train on the nodes of a Slurm job, in one process a GPU, or in two a node on the CPU; bash submits what sbatch runs:
#   sbatch 07_slurm/run.sh
#   bash 07_slurm/run.sh --epochs 5 --checkpoint run1.pt
# Check a new cluster before you train on it, with this same script:
#   SCRIPT=04_ddp_torchrun/selftest.py sbatch 07_slurm/run.sh
# Let srun start the processes, without torchrun:
#   LAUNCHER=srun bash 07_slurm/run.sh
# Stopped by preemption or before its time is up, the job saves, is queued again and goes on. It ends with 0 when all
# epochs are done, with 1 when it failed, with 2 when an option was refused, with 75 when it could not be queued again.
#SBATCH --job-name=mnist
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=USR1@120
#SBATCH --ntasks-per-node=1
#SBATCH --nodes=2  # EDIT
#SBATCH --cpus-per-task=2  # EDIT: cores of each node
#SBATCH --mem=3G  # EDIT: memory of each node
#SBATCH --time=01:00:00  # EDIT: the signal comes 120 s before its end
##SBATCH --gpus-per-node=4  # EDIT: with one # where there are GPUs
##SBATCH --partition=gpu  # EDIT
##SBATCH --account=project  # EDIT
set -euo pipefail
# module load python cuda  # EDIT
# . "$HOME/venv/bin/activate"  # EDIT
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
if [ ! -e "$here/train.py" ]; then # Slurm runs a copy, and knows where it was, with which arguments
  command=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *Command=//p')
  here=${command%" $*"}
  here=${here%/*}
fi

has_torch='import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)'
if ! python -c "$has_torch" 2>/dev/null; then
  requirements=$here/requirements.txt # beside a copy; in the repository, one level up
  [ -f "$requirements" ] || requirements=${here%/*}/requirements.txt
  echo "run.sh: no torch for python; run: python3 -m venv .venv && . .venv/bin/activate &&" \
    "pip install -r '$requirements'" >&2
  exit 1
fi

script=${SCRIPT:-$here/train.py}
gpus=0
if command -v nvidia-smi >/dev/null || [ -e /dev/nvidiactl ] || [ -e /dev/kfd ]; then
  gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
fi
NPROC=${NPROC:-$((gpus > 0 ? gpus : 2))}
case $NPROC in 0* | *[!0-9]*) echo "run.sh: NPROC must be a number above 0, not '$NPROC'" >&2 && exit 2 ;; esac
LAUNCHER=${LAUNCHER:-torchrun}
case $LAUNCHER in torchrun | srun) ;; *) echo "run.sh: LAUNCHER must be torchrun or srun" >&2 && exit 2 ;; esac

# Refuse bad options here, in one line, before the job waits for its turn, or before all of its processes say so
check='import os, runpy, sys; del sys.argv[0]; sys.path[0] = os.path.dirname(sys.argv[0])
args = runpy.run_path(sys.argv[0])["parse_args"](); print(getattr(args, "checkpoint", "")); sys.exit(100)'
elsewhere=() # the GPUs are on the nodes, not where the job is submitted
[ -n "${SLURM_JOB_ID:-}" ] || elsewhere=(--device cpu)
checkpoint=$(LOCAL_RANK=0 LOCAL_WORLD_SIZE=$NPROC python -c "$check" "$script" "$@" "${elsewhere[@]}") || code=$?
if [ "${code:-0}" != 100 ]; then
  [ -z "$checkpoint" ] || echo "$checkpoint" # --help
  exit "${code:-0}"
fi

# torchrun; but a signal is no failure, so it ends with a code of its own and without a traceback
torchrun='import sys
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.run import main
try: main()
except SignalException: sys.exit(75)'

if [ -n "${SLURM_JOB_ID:-}" ]; then
  trap : TERM # sent to all of a job that is to end: this shell waits for the processes, which save
  cores=${SLURM_CPUS_PER_TASK:-$SLURM_CPUS_ON_NODE}
  share=$((cores > NPROC ? cores / NPROC : 1)) # of a process
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$share}
  export MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TRIM_THRESHOLD_=1073741824 # each step reuses the memory of the last
  hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
  export MASTER_ADDR=${hosts%%$'\n'*} # where rank 0 is, or the rendezvous
  export MASTER_PORT=${MASTER_PORT:-$((10000 + SLURM_JOB_ID % 20000))} # below those that systems pick from
  nodes=$SLURM_JOB_NUM_NODES
  if [ "$LAUNCHER" = srun ]; then # a task is a process
    launch=(--ntasks="$((nodes * NPROC))" --ntasks-per-node="$NPROC" --cpus-per-task="$share")
    if [ "$NPROC" -gt "$cores" ]; then launch+=(--overcommit); fi
    launch+=(python)
  else # a task is a node's torchrun, which starts the processes
    launch=(--ntasks="$nodes" --ntasks-per-node=1 --cpus-per-task="$cores" python -c "$torchrun")
    launch+=(--nnodes="$nodes" --nproc-per-node="$NPROC" --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID")
    launch+=(--rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" --signals-to-handle="SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1")
    launch+=(--shutdown-timeout=100) # seconds to save in, fewer than --signal gives
  fi
  echo "job $SLURM_JOB_ID, SLURM_RESTART_COUNT=${SLURM_RESTART_COUNT:-0}: NPROC=$NPROC on each of" \
    "$SLURM_JOB_NODELIST, which meet at $MASTER_ADDR:$MASTER_PORT"
  look() { stat -c "%i %y" "$checkpoint" 2>/dev/null || true; }
  before=$(look)
  code=0
  srun --kill-on-bad-exit=1 "${launch[@]}" "$script" "$@" || code=$?
  if [ "$code" = 0 ]; then exit 0; fi

  # Stopped or failed? Exit codes do not tell, as srun ends the others when one is gone. But a stop leaves a checkpoint,
  # and where one has all epochs, only the weights' file can lack. One from before this start says nothing of its end.
  work_is_left='import sys, torch
state = torch.load(sys.argv[1], mmap=True, weights_only=True)
sys.exit(not (state.get("stopped") or state["place"]["epoch"] > state["run"]["--epochs"]))'
  job=$(scontrol show job "$SLURM_JOB_ID")
  if [ "$(look)" != "$before" ] && python -c "$work_is_left" "$checkpoint"; then
    stopped=1
  elif [[ $job = *" PreemptTime="[0-9]* ]]; then # before there was anything to save
    stopped=1
  fi
  if [ -z "${stopped:-}" ]; then exit $((code > 2 ? 1 : code)); fi
  if [[ $job = *"JobState=RUNNING"* && $job = *"BatchFlag=1"* ]]; then
    echo "job $SLURM_JOB_ID is queued again, and goes on when its turn comes"
    scontrol requeue "$SLURM_JOB_ID" || echo "run.sh: not queued again; the same command goes on" >&2
  fi
  exit 75
fi

if ! command -v sbatch >/dev/null; then
  echo "run.sh: no sbatch here, so this is no Slurm cluster; on one machine: bash 06_checkpointing/run.sh" >&2
  exit 1
fi
exec sbatch "$here/run.sh" "$@"
