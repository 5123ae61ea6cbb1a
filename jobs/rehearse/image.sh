#!/bin/bash
# Rehearse the image on the CPU, as a strict host runs it. Needs podman (root or not), or Docker: ENGINE=docker.
#
#   jobs/rehearse/image.sh IMAGE
#
# The root is read-only; there is no network, no capability and no user of that number. It takes five to ten minutes.
set -euo pipefail
image=$1
engine=${ENGINE:-podman}
outputs=$(mktemp -d) name=rehearse-$$
chmod 777 "$outputs"
cd "$outputs"  # where podman may leave a file named oom
trap '"$engine" rm -fv "$name" > /dev/null 2>&1; rm -rf "$outputs"' EXIT
strict=(--read-only --tmpfs /tmp --network none --cap-drop ALL --security-opt no-new-privileges --user 4321:4321)
strict+=(-v "$outputs:/workspace/outputs" -e ACCELERATE_USE_CPU=true -e OMP_NUM_THREADS=1)

in_image() {  # the output is in $said, the exit code in $code
    code=0
    said=$("$engine" run --rm "${strict[@]}" "${options[@]}" "$image" "$@" 2>&1) || code=$?
}
seen() { echo "seen: $1"; }
failed() {
    printf '%s\n' "$said" | tail -20
    echo "NOT SEEN: $1 (code $code)"
    exit 1
}
says() { grep -q "$1" <<< "$said"; }

options=()
in_image sh -c 'id -u; touch /workspace/x /opt/venv/x /etc/x; touch outputs/x /cache/x /tmp/x'
if [ "$code" -eq 0 ] && says 4321 && [ "$(grep -c 'Read-only file system' <<< "$said")" -eq 3 ]; then
    seen "any user; only outputs, /cache and /tmp can be written"
else failed "a root that cannot be written"; fi

small=(--report_to none --seq_length 64 --global_batch_size 2 --per_device_train_batch_size 2 --eval_samples 2)
train=(accelerate launch templates/pretrain.py "${small[@]}" --output_dir outputs/stopped --max_steps 40 --logging_steps 1)
"$engine" run -d --name "$name" "${strict[@]}" "$image" "${train[@]}" > /dev/null
code=0 said=
until [ -s "$outputs/stopped/metrics.jsonl" ] && grep -q '"step": 9,' "$outputs/stopped/metrics.jsonl"; do
    sleep 0.2
    if [ "$("$engine" inspect -f '{{.State.Running}}' "$name")" != true ]; then
        said=$("$engine" logs "$name" 2>&1)
        failed "training without network"
    fi
done
"$engine" stop -t 300 "$name" > /dev/null
code=$("$engine" inspect -f '{{.State.ExitCode}}' "$name") said=$("$engine" logs "$name" 2>&1)
ls "$outputs"/stopped/checkpoint-*/MANIFEST.json > /dev/null || failed "a whole checkpoint"
if [ "$code" -eq 143 ] && says 'stopped by SIGTERM at step'; then
    seen "stop: a checkpoint, then code 143"
else failed "a checkpoint at the stop"; fi
in_image "${train[@]}"
if [ "$code" -eq 0 ] && says 'resumed from' && says 'step 40/40'; then seen "the same command continues"
else failed "a run that continues"; fi

options=(--shm-size 64m)
two=(accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 2 --mixed_precision no)
classify=(templates/image_classification.py --max_steps 4 --report_to none --dataloader_num_workers 2)
in_image "${two[@]}" "${classify[@]}" --output_dir outputs/images
if [ "$code" -eq 0 ] && says 'model in'; then seen "64 MB of /dev/shm carry two processes with two workers each"
else failed "two processes and 64 MB of /dev/shm"; fi
in_image "${two[@]}" "${classify[@]}" --output_dir outputs/large --image_size 256 --global_batch_size 256 \
    --per_device_train_batch_size 128
if [ "$code" -ne 0 ] && says 'error.*/dev/shm is too small'; then
    seen "batches that need more end with code $code: $(grep -im1 'dev/shm' <<< "$said" | cut -c1-150)"
else failed "a message about shared memory"; fi

options=(--cpus 1)
in_image python -c 'from shared.process.ranks import cores; print("cores", cores())'
if says 'cores 1'; then seen "a limit of one processor: one process prepares data, one thread computes"
else failed "the limit of processors"; fi
options=(--memory 300m)
in_image accelerate launch templates/pretrain.py "${small[@]}" --output_dir outputs/small
if [ "$code" -ne 0 ] && [ ! -e "$outputs/small/final" ]; then
    seen "a limit of memory that is too small ends it with code $code"
else failed "an end for lack of memory"; fi
