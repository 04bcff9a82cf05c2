"""The replay buffer on disk: what a save writes, what it shares with the last one, and that a kill loses nothing."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from makers import a_group, a_prompt, a_trajectory
from tba import checkpoint
from tba.buffer import segments
from tba.buffer.export import ordered, rows_of, write_parquet
from tba.buffer.memory import ReplayBuffer
from tba.records import Completion, Group, Trajectory

OPTIONS: dict[str, Any] = {"capacity": 60, "capacity_per_prompt": 13, "recent_age": 2, "dedup": "none"}


def groups() -> Iterator[Group]:
    """A sequence of deliveries that is the same every time."""
    dice = random.Random(5)
    number = 0
    while True:
        items = [((number, k, *[3] * dice.randrange(5), 2), dice.gauss(0, 1)) for k in range(3)]
        yield a_group(f"p{dice.randrange(7)}", items, version=number // 4, unscored=["none"] * dice.randrange(2))
        number += 1


def replayed(deliveries: int) -> ReplayBuffer:
    buffer = ReplayBuffer(**OPTIONS)
    for group in islice(groups(), deliveries):
        buffer.add(group)
    return buffer


def contents(buffer: ReplayBuffer) -> list[Any]:
    return [(p, e.number, e.uses, e.trajectory) for p, e in buffer.entries()]


def links(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_nlink for file in folder.glob("trajectories-*.parquet")}


# ---- what is shared ---------------------------------------------------------------------------------


def test_a_save_links_what_the_last_one_wrote_also_after_its_folder_was_renamed(tmp_path: Path):
    buffer, source = ReplayBuffer(**OPTIONS), groups()
    for group in islice(source, 20):
        buffer.add(group)
    for step in (1, 2, 3):
        buffer.add(next(source))
        checkpoint.save(tmp_path, step, buffer.save, {}, keep=2)  # written under another name, then renamed
    second, third = (tmp_path / "checkpoints" / f"step_{n}" for n in (2, 3))
    assert sorted(links(third).values()) == [1, 2, 2]  # the first folder is gone; its file has two names left
    assert contents(ReplayBuffer(**OPTIONS).load(second)) == contents(replayed(22))
    resumed = ReplayBuffer(**OPTIONS).load(third)
    assert contents(resumed) == contents(replayed(23))
    resumed.add(next(source))
    checkpoint.save(tmp_path, 4, resumed.save, {}, keep=2)
    assert sorted(links(tmp_path / "checkpoints" / "step_4").values()) == [1, 2, 2, 2]


def test_a_folder_that_was_copied_or_lost_is_written_whole_again(tmp_path: Path):
    buffer = replayed(15)
    (tmp_path / "a").mkdir()
    buffer.save(tmp_path / "a")
    shutil.rmtree(tmp_path / "a")
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "b").mkdir()
    buffer.save(tmp_path / "far" / "b")
    assert contents(ReplayBuffer(**OPTIONS).load(tmp_path / "far" / "b")) == contents(replayed(15))
    shutil.copytree(tmp_path / "far" / "b", tmp_path / "c")
    copied = ReplayBuffer(**OPTIONS).load(tmp_path / "c")
    shutil.rmtree(tmp_path / "c")
    (tmp_path / "d").mkdir()
    for group in islice(groups(), 15, 22):
        copied.add(group)
    copied.save(tmp_path / "d")
    assert contents(ReplayBuffer(**OPTIONS).load(tmp_path / "d")) == contents(replayed(22))


def test_a_file_of_another_buffer_under_the_same_name_is_left_alone(tmp_path: Path):
    first, second = replayed(9), replayed(12)
    first.save(tmp_path)
    kept = {file.name: file.read_bytes() for file in tmp_path.glob("*.parquet")}
    partial = tmp_path / "buffer.json"
    head = partial.read_text()
    second.save(tmp_path)
    assert not any((tmp_path / name).exists() for name in kept)  # replaced as a whole, never overwritten
    assert contents(ReplayBuffer(**OPTIONS).load(tmp_path)) == contents(second)
    for name, data in kept.items():
        (tmp_path / name).write_bytes(data)
    partial.write_text(head)
    assert contents(ReplayBuffer(**OPTIONS).load(tmp_path)) == contents(first)


def test_files_stay_few_over_many_saves_and_none_is_left_behind(tmp_path: Path):
    buffer, source = ReplayBuffer(**OPTIONS), groups()
    most = 0
    for number in range(40):
        for group in islice(source, 1 + number % 3):
            buffer.add(group)
        buffer.save(tmp_path)
        most = max(most, len(list(tmp_path.iterdir())))
    assert most < 40
    named = json.loads((tmp_path / "buffer.json").read_text())
    names = {"buffer.json", named["index"], named["tally"], *(p[-1] for p in named["prompts"]),
             *(t[-1] for t in named["trajectories"])}
    assert {file.name for file in tmp_path.iterdir()} == names
    held = sum(pq.ParquetFile(tmp_path / t[-1]).metadata.num_rows for t in named["trajectories"])
    assert len(buffer) <= held <= 4 * len(buffer)
    assert contents(ReplayBuffer(**OPTIONS).load(tmp_path)) == contents(buffer)


def test_segments_are_rewritten_before_a_third_of_them_is_dead(monkeypatch):
    monkeypatch.setattr(segments, "MOST_TOKENS", 64)
    buffer = ReplayBuffer(capacity=100, capacity_per_prompt=100, eviction="lowest_reward", dedup="none")
    for group in islice(groups(), 400):
        buffer.add(group)
    storage = buffer.storage
    assert len(buffer) == 100
    assert len(storage.rows) <= 104
    assert sum(s.live for s in storage.segments.values()) == 100
    assert sum(s.tokens for s in storage.segments.values() if not s.open) <= storage.tokens / 0.75 + 1
    assert contents(buffer) == contents(buffer)


# ---- what is in them ---------------------------------------------------------------------------------


def test_the_files_are_plain_parquet_that_joins_by_number_and_pool(tmp_path: Path):
    buffer = replayed(11)
    buffer.sample(4, 2, version=2, rng=np.random.default_rng(3))
    buffer.save(tmp_path)
    head = json.loads((tmp_path / "buffer.json").read_text())
    index = pq.read_table(tmp_path / head["index"]).to_pylist()
    files = [pq.read_table(tmp_path / name) for _, name in head["trajectories"]]
    rows = {row["number"]: row for table in files for row in table.to_pylist()}
    prompts = {p["pool"]: p for *_, name in head["prompts"] for p in pq.read_table(tmp_path / name).to_pylist()}
    assert [row["number"] for row in index] == [e.number for _, e in buffer.entries()]
    for alive, (prompt, entry) in zip(index, buffer.entries(), strict=True):
        row, trajectory = rows[alive["number"]], entry.trajectory
        assert row["tokens"] == list(trajectory.completion.tokens)
        assert (row["reward"], row["version"]) == (trajectory.reward, trajectory.completion.version)
        assert json.loads(prompts[row["pool"]]["id"]) == prompt.id
        assert alive["uses"] == entry.uses
        assert row["finish"] == "stop"


def test_every_field_survives_to_the_bit(tmp_path: Path):
    completion = Completion(
        tokens=(4, 7, 2), text="naïve 汉字", logps=(-0.1, -0.2, -1e-300), version=3, finish="length",
        behaviour_logps=(-1.1, -1.2, -1.3), token_versions=(4, 3, 5),
    )
    whole = Trajectory(prompt_id="p", completion=completion, reward=0.1, ref_logp=-1.1, ref_version=6,
                       reward_parts={"a": 0.25, "b": 1 / 3})
    buffer = ReplayBuffer()
    buffer.add(Group(prompt=a_prompt("p", columns={"gold": [1, None]}), trajectories=(whole, a_trajectory("p"))))
    assert [e.trajectory for _, e in buffer.entries()] == [whole, a_trajectory("p")]
    buffer.save(tmp_path)
    loaded = ReplayBuffer().load(tmp_path)
    assert contents(loaded) == contents(buffer)
    assert next(loaded.entries())[0].columns == {"gold": [1, None]}


def test_sums_of_log_probs_survive(tmp_path: Path):
    buffer = ReplayBuffer(keep_logps=False)
    buffer.add(a_group("p", [((5, 6, 2), 0.3), ((7, 2), 0.4)]))
    buffer.save(tmp_path)
    assert contents(ReplayBuffer(keep_logps=False).load(tmp_path)) == contents(buffer)


def test_an_empty_buffer_survives(tmp_path: Path):
    ReplayBuffer().save(tmp_path)
    loaded = ReplayBuffer().load(tmp_path)
    assert len(loaded) == 0
    loaded.add(a_group("p", [((5, 2), 0.3)]))
    assert len(loaded) == 1


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path):
    replayed(6).save(tmp_path)
    head = json.loads((tmp_path / "buffer.json").read_text())
    (tmp_path / "buffer.json").write_text(json.dumps({**head, "trajectories": []}))
    with pytest.raises(ValueError, match="the index names trajectories that no file holds"):
        ReplayBuffer(**OPTIONS).load(tmp_path)


@settings(max_examples=9, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 6), min_size=2, max_size=9), st.sampled_from(["oldest", "lowest_reward", "most_used"]),
       st.sampled_from(["exact", "near", "none"]), st.integers(0, 9))
def test_a_resumed_buffer_goes_on_to_the_bit_under_every_option(tmp_path_factory, pieces, eviction, dedup, seed):
    mix = {"recent": 1.0, "reward": 1.0, "uniform": 1.0, "advantage": 1.0, "novelty": 1.0}
    options = {**OPTIONS, "mix": mix, "eviction": eviction, "dedup": dedup, "max_uses": 4, "max_age": 5}
    kept, source = ReplayBuffer(**options), groups()
    dice, again = np.random.default_rng(seed), np.random.default_rng(seed)
    other = ReplayBuffer(**options)
    for step, piece in enumerate(pieces):
        for group in islice(source, piece):
            kept.add(group)
            other.add(group)
        version = step
        if len(kept.storage.ready_for(3)):
            draws = kept.sample(5, 3, version=version, rng=dice)
            assert draws == other.sample(5, 3, version=version, rng=again)
        folder = tmp_path_factory.mktemp("saved")
        other.save(folder)
        other = ReplayBuffer(**options).load(folder)
        assert contents(other) == contents(kept)
        assert (other.ledger(), other.consumed) == (kept.ledger(), kept.consumed)
        assert str(other.fairness()) == str(kept.fairness())
        assert other.storage.bytes == kept.storage.bytes


# ---- for people --------------------------------------------------------------------------------------


def test_the_highest_come_first_and_only_of_the_prompt_that_was_asked_for():
    buffer = ReplayBuffer(recent_age=9, mix={"uniform": 1.0})
    buffer.add(a_group("p", [((1, 2), 0.5), ((2, 2), 0.9)], version=3))
    buffer.add(a_group("q", [((3, 2), 0.7)], version=1))
    buffer.sample(1, 2, version=3, rng=np.random.default_rng(1))

    def shown(**asked: Any) -> list[int]:
        return [entry.number for _, entry in ordered(buffer, 2, **asked)]

    assert shown() == [2, 1]
    assert shown(top="reward") == [1, 2]
    assert shown(top="age") == [2, 1]  # of equals, the newer
    assert shown(top="used") == [1, 0]
    assert shown(prompt="p") == [1, 0]
    assert shown(prompt="nobody") == []


def test_an_export_holds_the_rows_that_json_lines_hold(tmp_path: Path):
    buffer = replayed(9)
    write_parquet(buffer, tmp_path / "out.parquet")
    table = pq.read_table(tmp_path / "out.parquet")
    rows = [{**row, "reward_parts": json.loads(row["reward_parts"])} for row in table.to_pylist()]
    assert rows == list(rows_of(buffer))
    with pytest.raises(FileExistsError):
        write_parquet(buffer, tmp_path / "out.parquet")


# ---- killed in the middle -----------------------------------------------------------------------------

CHILD = """
import sys
sys.path[:0] = sys.argv[2:]
from itertools import islice
from pathlib import Path
from test_buffer_files import OPTIONS, ReplayBuffer, groups
path = Path(sys.argv[1])
buffer = ReplayBuffer(**OPTIONS)
done = 0
if (path / "buffer.json").exists():
    buffer.load(path)
    done = buffer.inserted // 3
