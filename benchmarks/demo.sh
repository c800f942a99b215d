#!/bin/sh
# Train recipe=demo with ten seeds for docs/accuracy.md.
# Hardware: 2 CPU cores. Time: 1 minute per run.
# Needs: an active .venv.
set -eu
cd "$(dirname "$0")/.."

for seed in 0 1 2 3 4 5 6 7 8 9; do
    python train.py recipe=demo train.seed=$seed run.name=demo-$seed
done
