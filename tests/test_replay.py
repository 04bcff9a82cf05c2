"""A past step computed again equals what was logged, for every objective, under any cut and after a resume."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from support import (
    STOP,
    Draw,
    Policy,
    llama_policy,
    make_draw,
    make_prompt,
    make_settings,
    make_trajectory,
    table_policy,
)
from tba import catalog, checkpoint
from tba import metrics as m
from tba.batch import collate
from tba.cli import main
from tba.jobs import settings_of
from tba.recorder import FOLDER, Recorder, Source, recorded_steps
from tba.replay import TOLERANCE, groups_of, replay
from tba.settings import Settings, SettingsError
from tba.trainer import Trainer
from test_loss import BETA, VARIANTS, slow_loss, the_draws

HOSTILE = "\x1b[2J\x07owned\n\u202e"


def settings_for(objective: dict[str, Any], **sections: Any) -> Settings:
    trainer = {"learning_rate": 0.01, "clip_norm": None, "groups_per_step": 5, "group_size": 4, "steps": 20}
    return make_settings(objective={"beta": BETA, **objective}, trainer=trainer, **sections)


def recorded(
    run: Path, policy: Policy, draws: Sequence[Draw], settings: Settings, *, cuts: Sequence[int] = (9_999,)
) -> list[dict[str, Any]]:
    """Trains one step for each of `cuts`, recorded and logged in `run`; returns the metrics."""
    recorder = Recorder(run / FOLDER, every=1, max_mib=8, keeps_logps=settings.keeps_logps)
    trainer = Trainer(policy, settings, recorder)
    found = [trainer.step(collate(draws, max_tokens=cut), [Source.of(d) for d in draws]) for cut in cuts]
    recorder.flush()
    (run / "metrics.jsonl").write_text("".join(m.to_json(record) + "\n" for record in found))
    return found


def check_losses(run: Path, steps: Sequence[int], *, settings: Settings | None = None) -> None:
    """Each step replayed is what `metrics.jsonl` has, to `TOLERANCE`, by an arithmetic of our own."""
    logged = {line[m.STEP]: line for line in lines_of(run) if m.STEP in line}
    for step in steps:
        found = replay(run, settings or settings_of(run), step)
        loss = logged[step][m.LOSS]
        assert abs(found.own.loss - loss) <= 1e-6 * max(1.0, abs(loss)), step
        assert found.is_same
        assert sum(row["reward"] for row in found.rows) / len(found.rows) == pytest.approx(logged[step][m.REWARD])
        ages = [row["policy_version"] - row["version"] for row in found.rows]
        assert max(ages) == logged[step][m.AGE_MAX]
        residuals = found.own.residuals
        assert sum(x * x for x in residuals) / len(residuals) == pytest.approx(logged[step][m.RESIDUAL_MSE], rel=1e-5)


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


# ---- known answer ----------------------------------------------------------------------------------


@pytest.fixture
def by_hand(tmp_path: Path) -> Path:
    """One step of two completions, whose loss is worked out below."""
    policy = table_policy(3).trainable_copy()
    prompt = make_prompt(HOSTILE, (1, 3))
    pair = [make_trajectory(HOSTILE, (4, STOP), reward=1.3, ref_logp=-2.5), make_trajectory(HOSTILE, (5, STOP))]
    settings = settings_for({})
    recorded(tmp_path, policy, [make_draw(prompt, pair)], settings)
    import yaml

    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings.resolved()))
    return tmp_path


def test_the_loss_of_two_completions_by_hand(by_hand: Path) -> None:
    found = replay(by_hand, settings_for({}), 1)
    one, two = (sum(row["logps"]) for row in found.rows)
    # x_j = r_j / beta - (log pi_j - log ref_j); for K = 2 the residuals are -+ (x_1 - x_2) / 2
    half = ((1.3 / BETA - (one + 2.5)) - (0.0 / BETA - (two + 1.5))) / 2
    assert abs(half) > 0.3
    assert found.own.residuals == pytest.approx((-half, half), rel=1e-5)
    assert found.own.loss == pytest.approx(BETA / 2 * half**2, rel=1e-5)
    assert found.difference == 0.0
    other = replay(by_hand, settings_for({}), 1, "online_dpo").other
    assert other.name == "online_dpo"


# ---- every objective -------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", VARIANTS, ids=lambda o: " ".join(map(str, o.values())))
def test_the_runs_own_objective_gives_what_was_logged_under_any_cut(tmp_path: Path, objective: dict[str, Any]) -> None:
    policy = llama_policy(5).trainable_copy()
    settings = settings_for(objective)
    found = recorded(tmp_path, policy, the_draws(policy), settings, cuts=(1, 9, 40, 9_999, 17))
    assert len({line[m.LOSS] for line in found}) == 5
    check_losses(tmp_path, range(1, 6), settings=settings)


@pytest.mark.parametrize("cut", [1, 40])
def test_each_other_objective_gives_what_it_gives_on_the_batch(tmp_path: Path, cut: int) -> None:
    policy = llama_policy(5).trainable_copy()
    draws = the_draws(policy)
    expected = {name: float(slow_loss(policy, draws, {"name": name}).detach()) for name in catalog.OBJECTIVES}
    settings = settings_for({"name": "grpo", "normalise": "token"})
    recorded(tmp_path, policy, draws, settings, cuts=(cut, cut))
    own = float(slow_loss(llama_policy(5), draws, {"name": "grpo", "normalise": "token"}).detach())
    assert replay(tmp_path, settings, 1).own.loss == pytest.approx(own, rel=1e-4)
    expected["grpo"] = own  # its own settings, not the defaults
    for name in catalog.OBJECTIVES:
        if name == "trajectory_balance_learned_z":
            with pytest.raises(SettingsError, match=r"reads a learned log Z, which step 1 .* enough for tra"):
                replay(tmp_path, settings, 1, name)
        else:
            assert replay(tmp_path, settings, 1, name).other.loss == pytest.approx(expected[name], rel=1e-4), name


def test_a_learned_log_z_is_that_of_the_step(tmp_path: Path) -> None:
    for per in ("prompt", "model"):
        run = tmp_path / per
        run.mkdir()
        policy = llama_policy(5).trainable_copy()
        settings = settings_for({"name": "trajectory_balance_learned_z", "log_z_per": per, "log_z_rate": 0.7})
        recorded(run, policy, the_draws(policy), settings, cuts=(40,) * 4)
        check_losses(run, range(1, 5), settings=settings)
        moved = [sum(row["log_z"] for row in replay(run, settings, step).rows) for step in range(1, 5)]
        assert len(set(moved)) == 4


def test_what_the_record_lacks_is_named_with_the_objectives_that_remain(tmp_path: Path) -> None:
    policy = llama_policy(5).trainable_copy()
    settings = settings_for({"name": "rloo"}, buffer={"keep_logps": False})
    draws = [  # as a run whose objective reads no token of the reference keeps them
        make_draw(d.prompt, [make_trajectory(d.prompt.id, t.completion.tokens) for t in d.trajectories])
        for d in the_draws(policy)
    ]
    recorded(tmp_path, policy, draws, settings)
    with pytest.raises(SettingsError) as both:
        replay(tmp_path, settings, 1, "grpo")
    assert "the behaviour log-prob of each token and the reference log-prob of each token" in str(both.value)
    with pytest.raises(SettingsError) as one:
        replay(tmp_path, settings, 1, "ppo_clip")
    assert str(one.value).endswith(
        "without; what was recorded is enough for trajectory_balance, tba_prime, kimi_k15, reinforce, rloo, online_dpo."
    )
    with pytest.raises(SettingsError, match=r"objective.name = 'trajectory_balence' is unknown; did you mean"):
        replay(tmp_path, settings, 1, "trajectory_balence")


def test_an_objective_that_needs_a_positive_beta_is_refused_where_the_runs_is_zero(tmp_path: Path) -> None:
    policy = llama_policy(5).trainable_copy()
    settings = settings_for({"name": "grpo", "beta": 0.0})
    recorded(tmp_path, policy, the_draws(policy), settings)
    check_losses(tmp_path, [], settings=settings)
    assert replay(tmp_path, settings, 1).is_same
    with pytest.raises(SettingsError, match=r"objective.beta = 0: should be greater than 0"):
        replay(tmp_path, settings, 1, "kimi_k15")


def test_a_skipped_step_shows_the_group_that_made_it_so(tmp_path: Path) -> None:
    policy = llama_policy(5).trainable_copy()
    worst = make_draw(make_prompt("worst"), [make_trajectory("worst", (5, STOP), reward=1e39),
                                             make_trajectory("worst", (4, STOP))])  # fmt: skip
    settings = settings_for({})
    (found,) = recorded(tmp_path, policy, [*the_draws(policy), worst], settings)
    assert found[m.VERSION] == 0
    again = replay(tmp_path, settings, 1)
    assert (again.logged, again.is_same, again.difference) == (None, True, 0.0)
    assert groups_of(again)[0]["prompt_id"] == "worst"


# ---- real runs -------------------------------------------------------------------------------------

STEPS = 96
WORDS = [f"trainer.steps={STEPS}", "trainer.record_every=1", "checkpoint.every=16", "checkpoint.keep=9", "seed=5",
         "evaluation.every=0", "evaluation.samples=8", "mode=lockstep", "trainer.micro_batch_tokens=200"]  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lockstep run whose every step is recorded, with a reference that moves."""
    run = tmp_path_factory.mktemp("whole") / "run"
    words = [*WORDS, "reference.kind=reset", "reference.every=20", "objective.beta_final=0.3",
             "objective.beta_steps=80"]  # fmt: skip
    assert main(["train", "enumerable", *words, "--run", str(run)]) == 0
    return run


