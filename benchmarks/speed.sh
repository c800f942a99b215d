#!/bin/sh
# Measures the speeds of docs/benchmarks.md: images/s in the rows of the console.
# Hardware: one GPU with at least 16 cores; the last command two GPUs. Time: not recorded.
# Needs: .venv is active. Argument: a folder with ImageNet, or real JPEGs of its size.
set -eu
cd "$(dirname "$0")/.."
data=${1:?give the folder with the images}

for cores in 0-15 0-7 0-3 0-1; do
    for model in resnet50 resnet18; do
        taskset -c $cores python train.py data.root="$data" model=$model model.compile=default train.max_steps=350 \
            log.every_steps=25 schedule.name=constant optim.lr=0.01 train.validate_every_epochs=1000 \
            run.name=speed-$model-$cores
    done
done

for recipe in imagenet_rn50_a3 imagenet_rn50_modern imagenet_vit_s16; do
    python train.py recipe=$recipe data.root="$data" model.compile=default train.max_steps=520 log.every_steps=40 \
        train.validate_every_epochs=90
done

torchrun --nproc-per-node 2 train.py data.root="$data" model=resnet18 loader.batch_size=512 \
    model.compile=default train.max_steps=700 train.validate_every_epochs=1000
