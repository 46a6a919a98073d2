#!/usr/bin/env bash
# Tests the oldest and the newest versions that requirements.txt admits; `make test-versions` runs this. Each combination
# has a virtual environment in .venv-versions/, which is kept, and ends in one line. Arguments replace the tests.
set -euo pipefail
cd "$(dirname "$0")/.."

COMBINATIONS=("oldest 3.11" "newest 3.11" "newest 3.13")
TESTS=(
    tests/test_private_names.py
    tests/test_strategies.py
    tests/test_config.py
    tests/test_launch.py::test_a_killed_rank_is_named
    tests/test_numbers.py::test_losses_and_weights_of_all_strategies_agree_in_float64
)
[ $# -eq 0 ] || TESTS=("$@")

# Prints the interpreter of a Python version: from PATH, where pyenv's stand-ins may name one that is not installed,
# else from pyenv's own folder. Fails where there is none.
find_python() {
    local candidate
    for candidate in "$(command -v "python$1")" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/python; do
        if "$candidate" -c 'import venv' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    return 1
}

# Prints the requirements of one end: `oldest` has every lower bound as an exact version.
requirements() {
    if [ "$1" = oldest ]; then sed -E 's/>=([^,]+),[^ ]+/==\1/' requirements.txt; else cat requirements.txt; fi
    grep -v '^-r' requirements-dev.txt
}

# Makes or updates the virtual environment of one combination: end, interpreter, folder.
install() {
    "$2" -m venv "$3" && requirements "$1" >"$3.txt" || return 1
    # Paths such as `-e .` are taken from the working directory, not from the file's.
    "$3/bin/python" -m pip install --upgrade --upgrade-strategy eager -r "$3.txt"
}

tried=0 failed=0
mkdir -p .venv-versions
for combination in "${COMBINATIONS[@]}"; do
    read -r end version <<<"$combination"
    name="$end versions, Python $version" folder=".venv-versions/$end-$version" log=".venv-versions/$end-$version.log"
    if ! python=$(find_python "$version"); then
        echo "$name: not tried, python$version is not installed"
        continue
    fi
    tried=$((tried + 1))
    if ! install "$end" "$python" "$folder" >"$log" 2>&1; then
        echo "$name: FAILED to install; see $log"
        failed=$((failed + 1))
        continue
    fi
    installed=$("$folder/bin/python" -m pip list 2>/dev/null | awk '/^(torch|torchvision|lightning) / { print $1, $2 }')
    # Old packages call what the newest of their own dependencies deprecate.
    options=() && [ "$end" = newest ] || options=(-W ignore::DeprecationWarning)
    result=passed
    "$folder/bin/python" -m pytest -q "${options[@]}" "${TESTS[@]}" >"$log" 2>&1 || result=FAILED failed=$((failed + 1))
    echo "$name (${installed//$'\n'/, }): $result: $(grep . "$log" | tail -n 1); see $log"
done
[ "$tried" -gt 0 ] && [ "$failed" -eq 0 ]
