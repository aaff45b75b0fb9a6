#!/bin/bash
# A run on 1 to 4 hosts of 8 GPUs each, under Slurm: `sbatch slurm.sh`. What it is good for: docs/recovery.md.

#SBATCH --job-name=fullshard
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
# A lost host does not end the job; if it was the first one, the job is started again.
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --open-mode=append
# Five minutes before the time is up, this script gets SIGTERM.
#SBATCH --signal=B:TERM@300

out=${OUT:-$HOME/runs/a}  # on storage that all hosts share
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # or lost ranks could not be started anew

srun --no-kill --kill-on-bad-exit=0 --wait=0 \
    torchrun --nnodes="1:$SLURM_JOB_NUM_NODES" --nproc-per-node=8 --max-restarts=100 --shutdown-timeout=240 \
    --rdzv-id="$SLURM_JOB_ID" --rdzv-backend=c10d --rdzv-endpoint="$first:29400" \
    -m fullshard.cli train --size xl --batch 128 --accumulate 4 --steps 100000 \
    --out "$out" --checkpoint-every 500 --keep 3 --resume auto &
ranks=$!

# SIGTERM goes on to every rank: the run saves and ends. Then the job is started again.
stopped=
trap 'stopped=yes; kill -TERM "$ranks"' TERM
wait "$ranks"
code=$?
if [ -n "$stopped" ]; then
    wait "$ranks"
    scontrol requeue "$SLURM_JOB_ID"
    code=75
fi
exit "$code"
