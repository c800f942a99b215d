"""The command line: what composes, what --help and --cfg job say, and how a mistake is answered."""

import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from conf import cli
from conf.schema import NOTHING, RESULT, Config, UserError, auto_or, each, key, named, number, one_of, show, walk

ROOT = Path(__file__).parents[2]
DATA = "data.root=/nowhere"  # composing looks at no folder
CHOICES = [(group, choice) for group in cli.GROUPS for choice in cli.choices(group)]


def leaves(config: Config) -> dict[str, object]:
    return {name: value for name, _, value in walk(config)}


def sections(config: Config) -> dict[str, object]:
    """What a user can set, nested."""
    return {name: value for name, value in asdict(config).items() if isinstance(value, dict)}


def command(*arguments: str, cwd: Path, python: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run train.py as a person does."""
    line = [sys.executable, *python, str(ROOT / "train.py"), *arguments]
    return subprocess.run(line, cwd=cwd, capture_output=True, text=True, check=False)


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The line that `arguments` are refused with, without `train.py: `."""
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
    config = cli.load([f"{group}={choice}", DATA])
    name = (config.run.name or "").split(",")[0]
    told = {"loader": None, "augment": None, "recipe": name, "data": config.data.source}.get(group, choice)
    assert told in (None, choice)
    names = {"optim": config.optim.name, "schedule": config.schedule.name, "model": config.model.name}
    assert names.get(group, choice) == choice


def test_defaults_are_those_of_pytorch_examples() -> None:
    config = cli.load([DATA])
    assert config == cli.load(["recipe=imagenet_rn50", DATA])
    assert (config.model.name, config.train.epochs, config.loader.batch_size) == ("resnet50", 90, 256)
    assert (config.optim.name, config.optim.lr, config.optim.momentum, config.optim.weight_decay) == ("sgd", 0.1, 0.9, 1e-4)
    assert (config.schedule.name, config.schedule.step_epochs, config.schedule.step_gamma) == ("step", 30, 0.1)
    assert config.schedule.warmup_epochs == 0 and config.train.label_smoothing == 0 and config.optim.decay_norms
    assert config.augment.train == [{"random_resized_crop": {"size": 224}}, "horizontal_flip"]
    assert config.augment.val == [{"resize": {"size": 224, "crop_ratio": 0.875}}, {"center_crop": {"size": 224}}]
    assert config.augment.batch == []


def test_help_tells_the_defaults_that_compose() -> None:
    declared, composed = leaves(Config()), leaves(cli.load([DATA]))
    resolved = {"data.val_size", "run.name", "run.dir"}
    assert {k for k in declared if declared[k] != composed[k]} == {"data.root", "augment.train", "augment.val", *resolved}
    assert (composed["data.val_size"], composed["run.dir"]) == (224, f"runs/{composed['run.name']}")


def test_the_more_particular_wins() -> None:
    demo = cli.load(["recipe=demo"])
    assert (demo.model.name, demo.data.image_size, demo.optim.lr, demo.schedule.name) == ("resnet_tiny", 64, 0.2, "cosine")
    assert (demo.run.dir, demo.data.root, demo.data.source) == ("runs/demo", "data/demo", "demo")
    assert demo.augment.train[0]["random_resized_crop"]["size"] == 64
    other = cli.load(["model=resnet18", "optim.lr=1", "recipe=demo", "run.name=mine", "data.image_size=32"])
    assert (other.model.name, other.optim.lr, other.schedule.name, other.run.dir) == ("resnet18", 1, "cosine", "runs/mine")
    assert other.augment.train[0]["random_resized_crop"]["size"] == 32


def test_loading_leaves_nothing_behind() -> None:
    first = cli.load(["recipe=demo"])
    first.augment.train.clear()
    first.data.mean[0] = 9
    assert cli.load(["recipe=demo"]).augment.train
    assert Config().data.mean == cli.load([DATA]).data.mean == [0.485, 0.456, 0.406]


def test_values_keep_their_types() -> None:
    lists = ["augment.batch=[{mixup: {alpha: 0.3}}, cutmix]", "optim.betas=[0.8, 0.99]", "data.mean=[0, 1, 0.5]"]
    plain = [
        "model.compile=off",
        "loader.workers=3",
        "train.max_steps=7",
        "++optim.lr=1e-2",
        "optim.clip_norm=2",
        "train.epochs=3",
    ]
    config = cli.load([DATA, "optim.name=adamw", *lists, *plain, "model.channels_last=true", "data.train=/elsewhere/train set"])
    assert config.augment.batch == [{"mixup": {"alpha": 0.3}}, "cutmix"]
    assert (config.optim.betas, config.data.mean) == ([0.8, 0.99], [0.0, 1.0, 0.5])
    assert (config.model.compile, config.loader.workers, config.train.max_steps) == ("off", 3, 7)
    assert (config.optim.lr, config.optim.clip_norm, config.train.epochs) == (0.01, 2.0, 3.0)
    assert config.model.channels_last is True
    assert config.data.train == "/elsewhere/train set"


def test_yaml_says_the_same_as_the_config() -> None:
    for overrides in (["recipe=demo", "model.compile=off"], ["recipe=imagenet_vit_s16", DATA, "run.name='yes'"]):
        config = cli.load(overrides)
        assert yaml.safe_load(cli.to_yaml(config)) == sections(config)


def test_help_lists_every_choice_and_every_key_without_importing_torch(tmp_path: Path) -> None:
    done = command("--help", cwd=tmp_path, python=("-X", "importtime"))
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    for group in cli.GROUPS:
        choices = next(line for line in lines if line.startswith(f"  {group}="))
        assert choices.split("=")[1].replace("|", " ").split() == cli.choices(group)
    for name, field, _ in walk(Config()):
        (line,) = (line for line in lines if line[2:].startswith(f"{name}="))
        assert line[:2] == ("* " if field.metadata["affects"] & RESULT else "  ")
        assert line.endswith(" " + field.metadata["sentence"])
    imported = {line.split("|")[-1].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert "hydra" in imported  # so the list does list imports
    assert imported.isdisjoint({"torch", "torchvision", "numpy", "tensorboard", "PIL"})
    assert list(tmp_path.iterdir()) == []


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


def test_a_typo_on_the_real_command_line(tmp_path: Path) -> None:
    done = command("recipe=demo", "optm.lr=0.3", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "train.py: optm.lr=0.3: there is no key optm.lr; did you mean optim.lr?\n"
    assert list(tmp_path.iterdir()) == []


# override -> what the one line must say besides the override itself
MISTAKES = {
    # a typo in a key, also behind + and ++
    "optm.lr=1": "there is no key optm.lr; did you mean optim.lr?",
    "+optm.lr=1": "there is no key optm.lr; did you mean optim.lr?",
    "++optm.lr=1": "there is no key optm.lr; did you mean optim.lr?",
    "optim.learning_rate=1": "there is no key optim.learning_rate",
    "train.lr=1": "did you mean optim.lr?",
    "data.rot=/x": "did you mean data.root?",
    "+foo=1": "there is no key foo",
    "++data.foo.bar=1": "there is no key data.foo.bar",
    "optim.betas.0=0.5": "did you mean optim.betas?",
    "augment.train.0=resize": "did you mean augment.train?",
    "_target_=os.system": "there is no key _target_",
    "+optim._target_=os.system": "there is no key optim._target_",
    "hydra.run.dir=/tmp/x": "run.dir=",
    "hydra/launcher=basic": "there is no key hydra/launcher",
    "optim={lr: 1}": "choose one of adamw, sgd",
    "train=3": "is a group of keys: train.epochs, train.max_steps",
    "++train={foo: 3}": "is a group of keys: train.epochs, train.max_steps",
    # adding and removing
    "+optim.lr=1": "write optim.lr=1",
    "+recipe=demo": "write recipe=demo",
    "~optim.lr": "cannot be removed",
    "~optim": "choose one of adamw, sgd",
    # a choice that is not there
    "recipe=imagenet_rn5": "choose one of cifar10, demo, imagenet_rn18, imagenet_rn50,",
    "optim=sdg": "did you mean sgd?",
    "model=resnet_tin": "did you mean resnet_tiny?",
    "data=floder": "did you mean folder?",
    "recipe=null": "choose one of",
    "optim=": "choose one of adamw, sgd",
    "optim=[sgd,adamw]": "choose one of adamw, sgd",
    "optim=../optim/sgd": "choose one of adamw, sgd",
    "optim@foo=sgd": "optim.lr",
    "recipe=demo,cifar10": "sweeps are not supported",
    "optim.lr=0.1,0.2": "sweeps are not supported",
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
    "log.tensorboard=yes": "give true or false",
    "++log.tensorboard=null": "give true or false",
    "optim.name=null": "give a word",
    "data.mean=0.5": "give list[float]",
    "data.mean=[a,b,c]": "give list[float]",
    "augment.train=5": "give list",
    "augment.train=null": "give list",
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
    # not one of the words
    "train.device=gpu": "give one of auto, cpu, cuda",
    "train.precision=fp16": "give one of auto, bf16, tf32, fp32",
    "model.compile=true": "give one of auto, off, default",
    "optim.name=lion": "give one of sgd, adamw",
    "schedule.name=cos": "give one of constant, step, cosine, linear",
    "data.on_error=ignore": "give one of raise, skip",
    "data.source=s3": "give one of folder, demo, fake",
    "loader.start_method=thread": "give one of forkserver, spawn, fork",
    "run.name=a/b": "give a name without slashes",
    "run.name=..": "give a name without slashes",
    "run.dir=": "give a path",
    # interpolation
    "run.dir=${nope}": "Interpolation key 'nope' not found",
    "optim.lr=${optim.lr}": "Recursive interpolation",
}


@pytest.mark.parametrize("override", MISTAKES)
def test_mistake_is_one_line_and_status_2(
    override: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    line = refusal([DATA, override], capsys)
    key = override.split("=")[0].lstrip("+~").split("@")[0]
    assert key in line
    assert MISTAKES[override] in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "override", ["foo", "optim.lr", "optim.lr=[1", "run.name=a\nb", "=1", "", " optim.lr=1", "optim.lr=1}"]
)
def test_unreadable_override_is_named(override: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal([DATA, override], capsys)
    assert " ".join(override.split()) in line


def test_nesterov_without_momentum(capsys: pytest.CaptureFixture[str]) -> None:
    assert "optim.momentum" in refusal([DATA, "optim.nesterov=true", "optim.momentum=0"], capsys)


def test_missing_root_says_what_to_pass_and_offers_the_demo(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["data.root=null"], ["data.root="]):
        line = refusal(arguments, capsys)
        assert line.startswith("data.root is missing: pass data.root=")
        assert "recipe=demo" in line


@pytest.mark.parametrize("option", ["--foo", "-x", "--cfg=all", "--config-dir=/tmp"])
def test_unknown_option(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal([DATA, option], capsys).startswith(f"{option}: not an option")


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
def test_a_path_is_taken_as_it_is(path: str) -> None:
    config = cli.load([f"data.root={path}", f"run.dir={path}", f"data.train={path}"])
    assert (config.data.root, config.run.dir, config.data.train) == (path, path, path)


@pytest.mark.parametrize(
    ("content", "says"),
    [("model: {nam: resnet18}", "In 'recipe/mine': model.nam: Key 'nam' not in 'Model'"),
     ("train: {epochs: six}", "In 'recipe/mine': train.epochs: Value 'six' of type 'str' could not be converted to Float")],
)  # fmt: skip
def test_a_mistake_in_a_recipe_is_named(content: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = shutil.copytree(cli.FOLDER, tmp_path / "conf")
    (folder / "recipe" / "mine.yaml").write_text(f"# @package _global_\n{content}\n")
    monkeypatch.setattr(cli, "FOLDER", folder)
    with pytest.raises(UserError) as error:
        cli.load([DATA, "recipe=mine"])
    assert says in str(error.value)


@pytest.mark.parametrize("word", ["1.10", "1_2", "1e5", "007", "true", "2026_07_01", "nan"])
def test_a_word_that_looks_like_a_number_is_a_word(word: str) -> None:
    assert cli.load([DATA, f"run.name={word}"]).run.name == word


@pytest.mark.parametrize("option", ["-m", "--multirun"])
def test_sweeps_are_refused_with_a_way_out(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal([DATA, option], capsys) == (
        f"{option}: sweeps are not supported; start one run per value, each with its own run.name"
    )


def test_of_several_ranks_the_first_of_a_node_speaks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit) as ended:
        cli.fail("optim.lrr=3: there is no key")
    assert (ended.value.code, capsys.readouterr().err) == (2, "")
    cli.complain("a file cannot be read")  # a failure of its own is every rank's to tell
    assert capsys.readouterr().err == "train.py: a file cannot be read\n"


def test_mistakes_name_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in ("--foo", "foo=1"):
        with pytest.raises(SystemExit):
            cli.parse([DATA, wrong], script="scripts/bench.py", purpose="")
        assert capsys.readouterr().err.startswith("scripts/bench.py: ")


def test_first_mistake_is_found_among_good_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(["recipe=demo", "train.epochs=2", "optim.lr=abc"], capsys).startswith("optim.lr=abc: ")


def test_checks() -> None:
    """Each says what is allowed, or nothing; None, bool and NaN are where such checks go wrong."""
    assert number(1)(1) is None and number(1, above=True)(1) == "a number > 1"
    assert number(0, 1)(1.01) == "a number >= 0 and <= 1"
    assert number(0)(float("nan")) and number(0)(float("inf")) and number(0)(None)
    assert number(0, optional=True)(None) is None
    assert one_of("a", True, None)("b") == "one of a, true, null"
    assert each(number(0), rising=True)([1, 1]) == "a rising list"
    assert each(number(0), rising=True, count=2)([1, 2]) is None
    workers = auto_or(number(0), "a whole number", int)
    assert workers("auto") is None and workers(0) is None
    assert workers(False) == workers(0.0) == workers("4") == workers(-1) == "auto or a whole number"
    assert named("a b") is None and named("") and named(".") and named("a/b")


def test_key_defaults_are_not_shared() -> None:
    assert key([1], NOTHING, "").default_factory() is not key([1], NOTHING, "").default_factory()
    assert Config().optim.betas is not Config().optim.betas


def test_show_writes_values_as_they_are_typed() -> None:
    assert [show(v) for v in (None, True, False, 0.1, "auto")] == ["null", "true", "false", "0.1", "auto"]


def test_every_key_has_a_sentence() -> None:
    for name, field, _ in walk(Config()):
        assert field.metadata["sentence"].strip(), name


def test_load_raises_for_callers() -> None:
    with pytest.raises(UserError, match=r"^optim\.lr=-1: not allowed; give a number > 0$"):
        cli.load([DATA, "optim.lr=-1"])
