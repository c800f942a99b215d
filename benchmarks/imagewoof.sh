#!/bin/sh
# Train on Imagewoof for docs/photos.md.
# Hardware: one H200 with 16 cores, torch 2.11. Time: 29 to 1,053 s per run.
# Needs: an active .venv. Argument: folder for the images (data).
set -eu
cd "$(dirname "$0")/.."
data=${1:-data}

git clone https://github.com/q878787/imagewoof2-320 "$data/imagewoof2-320"

data=$data/imagewoof2-320
for seed in 1 2 3 4 5; do
    python train.py recipe=imagewoof data.root="$data" data.image_size=128 train.seed=$seed
    python train.py recipe=imagewoof data.root="$data" data.image_size=192 train.seed=$seed
    python train.py recipe=imagewoof data.root="$data" data.image_size=256 train.seed=$seed
    python train.py recipe=imagewoof data.root="$data" data.image_size=128 train.epochs=20 train.seed=$seed
    python train.py recipe=imagewoof data.root="$data" data.image_size=192 train.epochs=20 train.seed=$seed
    python train.py recipe=imagewoof data.root="$data" data.image_size=256 train.epochs=20 train.seed=$seed
done
for seed in 1 2 3; do
    python train.py recipe=imagewoof data.root="$data" data.image_size=128 train.epochs=80 train.seed=$seed 'augment.batch=[{cutmix:{p:0.5}}]'
    python train.py recipe=imagewoof data.root="$data" data.image_size=192 train.epochs=80 train.seed=$seed 'augment.batch=[{cutmix:{p:0.5}}]'
    python train.py recipe=imagewoof data.root="$data" data.image_size=256 train.epochs=80 train.seed=$seed 'augment.batch=[{cutmix:{p:0.5}}]'
    python train.py recipe=imagewoof data.root="$data" data.image_size=128 train.epochs=200 train.seed=$seed 'augment.batch=[{cutmix:{p:0.5}}]'
    python train.py recipe=imagewoof data.root="$data" data.image_size=192 train.epochs=200 train.seed=$seed 'augment.batch=[{cutmix:{p:0.5}}]'
    python train.py recipe=imagewoof data.root="$data" data.image_size=256 train.epochs=200 train.seed=$seed 'augment.batch=[{cutmix:{p:0.5}}]'
done
