"""Reports equal the runs' files, and the page is self-contained.

Most tests use copies of the `folder` in conftest.py with other values.
"""

import csv
import json
import os
import shutil
from base64 import b64decode
from collections.abc import Iterable
from pathlib import Path
from statistics import mean, stdev
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import yaml

from conf.errors import UserError
from scripts import report
from tests.helpers import results
from tests.helpers.processes import needs_extras
from tests.helpers.results import rows as read_rows

HOSTILE = "</title></script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&amp;"
FORBIDDEN = {"script", "link", "iframe", "object", "base", "form", "img"}


class Page:
    """A page, which is also XML."""

    def __init__(self, out: Path) -> None:
        page, *scripts = out.read_text("utf-8").split("<script nonce=")  # Plotly's and ours
        assert len(scripts) == 2 and "default-src 'none'" in page and "script-src 'nonce-" in page
        self.root = ElementTree.fromstring(page + "</body></html>")
        assert FORBIDDEN.isdisjoint(node.tag for node in self.root.iter())
        self.text = " ".join("".join(self.root.itertext()).split())
        labels = texts(self.root.iter("dt"))
        self.conditions = dict(zip(labels, texts(self.root.iter("dd")), strict=True))

    def table(self, kind: str) -> list[list[str]]:
        """Return the cell texts of all tables of a class."""
        return [texts(row) for row in self.root.iterfind(f".//table[@class='{kind}']//tr")]

    def rows(self) -> list[dict[str, str]]:
        """Return the rows in the table of several runs, by column heads."""
        head, *rows = self.table("runs")
        return [dict(zip(head, row, strict=True)) for row in rows]

    def figure(self, title: str) -> dict[str, Any]:
        (chart,) = self.root.iterfind(f".//div[@aria-label='{title}']")
        return json.loads(chart.attrib["data-figure"])

    def curves(self, title: str) -> dict[str, tuple[list[float], list[float]]]:
        """Return epochs and values of a chart's curves by label."""
        traces = self.figure(title)["data"]
        return {trace["name"]: (trace["x"], trace["y"]) for trace in traces}


def texts(nodes: Iterable[ElementTree.Element]) -> list[str]:
    return [" ".join("".join(node.itertext()).split()) for node in nodes]


def page_of(*runs: Path) -> Page:
    """Write the page for runs beside the first one, and read it."""
    out = runs[0].with_suffix(".html")
    words = [*map(str, runs), "--out", str(out)]
    assert report.write_report(report.arguments(words)) == 0
    return Page(out)