def test_twenty_random_steps_of_a_lockstep_run(whole: Path) -> None:
    assert recorded_steps(whole) == list(range(1, STEPS + 1))
    check_losses(whole, random.Random(7).sample(range(1, STEPS + 1), 20))
    assert len({row["micro_batch"] for row in replay(whole, settings_of(whole), 9).rows}) > 1


def test_after_a_crash_and_a_resume_the_steps_are_those_that_really_happened(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    for step, folder in checkpoint.complete(run):
        if step > 48:  # as if it had been killed after step 96, with step 48 its newest checkpoint
            (folder / checkpoint.MARK).unlink()
    before = {line[m.STEP]: line[m.LOSS] for line in lines_of(run) if m.STEP in line}
    config = (run / "config.yaml").read_text()
    assert "learning_rate: 0.1" in config
    # nothing that a resume repeats would show that the steps are new ones
    (run / "config.yaml").write_text(config.replace("learning_rate: 0.1", "learning_rate: 0.02"))
    assert main(["resume", str(run)]) == 0
    after = {line[m.STEP]: line[m.LOSS] for line in lines_of(run) if m.STEP in line}
    # step 61 comes right after a reset: policy and reference agree whatever the weights, and the data is still the same
    assert [step for step in after if after[step] == before[step]] == [*range(1, 50), 61]
    assert recorded_steps(run) == list(range(1, STEPS + 1))
    rng = random.Random(8)
    check_losses(run, [*rng.sample(range(1, 49), 10), *rng.sample(range(49, STEPS + 1), 10)])


def test_a_resumed_run_records_what_one_without_a_break_does(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    for step, folder in checkpoint.complete(run):
        if step > 32:
            shutil.rmtree(folder)
    assert main(["resume", str(run)]) == 0
    for step in (1, 32, 33, 57, STEPS):
        ours, theirs = (replay(r, settings_of(r), step) for r in (run, whole))
        assert ours.rows == theirs.rows


def test_recording_does_not_change_training(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = (whole / "config.yaml").read_text().replace("record_every: 1", "record_every: 0")
    (tmp_path / "recipe.yaml").write_text(config)
    assert main(["train", str(tmp_path / "recipe.yaml"), "--run", str(run)]) == 0
    losses = [[line[m.LOSS] for line in lines_of(r) if m.STEP in line] for r in (run, whole)]
    assert losses[0] == losses[1]
    assert not (run / FOLDER).exists()
    with pytest.raises(SettingsError, match=r"no other step is, with trainer.record_every = 0; set it to 1 or more"):
        replay(run, settings_of(run), 4)


# ---- the command -----------------------------------------------------------------------------------


def test_the_command_shows_the_step_and_its_groups(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["buffer", "replay", str(whole), "--step", "40", "--objective", "rloo", "--top", "3"]) == 0
    table, groups = split(capsys.readouterr().out)
    logged = next(line for line in lines_of(whole) if line.get(m.STEP) == 40)
    assert float(table["loss logged"]) == pytest.approx(logged[m.LOSS], rel=1e-8)
    assert float(table["loss recomputed (trajectory_balance)"]) == pytest.approx(logged[m.LOSS], rel=1e-6)
    assert float(table["loss under rloo"]) != pytest.approx(logged[m.LOSS], rel=0.01)
    assert (table["step"], table["round"], table["version"]) == ("40", "2", "39")
    assert float(table["mean reward"]) == pytest.approx(logged[m.REWARD], rel=1e-5)
    assert table["drawn by"].count(" ") >= 1
    assert len(groups) == 3
    assert main(["buffer", "replay", str(whole), "--step", "40", "--json"]) == 0
    out, said = capsys.readouterr()
    found = json.loads(out)
    assert found["same"] is True
    assert found["logged"] == logged[m.LOSS]
    assert [len(found["groups"]), len(found["groups"][0]["numbers"])] == [8, 16]
    assert len({number for group in found["groups"] for number in group["numbers"]}) > 64
    assert "difference" in said


def split(out: str) -> tuple[dict[str, str], list[str]]:
    lines = out.splitlines()
    at = next(n for n, line in enumerate(lines) if "  group " in line)
    cells = [line.split("  ", 1) for line in lines[:at]]
    return {name.strip(): value.strip() for name, value in cells}, lines[at:]


def test_a_step_that_was_not_recorded_is_told_with_its_neighbours(
    whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["buffer", "replay", str(whole), "--step", "97"]) == 2
    out, said = capsys.readouterr()
    assert out == ""
    assert "step 97 of" in said
    assert "near it are 94, 95, 96. trainer.record_every = 1" in said
    assert len(said.splitlines()) == 1
    assert main(["buffer", "replay", str(whole), "--step", "9", "--objective", "grpo"]) == 2
    assert "reads the reference log-prob of each token" in capsys.readouterr().err
    assert main(["buffer", "replay", str(whole)]) == 2


@pytest.mark.parametrize(("change", "code"), [(0.9e-6, 0), (1.2e-6, 1)])
def test_another_loss_than_the_logged_one_exits_with_1(
    by_hand: Path, capsys: pytest.CaptureFixture[str], change: float, code: int
) -> None:
    file = by_hand / "metrics.jsonl"
    (line,) = lines_of(by_hand)
    assert line[m.LOSS] < 1  # so that the tolerance is absolute
    file.write_text(json.dumps({**line, m.LOSS: line[m.LOSS] + change}, separators=(",", ":")) + "\n")
    assert main(["buffer", "replay", str(by_hand), "--step", "1"]) == code
    assert ("NOT the same" in capsys.readouterr().out) == bool(code)
    assert TOLERANCE == 1e-6
    file.write_text("")
    assert main(["buffer", "replay", str(by_hand), "--step", "1"]) == 2
    assert "has no line for step 1" in capsys.readouterr().err


def test_prompts_do_not_steer_the_terminal(by_hand: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["buffer", "replay", str(by_hand), "--step", "1"]) == 0
    shown = capsys.readouterr().out
    assert "owned" in shown
    assert all(c.isprintable() for line in shown.split("\n") for c in line)
    assert shown.count("  group ") == 1
