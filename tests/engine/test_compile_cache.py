"""Compiled kernels in the run directory: the next start uses them if this user wrote them."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

import train
from engine.compile_cache import CompileCache
from engine.distributed import World
from tests.engine.plans import ALONE, plan
from tests.engine.run_dirs import IDENTITY, add_checkpoint, directory, state_of
from tests.limits import file_size_limit
from tests.processes import run_python

pytestmark = pytest.mark.slow
PLAN = plan(compile="default")


class Doubled(torch.autograd.Function):
    """As in models.kernels.layers: a gradient that is written by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 2 * grads[0]


def step(x: Tensor) -> Tensor:
    return Doubled.apply(x.sin()).sum()


def compiles(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Run a compiled step as after a start; `folder` is torch's cache. Return torch's counters."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    torch._dynamo.reset()
    counters.clear()
    train.compiled(step, "default")(torch.ones(8, requires_grad=True)).backward()
    return {**counters["aot_autograd"], **counters["inductor"]}


@pytest.fixture(scope="module")
def compiled_step(tmp_path_factory: pytest.TempPathFactory) -> None:
    """This process has compiled the step."""
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    if " " in torch.__file__:
        pytest.skip("torch does not quote its own path for the C++ compiler")
    with pytest.MonkeyPatch.context() as patch:
        seen = compiles(tmp_path_factory.mktemp("cache"), patch)
    assert seen["autograd_cache_miss"] == 1 and seen["fxgraph_cache_miss"] == 2
    assert "autograd_cache_bypass" not in seen


@pytest.fixture
def run(tmp_path: Path, compiled_step: None) -> Path:
    """A run directory with the compiled step."""
    run = tmp_path / "run"
    run.mkdir()
    CompileCache(run, ALONE).save()
    return run


def test_a_later_start_compiles_nothing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {path: path.stat() for path in (run / "compiled").iterdir()}
    assert sorted(path.name for path in files) == ["rank0.bin", "rank0.json"]
    cache = CompileCache(run, ALONE)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(run.parent / "new_machine"))
    assert cache.load()
    seen = compiles(run.parent / "new_machine", monkeypatch)
    assert seen["autograd_cache_hit"] == 1 and seen["fxgraph_cache_hit"] == 2
    assert not seen.keys() & {"autograd_cache_miss", "fxgraph_cache_miss"}
    cache.save()  # nothing new
    assert {path: path.stat() for path in (run / "compiled").iterdir()} == files


def test_every_rank_of_a_node_has_a_file(run: Path) -> None:
    device = torch.device("cpu")
    for rank in range(4):  # two nodes of two ranks, with one file system
        CompileCache(run, World(rank, 4, rank % 2, 2, device)).save()
    names = ["rank0.bin", "rank0.json", "rank1.bin", "rank1.json"]
    assert sorted(path.name for path in (run / "compiled").iterdir()) == names
    for rank in range(4):
        assert CompileCache(run, World(rank, 4, rank % 2, 2, device)).load()


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the messages of this program; torch logs as well."""
    return [r.getMessage() for r in caplog.records if r.name.startswith("engine.")]


def replaced_by_a_link(path: Path) -> None:
    other = path.with_name("elsewhere")
    path.rename(other)
    path.symlink_to(other)


def damaged(path: Path) -> None:
    """One bit has changed on the disk."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    rewritten(path, content)


def rewritten(path: Path, content: bytes, **manifest: Any) -> None:
    """Replace the content as this user would, with a manifest for the new file."""
    path.write_bytes(content)
    stored = json.loads(path.with_suffix(".json").read_text())
    status = path.stat()
    stored |= {"identity": [status.st_ino, status.st_ctime_ns], **manifest}
    path.with_suffix(".json").write_text(json.dumps(stored))


def copied(folder: Path) -> None:
    """A run directory that was packed and unpacked: the user owns all files."""
    original = folder.with_name("original")
    folder.rename(original)
    shutil.copytree(original, folder)


