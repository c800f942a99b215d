#!/bin/bash
# Fine-tune with recipe=finetune and with a plain loop for docs/accuracy.md, at SIZE px (224).
# Seven jobs share a GPU. Each prints a line at its end: top-1 after the last epoch, and the seconds.
# Hardware: one H200 with 16 cores, after nvidia-cuda-mps-control -d. Time: 44 to 204 s per job.
# Needs: an active .venv with torchvision and timm. First create the images: benchmarks/finetune_photos.sh images DATA.
# Then pass DATA/sets, whose folders have train and val; a folder with the weights, such as lite0.safetensors and woof.pt,
# which contain their model name; a new folder for the logs; and jobs SET,WEIGHTS,METHOD,SEED, where METHOD is `recipe` or a
# learning rate for the plain loop:
#   benchmarks/finetune_photos.sh data/sets weights logs flowers,lite0,{recipe,0.001,0.003,0.01,0.03,0.1},0
# Create lite0.safetensors from the lite0.pth of benchmarks/finetune.sh: python scripts/export.py lite0.pth --to safetensors
# model.name=timm/tf_efficientnet_lite0. woof.pt is the best.pt of
#   python train.py recipe=imagenet_rn50 data.root=data/imagewoof2-320 data.image_size=192 loader.batch_size=128 optim.lr=0.05 \
#       schedule=cosine schedule.warmup_epochs=2 train.epochs=40 train.seed=1
# Then run seeds 1 and 2 of the recipe and of the best learning rate. The flowers for lite0 were decoded in every epoch.
#
# The plain loop has the recipe's number of epochs, batch size, image size, crops (35-100 % of the area) and flips; SGD with
# momentum 0.9, cosine to 0 without warmup, weight decay DECAY (1e-4), no smoothing; a zero-initialized head; bf16 on a GPU.
set -eu
export SIZE="${SIZE:-224}" DECAY="${DECAY:-1e-4}"
script=$(realpath "${BASH_SOURCE[0]}")

if [ "${1-}" = images ]; then
    data=$(realpath -m "$2")
    cd "$(dirname "$script")/.."
    git clone https://github.com/995114879/17flowers "$data/17flowers"
    git clone https://github.com/afroozsheikh/Intel-Image-Classifier "$data/intel"
    git clone https://github.com/thunderInfy/imagenette "$data/imagenette"
    git clone https://github.com/cyizhuo/CIFAR-10-dataset "$data/cifar10"

    # Swap the two splits of the flowers: 272 training, 1,088 validation images.
    mkdir "$data/parts"
    ln -s "$data/17flowers/17flowers_traintest/test" "$data/parts/train"
    ln -s "$data/17flowers/17flowers_traintest/train" "$data/parts/val"
    python scripts/prepare.py "$data/parts" --to "$data/sets/flowers" --side 256

    # Copy the first images of each class, in the order of their numbers if they have any.
    choose() {  # folder with classes, number of images, new folder
        for class in "$1"/*; do
            chosen=$3/$(basename "$class")
            mkdir -p "$chosen"
            find "$class" -type f | sort -V | head -n "$2" | xargs cp -t "$chosen"
        done
    }
    choose "$data/intel/train" 50 "$data/sets/scenes300/train"
    choose "$data/intel/train" 250 "$data/sets/scenes1500/train"
    choose "$data/imagenette/train" 100 "$data/sets/imagenette1000/train"
    choose "$data/cifar10/train" 50 "$data/sets/cifar500/train"
    choose "$data/cifar10/test" 200 "$data/sets/cifar500/val"
    ln -s "$data/intel/test" "$data/sets/scenes300/val"
    ln -s "$data/intel/test" "$data/sets/scenes1500/val"
    ln -s "$data/imagenette/val" "$data/sets/imagenette1000/val"
    exit
fi

if [ "${1-}" = job ]; then  # in a process that xargs started
    cd "$(dirname "$script")/.."
    IFS=, read -r set name method seed <<< "$5"
    data=$2/$set logs=$4
    weights=$(find "$3" -name "$name.*" | head -n 1)
    export CUDA_VISIBLE_DEVICES=$((SLOT % GPUS))
    began=$(date +%s)
    status=0
    if [ "$method" = recipe ]; then
        python3 train.py recipe=finetune data.root="$data" model.weights="$weights" data.image_size="$SIZE" train.seed="$seed" \
            train.validate_every_epochs=100 loader.workers=4 run.dir="$logs/$5" > "$logs/$5.log" 2>&1 || status=$?
        top1=$(sed -n 's/^result .*loss [^ ]* top1 \([0-9.]*\) %.*/\1/p' "$logs/$5.log")
    else
        PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH} python3 - "$data" "$weights" "$method" "$seed" "$SIZE" "$DECAY" \
            > "$logs/$5.log" 2>&1 <<'END' || status=$?
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from engine.schedule import suited_batch
from models.weights import head_of
from scripts.lib.trained import open_trained

