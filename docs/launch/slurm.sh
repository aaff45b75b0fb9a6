#!/bin/bash
# A run on 1 to 4 hosts of 8 GPUs each, under Slurm: `sbatch slurm.sh`. What it is good for: docs/recovery.md.

#SBATCH --job-name=fullshard
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
# A lost host does not end the job.
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

# With the first host this script is lost, and Slurm would keep the job without it: then the others have it started again.
srun --overlap --no-kill --kill-on-bad-exit=0 --wait=0 --gpus-per-node=0 bash -c '
    while sleep 30; do
        hosts=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%N) && [ -n "$hosts" ] || continue
        scontrol show hostnames "$hosts" | grep --quiet --line-regexp "$0" || scontrol requeue "$SLURM_JOB_ID"
    done' "$first" &

# SIGTERM goes on to every host's torchrun: the run saves and ends. Then the job is started again. (It goes by scancel,
# since an srun that gets SIGTERM kills what it has started.)
stopped=
trap 'stopped=yes; scancel --signal=TERM "$SLURM_JOB_ID"' TERM
wait "$ranks"
code=$?
if [ -n "$stopped" ]; then
    wait "$ranks"
    scontrol requeue "$SLURM_JOB_ID"
    code=75
fi
exit "$code"