SHA256_OF_X = hashlib.sha256(b"x").hexdigest()
DAMAGED = "it is damaged or copied, or written by another version of torch"
OPEN = "another user ow"


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("rank0.bin", lambda path: path.chmod(0o620), OPEN),
        ("rank0.json", lambda path: path.chmod(0o602), OPEN),
        ("", lambda path: path.chmod(0o770), OPEN),
        ("rank0.bin", replaced_by_a_link, "[Errno 40] Too many levels of symbolic links"),
        ("", replaced_by_a_link, OPEN),
        ("rank0.bin", damaged, DAMAGED),
        ("rank0.bin", lambda path: rewritten(path, path.read_bytes(), torch="2.9.9"), DAMAGED),
        ("rank0.bin", lambda path: rewritten(path, b"x", sha256=SHA256_OF_X), ""),
        ("rank0.json", lambda path: path.write_text("{"), ""),
        ("", copied, DAMAGED),
    ],
)
def test_a_file_of_another_user_or_place_is_not_used(
    run: Path,
    caplog: pytest.LogCaptureFixture,
    name: str,
    change: Callable[[Path], Any],
    reason: str,
) -> None:
    change(run / "compiled" / name)
    assert not CompileCache(run, ALONE).load()
    [message] = messages(caplog)
    assert message.startswith(f"{run}/compiled/rank0.bin is not used ({reason}")


def test_a_full_disk_is_a_warning(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = run.parent / "other"
    other.mkdir()
    cache = CompileCache(other, ALONE)
    assert not cache.load() and not messages(caplog)  # there are none
    with file_size_limit(1_000):
        cache.save()
        cache.save()  # is not tried again
    [message] = messages(caplog)
    assert "rank0.bin cannot be written: File too large" in message
    assert not CompileCache(other, ALONE).load()


@pytest.mark.parametrize("resume", ["auto", "never", "elsewhere"])
def test_only_the_kernels_of_the_run_itself_are_loaded(
    run: Path, monkeypatch: pytest.MonkeyPatch, resume: str
) -> None:
    """Not those beside the checkpoint of another run, nor those of a run that is moved aside."""
    written = add_checkpoint(run, 10)
    path = run.parent / "branch" if resume == "elsewhere" else run
    given = str(written) if resume == "elsewhere" else resume
    torch_cache = run.parent / "new_machine"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(torch_cache))
    with directory(path, given) as opened:
        opened.open(state_of(), PLAN, IDENTITY)
    assert any(torch_cache.rglob("*")) == (resume == "auto")
    assert (path / "compiled").exists() == (resume == "auto")


START = """
import json, sys, train
from conf import cli
from torch._dynamo.utils import counters
train.train(cli.load(sys.argv[1:]))
print(json.dumps({**counters["aot_autograd"], **counters["inductor"]}))
"""


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "tuned"])
def test_a_run_that_resumes_on_a_new_machine_compiles_nothing(tmp_path: Path, mode: str) -> None:
    """Nothing in the model defeats torch's caches, nor do our layers with a Triton kernel."""
    model = "resnet18" if mode == "default" else "resnet_tiny"  # to tune ResNet-18 takes minutes
    for number in (1, 2):
        done = run_python(
            *("-c", START, "data=fake", "data.fake_images=64"),
            *("data.image_size=64", "data.val_size=64", "loader.batch_size=16"),
            *("loader.workers=0", "log.trackers=[]", f"run.dir={tmp_path / 'run'}"),
            *(f"model={model}", f"model.compile={mode}", f"train.max_steps={number}"),
            TORCHINDUCTOR_CACHE_DIR=str(tmp_path / f"machine{number}"),
            seconds=600,
        )
        assert done.returncode == 0, done.stderr
        seen = json.loads(done.stdout.splitlines()[-1])
        assert "autograd_cache_bypass" not in seen
    assert seen["autograd_cache_hit"] and seen["fxgraph_cache_hit"]
    assert not seen.keys() & {"autograd_cache_miss", "fxgraph_cache_miss"}
