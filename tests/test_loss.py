"""Every objective in the trainer: fed with the right tensors, whole under any cut, resumed, end to end."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from makers import settings_with
from support import (
    STOP,
    llama_policy,
    make_draw,
    make_lease,
    make_prompt,
    make_settings,
    make_trajectory,
    random_draws,
    slow_logps,
    table_policy,
    wide_table,
)
from tba import catalog
from tba import metrics as m
from tba.assembly import Questions, make_policy, make_questions, make_searcher, make_task_of
from tba.batch import collate
from tba.buffer.entries import Draw
from tba.buffer.memory import ReplayBuffer
from tba.cli import main
from tba.engines.table import TableEngine
from tba.loop import Lockstep
from tba.loss import LearnedZ
from tba.objectives import OBJECTIVES, token_weight
from tba.policy import Policy, named_tensors
from tba.records import Group
from tba.settings import Settings, SettingsError
from tba.trainer import Trainer

BETA = 0.37
SIZES = (4, 2, 1, 3, 2)
"""Groups of a batch: unequal, and one that is too small to count."""
VARIANTS: list[dict[str, Any]] = [
    {"name": "trajectory_balance"}, {"name": "trajectory_balance_learned_z"},
    {"name": "tba_prime"}, {"name": "tba_prime", "ratio": "clamp", "ratio_max": 1.2, "normalise": "token"},
    {"name": "tba_prime", "ratio": "cispo", "normalise": 5.5}, {"name": "kimi_k15"}, {"name": "reinforce"},
    {"name": "rloo"}, {"name": "grpo"}, {"name": "grpo", "normalise": "token"}, {"name": "dr_grpo"},
    {"name": "cispo", "ratio_max": 1.2}, {"name": "gspo", "clip": (0.4, 0.7)}, {"name": "ppo_clip"},
    {"name": "online_dpo"},
]  # fmt: skip
each = pytest.mark.parametrize("objective", VARIANTS, ids=lambda o: " ".join(map(str, o.values())))


def the_draws(policy: Policy) -> list[Draw]:
    """Unequal groups with log-probs near the policy's; two of one prompt, with a completion in common and twice."""
    rng = random.Random(5)

    def near(draw: Draw, at: int, **more: Any) -> Any:
        trajectory = draw.trajectories[at]
        logps = [float(v.detach()) for v in slow_logps(policy, draw.prompt.tokens, trajectory.completion.tokens)]
        drawn = tuple(v + rng.gauss(0, 0.4) for v in logps)
        ref = tuple(v + rng.gauss(0, 0.4) for v in logps)
        # every second completion was drawn otherwise than its own log-probs say
        completion = dataclasses.replace(
            trajectory.completion, logps=drawn if at % 2 else (-9.0,) * len(logps),
            behaviour_logps=() if at % 2 else drawn,
        )
        return dataclasses.replace(
            trajectory, completion=completion, ref_logps=ref, ref_logp=math.fsum(ref), **more
        )

    draws = [
        make_draw(d.prompt, [near(d, at) for at in range(len(d.trajectories))]) for d in random_draws(SIZES, seed=2)
    ]
    first = draws[0]
    twice = near(first, 1, reward=1.7)
    other = make_draw(first.prompt, [near(first, 2, reward=-0.4), twice])
    return [make_draw(first.prompt, [*first.trajectories, twice]), *draws[1:], other]


def make_trainer(policy: Policy, objective: Mapping[str, Any], **trainer: Any) -> Trainer:
    options = {"learning_rate": 0.01, "clip_norm": None, "groups_per_step": 5, "group_size": 4, "steps": 20}
    return Trainer(policy, make_settings(objective={"beta": BETA, **objective}, trainer={**options, **trainer}))


def gradients(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in named_tensors(policy.model).items() if p.grad is not None}


