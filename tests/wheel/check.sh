#!/usr/bin/env bash
# Builds the wheel and looks at it in fresh environments: `check.sh PYTHON...`, for example `check.sh python3.10 python3.11 python3.12`.
# In each: the wheel with torch alone, and what works then; then with the extras presets and report, and the command line. Nothing of the
# checkout is on the path. pip's own settings hold; with PyTorch's CPU index in PIP_EXTRA_INDEX_URL an environment takes some 200 MB.
#   BUILDER   an interpreter with `build` (the first of PYTHON...)
#   WHEEL     a wheel that is built already
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
[[ $# -gt 0 ]] || { echo "usage: check.sh PYTHON..." >&2; exit 2; }
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
unset PYTHONPATH VERL_USE_EXTERNAL_PLUGINS VERL_USE_EXTERNAL_MODULES
wheel=${WHEEL:-}
if [[ -z $wheel ]]; then
  "${BUILDER:-$1}" -m build --wheel --outdir "$scratch/dist" "$here/../.." > "$scratch/build.log" 2>&1 || { cat "$scratch/build.log" >&2; exit 1; }
  wheel=$(ls "$scratch"/dist/*.whl)
fi

for python in "$@"; do
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  "$python" -m venv "$scratch/$version"
  fresh=$scratch/$version/bin/python
  "$fresh" -m pip install -q --disable-pip-version-check "$wheel"
  (cd "$scratch" && "$fresh" "$here/with_torch_alone.py")
  "$fresh" -m pip install -q --disable-pip-version-check "$wheel[presets,report]"
  (cd "$scratch" && "$fresh" "$here/with_command_line.py")
  echo "python $version: ok"
  rm -rf "${scratch:?}/$version"
done
