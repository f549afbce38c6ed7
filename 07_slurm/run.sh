#!/usr/bin/env bash
# Submit a job, one process per GPU of each node or two on the CPU:
#   sbatch 07_slurm/run.sh --epochs 5
# Check a new cluster first; start one Slurm task per process, without torchrun:
#   SCRIPT=04_ddp_torchrun/selftest.py sbatch 07_slurm/run.sh
#   LAUNCHER=srun sbatch 07_slurm/run.sh
# Preempted or 120 s before its time limit, the job saves, is requeued and resumes.
#SBATCH --job-name=mnist
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=TERM@120
#SBATCH --ntasks-per-node=1
#SBATCH --nodes=2  # EDIT
#SBATCH --cpus-per-task=2  # EDIT: cores of each node
#SBATCH --mem=3G  # EDIT: memory of each node
#SBATCH --time=01:00:00  # EDIT
##SBATCH --gpus-per-node=4  # EDIT: one # where there are GPUs
##SBATCH --partition=gpu  # EDIT
##SBATCH --account=project  # EDIT
set -euo pipefail
# module load python cuda  # EDIT
# . "$HOME/venv/bin/activate"  # EDIT
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
if [ -n "${SLURM_JOB_ID:-}" ] && [ ! -e "$here/train.py" ]; then # Slurm runs a copy of this file
  command=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *Command=//p')
  here=$(dirname -- "${command%" $*"}")
fi
script=${SCRIPT:-$here/train.py}
case " $* " in *" --help "* | *" -h "*) exec python "$script" --help ;; esac
[ -n "${SLURM_JOB_ID:-}" ] || exec sbatch "$here/run.sh" "$@" # `bash run.sh` submits it
gpus=$(python -c 'import torch; print(torch.cuda.device_count())' 2>/dev/null) ||
  { echo "run.sh: PyTorch is not installed for this Python: pip install -r requirements.txt" >&2 && exit 1; }
NPROC=${NPROC:-$((gpus > 0 ? gpus : 2))} cores=${SLURM_CPUS_PER_TASK:-${SLURM_JOB_CPUS_PER_NODE%%[(,]*}}
LOCAL_WORLD_SIZE=$NPROC python "$script" --check "$@" >/dev/null || exit # reports an error once
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > NPROC ? cores / NPROC : 1))}
export MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TRIM_THRESHOLD_=1073741824 # glibc: reuse freed memory
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT=${MASTER_PORT:-$((10000 + SLURM_JOB_ID % 20000))}
echo "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST: $NPROC processes per node, connecting to $MASTER_ADDR:$MASTER_PORT"
trap : TERM # this shell waits while the processes save

if [ "${LAUNCHER:-torchrun}" = srun ]; then
  srun --kill-on-bad-exit=1 --ntasks-per-node="$NPROC" --ntasks="$((SLURM_JOB_NUM_NODES * NPROC))" \
    --cpus-per-task="$((cores > NPROC ? cores / NPROC : 1))" python "$script" "$@"
else
  srun --kill-on-bad-exit=1 --ntasks-per-node=1 --cpus-per-task="$cores" torchrun \
    --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node="$NPROC" --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" \
    --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" "$script" "$@"
fi
