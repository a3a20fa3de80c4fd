#!/usr/bin/env bash
# Trains on several machines over ssh, without a scheduler, from a folder with the same path on all machines:
#
#     HOSTS="host0 host1" launch/ssh.sh imagenet_resnet50 --data.path /data/imagenet --workdir /shared/runs/first
#     HOSTS="host0 host1" LAUNCH="--gpus 4" launch/ssh.sh …       # further options of `jaxddp launch`
#     HOSTS="host0 host1" LAUNCH="--restarts 3" launch/ssh.sh …   # restarts a failed job up to 3 times
#     HOSTS="host0 host1" NODES=1:2 launch/ssh.sh …               # continues on one machine if the other fails
#
# HOSTS are the names of the machines, or USER@NAME. ssh must connect to them without a password. PORT must be free on
# the first machine, and reachable from the other machines. The machines must share the work directory. If
# JAXDDP_JOB_KEY is set to the same value on all machines, only processes with this key can join the job.
# docs/scaling.md explains the options, such as NODES.
set -euo pipefail

read -ra hosts <<<"${HOSTS:-}"
if ((${#hosts[@]} == 0 || $# == 0)); then
  echo "usage: HOSTS=\"HOST0 HOST1 ...\" [PORT=P] [NODES=MIN:MAX] [LAUNCH=OPTIONS] $0 CONFIG [overrides]" >&2
  exit 2
fi
place=$(printf '%q' "$PWD")
command=$(printf '%q ' train "$@")

pids=()
# An ssh process in the background receives no Ctrl-C. A terminated ssh process hangs up, and the remote launcher
# saves and stops.
trap '((${#pids[@]})) && kill "${pids[@]}" 2>/dev/null' INT TERM
for nr in "${!hosts[@]}"; do
  job="--nodes ${NODES:-${#hosts[@]}} --nr $nr --coordinator ${hosts[0]#*@}:${PORT:-12321}"
  # -tt: the hang-up requires a remote terminal.
  ssh -tt -o BatchMode=yes "${hosts[nr]}" \
    "cd $place && exec jaxddp launch $job ${LAUNCH:-} -- $command" </dev/null &
  pids+=($!)
done

# When a machine fails permanently, the others end within seconds, so this loop also ends.
code=0
for pid in "${pids[@]}"; do
  wait "$pid" || code=$((code ? code : $?))
done
exit "$code"
