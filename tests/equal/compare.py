"""Train with two revisions on this machine, and compare what depends on its arithmetic.

    make equal ARGS="[CASE ...] [--base REVISION] [--images FOLDER]"

The other revision is checked out into a temporary folder. Both run at the same time, in one thread
each. For each case, a line says that all values are equal bit for bit, or names the first that
differs; then the exit status is 1.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tests.equal.batches import draw

ROOT = Path(__file__).parents[2]
BASE = "71e3027"
ADDED = "tests/equal/batches.py"  # by a commit whose adapters are for BASE
LOGGED = ["train.device=cpu", "log.every_steps=1", "log.trackers=[]"]
# 48 images: 6 steps per epoch. {data} is a folder that both checkouts read, {own} is of each.
SMALL = [
    *("recipe=demo", "data=folder", "data.root={data}/images", "data.image_size=32"),
    *("loader.batch_size=8", "loader.workers=1", "train.epochs=2", "train.seed=3"),
    "schedule.warmup_epochs=0.5",
]
MIXED = ["augment=torchvision", "optim.clip_norm=1", "train.ema_decay=0.9", "train.precision=bf16"]
LAMB = ["optim=lamb", "train.loss=bce", "data.repeats=3", "train.micro_batch=4"]
TUNED = ["recipe=finetune", "data.root={data}/others", "model.weights={data}/trained"]
TRAININGS = {
    "plain": SMALL,
    "mixed": [*SMALL, *MIXED],
    "vit": [*SMALL, "model=vit_s16", "optim=adamw"],
    "lamb": [*SMALL, *LAMB],
    "ranks": SMALL,
    "tar": [*SMALL, "data.root={data}/tars"],
    "finetune": [*TUNED, "loader.batch_size=8", "train.epochs=2"],
    "parts": SMALL,
    "losses": ["recipe=demo", "data.root={own}/demo", "train.max_steps=200"],
}
SECONDS = 1800  # a command that takes longer hangs, even on a busy machine
RANKS = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


class Side(NamedTuple):
    """A checkout, the folder of what it writes, and the folder of what both read."""

    checkout: Path
    own: Path
    data: Path

    def command(self, words: list[str]) -> dict[str, Any]:
        """Return the arguments of a process that runs Python in the checkout."""
        words = [word.format(own=self.own, data=self.data) for word in words]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(self.own)}
        return {"args": [sys.executable, *words], "cwd": self.checkout, "env": env}

    def run(self, *words: str) -> str:
        """Run Python in the checkout; return what it prints."""
        command = self.command([*words])
        done = subprocess.run(**command, capture_output=True, text=True, timeout=SECONDS)
        if done.returncode:
            raise RuntimeError(f"{self.own.name}: {' '.join(done.stderr.split()[-60:])}")
        return done.stdout


def values_of(case: str, images: str, side: Side) -> dict[str, Any]:
    """Return the values of a case by name, in their order."""
    if case == "evaluated":  # a checkpoint of the other revision
        out = side.run("scripts/evaluate.py", "{data}/trained", "--json", "--out", "{own}/out")
        return {name: json.loads(out)[name] for name in ("images", "loss", "top1")}
    if case == "batches":
        lines = side.run("-m", "tests.equal.batches", images).splitlines()
        return dict(line.split(": ") for line in lines)
    folder = side.own / case
    command = ["train.py", *LOGGED, *TRAININGS[case], f"run.dir={folder}"]
    if case == "parts":
        side.run(*command, "train.max_steps=9")
    side.run(*(RANKS if case == "ranks" else []), *command)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    values = {f"{row['split']} loss of step {row['step']}": row["loss"] for row in rows}
    digest = json.loads((folder / "summary.json").read_text())["params_sha256"]
    return {**values, "params_sha256": digest}


@contextmanager
def two_sides(revision: str) -> Iterator[list[Side]]:
    """Check out the other revision, draw and pack images, and train a model on them."""
    git = partial(subprocess.run, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    with tempfile.TemporaryDirectory() as folder:
        checkout, data = Path(folder, "checkout"), Path(folder, "data")
        sides = [Side(checkout, Path(folder, "then"), data), Side(ROOT, Path(folder, "now"), data)]
        git(["git", "worktree", "add", "--quiet", "--detach", checkout, revision])
        try:
            if not (checkout / ADDED).exists():
                log = git(["git", "log", "--diff-filter=A", "--format=%H", "--", ADDED]).stdout
                git(["git", "checkout", log.split()[-1], "--", "tests/equal"], cwd=checkout)
            draw(data / "images")
            draw(data / "others", slice(3, 6))
            for split in ("train", "val"):
                shutil.make_archive(f"{data}/tars/{split}", "tar", data / "images" / split)
            sides[0].run("train.py", *LOGGED, *SMALL, "run.dir={data}/trained")
            yield sides
        finally:
            git(["git", "worktree", "remove", "--force", checkout])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    cases = ["batches", "evaluated", *TRAININGS]
    parser.add_argument("cases", nargs="*", default=cases, metavar="CASE", help=", ".join(cases))
    parser.add_argument("--base", default=BASE, metavar="REVISION", help="the other revision")
    parser.add_argument("--images", type=os.path.abspath, help="a folder, for the case batches")
    options = parser.parse_args()
    images, failed = options.images or "{data}/images", False
    with two_sides(options.base) as sides, ThreadPoolExecutor(2) as pool:
        for case in options.cases:
            try:
                then, now = pool.map(partial(values_of, case, images), sides)
                names = [name for name in then | now if then.get(name) != now.get(name)]
                says = f"{len(then)} values are equal"
                for name in names[:1]:
                    says = f"DIFFERS: {name} was {then.get(name)}, is {now.get(name)}"
            except (RuntimeError, KeyError, subprocess.TimeoutExpired) as error:
                names, says = [case], f"FAILED: {error}"
            failed |= bool(names)
            print(f"{case:<10} {says}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
