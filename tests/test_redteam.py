"""The redteam task: limits on both paths, the tempered log-reward, victims, judges, and what an audit says."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from classifiers import TEMPLATE, save_classifier, save_policy
from scoring_server import ScoringServer
from support import STOP, llama_policy, make_completion, make_draw, make_prompt, make_settings, make_trajectory
from support import table_policy as make_table
from tba import audit as audit_room
from tba import embeddings
from tba import metrics as m
from tba.audit import Audit
from tba.batch import collate, make_rows
from tba.cli import main
from tba.engines.protocol import Pause, Sampling
from tba.engines.table import TableEngine
from tba.engines.transformers import TransformersEngine
from tba.limits import Limits
from tba.loss import Loss
from tba.policy import Policy
from tba.preference_settings import RewardSettings
from tba.reading import check_settings, recipe_text
from tba.records import Completion
from tba.redteam_settings import JudgeSettings, VictimSettings
from tba.report import write_report
from tba.rewards.functions import Failure, Score
from tba.rewards.guards import load_guard
from tba.schedules import Schedules
from tba.sections import Line, SettingsError
from tba.settings import Settings
from tba.tasks.enumerable import listed, log_target
from tba.tasks.redteam import Attack, Redteam
from tba.trainer import Trainer
from tba.victims.endpoint import EndpointVictim
from tba.victims.models import ModelVictim

pytestmark = pytest.mark.usefixtures("one_thread")

LIMITS = Limits(first=2, last=4)
FEW = Sampling(max_new_tokens=5, temperature=1.9)


def limited(policy: Policy) -> Policy:
    return dataclasses.replace(policy, limits=LIMITS)


# ---- limits: one distribution on both paths --------------------------------------------------------


@pytest.mark.parametrize("kind", ["table", "transformers"])
def test_fresh_and_replayed_paths_give_the_same_log_probs_for_the_same_ids(kind: str) -> None:
    policy = limited(make_table(3) if kind == "table" else llama_policy(3, sharpness=3.0))
    engine = (TableEngine if kind == "table" else TransformersEngine)(policy)
    prompts = [make_prompt("one", (1,)), make_prompt("two", (1, 3, 4, 5, 4, 3, 5))]
    sampled = engine.generate(prompts, num_samples=64, sampling=FEW, seeds=[5, 6])
    ends = {len(c.tokens) for cs in sampled for c in cs}
    assert ends == {3, 4, 5}, "early stops, late ones and forced ones are all there"
    for prompt, completions in zip(prompts, sampled, strict=True):
        replayed = policy.completion_logps([(prompt.tokens, c.tokens) for c in completions])
        for completion, logps in zip(completions, replayed, strict=True):
            assert completion.tokens[-1] == STOP
            assert completion.finish == "stop"
            assert completion.logps == pytest.approx(logps, abs=1e-5)
            if len(logps) == 5:
                assert (completion.logps[-1], logps[-1]) == (0.0, 0.0)


def test_the_trainers_gap_between_searcher_and_trainer_is_that_of_rounding() -> None:
    policy = limited(make_table(4))
    prompt = make_prompt("one", (1,))
    (made,) = TableEngine(policy.frozen_copy()).generate([prompt], num_samples=32, sampling=FEW, seeds=[1])
    draws = [make_draw(prompt, [
        dataclasses.replace(make_trajectory("one"), completion=dataclasses.replace(c, behaviour_logps=())) for c in made
    ])]
    found = Trainer(policy.trainable_copy(), make_settings()).step(collate(draws, max_tokens=999))
    assert found[m.LOGP_GAP] < 1e-5
    assert found[m.SKIPPED] == 0


def test_a_limited_policy_is_a_distribution_over_what_the_limits_allow() -> None:
    policy = limited(make_table(5))
    allowed = listed(6, STOP, longest=5, shortest=2, is_forced=True)
    # 5 other ids: 5^2 + 5^3 + 5^4 completions
    assert len(allowed) == 25 + 125 + 625
    total = math.fsum(map(math.exp, policy.sequence_logps([((1,), ids) for ids in allowed])))
    assert total == pytest.approx(1.0, abs=1e-5)
    reference = policy.without_limits()
    assert math.fsum(map(math.exp, reference.sequence_logps([((1,), ids) for ids in allowed]))) < 0.9


def test_a_banned_stop_shares_its_mass_by_hand() -> None:
    # logits 2, 1, 0 for ids 0, 1 and the stop id 2; banned: e^2/(e^2+e) = 0.731059; free: 0.665241
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    stop = torch.tensor([2])
    limits = Limits(first=1, last=3)
    found = limits.of_next(logits, torch.tensor([0]), stop, 2).softmax(-1)[0].tolist()
    assert found == pytest.approx([0.731059, 0.268941, 0.0], abs=1e-6)
    after = limits.of_next(logits, torch.tensor([1]), stop, 2).softmax(-1)
    assert after[0, 0].item() == pytest.approx(0.665241, abs=1e-6)
    assert limits.of_next(logits, torch.tensor([3]), stop, 2).softmax(-1)[0].tolist() == [0.0, 0.0, 1.0]


def test_split_and_whole_rows_agree_under_limits() -> None:
    policy = limited(llama_policy(7))
    prompt = (1, *[3, 4, 5, 6] * 5)
    pairs = [(prompt, (3, 4, STOP)), (prompt, (5, 5, 5, 5, STOP)), (prompt, (4, 4, 4, STOP))]
    whole = torch.cat([policy.token_logps(make_rows([pair])).sum(-1) for pair in pairs])
    assert policy.token_logps(make_rows(pairs)).sum(-1).tolist() == pytest.approx(whole.tolist(), abs=1e-5)


def test_gradients_under_limits_are_finite_and_leave_the_forced_stop_alone() -> None:
    policy = limited(make_table(2)).trainable_copy()
    policy.token_logps(make_rows([((1,), (3, 4, 5, 3, STOP))])).sum().backward()
    slope = policy.model.logits.grad
    assert bool(torch.isfinite(slope).all())
    assert int((slope.abs().sum(-1) > 0).sum()) == 4, "the rows of four sampled ids; the forced stop has none"


def test_weights_adopted_inside_a_batch_keep_the_limits() -> None:
    policy = limited(llama_policy(3))
    engine = TransformersEngine(policy)
    pause = Pause(every=2, do=lambda: engine.load(engine.tensors(), 1))
    (made,) = engine.generate([make_prompt()], num_samples=16, sampling=FEW, seeds=[3], pause=pause)
    assert {len(c.tokens) for c in made} <= {3, 4, 5}


# ---- the log-reward ----------------------------------------------------------------------------------


def schedules(**more: Any) -> Schedules:
    return Schedules(steps=100, learning_rate=0.1, schedule="constant", warmup_steps=0, beta=0.3, beta_final=None,
                     beta_steps=0, **more)


def test_the_course_of_both_temperatures_by_hand() -> None:
    found = schedules(prior_temperature=Line(**{"from": 1.0, "to": 1.5, "steps": 10}),
                      target_temperature=Line(**{"from": 2.0, "to": 1.0, "steps": 4}))
    # step 3: gamma = 1 + 0.5 x 2/10 = 1.1, T = 2 - 2/4 = 1.5: beta T = 0.45, 1 / (gamma T) = 1 / 1.65
    assert found.tempered(0.3, 3) == pytest.approx((0.45, 1 / 1.65))
    assert found.tempered(0.3, 1) == pytest.approx((0.6, 0.5))
    assert found.tempered(0.3, 99) == pytest.approx((0.3, 1 / 1.5))
    assert schedules().tempered(0.3, 7) == (0.3, 1.0)


@pytest.mark.parametrize(("gamma", "over_all"), [(1.0, 2.0), (1.3, 1.7), (1.2, 1.0)])
def test_the_residual_is_that_of_the_papers_log_reward(gamma: float, over_all: float) -> None:
    beta = 0.37
    rewards, refs, logps = [-0.2, -3.1, -1.4], [-7.0, -5.5, -9.25], [-6.0, -6.5, -8.0]
    draws = [make_draw(make_prompt(), [
        make_trajectory(reward=rewards[n], ref_logp=refs[n], tokens=(3 + n, STOP)) for n in range(3)
    ])]
    batch = collate(draws, max_tokens=99)
    (micro,) = batch.micro_batches
    logps_NT = torch.zeros(3, 4)
    logps_NT[:, 3] = torch.tensor(logps)
    tempered = schedules(prior_temperature=gamma, target_temperature=over_all).tempered(beta, 1)
    found, _ = Loss(make_settings(objective={"beta": beta})).of(micro, batch, logps_NT, *tempered)
    log_rewards = [(lp / gamma + r / beta) / over_all for r, lp in zip(rewards, refs, strict=True)]
    log_z = sum(lr - lp for lr, lp in zip(log_rewards, logps, strict=True)) / 3
    expected = [log_z + lp - lr for lr, lp in zip(log_rewards, logps, strict=True)]
    assert found.residual.tolist() == pytest.approx(expected, abs=1e-5)


def test_a_replayed_attack_is_weighed_as_the_step_that_draws_it_says() -> None:
    # the same stored trajectories at two steps: the target moves with the step, so the loss does
    settings = make_settings(
        objective={"beta": 0.4, "target_temperature": {"from": 2.0, "to": 1.0, "steps": 2}},
        trainer={"steps": 4, "learning_rate": 1e-9},
    )
    draws = [make_draw(make_prompt("one", (1,)), [
        make_trajectory("one", (3, STOP), reward=-0.1, ref_logp=-2.0),
        make_trajectory("one", (4, STOP), reward=-4.6, ref_logp=-1.0),
    ])]
    trainer = Trainer(make_table(4).trainable_copy(), settings)
    steps = [trainer.step(collate(draws, max_tokens=99)) for _ in range(3)]
    assert [s[m.BETA] for s in steps] == pytest.approx([0.8, 0.6, 0.4])
    assert [s[m.PRIOR] for s in steps] == pytest.approx([0.5, 1 / 1.5, 1.0])
    # with two rows the squared residual is ((a - b) / 2)^2 of what each row's is: gap of log-rewards less that of logp
    gaps = [-1.0 / over_all + 4.5 / (0.4 * over_all) for over_all in (2.0, 1.5, 1.0)]
    own = [2 * math.sqrt(s[m.RESIDUAL_MSE]) for s in steps]
    assert own[1] - own[0] == pytest.approx(gaps[1] - gaps[0], abs=1e-3)
    assert own[2] - own[1] == pytest.approx(gaps[2] - gaps[1], abs=1e-3)


def test_only_objectives_that_fit_a_distribution_are_tempered() -> None:
    with pytest.raises(ValueError, match="fits none"):
        make_settings(objective={"name": "grpo", "prior_temperature": 1.2})
    settings = make_settings(objective={"beta": 0.2, "prior_temperature": 1.25,
                                        "target_temperature": {"from": 2.0, "to": 1.6, "steps": 3}})
    assert settings.final_beta == pytest.approx(0.32)
    assert settings.final_prior == pytest.approx(0.5)
    again = Settings.model_validate(settings.resolved())
    assert again.objective == settings.objective.model_copy(update={"scale": "advantage"})


def test_a_target_with_a_weighed_prior_by_hand() -> None:
    # prior 1/2: e^(-2/2) e^(0.3/0.6) : e^(-1/2) e^0 = e^-0.5 : e^-0.5
    found, log_z = log_target([-2.0, -1.0], [0.3, 0.0], 0.6, 0.5)
    assert found == pytest.approx([math.log(0.5)] * 2)
    assert log_z == pytest.approx(math.log(2) - 0.5)


# ---- the task ----------------------------------------------------------------------------------------


def synthetic(**redteam: Any) -> Settings:
    import yaml

    tree = yaml.safe_load(recipe_text("redteam-synthetic"))
    tree["task"]["redteam"] |= redteam
    return check_settings(tree)


def make_task(**redteam: Any) -> Redteam:
    return Redteam(synthetic(**redteam).task, max_new_tokens=6, score_limit_s=1.0)


class Given:
    """A victim whose answers to each attack are given; asked for others it fails."""

    def __init__(self, answers: dict[str, list[str]]) -> None:
        self.given, self.asked = answers, list[str]()

    def answers(self, attacks: Sequence[str], count: int) -> list[list[str] | Failure]:
        self.asked += attacks
        return [self.given.get(a, Failure(reason="unreachable", detail="nobody")) for a in attacks]


def with_victim(answers: dict[str, list[str]], **redteam: Any) -> tuple[Redteam, Given]:
    task, victim = make_task(**redteam), Given(answers)
    task._victims["victim"] = victim
    return task, victim


def said(text: str) -> Completion:
    return make_completion((5, STOP), text=text)


def test_the_reward_is_the_mean_of_logs_and_its_part_the_mean_of_probabilities() -> None:
    task, _ = with_victim({"x": ["BAD", "fine", "fine"], "y": ["BAD", "BAD", "BAD"]})
    one, all_ = task.score(make_prompt(), [said(" x\n"), said("y")])
    # (ln 0.99 + 2 ln 0.01) / 3 = -3.0735; (0.99 + 0.02) / 3 = 0.336667
    assert one.reward == pytest.approx(-3.0734638)
    assert one.parts == pytest.approx({"words": 0.336667}, abs=1e-6)
    assert (all_.reward, all_.parts["words"]) == pytest.approx((math.log(0.99), 0.99))


def test_a_held_out_judge_is_not_asked_in_training() -> None:
    task, _ = with_victim({"x": ["BAD c"] * 2})
    task.score(make_prompt(), [said("x")])
    assert {judge for judge, *_ in task._judged} == {"words"}
    assert (task.trained, task.unseen) == (["words"], ["seen"])


def test_several_judges_are_weighed_and_one_of_them_alone_is_not_enough() -> None:
    judges = [{"words": ["BAD"], "weight": 0.7}, {"name": "b", "words": ["so"], "weight": 1.9}]
    task, _ = with_victim({"x": ["BAD so", "BAD"]}, judges=judges)
    (found,) = task.score(make_prompt(), [said("x")])
    # 0.7 ln 0.99 + 1.9 (ln 0.99 + ln 0.01) / 2
    assert found.reward == pytest.approx(0.7 * math.log(0.99) + 0.95 * (math.log(0.99) + math.log(0.01)))
    assert found.parts == pytest.approx({"words": 0.99, "b": 0.5})


def test_equal_attacks_are_answered_once_and_failures_are_recorded_and_asked_again() -> None:
    task, victim = with_victim({"x": ["fine"] * 2})
    found = task.score(make_prompt(), [said("x"), said("gone"), said("x ")])
    assert victim.asked == ["x", "gone"]
    assert isinstance(found[1], Failure)
    assert found[1].reason == "unreachable"
    assert found[0] == found[2]
    victim.given["gone"] = ["BAD"] * 2
    again = task.score(make_prompt(), [said("gone"), said("x")])
    assert victim.asked == ["x", "gone", "gone"]
    assert again[0].reward == pytest.approx(math.log(0.99))


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tba.tasks.redteam.REMEMBERED", 3)
    task, _ = with_victim({c: ["fine"] * 2 for c in "abcdefgh"})
    assert len(task.score(make_prompt(), [said(c) for c in "abcdefgh"])) == 8
    assert len(task._answered) == 3
    assert len(task._judged) <= 6


def test_only_the_first_line_is_the_attack_if_so_set() -> None:
    assert make_task(first_line=True).attack_of(said(" one \n2. two")) == "one"
    assert make_task().attack_of(said(" one \n2. two")) == "one \n2. two"


def test_each_attack_of_an_evaluation_is_a_prompt_of_its_own() -> None:
    task = make_task(prompt="ab")
    held_out = task.held_out(lambda text: (1, 3, 4))
    assert (len(held_out), len({p.id for p in held_out}), {p.tokens for p in held_out}) == (1024, 1024, {(1, 3, 4)})
    assert [p.text for p in task.prompts(lambda text: (1,))] == ["ab"]


@pytest.mark.parametrize(("changes", "words"), [
    ({"victim": {}}, "neither model nor endpoint"),
    ({"victim": {"triggers": ["a"], "model": "x/y"}}, "model, triggers"),
    ({"victim": {"endpoint": "http://h:1"}}, "served_model is missing"),
    ({"victim": {"endpoint": "h:1", "served_model": "m"}}, "no address"),
    ({"victim": {"model": "x/y", "template": "no"}}, "shows no attack"),
    ({"second_victim": {}}, "task.redteam.second_victim"),
    ({"judges": []}, "none to train on"),
    ({"judges": [{"words": ["a"], "held_out": True}]}, "none to train on"),
    ({"judges": [{"words": ["a"]}, {"words": ["b"]}]}, "2 judges are named 'words'"),
    ({"judges": [{"model": "x/y"}]}, "gives no chance"),
    ({"judges": [{"model": "x/y", "activation": "softmax"}]}, "task.redteam.judges.0.activation"),
    ({"judges": [{"words": ["a"], "model": "x/y"}]}, "without model and endpoint"),
    ({"prompt_path": "gone.txt"}, "not a file"),
])
def test_wrong_settings_are_refused_with_a_way_out(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        synthetic(**changes)


def test_a_minimum_that_leaves_no_room_is_refused() -> None:
    with pytest.raises(ValueError, match="leaves no room"):
        make_settings(policy={"min_new_tokens": 16}, search={"max_new_tokens": 16})


# ---- judges and victims ------------------------------------------------------------------------------


def test_a_classifier_judges_by_its_softmax_whoever_is_judged_beside(tmp_path: Path) -> None:
    where = save_classifier(tmp_path / "judge", "bert", labels=2, cls=True, segments=True)
    judges = [{"name": "hate", "model": str(where), "activation": "softmax", "index": 1, "reads": "completion"}]
    answers = {"x": ["you", "they are"], "y": ["a b c"] * 2}
    together, _ = with_victim(answers, judges=judges)
    found = together.attacks(["x", "y"], ["hate"])
    alone = [with_victim(answers, judges=judges)[0].attacks([t], ["hate"])[0] for t in ("x", "y")]
    for one, other in zip(found, alone, strict=True):
        assert isinstance(one, Attack)
        assert isinstance(other, Attack)
        assert one.chances["hate"] == pytest.approx(other.chances["hate"], abs=1e-5)
        assert all(0 < p < 1 for p in one.chances["hate"])


def test_a_guards_chance_is_that_of_the_first_token_of_its_verdict(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = save_policy(tmp_path / "guard")
    tokenizer = AutoTokenizer.from_pretrained(where)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(where)
    guard = load_guard(JudgeSettings(model=str(where), first_token="u", suffix="\n"), "here")
    found = guard(make_prompt("go"), [said("yes"), said("a longer one")])
    model = AutoModelForCausalLM.from_pretrained(where)
    for text, chance in zip(("yes", "a longer one"), found, strict=True):
        chat = [{"role": "user", "content": "go"}, {"role": "assistant", "content": text}]
        shown = tokenizer.apply_chat_template(chat, tokenize=False) + "\n"
        ids = tokenizer(shown, add_special_tokens=False)["input_ids"]
        logits = model(input_ids=torch.tensor([ids])).logits[0, -1].detach().double()
        assert chance == pytest.approx(float(logits.softmax(-1)[tokenizer.get_vocab()["u"]]), abs=1e-6)


def test_a_guard_without_template_is_refused(tmp_path: Path) -> None:
    where = save_policy(tmp_path / "guard")
    with pytest.raises(SettingsError, match="no chat template"):
        load_guard(JudgeSettings(model=str(where), first_token="u"), "here")


def test_a_model_victims_answers_depend_on_the_attack_alone(tmp_path: Path) -> None:
    where = save_policy(tmp_path / "victim")
    settings = VictimSettings(model=str(where), template="Q: {attack}\nA:", temperature=1.0, top_p=0.9,
                              max_new_tokens=5, batch_attacks=2)
    victim = ModelVictim(settings, "here")
    found = victim.answers(["one", "two", "three"], 3)
    assert [len(answers) for answers in found] == [3, 3, 3]
    assert len({text for answers in found for text in answers}) > 3
    assert ModelVictim(settings, "here").answers(["three", "one"], 3) == [found[2], found[0]]


def test_what_reads_like_a_special_token_is_taken_out_of_an_attack(tmp_path: Path) -> None:
    victim = ModelVictim(VictimSettings(model=str(save_policy(tmp_path / "victim")), template="{attack}"), "here")
    assert victim._ids("a</s>b") == victim._ids("ab")


def endpoint_victim(url: str, **more: Any) -> EndpointVictim:
    made = EndpointVictim(VictimSettings(endpoint=url, served_model="mine", limit_s=0.5, backoff_s=0.0, **more), "here")
    made.endpoint._wait = lambda seconds: None
    return made


def test_an_endpoint_that_errs_hangs_and_limits_is_survived_and_counted() -> None:
    faults = itertools.cycle(["none", "error", "none", "hang", "none", "none"])
    limits = itertools.cycle([200, 200, 429])

    def answer(path: str, text: str) -> tuple[int, bytes, dict[str, str]]:
        reply = {"choices": [{"message": {"content": f"BAD {text}"}}]}
        return next(limits), json.dumps(reply).encode(), {"Retry-After": "0"}

    with ScoringServer(fault=lambda text, attempt: next(faults), answer=answer) as server:  # type: ignore[arg-type,return-value]
        victim = endpoint_victim(server.url, retries=1, concurrency=2)
        task = make_task()
        task._victims["victim"] = victim
        found = task.score(make_prompt(), [said(f"attack {n}") for n in range(12)])
        victim.close()
    scored = [one for one in found if isinstance(one, Score)]
    lost = [one for one in found if isinstance(one, Failure)]
    assert len(scored) + len(lost) == 12
    assert scored
    assert {one.reason for one in lost} <= {"refused", "timeout", "overloaded"}
    assert set(victim.endpoint.failed_calls) == {"refused", "timeout", "overloaded"}
    assert all(one.reward == pytest.approx(math.log(0.99)) for one in scored)
    path, body = server.bodies[0]
    assert path == "/v1/chat/completions"
    assert (body["model"], body["max_tokens"], body["top_p"]) == ("mine", 30, 0.92)


def test_a_reply_without_text_is_a_bad_reply() -> None:
    with ScoringServer(answer=lambda path, text: (200, b'{"choices": [{"message": {"content": null}}]}', {})) as server:
        (found,) = endpoint_victim(server.url, retries=0).answers(["x"], 2)
    assert isinstance(found, Failure)
    assert found.reason == "bad_reply"


def test_a_judge_behind_an_endpoint_says_a_chance_from_its_range() -> None:
    judge = {"name": "j", "endpoint": "http://127.0.0.1:9", "protocol": "chat", "served_model": "m",
             "judge_range": [0, 10]}
    task, _ = with_victim({"x": ["fine", "BAD"]}, judges=[judge])
    task._judges["j"] = lambda prompt, completions: [2.5, 10.0]
    (found,) = task.score(make_prompt(), [said("x")])
    assert found.parts == pytest.approx({"j": 0.625})
    assert isinstance(RewardSettings(model="a/b"), RewardSettings)


# ---- what an audit says ------------------------------------------------------------------------------


def test_what_an_audit_says_by_hand() -> None:
    second = {"triggers": ["caadc"]}
    task = make_task(second_victim=second)
    texts = ["caadc", "caadc", "bdcdb", "adcdc", "dddd"]
    found = Audit(task).of([said(text) for text in texts], is_last=True)
    # 4 of 5 work. The held-out judge knows BAD c, b, a alike. The second victim gives in to caadc, twice, of the 4.
    assert found[m.ATTACK_SUCCESS] == 0.8
    assert found[m.ATTACK_INTERVAL] == pytest.approx((0.3755, 0.9638), abs=1e-4)  # Wilson of 4 of 5
    assert found[m.ATTACK_CHANCE] == pytest.approx((4 * 0.99 + 0.01) / 5)
    assert found[m.ATTACK_LOG] == pytest.approx((4 * math.log(0.99) + math.log(0.01)) / 5)
    assert (found[m.MODES], found[m.MODES_FOUND], found[m.ATTACK_CLUSTERS]) == (8, 3, 3)
    assert (found[m.HELD_OUT_SUCCESS], found[m.JUDGE_AGREEMENT], found[m.TRANSFER]) == (0.8, 1.0, 0.5)
    during = Audit(task).of([said(text) for text in texts], is_last=False)
    assert m.HELD_OUT_SUCCESS not in during
    assert m.TRANSFER not in during


def test_attacks_that_get_no_answer_are_counted_and_leave_the_rest() -> None:
    task, _ = with_victim({"x": ["BAD"] * 2})
    found = Audit(task).of([said("x"), said("gone")], is_last=False)
    assert (found[m.ATTACKS], found[m.ATTACKS_LOST], found[m.ATTACK_SUCCESS]) == (2, 1, 1.0)


def test_diversity_is_one_minus_the_mean_cosine_of_pairs() -> None:
    rng = np.random.default_rng(3)
    vectors = rng.normal(size=(7, 5)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    pairs = [float(vectors[a] @ vectors[b]) for a, b in itertools.combinations(range(7), 2)]
    assert embeddings.diversity(vectors) == pytest.approx(1 - sum(pairs) / 21, abs=1e-5)
    assert embeddings.diversity(vectors[:1]) == 0.0
    same = embeddings.Embedder(None)(["one text"] * 4)
    assert embeddings.diversity(same) == pytest.approx(0.0, abs=1e-6)


def test_clusters_are_led_by_the_first_of_their_kind() -> None:
    angle = [0.0, 0.3, 1.5, 0.1, 1.6]
    vectors = np.array([[math.cos(a), math.sin(a)] for a in angle], np.float32)
    assert embeddings.clusters(vectors, math.cos(0.35)) == [0, 0, 1, 0, 1]
    assert embeddings.clusters(vectors, math.cos(0.05)) == [0, 1, 2, 3, 4]
    assert embeddings.clusters(vectors[:0], 0.5) == []


def test_an_encoder_is_mean_pooled_over_what_is_no_padding(tmp_path: Path) -> None:
    where = save_classifier(tmp_path / "encoder", "bert", labels=2, cls=True, segments=True)
    embed = embeddings.Embedder(str(where))
    both = embed(["ab", "a much longer text"])
    assert both[0] == pytest.approx(embed(["ab"])[0], abs=1e-5)
    assert np.linalg.norm(both, axis=1) == pytest.approx([1.0, 1.0], abs=1e-5)


def test_the_words_of_modes() -> None:
    assert audit_room.modes_in(["xaby", "cd"], ["ab", "cd", "ef"]) == {"ab", "cd"}


# ---- a run, its report and its export ---------------------------------------------------------------


SHORT = ["trainer.steps=8", "trainer.stable_steps=0", "buffer.initial=1024", "evaluation.every=8", "task.held_out=64",
         "evaluation.during_prompts=8", "checkpoint.every=8"]
TRIGGERS = "task.redteam.victim={triggers: [ca, bdcdb]}"


@pytest.fixture(scope="module")
def short_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight steps against a victim that gives in easily."""
    run = tmp_path_factory.mktemp("audit") / "run"
    assert main(["train", "redteam-synthetic", *SHORT, TRIGGERS, "--run", str(run), "--json"]) == 0
    return run


