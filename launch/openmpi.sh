#!/usr/bin/env bash
# Trains in several processes, which Open MPI's mpirun starts. The processes communicate through NCCL or gloo, not MPI.
#
#     HOSTS=host0:8,host1:8 launch/openmpi.sh imagenet_resnet50 --data.path /data/imagenet --workdir /shared/runs/first
#     PROCESSES=2 launch/openmpi.sh digits --data.path data/digits
#
# Run this script on the first host, because process 0 and the coordinator run on the host of mpirun.
set -euo pipefail

if (($# == 0)); then
  echo "usage: [HOSTS=HOST:SLOTS,...] [PROCESSES=P] $0 CONFIG [overrides]" >&2
  exit 2
fi
options=(
  # By default mpirun pins each process, including its decoding threads, to a single core.
  --bind-to none
  # Ranks fill one host before the next, so that the local rank is the index of a GPU.
  --map-by slot
)
[[ -n "${HOSTS:-}" ]] && options+=(--host "$HOSTS")
[[ -n "${PROCESSES:-}" ]] && options+=(-np "$PROCESSES")
# Only processes with this key can join the job.
export JAXDDP_JOB_KEY="${JAXDDP_JOB_KEY:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}"
# mpirun passes only named variables to other hosts.
for name in JAXDDP_JOB_KEY JAX_COORDINATOR_ADDRESS PATH LD_LIBRARY_PATH JAX_PLATFORMS JAX_COMPILATION_CACHE_DIR \
  JAXDDP_CACHE JAXDDP_DATASETS; do
  [[ -n "${!name:-}" ]] && options+=(-x "$name")
done
# mpirun kills the ranks one second after Ctrl-C or SIGTERM, before they have saved. So this script sends it SIGUSR2
# instead, which it forwards, and the shell of each rank sends SIGTERM to jaxddp. A second Ctrl-C ends mpirun.
await='until wait $!; do code=$?; kill -0 $! 2>/dev/null || exit $code; done'
rank="trap 'kill \$!' USR2; (trap '' USR2; exec \"\$@\") & $await"
set -m # Only this script receives the terminal's Ctrl-C.
trap 'kill -USR2 $!; trap "kill $!" INT' INT TERM
# A failed rank ends the job with the rank's exit code.
mpirun "${options[@]}" bash -c "$rank" rank jaxddp train "$@" </dev/null &
eval "$await"
