"""A few completions of each batch for who watches: the newest, few, whole, seldom, and of no consequence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from support import STOP, llama_policy, make_draw, make_prompt, make_trajectory, random_draws
from tba import metrics as m
from tba.batch import Batch, collate
from tba.newest import CHARACTERS, COMPLETIONS, EVERY_S, FILE, GROUPS, REST, Newest
from tba.policy import named_tensors
from tba.recorder import Source
from test_recorder import make_trainer, sources_of


class Clock:
    """Time that passes when it is told to; each reading takes `reading_s`."""

    def __init__(self) -> None:
        self.now, self.reading_s = 100.0, 0.0

    def __call__(self) -> float:
        self.now += self.reading_s
        return self.now


def spell(ids: Any) -> str:
    return " ".join(map(str, ids))


def batch_of(*versions: tuple[int, ...], length: int = 3) -> Batch:
    """One group for each tuple, of a trajectory by each version in it; completions tell group and place."""
    draws = []
    for group, own in enumerate(versions):
        made = [make_trajectory(f"p{group}", (*(3 + group,) * (length - 2), 20 + place, STOP), version=version,
                                reward=group + place / 8) for place, version in enumerate(own)]
        draws.append(make_draw(make_prompt(f"p{group}"), made))
    return collate(draws, max_tokens=9999)


def sources(count: int) -> list[Source]:
    return [Source(text=f"text {group}", sampler=f"sampler {group}", numbers=()) for group in range(count)]


def told(path: Path) -> dict[str, Any]:
    return json.loads((path / FILE).read_text())


def test_the_newest_groups_are_written_the_newest_first(tmp_path: Path) -> None:
    batch = batch_of((2, 2), (5, 1), (9, 9), (5, 5), (0, 0), (7, 3))
    assert Newest(tmp_path, spell).tell(12, 11, batch, sources(6)) > 0
    found = told(tmp_path)
    assert (found["step"], found["version"]) == (12, 11)
    # By each group's newest: 9, 7, then two of 5 in the order of their draws.
    assert [group["prompt_id"] for group in found["groups"]] == ["p2", "p5", "p1", "p3"]
    assert found["groups"][2] == {
        "prompt_id": "p1", "prompt": "text 1", "sampler": "sampler 1", "size": 2,
        "completions": [
            {"text": "4 20 2", "cut": False, "reward": 1.0, "version": 5, "age": 6},
            {"text": "4 21 2", "cut": False, "reward": 1.125, "version": 1, "age": 10},
        ],
    }


@pytest.mark.parametrize("max_tokens", [1, 9, 40, 10_000])
def test_texts_are_those_of_their_trajectories_however_the_batch_was_cut(tmp_path: Path, max_tokens: int) -> None:
    draws = random_draws([3, 5, 2, 4], seed=4)
    Newest(tmp_path, spell).tell(1, 3, collate(draws, max_tokens=max_tokens), [Source.of(draw) for draw in draws])
    for group in told(tmp_path)["groups"]:
        (draw,) = [draw for draw in draws if draw.prompt.id == group["prompt_id"]]
        assert [(c["text"], c["version"]) for c in group["completions"]] == [
            (spell(t.completion.tokens), t.completion.version) for t in draw.trajectories
        ]
        assert [c["reward"] for c in group["completions"]] == pytest.approx([t.reward for t in draw.trajectories])


def test_the_file_is_bounded_whatever_the_batch(tmp_path: Path) -> None:
    batch = batch_of(*(((0,) * 11,) * 7), length=1500)
    wide = [Source(text="p" * 9000, sampler="recent", numbers=())] * 7
    Newest(tmp_path, lambda ids: "\u2028" * 2 * len(ids)).tell(1, 0, batch, wide)
    found = told(tmp_path)
    assert len(found["groups"]) == GROUPS
    assert {len(group["completions"]) for group in found["groups"]} == {COMPLETIONS}
    assert {group["size"] for group in found["groups"]} == {11}
    assert {len(group["prompt"]) for group in found["groups"]} == {CHARACTERS}
    shown = [completion for group in found["groups"] for completion in group["completions"]]
    assert {(len(completion["text"]), completion["cut"]) for completion in shown} == {(CHARACTERS, True)}
    # Each character takes six bytes at most, as an escape.
    assert (tmp_path / FILE).stat().st_size < 6 * CHARACTERS * GROUPS * (COMPLETIONS + 2)


def test_it_is_written_seldom_and_the_seldomer_the_longer_it_takes(tmp_path: Path) -> None:
    clock = Clock()
    newest, batch = Newest(tmp_path, spell, clock), batch_of((0, 0))
    clock.reading_s = 0.25
    assert newest.tell(1, 0, batch, ()) == 0.25  # two readings, a quarter of a second apart
    clock.reading_s = 0.0
    clock.now += REST * 0.25 - 0.01
    assert newest.tell(2, 1, batch, ()) == 0.0
    clock.now += 0.02
    newest.tell(3, 2, batch, ())
    clock.now += EVERY_S - 0.01
    newest.tell(4, 3, batch, ())
    assert told(tmp_path)["step"] == 3
    clock.now += 0.02
    newest.tell(5, 4, batch, ())
    assert told(tmp_path)["step"] == 5


def test_a_full_disk_costs_the_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    newest, batch = Newest(tmp_path, spell, clock), batch_of((0, 0))
    newest.tell(1, 0, batch, ())

    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    for broken in ("os.replace", "pathlib.Path.write_text"):
        clock.now += 10
        with monkeypatch.context() as patch:
            patch.setattr(broken, full)
            newest.tell(2, 1, batch, ())
        assert told(tmp_path)["step"] == 1
        assert [file.name for file in tmp_path.iterdir()] == [FILE]
    Newest(tmp_path / "gone", spell).tell(1, 0, batch, ())


def test_training_is_the_same_with_it_and_without(tmp_path: Path) -> None:
    draws = random_draws([4, 3, 2, 4, 3], seed=9)
    batch, found = collate(draws, max_tokens=60), []
    for newest in (None, Newest(tmp_path, llama_policy(5).decode)):
        policy = llama_policy(5).trainable_copy()
        trainer = make_trainer(policy, None, newest=newest, objective="trajectory_balance")
        steps = [trainer.step(batch, sources_of(draws)) for _ in range(2)]
        found.append(([step[m.LOSS] for step in steps], named_tensors(policy.model), steps[0][m.RECORD_SECONDS]))
    (losses, tensors, none), (same, others, some) = found
    assert losses == same
    assert all(torch.equal(tensor, others[name]) for name, tensor in tensors.items())
    assert none == 0 < some
    assert told(tmp_path)["step"] == 1
