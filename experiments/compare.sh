#!/usr/bin/env bash
# The comparison behind the README's figure and results/compare. 40 minutes of CPU time
# without bfloat16 hardware, shared by all cores.
set -euo pipefail
cd "$(dirname "$0")/.."
.venv/bin/posenc compare nope sinusoidal learned rope alibi t5 --steps 400 --precision float32 --out runs/compare
mkdir -p results/compare
cp runs/compare/results.csv runs/compare/study.json results/compare/
.venv/bin/python docs/scripts/update_figures.py
