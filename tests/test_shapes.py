"""Odd sizes and rhythms: every strategy takes the same steps on the same samples and counts each of them once."""

from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep import tags

slow = pytest.mark.slow
RunJob = Callable[..., dict[str, float]]
STRATEGIES = {
    "single": ("strategy=single",),
    "dp3": ("strategy=dp", "trainer.devices=3"),
    "ddp3": ("strategy=ddp", "trainer.devices=3"),
}
# 4,500 images for training, of which 252 leave 216 over; 101 for testing, of which 25 leave 1 over
EXACT = (
    *("trainer.precision=64-true", "data.batch_size=252", "trainer.max_epochs=2", "data.eval_batch_size=25"),
    *("+data.test_size=101", "data._target_=faults.FewTestImages", "+callbacks.steps={_target_: faults.NoteSteps}"),
    *("model.net.channels=[2,3]", "model.net.hidden=16"),
)
SAME = (tags.TRAIN_LOSS, tags.VAL_LOSS, tags.VAL_ACC, tags.TEST_LOSS, tags.TEST_ACC)


def steps(tmp_path: Path, run: str) -> list[int]:
    """Each rank's optimizer steps."""
    return [int(path.read_text()) for path in sorted((tmp_path / run).glob("steps_*"))]


@pytest.mark.parametrize(
    ("options", "expected_steps"),
    [
        pytest.param(("trainer.limit_train_batches=5",), 10, marks=slow),
        pytest.param(
            ("trainer.limit_train_batches=0.3", "trainer.limit_val_batches=0.5", "trainer.limit_test_batches=3"),
            10,
            marks=slow,
        ),
        (("trainer.accumulate_grad_batches=2", "trainer.gradient_clip_val=0.1"), 18),  # 17 batches: the last one alone
        pytest.param(("trainer.accumulate_grad_batches=3", "trainer.gradient_clip_val=0.5"), 12, marks=slow),
        pytest.param(("trainer.gradient_clip_val=0.01", "trainer.gradient_clip_algorithm=value"), 34, marks=slow),
        pytest.param(("trainer.check_val_every_n_epoch=2", "trainer.max_epochs=3"), 51, marks=slow),
        pytest.param(("trainer.val_check_interval=0.25",), 34, marks=slow),
        pytest.param(("trainer.max_steps=20",), 20, marks=slow),
        pytest.param(("trainer.max_steps=3", "trainer.accumulate_grad_batches=3"), 3, marks=slow),
        (("trainer.overfit_batches=3", "trainer.max_epochs=4"), 12),
        pytest.param(("trainer.overfit_batches=0.2",), 6, marks=slow),
        (("data.batch_size=6", "trainer.limit_train_batches=7"), 14),
        pytest.param(
            ("data.eval_batch_size=1", "trainer.limit_train_batches=2", "trainer.limit_val_batches=20"), 4, marks=slow
        ),
        pytest.param(("data.eval_batch_size=100", "trainer.limit_train_batches=2"), 4, marks=slow),  # 101 test images
        (("+data.test_size=1", "trainer.limit_train_batches=2"), 4),  # fewer samples than ranks
        pytest.param(("data.val_size=7", "trainer.limit_train_batches=2"), 4, marks=slow),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_every_strategy_agrees(run_job: RunJob, tmp_path: Path, options: tuple[str, ...], expected_steps: int) -> None:
    exact = [option for option in EXACT if option.partition("=")[0] not in {o.partition("=")[0] for o in options}]
    found = {name: run_job(*exact, *options, *strategy, run=name) for name, strategy in STRATEGIES.items()}
    for name in STRATEGIES:
        assert set(steps(tmp_path, name)) == {expected_steps}, name
        measured = set(SAME) & found["single"].keys()  # a run that ends within its first epoch has no validation
        assert measured == set(SAME) & found[name].keys()
        assert {tags.TRAIN_LOSS, tags.TEST_LOSS, tags.TEST_ACC} <= measured
        for tag in measured:
            assert abs(found[name][tag] - found["single"][tag]) <= 1e-9, (name, tag)


@slow
def test_any_number_of_processes_agrees_with_one(run_job: RunJob, tmp_path: Path) -> None:
    job = (*EXACT, "data.batch_size=420", "trainer.max_epochs=1")
    single = run_job(*job, "strategy=single", run="single")
    for processes in range(1, 8):
        run = f"ddp{processes}"
        found = run_job(*job, "strategy=ddp", f"trainer.devices={processes}", run=run)
        assert steps(tmp_path, run) == [10] * processes
        for tag in SAME:
            assert abs(found[tag] - single[tag]) <= 1e-9, (processes, tag)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bfloat16_trains_under_every_strategy(run_job: RunJob, tmp_path: Path, strategy: str) -> None:
    exact = [option for option in EXACT if not option.startswith("trainer.precision")]
    metrics = run_job(*exact, "trainer.precision=bf16-mixed", *STRATEGIES[strategy])
    assert set(steps(tmp_path, "run")) == {34}
    assert metrics[tags.TEST_ACC] > 0.3
    assert metrics[tags.TEST_ACC] * 101 == pytest.approx(round(metrics[tags.TEST_ACC] * 101), abs=1e-9)
