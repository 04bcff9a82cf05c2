"""What the trainer writes of its steps: every number that entered, in few bounded files, newest truth last."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support import STOP, llama_policy, make_draw, make_prompt, make_settings, make_trajectory, slow_logps
from tba import metrics as m
from tba.batch import Batch, collate
from tba.buffer.entries import Draw
from tba.newest import Newest
from tba.policy import Policy
from tba.recorder import FILES, FOLDER, TOGETHER, Entered, Recorder, Source, recorded_steps, rows_of_step
from tba.trainer import Trainer, TrainingFailedError
from test_loss import the_draws

BETA = 0.37


def recorder_of(run: Path, *, every: int = 1, max_mib: int = 8, keeps_logps: bool = True) -> Recorder:
    return Recorder(run / FOLDER, every=every, max_mib=max_mib, keeps_logps=keeps_logps)


def make_trainer(
    policy: Policy, recorder: Recorder | None, *, objective: str = "grpo", newest: Newest | None = None, **trainer: Any
) -> Trainer:
    options = {"learning_rate": 0.01, "clip_norm": None, "groups_per_step": 5, "group_size": 4, "steps": 20,
               "sync_every": 2}  # fmt: skip
    chosen = make_settings(objective={"beta": BETA, "name": objective}, trainer={**options, **trainer})
    return Trainer(policy, chosen, recorder, newest)


def sources_of(draws: Sequence[Draw]) -> list[Source]:
    """As the buffer would name the trajectories: the numbers are told apart by group and place."""
    return [
        Source(text=f"text of {draw.prompt.id}", sampler=draw.sampler,
               numbers=tuple(100 * group + k for k in range(len(draw.trajectories))))
        for group, draw in enumerate(draws)
    ]  # fmt: skip


def pairs(length: int = 2) -> Batch:
    """A batch of one small group."""
    made = [make_trajectory("p", (4 + k, *(5,) * (length - 2), STOP), reward=0.3 * k) for k in range(2)]
    return collate([make_draw(make_prompt("p"), made)], max_tokens=999)


def entered(value: float, *, length: int = 2) -> list[Entered]:
    """A step whose log-probs are all `value`."""
    (micro,) = pairs(length).micro_batches
    return [Entered(micro=micro, logps_NT=torch.full(micro.behaviour_logps_NT.shape, value), log_z_N=None)]


def facts(loss: float = 0.5) -> dict[str, float]:
    return {"round": 0, "policy_version": 0, "beta": BETA, "prior": 1.0, "loss": loss}


# ---- what is written -------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [1, 9, 40, 10_000])
def test_a_recorded_step_holds_all_that_entered_however_it_was_cut(tmp_path: Path, max_tokens: int) -> None:
    policy = llama_policy(5).trainable_copy()
    draws = the_draws(policy)
    expected = [
        [[float(v.detach()) for v in slow_logps(policy, d.prompt.tokens, t.completion.tokens)] for t in d.trajectories]
        for d in draws
    ]
    recorder = recorder_of(tmp_path)
    trainer = make_trainer(policy, recorder)
    trainer.step(collate(draws, max_tokens=max_tokens), sources_of(draws))
    loss = trainer.step(collate(draws, max_tokens=max_tokens), sources_of(draws))[m.LOSS]
    recorder.flush()
    rows = rows_of_step(tmp_path, 1)
    assert len(rows) == sum(len(draw.trajectories) for draw in draws)
    for row in rows:
        group, k = divmod(row["number"], 100)
        draw, trajectory = draws[group], draws[group].trajectories[k]
        assert (row["group"], row["prompt_id"], row["prompt"]) == (group, draw.prompt.id, f"text of {draw.prompt.id}")
        assert row["sampler"] == draw.sampler
        assert row["prompt_tokens"] == list(draw.prompt.tokens)
        assert row["tokens"] == list(trajectory.completion.tokens)
        assert row["logps"] == pytest.approx(expected[group][k], abs=1e-5)
        drawn = trajectory.completion.behaviour_logps or trajectory.completion.logps
        assert row["behaviour_logps"] == pytest.approx(drawn, rel=1e-6)
        assert row["ref_logps"] == pytest.approx(trajectory.ref_logps, rel=1e-6)
        assert row["ref_logp"] == pytest.approx(trajectory.ref_logp, rel=1e-6)
        assert row["searcher_logp"] == pytest.approx(trajectory.completion.logp, rel=1e-6)
        assert row["reward"] == pytest.approx(trajectory.reward, rel=1e-6)
        assert row["version"] == trajectory.completion.version
        assert row["log_z"] is None
        assert (row["step"], row["round"], row["policy_version"], row["beta"]) == (1, 0, 0, BETA)
    assert {row["micro_batch"] for row in rows} == set(range(len(collate(draws, max_tokens=max_tokens).micro_batches)))
    (second,) = {(r["round"], r["policy_version"], r["loss"]) for r in rows_of_step(tmp_path, 2)}
    assert second == (0, 1, loss)


def test_the_reference_log_probs_are_those_computed_again(tmp_path: Path) -> None:
    policy = llama_policy(5).trainable_copy()
    chosen = make_settings(
        objective={"beta": BETA}, reference={"kind": "reset", "every": 1},
        trainer={"learning_rate": 0.01, "groups_per_step": 5, "group_size": 4, "steps": 20},
    )
    recorder = recorder_of(tmp_path)
    trainer, draws = Trainer(policy, chosen, recorder), the_draws(policy)
    trainer.step(collate(draws, max_tokens=40))
    moved = policy.frozen_copy()  # the reference that the second step measures against
    assert trainer.step(collate(draws, max_tokens=40))[m.RESCORED] > 0
    recorder.flush()
    for row in rows_of_step(tmp_path, 2):
        slow = sum(map(float, slow_logps(moved, row["prompt_tokens"], row["tokens"])))
        assert row["ref_logp"] == pytest.approx(slow, abs=1e-4)
        assert row["ref_version"] == 1


def test_what_the_buffer_does_not_keep_is_not_made_up(tmp_path: Path) -> None:
    policy = llama_policy(5).trainable_copy()
    recorder = recorder_of(tmp_path, keeps_logps=False)
    make_trainer(policy, recorder, objective="rloo").step(collate(the_draws(policy), max_tokens=40))
    recorder.flush()
    rows = rows_of_step(tmp_path, 1)
    assert {row["behaviour_logps"] for row in rows} == {None}
    assert {(row["number"], row["prompt"], row["sampler"]) for row in rows} == {(None, "", "")}  # no sources given


def test_only_due_steps_are_recorded_and_those_that_are_skipped(tmp_path: Path) -> None:
    recorder = recorder_of(tmp_path, every=3)
    trainer = make_trainer(llama_policy(5).trainable_copy(), recorder, objective="rloo", max_bad_steps=2)
    good = pairs()
    bad = collate([make_draw(make_prompt("p"), [make_trajectory("p", (5, STOP), reward=1e39),
                                                make_trajectory("p", (4, STOP))])], max_tokens=999)  # fmt: skip
    seconds = [trainer.step(batch)[m.RECORD_SECONDS] for batch in (good, good, good, good, bad, good, good)]
    assert [second > 0 for second in seconds] == [False, False, True, False, True, True, False]
    trainer.step(bad)
    with pytest.raises(TrainingFailedError):
        trainer.step(bad)
    assert recorded_steps(tmp_path) == [3, 5, 6, 8, 9]  # on disk, though no checkpoint followed
    assert not math.isfinite(rows_of_step(tmp_path, 9)[0]["loss"])


# ---- files -----------------------------------------------------------------------------------------


def test_steps_are_written_together_and_by_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    trainer = make_trainer(llama_policy(5).trainable_copy(), recorder_of(tmp_path), objective="rloo")
    for _ in range(TOGETHER - 1):
        trainer.step(pairs())
    assert recorded_steps(tmp_path) == []
    trainer.step(pairs())
    assert recorded_steps(tmp_path) == list(range(1, TOGETHER + 1))
    trainer.step(pairs())
    trainer.save(tmp_path / "checkpoint")
    assert recorded_steps(tmp_path) == list(range(1, TOGETHER + 2))
    (file,) = (tmp_path / FOLDER).iterdir()
    assert pq.read_schema(file).metadata[b"tba_schema"] == b"1"


def test_files_are_bounded_in_number_and_size_and_the_newest_steps_stay(tmp_path: Path) -> None:
    recorder = recorder_of(tmp_path, max_mib=1)
    share = 2**20 // FILES
    for step in range(1, 1001):
        recorder.add(step, entered(-0.5, length=40), (), facts())
    recorder.flush()
    files = sorted((tmp_path / FOLDER).iterdir())
    assert len(files) == FILES
    assert sum(file.stat().st_size for file in files) <= 2**20
    kept = recorded_steps(tmp_path)
    assert kept == list(range(kept[0], 1001))
    assert 1 < kept[0] < 700
    tables = [pq.read_table(file) for file in files]
    assert all(share <= table.nbytes for table in tables[:-1])
    assert [rows_of_step(tmp_path, step)[0]["step"] for step in (kept[0], 1000)] == [kept[0], 1000]


def test_a_step_larger_than_its_share_is_a_file_and_the_size_still_bounded(tmp_path: Path) -> None:
    recorder, rng = recorder_of(tmp_path, max_mib=1), torch.Generator().manual_seed(3)
    for step in range(1, 30):
        one = entered(0.0, length=9000)[0]
        noise = torch.rand(one.logps_NT.shape, generator=rng)  # does not compress
        recorder.add(step, [Entered(micro=one.micro, logps_NT=noise, log_z_N=None)], (), facts())
    files = sorted((tmp_path / FOLDER).iterdir())
    assert 2**19 < sum(file.stat().st_size for file in files) <= 2**20
    assert recorded_steps(tmp_path)[-1] == 29
    assert len(recorded_steps(tmp_path)) == len(files) < 29


# ---- resumed ---------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), min_size=1, max_size=4), st.integers(1, 3),
       st.sampled_from([2, 1500]))  # fmt: skip
def test_whatever_is_resumed_the_last_that_happened_wins(
    tmp_path_factory: pytest.TempPathFactory, attempts: list[tuple[int, int]], every: int, length: int
) -> None:
    run = tmp_path_factory.mktemp("run")
    expected: dict[int, float] = {}
    done = 0
    for attempt, (steps, back) in enumerate(attempts):
        start = max(0, done - back)
        recorder = recorder_of(run, every=every, max_mib=4)
        recorder.rewind(start)
        expected = {step: value for step, value in expected.items() if step <= start}
        done = start + steps
        for step in range(start + 1, done + 1):
            if recorder.is_due(step):
                recorder.add(step, entered(-attempt - 0.125, length=length), (), facts(float(attempt)))
                expected[step] = float(attempt)
        recorder.flush()
        assert recorded_steps(run) == sorted(expected)
    for step, value in expected.items():
        rows = rows_of_step(run, step)
        assert {(row["loss"], row["logps"][0]) for row in rows} == {(value, -value - 0.125)}
        assert len(rows) == 2


def test_a_trainer_forgets_what_it_recorded_after_its_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    trainer = make_trainer(llama_policy(5).trainable_copy(), recorder_of(tmp_path), objective="rloo")
    for step in range(1, 13):
        trainer.step(pairs())
        if step == 5:
            trainer.save(tmp_path / "checkpoint")
    trainer.save(tmp_path)
    assert recorded_steps(tmp_path) == list(range(1, 13))
    resumed = make_trainer(llama_policy(5).trainable_copy(), recorder_of(tmp_path), objective="rloo")
    resumed.load(tmp_path / "checkpoint")
    assert recorded_steps(tmp_path) == list(range(1, 6))
    resumed.step(pairs())
    resumed.save(tmp_path / "checkpoint")
    assert recorded_steps(tmp_path) == list(range(1, 7))


def test_what_an_interrupted_write_left_is_not_read(tmp_path: Path) -> None:
    recorder = recorder_of(tmp_path)
    recorder.add(1, entered(-0.5), (), facts())
    recorder.flush()
    (tmp_path / FOLDER / ".partial").write_bytes(b"PAR1 half")
    assert recorded_steps(tmp_path) == [1]
    recorder.add(2, entered(-0.5), (), facts())
    recorder.flush()
    assert recorded_steps(tmp_path) == [1, 2]
    assert [file.name for file in (tmp_path / FOLDER).iterdir()] == ["steps-000000001.parquet"]


def test_what_cannot_be_written_is_counted_and_training_goes_on(tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text("in the way")
    trainer = make_trainer(llama_policy(5).trainable_copy(), recorder_of(tmp_path), objective="rloo")
    found = [trainer.step(pairs())[m.RECORDS_LOST] for _ in range(TOGETHER + 1)]
    assert found == [0] * (TOGETHER - 1) + [TOGETHER] * 2
    (tmp_path / FOLDER).unlink()
    trainer.save(tmp_path)
    assert recorded_steps(tmp_path) == [TOGETHER + 1]
