#!/bin/sh
# Measure the speeds in docs/benchmarks.md, which are the images/s that the console prints.
# Hardware: one GPU with at least 16 cores; two GPUs for the last commands. Time: not recorded.
# Needs: an active .venv. Argument: a folder with ImageNet, or with real JPEGs of its size.
set -eu
cd "$(dirname "$0")/.."
data=${1:?pass the folder with the images}

for cores in 0-15 0-7 0-3 0-1; do
    for name in resnet50 resnet18; do
        taskset -c $cores python train.py data.root="$data" model.name=$name model.compile=default train.max_steps=350 \
            log.every_steps=25 schedule.name=constant optim.lr=0.01 train.validate_every_epochs=1000 \
            run.name=speed-$name-$cores
    done
done

python train.py recipe=imagenet_rn50_a3 data.root="$data" model.compile=default train.max_steps=520 log.every_steps=40
python train.py recipe=imagenet_rn50_modern data.root="$data" model.compile=default train.max_steps=520 log.every_steps=40
python train.py recipe=imagenet_vit_s16 data.root="$data" model.compile=default train.max_steps=520 log.every_steps=40
python train.py recipe=imagenet_convnext_t data.root="$data" model.compile=default train.max_steps=520 log.every_steps=40

for mode in gpu hybrid; do
    python train.py recipe=imagenet_vit_s16 data.root="$data" loader.batch_size=512 loader.decoder=$mode model.compile=default \
        train.max_steps=300 log.every_steps=20 run.name=speed-vit-$mode
    python train.py recipe=imagenet_rn50_a3 data.root="$data" loader.decoder=$mode model.compile=default \
        train.max_steps=160 log.every_steps=20 run.name=speed-a3-$mode
done

for name in resnet50 resnet18; do
    torchrun --nproc-per-node 2 train.py data.root="$data" model.name=$name loader.batch_size=512 loader.workers=auto \
        model.compile=default train.max_steps=400 log.every_steps=25 train.validate_every_epochs=1000
done
torchrun --nproc-per-node 2 train.py data=fake data.fake_images=20000 loader.batch_size=512 \
    model.compile=default train.max_steps=250 log.every_steps=25 train.validate_every_epochs=1000
torchrun --nproc-per-node 2 train.py recipe=imagenet_vit_s16 data.root="$data" loader.workers=auto \
    model.compile=default train.max_steps=250 log.every_steps=25 train.validate_every_epochs=1000
