"""The command line: composing, --help, --cfg job, and the messages for mistakes."""

import logging
import os
import re
import shlex
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from conf import cli
from conf.compose import SECTIONS
from conf.hints import ANSWERS, ROWS, what_to_write
from conf.overrides import read_override
from conf.schema import (
    KEYS,
    NAMES,
    RESULT,
    Config,
    UserError,
    config_values,
    group_names,
    sentences,
    show,
    walk,
)
from pipeline.augment import TRANSFORMS
from pipeline.batch_augment import BATCH_TRANSFORMS
from scripts.lib.options import split_paths
from tests.conf.refused import DATA, refusal
from tests.processes import ROOT, run_command, run_python

OPTIM, RECIPE = (", ".join(group_names(group)) for group in ("optim", "recipe"))
# tests/conf/test_recipes.py builds the choices of the other groups.
GROUPS = ("data", "loader", "optim", "schedule")
CHOICES = [(group, choice) for group in GROUPS for choice in group_names(group)]


def sections(config: Config) -> dict[str, object]:
    """The keys as nested dictionaries."""
    return {name: asdict(config)[name] for name in SECTIONS}


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_every_group_choice_composes(group: str, choice: str) -> None:
    """A file of optim or schedule has the name of the optimiser or schedule that it sets."""
    config = cli.load([f"{group}={choice}", DATA])
    if group in ("optim", "schedule"):
        assert getattr(config, group).name == choice


def test_defaults_are_those_of_pytorch_examples() -> None:
    config = cli.load([DATA])
    assert config == cli.load(["recipe=imagenet_rn50", DATA])
    expected = {
        "model.name": "resnet50",
        "train.epochs": 90,
        "train.label_smoothing": 0,
        "loader.batch_size": 256,
        "optim.name": "sgd",
        "optim.lr": 0.1,
        "optim.momentum": 0.9,
        "optim.weight_decay": 1e-4,
        "optim.decay_norms": True,
        "schedule.name": "step",
        "schedule.step_epochs": 30,
        "schedule.step_gamma": 0.1,
        "schedule.warmup_epochs": 0,
        "augment.train": [{"random_resized_crop": {"size": 224}}, "horizontal_flip"],
        "augment.val": [
            {"resize": {"size": 224, "crop_ratio": 0.875}},
            {"center_crop": {"size": 224}},
        ],
        "augment.batch": [],
    }
    composed, declared = config_values(config), config_values(Config())
    assert {name: composed[name] for name in expected} == expected
    # --help shows the composed defaults, except these.
    differ = {"data.root", "augment.train", "augment.val", "data.val_size", "run.name", "run.dir"}
    assert {name for name in composed if declared[name] != composed[name]} == differ


def test_values_keep_their_types() -> None:
    typed = {
        "augment.batch": ("[{mixup: {alpha: 0.3}}, cutmix]", [{"mixup": {"alpha": 0.3}}, "cutmix"]),
        "optim.betas": ("[0.8, 0.99]", [0.8, 0.99]),
        "model.compile": ("off", "off"),
        "model.channels_last": ("true", True),
        "loader.workers": ("3", 3),
        "++optim.lr": ("1e-2", 0.01),
        "train.epochs": ("3", 3.0),
        "data.train": ("/elsewhere/train set", "/elsewhere/train set"),
        "run.name": ("'yes'", "yes"),
    }
    config = cli.load(
        [DATA, "optim.name=adamw", *(f"{k}={text}" for k, (text, _) in typed.items())]
    )
    for name, (_, value) in typed.items():
        found = config_values(config)[name.lstrip("+")]
        assert found == value and type(found) is type(value)
    assert yaml.safe_load(cli.to_yaml(config)) == sections(config)


def test_help_lists_every_choice_and_every_key_without_importing_torch(tmp_path: Path) -> None:
    done = run_python("-X", "importtime", ROOT / "train.py", "--help", cwd=tmp_path)
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


LONG = "/" + 300 * "a"


