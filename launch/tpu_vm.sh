#!/usr/bin/env bash
# Creates a TPU slice of Google Cloud as a queued resource, installs jaxddp on all of its hosts, and trains there:
#
#     NAME=first ZONE=us-west4-a TYPE=v5litepod-16 RUNTIME=v2-alpha-tpuv5-lite \
#       launch/tpu_vm.sh imagenet_resnet50 --data.path /mnt/data/imagenet --workdir /mnt/runs/first
#     SPOT=1 …      # a spot slice, which Google may take back
#     DELETE=1 …    # deletes the slice at the end
#
# WAIT is the maximum number of minutes until the slice is active (60). The hosts must share the work directory. The same
# command resumes the run, on the same slice if it is active. A slice that failed, or that Google took back, is deleted
# with its disks and created again.
set -euo pipefail

if [[ -z ${NAME:-} || -z ${ZONE:-} || -z ${TYPE:-} || -z ${RUNTIME:-} || $# == 0 ]]; then
  echo "usage: NAME=N ZONE=Z TYPE=T RUNTIME=R [SPOT=1] [DELETE=1] [WAIT=MINUTES] $0 CONFIG [overrides]" >&2
  exit 2
fi
queued=(gcloud compute tpus queued-resources) vm=(gcloud compute tpus tpu-vm)
delete=("${queued[@]}" delete "$NAME" --zone="$ZONE" --force --quiet)
archive=$(mktemp -d) end=$((SECONDS + 60 * ${WAIT:-60}))
state() { "${queued[@]}" describe "$NAME" --zone="$ZONE" --format="value(state.state)"; }
finish() {
  rm -rf "$archive"
  if [[ -n ${DELETE:-} ]]; then "${delete[@]}" || true; else echo "to delete the slice: ${delete[*]}" >&2; fi
}
trap finish EXIT

while now=$(state 2>/dev/null) && [[ ($now == SUSPENDING || $now == DELETING) && $SECONDS -lt $end ]]; do
  sleep "${PERIOD:-30}"
done
if [[ $now == SUSPENDED || $now == FAILED ]]; then "${delete[@]}" && now=; fi
[[ $now ]] || "${queued[@]}" create "$NAME" --node-id="$NAME" --zone="$ZONE" --accelerator-type="$TYPE" \
  --runtime-version="$RUNTIME" ${SPOT:+--spot}
until now=$(state) && [[ $now == ACTIVE ]]; do
  if [[ $now == FAILED || $now == SUSPEND* || $now == DELETING || $SECONDS -ge $end ]]; then
    echo "$NAME is ${now:-unknown} and not ACTIVE; delete it, or raise WAIT" >&2
    exit 1
  fi
  sleep "${PERIOD:-30}"
done

# Only processes with the key can join the job. The system's Python may be older than 3.11.
od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$archive/key"
tar czf "$archive/jaxddp.tar.gz" -C "$(dirname "$0")/.." pyproject.toml README.md jaxddp configs
"${vm[@]}" scp "$archive/jaxddp.tar.gz" "$archive/key" "$NAME:" --zone="$ZONE" --worker=all
"${vm[@]}" ssh "$NAME" --zone="$ZONE" --worker=all --command="set -e; chmod 600 key; mkdir -p jaxddp
tar xzf jaxddp.tar.gz -C jaxddp; python3 -m pip install --quiet --user uv
[ -d venv ] || python3 -m uv venv --quiet --python 3.12 venv; python3 -m uv pip install --quiet -p venv './jaxddp[tpu]'"
"${vm[@]}" ssh "$NAME" --zone="$ZONE" --worker=all \
  --command="JAXDDP_JOB_KEY=\$(cat key) exec venv/bin/jaxddp train$(printf ' %q' "$@")"