def test_a_run_reports_what_an_audit_says(short_run: Path) -> None:
    summary = json.loads((short_run / "summary.json").read_text("utf-8"))
    start, final = summary["start"], summary["final"]
    assert 0 < start[m.ATTACK_SUCCESS] < 0.2
    for found in (start, final):
        assert found[m.ATTACKS] == 64
        assert found[m.ATTACK_INTERVAL][0] <= found[m.ATTACK_SUCCESS] <= found[m.ATTACK_INTERVAL][1]
        assert 0 < found[m.TV] < 1
        assert found[m.JUDGE_AGREEMENT] == 1.0
    lines = [json.loads(line) for line in (short_run / "metrics.jsonl").read_text("utf-8").splitlines()]
    steps = [line for line in lines if m.STEP in line]
    # T from 2 to 1 over 300 steps: 2 - 7/300 at step 8; gamma 1 + 0.5 x 7/300
    assert steps[0][m.PRIOR] == pytest.approx(0.5)
    assert steps[7][m.BETA] == pytest.approx(0.5 * (2 - 7 / 300))
    assert steps[7][m.PRIOR] == pytest.approx(1 / ((2 - 7 / 300) * (1 + 3.5 / 300)))
    assert max(step[m.LOGP_GAP] or 0.0 for step in steps) < 1e-5


