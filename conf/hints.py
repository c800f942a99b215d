"""The equivalents of options of other trainers.

These are flags of pytorch/examples, torchvision and timm (`--lr 0.1`), keys of Hydra and Lightning
templates (`trainer.max_epochs=5`), and values that other programs accept. A name that equals the
last part of a key in conf/schema.py (`--epochs`, `batch_size=64`) needs no entry.
"""

# Override -> names in other programs, with - for _. {} stands for the value.
_OVERRIDES = {
    "augment.batch=[{mixup: {alpha: {}}}]": "mixup mixup-alpha",
    "augment.batch=[{cutmix: {alpha: {}}}]": "cutmix cutmix-alpha",
    "augment.batch=[{random_erasing: {p: {}}}]": "reprob random-erase random-erasing",
    "checkpoint.keep={}": "checkpoint-hist save-top-k",
    "checkpoint.resume={}": "resume-from resume-path ckpt-path load",
    "data=fake": "dummy",
    "data.image_size={}": "img-size imgsz input-size crop-size train-crop-size resolution",
    "data.repeats={}": "aug-repeats ra-reps",
    "data.repeats=3": "ra-sampler",
    "data.root={}": "data data-dir data-path data-root dataset-dir dataset-path",
    "data.val_size={}": "val-crop-size",
    "loader.batch_size={}": "b bs batch",
    "loader.workers={}": "j num-workers n-workers",
    "log.trackers=[tensorboard,wandb]": "wandb log-wandb use-wandb",
    "log.every_steps={}": "p print-freq log-interval log-every log-every-n-steps",
    "model.args={drop_path_rate: {}}": "drop-path",
    "model.compile=default": "torchcompile",
    "model.name={}": "a arch architecture backbone model",
    "model.weights={}": "initial-checkpoint finetune",
    "model.weights=pretrained": "pretrained",
    "optim={}": "opt optimizer optimiser",
    "optim.clip_norm={}": "clip-grad clip-grad-norm grad-clip gradient-clip-val max-grad-norm",
    "optim.decay_norms=false": "norm-weight-decay bias-weight-decay",
    "optim.eps={}": "opt-eps",
    "optim.lr={}": "learning-rate",
    "optim.weight_decay={}": "wd",
    "recipe={}": "config config-name cn",
    "run.dir={}": "output output-dir out-dir save-dir",
    "run.name={}": "exp-name experiment-name",
    "schedule={}": "sched scheduler lr-scheduler lr-schedule",
    "schedule.final_lr={}": "min-lr lr-min",
    "schedule.step_epochs={}": "lr-step-size decay-epochs",
    "schedule.step_gamma={}": "gamma lr-gamma decay-rate dr",
    "schedule.warmup_epochs={}": "lr-warmup-epochs warmup",
    "train.accumulate={}": (
        "accum-iter grad-accum grad-accum-steps accumulate-grad-batches gradient-accumulation-steps"
    ),
    "train.bce_threshold={}": "bce-target-thresh",
    "train.deterministic=true": "use-deterministic-algorithms",
    "train.device=cpu": "no-cuda no-accel cpu",
    "train.ema_decay={}": "model-ema-decay ema",
    "train.ema_decay=0.9999": "model-ema",
    "train.epochs={}": "max-epochs num-epochs",
    "train.label_smoothing={}": "smoothing",
    "train.loss=bce": "bce-loss",
    "train.max_steps={}": "steps max-iters",
    "train.precision=bf16": "amp bf16 fp16 mixed-precision",
    "train.seed={}": "random-seed",
    "train.validate_every_epochs={}": "val-interval check-val-every-n-epoch",
}
# Advice -> names in other programs of options without an equivalent key.
_SENTENCES = {
    "write augment=torchvision for TrivialAugment or augment=timm for RandAugment": (
        "aa auto-augment"
    ),
    "write log.trackers=[] to write no event files; the default is log.trackers=[tensorboard]": (
        "log.tensorboard tensorboard"
    ),
    "write log.trackers=[wandb] or log.trackers=[tensorboard]; metrics.jsonl is always written": (
        "logger report-to tracker"
    ),
    "the keys train.* hold these settings, and a GPU is used if there is one": "trainer",
    "leave it out: checkpoints and the best model are always kept; see checkpoint.keep": (
        "callbacks"
    ),
    "write train.max_steps=10 for a short run, and loader=debug to debug the loader": "debug",
    "write -m with lists of values, such as optim.lr=0.1,0.2": "hparams-search",
    "write run.name={}": "task-name",
    "leave it out: run.name= describes a run": "tags",
    "leave it out: run.dir= and data.root= set the folders": "paths",
    "leave it out: there are no such settings": "extras",
    "leave it out: a sweep maximises best_top1 of summary.json": "optimized-metric",
    "leave it out: the number of workers changes only at a start": "autotune.online",
    "only train.py has sweeps; start this script once per value": "m multirun",
    "--cfg job prints the composed config, --help lists the groups": "i info",
    "--help lists the groups and keys; hydra.* keys are not used": "hydra-help",
    "there is no completion; --help lists all keys": "sc shell-completion",
    "write --config-dir {}, a folder with your own recipes and groups": "cp config-path",
    "leave it out: train.py without -m starts one run": "r run",
    "to run {} again, run its command: overrides.yaml in the run's folder lists the overrides": (
        "experimental-rerun"
    ),
    "only --cfg job has it, and prints resolved values without it": "resolve",
    "write --cfg job --package SECTION": "package",
    "each checkpoint stores the versions under made_by": "version",
    "the number of classes follows from the folders in data.root": "num-classes nb-classes",
    "`python scripts/evaluate.py CHECKPOINT` evaluates; a run always validates at its end": (
        "e eval evaluate test test-only validate"
    ),
    "`torchrun --nproc-per-node N train.py ...` starts one process for each of N GPUs": (
        "devices dist dist-backend dist-url distributed gpus local-rank "
        "multiprocessing-distributed ngpus nnodes nodes num-gpus num-nodes rank world-size"
    ),
    "the environment variable CUDA_VISIBLE_DEVICES chooses the GPU": "gpu gpu-id",
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

# Start of a Hydra setting, after `hydra.` or `hydra/` -> advice; the first match counts.
HYDRA = {
    "run.dir": "write run.dir={}",
    "job.name": "write run.name={}",
    "job.chdir": "leave it out: a run does not change the current folder",
    "launcher": "it is for a sweep; add -m",
    "sweep": "it is for a sweep; add -m",
    "mode": "write -m for a sweep",
    "searchpath": "write --config-dir DIR",
    "": "leave it out",
}

# Start of an override with a value of other programs -> advice.
VALUES = {
    "loader.decoder=turbojpeg": "write loader.decoder=region",
    "model.compile=reduce-overhead": (
        "write model.compile=default; on a GPU, every step is a CUDA graph"
    ),
    "model.compile=false": "write model.compile=off",
    "model.compile=true": "write model.compile=default",
    "model.weights=true": "write model.weights=pretrained",
    "train.device=cuda:": (
        "write train.device=cuda; the environment variable CUDA_VISIBLE_DEVICES chooses the GPU"
    ),
}
# Key -> explanation, if other programs define its value differently.
MEANINGS = {"loader.batch_size": "loader.batch_size is the batch over all GPUs (timm's is per GPU)"}
