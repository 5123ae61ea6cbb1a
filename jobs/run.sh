#!/bin/sh
# Run a command so that it can be stopped, and so that its end can be understood. The container starts everything so.
#
#   jobs/run.sh accelerate launch templates/pretrain.py --output_dir runs/first
#   jobs/run.sh selftest
#
# SIGTERM and SIGUSR1 stop the training after a checkpoint. All else ignores them: `accelerate launch` would die of them
# before that. The exit code is the training's own, of which the launcher makes 1: 0 done, 2 input or settings,
# 3 checkpoint or disk, 4 not finite, 143 stopped by a signal, 1 anything else.
trap '' TERM USR1

if [ "${1:-}" = selftest ]; then
    shift
    set -- python -m shared selftest "$@"
fi

noted=$(mktemp -d) || exit
TEMPLATES_EXIT_CODE="$noted/code" "$@"
code=$?
if [ "$code" -ne 0 ] && [ -s "$noted/code" ]; then code=$(cat "$noted/code"); fi
rm -rf "$noted"
exit "$code"
