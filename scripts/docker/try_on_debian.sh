#!/usr/bin/env bash
# Builds the Dockerfile, as it stands, upon Debian with pip's torch in place of NVIDIA's image, and runs the image on CPU
# processes: where no registry of images is reached, or before gigabytes are downloaded.
#
#   scripts/docker/try_on_debian.sh [FOLDER ...]
#
# Needs root on Debian, pip, and: apt-get install --no-install-recommends podman runc catatonit mmdebstrap
# MEGATRON_LM_GIT=/path/to/clone takes Megatron-LM, with its tag, from a clone in place of GitHub.
# FOLDER: local wheels that pip's configuration names. They, that configuration and this machine's certificates are mounted
# while the images are built, and stay out of them.
# TORCH: another version; IMAGE: another name.
set -euo pipefail
torch=${TORCH:-torch==2.13.0}
image=${IMAGE:-localhost/megatron-vocabpar:debian}
base=localhost/megatron-vocabpar-base
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

mounts=()
git config --file "$work/gitconfig" safe.directory '*'
if [[ -n ${MEGATRON_LM_GIT:-} ]]; then
  clone=$(git -C "$MEGATRON_LM_GIT" rev-parse --absolute-git-dir)
  git config --file "$work/gitconfig" url.file:///mnt/megatron.insteadOf https://github.com/NVIDIA/Megatron-LM.git
  mounts+=(-v "$clone:/mnt/megatron:ro")
fi
mapfile -t pip_files < <(python3 -m pip config debug | sed -n 's/^ *\(.*\), exists: True$/\1/p')
for path in /etc/ssl/certs "${pip_files[@]}" "$@"; do
  mounts+=(-v "$path:$path:ro")
done

# chroot: the build has this machine's network, and no limits or cgroups of its own.
build() { podman build --isolation chroot "${mounts[@]}" "$@"; }

if ! podman image exists "$base"; then
  # shellcheck source=/dev/null
  . /etc/os-release
  mmdebstrap --variant=apt --include=ca-certificates,g++,git,make,python3-dev,python3-pip,python3-venv \
    "$VERSION_CODENAME" | podman import - "$base-debian"
  # What NVIDIA's image has and Megatron-LM imports; pip may install beside the system's packages.
  build -v "$work/gitconfig:/etc/gitconfig:ro" -t "$base" -f - "$work" <<END
FROM $base-debian
RUN rm -f /usr/lib/python3*/EXTERNALLY-MANAGED && \
    pip install --no-cache-dir "$torch" einops numpy packaging pybind11 pydantic six triton
END
fi
build -v "$work/gitconfig:/root/.gitconfig:ro" -t "$image" --build-arg "PYTORCH=$base" -f scripts/docker/Dockerfile .

# runc, and limits that the one who starts it has: for machines with both versions of cgroups, and for a root that may not
# raise a limit.
podman_run() {
  podman --runtime runc run --network=none --ipc=host --ulimit "nofile=$(ulimit -Hn):$(ulimit -Hn)" \
    --ulimit nproc=32768:32768 "$@"
}
run() {
  echo "+ $*"
  podman_run --rm --init "$image" "$@"
}

run vocabpar doctor --megatron /opt/Megatron-LM
run vocabpar schedule --pp 2
# One copy of the package, beside the .git whose commit goes into records.
run bash -c 'test ! -e build && python3 -c "import megatron_vocabpar as m; print(m.__file__)"'
run python3 -c 'from pathlib import Path; from megatron_vocabpar.doctor.environment import commit_of; print(commit_of(Path()))'
run bash -c 'vocabpar train --pp 2 --steps 2 --output /tmp/out && cat /tmp/out/summary.json'
run scripts/artifact/quick_exp.sh run vocab-2 --smoke

# A training that is stopped, without --init: it ends by itself.
echo "+ podman stop"
name=$(podman_run --detach "$image" vocabpar train --pp 2 --steps 100000)
until grep -q 'step [0-9]' <(podman logs "$name" 2>&1); do sleep 1; done
time podman stop --time 300 "$name"
podman logs "$name" 2>&1 | tail -n 3
podman inspect --format 'exit code {{.State.ExitCode}}' "$name"
podman rm "$name" >/dev/null
