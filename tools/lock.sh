#!/bin/sh
# Pin every package: install the direct dependencies into an empty environment and write down what came.
# What torch's CUDA build brings along is left out: torch pins it itself, and a CPU machine has none of it.
set -eu
python=${1:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for name in requirements requirements-dev; do
    "$python" -m venv --clear "$folder/venv"
    "$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check -r "$name.txt"
    {
        echo "# Made by 'make lock' from $name.txt. Not to be edited."
        "$folder/venv/bin/python" -m pip freeze --all | grep -v -E '^(pip|nvidia-|cuda-|triton)' |
            sed -E 's/^torch==([0-9.]+).*/torch==\1/; s/ @ .*//'
    } > "$name.lock"
done
