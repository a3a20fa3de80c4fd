#!/usr/bin/env bash
# Several machines without a scheduler, over ssh, from a folder that has the same path on all of them:
#
#     HOSTS="host0 host1" launch/ssh.sh imagenet_resnet50 --data.path /data/imagenet --workdir /shared/runs/first
#     HOSTS="host0 host1" LAUNCH="--gpus 4" launch/ssh.sh …       # other options of `jaxddp launch`, the same everywhere
#     HOSTS="host0 host1" LAUNCH="--restarts 3" launch/ssh.sh …   # a job that fails starts again, up to 3 times
#     HOSTS="host0 host1" NODES=1:2 launch/ssh.sh …               # goes on with one machine, if need be: docs/scaling.md
#
# HOSTS are names by which the machines reach each other, and to which ssh connects without a password. PORT must be free
# on the first machine and open between them; the work directory must be shared. Where a JAXDDP_JOB_KEY is set, the same
# on all machines, only processes that know it may join.
set -euo pipefail

read -ra hosts <<<"${HOSTS:-}"
if ((${#hosts[@]} == 0 || $# == 0)); then
  echo "usage: HOSTS=\"HOST0 HOST1 ...\" [PORT=P] [NODES=MIN:MAX] [LAUNCH=OPTIONS] $0 CONFIG [overrides]" >&2
  exit 2
fi
place=$(printf '%q' "$PWD")
command=$(printf '%q ' train "$@")

pids=()
# In the background ssh gets no Ctrl-C. When it is terminated it hangs up, and the launcher on the other side saves and
# stops.
trap '((${#pids[@]})) && kill "${pids[@]}" 2>/dev/null' INT TERM
for nr in "${!hosts[@]}"; do
  job="--nodes ${NODES:-${#hosts[@]}} --nr $nr --coordinator ${hosts[0]}:${PORT:-12321}"
  # -tt: only a remote terminal hangs up.
  ssh -tt -o BatchMode=yes "${hosts[nr]}" \
    "cd $place && exec jaxddp launch $job ${LAUNCH:-} -- $command" </dev/null &
  pids+=($!)
done

# When a machine fails for good the others end within seconds, so this loop ends too.
code=0
for pid in "${pids[@]}"; do
  wait "$pid" || code=$((code ? code : $?))
done
exit "$code"