def test_a_reader_that_stops(tmp_path: Path) -> None:
    """As in `python train.py --help | head`."""
    read, write = os.pipe()
    os.close(read)
    done = run_command([sys.executable, ROOT / "train.py", "--help"], cwd=tmp_path, stdout=write)
    os.close(write)
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("variable", "words", "status", "message"),
    [
        ("PYTHONOPTIMIZE=2", ["train.py", "--help"], 0, ""),
        ("PYTHONSAFEPATH=1", ["train.py", "--help"], 0, ""),
        ("A=", ["train.py", "--config-dir", LONG], 1, f"{LONG}/augment'"),
        ("A=", ["scripts/report.py", LONG], 1, f"File name too long: '{LONG}/"),
    ],
)
def test_surroundings(
    variable: str,
    words: list[str],
    status: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python without docstrings, or without the script's folder; and a path that is too long."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setenv(*variable.split("="))
    done = run_python(ROOT / words[0], *words[1:], cwd=tmp_path)
    assert done.returncode == status
    assert done.stderr.count("\n") == bool(message) and message in done.stderr


def test_an_unexpected_error_of_the_system_is_one_line(tmp_path: Path) -> None:
    """With the path, and the place in this program; after the start and outside of `main`, too."""
    for program in (
        "read_text('nowhere')",
        "from conf.cli import exit_status; exit_status(lambda: read_text('nowhere'))",
    ):
        begin = "import conf.start as s; s.set_up_process(); from conf.files import read_text; "
        done = run_python("-c", begin + program)
        assert done.returncode == 1
        (printed,) = done.stderr.splitlines()
        assert "No such file or directory: 'nowhere'; check the path" in printed
        assert re.search(r" \(conf/files\.py:\d+\)$", printed)


def test_cfg_job_prints_yaml(capsys: pytest.CaptureFixture[str]) -> None:
    """Without data, too."""
    for words, of in ((["optim.lr=0.3"], None), (["-p", "optim", "recipe=demo"], "optim")):
        with pytest.raises(SystemExit) as stop:
            cli.parse(["--cfg", "job", *words], script="train.py", purpose="")
        assert stop.value.code == 0
        expected = sections(cli.load(words[-1:], runnable=False))
        assert yaml.safe_load(capsys.readouterr().out) == (expected[of] if of else expected)


# override -> a part of the error message
MISTAKES = {
    # an unknown key
    "data.valfraction=0.1": "there is no key data.valfraction; did you mean data.val_fraction?",
    "+optm.lr=1": "there is no key optm.lr; write optim.lr=1",
    "batchsize=32": "did you mean loader.batch_size?",
    "optim@foo=sgd": "there is no key optim@foo; did you mean optim?",
    "~optim.lr": "is not key=value",
    "hydra/launcher=basic": "Hydra's own settings are for a sweep (-m)",
    "checkpoint=3": "did you mean checkpoint.every_steps or checkpoint.keep or checkpoint.resume",
    "model.args.depth=3": "write 'model.args={depth: 3}'",
    # an unknown choice, also under an injected path
    "recipe=imagenet_rn5": f"choose one of {RECIPE}; did you mean imagenet_rn50?",
    "optim=../optim/sgd": f"choose one of {OPTIM}",
    "model=resnet101": "; for any other model write model.name=resnet101",
    "schedule=cosineannealinglr": "one of constant, cosine, linear, step; did you mean cosine?",
    "data=/imagenet": "for a folder of images write data.root=/imagenet",
    "optim.lr=0.1,0.2": "is a sweep; `train.py -m` trains once for each value",
    "data.val_fold=1/5,2/5": "is a sweep; `train.py -m` trains once for each value",
    # no effect
    "optim.betas=[0.8,0.9]": "no effect with optim.name=sgd; give optim.name=adamw or lamb, or ",
    "schedule.final_lr=0.5": "has no effect with schedule.name=step; give schedule.name=",
    "data.fake_images=50": "; give data.source=fake, or leave it out",
    # a wrong type
    "optim.lr=abc": "give a number",
    "log.trackers=wandb": "give names among tensorboard, wandb, in brackets",
    "data.train=null": "give a name or a path",
    "augment.train=5": "give a list, in brackets",
    "optim.betas=0.9,0.95": "give 2 values in brackets, each a number",
    # a value that is not allowed
    "loader.workers=true": "give auto or a whole number from 0 to 4096",
    "model.channels_last=1": "give auto or true or false",
    "train.epochs=1e308": "give a number > 0",
    "train.epochs=0": "give a number > 0",
    "data.val_fold=6/5": "give a fold such as 2/5, or null",
    "data.val_fold=1/1": "give a fold such as 2/5, or null",
    "data.val_fraction=1": "give a number >= 0 and < 1",
    "optim.clip_norm=-1": "give a number > 0 or null",
    "optim.weight_decay=inf": "give a number >= 0",
    "data.std=[]": "give 1 or more values in brackets, each a number > 0",
    "data.mean=[-1]": "give 1 or more values in brackets, each a number >= 0 and <= 1",
    "profile.steps=[3,2]": "give two steps, the first not after the last",
    "train.class_weights=even": "give balanced, null, or weights > 0 by class in braces, such as",
    "run.name=a/b": "give a name without slashes",
    "run.dir=": "give a path",
    "data.root=[a, 3]": "give a folder, or a list of folders",
    "data.root=s3://b/photos": "is not a path; copy it to a disk with `aws s3 sync s3://b/photos ",
    "data.root=[/a,gs://b]": "=gs://b: is not a path; copy it to a disk with `gcloud storage rsync",
    "data.root=hf://datasets/a/b": "`hf download a/b --repo-type dataset --local-dir FOLDER` and ",
    "data.train=https://a.org/b.zip": "`curl -LO https://a.org/b.zip` and give this folder, or ",
    "data.val=az://b": "with `rclone copy az://b FOLDER` and give this folder, or mount it",
    "model.freeze=0": "give a whole number >= 1, the name of a stage, or null",
    "model.args={1: 2}": "give names and values in braces",
    # names of other programs
    "model.pretrained=true": "there is no key model.pretrained; write model.weights=pretrained",
    "drop_path=0.2": "write 'model.args={drop_path_rate: 0.2}'",
    "mixup=0.2": "put `mixup: {alpha: 0.2}` in augment.batch",
    "trainer.max_epochs=20": "there is no key trainer.max_epochs; write train.epochs=20",
    "experiment=demo": "write recipe=demo",  # of timm's flag, --experiment, see FLAGS
    "logger.wandb.project=a": "write 'log.trackers=[VALUE]'",
    "callbacks.early_stopping.patience=3": "a run is as long as its schedule",
    "hydra.run.dir=a": "write run.dir=a",
    "model._target_=a.B": "a config names no code",
    # interpolation
    "run.dir=${nope}": "Interpolation key 'nope' not found",
}


@pytest.mark.parametrize("override", MISTAKES)
def test_mistake_is_one_line_and_status_2(
    override: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refusal([DATA, override], capsys)
    assert line.startswith(f"{override.partition('=')[0]}") and MISTAKES[override] in line


def test_keys_that_need_another(capsys: pytest.CaptureFixture[str]) -> None:
    assert "optim.momentum" in refusal([DATA, "optim.nesterov=true", "optim.momentum=0"], capsys)
    both = [DATA, "data.val_fold=2/5", "data.val_fraction=0.2"]
    assert "data.val_fraction=0.2: has no effect with data.val_fold=2/5; give" in refusal(
        both, capsys
    )
    for arguments in ([], ["data.root=null"]):
        line = refusal(arguments, capsys)
        assert line.startswith("data.root is missing: pass data.root=") and "recipe=demo" in line


# arguments that are not key=value -> the whole error message
FLAGS = {
    "-m=true": "argument -m/--multirun: ignored explicit argument 'true'",
    "--cfg hydra": "argument --cfg: invalid choice: 'hydra' (choose from 'job')",
    "optim.lr = 0.3": "optim.lr: is not key=value; write optim.lr=VALUE",
    "optim.betas=[0.9, 0.95]": "0.95]: is not key=value; a value with spaces needs quotes: "
    "'optim.betas=[0.9, 0.95]'",
    "data.root=/my pics/a": (
        "pics/a: is not key=value; a value with spaces needs quotes: 'data.root=/my pics/a'"
    ),
    "run.name=a /imagenet": "/imagenet: is not key=value; write data.root=/imagenet",
    "demo": "demo: is not key=value; write recipe=demo",
    "help": "help: is not key=value; --help lists all keys",
    "''": ": is not key=value; --help lists all keys",
    "=1": "=1: there is no key =1; --help lists all keys",
    "--optim.lr 0.1": "--optim.lr: not an option; write optim.lr=0.1",
    "--arch": "--arch: not an option; write model.name=VALUE",
    "--drop 0.1 --drop-path 0.2": "--drop, --drop-path: not an option; "
    "write 'model.args={drop_rate: 0.1, drop_path_rate: 0.2}'",
    "-p 10": "-p: not an option; write log.every_steps=10",
    "--deepspeed": "--deepspeed: not an option; --help lists all keys",
    "-c args.yaml": "-c: not an option; "
    "recipe=NAME for a file in conf/recipe, or in the folder of --config-dir",
    "--experiment a": "--experiment: not an option; write run.name=a",
    "--opt=adamw --drop-path 0.2": "--opt, --drop-path: not an option; "
    "write optim=adamw 'model.args={drop_path_rate: 0.2}'",
    "--mean 0.5 0.4 0.3 --scale 0.08 1 --pin-mem": "--mean, --scale, --pin-mem: not an option; "
    "write 'data.mean=[0.5,0.4,0.3]'; --scale: put `scale: [0.08,1]` in random_resized_crop of "
    "augment.train; --pin-mem: decided by the program: batches are copied to the GPU ahead of the "
    "step from page-locked memory",
    "--trainer.precision 16-mixed": "--trainer.precision: not an option; train.precision=auto is "
    "bf16, or fp16 where a GPU has no bf16; bf16, fp16, tf32 and fp32 are the others",
    "-e": "-e: not an option; `python scripts/evaluate.py CHECKPOINT` evaluates",
    "--dist-url tcp://x --world-size 2": "--dist-url, --world-size: not an option; "
    "`torchrun --nproc-per-node N train.py ...` starts one process for each GPU",
    "--foo --lr 0.1 data.root=/x": (
        "--foo, --lr: not an option; write optim.lr=0.1; --foo: --help lists all keys"
    ),
    "--pretrained -a resnet18 '/my images'": (
        "--pretrained, -a: not an option; write model.weights=pretrained model.name=resnet18 "
        "'data.root=/my images'"
    ),
}


@pytest.mark.parametrize("typed", FLAGS)
def test_arguments_that_are_not_key_equals_value(
    typed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal(shlex.split(typed), capsys) == FLAGS[typed]


def test_every_flag_of_other_trainers_is_answered() -> None:
    """The parsers' flags are in flags_of_others.txt. An answer names keys and transforms here."""
    lines = Path(__file__).with_name("flags_of_others.txt").read_text().splitlines()
    flags = {word for line in lines if not line.startswith("#") for word in line.split()}
    assert len(flags) > 260
    assert [flag for flag in flags if re.search("--help|did you mean", what_to_write(flag))] == []
    assert len(ANSWERS) == sum(len(names.split()) for names, _ in ROWS)  # none is there twice
    transforms = TRANSFORMS | BATCH_TRANSFORMS
    for answer in ANSWERS.values():
        for name in re.findall(rf"(?<![/\w])(?:{'|'.join(SECTIONS)})\.[a-z]\w*", answer):
            assert name in KEYS or name == "train.py", answer
        for name in re.findall(r"(?:docs|scripts|engine)/[\w.-]+\w", answer):
            assert (ROOT / name).exists(), answer
        for name in re.findall(r"put `([\w.]+): \{\w", answer):
            assert name in transforms, answer


@pytest.mark.parametrize("answer", [a for a in ANSWERS.values() if a.startswith("write ")])
def test_what_an_answer_tells_to_write_is_allowed(answer: str) -> None:
    values = {"optim": "adamw", "schedule": "linear", "recipe": "demo", "log.trackers": "wandb"}
    values |= {"model.compile": "tuned", "train.device": "cpu", "optim.betas": "0.9,0.95"}
    values |= {"train.bce_threshold": "0.2", "data.image_size": "64", "data.val_size": "64"}
    override = answer.removeprefix("write ")
    read_override(override.replace("{}", values.get(override.partition("=")[0], "1")))


@pytest.mark.parametrize("key", NAMES)
def test_no_flag_hides_a_key(key: str) -> None:
    """`--data /imagenet` and `--model resnet50` mean the keys of these groups."""
    expected = {"data": "data.root", "model": "model.name"}.get(key, key)
    assert what_to_write(f"--{key}").startswith(f"write {expected}=")


def test_if_a_key_is_given_twice_the_wrong_override_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for wrong in ("optim.lr=abc", "optim.lr=${nope}", "optim.lr=[1"):
        assert refusal([DATA, "optim.lr=0.1", wrong], capsys).startswith(f"{wrong}: ")
    assert refusal([DATA, "optim.lr=abc", "optim.lr=0.1"], capsys).startswith("optim.lr=abc: ")
    assert cli.load([DATA, "optim.lr=0.1", "optim.lr=0.2"]).optim.lr == 0.2


PATHS = ["/data/ü b", "/d/(2012)", "/d/a=b", "/d/[x", "/d/{x}", "/d/#1", "/d/it's", "/d/a,b"]
PATHS += ["/d/x\\", "/d/\\'x", "~/%$ x", "/日本"]


@pytest.mark.parametrize("path", PATHS)
def test_a_path_is_taken_literally(path: str) -> None:
    config = cli.load([f"data.root={path}", f"run.dir={path}", f"data.train={path}"])
    assert (config.data.root, config.run.dir, config.data.train) == (path, path, path)


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
    cli.complain("a file cannot be read", "train.py")  # every rank prints its own failures
    assert capsys.readouterr().err == "train.py: a file cannot be read\n"


@pytest.mark.usefixtures("own_logging")
def test_a_log_message_cannot_control_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    cli.log_to_stderr(force=True)
    logging.getLogger("index").warning("%s: no image\nuse another folder", "d\x1b[31m/\r\udcff")
    assert capsys.readouterr().err == (
        "WARNING: d\\x1b[31m/\\r\\udcff: no image\nuse another folder\n"
    )


def test_show_formats_values_as_typed() -> None:
    values = [None, True, False, 0.1, 3.0, "auto", {"a": None}]
    assert " ".join(map(show, values)) == "null true false 0.1 3 auto {a: null}"


def test_paths_and_overrides_of_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run,optim.lr=0.3").mkdir()
    Path("a.pth").touch()
    words = ["run,optim.lr=0.3", "data.val_size=64", "a.pth", "augment=demo"]
    assert split_paths(words, what="a file") == (
        ["run,optim.lr=0.3", "a.pth"],
        ["data.val_size=64", "augment=demo"],
    )
    for word, message in {
        "gone.pth": "^gone.pth: no such file or folder; give a file$",
        "run,optim.lr=0.4": "^run,optim.lr=0.4: ",
        "data.root": "^data.root: is not key=value; write data.root=VALUE$",
        "data.val_size=x": "not allowed",
        "--lr=3": "write optim.lr=3",
    }.items():
        with pytest.raises(UserError, match=message):
            split_paths(["a.pth", word], what="a file")
