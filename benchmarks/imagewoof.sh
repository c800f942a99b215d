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

# Compare settings on held-out training images: with `train` alone in a folder, data.val_fraction=0.2 holds out a fifth of them.
python scripts/prepare.py "$data" --to "$data/../imagewoof160" --side 160
mkdir "$data/../held_out"
ln -s ../imagewoof160/train "$data/../held_out/train"
choose() { # name of the run, further options
    name=$1
    shift
    for seed in 1 2; do
        python3 train.py recipe=imagewoof data.root="$data/../held_out" data.val_fraction=0.2 train.seed=$seed \
            run.name="held-out-$name-$seed" "$@"
    done
}
choose recipe
choose batch-32 loader.batch_size=32
choose batch-128 loader.batch_size=128
choose rate-0.01 'optim.args={rate: 0.01, fixed_norm: true}'
choose rate-0.05 'optim.args={rate: 0.05, fixed_norm: true}'
choose no-smoothing train.label_smoothing=0
choose cross-entropy train.loss=cross_entropy
choose small-crops 'augment.train=[{random_resized_crop: {size: 128, scale: [0.08, 1.0]}}, horizontal_flip]'
choose strided model.name=resnet18_cifar
choose sgd optim=sgd optim.lr=0.05 optim.weight_decay=5e-4 optim.nesterov=true
