#!/usr/bin/env bash
# Sets up a virtual environment in .venv, once (recipes/setup.sh), and trains the tiny model in it. Arguments go to train.py.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=$(bash "$here/../setup.sh" cpu)
exec "$python" "$here/train.py" "$@"
