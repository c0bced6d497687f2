#!/usr/bin/env bash
# Runs the tests: ./run_tests.sh [pytest arguments]; paths among them are relative to this repository.
set -euo pipefail

repository=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
# shellcheck source=scripts/environment.sh
source "$repository/scripts/environment.sh"

prepare_environment "$repository"
cd "$repository"
exec "$PYTHON" -m pytest "$@"
