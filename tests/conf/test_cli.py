"""Command line: composing, --help, --cfg job."""

import csv
import os
import re
import shutil
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from subprocess import PIPE
from unittest.mock import Mock, patch

import pytest
import yaml

from conf import cli
from conf.compose import from_overrides
from conf.overrides import answer_to
from conf.schema import FIELDS, FOLDER, SECTIONS, Config, config_values, group_names, help_texts
from tests.conf.errors import DATA
from tests.helpers.processes import (
    ROOT,
    Started,
    needs_extras,
    needs_linux,
    run_command,
    run_python,
)


@needs_extras
def test_schema_defaults_equal_composed_config():
    """Except for the keys below, whose values tests/repository/equal checks."""
    composed, declared = config_values(from_overrides([DATA])), config_values(Config())
    differ = {"data.root", "augment.train", "augment.val", "data.val_size", "run.name", "run.dir"}
    differ |= {"data.on_device", "data.storage"}  # config.yaml sets this line's keys and the next
    differ |= {"model.rewrite", "log.values", "log.observers"}
    assert {name for name in composed if declared[name] != composed[name]} == differ


def test_help_lists_all_keys_without_importing_torch(tmp_path):
    done = run_python("-X", "importtime", ROOT / "train.py", "--help", cwd=tmp_path)
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    for group in cli.GROUPS:
        choices = next(line for line in lines if line.startswith(f"  {group}="))
        assert choices.split("=")[1].replace("|", " ").split() == group_names(group)
    for name, field in FIELDS.items():
        (line,) = (line for line in lines if line[2:].startswith(f"{name}="))
        assert line[:2] == ("* " if field.metadata["affects_result"] else "  ")
        assert line.endswith(" " + help_texts()[name])
    assert help_texts()["optim.lr"].startswith("peak learning rate for the global batch; not")
    imported = {line.split("|")[-1].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert "hydra" in imported  # make sure that the list contains imports
    assert imported.isdisjoint({"torch", "numpy", "tensorboard", "PIL", "pipeline", "engine"})
    assert list(tmp_path.iterdir()) == []


def test_answer_to_foreign_flags_names_existing_keys():
    answers = (FOLDER / "flags.csv").read_text()
    assert set(re.findall(r"\b([a-z]+\.[a-z_]+)=", answers)) <= FIELDS.keys()
    # Long options of each trainer
    with Path(__file__).with_name("options.csv").open(newline="", encoding="utf-8") as file:
        options = {word for row in csv.DictReader(file) for word in row["options"].split()}
    assert {option for option in options if not answer_to(option)} == set()
    assert "BatchNorm" in answer_to("--bn-momentum")


def test_help_text_for_section_and_key():
    group, *keys = cli.help_text("", "", "schedule").splitlines()
    assert group == "  schedule=  constant | cosine | linear | step"
    assert len(keys) == sum(name.startswith("schedule.") for name in FIELDS)
    (learning_rate,) = cli.help_text("", "", "lr").splitlines()
    assert learning_rate == cli.help_text("", "", "optim.lr")


def test_help_with_closed_pipe_and_full_disk():
    """A closed pipe, as in `python train.py --help | head`, needs no message."""
    command = [sys.executable, ROOT / "train.py", "--help"]
    read, write = os.pipe()
    os.close(read)
    assert run_command(command, stdout=write).stderr == ""
    os.close(write)
    needs_linux()
    with open("/dev/full", "w") as full:
        done = run_command(command, stdout=full)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "No space left on device" in done.stderr
    code = "import os, conf.start as c; c.set_up_process(); exit(os.system('echo >&2 && echo') > 0)"
    closed = ["sh", "-c", f'exec {sys.executable} -c "$0" <&- >&- 2>&-', code]
    assert run_command(closed).returncode == 0


@pytest.mark.parametrize("variable", ["PYTHONOPTIMIZE", "PYTHONSAFEPATH"])
def test_help_with_python_environment_variables(variable, tmp_path, monkeypatch):
    """Without docstrings or the script's directory in sys.path; also for a copy of train.py."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setenv(variable, "2")
    copy = Path(shutil.copy(ROOT / "train.py", tmp_path / "train_mine.py"))
    (tmp_path / "conf").symlink_to(ROOT / "conf")
    done = run_python(copy, "--help", cwd=ROOT / "conf")
    assert (done.returncode, done.stderr) == (0, "")
    assert "usage: python train_mine.py " in done.stdout


def test_run_main_reports_os_error_in_one_line(capsys):
    """The line includes the path. BrokenPipeError and KeyboardInterrupt print nothing."""
    assert cli.run_main(lambda: len(Path("nowhere").read_text())) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "No such file or directory: 'nowhere'; check the path" in error
    for raised, status in ((BrokenPipeError, 1), (KeyboardInterrupt, 130)):
        with patch("signal.signal") as handle:  # restored, or Python's exit prints it
            assert cli.run_main(Mock(side_effect=raised)) == status
        assert (capsys.readouterr().err, handle.call_args.args[1]) == ("", signal.getsignal(2))


def test_train_ctrl_c_before_torch_import():
    with Started([sys.executable, ROOT / "train.py", "data=fake"], stdout=PIPE, stderr=PIPE) as run:
        assert run.stdout.readline().startswith("start ")
        run.send_signal(signal.SIGINT)
        assert (*run.communicate(), run.returncode) == ("", "", -signal.SIGINT)  # 130 in a shell


@needs_extras
def test_cfg_job_prints_yaml(capsys):
    """`--cfg job` needs no data."""
    with pytest.raises(SystemExit, match="0"):
        cli.parse(["--cfg", "job", "run.name='yes'"], script="train.py", purpose="")
    printed = yaml.safe_load(capsys.readouterr().out)
    expected = asdict(from_overrides(["run.name='yes'"]))
    assert printed == {name: expected[name] for name in SECTIONS}


PATHS = ["/data/ü b", "/d/(2012)", "/d/a=b", "/d/[x", "/d/{x}", "/d/#1", "/d/it's", "/d/a,b"]
PATHS += ["1.10", "1_2", "1e5", "007", "true", "2026_07_01", "nan", "/d/x\\", "/d/\\'x", "/%$ x"]
PATHS += ["os:system", "/日本", "/macOS 9.41\u202fAM\xa0(1)", "/not-UTF-8/\udce9"]


@pytest.mark.parametrize("path", PATHS)
def test_overrides_take_paths_literally(path):
    config = from_overrides([f"data.root={path}", f"run.dir=/x{path}", f"data.train={path}"])
    assert (config.data.root, config.run.dir, config.data.train) == (path, f"/x{path}", path)


def test_overrides_expand_home_in_paths(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    config = from_overrides(["data.root=~/a", "run.dir=~/a", "model.weights=~/a"])
    assert {config.data.root, config.run.dir, config.model.weights} == {"/home/ada/a"}
