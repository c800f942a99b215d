"""data.root=s3://bucket/photos: images in tar files behind URLs, served by moto's S3 server."""

import json
import math
import os
import shutil
import signal
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import repeat
from pathlib import Path
from threading import Thread, Timer, get_ident
from threading import enumerate as enumerate_threads

import pytest

from conf.errors import UserError
from conf.named import with_parameter
from conf.schema import show
from conf.start import default_cache_dir
from pipeline.data import index
from pipeline.data.index import Index, load_index
from scripts import prepare
from tests.extras.buckets import Bucket, serving
from tests.helpers.limits import file_size_limit
from tests.helpers.processes import Started, run_command, wait_for
from tests.helpers.results import logged_steps, summary_of
from tests.helpers.small_run import command, run
from tests.helpers.stored import as_tar, as_tars

pytest.importorskip("s3fs")
pytest.importorskip("moto")
object_storage = pytest.importorskip("extras.object_storage")
S3 = "s3://photos"
STORAGE = "extras.object_storage:tars"
BOTH = pytest.mark.parametrize("protocol", [S3, "http"])


@pytest.fixture(scope="module")
def tars(image_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pack one/train.tar, one/val.tar; many/train/*.tar, many/val-*.tar; prepared/ with indexes."""
    root = tmp_path_factory.mktemp("tars")
    for name in ("one", "many"):
        (root / name).mkdir()
    for split in ("train", "val"):
        as_tar(image_root / split, root / "one" / f"{split}.tar")
    as_tars(image_root / "train", root / "many" / "train")
    as_tars(image_root / "val", root / "val")
    for path in (root / "val").iterdir():
        path.rename(root / "many" / f"val-{path.name}")
    words = [str(image_root), "--to", str(root / "prepared"), "--format", "tar"]
    assert prepare.prepare_images(prepare.arguments(words)) == 0
    return root


@pytest.fixture(scope="module")
def server(tars: Path) -> Iterator[Bucket]:
    with serving() as bucket, pytest.MonkeyPatch.context() as patch:
        bucket.put(tars)
        patch.setenv("AWS_ENDPOINT_URL", bucket.url)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "hidden-words")
        patch.setenv("AWS_MAX_ATTEMPTS", "1")  # botocore's own pauses take seconds
        yield bucket


@pytest.fixture
def bucket(server: Bucket, cache: Path) -> Bucket:
    server.reset()
    return server


def content(found: Index) -> list[bytes]:
    return list(map(found.read, range(len(found))))


def root_of(bucket: Bucket, protocol: str) -> str:
    return S3 if protocol == S3 else f"{bucket.url}/photos"


def load(url: str, **parameters: object) -> Index:
    return load_index(url, key="data.train", storage={STORAGE: parameters})


@BOTH
@pytest.mark.parametrize("name", ["one", "many", "prepared"])
def test_tars_equal_local_files(bucket, tars, protocol, name):
    local = load_index(tars / name / "train", key="data.train")
    url = f"{root_of(bucket, protocol)}/{name}/train"
    if (protocol, name) == ("http", "many"):  # a web server lists no directory
        url = f"{url}/0.tar"
        local = load_index(tars / name / "train" / "0.tar", key="data.train")
    found = load(url)
    assert (found.digest, found.classes) == (local.digest, local.classes)
    assert found.path(0).startswith(url)
    files = len(found.sources)
    assert bucket.ranges.total() == {"one": 1, "many": files, "prepared": 0}[name]
    assert content(found) == content(local)
    bucket.reset()
    assert content(load(url)) == content(local)
    assert bucket.ranges.total() == len(found)  # the member list is cached
    # Equivalent to data.train=s3://..., because a URL is no path below data.root.
    assert protocol != S3 or content(load(f"/data/{url}")) == content(local)


def test_tars_ignore_stale_index_file(bucket, tars, monkeypatch):
    """If both tar files have the same size, names in their headers differ."""
    bucket.put(tars / "prepared", "stale")
    bucket.put(tars / "one", "stale")
    local = load_index(tars / "one/val", key="data.val")
    assert content(load(f"{S3}/stale/val")) == content(local)
    monkeypatch.setattr(index, "PAUSES", ())
    bucket.put(tars / "prepared", "stale")
    members = (tars / "prepared/train.tar.json").read_bytes()
    bucket.send("PUT", "/photos/stale/train.tar.json", members.replace(b"dots/", b"dots/x"))
    with pytest.raises(OSError, match=r"found .*\.jpg .* instead; delete .*/train\.tar\.json, if"):
        content(load(f"{S3}/stale/train"))


def test_tars_accept_redirect_to_new_signature(bucket, tars):
    bucket.redirects = True
    found = load(f"{bucket.url}/photos/one/val")
    assert content(found) == content(load_index(tars / "one/val", key="data.val"))


def test_tars_reject_server_without_ranges(tars):
    handler = partial(SimpleHTTPRequestHandler, directory=tars)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(UserError, match="and that the server supports ranges"):
            load(f"http://127.0.0.1:{server.server_port}/one/train")
        server.shutdown()


TEMPORARY = ["500", "503", "429", "loop", "cut"]


@pytest.mark.parametrize("fault", TEMPORARY)
@pytest.mark.parametrize(
    ("protocol", "name", "broken"),
    [
        (S3, "one", "/photos/one/val.tar"),
        ("http", "one", "/photos/one/val.tar"),
        (S3, "prepared", "/photos/prepared/val.tar.json"),
        ("http", "prepared", "/photos/prepared/val.tar.json"),
        (S3, "many", "/photos"),  # lists the bucket; a web server lists no directory
    ],
)
def test_tars_retry_requests_at_startup(bucket, tars, monkeypatch, fault, protocol, name, broken):
    """One line follows if the error lasts; so do statuses that a retry cannot fix, at once."""
    monkeypatch.setattr(index, "PAUSES", (0, 0, 0))
    url = f"{root_of(bucket, protocol)}/{name}/val"
    bucket.broken[broken] = iter([fault] * 3)
    assert len(load(url)) == 15
    if (protocol, fault) in ((S3, "loop"), (S3, "cut")):
        return  # botocore and s3fs pause for seconds between their own attempts
    shutil.rmtree(default_cache_dir())
    bucket.broken[broken] = repeat(fault)
    with pytest.raises(UserError, match=f"^{url}.*; check the network, the credentials") as caught:
        load(url)
    assert "\n" not in str(caught.value)


@BOTH
@pytest.mark.parametrize("status", ["401", "403", "404"])
def test_tars_do_not_retry_lasting_errors(bucket, monkeypatch, protocol, status):
    monkeypatch.setattr(index, "PAUSES", (1000,))
    url = f"{root_of(bucket, protocol)}/one/val"
    bucket.broken["/photos/one/val.tar"] = repeat(status)
    with pytest.raises(UserError, match=f"{url}.*(no such folder|check the network)"):
        load(url)
    bucket.broken = {"/photos/one/val.tar.json": repeat(status)}
    assert len(load(url)) == 15


@BOTH
def test_tars_reject_server_without_sizes(bucket, monkeypatch, protocol):
    monkeypatch.setattr(index, "PAUSES", ())
    bucket.broken["/photos/one/val.tar"] = repeat("unsized")
    with pytest.raises(UserError, match=r"one/val.*Content-?Length"):
        load(f"{root_of(bucket, protocol)}/one/val")


FORGED = {  # places that a tar file cannot have
    "words": ["a", None],
    "negative": [-512, 1],
    "outside": [1 << 40, 1],
    "no header": [0, 1],
    "fraction": [512.5, 1],
}


def forged(content: bytes, kind: str) -> bytes:
    """Damage a list of members in one way; `kind` may be a prefix of a name."""
    listed = json.loads(content)
    members = listed["members"]
    first, second, *_ = members
    if kind == "overlap":
        members[first] = members[second]
    elif kind in FORGED:
        members[first] = FORGED[kind]
    elif kind == "size":
        listed["size"] += 512
    elif kind == "list":
        listed["members"] = list(members)
    else:
        members[f"{kind}{first}"] = members.pop(first)
    return json.dumps(listed).encode()


DAMAGED = (b"no JSON", b"[1]", b"{}", b"\xff", b"[" * 200_000)


@pytest.mark.parametrize("kind", [*FORGED, "overlap", "size", "list", "/", "../", *DAMAGED])
def test_tars_ignore_invalid_index_file(bucket, tars, kind):
    listed = (tars / "prepared/val.tar.json").read_bytes()
    bucket.put(tars / "prepared", "forged")
    bucket.write("forged/val.tar.json", kind if kind in DAMAGED else forged(listed, kind))
    local = load_index(tars / "prepared/val", key="data.val")
    found = load(f"{S3}/forged/val")
    assert bucket.ranges.total() == 1  # the tar file is listed
    assert found.digest == local.digest and content(found) == content(local)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        *[("gigabytes", value, "a number >= 0") for value in (-1, math.nan, math.inf, "x", True)],
        ("cache", 3, "a name or a path"),
        ("timeout_seconds", 0, "a number > 0"),
    ],
)
def test_tars_reject_invalid_parameters(name, value, expected):
    with pytest.raises(UserError) as caught:
        load(f"{S3}/one/val", **{name: value})
    says = f"data.storage: {STORAGE}: {name}={show(value)}: invalid value; expected {expected}"
    assert str(caught.value) == says


