#!/usr/bin/env bash
# Makes .venv-eval: AlpacaEval's, lm-eval's and reasoning-gym's own code with all that a score step
# needs, apart from .venv so that their dependencies bind neither Prefect nor training. Run again, it
# does nothing unless what it installs changed.
#
#   PYTHON     interpreter to make the environment with (default: python3)
#   EVAL_VENV  where to make it (default: .venv-eval)
set -euo pipefail
cd "$(dirname "$0")/.."

venv="${EVAL_VENV:-.venv-eval}"

stamp="$venv/.installed"
wanted="$(cat pyproject.toml constraints/{run,eval}.lock scripts/setup-eval.sh | sha256sum | cut -d' ' -f1)"
if [[ -f "$stamp" && "$(cat "$stamp")" == "$wanted" ]]; then
  echo "$venv is up to date"
  exit 0
fi

rm -f "$stamp"
# What a run needs first: a reward model as oracle needs torch and transformers.
scripts/install-lock.sh "$venv" constraints/run.lock
scripts/install-lock.sh "$venv" constraints/eval.lock
"$venv/bin/python" -m pip install --progress-bar off --no-compile --constraint constraints/eval.txt \
  --editable '.[eval,torch]'
"$venv/bin/python" -c 'from importlib.metadata import version as v; print("lm-eval", v("lm_eval"), "alpaca-eval", v("alpaca_eval"))'
echo "$wanted" >"$stamp"
