#!/bin/sh
# Train ResNet-18 on Tiny ImageNet with this program, pytorch/examples and timm for docs/accuracy.md.
# Hardware: one H200 with 16 cores, torch 2.11. Time: not recorded.
# Needs: an active .venv; run benchmarks/tiny_imagenet.sh first to prepare the images. Argument: their folder (data).
set -eu
cd "$(dirname "$0")/.."
data=$(realpath "${1:-data}")

for seed in 0 1 2; do
    python train.py recipe=imagenet_rn18 data.root="$data/tiny" data.image_size=64 schedule.step_epochs=10 \
        train.epochs=30 loader.workers=5 train.seed=$seed
done

git clone https://github.com/pytorch/examples "$data/examples"
git -C "$data/examples" checkout 77f55b9
sed -i.before 's/RandomResizedCrop(224)/RandomResizedCrop(64)/; s/Resize(256)/Resize(73)/; s/CenterCrop(224)/CenterCrop(64)/; s/step_size=30/step_size=10/' \
    "$data/examples/imagenet/main.py"
for seed in 0 1 2; do
    python3 "$data/examples/imagenet/main.py" -a resnet18 -b 256 -j 5 --epochs 30 --seed $seed "$data/tiny"
done

git clone https://github.com/huggingface/pytorch-image-models "$data/timm"
git -C "$data/timm" checkout aa4b5850
for seed in 0 1 2; do
    python3 "$data/timm/train.py" --data-dir "$data/tiny" --train-split train --val-split val --model resnet18 \
        --num-classes 200 --input-size 3 64 64 -b 256 --opt momentum --lr 0.1 --weight-decay 1e-4 \
        --opt-kwargs filter_bias_and_bn=False --model-kwargs zero_init_last=False --sched step --decay-epochs 10 \
        --decay-rate 0.1 --warmup-epochs 0 --epochs 30 --color-jitter 0 --smoothing 0 --crop-pct 0.875 \
        --interpolation bilinear --train-interpolation bilinear --amp --amp-dtype bfloat16 --channels-last \
        --pin-mem --workers 5 --seed $seed
done
