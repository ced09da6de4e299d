#!/usr/bin/env bash
# Runs the stand-in of every recipe, one after another (two real steps each, some minutes), and says which passed.
#   bash recipes/gpu/run_tiny.sh [RECIPE...]     all of them, or those that are named
#   PYTHON                                       the interpreter of an environment with verl and this package (python3)
#   LOGS                                         where each recipe's log goes (a temporary folder)
# The exit code is 1 if one failed.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
logs=${LOGS:-$(mktemp -d)}
mkdir -p "$logs"
recipes=("$@")
if [[ ${#recipes[@]} == 0 ]]; then
  for script in "$here"/*/run.sh; do recipes+=("$(basename "$(dirname "$script")")"); done
fi

failed=0
for recipe in "${recipes[@]}"; do
  [[ -f $here/$recipe/run.sh ]] || { echo "run_tiny.sh: there is no recipe $recipe" >&2; exit 2; }
  started=$SECONDS
  if TINY=1 bash "$here/$recipe/run.sh" > "$logs/$recipe.log" 2>&1; then
    ended=passed
  else
    ended=FAILED
    failed=$((failed + 1))
    tail -n 15 "$logs/$recipe.log" >&2
  fi
  printf '%-8s %-32s %4d s   %s\n' "$ended" "$recipe" $((SECONDS - started)) "$logs/$recipe.log"
done
echo "$((${#recipes[@]} - failed)) of ${#recipes[@]} recipes passed"
[[ $failed == 0 ]]
