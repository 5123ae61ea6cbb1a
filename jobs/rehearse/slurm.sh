#!/bin/bash
# Rehearse jobs/slurm.sh on a SLURM of two nodes that are both this machine, on the CPU. Needs root, the virtual environment,
# and Debian's packages slurmctld, slurmd and slurm-client. It leaves an installed SLURM alone.
#
#   jobs/rehearse/slurm.sh
#
# It takes about ten minutes. Not rehearsed: GPUs, Apptainer, pyxis, file systems and networks of several machines.
set -euo pipefail
command -v accelerate > /dev/null || { echo "activate the virtual environment first"; exit 2; }
command -v slurmctld slurmd sbatch > /dev/null || { echo "apt install slurmctld slurmd slurm-client first"; exit 2; }
cd "$(dirname "$0")/../.."
# All daemons and jobs end with it.
if [ "${1:-}" != inside ]; then exec unshare --mount --pid --fork --kill-child --mount-proc "$0" inside; fi

state=$(mktemp -d)
trap 'rm -rf "$state"' EXIT
export SLURM_CONF=$state/slurm.conf TEMPLATES_CACHE=$state/cache
export ACCELERATE_USE_CPU=true OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo PROCESSES_PER_NODE=1
mkdir "$state"/{ctld,node0,node1}
printf '127.0.0.1 localhost %s node0 node1\n' "$(hostname)" > "$state/hosts"
mount --bind "$state/hosts" /etc/hosts
cat > "$SLURM_CONF" << CONF
ClusterName=rehearsal
SlurmctldHost=$(hostname)(127.0.0.1)
SlurmctldPort=17000
SlurmUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation=$state/ctld
SlurmdSpoolDir=$state/%n
SlurmctldPidFile=$state/ctld.pid
SlurmdPidFile=$state/%n.pid
SlurmctldLogFile=$state/ctld.log
SlurmdLogFile=$state/%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=node[0-1] NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=[17001-17002] CPUs=4 RealMemory=4000 Gres=gpu:2
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=120 State=UP
PartitionName=high Nodes=ALL PriorityTier=9 State=UP
CONF
printf 'Name=gpu File=/dev/%s\n' null zero > "$state/gres.conf"  # only counted
slurmctld
slurmd -N node0
slurmd -N node1

small=(--report_to none --logging_steps 1 --seq_length 64 --global_batch_size 2 --per_device_train_batch_size 1)
small+=(--eval_samples 2)

see() {  # what, a pattern, and the command that is to print it within five minutes
    for _ in $(seq 600); do
        if "${@:3}" 2> /dev/null | grep -q "$2"; then echo "seen: $1"; return; fi
        sleep 0.5
    done
    tail -n 20 "$state"/*.log
    echo "NOT SEEN: $1"
    exit 1
}
job() { scontrol show job "$1" | tr '\n' ' '; }
running() { squeue --noheader --states RUNNING --format %N | xargs; }
submit() {  # name, options of sbatch, --, those of the template
    local name=$1 options=()
    for word in "${@:2}"; do
        if [ "$word" = -- ]; then break; fi
        options+=("$word")
    done
    RUN_DIR=$state/$name sbatch --parsable --job-name "$name" --output "$state/$name.log" --gpus-per-node 1 "${options[@]}" \
        jobs/slurm.sh --mixed_precision no templates/pretrain.py "${small[@]}" "${@:3+${#options[@]}}"
}

long=$(submit long --nodes 2 --time 7 -- --max_steps 100000 --save_steps 50)
see 'two nodes meet' 'DDP x 2' cat "$state/long.log"
see 'before the time limit its signal stops it with a checkpoint' 'stopped by SIGUSR1 at step' cat "$state/long.log"
see 'it is queued again' 'JobState=PENDING' job "$long"
scontrol update JobId="$long" StartTime=now  # SLURM would wait for two minutes
see 'it resumes' 'resumed from' cat "$state/long.log"
urgent=$(sbatch --parsable --partition high --nodes 2 --exclusive --output /dev/null --wrap 'sleep 5')
see 'preempted, it stops with a checkpoint' 'stopped by SIGTERM at step' cat "$state/long.log"
see 'the urgent job runs' 'JobState=\(RUNNING\|COMPLETED\)' job "$urgent"
see 'it is queued again' 'JobState=PENDING' job "$long"
scontrol update JobId="$long" StartTime=now
see 'it resumes once more' '^2$' grep -c 'resumed from' "$state/long.log"
scancel "$long"
see 'cancelled, it is not queued again' 'JobState=CANCELLED' job "$long"
wrong=$(submit wrong -- --max_steps 2 --validation_file /nowhere)
see 'wrong input fails with code 2 and is not queued again' 'JobState=FAILED.*Restarts=0.*ExitCode=2:0' job "$wrong"
here=(--exclusive=user --mem 1500 --nodelist node0)
one=$(submit one "${here[@]}" -- --max_steps 3)
two=$(submit two "${here[@]}" -- --max_steps 3)
see 'two jobs share a node' 'node0 node0' running
see 'the first of them finishes' 'JobState=COMPLETED.*ExitCode=0:0' job "$one"
see 'the second, too' 'JobState=COMPLETED.*ExitCode=0:0' job "$two"
