#!/usr/bin/env bash
# Trains on all GPUs of this machine, with one process for each GPU:
#
#     launch/local.sh imagenet_resnet50 --data.path /data/imagenet --train.precision bfloat16
#
# On a machine without GPUs, set the number of processes, which share the cores:
#
#     PROCESSES=2 launch/local.sh digits --data.path data/digits
#
# If you repeat the command, the run resumes from its last checkpoint. With RESTARTS=N, a failed job restarts up to N
# times. Ctrl-C saves and stops; a second Ctrl-C stops at once.
set -euo pipefail

if (($# == 0)); then
  echo "usage: [PROCESSES=P] [RESTARTS=N] $0 CONFIG [overrides]" >&2
  exit 2
fi
# One process for all GPUs (`jaxddp train` without a launcher) computes the same result. With one process for each GPU,
# every process decodes only the images of its device.
exec jaxddp launch ${PROCESSES:+--processes "$PROCESSES"} ${RESTARTS:+--restarts "$RESTARTS"} -- train "$@"