data, weights, lr, seed, side, decay = sys.argv[1:]
side = int(side)
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(int(seed))
trained = open_trained(Path(weights), ["model.rewrite=null"])
model = trained.build(torch.device("cpu"))
bicubic = "bicubic" in str(trained.config.augment.val)
interpolation = v2.InterpolationMode.BICUBIC if bicubic else v2.InterpolationMode.BILINEAR
crop = v2.RandomResizedCrop(side, scale=(0.35, 1), interpolation=interpolation)
augment = v2.Compose([crop, v2.RandomHorizontalFlip(), v2.PILToTensor()])
short_side = round(side / 0.875) if "crop_ratio" in str(trained.config.augment.val) else side
center = v2.Compose([v2.Resize(short_side, interpolation), v2.CenterCrop(side), v2.PILToTensor()])
photos = ImageFolder(f"{data}/train")


class Crops(Dataset):
    """Random crops, uint8 [3, S, S], of photos that are decoded once."""

    def __init__(self):
        self.photos = list(photos)

    def __getitem__(self, number):
        image, label = self.photos[number]
        return augment(image), label


name = head_of(model)[0].rpartition(".")[0]
head = nn.Linear(model.get_submodule(name).in_features, len(photos.classes))
nn.init.zeros_(head.weight)
nn.init.zeros_(head.bias)
model.set_submodule(name, head)
model = model.to(device, memory_format=torch.channels_last)

size = min(256, suited_batch(len(photos)), len(photos))
steps = len(photos) // size
epochs = min(100, max(10, round(500 * 512 / len(photos))))
batches = []
for _ in range(epochs):
    batches += torch.randperm(len(photos))[: steps * size].view(steps, size).tolist()
optimizer = torch.optim.SGD(model.parameters(), float(lr), momentum=0.9, weight_decay=float(decay))
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(batches))
torch.backends.cudnn.benchmark = True
mean = torch.tensor(trained.config.data.mean, device=device).view(-1, 1, 1)
std = torch.tensor(trained.config.data.std, device=device).view(-1, 1, 1)


def outputs(pixels):
    images = (pixels.to(device, non_blocking=True) / 255 - mean) / std
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        return model(images.to(memory_format=torch.channels_last)).float()


print(f"{epochs} epochs of {steps} steps of {size} images, {interpolation.value}", flush=True)
model.train()
for pixels, labels in DataLoader(Crops(), batch_sampler=batches, num_workers=4, pin_memory=True):
    loss = cross_entropy(outputs(pixels), labels.to(device, non_blocking=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
model.eval()
hits = 0
val = ImageFolder(f"{data}/val", center)
with torch.inference_mode():
    for pixels, labels in DataLoader(val, 256, num_workers=4):
        hits += (outputs(pixels).argmax(1).cpu() == labels).sum().item()
print(f"top1 {100 * hits / len(val):.2f}")
END
        top1=$(sed -n 's/^top1 //p' "$logs/$5.log")
    fi
    if [ -z "$top1" ]; then
        echo "$5 FAILED, status $status"
        tail -n 15 "$logs/$5.log"
        exit
    fi
    echo "$5 top-1 $top1 %, $(($(date +%s) - began)) s" | tee -a "$logs/results.txt"
    exit
fi

data=$(realpath "$1") weights=$(realpath "$2") logs=$3
shift 3
mkdir -p "$logs"
logs=$(realpath "$logs")
GPUS=$(python3 -c 'import torch; print(max(1, torch.cuda.device_count()))')
export GPUS
printf '%s\n' "$@" | xargs -P $((7 * GPUS)) -n 1 --process-slot-var=SLOT bash "$script" job "$data" "$weights" "$logs"
