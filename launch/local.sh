#!/usr/bin/env bash
# Trains on all GPUs of this machine, one process for each:
#
#     launch/local.sh imagenet_resnet50 --data.path /data/imagenet --train.precision bfloat16
#
# On a machine without GPUs, give the number of processes; each gets its share of the cores:
#
#     PROCESSES=2 launch/local.sh digits --data.path data/digits
#
# The same command again resumes from the last checkpoint. With RESTARTS=N a failed job restarts up to N times. Ctrl-C
# saves and stops; a second Ctrl-C stops at once.
set -euo pipefail

if (($# == 0)); then
  echo "usage: [PROCESSES=P] [RESTARTS=N] $0 CONFIG [overrides]" >&2
  exit 2
fi
# One process for all GPUs (`jaxddp train` without a launcher) computes the same. With one process for each GPU, every
# process decodes the images of its device. Several machines work the same way.
exec jaxddp launch ${PROCESSES:+--processes "$PROCESSES"} ${RESTARTS:+--restarts "$RESTARTS"} -- train "$@"
