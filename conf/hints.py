"""The equivalents of options of other trainers.

These are flags of pytorch/examples, torchvision and timm (`--lr 0.1`), keys of Hydra and Lightning
templates (`trainer.max_epochs=5`), and values that other programs accept. A name that equals the
last part of a key in conf/schema.py (`--epochs`, `batch_size=64`) needs no entry.
"""

# Override -> names in other programs, with - for _. {} stands for the value.
_OVERRIDES = {
    "augment.batch=[{mixup: {alpha: {}}}]": "mixup mixup-alpha",
    "augment.batch=[{cutmix: {alpha: {}}}]": "cutmix cutmix-alpha",
    "augment.batch=[{random_erasing: {p: {}}}]": "reprob random-erase",
    "checkpoint.keep={}": "checkpoint-hist save-top-k",
    "data=fake": "dummy",
    "data.image_size={}": "img-size imgsz input-size train-crop-size",
    "data.repeats={}": "aug-repeats ra-reps",
    "data.repeats=3": "ra-sampler",
    "data.root={}": "data data-dir data-path",
    "data.val_size={}": "val-crop-size",
    "loader.batch_size={}": "b bs batch",
    "loader.workers={}": "j num-workers",
    "log.trackers=[tensorboard,wandb]": "wandb log-wandb",
    "log.every_steps={}": "p print-freq log-interval log-every-n-steps",
    "model.args={drop_path_rate: {}}": "drop-path",
    "model.compile=default": "torchcompile",
    "model.name={}": "a arch backbone model",
    "model.weights={}": "initial-checkpoint finetune",
    "model.weights=pretrained": "pretrained",
    "optim={}": "opt optimizer",
    "optim.clip_norm={}": "clip-grad clip-grad-norm grad-clip gradient-clip-val max-grad-norm",
    "optim.decay_norms=false": "norm-weight-decay bias-weight-decay",
    "optim.eps={}": "opt-eps",
    "optim.lr={}": "learning-rate",
    "optim.weight_decay={}": "wd",
    "recipe={}": "config config-name cn",
    "run.dir={}": "output output-dir out-dir save-dir",
    "schedule={}": "sched scheduler lr-scheduler",
    "schedule.final_lr={}": "min-lr lr-min",
    "schedule.step_epochs={}": "lr-step-size decay-epochs",
    "schedule.step_gamma={}": "gamma lr-gamma decay-rate dr",
    "schedule.warmup_epochs={}": "lr-warmup-epochs warmup",
    "train.accumulate={}": "accum-iter grad-accum-steps accumulate-grad-batches",
    "train.bce_threshold={}": "bce-target-thresh",
    "train.deterministic=true": "use-deterministic-algorithms",
    "train.device=cpu": "no-cuda no-accel cpu",
    "train.ema_decay={}": "model-ema-decay ema",
    "train.ema_decay=0.9999": "model-ema",
    "train.epochs={}": "max-epochs num-epochs",
    "train.label_smoothing={}": "smoothing",
    "train.loss=bce": "bce-loss",
    "train.max_steps={}": "steps max-iters",
    "train.precision=bf16": "amp bf16 fp16",
    "train.validate_every_epochs={}": "val-interval check-val-every-n-epoch",
}
# Advice -> names in other programs of options without an equivalent key.
_SENTENCES = {
    "write augment=torchvision for TrivialAugment or augment=timm for RandAugment": (
        "aa auto-augment"
    ),
    "only train.py has sweeps; start this script once per value": "m multirun",
    "`python scripts/evaluate.py CHECKPOINT` evaluates; a run always validates at its end": (
        "e eval evaluate test test-only validate"
    ),
    "`torchrun --nproc-per-node N train.py ...` starts one process for each of N GPUs": (
        "devices dist-backend dist-url distributed gpus local-rank "
        "multiprocessing-distributed nnodes num-gpus num-nodes rank world-size"
    ),
    "the environment variable CUDA_VISIBLE_DEVICES chooses the GPU": "gpu gpu-id",
    "the number of classes follows from the folders in data.root": "num-classes",
    "leave it out: the same command resumes at the exact sample": "start-epoch no-resume-opt",
    "leave it out: warm-up is linear and starts at zero": (
        "lr-warmup-method lr-warmup-decay warmup-lr"
    ),
    "leave it out: the average is updated at every step": "model-ema-steps",
    "leave it out: the list of files is cached": "cache-dataset",
    "leave it out: batch buffers are page-locked on a GPU": "pin-mem",
    "write `resize: {size: {}}` in augment.val": "val-resize-size",
    "write optim.betas=[B1,B2]": "opt-betas",
    "write recipe={} for a recipe or run.name={} for the name of the run": "experiment",
    "write `interpolation: {}` in random_resized_crop or resize of an augment list": (
        "interpolation train-interpolation"
    ),
}
REMEDIES = {
    name: remedy
    for table in (_OVERRIDES, _SENTENCES)
    for remedy, names in table.items()
    for name in names.split()
}
# Other programs mean the batch of one GPU.
GLOBAL_BATCH = "loader.batch_size is the batch over all GPUs (timm's is per GPU)"
# Start of an override with a value of other programs -> advice.
VALUES = {
    "loader.decoder=turbojpeg": "write loader.decoder=region",
    "model.compile=false": "write model.compile=off",
    "model.compile=true": "write model.compile=default",
    "model.weights=true": "write model.weights=pretrained",
    "train.device=cuda:": (
        "write train.device=cuda; the environment variable CUDA_VISIBLE_DEVICES chooses the GPU"
    ),
}
