#!/bin/bash
# Train on SLURM, on one node or several, with or without a container. Before the time limit the training stops with a
# checkpoint and the job queues itself again, until the training is finished.
#
#   sbatch jobs/slurm.sh templates/lora_finetune.py --train_file chats.jsonl
#   sbatch --nodes 4 --gpus-per-node 8 --time 12:00:00 jobs/slurm.sh templates/pretrain.py --train_file corpus/ \
#     --global_batch_size 256
#   CONFIG=multi_node_hsdp sbatch --nodes 4 jobs/slurm.sh templates/pretrain.py --global_batch_size 256 ...
#   IMAGE=templates.sif sbatch jobs/slurm.sh templates/pretrain.py ...    # Apptainer: `apptainer build` it from the image
#   IMAGE=registry#templates sbatch jobs/slurm.sh ...                     # anything else: SLURM's pyxis
#
# Submit it in the folder that holds jobs/, on a file system that all nodes share. The run is in runs/<job name>-<job id>,
# also after the job was queued again. Without a container, activate the virtual environment first. A container sees this
# folder; MOUNTS=/data,/models adds others.
#
# What your site may want: `sbatch -A ACCOUNT -p PARTITION`, or #SBATCH lines here; `module load`; NCCL_SOCKET_IFNAME; and
# RETRIES=3, how often a run that fails without a new checkpoint is queued again.
#
#SBATCH --job-name=train
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
# All cores and all memory of the nodes; the default is one core.
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
# Sent to the training, not to this script, 300 seconds before the time limit: enough for a step and a checkpoint.
#SBATCH --signal=USR1@300
# After a node failure or a preemption SLURM queues the job again.
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

set -euo pipefail

run=${RUN_DIR:-runs/$SLURM_JOB_NAME-$SLURM_JOB_ID}
for argument in "$@"; do
    case $argument in
        --output_dir* | --output-dir*) echo "use RUN_DIR=... instead of --output_dir" >&2; exit 2 ;;
    esac
done

config=${CONFIG:-multi_node_ddp}
processes=${PROCESSES_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}
main_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
launch=(
    --config_file "accelerate_configs/$config.yaml"
    --num_machines "$SLURM_NNODES" --num_processes "$((SLURM_NNODES * processes))"
    --main_process_ip "$main_node" --main_process_port "${MAIN_PORT:-$((20000 + SLURM_JOB_ID % 10000))}"
)
if [ "$config" = multi_node_hsdp ]; then  # sharded inside a node, replicated between nodes
    launch+=(--parallelism_config_dp_replicate_size "$SLURM_NNODES" --parallelism_config_dp_shard_size "$processes")
fi

tasks=(--nodes "$SLURM_NNODES" --ntasks "$SLURM_NNODES" --ntasks-per-node 1)
# When one node ends, the others may go on for two minutes: to end by themselves, with a code of their own.
tasks+=(--kill-on-bad-exit=0 --wait=120)
container=()
export TEMPLATES_CACHE=${TEMPLATES_CACHE:-$PWD/cache/templates}  # all nodes must see what one of them prepares
if [ -n "${IMAGE:-}" ]; then
    # Use the code in this folder and caches that all nodes share, not those of the image.
    export PYTHONPATH=$PWD HF_HOME=${HF_HOME:-$PWD/cache/huggingface}
    mounts=$PWD${MOUNTS:+,$MOUNTS}
    case $IMAGE in
        *.sif)
            mkdir -p cache  # a .sif is read-only
            container=(apptainer exec --nv --bind "$mounts,$PWD/cache:/cache" --pwd "$PWD" "$IMAGE")
            ;;
        *)
            # shellcheck disable=SC2001  # bash's own replacement cannot repeat the match
            tasks+=("--container-image=$IMAGE" "--container-mounts=$(sed 's/[^,]*/&:&/g' <<< "$mounts")")
            tasks+=("--container-workdir=$PWD" "--container-env=PYTHONPATH,TEMPLATES_CACHE,HF_HOME")
            ;;
    esac
fi

trap : TERM USR1  # signals are for the training; this script waits
rm -f "$run/exit.json"  # of an earlier run
code=0
# shellcheck disable=SC2016  # the nodes expand what is in single quotes
srun "${tasks[@]}" ${container[@]+"${container[@]}"} \
    sh -c 'exec python -m shared run accelerate launch --machine_rank "$SLURM_NODEID" "$@"' sh \
    "${launch[@]}" "$@" --output_dir "$run" || code=$?

# Use the training's own exit code, if it could write one: srun returns the largest of all nodes, or that of a kill.
if [ "$code" -ne 0 ] && [ -f "$run/exit.json" ]; then
    own=$(sed -n 's/.*"exit_code": \([0-9][0-9]*\).*/\1/p' "$run/exit.json")
    code=${own:-$code}
    if grep -q '"cause": "stopped by SIGUSR1' "$run/exit.json"; then code=138; fi
fi
# A cancelled job must not come back. A preempted one that ends in its grace time counts as failed, if nobody queues it again.
# Neither must one whose start takes longer than its time, or that always fails: RETRIES times without a new checkpoint.
if [ "$code" -eq 138 ]; then
    again="time limit"
elif [ "$code" -ne 0 ] && state=$(scontrol show --oneliner job "$SLURM_JOB_ID") && [[ $state =~ JobState=RUNNING ]]; then
    if [ "$code" -eq 143 ] && [[ $state =~ PreemptTime=[0-9] ]]; then
        again=preempted
    elif [[ ! $code =~ ^(2|3|4|143)$ && -d $run ]]; then  # a process died, a GPU failed, a server does not answer
        again="code $code"
    fi
fi
if [ -n "${again:-}" ]; then
    mkdir -p "$run"
    newest=$(find "$run" -maxdepth 1 -name 'checkpoint-[0-9]*' -printf '%f\n' | sort -V | tail -n 1)
    newest=${newest:-no checkpoint}
    { IFS=: read -r tries at < "$run/retries"; } 2> /dev/null || tries=0
    if [ "${at:-}" != "$newest" ] || [ "$again" = preempted ]; then tries=0; fi
    if [ "$tries" -lt "${RETRIES:-3}" ]; then
        echo "$((tries + 1)):$newest" > "$run/retries"
        echo "$again: queued again, continues from $newest in $run"
        scontrol requeue "$SLURM_JOB_ID"
    else
        echo "$again: not queued again, after ${RETRIES:-3} times with $newest in $run"
    fi
fi
exit "$code"