def slow_loss(policy: Policy, draws: Sequence[Draw], objective: Mapping[str, Any]) -> torch.Tensor:
    """The batch loss in float64: an unpadded forward per trajectory, one call of the objective, tensors by hand."""
    rows = [(number, d.prompt, t) for number, d in enumerate(draws) for t in d.trajectories]
    width = max(len(t.completion.tokens) for *_, t in rows)
    logps, ref_logps, drawn, mask = (torch.zeros(len(rows), width, dtype=torch.float64) for _ in range(4))
    for row, (_, prompt, t) in enumerate(rows):
        completion = t.completion
        for place, value in enumerate(slow_logps(policy, prompt.tokens, completion.tokens)):
            logps[row, place] = value
            ref_logps[row, place] = t.ref_logps[place]
            drawn[row, place] = (completion.behaviour_logps or completion.logps)[place]
            mask[row, place] = 1
    group = torch.tensor([number for number, *_ in rows])
    knobs = {**catalog.OBJECTIVES[objective["name"]].defaults, **objective}
    given: dict[str, Any] = {
        "logps": logps, "logp": logps.sum(-1), "ref_logps": ref_logps, "ref_logp": ref_logps.sum(-1),
        "behaviour_logps": drawn, "reward": torch.tensor([t.reward for *_, t in rows], dtype=torch.float64),
        "group": group, "log_z": torch.zeros(len(rows), dtype=torch.float64), "beta": BETA,
        "weight": token_weight(mask > 0, group, knobs.get("normalise", "sequence")), **knobs,
    }
    function = OBJECTIVES[objective["name"]]
    takes = inspect.signature(function).parameters
    return function(**{key: value for key, value in given.items() if key in takes}).loss


@each
def test_gradient_is_that_of_the_whole_batch_under_any_cut_and_order(objective: dict[str, Any]) -> None:
    policy = llama_policy(5).trainable_copy()
    draws = the_draws(policy)
    expected = slow_loss(policy, draws, objective)
    expected.backward()
    slopes = gradients(policy)
    scale = max(float(slope.abs().max()) for slope in slopes.values())
    assert scale > 0.01
    for max_tokens, order in ((1, 1), (9, None), (40, 2), (10_000, None)):
        if order is not None:
            random.Random(order).shuffle(draws)
        ours = llama_policy(5).trainable_copy()
        found = make_trainer(ours, objective).step(collate(draws, max_tokens=max_tokens))
        assert found[m.LOSS] == pytest.approx(float(expected.detach()), rel=1e-5, abs=1e-6)
        for name, slope in gradients(ours).items():
            assert float((slope - slopes[name]).abs().max()) < 2e-6 * max(1.0, scale), (max_tokens, name)


@each
def test_shares_of_cut_tokens_are_of_the_whole_batch(objective: dict[str, Any]) -> None:
    policy = llama_policy(5)
    draws = the_draws(policy)
    found = [make_trainer(policy.trainable_copy(), objective).step(collate(draws, max_tokens=size))[m.RATIO_CUT]
             for size in (1, 17, 10_000)]
    has_ratio = "behaviour_logps" in catalog.reads(make_settings(objective=objective).objective)
    assert found[0] == found[1] == found[2]
    assert (found[0] is not None) == has_ratio
    assert found[0] is None or 0 <= found[0] < 1


def test_reference_log_probs_of_tokens_are_asked_for_in_words() -> None:
    trainer = make_trainer(wide_table(1), {"name": "grpo"})
    with pytest.raises(ValueError, match="needs the reference log-prob of each token, which some trajectories lack"):
        trainer.step(collate(random_draws((3, 2)), max_tokens=99))
    make_trainer(trainer.policy, {"name": "grpo", "beta": 0.0}).step(collate(random_draws((3, 2)), max_tokens=99))


# ---- log Z that is learned -------------------------------------------------------------------------


def test_learned_log_z_moves_by_a_share_of_its_mean_residual() -> None:
    # prompt a: groups 0 (mean residual 2) and 2 (mean 5), mean 3.5; b: group 1 (mean -1); c: a group of one
    prompts, group = ["a", "a", "b", "b", "b", "a", "a", "c"], [0, 0, 1, 1, 1, 2, 2, 3]
    residual = [1.0, 3.0, -1.0, -2.0, 0.0, 4.0, 6.0, 9.0]
    found = LearnedZ(per="prompt", rate=0.25)
    found.learn(prompts, group, residual)
    assert found.values == pytest.approx({"a": -0.875, "b": 0.25})
    found.learn(prompts[:2], group[:2], [-1.0, -3.0])
    assert found.of(["b", "a", "new"]).tolist() == pytest.approx([0.25, -0.375, 0.0])
    for_all = LearnedZ(per="model", rate=0.25)
    for_all.learn(prompts, group, residual)
    assert for_all.of(["b", "new"]).tolist() == pytest.approx([-0.5, -0.5])  # -(2 - 1 + 5) / 3 / 4


