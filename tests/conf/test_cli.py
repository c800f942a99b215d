"""The command line: composing, --help, --cfg job, and the messages for mistakes."""

import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from conf import cli, hints, schema
from conf.schema import (
    NOTHING,
    RESULT,
    Config,
    UserError,
    auto_or,
    each,
    group_names,
    key,
    number,
    one_of,
    sentences,
    show,
    walk,
)

ROOT = Path(__file__).parents[2]
DATA = "data.root=/nowhere"  # composing does not read it
OPTIM, SCHEDULE, RECIPE = (
    ", ".join(group_names(group)) for group in ("optim", "schedule", "recipe")
)
CHOICES = [(group, choice) for group in cli.GROUPS for choice in group_names(group)]


def leaves(config: Config) -> dict[str, object]:
    return {name: value for name, _, value in walk(config)}


def sections(config: Config) -> dict[str, object]:
    """The keys as nested dictionaries."""
    names = {key.split(".")[0] for key in leaves(config)}
    return {name: value for name, value in asdict(config).items() if name in names}


def command(
    *arguments: str, cwd: Path, python: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Run train.py in a subprocess."""
    line = [sys.executable, *python, str(ROOT / "train.py"), *arguments]
    return subprocess.run(line, cwd=cwd, capture_output=True, text=True, check=False)


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The error message for `arguments`, without `train.py: `."""
    with pytest.raises(SystemExit) as stop:
        cli.parse(arguments, script="train.py", purpose="")
    out, err = capsys.readouterr()
    assert stop.value.code == 2
    assert out == ""
    assert err.count("\n") == 1 and err.endswith("\n")
    assert "Traceback" not in err
    assert err.startswith("train.py: ")
    return err.removeprefix("train.py: ").rstrip("\n")


def test_groups() -> None:
    assert cli.GROUPS == ["augment", "data", "loader", "model", "optim", "recipe", "schedule"]


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_every_group_choice_composes(group: str, choice: str) -> None:
    """A file of optim or schedule has the name of the optimiser or schedule that it sets."""
    config = cli.load([f"{group}={choice}", DATA])
    if group in ("optim", "schedule"):
        assert getattr(config, group).name == choice
    if group == "recipe":
        assert (config.run.name or "").split(",")[0] == choice


def test_defaults_are_those_of_pytorch_examples() -> None:
    config = cli.load([DATA])
    assert config == cli.load(["recipe=imagenet_rn50", DATA])
    assert (config.model.name, config.train.epochs, config.loader.batch_size) == (
        "resnet50",
        90,
        256,
    )
    assert (
        config.optim.name,
        config.optim.lr,
        config.optim.momentum,
        config.optim.weight_decay,
    ) == ("sgd", 0.1, 0.9, 1e-4)
    assert (config.schedule.name, config.schedule.step_epochs, config.schedule.step_gamma) == (
        "step",
        30,
        0.1,
    )
    assert (
        config.schedule.warmup_epochs == 0
        and config.train.label_smoothing == 0
        and config.optim.decay_norms
    )
    assert config.augment.train == [{"random_resized_crop": {"size": 224}}, "horizontal_flip"]
    assert config.augment.val == [
        {"resize": {"size": 224, "crop_ratio": 0.875}},
        {"center_crop": {"size": 224}},
    ]
    assert config.augment.batch == []


def test_help_shows_the_composed_defaults() -> None:
    declared, composed = leaves(Config()), leaves(cli.load([DATA]))
    resolved = {"data.val_size", "run.name", "run.dir"}
    assert {k for k in declared if declared[k] != composed[k]} == {
        "data.root",
        "augment.train",
        "augment.val",
        *resolved,
    }
    assert (composed["data.val_size"], composed["run.dir"]) == (224, f"runs/{composed['run.name']}")


def test_keys_override_groups_and_recipes() -> None:
    demo = cli.load(["recipe=demo"])
    assert (demo.model.name, demo.data.image_size, demo.optim.lr, demo.schedule.name) == (
        "resnet_tiny",
        64,
        0.2,
        "cosine",
    )
    assert (demo.run.dir, demo.data.root, demo.data.source) == ("runs/demo", "data/demo", "demo")
    assert demo.augment.train[0]["random_resized_crop"]["size"] == 64
    other = cli.load(
        ["model=resnet18", "optim.lr=1", "recipe=demo", "run.name=mine", "data.image_size=32"]
    )
    assert (other.model.name, other.optim.lr, other.schedule.name, other.run.dir) == (
        "resnet18",
        1,
        "cosine",
        "runs/mine",
    )
    assert other.augment.train[0]["random_resized_crop"]["size"] == 32


def test_loading_twice_gives_independent_configs() -> None:
    first = cli.load(["recipe=demo"])
    first.augment.train.clear()
    first.data.mean[0] = 9
    assert cli.load(["recipe=demo"]).augment.train
    assert Config().data.mean == cli.load([DATA]).data.mean == [0.485, 0.456, 0.406]


def test_values_keep_their_types() -> None:
    lists = [
        "augment.batch=[{mixup: {alpha: 0.3}}, cutmix]",
        "optim.betas=[0.8, 0.99]",
        "data.mean=[0, 1, 0.5]",
    ]
    plain = [
        "model.compile=off",
        "loader.workers=3",
        "train.max_steps=7",
        "++optim.lr=1e-2",
        "optim.clip_norm=2",
        "train.epochs=3",
    ]
    config = cli.load(
        [
            DATA,
            "optim.name=adamw",
            *lists,
            *plain,
            "model.channels_last=true",
            "data.train=/elsewhere/train set",
        ]
    )
    assert config.augment.batch == [{"mixup": {"alpha": 0.3}}, "cutmix"]
    assert (config.optim.betas, config.data.mean) == ([0.8, 0.99], [0.0, 1.0, 0.5])
    assert (config.model.compile, config.loader.workers, config.train.max_steps) == ("off", 3, 7)
    assert (config.optim.lr, config.optim.clip_norm, config.train.epochs) == (0.01, 2.0, 3.0)
    assert config.model.channels_last is True
    assert config.data.train == "/elsewhere/train set"


def test_yaml_equals_the_config() -> None:
    for overrides in (
        ["recipe=demo", "model.compile=off"],
        ["recipe=imagenet_vit_s16", DATA, "run.name='yes'"],
    ):
        config = cli.load(overrides)
        assert yaml.safe_load(cli.to_yaml(config)) == sections(config)


def test_help_lists_every_choice_and_every_key_without_importing_torch(tmp_path: Path) -> None:
    done = command("--help", cwd=tmp_path, python=("-X", "importtime"))
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    for group in cli.GROUPS:
        choices = next(line for line in lines if line.startswith(f"  {group}="))
        assert choices.split("=")[1].replace("|", " ").split() == group_names(group)
    for name, field, _ in walk(Config()):
        (line,) = (line for line in lines if line[2:].startswith(f"{name}="))
        assert line[:2] == ("* " if field.metadata["affects"] & RESULT else "  ")
        assert line.endswith(" " + sentences()[name])
    imported = {line.split("|")[-1].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert "hydra" in imported  # the list does contain imports
    assert imported.isdisjoint({"torch", "torchvision", "numpy", "tensorboard", "PIL"})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["--help", "--cfg=job"])
def test_a_reader_that_stops(option: str, tmp_path: Path) -> None:
    """As in `python train.py --help | head`."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), option],
        cwd=tmp_path,
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(write)
    assert done.stderr == ""


def test_cfg_job_prints_yaml_that_parses(tmp_path: Path) -> None:
    done = command("recipe=demo", "optim.lr=0.3", "--cfg", "job", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert yaml.safe_load(done.stdout) == sections(cli.load(["recipe=demo", "optim.lr=0.3"]))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [["--cfg", "job"], ["--cfg=job"], ["-c", "job"]])
def test_cfg_job_needs_no_data(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.parse(arguments, script="train.py", purpose="")
    assert stop.value.code == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert yaml.safe_load(out)["data"]["root"] is None


@pytest.mark.parametrize("options", [["-p", "optim"], ["--resolve", "--package=optim"]])
def test_cfg_job_prints_one_section(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.parse(["--cfg", "job", *options, "recipe=demo"], script="train.py", purpose="")
    out, err = capsys.readouterr()
    assert (stop.value.code, err) == (0, "")
    assert yaml.safe_load(out) == asdict(cli.load(["recipe=demo"]).optim)


def test_a_typo_on_the_real_command_line(tmp_path: Path) -> None:
    done = command("recipe=demo", "optm.lr=0.3", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "train.py: optm.lr=0.3: there is no key optm.lr; did you mean optim.lr?\n"
    assert list(tmp_path.iterdir()) == []


# override -> a part of the error message
MISTAKES = {
    # a typo in a key, also behind + and ++
    "optm.lr=1": "there is no key optm.lr; did you mean optim.lr?",
    "+optm.lr=1": "there is no key optm.lr; did you mean optim.lr?",
    "++optm.lr=1": "there is no key optm.lr; did you mean optim.lr?",
    "optim.learning_rate=1": "there is no key optim.learning_rate",
    "autotune.online=true": "there is no key autotune.online; leave it out: ",
    "train.lr=1": "did you mean optim.lr?",
    "data.rot=/x": "did you mean data.root?",
    "+foo=1": "there is no key foo",
    "++data.foo.bar=1": "there is no key data.foo.bar",
    "optim.betas.0=0.5": "did you mean optim.betas?",
    "augment.train.0=resize": "did you mean augment.train?",
    "_target_=os.system": "there is no key _target_",
    "+optim._target_=os.system": "there is no key optim._target_",
    # Hydra's own settings
    "hydra.run.dir=/tmp/x": "write run.dir=/tmp/x",
    "hydra.sweep.dir=/tmp/x": "it is for a sweep; add -m",
    "hydra.job.name=x": "write run.name=x",
    "hydra.job.chdir=true": "a run does not change the current folder",
    "hydra/launcher=basic": "it is for a sweep; add -m",
    "hydra/sweeper=optuna": "it is for a sweep; add -m",
    "hydra.mode=MULTIRUN": "write -m for a sweep",
    "hydra.searchpath=[pkg://x]": "write --config-dir DIR",
    "hydra.output_subdir=null": "leave it out",
    "~hydra": "leave it out",
    "hydra.sweeper.params.optim.lr=1,2": "it is for a sweep; add -m",
    "optim={lr: 1}": f"choose one of {OPTIM}",
    "train=3": "is a group of keys: train.epochs, train.max_steps",
    "++train={foo: 3}": "is a group of keys: train.epochs, train.max_steps",
    # adding and removing
    "+optim.lr=1": "write optim.lr=1",
    "+recipe=demo": "write recipe=demo",
    "~optim.lr": "cannot be removed",
    "~optim": f"choose one of {OPTIM}",
    # an unknown choice
    "recipe=imagenet_rn5": f"choose one of {RECIPE}",
    "optim=sdg": "did you mean sgd?",
    "model=resnet_tin": "did you mean resnet_tiny?",
    "data=floder": "did you mean folder?",
    "recipe=null": "choose one of",
    "optim=": f"choose one of {OPTIM}",
    "optim=[sgd,adamw]": f"choose one of {OPTIM}",
    "optim=../optim/sgd": f"choose one of {OPTIM}",
    "optim@foo=sgd": "optim.lr",
    "recipe=demo,cifar10": "is a sweep; `train.py -m` trains once for each value",
    "optim.lr=0.1,0.2": "is a sweep; `train.py -m` trains once for each value",
    # a wrong type
    "optim.lr=abc": "give a number",
    "optim.lr=null": "give a number",
    "optim.lr=[1]": "give a number",
    "optim.lr={a: 1}": "give a number",
    "train.seed=1.5": "give a whole number",
    "train.epochs=true": "give a number",
    "train.deterministic=maybe": "give true or false",
    "train.deterministic=2": "give true or false",
    "optim.nesterov=0": "give true or false",
    "log.tensorboard=false": "there is no key log.tensorboard; write log.trackers=[] to write no",
    "log.trackers=wandb": "give names among tensorboard, wandb, in brackets",
    "log.trackers=[mlflow]": "give names among tensorboard, wandb",
    "log.trackers=[wandb,wandb]": "give names among tensorboard, wandb",
    "logger=wandb": "write log.trackers=[wandb]",
    "optim.name=null": f"give one of {OPTIM}",
    "data.train=null": "give a name or a path",
    "data.mean=0.5": "give a list of 3 values",
    "data.mean=[a,b,c]": "give a list of 3 values",
    "augment.train=5": "give a list, in brackets",
    "augment.batch=mixup,cutmix": "give a list, in brackets",
    "optim.betas=0.9,0.95": "give a list of 2 values, in brackets",
    "optim.betas=(0.9,0.95)": "give a list of 2 values, in brackets",
    "profile.steps=100-110": "give two steps, the first not after the last, in brackets",
    "optim.lr==0.1": "give a number > 0",
    "loader.batch_size=2^8": "give a whole number >= 1",
    "augment.train=null": "give a list",
    "train.max_steps=1e5": "give a whole number >= 1 or null",
    "loader.workers=many": "give auto or a whole number from 0 to 4096",
    "loader.workers=1.5": "give auto or a whole number from 0 to 4096",
    "loader.workers=true": "give auto or a whole number from 0 to 4096",
    "loader.workers=[1]": "give auto or a whole number from 0 to 4096",
    "model.channels_last=1": "give auto or true or false",
    # out of range: negative, zero, NaN, infinite
    "optim.lr=-0.1": "give a number > 0",
    "optim.lr=0": "give a number > 0",
    "optim.lr=nan": "give a number > 0",
    "optim.lr=inf": "give a number > 0",
    "optim.lr=-inf": "give a number > 0",
    "optim.weight_decay=-1e-4": "give a number >= 0",
    "optim.weight_decay=nan": "give a number >= 0",
    "optim.momentum=1.5": "give a number >= 0 and <= 1",
    "optim.clip_norm=0": "give a number > 0 or null",
    "optim.betas=[0.9]": "give a list of 2 values",
    "optim.betas=[0.9, nan]": "give a list of values, each a number >= 0",
    "optim.betas=[0.9, 1]": "give a list of values, each a number >= 0 and < 1",
    "data.mean=[0.5, 0.5]": "give a list of 3 values",
    "data.mean=[0.5, 0.5, inf]": "give a list of values, each a number",
    "data.std=[0.5, 0.5, 0]": "give a list of values, each a number > 0",
    "data.image_size=0": "give a number >= 8",
    "data.image_size=-224": "give a number >= 8",
    "loader.batch_size=0": "give a number >= 1",
    "loader.workers=-1": "give auto or a whole number from 0 to 4096",
    "loader.timeout_seconds=nan": "give a number > 0",
    "loader.prefetch_batches=0": "give a number >= 1",
    "train.epochs=0": "give a number > 0",
    "train.epochs=-1": "give a number > 0",
    "train.epochs=nan": "give a number > 0",
    "train.epochs=inf": "give a number > 0",
    "train.epochs=1e308": "give a number > 0",
    "train.max_steps=0": "give a number >= 1 or null",
    "train.seed=-1": "give a number >= 0",
    "train.ema_decay=nan": "give a number > 0 and <= 1 or null",
    "train.label_smoothing=2": "give a number >= 0 and <= 1",
    "schedule.warmup_epochs=-1": "give a number >= 0",
    "checkpoint.every_steps=0": "give a number >= 1",
    "checkpoint.keep=-1": "give a number >= 1",
    "log.every_steps=-5": "give a number >= 1",
    # not one of the allowed words
    "train.device=gpu": "give one of auto, cpu, cuda",
    "train.precision=fp16": "give one of auto, bf16, tf32, fp32",
    "model.compile=max": "give one of auto, off, default",
    "optim.name=nope": f"give one of {OPTIM}",
    "schedule.name=cos": f"give one of {SCHEDULE}",
    "data.on_error=ignore": "give one of raise, skip",
    "data.source=s3": "give one of ",
    "loader.start_method=thread": "give one of forkserver, spawn, fork",
    "run.name=a/b": "give a name without slashes",
    "run.name=..": "give a name without slashes",
    "run.dir=": "give a path",
    # Hydra's symbol for a missing value
    "optim.lr=???": "optim.lr=???: not allowed; give a number > 0",
    "++optim.lr=???": "not allowed; give a number > 0",
    "optim.name=???": f"give one of {OPTIM}",
    "data.root=???": "give a name or a path",
    "train.seed=???": "give a whole number >= 0",
    "train.deterministic=???": "give true or false",
    "loader.workers=???": "give auto or a whole number from 0 to 4096",
    "optim.betas=[0.9,???]": "give a list of 2 values",
    "augment.batch=[{mixup: {alpha: ???}}]": "give a list",
    # names and values of other programs
    "model.pretrained=true": "there is no key model.pretrained; write model.weights=pretrained",
    "evaluate=true": (
        "`python scripts/evaluate.py CHECKPOINT` evaluates; a run always validates at its end"
    ),
    "experiment=x": "write recipe=x for a recipe or run.name=x for the name of the run",
    "+experiment=x": "write recipe=x for a recipe or run.name=x for the name of the run",
    "arch=resnet18": "write model.name=resnet18",
    "trainer.max_epochs=5": "write train.epochs=5",
    "optimizer=adamw": "write optim=adamw",
    "Optimizer.LR=1": "did you mean optim.lr?",
    "model.num_classes=10": "the number of classes follows from the folders in data.root",
    "gpus=4": "`torchrun --nproc-per-node N train.py ...` starts one process for each of N GPUs",
    "mixup=0.2": "write 'augment.batch=[{mixup: {alpha: 0.2}}]'",
    "train.device=cuda:1": (
        "write train.device=cuda; the environment variable CUDA_VISIBLE_DEVICES chooses the GPU"
    ),
    "model.compile=true": "write model.compile=default",
    "model.compile=False": "write model.compile=off",
    "model.weights=true": "write model.weights=pretrained",
    "model=resnet101": "; for any other model write model.name=resnet101",
    "model=ResNet50": "did you mean resnet50?",
    "data=/imagenet": "for a folder of images write data.root=/imagenet",
    "recipe=conf/recipe/demo.yaml": "did you mean demo?",
    "name=mine": "did you mean model.name or optim.name or schedule.name or run.name?",
    "batch=32": "write loader.batch_size=32",
    "train.steps=5": "write train.max_steps=5",
    "batchsize=32": "did you mean loader.batch_size?",
    # the groups and keys of lightning-hydra-template
    "trainer=gpu": "there is no key trainer; the keys train.* hold these settings, and a GPU",
    "+trainer=ddp": "; the keys train.* hold these settings",
    "callbacks=none": "; leave it out: checkpoints and the best model are always kept",
    "debug=default": "; write train.max_steps=10 for a short run",
    "hparams_search=mnist_optuna": "; write -m with lists of values",
    "task_name=x": "; write run.name=x",
    "test=False": "; `python scripts/evaluate.py CHECKPOINT` evaluates",
    "logger=csv": "; write log.trackers=[wandb] or log.trackers=[tensorboard]; metrics.jsonl is",
    "tags=[a]": "; leave it out: run.name= describes a run",
    "optimized_metric=val/acc": "; leave it out: a sweep max",
    # interpolation
    "run.dir=${nope}": "Interpolation key 'nope' not found",
    "optim.lr=${optim.lr}": "Recursive interpolation",
}


@pytest.mark.parametrize("override", MISTAKES)
def test_mistake_is_one_line_and_status_2(
    override: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    line = refusal([DATA, override], capsys)
    key = override.split("=")[0].lstrip("+~").split("@")[0]
    assert key in line
    assert MISTAKES[override] in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "override",
    ["foo", "optim.lr", "optim.lr=[1", "=1", "", " optim.lr=1", "optim.lr=1}"],
)
def test_unreadable_override_is_named(override: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal([DATA, override], capsys)
    assert " ".join(override.split()) in line


def test_nesterov_without_momentum(capsys: pytest.CaptureFixture[str]) -> None:
    assert "optim.momentum" in refusal([DATA, "optim.nesterov=true", "optim.momentum=0"], capsys)


def test_missing_root_recommends_data_root_or_the_demo(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for arguments in ([], ["data.root=null"], ["data.root="]):
        line = refusal(arguments, capsys)
        assert line.startswith("data.root is missing: pass data.root=")
        assert "recipe=demo" in line


# arguments that are not key=value -> the whole error message
FLAGS = {
    "--lr 0.1": "--lr: not an option; write optim.lr=0.1",
    "--lr=0.1": "--lr: not an option; write optim.lr=0.1",
    "--optim.lr 0.1": "--optim.lr: not an option; write optim.lr=0.1",
    "--data DIR": "--data: not an option; write data.root=DIR",
    "--data-dir /x": "--data-dir: not an option; write data.root=/x",
    "-a resnet50": "-a: not an option; write model.name=resnet50",
    "--arch": "--arch: not an option; write model.name=VALUE",
    "--model resnet50": "--model: not an option; write model.name=resnet50",
    "-b 256": "-b: not an option; write loader.batch_size=256; "
    "loader.batch_size is the batch over all GPUs (timm's is per GPU)",
    "--batch-size=256": "--batch-size: not an option; write loader.batch_size=256; "
    "loader.batch_size is the batch over all GPUs (timm's is per GPU)",
    "-j 8": "-j: not an option; write loader.workers=8",
    "-j8 --epochs 5": "-j, --epochs: not options; write loader.workers=8 train.epochs=5",
    "--workers 8 --seed 1 --momentum 0.9": "--workers, --seed, --momentum: not options; "
    "write loader.workers=8 train.seed=1 optim.momentum=0.9",
    "--resume X": "--resume: not an option; write checkpoint.resume=X",
    "--pretrained /x": "--pretrained: not an option; write model.weights=pretrained data.root=/x",
    "--wd 1e-4": "--wd: not an option; write optim.weight_decay=1e-4",
    "--weight-decay 1e-4": "--weight-decay: not an option; write optim.weight_decay=1e-4",
    "--opt adamw --sched cosine": "--opt, --sched: not options; write optim=adamw schedule=cosine",
    "--warmup-epochs 5 --amp": (
        "--warmup-epochs, --amp: not options; write schedule.warmup_epochs=5 train.precision=bf16"
    ),
    "--img-size 192": "--img-size: not an option; write data.image_size=192",
    "--label-smoothing 0.1": "--label-smoothing: not an option; write train.label_smoothing=0.1",
    "--smoothing 0.1": "--smoothing: not an option; write train.label_smoothing=0.1",
    "--model-ema-decay 0.99": "--model-ema-decay: not an option; write train.ema_decay=0.99",
    "--clip-grad 1": "--clip-grad: not an option; write optim.clip_norm=1",
    "--mixup 0.2": "--mixup: not an option; write 'augment.batch=[{mixup: {alpha: 0.2}}]'",
    "--cutmix 1": "--cutmix: not an option; write 'augment.batch=[{cutmix: {alpha: 1}}]'",
    "--print-freq 10": "--print-freq: not an option; write log.every_steps=10",
    "--log-interval 10": "--log-interval: not an option; write log.every_steps=10",
    "-e": (
        "-e: not an option; `python scripts/evaluate.py CHECKPOINT` evaluates; a run always "
        "validates at its end"
    ),
    "--evaluate": (
        "--evaluate: not an option; `python scripts/evaluate.py CHECKPOINT` evaluates; a run "
        "always validates at its end"
    ),
    "--output out": "--output: not an option; write run.dir=out",
    "--experiment x": (
        "--experiment: not an option; write recipe=x for a recipe or run.name=x for the name of "
        "the run"
    ),
    "--gpu 0": (
        "--gpu: not an option; the environment variable CUDA_VISIBLE_DEVICES chooses the GPU"
    ),
    "--local_rank=0 --dist-url tcp://x --world-size 2": "--local_rank, --dist-url, --world-size: "
    "not options; `torchrun --nproc-per-node N train.py ...` starts one process for each of N GPUs",
    "--config-name mine": "--config-name: not an option; write recipe=mine",
    "-cn mine": "-cn: not an option; write recipe=mine",
    "--config-path /x": (
        "--config-path: not an option; write --config-dir /x, a folder with your own recipes and "
        "groups"
    ),
    "--config-path=../conf --config-name=config": (
        "--config-path, --config-name: not options; leave --config-path out; "
        "leave --config-name out"
    ),
    "--config-name=mine.yaml": "--config-name: not an option; write recipe=mine",
    "-m=true": "-m=true: takes no value; write -m",
    "--multirun=true optim.lr=1,2": "--multirun=true: takes no value; write --multirun",
    "-p optim": "-p optim: needs --cfg; write --cfg job -p optim",
    "--cfg job -p optim.lr": "-p optim.lr: is no section; write -p optim",
    "--cfg job -p": "-p: has no value; write a section, such as -p optim",
    "-p 10": "-p: not an option; write log.every_steps=10",
    "--info": (
        "--info: not an option; --cfg job prints the composed config, --help lists the groups"
    ),
    "--hydra-help": (
        "--hydra-help: not an option; --help lists the groups and keys; hydra.* keys are not used"
    ),
    "--version": "--version: not an option; each checkpoint stores the versions under made_by",
    "-sc install=bash": "-sc: not an option; there is no completion; --help lists all keys",
    "--run": "--run: not an option; leave it out: train.py without -m starts one run",
    "--experimental-rerun x": (
        "--experimental-rerun: not an option; to run x again, run its command: overrides.yaml in "
        "the run's folder lists the overrides"
    ),
    "--resolve": (
        "--resolve: not an option; only --cfg job has it, and prints resolved values without it"
    ),
    "--package optim": "-p optim: needs --cfg; write --cfg job -p optim",
    "--package foo": "--package: not an option; write --cfg job --package SECTION",
    "--cfg job -p optm": "-p optm: no such section; give one of augment, autotune, checkpoint, "
    "data, loader, log, model, optim, profile, run, schedule, train",
    "--cfg hydra": "--cfg=hydra: Hydra's own settings are not used; write --cfg job",
    "optim.lr=0.1, 0.2": "0.2: is not key=value; a list has no spaces: optim.lr=0.1,0.2",
    "--nesterov": "--nesterov: not an option; write optim.nesterov=true",
    "--name x": "--name: not an option; --help lists all keys",
    "--foo": "--foo: not an option; --help lists all keys",
    "-x": "-x: not an option; --help lists all keys",
    "--cfg=all": "--cfg=all: Hydra's own settings are not used; write --cfg job",
    "--foo --lr 0.1 data.root=/x": (
        "--foo, --lr: not options; write optim.lr=0.1; --help lists all keys"
    ),
    "/imagenet": "/imagenet: is not key=value; write data.root=/imagenet",
    "-a resnet18 --lr 0.1 /imagenet": (
        "-a, --lr: not options; write model.name=resnet18 optim.lr=0.1 data.root=/imagenet"
    ),
    "optim.lr=0.1 /imagenet": "/imagenet: is not key=value; write data.root=/imagenet",
    "data.root=/my pics/a": (
        "pics/a: is not key=value; a value with spaces needs quotes: 'data.root=/my pics/a'"
    ),
    "run.name=a /imagenet": "/imagenet: is not key=value; write data.root=/imagenet",
    "demo": "demo: is not key=value; write recipe=demo",
    "@foo=1": "@foo=1: there is no key @foo=1; --help lists all keys",
    "adamw": "adamw: is not key=value; write optim=adamw",
    "help": "help: is not key=value; --help lists all keys",
    "data.root": "data.root: has no value; write data.root=VALUE",
    "optim.lr train.epochs=3": "optim.lr: has no value; write optim.lr=VALUE",
    "recipe=demo optim.lr 0.3": (
        "optim.lr 0.3: a key and its value are one word; write optim.lr=0.3"
    ),
    "optim.lr = 0.3": "optim.lr = 0.3: a key and its value are one word; write optim.lr=0.3",
    "optim.lr= 0.3": "optim.lr= 0.3: a key and its value are one word; write optim.lr=0.3",
    "optim.lr =0.3": "optim.lr =0.3: a key and its value are one word; write optim.lr=0.3",
    "optim.lr: 0.3 train.epochs=3": (
        "optim.lr: 0.3: a key and its value are one word; write optim.lr=0.3"
    ),
    "optim.lr:0.3": "optim.lr:0.3: a key and its value are one word; write optim.lr=0.3",
    "model: resnet18": "model: resnet18: a key and its value are one word; write model=resnet18",
    "optim.betas=[0.9, 0.95] train.epochs=3": "optim.betas=[0.9,: a bracket is not closed; "
    "write 'optim.betas=[0.9, 0.95]', in quotes",
    "optim.betas=[0.9": "optim.betas=[0.9: a bracket is not closed",
    """'augment.batch={"mixup": 0.2}'""": 'augment.batch={"mixup": 0.2}: cannot be read as '
    "key=value; write 'augment.batch={mixup: 0.2}'",
}


@pytest.mark.parametrize("typed", FLAGS)
def test_arguments_that_are_not_key_equals_value(
    typed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal(shlex.split(typed), capsys) == FLAGS[typed]


def test_advice_refers_to_existing_keys() -> None:
    """Each override in the advice composes, and none hides a key."""
    overrides = {remedy for remedy in hints.REMEDIES.values() if re.match(r"[\w.]+=", remedy)}
    values = {
        "data.image_size": "64",
        "data.val_size": "64",
        "data.root": "/x",
        "model.weights": "w.pt",
        "optim": "adamw",
        "schedule": "step",
        "recipe": "demo",
        "train.bce_threshold": "0.2",
    }
    values_instead = [
        remedy.removeprefix("write ").partition(";")[0] for remedy in hints.VALUES.values()
    ]
    for remedy in overrides:
        override = remedy.replace("{}", values.get(remedy.partition("=")[0], "1"))
        needed = ["schedule=linear"] if "final_lr" in override else []  # step does not use it
        needed += ["optim=adamw"] if "optim.eps" in override else []  # sgd has none
        needed += ["train.loss=bce"] if "bce_threshold" in override else []
        cli.load([DATA, *needed, override])
    cli.load([DATA, *values_instead])
    assert len(overrides) > 20 and set(hints.MEANINGS) <= set(cli.KEYS)
    last_parts = {key.rpartition(".")[2].replace("_", "-") for key in cli.KEYS}
    assert set(hints.REMEDIES) & last_parts == {
        "batch",
        "steps",
    }  # of lists, which nobody means by these
    assert set(hints.REMEDIES) & set(cli.GROUPS) == {
        "data",
        "model",
    }  # their values are paths and names, not choices


def test_if_a_key_is_given_twice_the_wrong_override_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for wrong in ("optim.lr=abc", "optim.lr=???", "optim.lr=${nope}"):
        assert refusal([DATA, "optim.lr=0.1", wrong], capsys).startswith(f"{wrong}: ")
        if "$" not in wrong:  # only the last one is resolved
            assert refusal([DATA, wrong, "optim.lr=0.1"], capsys).startswith(f"{wrong}: ")
    assert refusal([DATA, "optim.lr=0.1", "optim.lr=-2"], capsys).startswith("optim.lr=-2: ")
    assert cli.load([DATA, "optim.lr=0.1", "optim.lr=0.2"]).optim.lr == 0.2


PATHS = [
    "/data/ü b",
    "/d/(2012)",
    "/d/a=b",
    "/d/[x",
    "/d/{x}",
    "/d/#1",
    "/d/it's",
    "/d/a,b",
    "/d/x\\",
    "/d/\\'x",
    "~/%$ x",
    "/日本",
]


@pytest.mark.parametrize("path", PATHS)
def test_a_path_is_taken_literally(path: str) -> None:
    config = cli.load([f"data.root={path}", f"run.dir={path}", f"data.train={path}"])
    assert (config.data.root, config.run.dir, config.data.train) == (path, path, path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("model: {nam: resnet18}", "In 'recipe/mine': model.nam: Key 'nam' not in 'Model'"),
        (
            "train: {epochs: six}",
            "In 'recipe/mine': train.epochs: Value 'six' of type 'str' could not be converted to "
            "Float",
        ),
        (
            "train: {epochs: 3",
            "conf/recipe/mine.yaml: line 3: is not YAML (expected ',' or '}', but got "
            "'<stream end>'); correct",
        ),
    ],
)
def test_a_mistake_in_a_recipe_is_named(
    content: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(schema.FOLDER, tmp_path / "conf")
    (folder / "recipe" / "mine.yaml").write_text(f"# @package _global_\n{content}\n")
    monkeypatch.setattr(schema, "FOLDER", folder)
    with pytest.raises(UserError) as error:
        cli.load([DATA, "recipe=mine"])
    assert says in str(error.value)
    cli.load([DATA, "recipe=demo"])


@pytest.mark.parametrize("word", ["1.10", "1_2", "1e5", "007", "true", "2026_07_01", "nan"])
def test_a_name_that_looks_like_a_number_is_a_string(word: str) -> None:
    assert cli.load([DATA, f"run.name={word}"]).run.name == word


def test_only_local_rank_0_prints_a_mistake(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit) as ended:
        cli.fail("optim.lrr=3: there is no key")
    assert (ended.value.code, capsys.readouterr().err) == (2, "")
    cli.complain("a file cannot be read")  # every rank prints its own failures
    assert capsys.readouterr().err == "train.py: a file cannot be read\n"


@pytest.mark.usefixtures("own_logging")
def test_a_log_message_cannot_control_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    cli.log_to_stderr(force=True)
    logging.getLogger("index").warning("%s: no image\nuse another folder", "d\x1b[31m/\r\udcff")
    assert capsys.readouterr().err == (
        "WARNING: d\\x1b[31m/\\r\\udcff: no image\nuse another folder\n"
    )


def test_mistakes_name_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in ("--foo", "foo=1"):
        with pytest.raises(SystemExit):
            cli.parse([DATA, wrong], script="scripts/bench.py", purpose="")
        assert capsys.readouterr().err.startswith("scripts/bench.py: ")


def test_first_mistake_is_found_among_good_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(["recipe=demo", "train.epochs=2", "optim.lr=abc"], capsys).startswith(
        "optim.lr=abc: "
    )


def test_checks() -> None:
    """Each returns the allowed values, or None. Includes None, bool and NaN."""
    assert number(1)(1) is None and number(1, above=True)(1) == "a number > 1"
    assert number(0, 1)(1.01) == "a number >= 0 and <= 1"
    assert number(0)(float("nan")) and number(0)(float("inf")) and number(0)(None)
    assert number(0, optional=True)(None) is None
    assert one_of("a", "b")("b") is None and one_of("a", "b")("c") == "one of a, b"
    assert each(number(0), count=2)([1, 2]) is None
    assert each(number(0), count=2)([1]) == "a list of 2 values"
    assert each(number(0), count=2)([1, -1]) == "a list of values, each a number >= 0"
    workers = auto_or(number(0), "a whole number", int)
    assert workers("auto") is None and workers(0) is None
    assert workers(False) == workers(0.0) == workers("4") == workers(-1) == "auto or a whole number"


def test_key_defaults_are_not_shared() -> None:
    assert key([1], NOTHING).default_factory() is not key([1], NOTHING).default_factory()
    assert Config().optim.betas is not Config().optim.betas


def test_show_formats_values_as_typed() -> None:
    assert [show(v) for v in (None, True, False, 0.1, "auto")] == [
        "null",
        "true",
        "false",
        "0.1",
        "auto",
    ]


def test_every_key_has_a_sentence() -> None:
    assert list(sentences()) == cli.KEYS


def test_load_raises_for_callers() -> None:
    with pytest.raises(UserError, match=r"^optim\.lr=-1: not allowed; give a number > 0$"):
        cli.load([DATA, "optim.lr=-1"])
