#!/usr/bin/env bash
# The numbers of docs/extend.md and the README's figure: extend.sh MODEL TEXT
#
# MODEL is a Llama trained at 256 tokens, TEXT has documents of its kind. Everything runs from the
# command line: all methods, one quick, tuned and tuned with adapters; then one window of 1,024 to
# 8,192 tokens each, for the memory that a measurement takes.
set -euo pipefail
cd "$(dirname "$0")/.."
model=$1 text=$2
runs=runs/extend results=results/extend
if [ -e "$runs" ]; then
    echo "$runs is there from an earlier run: move it away" >&2
    exit 2
fi
mkdir -p "$runs" "$results"
rm -f "$results"/{cost,all,tuned,lora}.csv
run() {
    .venv/bin/python experiments/timed.py "$results/cost.csv" "$1" \
        .venv/bin/posenc extend "$model" --text "$text" "${@:2}"
}
run quick --to 1024 --method ntk --out "$runs/ntk"
run all --to 1024 --report "$runs/all.html" --state "$runs/search"
run search --to 1024 --method search --out "$runs/searched" --state "$runs/search"
run tuned --to 1024 --method ntk-2x --tune 200 --out "$runs/tuned"
run lora --to 1024 --method ntk-2x --tune 200 --lora 8 --out "$runs/lora"
for length in 1024 2048 4096 8192; do
    run "memory-$length" --to "$length" --method ntk --windows 1 --report "$runs/$length.html"
done
cp "$runs/all.csv" "$results/all.csv"
for name in tuned lora; do cp "$runs/$name/extend.csv" "$results/$name.csv"; done
cp "$runs/searched/config.json" "$results/searched.json"
.venv/bin/python experiments/extend_docs.py "$results"
