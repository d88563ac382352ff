#!/usr/bin/env bash
# Makes .venv-trackers: the packages of the trackers, for their tests. Run again, it does nothing unless
# what it installs changed.
#
#   PYTHON         interpreter to make the environment with (default: python3)
#   TRACKERS_VENV  where to make it (default: .venv-trackers)
set -euo pipefail
cd "$(dirname "$0")/.."

venv="${TRACKERS_VENV:-.venv-trackers}"

stamp="$venv/.installed"
wanted="$(cat constraints/trackers.lock scripts/setup-trackers.sh | sha256sum | cut -d' ' -f1)"
if [[ -f "$stamp" && "$(cat "$stamp")" == "$wanted" ]]; then
  echo "$venv is up to date"
  exit 0
fi

rm -f "$stamp"
scripts/install-lock.sh "$venv" constraints/trackers.lock
echo "$wanted" >"$stamp"
