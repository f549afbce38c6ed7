#!/usr/bin/env bash
# From the repository's root: sbatch 07_slurm/run.sh --epochs 5
#SBATCH --job-name=mnist --output=%x-%j.log --open-mode=append # one log, also when requeued
#SBATCH --nodes=2 --gpus-per-node=4 --cpus-per-task=32 --time=01:00:00 # EDIT
#SBATCH --ntasks-per-node=1 # torchrun starts one process per GPU
#SBATCH --requeue --signal=TERM@120 # TERM 120 s before the limit: time to save
# module load python; . .venv/bin/activate # EDIT, and delete the first #
run=${RUN:-mnist-$SLURM_JOB_ID} # names the files: a requeued job keeps its ID
job=$SLURM_JOB_ID
if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then # one element of an array
  job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
  run=${run}_$SLURM_ARRAY_TASK_ID
fi
echo "run $run: ${SCRIPT:-07_slurm/train.py} $*" # a site may not pass RUN and SCRIPT on
written() { stat -Lc %Y "$run.ckpt" 2>/dev/null; }
before=$(written)
case " $* " in *" --checkpoint"[=\ ]*) echo "set RUN=name instead of --checkpoint" && exit 2 ;; esac
address=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=110 # seconds until torchrun kills (torch 2.11 or older: 30)
trap '' TERM # this shell must outlive the signal: it waits for srun

# one torchrun per node; they meet at this address, which numbers them; if one fails, all end
srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" torchrun \
  --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node="${NPROC:-gpu}" --rdzv-backend=c10d \
  --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$address:$((10000 + SLURM_JOB_ID % 20000))" \
  "${SCRIPT:-07_slurm/train.py}" --checkpoint "$run.ckpt" --output "$run.pt" "$@" && exit

# stopped or failed: requeue if $run.ckpt is new (no endless loop) and nobody cancelled it
if [ "$(written)" != "$before" ] && [ "$(squeue -h -j "$job" -o %T)" = RUNNING ]; then
  scontrol requeue "$job"
fi
exit 1
