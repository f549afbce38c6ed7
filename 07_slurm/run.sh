#!/usr/bin/env bash
# From the repository's root: sbatch 07_slurm/run.sh --epochs 5
#SBATCH --job-name=mnist --output=%x-%j.log --open-mode=append
#SBATCH --nodes=2 # EDIT
#SBATCH --ntasks-per-node=1 # torchrun starts one process per GPU
#SBATCH --cpus-per-task=16 # EDIT: cores of each node
#SBATCH --gpus-per-node=4 # EDIT: or --gres=gpu:4; no GPUs: delete this line, NPROC=2 sbatch ...
#SBATCH --time=01:00:00 # EDIT
#SBATCH --requeue
#SBATCH --signal=TERM@120 # seconds before the time limit: save and end
# module load python; . .venv/bin/activate # EDIT, and delete the first #
set -eu
job=$SLURM_JOB_ID run=${RUN-run} # RUN=name sbatch ...: name.pt, name-best.pt, ...; RUN=: no files
if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then # sbatch --array=1-3: three runs
  n=$SLURM_ARRAY_TASK_ID job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID run=${run:+$run$n}
  rates=(- 0.2 0.4 0.6) && set -- "$@" --lr "${rates[n]}" # EDIT: - is index 0, unused
fi
files=(${run:+--checkpoint "$run.pt" --best "$run-best.pt" --output "$run-last.pt"})
echo "job $job: $*"
case " $* " in *" --checkpoint"[=\ ]*) echo "use RUN=name" && exit 2 ;; esac # $run.pt is read below
saved() { find -L "$run.pt" \( -type f -name '*.pt' -o -name .metadata \) -printf '%T@\n' | sort; }
before=$(saved 2>/dev/null) # when the checkpoint was written: a file, or a folder of fsdp.py
address=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=110 # seconds to save; before torch 2.12 it is 30
trap '' TERM # this shell waits for srun

srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" torchrun \
  --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node="${NPROC:-gpu}" --rdzv-backend=c10d \
  --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$address:$((10000 + SLURM_JOB_ID % 20000))" \
  "${SCRIPT:-07_slurm/train.py}" "${files[@]}" "$@" && exit || code=$?

if [ "$(saved 2>/dev/null)" != "$before" ]; then # it ended early, after a save
  state=$(squeue --noheader --job="$job" --format=%T || echo unknown)
  if [ "$state" = RUNNING ]; then # neither cancelled, nor requeued by Slurm
    echo "requeueing job $job"
    scontrol requeue "$job" || state=unknown
  fi
  if [ "$state" = unknown ]; then echo "not requeued: submit the same command again"; fi
fi
exit "$code"
