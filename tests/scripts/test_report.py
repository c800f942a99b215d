"""Reports: values match the files, which may be missing, and the page is self-contained."""

import csv
import json
import re
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from conf.errors import UserError
from scripts import evaluate, report
from tests.helpers import small_run
from tests.helpers.processes import ROOT

HOSTILE = "</title></script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&amp;"
FORBIDDEN = ("script", "link", "iframe", "object", "base", "form")


class Page:
    """A parsed page; checks that it is well-formed and self-contained."""

    def __init__(self, text: str) -> None:
        text, count = re.subn(r"(?s)<script nonce=.*?</script>", "", text)  # Plotly and ours
        assert count == 2 and "default-src 'none'" in text and "script-src 'nonce-" in text
        assert not re.search(r"https?://|@import|url\((?!data:)", text)
        root = ElementTree.fromstring(text)
        for node in root.iter():
            assert node.tag not in FORBIDDEN and node.get("src", "data:").startswith("data:")
            assert not [name for name in node.attrib if name.startswith("on")]
            assert node.tag == "a" or "href" not in node.attrib
        self.links = [a.attrib["href"] for a in root.iter("a")]
        self.said = [" ".join(part.split()) for part in root.itertext() if part.strip()]
        styles = (node.get("style", "") for node in root.iter())
        self.styles = [style for style in styles if "position" in style]
        divs = [div for div in root.iter("div") if "data-plot" in div.attrib]
        # Title -> traces, name of the x axis, both axes, limits
        self.charts = {div.get("aria-label"): json.loads(div.attrib["data-plot"]) for div in divs}
        closed = [{*node.iter("div")} for node in root.iter("details") if "open" not in node.attrib]
        self.folded = [div.get("aria-label") for div in divs if any(div in part for part in closed)]
        traces = [trace for chart in self.charts.values() for trace in chart[0][::-1]]
        shapes = [("fill" in t, [*zip(t["x"], t["y"], strict=True)]) for t in traces]
        self.lines, self.bands = ([p for f, p in shapes if f == filled] for filled in (False, True))
        tables = {table.attrib["class"]: [*table.iter("tr")] for table in root.iter("table")}
        self.best = [row.get("class") == "best" for row in tables["runs"][1:]]
        self.boxes = [box.get("class") for box in root.iter("input") if "class" in box.attrib]
        tables["means"] = tables.get("means", []) + tables.pop("means mean", [])
        (head, *rows), self.classes, others, self.means, self.matrix, self.changed = (
            [["".join(cell.itertext()).strip() for cell in row] for row in tables.get(kind, [])]
            for kind in ("runs", "classes", "others", "means", "matrix", "changed")
        )
        self.facts = [dict(zip(head, row, strict=True)) for row in rows]
        self.folded_keys = [row[0] for row in others]
        self.colours = {(i.attrib["class"], *str(i.tail).split()[:1]) for i in root.iter("i")}


