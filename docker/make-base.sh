#!/usr/bin/env bash
# Makes a base image with Debian's Python where no registry is reachable: debootstrap, docker import.
# Needs root, debootstrap and a Docker engine.
#
#   docker/make-base.sh [TAG]      TAG: geb-base:bookworm by default
#
#   DEBIAN_MIRROR   where to get packages from (default: debootstrap's own)
#   DEBIAN_SUITE    the release (default: bookworm, which has Python 3.11)
set -euo pipefail

tag="${1:-geb-base:bookworm}"
suite="${DEBIAN_SUITE:-bookworm}"
# libnuma1: vLLM's CPU build is linked against it.
packages=python3,python3-venv,ca-certificates,libnuma1

if [[ "$(id -u)" != 0 ]]; then
  echo "debootstrap needs root: run this with sudo" >&2
  exit 64
fi
if ! command -v debootstrap >/dev/null; then
  echo "there is no debootstrap: apt-get install debootstrap" >&2
  exit 64
fi

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
root="$work/root"
debootstrap --variant=minbase --include="$packages" "$suite" "$root" \
  ${DEBIAN_MIRROR:+"$DEBIAN_MIRROR"} >"$work/log" || { tail -20 "$work/log" >&2; exit 1; }
rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/* "$root"/usr/share/doc \
  "$root"/usr/share/man "$root"/usr/share/locale "$root"/var/log/*
tar --create --directory "$root" . | docker import --change 'CMD ["/bin/bash"]' - "$tag" >/dev/null
docker image inspect --format '{{index .RepoTags 0}}: {{.Size}} bytes' "$tag"
