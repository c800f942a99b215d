#!/bin/sh
# Reproduce the table for Tiny ImageNet in docs/accuracy.md.
# Hardware: one H200 or H100 with 16 cores, torch 2.11. Time: 8 minutes per run of tiny_imagenet_best; longer for 150 epochs.
# Needs: an active .venv. Argument: folder for the images (data).
set -eu
cd "$(dirname "$0")/.."
data=${1:-data}

git clone https://github.com/seshuad/IMagenet "$data/IMagenet"
python scripts/prepare.py "$data/IMagenet/tiny-imagenet-200" --to "$data/tiny"

for seed in 0 1 2 3; do
    python train.py recipe=tiny_imagenet_best data.root="$data/tiny" train.seed=$seed
done
python train.py recipe=tiny_imagenet_best data.root="$data/tiny" optim.name=extras.muon:muon \
    optim.args="{rate: 0.02, fixed_norm: true}" run.name=tiny-muon

# 150 of OpenMixup's 400 epochs, without mixing, with mixup and with cutmix; first OpenMixup's bilinear crops, then bicubic ones.
python train.py recipe=tiny_imagenet data.root="$data/tiny" train.epochs=150
python train.py recipe=tiny_imagenet data.root="$data/tiny" train.epochs=150 'augment.batch=[{mixup: {alpha: 1}}]'
python train.py recipe=tiny_imagenet data.root="$data/tiny" train.epochs=150 'augment.batch=[cutmix]'
for seed in 1 2; do
    python train.py recipe=tiny_imagenet data.root="$data/tiny" train.epochs=150 train.seed=$seed \
        'augment.train=[{random_resized_crop: {size: 64, interpolation: bicubic}}, horizontal_flip]'
    python train.py recipe=tiny_imagenet data.root="$data/tiny" train.epochs=150 train.seed=$seed \
        'augment.train=[{random_resized_crop: {size: 64, interpolation: bicubic}}, horizontal_flip]' \
        'augment.batch=[cutmix]'
done
python train.py recipe=tiny_imagenet data.root="$data/tiny" train.epochs=150 train.seed=1 \
    'augment.train=[{random_resized_crop: {size: 64, interpolation: bicubic}}, horizontal_flip]' \
    'augment.batch=[{mixup: {alpha: 1}}]'
