"""A run with train.ema_decay: the average and the raw model are validated and reported."""

import json
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import train
from models.resnet import resnet_tiny
from pipeline.build import build_datasets
from tests.results import rows, stored
from tests.small_run import compose

pytestmark = pytest.mark.usefixtures("toy_runs", "own_logging")


def test_average_and_raw_model_are_validated(
    image_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each result equals an evaluation of the stored weights, one image at a time."""
    options = ["loader.workers=0", "train.ema_decay=0.9999", "log.trackers=[tensorboard]"]
    config = compose(image_root, tmp_path, "train.epochs=3", *options)
    summary = train.train(config)
    row, state = rows(tmp_path, "val")[-1], stored(tmp_path)
    assert state["best"]["top1"] == pytest.approx(
        max(found["top1"] for found in rows(tmp_path, "val")), abs=1e-3
    )

    datasets = build_datasets(config)
    mean, std = torch.tensor(config.data.mean), torch.tensor(config.data.std)
    samples = [datasets.val[i] for i in range(len(datasets.val))]
    normalised = [(torch.from_numpy(sample["image"]) / 255 - mean) / std for sample in samples]
    images = torch.stack(normalised).permute(0, 3, 1, 2)
    labels = torch.tensor([sample["label"] for sample in samples])
    for weights, suffix in (("ema", ""), ("model", "_raw")):
        model = resnet_tiny(3, 32).eval()
        model.load_state_dict(state[weights])
        with torch.no_grad():
            logits = torch.cat([model(image[None]) for image in images])
        loss = nn.functional.cross_entropy(logits, labels).item()
        top1 = 100 * (logits.argmax(1) == labels).float().mean().item()
        for reported in (row, summary):
            assert reported["loss" + suffix] == pytest.approx(loss, rel=1e-3)
            assert reported["top1" + suffix] == pytest.approx(top1, abs=1e-3)
    assert row["loss"] != pytest.approx(row["loss_raw"], rel=1e-2)

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.value for event in events.Scalars("val/top1_raw")] == pytest.approx(
        [found["top1_raw"] for found in rows(tmp_path, "val")]
    )
    assert {"val/loss_raw", "val/macro_recall_raw"} <= set(events.Tags()["scalars"])
    console = capsys.readouterr().out
    assert console.count(f"; raw model: top1 {row['top1_raw']:.2f} %") == 1
    assert json.loads((tmp_path / "summary.json").read_text())["top1_raw"] == summary["top1_raw"]