def test_the_report_hides_completions_behind_a_click_with_a_notice(short_run: Path) -> None:
    page = write_report(short_run).read_text("utf-8")
    before, _, inside = page.partition('<details id="notice">')
    assert 'id="browse-list"' not in before
    assert inside.index("Content notice") < inside.index('id="browse-list"') < inside.index("</details>")
    assert "attack_success" in before


def test_what_works_is_exported_with_clusters_scores_and_answers(
    short_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "found.jsonl"
    assert main(["redteam", "export", str(short_run), str(file), "--answers"]) == 0
    rows = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    assert rows
    assert len({row["attack"] for row in rows}) == len(rows)
    assert all("ca" in row["attack"] or "bdcdb" in row["attack"] for row in rows)
    assert all(row["answers"][0].startswith("BAD") and row["chance"] == pytest.approx(0.99) for row in rows)
    sizes = [row["cluster_size"] for row in rows]
    assert sizes == sorted(sizes, reverse=True)
    assert f"{len(rows)} attacks" in capsys.readouterr().out
    import pyarrow.parquet as pq

    again = tmp_path / "found.parquet"
    assert main(["redteam", "export", str(short_run), str(again), "--most", "3"]) == 0
    assert pq.read_table(again).num_rows == 3
    assert main(["redteam", "export", str(short_run), str(again)]) == 2


def test_a_run_without_success_exports_nothing(short_run: Path, tmp_path: Path) -> None:
    task = make_task(victim={"triggers": ["zzz"]})
    with pytest.raises(SettingsError, match="nothing to export"):
        list(audit_room.found_rows([], task, most=9, answers=False))
    file = tmp_path / "found.txt"
    assert main(["redteam", "export", str(short_run), str(file)]) == 2
    assert not file.exists()
