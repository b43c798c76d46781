#!/usr/bin/env bash
# The numbers of docs/extend.md and the README's figure: extend.sh MODEL TEXT
set -euo pipefail
cd "$(dirname "$0")/.."
model=$1 text=$2
run() { .venv/bin/posenc extend "$model" --to 1024 --text "$text" --out "runs/extend/$1" "${@:2}"; }
mkdir -p results/extend
run ntk --method ntk
run search --method search
run tuned --method ntk-2x --tune 200 --batch 2
for name in ntk search tuned; do cp "runs/extend/$name/extend.csv" "results/extend/$name.csv"; done
.venv/bin/python experiments/extend_figure.py results/extend docs/figures/extend.svg