@pytest.mark.parametrize("per", ["prompt", "model"])
def test_the_trainer_learns_log_z_whatever_the_cut(per: str) -> None:
    policy = llama_policy(5)
    draws = the_draws(policy)
    objective = {"name": "trajectory_balance_learned_z", "log_z_per": per, "log_z_rate": 0.5}
    found = []
    for max_tokens in (1, 10_000):
        trainer = make_trainer(policy.trainable_copy(), objective)
        steps = [trainer.step(collate(draws, max_tokens=max_tokens)) for _ in range(2)]
        found.append(trainer._loss.learned_z.values)
        assert steps[0][m.LOG_Z] == 0.0
        assert abs(steps[1][m.LOG_Z]) > 0.1
    assert found[0] == pytest.approx(found[1], rel=1e-4)
    assert found[0].keys() == ({"p0", "p1", "p3", "p4"} if per == "prompt" else {""})


def test_a_bad_step_leaves_log_z_alone() -> None:
    prompt = make_prompt("bad")
    bad = make_draw(prompt, [make_trajectory("bad", (n, STOP), reward=n * 1e30) for n in (3, 5)])
    trainer = make_trainer(
        wide_table(1), {"name": "trajectory_balance_learned_z"}
    )
    trainer.step(collate([bad], max_tokens=99))
    assert (trainer.version, trainer._loss.learned_z.values) == (0, {})


def test_learned_log_z_survives_a_checkpoint(tmp_path: Path) -> None:
    policy = llama_policy(5)
    objective = {"name": "trajectory_balance_learned_z"}
    batch = collate(the_draws(policy), max_tokens=999)
    trainer, resumed = (make_trainer(policy.trainable_copy(), objective) for _ in range(2))
    trainer.step(batch)
    trainer.save(tmp_path)
    resumed.load(tmp_path)
    assert resumed._loss.learned_z.values == trainer._loss.learned_z.values != {}
    ours, theirs = trainer.step(batch), resumed.step(batch)
    assert {**ours, m.STEP_SECONDS: 0} == {**theirs, m.STEP_SECONDS: 0}


# ---- log-probs of tokens on their way --------------------------------------------------------------


def enumerable(**objective: Any) -> Settings:
    return settings_with(objective=objective, search={"num_samples": 16, "max_new_tokens": 3, "batch_prompts": 3})


@pytest.mark.parametrize(("objective", "kept"), [
    ({"name": "grpo"}, True), ({"name": "grpo", "beta": 0.0}, False), ({"name": "trajectory_balance"}, False),
    ({"name": "ppo_clip"}, False), ({"name": "tba_prime"}, False),
])  # fmt: skip
def test_searchers_keep_reference_log_probs_of_tokens_where_they_are_read(objective: Any, kept: bool) -> None:
    settings = enumerable(**objective)
    policy = table_policy(3)
    task = make_task_of(settings)
    prompts = task.prompts(policy.encode)
    searcher = make_searcher(settings, task, policy, "searcher-0")
    groups = list(searcher.search([make_lease(p, n) for n, p in enumerate(prompts[:2])]))
    for group in groups:
        for t in group.trajectories:
            expected = [float(v.detach()) for v in slow_logps(policy, group.prompt.tokens, t.completion.tokens)]
            assert t.ref_logp == pytest.approx(math.fsum(expected), abs=1e-5)
            assert t.ref_logps == (pytest.approx(tuple(expected), abs=1e-5) if kept else ())


