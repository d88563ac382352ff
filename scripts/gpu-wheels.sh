#!/usr/bin/env bash
# Downloads what benchmarks.gpu needs besides PyTorch's usual companions, as wheels of Python 3.12 for a
# machine with a GPU and no network:
#
#   scripts/gpu-wheels.sh .whl            # here
#   python3 -m pip install --no-index --no-deps --target /tmp/site .whl/*.whl; export PYTHONPATH=/tmp/site
set -euo pipefail
folder=${1:?folder for the wheels}
pip=${PYTHON:-python3}" -m pip"
pinned() { grep -i -m1 "^${1//-/[-_]}==" "$(dirname "$0")/../constraints/torch.txt" | sed 's/ .*//'; }
platforms=()
for version in 2_28 2_27 2_24 2_17; do platforms+=(--platform "manylinux_${version}_x86_64"); done
platforms+=(--platform manylinux2014_x86_64)
mkdir -p "$folder"
for name in pydantic pydantic-core annotated-types typing-inspection typing-extensions hjson gguf; do
  $pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    "${platforms[@]}" -d "$folder" "$(pinned $name)"
done
# Its own build of operators is left to the first use.
DS_BUILD_OPS=0 $pip wheel -q --no-deps -w "$folder" "$(pinned deepspeed)"
du -ch "$folder"/*.whl