def made(*folders: Path, out: Path | None = None) -> Page:
    words = [*map(str, folders), *([] if out is None else ["--out", str(out)])]
    assert report.write_report(report.arguments(words)) == 0
    return Page((out or folders[0] / "report.html").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def runs(whole_runs: None, image_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two short runs: first, and second with other hyperparameters."""
    folder = tmp_path_factory.mktemp("runs")
    small_run.run(image_root, folder / "first", "run.name=first")
    others = ["optim.lr=0.05", "train.epochs=1", "log.every_steps=3", "run.name=second"]
    small_run.run(image_root, folder / "second", *others, "optim=adamw")
    return folder


@pytest.fixture
def copied(runs: Path, tmp_path: Path) -> Path:
    """Return a copy of the first run, to be changed."""
    ignore = shutil.ignore_patterns("checkpoints")  # they take time
    return Path(shutil.copytree(runs / "first", tmp_path / "first", ignore=ignore))


def synthetic(folder: Path, rows: list[dict[str, Any]], **summary: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "summary.json").write_text(json.dumps({"status": "finished", **summary}))
    return folder


def step_row(step: int, **values: Any) -> dict[str, Any]:
    return {"step": step, "epoch": step / 100, "split": "train", **values}


def test_the_page_of_a_run(runs: Path) -> None:
    page, folder = made(runs / "first"), runs / "first"
    summary = json.loads((folder / "summary.json").read_text())
    top1, epoch = summary["best_top1"], summary["best_epoch"]
    best = f"{top1:.2f} % ± {(top1 * (100 - top1) / 15) ** 0.5:.1f} after epoch {epoch:.0f} of 2"
    assert (page.facts[0]["best top1"], page.facts[0]["model.name"]) == (best, "resnet_tiny")
    assert page.facts[0]["made by"].startswith(f"torch {torch.__version__}, commit ")
    shown = [title for title in page.charts if title not in page.folded]
    assert shown == ["top1", "loss", "lr", "accuracy by confidence"]  # first, what is the best by
    assert {"macro_f1", "step_ms"} < {*page.folded} and not page.boxes
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    trained, validated = page.charts["loss"][0]  # what is drawn last is on top
    assert trained["y"] == [float(f"{r['loss']:.7g}") for r in metrics if r["split"] == "train"]
    assert validated["x"][validated["marker"]["size"].index(10)] == pytest.approx(epoch)
    assert page.colours >= {("c1", "validation,"), ("c2", "training,")}
    place = page.said.index("config.yaml of first")
    assert page.said[place + 1].split() == (folder / "config.yaml").read_text().split()


def test_runs_are_compared(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once, given by themselves or by the folder in which they are; the best one first."""
    monkeypatch.chdir(tmp_path)
    page = made(runs / "first", runs, out=tmp_path / "all.html")
    lr = {facts["run"][2:]: facts["optim.lr"] for facts in page.facts}  # without the number
    assert lr == {"first": "0.2", "second": "0.05"} and "2 runs" in page.said and page.matrix
    best = [float(facts["best top1"].split()[0]) for facts in page.facts]
    assert best == sorted(best, reverse=True) and page.best.index(True) == 0 < sum(page.best) < 2
    typed = ["optim.name", "optim.lr", "train.epochs", "log.every_steps"]
    assert [*page.facts[0]][:6] == ["run", "best top1", *typed]
    assert page.folded_keys == ["key", "optim.nesterov", "optim.weight_decay", "optim.clip_norm"]
    assert page.colours > {(f"c{i}", f"{i}") for i in (1, 2)} and page.boxes == ["c1", "c2"]
    assert (
        report.write_report(report.arguments([f"{runs}/first", f"{runs}/second/metrics.jsonl"]))
        == 0
    )
    assert (tmp_path / "report.html").exists() and not (runs / "report.html").exists()


def test_a_run_that_has_not_ended(copied: Path, runs: Path, tmp_path: Path) -> None:
    """The last row is cut off. Nothing is written through a link in a stranger's folder."""
    text = re.sub('"seconds": [0-9.]+', '"seconds": 0.01', (copied / "summary.json").read_text())
    (copied / "summary.json").write_text(text.replace('"params_sha256": "', '"params_sha256": "0'))
    page = made(runs / "first", copied, out=tmp_path / "a.html")
    assert {facts["took"].partition("0:")[0] for facts in page.facts} == {"", "about "}
    assert page.means[0][0] == "mean of best top1" and page.means[1][1:] == ["0.00 %", "2"]
    (copied / "report.html").unlink(missing_ok=True)
    (copied / "report.html").symlink_to(tmp_path / "outside")
    (copied / "summary.json").unlink()
    (copied / "metrics.jsonl").write_text((copied / "metrics.jsonl").read_text()[:-30])
    (copied / "verdict.json").write_text(json.dumps({"epoch": 2.0, "verdict": ["input-bound."]}))
    page = made(copied)
    assert page.facts[0]["status"].startswith("epoch 2.0, 0:00 left; still in training")
    assert "input-bound." in page.said
    assert page.facts[0]["best top1"].endswith("1.1 of 2") and not (tmp_path / "outside").exists()
    (copied / "metrics.jsonl").write_text("")  # it has only begun
    page = made(copied)
    assert page.facts[0]["best top1"] == "no validation" and not page.charts


def test_names_from_a_run_are_escaped(copied: Path, runs: Path, tmp_path: Path) -> None:
    config = {"run": {"name": HOSTILE}, "a": {HOSTILE: HOSTILE}}
    (copied / "config.yaml").write_text(json.dumps(config))
    with open(copied / "metrics.jsonl", "a") as file:
        file.write(json.dumps(step_row(10, **{HOSTILE: 1.5, f"host_{HOSTILE}": 2.5})) + "\n")
    (copied / "summary.json").write_text(json.dumps({"status": HOSTILE, "verdict": [HOSTILE]}))
    for path in (copied / "evaluation").glob("*.csv"):
        path.write_text(path.read_text().replace("dots", '"' + HOSTILE.replace('"', '""') + '"'))
    assert " ".join(made(copied).said).count(HOSTILE) >= 8
    both = made(runs / "first", copied, out=tmp_path / "both.html")
    assert not any(both.best) and "best: the runs differ in data.root, data" in " ".join(both.said)


def test_what_the_best_checkpoint_gets_wrong(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the files of the run, and those of evaluate.py if it had other images."""
    monkeypatch.chdir(runs)
    assert evaluate.evaluate_one(evaluate.arguments(["first", "loader.workers=0"])) == 0
    page = made(Path("first"))
    files = [Path("first") / unquote(link) for link in page.links]
    assert [file.stem for file in files] == ["confusion", "per_class", "worst"]
    assert {file.parent.resolve() for file in files} == {runs / "first" / "evaluation"}
    with open(files[0]) as confusion, open(files[1]) as classes:
        pairs = {(r["class"], r["prediction"]): r["images"] for r in csv.DictReader(confusion)}
        by_class = sorted(csv.DictReader(classes), key=lambda row: float(row["top1"]))
    (_, *names), *matrix = page.matrix
    assert matrix == [[a, *(pairs.get((a, b), "") for b in names)] for a in names]
    shown = [[r["class"], *(r[n] for n in ("top1", "precision", "f1"))] for r in by_class]
    rounded = [[a, *(f"{float(n):.2f}" if n else "–" for n in row)] for a, *row in shown]
    assert [[a, *(n.split(" ±")[0] for n in row)] for a, _, *row in page.classes[1:]] == rounded
    assert [*page.charts][-1] == "accuracy by confidence"
    hidden = 8 + 4 * (192 + 8) - 192, 8 + 4 * 254 - 192  # 100 % in CSS
    assert len(page.styles) == 15  # once, though there are two evaluations
    for i, style in enumerate(page.styles):
        found = map(float, re.findall(r"[0-9.]+", style))
        at = [round(part / 100 * size) for part, size in zip(found, hidden, strict=True)]
        assert at == [8 + i % 4 * (192 + 8), 8 + i // 4 * 254]
    words = ["first", "loader.workers=0", "data.val=train"]
    assert evaluate.evaluate_one(evaluate.arguments(words)) == 0
    page = made(Path("first"))
    assert "Evaluation first,best,train" in page.said and len(page.styles) == 15 + 16
    shutil.rmtree("evaluation")
    files[1].write_text("class,images,top1,precision,f1,name\na,9,25.0,,40,A\nb,0,,,,B\n")
    assert made(Path("first")).classes[1:] == [["A", "9", "25.00 ± 14.4", "–", "40.00"]]


def test_any_metric_gets_a_chart(tmp_path: Path) -> None:
    """With a band for its minimum and maximum, in the rows of any split, unless it is always 0."""
    values = {"gpu_w": 9, "norm": 1.0, "gap": 2.0, "gap_min": 1.0, "gap_max": 3.0, "a[0]*": None}
    rows = [step_row(step, late_fraction=0.0, host_gib=0, **values) for step in (50, 100)]
    reference = {"reference_top1": 5.0, "reference_top1_min": 4.0, "reference_top1_max": 6.0}
    val = {"split": "val", "images": 100}
    rows.append(val | {"step": 100, "epoch": 1, "gap": 5.0, "top1": 3.0, **reference})
    rows.append(val | {"step": 200, "epoch": 2, "top1": 2.0})
    words = {"status": "interrupted", "seconds": 5, "warning": {"line": "warning   the loss"}}
    words |= {"history": [1], "images_per_second": 0.0, "verdict": []}
    page = made(synthetic(tmp_path / "run", rows, **words))
    values = ["3.00 % ± 1.7 after epoch 1 of –", "2.00 % ± 1.4 after epoch 2 of –"]
    values += ["interrupted; the same command resumes; config changed", "the loss", "0:05"]
    assert [*page.facts[0].values()][:5] == values and page.facts[0]["ended"][:2] == "20"
    assert [*page.charts] == ["top1", "gap", "norm", "gpu_w"] and page.folded == ["gpu_w"]
    # The validation and the earlier runs; validation and training; the norm; the power.
    assert [*map(len, page.lines)] == [2, 1, 1, 2, 2, 2] and page.lines[0] == [(1, 3), (2, 2)]
    assert len(page.bands) == 2 and page.bands[1] == [(0.5, 3), (1, 3), (1, 1), (0.5, 1)]
    assert ("c3", "earlier") in page.colours and "large dot: best" in str(page.said)
    assert page.charts["top1"][3] == {"minallowed": 0, "maxallowed": 100} != page.charts["gap"][3]
    assert "limits the" not in str(page.said)


def test_a_long_curve_keeps_its_extremes_as_a_band(tmp_path: Path) -> None:
    rows = [step_row(step, loss=9.0 if step == 777 else 1.0) for step in range(5000)]
    page = made(synthetic(tmp_path / "run", rows))
    assert len(page.lines[0]) <= report.BUCKETS and max(y for _, y in page.bands[0]) == 9
    even = made(synthetic(tmp_path / "noise", [step_row(i, noise=i % 2) for i in range(300)]))
    assert {y for _, y in even.lines[0]} == {0.5} and "training, last 1" in even.said
    assert len(even.lines[0]) == 150 and {y for _, y in even.bands[0]} == {0, 1}


def test_a_run_that_diverged_does_not_hide_the_others(tmp_path: Path) -> None:
    for name, loss in {"good": 2.0, "bad": 4e5}.items():
        rows = [step_row(50, loss=1.0), step_row(100, loss=loss)]
        (synthetic(tmp_path / name, rows) / "config.yaml").write_text(f"a: {name}")
    page = made(tmp_path)
    assert not any(page.best) and any(said.endswith("better; cut off at 10") for said in page.said)
    assert page.charts["loss"][4] == [0.05, 10] and [(0.5, 1), (1, 2)] in page.lines


def test_many_runs(tmp_path: Path) -> None:
    """Only their validations are drawn; values with one point each have no axes."""
    val = [{"step": 9, "epoch": e, "split": "val", "top1": e, "top1_raw": 5.0} for e in (1.0, 2.3)]
    for i in range(12):
        rows = [step_row(50, top1=1.0), val[0] | {"once": 7.0}, val[1] | {"top1": 2.3 - i / 99}]
        config = synthetic(tmp_path / f"demo,same,lr={i}", rows) / "config.yaml"
        config.write_text(json.dumps({"optim": {"lr": f"{i}"}, "model": {"name": f"{i}"}}))
    page = made(tmp_path)
    assert {*page.charts} == {"top1", "top1_raw"} and page.folded == ["top1_raw"]
    assert [*map(len, page.lines)] == 24 * [2] and "1 optim.lr=0 model.name=0, last 7" in page.said
    assert "clearly" not in str(page.said)  # no images: the error is unknown
    assert page.boxes == [f"c{i % 10 + 1}" for i in range(12)] and page.facts[0]["run"] == "1"


def test_a_sweep_has_a_chart_of_its_key(tmp_path: Path) -> None:
    """Of runs with equal weights one counts, and of runs that have not ended none beside others."""
    tops = {0.3: (100.0, 50.0, 1.0, 50.0), 0.03: (40.0,), 0.1: (99.0,)}
    for lr, seed, top1 in [(lr, i, v) for lr, of in tops.items() for i, v in enumerate(of, 1)]:
        val = {"step": 9, "epoch": 1, "split": "val", "top1": top1, "images": 100}
        about = {"status": "interrupted"} if seed == 3 else {"params_sha256": f"{top1}"}
        config = synthetic(tmp_path / f"lr={lr},{seed}", [val], **about) / "config.yaml"
        config.write_text(f"optim: {{lr: {lr}}}\ntrain: {{seed: {seed}}}\nlog: {{keep: {seed}}}")
    page = made(*tmp_path.glob("*,1"), out=tmp_path / "seed1.html")
    assert page.charts.keys() == {"best top1 by optim.lr"}
    assert page.lines == [[(0, 40), (1, 99), (2, 100)]]
    assert "Run 1 optim.lr=0.3 may be no better than 2 optim.lr=0.1" in page.said
    page = made(tmp_path)  # the mean of two runs is below the best value of another
    means = [["optim.lr=0.1", "99.00 % ± 0.99", "–", "1"]]
    means += [["optim.lr=0.3", "75.00 % ± 25.00", "35.36 %", "2"]]
    assert page.means[1:3] == means
    assert "optim.lr=0.1 may be no better than optim.lr=0.3 and optim.lr=0.03" in page.said
    assert not any(page.best) and page.lines[0] == [(0, 40), (1, 99), (2, 75)]
    assert page.charts["best top1 by optim.lr"][2]["categoryarray"] == ["0.03", "0.1", "0.3"]
    assert "optim.lr=0.3, last 75.00 %" in page.said and page.boxes == ["c1", "c2", "c3"]
    rows = [{"val": [{"top1": top1, "images": 9}]} for top1 in (80.0, 82.0, 61.9, 60.9)]
    runs = [report.Run(tmp_path, rows=r, config={"data.val_fold": i}) for i, r in enumerate(rows)]
    assert report.near_best([("", runs[:2]), ("3", runs[2:3]), ("4", runs[3:])]) == ["3"]
    assert report.mean_of(runs[:2])[2] == (81 * 19 / 18) ** 0.5  # of 18 images: the folds are close


def test_classes_that_differ(tmp_path: Path) -> None:
    """By the spread of seeds, where there are several: that of `ship` is larger than its gap."""
    tops = {"ship": ((59, 51, 50), (64, 26, 9)), "horse": ((33, 30, 36), (10, 12, 10))}
    series: list[report.Series] = [("", []), ("", [])]
    for i, j in np.ndindex(2, 3):
        rows = [{"class": c, "images": 100, "top1": float(of[i][j])} for c, of in tops.items()]
        found = [(tmp_path, {}, {"per_class": rows})]
        series[i][1].append(report.Run(tmp_path, evaluations=found))
    assert [row["class"] for row, *_ in report.changed_classes(series)] == ["horse"]
    single = [(label, of[:1]) for label, of in series]
    assert [row["class"] for row, *_ in report.changed_classes(single)] == ["horse"]


def test_damaged_files_and_no_runs(copied: Path, tmp_path: Path) -> None:
    damaged = {"metrics.jsonl": '{"step": 1}\n', "verdict.json": "[]", "summary.json": "[]"}
    (copied / "summary.json").write_text("{}")
    for name, content in damaged.items():
        (copied / name).write_text(content)
        with pytest.raises(UserError, match=rf"^{copied}: .*Error.*; leave this run out"):
            report.read_runs(copied)
        (copied / name).write_text("" if name == "metrics.jsonl" else '{"verdict": []}')
    with pytest.raises(UserError, match=r"/fist: no such folder; did you mean .*/first"):
        report.read_runs(tmp_path / "fist")
    with pytest.raises(UserError, match=r": no metrics.jsonl or summary.json in it or below; gi"):
        report.read_runs(ROOT / "conf")  # its config.yaml is not that of a run
