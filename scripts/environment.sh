# shellcheck shell=bash
# Sourced by the scripts of this repository: finds or makes the Python environment they run in.
#
#   prepare_environment REPOSITORY    sets PYTHON to the interpreter of an environment that has spider_titan installed
#
# An active virtual or conda environment is used as it is; without one, REPOSITORY/.venv is created once. The package and
# its dependencies are installed again whenever pyproject.toml has changed or the environment belongs to another checkout.

say() {
    echo "[spider-titan] $*" >&2
}

# Usage: die STATUS MESSAGE
die() {
    echo "[spider-titan] error: $2" >&2
    exit "$1"
}

is_recent_python() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

# Prints the first interpreter on PATH that is recent enough.
find_python() {
    local candidate
    for candidate in python3.11 python3.12 python3.13 python3; do
        if is_recent_python "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    die 2 "no Python 3.11 or later on PATH (tried python3.11, python3.12, python3.13, python3); install one, or activate an environment that has it"
}

# Usage: is_installed STAMP_FILE WANTED_STAMP
is_installed() {
    [[ -f "$1" && "$(<"$1")" == "$2" ]] &&
        "$PYTHON" -I -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("spider_titan") is None)' 2>/dev/null
}

# Usage: install_package REPOSITORY ENVIRONMENT STAMP_FILE STAMP
# Does nothing if another process has installed the same meanwhile.
install_package() {
    local repository=$1 environment=$2 stamp_file=$3 stamp=$4
    if is_installed "$stamp_file" "$stamp"; then
        return
    fi
    # An interpreter without pip is what an interrupted creation leaves.
    if ! "$PYTHON" -m pip --version >/dev/null 2>&1; then
        if [[ "$environment" != "$repository/.venv" ]]; then
            die 2 "the active environment $environment has no pip; install pip there, or deactivate it"
        fi
        local base_python
        base_python=$(find_python) || exit
        say "creating the virtual environment $environment with $base_python"
        "$base_python" -m venv "$environment" || die 1 "could not create $environment; remove that folder and run again"
    fi
    say "installing spider-titan and its dependencies into $environment (some minutes the first time)"
    "$PYTHON" -m pip install --quiet --quiet --disable-pip-version-check --editable "${repository}[dev]" ||
        die 1 "could not install into $environment; pip says why above"
    printf '%s\n' "$stamp" >"$stamp_file"
}

# Usage: prepare_environment REPOSITORY
prepare_environment() {
    local repository=$1
    local environment=${VIRTUAL_ENV:-${CONDA_PREFIX:-$repository/.venv}}
    PYTHON=$environment/bin/python
    if [[ "$environment" == "$repository/.venv" ]]; then
        mkdir -p "$environment"
    elif [[ ! -x "$PYTHON" ]]; then
        die 2 "the active environment $environment has no bin/python; activate another, or none"
    elif ! is_recent_python "$PYTHON"; then
        die 2 "the active environment $environment has a Python older than 3.11; activate another, or none"
    fi

    local stamp_file=$environment/.spider_titan_installed stamp
    stamp="$(cksum <"$repository/pyproject.toml") $repository"
    if is_installed "$stamp_file" "$stamp"; then
        return
    fi
    # Two first runs at a time would write into one environment; the lock ends with the subshell.
    (
        if command -v flock >/dev/null; then
            flock 9
        fi
        install_package "$repository" "$environment" "$stamp_file" "$stamp"
    ) 9>"$environment/.spider_titan_lock"
}