def test_storage_gets_parameter_by_name():
    add = partial(with_parameter, key="data.storage", parameter="timeout_seconds", value=3)
    assert add(STORAGE) == {STORAGE: {"timeout_seconds": 3}}
    entry = {STORAGE: {"cache": "a", "timeout_seconds": 2}}
    assert add(entry) == entry
    for other in (None, "extras.object_storage:Index", "extras.missing:tars", 3):
        assert add(other) == other


@BOTH
def test_tars_call_lost_server_unreachable(bucket, tars, monkeypatch, protocol):
    monkeypatch.setattr(index, "PAUSES", ())
    found = load(f"{root_of(bucket, protocol)}/one/val")
    assert found.read(0)
    bucket.broken["/photos/one/val.tar"] = iter(["etag"])  # only in the image's reply
    with pytest.raises(OSError, match=r"/one/val\.tar has changed since the run started"):
        found.read(1)
    bucket.broken["/photos/one/val.tar"] = repeat("503")
    with pytest.raises(OSError, match=r"/one/val\.tar is unreachable: .*503"):
        found.read(0)


def test_tars_follow_no_link_in_cache(bucket, tars, tmp_path):
    (tmp_path / "mine").write_text("mine")
    words = {"cache": str(tmp_path / "disk"), "gigabytes": 1}
    name = "{:x}-{}.tar".format(*load(f"{S3}/one/val").sources[0].stamp)
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / name).symlink_to(tmp_path / "mine")
    local = load_index(tars / "one/val", key="data.val")
    assert content(load(f"{S3}/one/val", **words)) == content(local)
    assert (tmp_path / "mine").read_text() == "mine"


