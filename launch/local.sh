#!/usr/bin/env bash
# All GPUs of this machine, one process each:
#
#     launch/local.sh imagenet_resnet50 --data.path /data/imagenet --train.precision bfloat16
#
# On a machine without GPUs, say how many processes; each gets its share of the cores:
#
#     PROCESSES=2 launch/local.sh digits --data.path data/digits
#
# The same command again resumes from the last checkpoint; with RESTARTS=N a job that fails does so by itself, up to N
# times. Ctrl-C saves and stops; a second Ctrl-C stops at once.
set -euo pipefail

if (($# == 0)); then
  echo "usage: [PROCESSES=P] [RESTARTS=N] $0 CONFIG [overrides]" >&2
  exit 2
fi
# One process for all GPUs (`jaxddp train`, without a launcher) computes the same. With one for each GPU, every process
# decodes its own images and feeds its own device; several machines are used the same way.
exec jaxddp launch ${PROCESSES:+--processes "$PROCESSES"} ${RESTARTS:+--restarts "$RESTARTS"} -- train "$@"