def read_csv(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def write_rows(run: Path, rows: Iterable[dict[str, Any]]) -> None:
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def change_summary(run: Path, **values: Any) -> None:
    (run / "summary.json").write_text(json.dumps(results.summary_of(run) | values))


def copied(run: Path, to: Path, top1: tuple[float, float] = (20.0, 30.0), **keys: Any) -> Path:
    """Copy a run. `top1` are its two validations; `keys` set config values as section__key."""
    shutil.copytree(run, to, ignore=shutil.ignore_patterns("checkpoints"))
    first, last = read_rows(run, "val")
    validated = [first | {"top1": top1[0]}, last | {"top1": top1[1]}]
    write_rows(to, [*read_rows(run, "train"), *validated])
    config = yaml.safe_load((run / "config.yaml").read_text())
    for key, value in keys.items():
        section, _, name = key.partition("__")
        config[section][name] = value
    (to / "config.yaml").write_text(yaml.safe_dump(config))
    best = max(validated, key=lambda row: row["top1"])
    change_summary(to, params_sha256=str(to), best_epoch=round(best["epoch"], 4))
    return to


def test_interval_of_published_examples():
    """From Newcombe (1998), Statistics in Medicine 17, table I, in percent."""
    published = {(81, 263): "25.5 to 36.6", (15, 148): "6.2 to 16.0", (1, 29): "0.6 to 17.2"}
    for (correct, images), interval in (published | {(20, 20): "83.9 to 100.0"}).items():
        text = report.formatted("top1", 100 * correct / images, " %", {"images": images})
        assert text.endswith(f" % ({interval})")


def test_report_of_one_run(folder):
    page, summary = page_of(folder), results.summary_of(folder)
    top1 = summary["best_top1"]
    value = report.formatted("top1", top1, " %", {"images": 15})
    facts = dict(page.table("facts"))
    assert facts["best top1"] == f"{value} at epoch {summary['best_epoch']:.4g}"
    assert facts["limited by"] == (" ".join(summary["verdict"]) or "–")
    assert facts["status"] == "finished" and facts["command"].startswith("python train.py recipe=")
    conditions = page.conditions
    assert (conditions["model.name"], conditions["torch"]) == ("resnet_tiny", torch.__version__)
    assert conditions["commit"][:8] == summary["made_by"]["git_commit"][:8]
    for split, label in (("val", "validation"), ("train", "training")):
        expected = results.column(folder, split, "epoch"), results.column(folder, split, "loss")
        assert page.curves("loss")[label] == expected
    charts = page.root.findall("./body/div//div[@aria-label]")  # parts that are not folded
    assert [chart.attrib["aria-label"] for chart in charts] == ["top1", "loss", "lr"]
    workers = page.curves("workers")
    assert workers["validation"] == ([], []) and set(workers["training"][1]) == {1}
    assert "tickformat" in page.figure("compute_fraction")["layout"]["yaxis"]
    assert page.figure("top1_raw")["layout"]["yaxis"]["ticksuffix"] == " %"
    assert " ".join((folder / "config.yaml").read_text().split()) in page.text


@needs_extras
def test_report_confusions_and_worst_images(folder, image_root):
    page, evaluation = page_of(folder), folder / "evaluation"
    head, *rows = page.table("matrix numbers")
    confusions = read_csv(evaluation / "confusion.csv")
    images = {(row["name"], row["prediction_name"]): row["images"] for row in confusions}
    names = head[1:]
    assert rows == [[name, *(images.get((name, other), "") for other in names)] for name in names]
    worst = read_csv(evaluation / "worst.csv")[:12]
    paths = texts(page.root.iterfind(".//code[@class='path']"))  # relative to the data
    assert [str(image_root / path) for path in paths] == [row["path"] for row in worst]
    pictures = page.root.findall(".//div[@class='picture']")
    # In the second row and column of worst.jpg, which has rows of four
    assert pictures[5].attrib["style"] == "background-position: -208px -262px"
    links = {link.attrib["download"]: link.attrib["href"] for link in page.root.iter("a")}
    assert sorted(links) == ["confusion.csv", "per_class.csv", "worst.csv"]
    content = b64decode(links["worst.csv"].removeprefix("data:text/csv;base64,"))
    assert content == (evaluation / "worst.csv").read_bytes()


@needs_extras
def test_report_lists_confusions_of_many_classes(folder, tmp_path):
    to = copied(folder, tmp_path / "many")
    classes = "".join(f"c{i},1,{100 - i},,12.345,name {i}\n" for i in range(21))
    text = f"class,images,top1,precision,f1,name\nnone\udcea,0,,,,no images\n{classes}"
    (to / "evaluation" / "per_class.csv").write_text(text, errors="surrogateescape")
    pairs = [f"c{i},c{i // 2},name {i},name {i // 2},{30 - i}\n" for i in range(30)]
    text = "".join(["class,prediction,name,prediction_name,images\n", *pairs])
    (to / "evaluation" / "confusion.csv").write_text(text)
    page = page_of(to)
    numbers = page.table("numbers")[1:]
    assert numbers[0] == ["name 20", "1", "80.00", "–", "12.35"]
    assert [row[0] for row in numbers] == [f"name {i}" for i in range(20, 0, -1)]
    confusions = page.table("pairs")[1:]
    assert len(confusions) == 20 and confusions[0] == ["name 1", "name 0", "29"]


def test_report_compares_runs(folder, tmp_path):
    """The best one is first; the keys that distinguish the runs are their names in the report."""
    low = copied(folder, tmp_path / "low", (10.0, 9.0), optim__lr=0.3, log__every_steps=9)
    high = copied(folder, tmp_path / "high", (20.0, 30.0), optim__lr=0.7)
    change_summary(high, verdict=["input-bound: slow"], images_per_second=1234.5)
    page = page_of(tmp_path, low)
    first, second = page.rows()
    names = ["run", "best top1", "standard deviation", "n", "images/s", "limited by"]
    values = ["optim.lr=0.7 high", "30.00 % (13.0 to 55.2)", "–", "1", "1,234", "input-bound"]
    assert first == dict(zip(names, values, strict=True))
    assert [*second.values()][:4] == ["optim.lr=0.3 low", "10.00 % (2.3 to 34.0)", "–", "1"]
    cells = page.root.iterfind(".//table[@class='runs']/tbody/tr[1]/td")
    assert [cell.attrib["data-head"] for cell in cells] == names  # a narrow page has no head row
    epochs = results.column(folder, "val", "epoch")
    curves = {"optim.lr=0.7": (epochs, [20, 30]), "optim.lr=0.3": (epochs, [10, 9])}
    assert page.curves("top1") == curves
    assert page.conditions["model.name"] == "resnet_tiny" and "optim.lr" not in page.conditions
    assert "Do not compare" not in page.text
    other = copied(folder, tmp_path / "other", data__val="test")  # the same images
    assert "Do not compare" not in page_of(low, other).text
    (other / "summary.json").unlink()
    assert "Do not compare the values: the runs differ in data.val." in page_of(low, other).text
    grown = copied(folder, tmp_path / "grown", optim__lr=0.3, log__every_steps=9)
    change_summary(grown, training_images="9 images", validation_images="4 images")
    page = page_of(low, grown)
    assert "the runs differ in validation_images." in page.text
    assert "training_images=9 images grown" in [row["run"] for row in page.rows()]
    (grown / "summary.json").unlink()  # of a run in progress
    assert "Do not compare" not in page_of(low, grown).text


def test_report_best_after_accepted_change(folder, tmp_path):
    """If data.val changed, for example, earlier validations used other images."""
    changed = copied(folder, tmp_path / "changed", (90.0, 30.0))
    change_summary(changed, best_epoch=read_rows(folder, "val")[-1]["epoch"])
    assert dict(page_of(changed).table("facts"))["best top1"].startswith("30.00 % (13.0 to 55.2)")


def test_report_best_by_of_each_run(folder, tmp_path):
    copied(folder, tmp_path / "a", (10.0, 20.0))
    loss = read_rows(copied(folder, tmp_path / "b", train__best_by="-loss"), "val")[1]["loss"]
    first, second = page_of(tmp_path).rows()
    assert (first["run"], first["best"]) == ("train.best_by=top1 a", "top1 20.00 % (7.0 to 45.2)")
    assert (second["run"], second["best"]) == ("train.best_by=-loss b", f"loss {loss:.4g}")
    assert f"b: loss {loss:.4g}" in page_of(tmp_path).text


def test_report_groups_seeds_and_folds(folder, tmp_path):
    """A row has its runs' mean. Equal weights count once; an unfinished run has its own row."""
    for seed, top1 in enumerate([(50.0, 40.0), (10.0, 60.0), (30.0, 64.0)]):
        copied(folder, tmp_path / f"seed{seed}", top1, train__seed=seed, data__val_fold=[seed, 5])
    shutil.copytree(tmp_path / "seed2", tmp_path / "twin")
    copied(folder, tmp_path / "other", (0.0, 62.0), optim__lr=0.7)
    stopped = copied(folder, tmp_path / "stopped", (0.0, 90.0), train__seed=3)
    change_summary(stopped, status="interrupted")
    alone, single, group = page_of(tmp_path).rows()
    assert (alone["run"], alone["n"]) == ("optim.lr=0.05 stopped interrupted", "1")
    assert (single["run"], single["best top1"]) == ("optim.lr=0.7 other", "62.00 % (37.5 to 81.6)")
    assert (group["run"], group["n"]) == ("optim.lr=0.05 seed2 and 2 more", "3")
    assert group["best top1"] == f"{mean([50, 60, 64]):.2f} %"
    assert group["standard deviation"] == f"{stdev([50, 60, 64]):.2f} %"
    assert page_of(*tmp_path.glob("seed*")).curves("top1")["train.seed=1"][1] == [10, 60]
    write_rows(tmp_path / "seed1", [row | {"top1": None} for row in read_rows(folder, "val")])
    (row,) = page_of(tmp_path / "seed0", tmp_path / "seed1").rows()  # one diverged
    assert (row["best top1"], row["standard deviation"], row["n"]) == ("–", "–", "2")


def test_report_marks_ties_and_labels_runs(folder, tmp_path):
    """A label has the first key that distinguishes the runs; other keys are columns."""
    for name, lr, top1 in (("a", 0.1, 30.0), ("b", 0.2, 30.0), ("c", 0.3, 20.0)):
        copied(folder, tmp_path / name, (0.0, top1), optim__lr=lr, optim__momentum=lr)
    first, second, third = page_of(tmp_path).rows()
    assert {first["run"], second["run"]} == {"optim.lr=0.1 a", "optim.lr=0.2 b"}
    assert first["best top1"] == second["best top1"] == "30.00 % (13.0 to 55.2) tie"
    assert (third["best top1"], third["optim.momentum"]) == ("20.00 % (7.0 to 45.2)", "0.3")


def test_report_separates_non_repetitions(folder, tmp_path):
    """Of another number of folds, or with a key that has changed on the way."""
    for name, fold in {"1": "1/3", "2": "2/3", "fifth": "1/5", "changed": "3/3"}.items():
        copied(folder, tmp_path / name, data__val_fold=fold)
    change_summary(tmp_path / "changed", history=["accepted at step 9: optim.lr=1"])
    assert sorted(row["n"] for row in page_of(tmp_path).rows()) == ["1", "1", "2"]


def test_report_custom_values(folder, tmp_path):
    """Values have the unit in summary.json; lower ones may be better, and 0 has no chart."""
    for number in (2, 1):
        to = copied(folder, tmp_path / f"{number}", train__best_by="-mae", optim__lr=number)
        validated = enumerate(read_rows(folder, "val"))
        rows = [row | {"mae": number + i, "late": 0} for i, row in validated]
        write_rows(to, rows)
        change_summary(to, best_epoch=rows[0]["epoch"])
        change_summary(to, units={"mae": " px"}, warning={"line": "warning   slow"})
    page = page_of(tmp_path)
    assert [row["best mae"] for row in page.rows()] == ["1 px", "2 px"]
    assert page.figure("mae")["layout"]["yaxis"]["ticksuffix"] == " px"
    assert page.root.find(".//div[@aria-label='late']") is None
    facts = dict(page_of(tmp_path / "2").table("facts"))
    assert facts["best mae"].startswith("2 px at epoch") and facts["note"] == "warning slow"


def test_report_of_unfinished_run(folder, tmp_path):
    to = copied(folder, tmp_path / "killed")
    (to / "summary.json").unlink()
    (to / "verdict.json").write_text(json.dumps({"verdict": ["input-bound: slow"]}))
    with open(to / "metrics.jsonl", "a") as file:
        file.write('{"step": 999, "epoch": 9')
    facts = dict(page_of(to).table("facts"))
    assert facts["best top1"].startswith("30.00 %") and facts["limited by"] == "input-bound: slow"
    assert (facts["status"], facts["images/s"]) == ("not finished", "–")
    (to / "metrics.jsonl").write_text("")  # has just started
    assert dict(page_of(to).table("facts"))["best top1"] == "no finite value yet"
    assert [row["best top1"] for row in page_of(to, folder).rows()][1] == "–"


BROKEN = {  # file and content of a run -> what is reported
    ("metrics.jsonl", '{"step": 1, "epoch": 1, "split": "val"}\n{no}\n'): "line 2: JSONDecode",
    ("metrics.jsonl", '{"step": 1, "epoch": 1, "split": "test"}\n'): "line 1: KeyError: 'test'",
    ("metrics.jsonl", '{"step": 1, "split": "val"}\n'): "line 1: KeyError: 'epoch'",
    ("metrics.jsonl", "\0\n"): "line 1: JSONDecodeError",
    ("summary.json", "[1, 2]"): "AttributeError",
    ("summary.json", '{"seconds": 1}'): "KeyError: 'images_per_second'",
    ("summary.json", '{"device": [1]}'): "TypeError: unhashable",
    ("summary.json", '{"params_sha256": [1]}'): "TypeError: unhashable",
    ("summary.json", '{"training_images": [1]}'): "TypeError: unhashable",
    ("verdict.json", "1"): "AttributeError",
    ("config.yaml", "a: [1"): "ParserError: while parsing a flow sequence in",
    ("config.yaml", "\0"): "ReaderError: ",
    ("overrides.yaml", "1"): "TypeError",
    ("summary.json", os.mkfifo): "summary.json is not a regular file",
    ("verdict.json", os.mkdir): "verdict.json is not a regular file",
    ("config.yaml", os.mkfifo): "config.yaml is not a regular file",
    ("config.yaml", os.mkdir): "config.yaml is not a regular file",
    ("metrics.jsonl", os.mkfifo): "metrics.jsonl is not a regular file",
}


def replace(path: Path, content: Any) -> None:
    path.unlink(missing_ok=True)
    path.write_text(content) if isinstance(content, str) else content(path)


def test_report_names_damaged_files_of_runs(folder, tmp_path, capsys):
    copied(folder, tmp_path / "good")
    lines = []
    for number, ((file, content), reason) in enumerate(BROKEN.items()):
        to = copied(folder, tmp_path / f"{number}")
        replace(to / file, content)
        lines.append((f"{to}: damaged, skipped: ", file, reason))
    page = page_of(tmp_path)
    for printed in (page.text, capsys.readouterr().out):
        for start, file, reason in lines:
            assert file in printed.split(start)[1][:60] and reason in printed.split(start)[1][:160]
    assert dict(page.table("facts"))["best top1"].startswith("30.00 %")  # of the good one
    with pytest.raises(UserError, match=r"/10: damaged, skipped: config.yaml: .*; choose a diff"):
        page_of(tmp_path / "10")
    with pytest.raises(UserError, match=r"goo: no metrics.jsonl in it or below; .* mean .*od"):
        page_of(tmp_path / "goo")


def test_report_skips_text_and_lists_of_observers(folder, tmp_path):
    to = copied(folder, tmp_path / "run")
    added = {"note": "text", "per_class": [1, 2], "one": 5.0}
    write_rows(to, [row | added for row in read_rows(to, "val")])
    page = page_of(to)
    assert dict(page.table("facts"))["best top1"].startswith("30.00 %")
    assert page.curves("one")["validation"][1] == [5.0, 5.0]


@needs_extras
@pytest.mark.parametrize(
    ("file", "content", "named"),
    [
        ("worst.jpg", os.mkfifo, ""),
        ("other.csv", os.mkfifo, ""),
        ("worst.csv", "name\na\n", "worst.csv: line 2: KeyE"),
        ("evaluation.json", '{"images": "1"}', ""),
        ("evaluation.json", '{"images": 1, "step": [1]}', ""),
    ],
)
def test_report_names_and_skips_damaged_evaluations(file, content, named, folder, tmp_path):
    to = copied(folder, tmp_path / "run")
    replace(to / "evaluation" / file, content)
    text = page_of(to).text
    for part in ("evaluation.json: damaged, skipped: ", named, "30.00 %"):
        assert part in text


@needs_extras
def test_report_escapes_names(folder, tmp_path):
    to = copied(folder, tmp_path / HOSTILE.replace("/", "|"), model__name=HOSTILE)
    write_rows(to, [row | {HOSTILE: 1.5} for row in read_rows(folder, "val")])
    change_summary(to, units={HOSTILE: HOSTILE}, status=HOSTILE, verdict=[HOSTILE])
    for path in (to / "evaluation").glob("*.csv"):
        path.write_text(path.read_text().replace("dots", '"' + HOSTILE.replace('"', '""') + '"'))
    assert page_of(to).text.count(HOSTILE) >= 8
    page = page_of(to, folder)
    assert page.text.count(HOSTILE.replace("/", "|")) >= 2
    charts = page.root.findall(".//div[@data-figure]")
    assert HOSTILE in [chart.attrib["aria-label"] for chart in charts]
    # Plotly interprets labels and units as HTML.
    assert "<" not in str([json.loads(chart.attrib["data-figure"]) for chart in charts])


def test_report_long_and_many_curves(folder, tmp_path):
    """Points of a long curve are means. Ten curves are drawn; the legend enables others."""
    to = copied(folder, tmp_path / "long")
    row = read_rows(folder, "train")[0]
    write_rows(to, [row | {"epoch": step / 100, "loss": step} for step in range(5000)])
    epochs, values = page_of(to).curves("loss")["training"]
    assert len(values) == report.POINTS and values[0] == mean(range(20))
    assert epochs == sorted(epochs) and mean(values) == mean(range(5000))
    for number in range(12):
        copied(folder, tmp_path / f"many/{number}", (0.0, number + 1), optim__lr=number)
    traces = page_of(tmp_path / "many").figure("top1")["data"]
    names = [f"optim.lr={number}" for number in range(11, -1, -1)]
    assert [trace["name"] for trace in traces] == names
    assert [trace.get("visible") for trace in traces] == 10 * [None] + 2 * ["legendonly"]


def test_report_replaces_only_files_and_links(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    with pytest.raises(UserError, match="--out pipe: not a regular file; choose a different name"):
        report.write_report(report.arguments([str(folder), "--out", "pipe"]))
    assert Path("pipe").is_fifo()
    Path("precious").write_text("keep")
    Path("report.html").symlink_to("precious")
    assert report.write_report(report.arguments([str(folder), str(folder)])) == 0
    assert Path("precious").read_text() == "keep" and not Path("report.html").is_symlink()
    assert sorted(os.listdir()) == ["pipe", "precious", "report.html"]
