#!/usr/bin/env bash
# Sets up a virtual environment in .venv, once (recipes/setup.sh), and runs every check and test in it. Exits non-zero if any fails; the last
# line counts the tests.
#   tests/run.sh              what CI runs: lint, format, types, layers, documentation, unit tests, and the real runs of verl
#   tests/run.sh fast         without the runs of verl
#   tests/run.sh everything   besides, processes that hang, the full grids, and the stand-in of every recipe for GPUs
set -uo pipefail

wanted=${1:-ci}
[[ $wanted =~ ^(ci|fast|everything)$ ]] || { echo "run.sh: no such choice: $wanted (ci, fast or everything)" >&2; exit 1; }
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
python=$(bash recipes/setup.sh cpu,dev) || exit 1
bin=$(dirname "$python")
export PATH="$bin:$PATH" OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
reports=$(mktemp -d)
trap 'rm -rf "$reports"' EXIT
failed=()
times=()

stage() {
  local name=$1 started=$SECONDS ended=ok
  shift
  echo "== $name: $*"
  "$@" || ended=FAILED
  [[ $ended == ok ]] || failed+=("$name")
  times+=("$name $((SECONDS - started))")
  echo "== $name: $ended, $((SECONDS - started)) s"
}

tests() {
  local name=$1
  shift
  stage "$name" "$python" -m pytest -q --junitxml="$reports/$name.xml" "$@"
}

# The report's page is looked at in a real browser where there is one; CI gets one if it may.
if [[ -n ${CI:-} && $(id -u) == 0 ]] && ! command -v chromium > /dev/null; then
  (apt-get update -qq && apt-get install -y -qq chromium) > "$reports/chromium.log" 2>&1 || echo "== no Chromium: its tests are skipped"
fi

stage lint ruff check .
stage format ruff format --check .
stage layers lint-imports
stage types pyright
stage site env NO_MKDOCS_2_WARNING=1 mkdocs build --strict --quiet --site-dir "$reports/site"
tests unit --durations=10
# Verbose (-q is there already): a run takes a minute or two, and whoever waits sees which. A machine that is busy with something else must not
# look like a hung run (docs/cpu.md); what hangs has tests of its own.
at_once=1
[[ $(awk '/^MemTotal/ {print int($2 / 1048576)}' /proc/meminfo) -lt 20 ]] || at_once=2
runs() {
  VERL_CPU_STALL_SECONDS=${VERL_CPU_STALL_SECONDS:-240} ROLLOUT_CORR_RUNS_AT_ONCE=${ROLLOUT_CORR_RUNS_AT_ONCE:-$at_once} \
    tests "$@" -vv --durations=40
}

# Every plan of tests/e2e and the asynchronous trainers, in one session: a run that is corrected and then broken is started once
# (tests/e2e/README.md).
if [[ $wanted != fast ]]; then
  runs real -m "e2e or chaos or e2e_async" --ignore=tests/platform
fi
if [[ $wanted == everything ]]; then
  tests hung -m chaos -vv --durations=40 tests/platform
  tests slow -m slow
  PYTHON=$python stage recipes bash recipes/gpu/run_tiny.sh
fi

printf '== seconds:'
printf ' %s,' "${times[@]}"
echo " together $((SECONDS / 60)) min $((SECONDS % 60)) s"
echo "== stages that failed: ${failed[*]:-none}"
"$python" - "$reports" ${#failed[@]} << 'SUMMARY'
import sys
from pathlib import Path
from xml.etree import ElementTree

suites = [s for path in Path(sys.argv[1]).glob("*.xml") for s in ElementTree.parse(path).getroot().iter("testsuite")]
count = {name: sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "failures", "errors", "skipped")}
wrong = count["failures"] + count["errors"]
print(f"{count['tests'] - wrong - count['skipped']} passed, {wrong} failed, {count['skipped']} skipped")
sys.exit(bool(wrong) or sys.argv[2] != "0" or not suites)
SUMMARY
