#!/usr/bin/env bash
# Sets up a virtual environment in .venv, once (recipes/setup.sh), and runs every check and test in it. Exits non-zero if any fails.
#   tests/run.sh            everything: lint, types, layers, documentation, unit tests, end-to-end runs
#   tests/run.sh fast       without the end-to-end runs
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
python=$(bash recipes/setup.sh cpu,dev) || exit 1
bin=$(dirname "$python")
export PATH="$bin:$PATH" OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
failed=()

stage() {
  local name=$1 started=$SECONDS
  shift
  echo "== $name: $*"
  if "$@"; then
    echo "== $name: ok, $((SECONDS - started)) s"
  else
    failed+=("$name")
    echo "== $name: FAILED, $((SECONDS - started)) s"
  fi
}

stage lint ruff check .
stage format ruff format --check .
stage types pyright
stage layers lint-imports
stage docs "$python" docs/build.py --check
stage unit "$python" -m pytest -q --durations=10
if [[ ${1:-all} != fast ]]; then
  stage e2e "$python" -m pytest -q -m "e2e or chaos or e2e_async" --durations=0
fi

if ((${#failed[@]})); then
  echo "failed: ${failed[*]}"
  exit 1
fi
echo "every stage passed"
