"""scripts/train.sbatch with replacements for Slurm's commands."""

import os
import sys
from subprocess import PIPE

import pytest

from tests.helpers.processes import Started, run_command, wait_for
from tests.helpers.results import logged_steps, rows
from tests.helpers.small_run import command

pytestmark = pytest.mark.usefixtures("restored_logging")
# Starts one task, as on a single node.
SRUN = """#!/bin/bash
echo "$@" >>"$STARTED"
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""
SCONTROL = """#!/bin/bash
if [[ $1 == show ]]; then echo localhost; else echo "$@" >>"$REQUEUED"; fi
"""


@pytest.mark.slow
def test_sbatch_requeues_preempted_job(image_root, tmp_path):
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    folder = tmp_path / "run"
    words = command(image_root, folder, "loader.workers=0", "train.epochs=40")[2:]
    slurm = {"JOB_ID": 4711, "CPUS_PER_TASK": 12, "JOB_NUM_NODES": 1}
    slurm |= {"JOB_NODELIST": "localhost", "GPUS_ON_NODE": 2}
    variables = {f"SLURM_{name}": str(value) for name, value in slurm.items()}
    variables |= {"PATH": f"{tools}:{os.environ['PATH']}", "PYTHON": sys.executable}
    variables |= {name: str(tmp_path / name.lower()) for name in ("STARTED", "REQUEUED")}
    job = ["bash", "scripts/train.sbatch", *words]
    with Started(job, variables, stdout=PIPE) as first:
        wait_for("three steps", lambda: logged_steps(folder) >= 3, first)
        first.terminate()
        console, _ = first.communicate()
    assert first.returncode == 1  # torchrun's status
    assert "(ranks: 2, images per rank: 4, micro-batches: 1)" in console
    assert (tmp_path / "requeued").read_text() == "requeue 4711\n"
    started = f" {(tmp_path / 'started').read_text()}"
    # Processors per task; and no task may end rank 0 before it has written summary.json.
    assert " --cpus-per-task=12 " in started and " --kill-on-bad-exit=0 " in started
    again = run_command(job, variables)
    assert again.returncode == 0, again.stderr
    assert "resumed at step " in again.stdout
    (tools / "srun").write_text("#!/bin/bash\nexit 3\n")
    assert run_command(job, variables).returncode == 3
    assert (tmp_path / "requeued").read_text() == "requeue 4711\n"  # not requeued
    assert rows(folder, "train")[-1]["step"] == 180
