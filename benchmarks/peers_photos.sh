#!/bin/bash
# Train ResNet-50 on photos of 192 px with this program, timm and pytorch/examples for docs/photos.md.
# Each job uses a GPU and 16 cores, and prints a line at its end: top-1 after the last epoch, seconds of the whole process,
# training images/s in the median epoch (this program: from metrics.jsonl; the others: their average for each epoch).
# Hardware: two H200, each with 16 cores; torch 2.11. Time: 2 to 5 minutes per run.
# Needs: an active .venv with torchvision and pyyaml; in PEERS, `git clone` of huggingface/pytorch-image-models
# as timm (aa4b5850) and of pytorch/examples as examples (77f55b9). Arguments: the images (train and val), PEERS, a new
# folder for the logs, and jobs such as this,1 timm,1 examples,1 (default: seeds 1 to 3 for each).
#
# The same: crops of 8-100 % of the area, bilinear, flips; validation on 192 px of a short side of 219 px after each epoch; SGD
# with momentum 0.9, learning rate 0.1 * batch / 256, cosine to 0 without warmup, weight decay 1e-4 on all parameters, no
# smoothing; outputs only for the images' classes; the usual initialization (timm's zero init of each block's last norm is off).
# Different: bf16 here and in timm, TF32 in main.py; this program decays the rate at each step, the others after each epoch;
# main.py also trains on the last, smaller batch. main.py runs without --seed, which would make cuDNN deterministic and slow, so
# its runs are not reproducible.
set -eu
script=$(realpath "${BASH_SOURCE[0]}")

train_this() {
    cd "$(dirname "$script")/.."
    exec python train.py recipe=imagenet_rn50 data.root="$data" data.image_size=192 loader.batch_size=128 optim.lr=0.05 \
        schedule=cosine schedule.warmup_epochs=0 train.epochs=40 train.seed="$seed" run.dir="$out"
}

train_timm() {
    exec python3 "$peers/timm/train.py" --data-dir "$data" --train-split train --val-split val --model resnet50 \
        --num-classes "$classes" --input-size 3 192 192 -b 128 --opt momentum --lr 0.05 --weight-decay 1e-4 \
        --opt-kwargs filter_bias_and_bn=False --model-kwargs zero_init_last=False --sched cosine --min-lr 0 \
        --warmup-epochs 0 --cooldown-epochs 0 --epochs 40 --color-jitter 0 --smoothing 0 --crop-pct 0.875 \
        --interpolation bilinear --train-interpolation bilinear --amp --amp-dtype bfloat16 --channels-last \
        --pin-mem --workers 16 --seed "$seed" --checkpoint-hist 1 --output "$out"
}

train_examples() {
    sed "s/RandomResizedCrop(224)/RandomResizedCrop(192)/; s/Resize(256)/Resize(219)/; s/CenterCrop(224)/CenterCrop(192)/
        s/StepLR(optimizer, .*/torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)/
        s/__dict__\[args.arch\]()/__dict__[args.arch](num_classes=$classes)/" "$peers/examples/imagenet/main.py" > "$out/main.py"
    cd "$out"  # main.py writes its checkpoints here
    exec python3 main.py -a resnet50 -b 128 -j 16 --lr 0.05 --epochs 40 --gpu 0 "$data"
}

if [ "${1-}" = job ]; then  # in a process that xargs started
    data=$2 peers=$3 program=${5%,*} seed=${5#*,} out=$4/$5
    classes=$(find "$data/train" -mindepth 1 -maxdepth 1 | wc -l)
    mkdir -p "$out"
    export CUDA_VISIBLE_DEVICES=$SLOT PYTHONUNBUFFERED=1
    [ "$program" = timm ] && export PYTHONPATH=$peers/timm${PYTHONPATH:+:$PYTHONPATH}
    began=$(date +%s)
    status=0
    taskset -cp $((SLOT * 16))-$((SLOT * 16 + 15)) $BASHPID > /dev/null
    ("train_$program") > "$out.log" 2>&1 || status=$?
    seconds=$(($(date +%s) - began))
    python3 - "$program" "$seed" "$seconds" "$status" "$out.log" "$out" <<'END'
import json
import re
import sys
from collections import defaultdict
from pathlib import Path
from statistics import harmonic_mean, median

program, seed, seconds, status, log, out = sys.argv[1:]
text = Path(log).read_text(errors="replace")
epochs = defaultdict(list)  # images/s; an epoch's last value is its mean
top1 = []
if program == "this":
    for line in open(f"{out}/metrics.jsonl") if Path(out, "metrics.jsonl").exists() else ():
        row = json.loads(line)
        if row["split"] == "train":
            epochs[-int(-row["epoch"] // 1)].append(row["images_per_second"])
        else:
            top1.append(row["top1"])
    rates = list(map(harmonic_mean, epochs.values()))
elif program == "timm":
    for epoch, rate in re.findall(r"Train: (\d+) \[.*?/s  \([\d.]+s, +([\d.]+)/s\)", text):
        epochs[epoch].append(float(rate))
    last = re.findall(r"Test: \[ *(\d+)/\1\].*?Acc@1: +[\d.]+ \( *([\d.]+)\)", text)
    top1 = [float(value) for _, value in last]
    rates = [values[-1] for values in epochs.values()]
else:
    for epoch, seconds_per_batch in re.findall(r"Epoch: \[(\d+)\].*?Time +[\d.]+ \( *([\d.]+)\)", text):
        epochs[epoch].append(float(seconds_per_batch))
    top1 = [float(value) for value in re.findall(r"\* +Acc@1 +([\d.]+)", text)]
    rates = [128 / values[-1] for values in epochs.values()]
if status != "0" or not top1 or not rates:
    print(f"{program:<8} seed {seed}: FAILED, status {status}\n" + "\n".join(text.splitlines()[-15:]), flush=True)
    sys.exit()
print(f"{program:<8} seed {seed}: top-1 {top1[-1]:.2f} %, {len(top1)} epochs, {seconds} s, {median(rates):,.0f} images/s", flush=True)
END
    exit
fi

data=$(realpath "$1") peers=$(realpath "$2") logs=$3
shift 3
mkdir -p "$logs"
logs=$(realpath "$logs")
gpus=$(python3 -c 'import torch; print(max(1, torch.cuda.device_count()))')
[ $# -gt 0 ] || set -- examples,1 examples,2 examples,3 timm,1 timm,2 timm,3 this,1 this,2 this,3  # the slowest first
printf '%s\n' "$@" | xargs -P "$gpus" -n 1 --process-slot-var=SLOT bash "$script" job "$data" "$peers" "$logs"