def test_reference_log_probs_of_tokens_survive_the_buffers_files(tmp_path: Path) -> None:
    made = [dataclasses.replace(make_trajectory("p", (n, STOP)), ref_logps=(-0.5 * n, -1.25)) for n in (3, 4)]
    made.append(make_trajectory("p", (5, STOP)))
    buffers = [ReplayBuffer(capacity=10, capacity_per_prompt=5, recent_age=3, mix={"uniform": 1.0}) for _ in range(2)]
    buffers[0].add(Group(prompt=make_prompt("p"), trajectories=tuple(made)))
    buffers[0].save(tmp_path)
    buffers[1].load(tmp_path)
    import numpy as np

    (draw,) = buffers[1].sample(1, 3, version=0, rng=np.random.default_rng(0))
    assert {t.completion.tokens[0]: t.ref_logps for t in draw.trajectories} == {
        3: (-1.5, -1.25), 4: (-2.0, -1.25), 5: (),
    }


def test_reference_log_probs_have_one_entry_a_token() -> None:
    with pytest.raises(ValueError, match="ref_logps has 1 entries for 2 tokens"):
        dataclasses.replace(make_trajectory(), ref_logps=(-1.0,))


def test_a_batch_places_log_probs_at_their_tokens() -> None:
    draw = make_draw(make_prompt("p", (1, 3, 4)), [
        dataclasses.replace(make_trajectory("p", (5, 6, STOP), logps=(-1.0, -2.0, -3.0)), ref_logps=(-4.0, -5.0, -6.0)),
        dataclasses.replace(make_trajectory("p", (STOP,), logps=(-7.0,)), ref_logps=(-8.0,)),
    ])  # fmt: skip
    (micro,) = collate([draw], max_tokens=99).micro_batches
    assert micro.behaviour_logps_NT.tolist() == [[0, 0, -1, -2, -3], [0, 0, -7, 0, 0]]
    assert micro.ref_logps_NT.tolist() == [[0, 0, -4, -5, -6], [0, 0, -8, 0, 0]]
    assert (micro.num_counted_tokens, micro.prompt_ids) == (4, ("p", "p"))


