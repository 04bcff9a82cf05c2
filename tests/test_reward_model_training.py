"""Training a reward model from pairs: the loss by hand, the split, learning what can be learnt, the report."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from classifiers import POSITIONS, alone, classifier, letters_tokenizer, save_classifier, save_policy
from support import make_completion, make_settings
from tba import cli
from tba.preference_settings import RewardModelSettings, RewardSettings, reward_model_problems
from tba.records import Prompt
from tba.reward_model import PairLoss, bradley_terry, held_out_rows_of, rows_of, split_pairs, stacked
from tba.rewards.inputs import Encoder
from tba.rewards.models import load_scorer
from tba.settings import SettingsError


def by_letters(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Pairs in which the completion with more z and fewer y is preferred, each prompt twice."""
    rng = random.Random(seed)
    rows = []
    while len(rows) < count:
        words = ["".join(rng.choices("zyab", k=6)) for _ in range(2)]
        worth = [word.count("z") - word.count("y") for word in words]
        if worth[0] != worth[1]:
            better = worth.index(max(worth))
            rows.append({"prompt": f"{len(rows) // 2}:", "chosen": words[better], "rejected": words[1 - better]})
    return rows


def written(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return str(path)


def encoder(**more: Any) -> Encoder:
    return Encoder(letters_tokenizer(), **{"reads": "text", "at_eos": True, "max_tokens": POSITIONS, **more})


# ---- the loss -----------------------------------------------------------------------------------


def test_the_loss_by_hand() -> None:
    # margins 0.3 and -1.1: log(1 + e^-0.3) = 0.554355, log(1 + e^1.1) = 1.387335; sums 0.7 and 0.1
    scores = torch.tensor([[0.5, 0.2], [-0.5, 0.6]], dtype=torch.float64)
    assert bradley_terry(scores).item() == pytest.approx((0.554355 + 1.387335) / 2, abs=1e-6)
    assert bradley_terry(scores, 0.4).item() == pytest.approx(0.970845 + 0.4 * (0.49 + 0.01) / 2, abs=1e-6)


def test_the_gradient_is_the_chance_of_being_wrong() -> None:
    scores = torch.tensor([[0.5, 0.2]], dtype=torch.float64, requires_grad=True)
    bradley_terry(scores).backward()
    wrong = 1 / (1 + math.exp(0.3))
    assert scores.grad is not None
    assert scores.grad.tolist() == [[pytest.approx(-wrong), pytest.approx(wrong)]]


def test_pairs_are_scored_as_each_text_alone() -> None:
    tokenizer = letters_tokenizer(pad="</s>")
    model, reader = classifier("llama", tokenizer), encoder()
    chosen = RewardModelSettings(held_out=0.2)
    pairs = split_pairs([("x", row) for row in by_letters(12)], chosen, reader, 0).training
    scores = PairLoss(model, 0.0)(**stacked(pairs, tokenizer))["scores"]
    for (first, second), pair in zip(scores.tolist(), pairs, strict=True):
        assert first == pytest.approx(alone(model, pair.chosen.ids), abs=1e-4)
        assert second == pytest.approx(alone(model, pair.rejected.ids), abs=1e-4)


# ---- the split ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_no_prompt_is_on_both_sides_and_every_pair_on_one(seed: int) -> None:
    rows = [(str(n), row) for n, row in enumerate(by_letters(40))]
    reader = encoder()
    made = split_pairs(rows, RewardModelSettings(held_out=0.25), reader, seed)
    decode = reader.tokenizer.decode
    sides = [[decode(p.chosen.ids).split(":")[0] for p in side] for side in (made.training, made.held_out)]
    assert not set(sides[0]) & set(sides[1])
    assert (len(sides[0]), len(sides[1])) == (30, 10)
    assert sorted(sides[0] + sides[1]) == sorted(str(n // 2) for n in range(40))
    assert made == split_pairs(rows, RewardModelSettings(held_out=0.25), encoder(), seed)
    assert made.held_out != split_pairs(rows, RewardModelSettings(held_out=0.25), encoder(), seed + 9).held_out


def test_what_is_left_out_is_counted() -> None:
    rows = [("a", {"prompt": "p", "chosen": "x", "rejected": "x"}),
            ("b", {"prompt": "p", "chosen": "y" * 99, "rejected": "x"}),
            ("c", {"prompt": "q" * 70, "chosen": "y", "rejected": "x"}), ("d", by_letters(1)[0])]
    made = split_pairs(rows, RewardModelSettings(held_out=0.5), encoder(), 0)
    assert (made.identical, made.too_long, made.cut) == (1, 1, 2)
    assert len(made.training) == len(made.held_out) == 1
    with pytest.raises(SettingsError, match="give 1 to train on and 0 held out"):
        split_pairs(rows[3:], RewardModelSettings(held_out=0.2), encoder(), 0)


def test_rows_that_are_no_pairs_are_refused(tmp_path: Path) -> None:
    rows = [{"prompt": 3, "chosen": "a", "rejected": None}, {"prompt": "a", "chosen": "a", "rejected": "b"}]
    with pytest.raises(SettingsError, match="neither text nor a list of messages"):
        rows_of(RewardModelSettings(path=written(tmp_path / "r.jsonl", rows)))
    with pytest.raises(SettingsError, match=r"set reward_model.rejected_column to the right one"):
        rows_of(RewardModelSettings(path=written(tmp_path / "r.jsonl", rows[1:]), rejected_column="worse"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "reward_model.path = None and reward_model.dataset = None"),
        ({"path": "none.jsonl"}, "reward_model.path = 'none.jsonl' is not a file"),
        ({"dataset": "a/b", "batch_size": 10, "micro_batch": 4}, "is not a multiple of"),
        ({"dataset": "a/b", "model": "./none"}, "is no model folder"),
        ({"dataset": "a/b", "chosen_column": "prompt"}, "each must be another"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(given: dict[str, Any], said: str) -> None:
    assert said in "\n".join(reward_model_problems(RewardModelSettings(**given)))
    assert not list(reward_model_problems(RewardModelSettings(dataset="a/b")))


# ---- the command --------------------------------------------------------------------------------


def recipe(tmp_path: Path, model: Path, **chosen: Any) -> str:
    path = tmp_path / "rm.yaml"
    path.write_text(json.dumps({"seed": 1, "reward_model": {
        "model": str(model), "path": written(tmp_path / "pairs.jsonl", by_letters(400)), "held_out": 0.2,
        "epochs": 3.0, "batch_size": 16, "micro_batch": 8, "learning_rate": 0.01, "bins": 4, **chosen,
    }}), "utf-8")
    return str(path)


@pytest.mark.parametrize("start", ["causal", "classifier"])
def test_a_rule_is_learnt_reported_and_scored_as_trained(
    start: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], one_thread: None
) -> None:
    model = (save_policy if start == "causal" else save_classifier)(tmp_path / "start")
    run = tmp_path / "run"
    assert cli.main(["reward-model", recipe(tmp_path, model), "--run", str(run), "--json"]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out.splitlines()[-1])
    assert json.loads((run / "pairs.json").read_text("utf-8")).items() <= report.items()
    assert (report["pairs"], report["held_out"]) == (320, 80)
    assert report["new_weights"] == (["score.weight"] if start == "causal" else [])
    final = report["final"]
    assert final["pair_accuracy"] > 0.9 > report["start"]["pair_accuracy"]
    assert final["pair_accuracy_low"] < final["pair_accuracy"] <= final["pair_accuracy_high"]
    assert final["pair_loss"] < 0.4 < report["start"]["pair_loss"]
    assert sum(row["count"] for row in final["reliability"]) == 80
    assert len(final["reliability"]) == 4
    assert "nats per pair" in captured.err
    scorer = load_scorer(RewardSettings(model=str(run / "final")))
    assert (scorer.encoder.reads, scorer.encoder.at_eos) == ("text", True)
    prompt = Prompt(id="p", tokens=(1,), text="7:")
    found = scorer(prompt, [make_completion(text="zzazyb"), make_completion(text="aayzyy")])
    assert found[0] > found[1]  # type: ignore[operator]


def test_a_start_that_cannot_be_used_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["reward-model", "--run", str(tmp_path / "run")]) == 2
    assert "give exactly one of the two: a file, or a data set" in capsys.readouterr().err
    path = recipe(tmp_path, tmp_path)
    assert cli.main(["reward-model", path, "reward_model.model=null", "model=new-llama", "--run",
                     str(tmp_path / "run")]) == 2  # fmt: skip
    assert "is made from scratch and has no folder" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert make_settings().reward_model.at_eos


# ---- pairs held out by file ---------------------------------------------------------------------


def test_a_file_of_held_out_pairs_is_held_out(tmp_path: Path) -> None:
    rows = by_letters(9)
    chosen = RewardModelSettings(
        path=written(tmp_path / "a.jsonl", rows[:6]), held_out_path=written(tmp_path / "b.jsonl", rows[6:])
    )
    reader = encoder()
    kept = held_out_rows_of(chosen)
    pairs = split_pairs(rows_of(chosen), chosen, reader, 0, kept)
    assert (len(pairs.training), len(pairs.held_out)) == (6, 3)
    wanted = [reader.encode([{"role": "user", "content": row["prompt"]}], row["chosen"]) for row in rows[6:]]
    assert [pair.chosen for pair in pairs.held_out] == wanted


def test_a_pair_on_both_sides_is_refused(tmp_path: Path) -> None:
    rows = by_letters(6)
    chosen = RewardModelSettings(
        path=written(tmp_path / "a.jsonl", rows), held_out_path=written(tmp_path / "b.jsonl", rows[4:])
    )
    with pytest.raises(SettingsError, match=r"reward_model.held_out_path = .* shares 2 pairs"):
        split_pairs(rows_of(chosen), chosen, encoder(), 0, held_out_rows_of(chosen))
    (problem,) = reward_model_problems(RewardModelSettings(path=chosen.path, held_out_path="none.jsonl"))
    assert problem.startswith("reward_model.held_out_path = 'none.jsonl' is not a file")
    with pytest.raises(SettingsError, match="give 6 to train on and 0 held out"):
        split_pairs(rows_of(chosen), chosen, encoder(), 0, [])
