"""The replay buffer's cost: per draw and per addition as it grows, per second, in memory, and on disk.

Every ratio is of two measurements of one run, interleaved; no model is loaded.

    python benchmarks/buffer.py --json buffer.json
    python benchmarks/buffer.py --large 10000000 --parts scaling
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from tba.buffer.memory import ReplayBuffer
from tba.buffer.options import Options
from tba.records import Completion, Group, Prompt, Trajectory

SIZE = 8
"""Trajectories of a group."""
TOKENS = 128
"""Of each completion, where throughput, memory and files are measured."""
SHORT = 8
"""Tokens of each completion where only the number of trajectories matters."""
BARS = {"cost ratio": 3.0, "per second": 20_000, "memory ratio": 1.5, "save ratio": 0.05, "pool ms": 50.0}
Figures = dict[str, float]


def groups(prompts: int, tokens: int, seed: int = 0) -> Iterator[Group]:
    """Groups of random ids for ever, one prompt after another; log-probs are float32, as engines give them."""
    rng = np.random.default_rng(seed)
    named = [Prompt(id=f"p{n}", tokens=(1, 2), text="") for n in range(prompts)]
    number = 0
    while True:
        ids = rng.integers(0, 50_000, (64, SIZE, tokens)).tolist()
        logps = rng.normal(-1.0, 0.3, (64, SIZE, tokens)).astype(np.float32).tolist()
        rewards = rng.normal(size=(64, SIZE)).tolist()
        for at in range(64):
            prompt = named[number % prompts]
            number += 1
            yield Group(prompt=prompt, trajectories=tuple(
                Trajectory(prompt_id=prompt.id, reward=rewards[at][k], ref_logp=-100.0, completion=Completion(
                    tokens=tuple(ids[at][k]), text="", logps=tuple(logps[at][k]), version=0, finish="stop"))
                for k in range(SIZE)
            ))


def timed(work: Callable[[], Any], clock: Callable[[], float] = time.process_time) -> float:
    """Seconds: of this process's processor, which others on the machine do not disturb, or of `clock`."""
    started = clock()
    work()
    return clock() - started


