#!/usr/bin/env bash
# One command on a machine with a GPU: builds, tests every kernel there, trains, times the kernels, prints one table; 6 minutes
# at most. `scripts/gpu_check.sh --help` lists the options; without network it takes what scripts/gpu_bundle.sh prepared.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/mpi_env.sh
exec python3 scripts/gpu_check.py "$@"
