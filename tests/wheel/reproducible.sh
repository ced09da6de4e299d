#!/usr/bin/env bash
# Builds wheel and sdist twice, in copies of the checkout at different places, and compares the bytes: `reproducible.sh FOLDER`. The
# files of the first build stay in FOLDER. SOURCE_DATE_EPOCH is the date of the last commit unless it is set.
#   PYTHON   an interpreter with `build` and hatchling (python)
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
mkdir -p "${1:?usage: reproducible.sh FOLDER}"
out=$(cd "$1" && pwd)
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git -C "$root" log -1 --format=%ct 2> /dev/null || echo 1700000000)}
export SOURCE_DATE_EPOCH
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

for place in first second/deeper; do
  mkdir -p "$scratch/$place/out"
  if git -C "$root" rev-parse > /dev/null 2>&1; then
    git -C "$root" ls-files -z --cached --others --exclude-standard | (cd "$root" && xargs -0 tar -c --) | tar -x -C "$scratch/$place" --no-same-owner
  else
    cp -R "$root/." "$scratch/$place/"
  fi
  # The times and the order of the files on the disk must not matter.
  find "$scratch/$place" -exec touch -h -d "@$((RANDOM + 1600000000))" {} +
  (umask 00$((RANDOM % 2 * 20 + 2)) && "${PYTHON:-python}" -m build --no-isolation --sdist --wheel --outdir "$scratch/$place/out" "$scratch/$place" > "$scratch/log" 2>&1) || { cat "$scratch/log" >&2; exit 1; }
done
(cd "$scratch/first/out" && sha256sum -- *) > "$scratch/sums"
(cd "$scratch/second/deeper/out" && sha256sum --check --quiet "$scratch/sums") || { echo "reproducible.sh: the two builds differ" >&2; exit 1; }
cp "$scratch/first/out"/* "$out/"
cat "$scratch/sums"
