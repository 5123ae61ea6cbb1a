#!/bin/bash
# Rehearse jobs/kubernetes_multi_node.yaml on the CPU: two containers, its two pods, run its very command on a network of
# their own. One is killed; both are started again. Needs podman with a network plugin and DNS (aardvark-dns or dnsname), or
# Docker: ENGINE=docker.
#
#   jobs/rehearse/nodes.sh IMAGE
#
# It takes about five minutes. Not rehearsed: Kubernetes itself, its NetworkPolicy, GPUs. The container with the rank 0 has
# the name that the headless Service gives to the first pod.
set -euo pipefail
cd "$(dirname "$0")/../.."
image=$1
engine=${ENGINE:-podman}
shared=$(mktemp -d) name=rehearse-nodes-$$
outputs=$shared/outputs
mkdir -m 777 "$outputs" "$shared/cache"  # on the one volume of all pods, as in the manifest
chmod 755 "$shared"
trap '"$engine" rm -fv $name-0 $name-1 > /dev/null 2>&1; "$engine" network rm $name > /dev/null 2>&1; rm -rf "$shared"' EXIT
"$engine" network create --internal "$name" > /dev/null

list='import sys, yaml
(job,) = (d for d in yaml.safe_load_all(sys.stdin) if d["kind"] == "Job")
print(*job["spec"]["template"]["spec"]["containers"][0]["args"], sep="\n")'
mapfile -t command < <("$engine" run --rm -i --entrypoint python "$image" -c "$list" < jobs/kubernetes_multi_node.yaml)
echo "the command: ${command[*]}"
more=(--report_to none --logging_steps 1 --seq_length 64 --global_batch_size 8 --per_device_train_batch_size 2 --max_steps 30)
more+=(--eval_samples 2 --save_steps 5)

start() {  # the pod's number, in place of JOB_COMPLETION_INDEX; two CPU processes in place of eight GPUs
    local here=("${command[@]//\$(JOB_COMPLETION_INDEX)/$1}")
    here=("${here[@]/num_processes=16/num_processes=4}")
    "$engine" run -d --name "$name-$1" --network "$name" --network-alias "train-nodes-$1.train-nodes" --read-only \
        --tmpfs /tmp --cap-drop ALL -v "$outputs:/workspace/outputs" -v "$shared/cache:/cache" -e ACCELERATE_USE_CPU=true \
        -e OMP_NUM_THREADS=1 "$image" \
        "${here[@]:0:2}" --mixed_precision=no "${here[@]:2}" "${more[@]}" > /dev/null
}
code() { "$engine" wait "$name-$1"; }
said() { "$engine" logs "$name-$1" 2>&1; }
failed() {
    said 0 | tail -15
    said 1 | tail -15
    echo "NOT SEEN: $1"
    exit 1
}

start 0
start 1
until grep -qs '"step": 7,' "$outputs/train/metrics.jsonl"; do
    sleep 0.5
    if [ "$("$engine" ps -q --filter "name=$name" | wc -l)" -lt 2 ]; then failed "two pods that train"; fi
done
echo "seen: two pods meet by name and train"
"$engine" kill "$name-1" > /dev/null
first=$(code 0) second=$(code 1)
if [ "$first" -eq 0 ] || [ "$second" -ne 137 ] || [ -e "$outputs/train/final" ]; then failed "the end of both pods"; fi
echo "seen: one killed (code $second), the other ends by itself (code $first)"
"$engine" rm -v "$name-0" "$name-1" > /dev/null
start 0
start 1
first=$(code 0) second=$(code 1)
resumed=$(said 0 | grep -o 'resumed from.*' || true)
if [ "$first$second" != 00 ] || [ -z "$resumed" ]; then failed "two pods that continue (codes $first, $second)"; fi
echo "seen: both started again: $resumed; finished with codes $first and $second"
grep -q '"strategy": "DDP x 4 on cpu' "$outputs/train/checkpoint-000030/MANIFEST.json" || failed "four processes"
echo "seen: DDP x 4 over two containers"
