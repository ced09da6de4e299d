# Sourced by each recipe: `launch ARCHITECTURE MODULE OVERRIDE...` starts the run.
#   TINY=1       two steps on this machine's CPU with a tiny model of the same architecture (needs recipes/setup.sh cpu)
#   CHECK=1      composes the run and says what is wrong with it, without Ray (verl-rollout-corr check)
#   PRINT=1      prints the module and the overrides, one per line, and does nothing
#   PYTHON       the interpreter of an environment with verl and this package (python3)
launch() {
  local architecture=$1 module=$2 here
  shift 2
  here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
  if [[ -n ${PRINT:-} ]]; then
    printf '%s\n' "$module" "$@"
  elif [[ -n ${CHECK:-} ]]; then
    exec "${PYTHON:-python3}" -m verl_rollout_corr check --program "$module" -- "$@"
  elif [[ -n ${TINY:-} ]]; then
    exec "${PYTHON:-python3}" "$here/stand_in.py" "$architecture" "$module" "$@"
  else
    exec "${PYTHON:-python3}" -m "$module" "$@"
  fi
}