def filled(count: int, prompts: int, tokens: int, **changes: Any) -> tuple[ReplayBuffer, Iterator[Group]]:
    """A buffer with `count` trajectories, and where its next groups come from."""
    buffer = ReplayBuffer(Options(capacity=10**9, capacity_per_prompt=10**9, recent_age=1), **changes)
    source = groups(prompts, tokens)
    for group in islice(source, count // SIZE):
        buffer.add(group)
    return buffer, source


def scaling(small: int, large: int, samplers: tuple[str, ...]) -> Figures:
    """Cost per trajectory at `large` over that at `small`: medians of 9 interleaved pieces."""
    found: Figures = {}
    rng = np.random.default_rng(1)
    for shape, per_prompt in (("one prompt", 0), ("10 per prompt", 10)):
        held = {}
        for count in (small, large):
            prompts = max(1, count // per_prompt) if per_prompt else 1
            held[count] = filled(count, prompts, SHORT, mix=dict.fromkeys(samplers, 1.0))
        added: dict[int, list[float]] = {small: [], large: []}
        for _ in range(9):
            for count, (buffer, source) in held.items():
                piece = list(islice(source, 64))
                added[count].append(timed(lambda b=buffer, p=piece: [b.add(g) for g in p]) / (64 * SIZE))
        report(found, f"add, {shape}", added, small, large)
        for sampler in samplers:
            drawn: dict[int, list[float]] = {small: [], large: []}
            for buffer, _ in held.values():
                buffer.options = buffer.options.changed(mix={sampler: 1.0})
                buffer.sample(1, SIZE, version=0, rng=rng)
            for _ in range(9):
                for count, (buffer, _) in held.items():
                    seconds = timed(lambda b=buffer: b.sample(64, SIZE, version=0, rng=rng))
                    drawn[count].append(seconds / (64 * SIZE))
            report(found, f"draw {sampler}, {shape}", drawn, small, large)
        del held
        gc.collect()
    return found


def report(found: Figures, name: str, seconds: dict[int, list[float]], small: int, large: int) -> None:
    """Notes microseconds per trajectory at both sizes, and their ratio."""
    low, high = (1e6 * statistics.median(seconds[count]) for count in (small, large))
    found[f"{name}: us at {small:.0e}"], found[f"{name}: us at {large:.0e}"] = low, high
    found[f"{name}: cost ratio"] = high / low


def throughput() -> Figures:
    """Trajectories per second with groups of 8 x 128 tokens, each the median of 5 pieces; nothing beside it."""
    return throughput_of("", {}) | throughput_of(", without log-probs", {"keep_logps": False})


def throughput_of(name: str, changes: dict[str, Any]) -> Figures:
    """Of a buffer with other options."""
    found: Figures = {}
    rng = np.random.default_rng(2)
    mix = {"recent": 0.5, "reward": 0.25, "uniform": 0.25}
    buffer, source = filled(40_000, 500, TOKENS, mix=mix, **changes)

    def adding() -> float:
        piece = list(islice(source, 250))
        return 250 * SIZE / timed(lambda: [buffer.add(group) for group in piece])

    def drawing() -> float:
        return 256 * SIZE / timed(lambda: buffer.sample(256, SIZE, version=0, rng=rng))

    found[f"added{name}: per second"] = statistics.median(adding() for _ in range(5))
    buffer.options = buffer.options.changed(capacity=len(buffer))
    found[f"added to a full buffer{name}: per second"] = statistics.median(adding() for _ in range(5))
    for sampler in (*mix, "mixture"):
        buffer.options = buffer.options.changed(mix=mix if sampler == "mixture" else {sampler: 1.0})
        found[f"drawn by {sampler}{name}: per second"] = statistics.median(drawing() for _ in range(5))
    return found


def resident() -> int:
    """Bytes of this process in memory, after giving back what is free."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def memory_here(count: int, keep_logps: bool) -> Figures:
    """Bytes per trajectory over those of its ids (int32) and 8 floats (float32), by the process's growth."""
    warm, source = filled(4096, 500, TOKENS, keep_logps=keep_logps)
    del warm
    before = resident()
    buffer = ReplayBuffer(Options(capacity=10**9, capacity_per_prompt=10**9), keep_logps=keep_logps)
    for group in islice(source, count // SIZE):
        buffer.add(group)
    del group
    each = (resident() - before) / len(buffer)
    return {"bytes": each, "memory ratio": each / (4 * TOKENS + 8 * 4)}


def memory(count: int) -> Figures:
    """`memory_here` in a process of its own, with and without the log-probs of each token."""
    found: Figures = {}
    for name, flag in (("ids and scores", "0"), ("with log-probs", "1")):
        command = [sys.executable, __file__, "--memory-here", flag, "--memory-count", str(count)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found |= {f"{name}: {key}": value for key, value in json.loads(done.stdout).items()}
    del found["with log-probs: memory ratio"]
    found["with log-probs: over ids, log-probs and 8 floats"] = found["with log-probs: bytes"] / (8 * TOKENS + 32)
    return found


def files(count: int) -> Figures:
    """Seconds of a full save, of one after 1 % changed, and of loading; `count` trajectories of 128 tokens."""
    rng = np.random.default_rng(3)
    buffer, source = filled(count, max(1, count // 50), TOKENS, keep_logps=False)
    buffer.options = buffer.options.changed(capacity=len(buffer))
    with tempfile.TemporaryDirectory() as folder:
        places = [Path(folder) / f"save_{n}" for n in range(6)]
        for place in places:
            place.mkdir()
        full = timed(lambda: buffer.save(places[0]), time.perf_counter)
        size = sum(f.stat().st_size for f in places[0].iterdir())
        later, written = [], []
        for place in places[1:]:
            for group in islice(source, count // 100 // SIZE):
                buffer.add(group)
            buffer.sample(max(1, count // 100 // SIZE), SIZE, version=0, rng=rng)
            later.append(timed(lambda p=place: buffer.save(p), time.perf_counter))
            written.append(sum(f.stat().st_size for f in place.iterdir() if f.stat().st_nlink == 1))
        load = timed(lambda: ReplayBuffer(buffer.options).load(places[-1]), time.perf_counter)
    return {
        "full save: s": full, "full save: MiB": size / 2**20, "1 % changed: s": statistics.median(later),
        "1 % changed: MiB": statistics.median(written) / 2**20,
        "1 % changed: save ratio": statistics.median(later) / full, "load: s": load,
    }


ATTACKS, ATTACK_TOKENS, DELIVERED, DRAWN = 150_000, 21, 128, (8, 16)
"""Of an audit: pool of its one prompt, tokens of an attack, attacks of a delivery, groups of a batch and their size."""
ALIKE = 0.3
"""Share of the attacks that are an earlier one with a token or two changed."""


def attacks(rng: np.random.Generator) -> Iterator[Group]:
    """Deliveries of attacks for one prompt, for ever, some of them nearly like one of the 2,000 before."""
    prompt, earlier = Prompt(id="audit", tokens=(1, 2), text=""), list[list[int]]()
    while True:
        made = rng.integers(0, 50_000, (DELIVERED, ATTACK_TOKENS)).tolist()
        for attack in made:
            if earlier and rng.random() < ALIKE:
                attack[:] = earlier[int(rng.integers(len(earlier)))]
                for place in rng.integers(ATTACK_TOKENS, size=int(rng.integers(1, 3))):
                    attack[place] = int(rng.integers(50_000))
        earlier = (earlier + made)[-2000:]
        yield Group(prompt=prompt, trajectories=tuple(
            Trajectory(prompt_id="audit", reward=float(reward), ref_logp=-100.0, completion=Completion(
                tokens=tuple(ids), text="", logps=(-1.0,) * ATTACK_TOKENS, version=0, finish="stop"))
            for ids, reward in zip(made, rng.normal(size=DELIVERED), strict=True)
        ))


def audit(repeats: int = 200) -> Figures:
    """Milliseconds of a delivery into a full pool of one prompt and a draw after it, as an audit has them."""
    return audit_of("exact", repeats) | audit_of("near", repeats)


def audit_of(dedup: str, repeats: int) -> Figures:
    """With one way to tell copies."""
    rng = np.random.default_rng(3)
    source = attacks(rng)
    buffer = ReplayBuffer(Options(capacity=ATTACKS, capacity_per_prompt=ATTACKS, recent_age=1, dedup=dedup,
                                  mix={"recent": 0.5, "reward": 0.5}, keep_logps=False))
    while len(buffer) < ATTACKS - DELIVERED:
        buffer.add(next(source))
    gc.freeze()  # as the depot's process does
    added, drawn = [], []
    for delivery in islice(source, repeats):
        added.append(1e3 * timed(lambda d=delivery: buffer.add(d)))
        drawn.append(1e3 * timed(lambda: buffer.sample(*DRAWN, version=0, rng=rng)))
    gc.unfreeze()
    both = [one + other for one, other in zip(added, drawn, strict=True)]
    found = {f"{dedup}: attacks held": float(len(buffer)), f"{dedup}, both: pool ms": statistics.median(both)}
    for name, values in (("add", added), ("draw", drawn), ("both", both)):
        found[f"{dedup}, {name}: ms"], found[f"{dedup}, {name}: most ms"] = statistics.median(values), max(values)
    return found


def main() -> None:
    """Prints the table, says which bars are missed, and writes the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", type=int, default=10**4)
    parser.add_argument("--large", type=int, default=10**6)
    parser.add_argument("--saved", type=int, default=10**6)
    parser.add_argument("--memory-count", type=int, default=2 * 10**5)
    parser.add_argument("--memory-here", help=argparse.SUPPRESS)
    parser.add_argument("--parts", nargs="*", default=["throughput", "memory", "files", "scaling", "audit", "others"])
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    if chosen.memory_here is not None:
        print(json.dumps(memory_here(chosen.memory_count, chosen.memory_here == "1")))
        return
    measures: dict[str, Callable[[], Figures]] = {
        "throughput": throughput, "memory": lambda: memory(chosen.memory_count), "files": lambda: files(chosen.saved),
        "scaling": lambda: scaling(chosen.small, chosen.large, ("recent", "uniform", "reward")),
        "audit": audit,
        "others": lambda: scaling(chosen.small, chosen.large, ("advantage", "novelty")),
    }
    figures: dict[str, Figures] = {}
    for part in chosen.parts:
        figures[part] = measures[part]()
        for name, value in figures[part].items():
            kind = name.rpartition(": ")[2]
            bar = BARS.get(kind)
            missed = bar is not None and (value < bar if kind == "per second" else value > bar)
            note = "" if bar is None else f"  bar {bar:g}{', MISSED' if missed else ''}"
            print(f"{part:11} {name:52} {value:12.4g}{note}", flush=True)
    if chosen.json:
        chosen.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
