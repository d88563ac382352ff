#!/usr/bin/env bash
# Builds images of this project by `docker build`: those that are named, or all for the CPU.
#
#   docker/build.sh [IMAGE...] [OPTION OF DOCKER BUILD...]
#
#   docker/build.sh torch-gpu vllm-gpu
#   docker/build.sh core --build-arg BASE=geb-base:bookworm --build-arg UID=1000 --build-arg GID=1000
#
#   PYTHON   interpreter that downloads the wheels (default: .venv/bin/python)
set -euo pipefail
cd "$(dirname "$0")/.."

export PYTHON="${PYTHON:-.venv/bin/python}"
images=()
while [[ $# -gt 0 && "$1" != -* ]]; do
  images+=("$1")
  shift
done
if [[ ${#images[@]} = 0 ]]; then images=(core torch vllm flows); fi

python_version="$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
version="$("$PYTHON" -c 'from importlib.metadata import version; print(version("geb"))')"
stages="$("$PYTHON" -c 'from stages.contract.manifest import stages_digest; print(stages_digest())')"
revision="$(git describe --always --abbrev=12 --dirty 2>/dev/null || echo unknown)"

for image in "${images[@]}"; do
  folder="$(docker/wheels.sh "$image")"
  wheels="geb-wheels-$image:$(cat "$folder/stamp")"
  # A build that changes code alone then sends a few kilobytes.
  if ! docker image inspect "$wheels" >/dev/null 2>&1; then
    docker image ls --quiet "geb-wheels-$image" | xargs --no-run-if-empty docker image rm --force
    printf 'FROM scratch\nCOPY *.whl /\n' >"$folder/Dockerfile"
    docker build --tag "$wheels" "$folder"
  fi
  case "$image" in
    torch | vllm) tag="geb-$image:$version-cpu" target=$image ;;
    torch-gpu) tag="geb-torch:$version-gpu" target=for-gpu ;;
    vllm-gpu) tag="geb-vllm:$version-gpu" target=for-gpu ;;
    *) tag="geb-$image:$version" target=$image ;;
  esac
  docker build --file docker/Dockerfile --target "$target" --tag "$tag" \
    --build-arg "BASE=python:$python_version-slim" --build-arg "PYTHON_VERSION=$python_version" \
    --build-arg "WHEELS=$wheels" --build-arg "VERSION=$version" \
    --label "org.opencontainers.image.title=geb $image" \
    --label "org.opencontainers.image.version=$version" \
    --label "org.opencontainers.image.revision=$revision" \
    --label org.opencontainers.image.licenses=Apache-2.0 \
    --label "geb.stages=$stages" "$@" .
done
docker image ls 'geb-*'
