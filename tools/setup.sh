#!/usr/bin/env bash
# setup.sh EXTRA,...: makes .venv and installs hotset with these extras, exact versions from constraints.txt.
# Without an NVIDIA GPU the CPU build of torch is taken where pip offers one; elsewhere what PyPI gives.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  echo "error: $($python --version 2>&1) is too old: hotset needs Python 3.11 or newer (make PYTHON=python3.12 ...)" >&2
  exit 1
fi
[ -x .venv/bin/python ] || "$python" -m venv .venv

# the constraints hold for build environments too
export PIP_CONSTRAINT=$PWD/constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1
pip() { .venv/bin/python -m pip "$@"; }

torch=$(sed -n 's/^torch==//p' constraints.txt)
if ! command -v nvidia-smi >/dev/null; then
  pip install -q "torch==$torch+cpu" 2>/dev/null || echo "no CPU build of torch on offer here: taking the usual one"
fi
pip install -q -e ".[$1]"