source = groups()
for _ in islice(source, done):
    pass
print("ready", flush=True)
while True:
    for group in islice(source, 4):
        buffer.add(group)
    print("saving", flush=True)
    buffer.save(path)
    print(buffer.inserted, flush=True)
"""


def killed(path: Path, dice: random.Random) -> int:
    """Trajectories inserted before the last save that a child acknowledged before it was killed in one."""
    search = [str(Path(__file__).parent), *sys.path]
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(path), *search], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    acknowledged, lines, took, since, saves = 0, iter(child.stdout), 0.05, 0.0, dice.randrange(2, 6)
    while saves:
        line = next(lines).strip()
        if line.isdigit():
            acknowledged, took = int(line), time.perf_counter() - since
        saves -= line == "saving"
        since = time.perf_counter()
    time.sleep(dice.random() * took)  # a moment within the save
    child.kill()
    rest = child.stdout.read().split()
    child.wait()
    child.stdout.close()
    return max([acknowledged, *(int(word) for word in rest if word.isdigit())])


def survives_kills(path: Path, times: int) -> None:
    dice = random.Random(times)
    for _ in range(times):
        acknowledged = killed(path, dice)
        loaded = ReplayBuffer(**OPTIONS).load(path)
        assert loaded.inserted >= acknowledged > 0
        assert loaded.inserted % 12 == 0
        expected = replayed(loaded.inserted // 3)
        assert contents(loaded) == contents(expected)
        assert loaded.ledger() == expected.ledger()


def test_a_kill_in_the_middle_of_a_save_loses_nothing_that_was_saved(tmp_path: Path):
    survives_kills(tmp_path, 2)


@pytest.mark.slow
def test_fifty_kills_lose_nothing_that_was_saved(tmp_path: Path):
    survives_kills(tmp_path, 50)
