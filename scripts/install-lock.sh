#!/usr/bin/env bash
# Installs what a lock names, file by file, into an environment, which is made where there is none:
#
#   scripts/install-lock.sh VENV LOCK
#
#   PYTHON  interpreter to make the environment with (default: python3)
set -euo pipefail
cd "$(dirname "$0")/.."

venv=$1
lock=$2
python="${PYTHON:-python3}"

"$python" scripts/check-python.py
[[ -x "$venv/bin/python" ]] || "$python" -m venv "$venv"

pip_install() {
  "$venv/bin/python" -m pip install --progress-bar off --no-compile --no-deps --require-hashes --requirement "$1"
}

uv_install() {
  sed -n '/^uv==/,/[^\\]$/p' constraints/torch.lock >"$venv/uv.lock"
  pip_install "$venv/uv.lock"
  "$venv/bin/python" -m uv pip install --python "$venv/bin/python" --no-deps --require-hashes --requirement "$lock"
}

# uv takes an eighth of pip's time. It reads no pip.conf: where it reaches no index, pip does it.
uv_install || pip_install "$lock"
