#!/usr/bin/env bash
# The peers' environments: one for stock Flower, one for pfl, each with the torch of the gate.
#     bash research/bench/environments.sh [FOLDER]     # makes FOLDER/bench-flower and FOLDER/bench-pfl
set -euo pipefail
cd "$(dirname "$0")/../.."
place=${1:-/opt}
constraints=$(mktemp)
trap 'rm -f "$constraints"' EXIT

made() { # NAME PACKAGES...: an environment, unless it is there
    local name=$1 && shift
    [ -e "$place/$name/made" ] && return
    python3 -m venv "$place/$name"
    # First the CPU build of torch that the constraints name; a range would take gigabytes of CUDA.
    "$place/$name/bin/pip" install --quiet "$(grep '^torch==' .ci/constraints.txt)"
    "$place/$name/bin/pip" install --quiet --constraint "$constraints" transformers "$@"
    touch "$place/$name/made"
}

cp .ci/constraints.txt "$constraints"
made bench-flower 'flwr[simulation]==1.41.0'
# pfl 0.6 caps packages that ours have left behind: only what computes is held alike.
grep -E '^(torch|transformers|tokenizers|safetensors|huggingface_hub)==' .ci/constraints.txt > "$constraints"
made bench-pfl 'pfl[pytorch]==0.6.0'
