#!/bin/sh
# Fine-tune a ViT-S/16 and a ConvNeXt-Pico, trained with labels on Tiny ImageNet, for docs/accuracy.md.
# Hardware: one H200 with 16 cores, torch 2.11; fifteen runs shared the GPU (nvidia-cuda-mps-control -d). Time: 7 minutes for both
# models, 1 to 3 minutes per run.
# Needs: an active .venv with timm; run benchmarks/tiny_imagenet.sh and `benchmarks/finetune_photos.sh images DATA` first to prepare
# the images, and shrink them with scripts/prepare.py --side 160. Imagenette was validated on 200 images of each class. Rows with
# other lengths, such as `24 epochs`, set train.epochs.
# Argument: their folder (data).
set -eu
cd "$(dirname "$0")/.."
data=${1:-data}

python train.py recipe=imagenet_vit_s16 data.root="$data/tiny" model.name=timm/vit_small_patch16_224 data.image_size=128 \
    'augment.train=[{random_resized_crop: {size: 128, scale: [0.25, 1.0], interpolation: bicubic}}, horizontal_flip]' \
    'augment.val=[{resize: {size: 128, crop_ratio: 0.875, interpolation: bicubic}}, {center_crop: {size: 128}}]' \
    'augment.batch=[{random_erasing: {p: 0.25}}, {mixup_or_cutmix: {mixup_alpha: 0.8, cutmix_alpha: 1.0, group: 64}}]' \
    'model.args={img_size: 128, drop_path_rate: 0.1}' data.val_size=128 train.label_smoothing=0.1 optim.weight_decay=0.05 \
    schedule.warmup_epochs=5 train.epochs=36 run.dir=runs/vit
python train.py recipe=imagenet_convnext_t data.root="$data/tiny" data.repeats=1 model.name=timm/convnext_pico \
    'augment.train=[{random_resized_crop: {size: 96, scale: [0.25, 1.0], interpolation: bicubic}}, horizontal_flip]' \
    'augment.val=[{resize: {size: 128, crop_ratio: 0.875, interpolation: bicubic}}, {center_crop: {size: 128}}]' \
    'augment.batch=[{random_erasing: {p: 0.25}}, {mixup_or_cutmix: {mixup_alpha: 0.8, cutmix_alpha: 1.0, group: 64}}]' \
    'model.args={drop_path_rate: 0.1}' data.image_size=96 data.val_size=128 optim.lr=2e-3 optim.clip_norm=1 \
    train.ema_decay=null schedule.warmup_epochs=5 train.epochs=30 run.dir=runs/convnext

crops='[{random_resized_crop: {size: 128, scale: [0.35, 1.0], interpolation: bicubic}}, horizontal_flip]'
for model in vit convnext; do
    for set in flowers scenes300 scenes1500 imagenette1000; do
        tune() { # recipe and further options
            python3 train.py "$@" data.root="$data/sets/$set" model.weights=runs/"$model" data.image_size=128
        }
        tune recipe=finetune
        tune recipe=finetune_vit
        tune recipe=finetune augment.train="$crops" augment.batch=[] optim=sgd optim.lr=0.015 optim.weight_decay=0
        for rate in 2e-5 5e-5 1e-4 2e-4 5e-4; do
            for decay in 0.65 0.8; do
                tune recipe=finetune augment.train="$crops" augment.batch=[] optim=adamw optim.weight_decay=0.05 \
                    optim.lr=$rate optim.name=extras.layer_decay:adamw optim.args="{layer_decay: $decay}"
            done
        done
    done
done
# The plain loop is benchmarks/finetune_photos.sh's, with AdamW, weight decay 0.05 and crops of 128 px.
