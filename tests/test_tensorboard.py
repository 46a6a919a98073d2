"""What TensorBoard's own endpoints say of our runs."""

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode

import pytest

from lockstep import tags
from lockstep.report import figures

Ask = Callable[..., Any]


@pytest.fixture
def tensorboard(run_job: Callable[..., Any], tmp_path: Path, free_port: int) -> Iterator[Ask]:
    """TensorBoard on one run of each strategy and their comparison; returns what an endpoint answers."""
    for strategy in ("single", "ddp"):
        overrides = (
            f"strategy={strategy}",
            "trainer.devices=2",
            "trainer.max_epochs=2",
            "trainer.limit_train_batches=3",
        )
        run_job(*overrides, run=f"runs/{strategy}")
    figure = tmp_path / "figure.png"
    figure.write_bytes(b"\x89PNG")
    figures.show_in_tensorboard([figure], tmp_path / "runs" / "comparison")
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(tmp_path / "runs"), "--host", "127.0.0.1"]
    options = ["--port", str(free_port), "--load_fast", "false"]
    server = subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def ask(path: str, post: dict[str, Any] | None = None, **query: str) -> Any:
        url = f"http://127.0.0.1:{free_port}/data/{path}?{urlencode(query)}"
        data = None if post is None else json.dumps(post).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)

    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                if len(ask("runs")) == 3:
                    break
            except URLError:
                pass
            time.sleep(0.5)
        yield ask
    finally:
        server.terminate()
        server.wait()


def test_tensorboard_shows_every_page(tensorboard: Ask) -> None:
    assert sorted(tensorboard("runs")) == ["comparison", "ddp/ddp-seed0", "single/single-seed0"]
    scalars = tensorboard("plugin/scalars/tags")
    assert set(scalars["ddp/ddp-seed0"]) >= {tags.TRAIN_LOSS, tags.EPOCH_SEC, tags.TRAIN_LOSS_RANK.format(rank=1)}
    points = tensorboard("plugin/scalars/scalars", run="single/single-seed0", tag=tags.TRAIN_LOSS)
    assert [step for _, step, _ in points] == [0, 1]

    request = {
        "experimentName": "",
        "allowedStatuses": ["STATUS_SUCCESS", "STATUS_UNKNOWN", "STATUS_RUNNING"],
        "colParams": [],
        "startIndex": 0,
        "sliceSize": 10,
    }
    groups = tensorboard("plugin/hparams/session_groups", request)["sessionGroups"]
    assert len(groups) == 2  # one row a run
    rows = {group["hparams"]["strategy"]: group for group in groups}
    expected = {
        "devices": 2,
        "world_size": 2,
        "global_batch_size": 256,
        "per_process_batch_size": 128,
        "model": "CNN(channels=[8, 16], hidden=128)",
        "seed": 0,
    }
    assert rows["ddp"]["hparams"].items() >= expected.items()
    assert rows["single"]["hparams"]["world_size"] == 1
    for row in rows.values():
        assert set(row["hparams"]) == {*expected, "strategy", "threads"}
        values = {metric["name"]["tag"]: metric["value"] for metric in row["metricValues"]}
        assert set(values) == set(tags.SUMMARY)  # every column is filled
        assert 0 < values[tags.TEST_ACC] < 1

    layout = tensorboard("plugin/custom_scalars/layout")
    charts = {chart["title"]: chart["multiline"]["tag"] for part in layout["category"] for chart in part["chart"]}
    (pattern,) = charts["all-reduced loss and each rank's own"]
    matches = tensorboard("plugin/custom_scalars/scalars", run="ddp/ddp-seed0", tag=pattern)["tag_to_events"]
    ranks = {tags.TRAIN_LOSS_RANK.format(rank=rank) for rank in (0, 1)}
    assert set(matches) == {tags.TRAIN_LOSS, *ranks}

    assert list(tensorboard("plugin/images/tags")["comparison"]) == ["comparison/figure"]