class MuteEngine(TableEngine):
    """An engine that says nothing of the distribution it draws from."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self.gives_logps = False


@pytest.mark.parametrize("name", ["trajectory_balance", "tba_prime", *(n for n, k in catalog.OBJECTIVES.items() if
                                                                         "ratio" not in k.defaults and k.needs)])
def test_an_engine_without_log_probs_is_refused_where_they_are_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(catalog.ENGINES, "mute", f"{__name__}:MuteEngine")
    words = ["train", "enumerable", "model=new-llama", "architecture.width=8", "architecture.heads=2",
             "engine.name=mute", f"objective.name={name}", "trainer.steps=16", "trainer.groups_per_step=1",
             "evaluation.samples=2", "evaluation.every=0", "--run", str(tmp_path / "run")]  # fmt: skip
    reads = catalog.OBJECTIVES[name].needs and name != "tba_prime"
    assert main(words) == (2 if reads else 0)
    said = capsys.readouterr().err
    assert not reads or f"objective.name = '{name}' reads behaviour log-probs, and engine.name = 'mute'" in said


# ---- settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("objective", "words"),
    [
        ({"name": "grpo", "scale": "paper"}, ["objective.scale = 'paper' is not used", "'grpo' (it uses clip, norm"]),
        ({"name": "rloo", "clip": [0.2, 0.3]}, ["objective.clip = (0.2, 0.3)", "no such setting", "clip=null"]),
        ({"name": "trajectory_balance", "log_z_rate": 0.5}, ["objective.log_z_rate = 0.5 is not used"]),
        ({"name": "kimi_k15", "beta": 0.0}, ["objective.beta = 0: should be greater than 0", "'kimi_k15'"]),
        ({"name": "rloo", "beta": 0.0, "beta_final": 0.5}, ["objective.beta = 0", "objective.beta_final = 0.5"]),
        ({"name": "tba_prime", "ratio_max": 4.0}, ["objective.ratio_max = 4", "objective.ratio=clamp"]),
        ({"name": "grpo", "normalise": "mean"}, ["objective.normalise", "'mean'", "sequence, token, or a positive"]),
        ({"name": "grpo", "normalise": 0}, ["objective.normalise", "sequence, token, or a positive"]),
        ({"name": "grpo", "normalise": True}, ["objective.normalise", "sequence, token, or a positive"]),
        ({"name": "grpo", "clip": [1.0, 0.2]}, ["objective.clip.0 = 1.0: should be less than 1"]),
    ],
    ids=lambda value: str(value)[:50],
)  # fmt: skip
def test_a_knob_that_does_not_fit_is_refused_in_one_line(objective: Any, words: list[str]) -> None:
    with pytest.raises(SettingsError) as caught:
        settings_with(objective=objective)
    (only,) = caught.value.problems
    assert all(word in only for word in words), only


def test_knobs_left_out_are_the_objectives_own_and_written_down() -> None:
    assert enumerable(name="gspo").objective_knobs == {"clip": (3e-4, 4e-4)}
    resolved = enumerable(name="ppo_clip", normalise=12).resolved()["objective"]
    assert (resolved["clip"], resolved["normalise"], resolved["scale"]) == ([0.2, 0.2], 12.0, None)
    assert Settings.model_validate(enumerable(name="tba_prime").resolved()).objective_knobs["normalise"] == "sequence"
    assert enumerable().resolved()["objective"]["scale"] == "advantage"


# ---- end to end ------------------------------------------------------------------------------------


def short(name: str) -> Settings:
    return settings_with(
        "arithmetic", mode="lockstep", objective={"name": name, **({"ratio": "clamp"} if name == "tba_prime" else {})},
        trainer={"steps": 4, "groups_per_step": 4, "group_size": 4, "sync_every": 2},
        buffer={"reuse": 1.0, "initial": 0, "recent_age": 7}, search={"num_samples": 4},
        evaluation={"every": 0, "prompts": 8, "samples": 2}, checkpoint={"every": 0},
    )


@pytest.fixture(scope="module")
def start() -> tuple[Questions, Policy]:
    settings = short("grpo")
    task = make_task_of(settings)
    policy = make_policy(settings, task)
    return make_questions(settings, task, policy), policy


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", list(catalog.OBJECTIVES))
def test_a_short_run_on_arithmetic_has_finite_metrics(name: str, start: tuple[Questions, Policy]) -> None:
    settings = short(name)
    journey = Lockstep(None)
    journey.start(settings, *start)
    before = journey.weights()
    steps = list(journey.steps(lambda step: "stop" if step >= 4 else "go"))
    assert [line[m.VERSION] for line in steps] == [1, 2, 3, 4]
    for line in steps:
        numbers = [line[key] for key in (m.LOSS, m.GRAD_NORM, m.RESIDUAL_MSE, m.LOG_Z, m.KL, m.ENTROPY, m.REWARD)]
        assert all(isinstance(x, float) and math.isfinite(x) for x in numbers), line
        assert (line[m.RATIO_CUT] is None) == ("behaviour_logps" not in catalog.reads(settings.objective))
        m.to_json(line)
    assert steps[0][m.GRAD_NORM] > 0
    assert journey.weights().digest != before.digest


@pytest.mark.usefixtures("one_thread")
def test_a_whole_run_with_an_objective_that_reads_everything(tmp_path: Path) -> None:
    words = ["objective.name=grpo", "trainer.steps=16", "evaluation.every=0", "evaluation.samples=2"]
    assert main(["train", "enumerable", *words, "--run", str(tmp_path / "run")]) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(0 <= line[m.RATIO_CUT] <= 1 for line in lines if m.STEP in line)
    assert main(["resume", str(tmp_path / "run")]) == 0


@pytest.mark.usefixtures("one_thread")
def test_a_whole_run_without_kl_has_no_target(tmp_path: Path) -> None:
    words = ["objective.name=rloo", "objective.beta=0", "trainer.steps=16", "evaluation.every=0"]
    assert main(["train", "enumerable", *words, "--run", str(tmp_path / "run")]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert m.TV not in summary["final"]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(line[m.RESIDUAL_MSE] is None and line[m.LOG_Z] is None for line in lines if m.STEP in line)