@BOTH
@pytest.mark.parametrize("path", ["one/val.tar", "one/val.tar.json", "one/train.tar"])
def test_tars_end_on_stall_at_startup(bucket, monkeypatch, caplog, protocol, path):
    monkeypatch.setattr(object_storage, "SILENT_SECONDS", 0.2)
    root = root_of(bucket, protocol)
    load(f"{root}/many/train/0.tar")  # imports the plugin
    bucket.broken[f"/photos/{path}"] = repeat("stall")
    with pytest.raises(UserError, match=f"^{root}/{path.partition('.')[0]}.*: no reply for loader"):
        load(f"{root}/{path.partition('.')[0]}", timeout_seconds=1)
    assert [line for line in caplog.messages if "wait" in line] == [f"waiting for {root}/{path}"]


AT_STARTUP = pytest.mark.parametrize("path", ["one/val.tar", "one/val.tar.json"])


@BOTH
@AT_STARTUP
def test_tars_end_at_ctrl_c_in_stall(bucket, protocol, path):
    """The stall is at the first request, or in a thread pool that lists the tar file."""
    root = root_of(bucket, protocol)
    load(f"{root}/many/train/0.tar")  # imports the plugin
    bucket.broken[f"/photos/{path}"] = repeat("stall")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # as `cli.run_main` does
    timer = Timer(1, signal.pthread_kill, (get_ident(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        load(f"{root}/one/val")
    timer.cancel()
    signal.signal(signal.SIGINT, before)
    pools = [thread for thread in enumerate_threads() if "ThreadPool" in thread.name]
    for thread in pools:
        thread.join(1)
    assert not any(thread.is_alive() for thread in pools)


@pytest.mark.slow
@AT_STARTUP
def test_run_on_tars_ends_at_ctrl_c_in_stall(bucket, tmp_path, path):
    bucket.broken[f"/photos/{path}"] = repeat("stall")
    file = tmp_path / "log"
    with file.open("w") as log, Started(start(f"{S3}/one", tmp_path / "run"), stderr=log) as run:
        wait_for("a line", lambda: "waiting for" in file.read_text(), run)
        run.send_signal(signal.SIGINT)
        assert run.wait(10) == 130
    text = file.read_text()
    assert text.count(f"waiting for {S3}/{path}\n") == 1 and "Traceback" not in text


@pytest.mark.slow
def test_run_on_tars_has_loader_timeout(bucket, tmp_path):
    bucket.broken["/photos/one/val.tar"] = repeat("stall")
    done = run_command(start(f"{S3}/one", tmp_path / "run", "loader.timeout_seconds=4"))
    assert done.returncode == 2
    assert f"{S3}/one/val.tar: no reply for loader.timeout_seconds=4; check" in done.stderr
    assert f"waiting for {S3}/one/val.tar\n" in done.stderr


@BOTH
@pytest.mark.parametrize("fault", ["500", "cut"])
def test_tars_retry_failed_requests(bucket, tars, monkeypatch, fault, protocol):
    monkeypatch.setattr(index, "PAUSES", (0, 0, 0))
    found = load(f"{root_of(bucket, protocol)}/one/val")
    bucket.fault = lambda number: fault if number % 3 else ""
    assert content(found) == content(load_index(tars / "one/val", key="data.val"))
    bucket.fault = lambda number: fault
    with pytest.raises(OSError, match=r"Errno 5"):
        found.read(0)


@BOTH
def test_tars_detect_replaced_object(bucket, tars, monkeypatch, protocol):
    monkeypatch.setattr(index, "PAUSES", ())
    bucket.put(tars / "one", "changing")
    url = f"{root_of(bucket, protocol)}/changing/val"
    found = load(url)
    assert found.read(0)
    bucket.put(tars / "prepared", "changing")
    for row in (0, 1):
        with pytest.raises(OSError, match=r"/changing/val\.tar has changed since the run"):
            found.read(row)
    assert content(load(url))


def test_tars_disk_cache(bucket, tars, tmp_path):
    local = content(load_index(tars / "one/train", key="data.train"))
    folder = tmp_path / "disk"
    found = load(f"{S3}/one/train", cache=str(folder))
    with file_size_limit(100):  # like a full disk
        assert content(found) == local
    assert bucket.ranges.total() == 1 + 36
    half = (tars / "one" / "train.tar").stat().st_size / 2e9
    for size, fewest, most in ((half, 10, 26), (1, 0, 0)):
        found = load(f"{S3}/one/train", cache=str(folder), gigabytes=size)
        for _ in range(2):
            bucket.reset()
            assert content(found) == local
        assert fewest <= bucket.ranges.total() <= most
    (copy,) = folder.iterdir()
    with copy.open("r+b") as file:  # an image after a kill or power failure
        file.seek(int(found.places.array[3, 1]) + 100)
        file.write(bytes(100))
    for requests in (1, 0):
        bucket.reset()
        assert content(found) == local
        assert bucket.ranges.total() == requests


def test_tars_url_brackets_are_literal(tars, tmp_path):
    shutil.copytree(tars / "one", tmp_path / "run[1]")
    (tmp_path / "run1").mkdir()
    shutil.copy(tars / "one" / "val.tar", tmp_path / "run1" / "train.tar")
    found = load(f"file://{tmp_path}/run[1]/train")
    assert content(found) == content(load_index(tars / "one" / "train", key="data.train"))


def test_tars_errors_name_url_without_credentials(bucket, tmp_path, monkeypatch):
    monkeypatch.setattr(index, "PAUSES", (0,))
    secret = bucket.url.replace("//", "//me:hidden@")
    for root, message in (
        (f"{secret}/photos/one", "/photos/one/val: has a password or a query"),
        (f"{bucket.url}/photos/one?key=hidden", "/photos/one: has a password or a query"),
        (f"{S3}/none", "data.val=s3://photos/none/val: no such folder, .tar or .csv file"),
        ("s3://nothing/none", "bucket does not exist; check the network, the credentials, fsspec"),
        ("abc://photos", "Protocol not known: abc"),
        ("http://127.0.0.1:9/one", "Connect call failed"),
    ):
        with pytest.raises(UserError) as caught:
            run(root, tmp_path / "run", "loader.workers=0")
        assert message in str(caught.value) and "hidden" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def start(root: object, folder: Path, *words: str) -> list[str]:
    return command(root, folder, "train.ema_decay=0.9", "checkpoint.every_steps=2", *words)


@pytest.mark.parametrize("size", [1, 2])
def test_run_on_tars_resumes_after_kill(bucket, tars, tmp_path, ranks, size):
    """Images come from any storage; ranks share the disk cache."""
    local = ranks.run(start(tars / "one", tmp_path / "local"), size)
    assert local.returncode == 0, local.stderr
    folder, disk = tmp_path / "run", tmp_path / "disk"
    words = [f"data.storage={{{STORAGE}: {{cache: {disk}, gigabytes: 1}}}}"]
    with ranks.running(start(f"{S3}/many", folder, *words), size) as job:
        wait_for("three steps", lambda: logged_steps(folder) >= 3)
        os.killpg(job.pids[0], signal.SIGKILL)
    bucket.reset()
    done = ranks.run(start(f"{S3}/many", folder, *words), size)
    assert done.returncode == 0, done.stderr
    assert bucket.ranges.total() == 0  # the first start has read all file sizes
    assert summary_of(folder)["params_sha256"] == summary_of(tmp_path / "local")["params_sha256"]
    stored = "".join(path.read_text("utf-8", "replace") for path in folder.rglob("*.*"))
    assert S3 in stored and "hidden" not in stored


def test_run_on_tars_ends_on_stalled_connection(bucket, tmp_path):
    """The run ends after loader.timeout_seconds, and the message contains a URL."""
    bucket.fault = lambda number: "stall" if number > 100 else ""
    words = ["loader.workers=1", "loader.timeout_seconds=2", "train.epochs=2000"]
    done = run_command(start(f"{S3}/one", tmp_path / "run", *words))
    assert done.returncode == 1, done.stderr
    assert f"_seconds=2: no image for that long; still reading {S3}/one/train" in done.stderr


def test_run_on_tars_names_unreadable_image_url(bucket, tmp_path):
    bucket.fault = lambda number: "500" if number > 100 else ""
    done = run_command(start(f"{bucket.url}/photos/one", tmp_path / "run", "train.epochs=2000"))
    assert done.returncode == 1, done.stderr
    assert f"{bucket.url}/photos/one/train.tar: " in done.stderr
    assert "Internal Server Error" in done.stderr
