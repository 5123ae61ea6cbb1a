#!/bin/bash
# Train on SLURM: one node or several, in a container or not; before the time is over it stops with a checkpoint and queues
# again, until the training is finished.
#
#   sbatch jobs/slurm.sh templates/lora_finetune.py --train_file chats.jsonl
#   sbatch --nodes 4 --gpus-per-node 8 --time 12:00:00 jobs/slurm.sh templates/pretrain.py --train_file corpus/
#   CONFIG=multi_node_hsdp sbatch --nodes 4 jobs/slurm.sh templates/pretrain.py ...
#   IMAGE=templates.sif sbatch jobs/slurm.sh templates/pretrain.py ...    # Apptainer: `apptainer build` it from the image
#   IMAGE=registry/templates sbatch jobs/slurm.sh ...                     # anything else: SLURM's pyxis
#
# Submit it in the folder of the templates, on a file system that all nodes share. The run is in runs/<job name>-<job id>,
# the same one each time the job is queued again. Without a container, activate the virtual environment first.
#
#SBATCH --job-name=train
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
# To the training, not to this script, so many seconds before the time is over: enough for a step and a checkpoint.
#SBATCH --signal=USR1@300
# After a node's failure or a preemption SLURM itself queues the job again.
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

set -euo pipefail

run=${RUN_DIR:-runs/$SLURM_JOB_NAME-$SLURM_JOB_ID}
for argument in "$@"; do
    case $argument in --output_dir | --output_dir=*) echo "say RUN_DIR=... in place of --output_dir" >&2; exit 2 ;; esac
done

processes=${PROCESSES_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}
main_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
launch=(
    --config_file "accelerate_configs/${CONFIG:-multi_node_ddp}.yaml"
    --num_machines "$SLURM_NNODES" --num_processes "$((SLURM_NNODES * processes))"
    --main_process_ip "$main_node" --main_process_port "${MAIN_PORT:-$((20000 + SLURM_JOB_ID % 10000))}"
)
container=() srun_container=()
case ${IMAGE:-} in
    "") ;;
    *.sif) container=(apptainer exec --nv --bind "$PWD" --pwd "$PWD" "$IMAGE") ;;
    *) srun_container=("--container-image=$IMAGE" "--container-mounts=$PWD" "--container-workdir=$PWD") ;;
esac

# Signals are for the training. A machine that is left alone is ended after two minutes.
trap : TERM USR1
code=0
# shellcheck disable=SC2016  # what stands in single quotes is for the nodes
srun --ntasks-per-node=1 --wait=120 "${srun_container[@]}" \
    sh -c 'trap "" TERM USR1; exec "$@"' sh "${container[@]}" \
    sh -c 'exec jobs/run.sh accelerate launch --machine_rank "$SLURM_NODEID" "$@"' sh \
    "${launch[@]}" "$@" --output_dir "$run" || code=$?

# Only for the time that is over: who cancels a job does not want it back, and preempted ones come back by themselves.
if [ "$code" -ne 0 ] && grep -q '"cause": "stopped by SIGUSR1' "$run/exit.json" 2>/dev/null; then
    echo "the time is over: queued again, from the last checkpoint in $run"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
