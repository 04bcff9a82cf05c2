"""Sets up the movie experiment: snippets with human ratings, a language model, a noisy proxy reward model.

The snippets come in the source archive of the package vaderSentiment, which pip fetches from whatever index it is
configured with. Nothing of it is installed, and nothing of the texts is part of this project. What is made lies in
one folder: data files first, then the runs `language` (tba sft) and `proxy` (tba reward-model).

    python benchmarks/movies.py my_movies
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packages import Package, fetched, member
from tba.smollm import cache_root

PACKAGE = Package(
    pin="vaderSentiment==3.3.2", archive="vaderSentiment-3.3.2.tar.gz",
    sha256="5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9",
)
"""Its source archive."""
INNER = "vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz"
TEXTS = "hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt"
RATINGS = "hutto_ICWSM_2014/movieReviewSnippets_anonDataRatings.txt"

PARTS = {"learn": 0.55, "pairs_held_out": 0.05, "gold": 0.3, "prompts": 0.05, "held_out": 0.05}
"""Share of the snippets in each part. `learn`: language model and proxy; `pairs_held_out`: what the proxy is measured
on; `gold`: the gold scorer alone; `prompts`: what the policy is asked; `held_out`: what it is evaluated on."""
WORDS = (8, 32)
"""Fewest and most words of a snippet that is used."""
PROMPT_WORDS = 4
"""Words of a snippet that are given; its continuation is what a human wrote."""
LANGUAGE_WORDS = (1, PROMPT_WORDS)
"""Words given where the language model learns: each snippet once for each number."""
PAIRS, PAIRS_HELD_OUT = 16000, 2000
MIN_GAP = 1.0
"""Smallest difference of the mean ratings of a held-out pair's snippets, on the scale from -4 to 4."""
TURNED = 0.15
"""Share of the training pairs whose order is turned round on top of what single people's ratings do."""
RECIPES = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Snippet:
    """A sentence or two of a film review, with what people thought of its tone."""

    name: str
    """Number in the source file."""
    text: str
    ratings: tuple[int, ...]
    """From -4, extremely negative, to 4, by one person each."""

    @property
    def rating(self) -> float:
        """Mean over people."""
        return math.fsum(self.ratings) / len(self.ratings)


# ---- snippets -----------------------------------------------------------------------------------------


def read_snippets(texts: str, ratings: str) -> list[Snippet]:
    """Snippets of the two files: number, mean and text; number, mean, deviation and a list of ratings.

    SystemExit with the number of the first line that is neither, or whose mean is not that of its ratings.
    """
    by_name: dict[str, tuple[int, ...]] = {}
    for number, line in enumerate(texts_of(ratings), 1):
        name, _, _, listed = fields(line, 4, f"ratings line {number}")
        if not re.fullmatch(r"\[-?\d( *, *-?\d)*\]", listed):
            raise SystemExit(f"ratings line {number}: {listed[:60]!r} is no list of ratings.")
        by_name[name] = tuple(json.loads(listed))
    found = []
    for number, line in enumerate(texts_of(texts), 1):
        name, mean, text = fields(line, 3, f"texts line {number}")
        made = Snippet(name=name, text=" ".join(text.split()), ratings=by_name.get(name, ()))
        if not made.ratings or abs(made.rating - float(mean)) > 1e-6:
            raise SystemExit(f"texts line {number}: the mean {mean} is not that of the ratings {made.ratings}.")
        found.append(made)
    return found


def texts_of(text: str) -> list[str]:
    """Lines that are not blank."""
    return [line for line in text.splitlines() if line.strip()]


def fields(line: str, wanted: int, place: str) -> list[str]:
    """Columns between tabs; SystemExit if there are not `wanted`."""
    found = line.strip().split("\t")
    if len(found) != wanted:
        raise SystemExit(f"{place} has {len(found)} columns and not {wanted}: {line[:60]!r}.")
    return found


def bare(text: str) -> str:
    """What is the same of two snippets that differ in case, spaces and punctuation."""
    return re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()


def part_of(text: str) -> str:
    """The part of a snippet: a function of its bare text alone, so that no two parts share one."""
    at = int.from_bytes(hashlib.sha256(bare(text).encode()).digest()[:6], "big") / 2**48
    for name, share in PARTS.items():
        at -= share
        if at < 0:
            return name
    return next(iter(PARTS))


def parted(snippets: Sequence[Snippet]) -> dict[str, list[Snippet]]:
    """Snippets of a fit length by part; of those that read the same, the first."""
    found: dict[str, list[Snippet]] = {name: [] for name in PARTS}
    seen: set[str] = set()
    for snippet in snippets:
        if WORDS[0] <= len(snippet.text.split()) <= WORDS[1] and bare(snippet.text) not in seen:
            seen.add(bare(snippet.text))
            found[part_of(snippet.text)].append(snippet)
    return found


# ---- data files ---------------------------------------------------------------------------------------


def cut(snippet: Snippet, words: int) -> dict[str, str]:
    """A row with the first `words` as prompt, and the rest, from its space on, as a human's completion."""
    parts = snippet.text.split(" ")
    return {"id": f"{snippet.name}-{words}", "prompt": " ".join(parts[:words]),
            "human": " " + " ".join(parts[words:])}


def noisy_pairs(snippets: Sequence[Snippet], number: int, rng: random.Random) -> Iterator[dict[str, Any]]:
    """Pairs as two people would order them who have read one snippet each: one rating drawn of each, ties left out.

    Of these, TURNED are turned round. `agrees` says whether the means are ordered likewise.
    """
    for _ in range(number):
        given = 0
        while given == 0:
            first, second = rng.sample(snippets, 2)
            given = rng.choice(first.ratings) - rng.choice(second.ratings)
        better, worse = (first, second) if (given > 0) == (rng.random() >= TURNED) else (second, first)
        yield {"prompt": "", "chosen": better.text, "rejected": worse.text, "agrees": better.rating > worse.rating}


def clean_pairs(snippets: Sequence[Snippet], number: int, rng: random.Random) -> Iterator[dict[str, Any]]:
    """Pairs as all people together order them, at least MIN_GAP apart."""
    left = number
    while left:
        worse, better = sorted(rng.sample(snippets, 2), key=lambda snippet: snippet.rating)
        if better.rating - worse.rating >= MIN_GAP:
            left -= 1
            yield {"prompt": "", "chosen": better.text, "rejected": worse.text, "agrees": True}


def files(parts: Mapping[str, Sequence[Snippet]], seed: int = 0) -> dict[str, list[dict[str, Any]]]:
    """Rows of every data file by its name."""
    rng = random.Random(f"movies {seed}")
    return {
        "language.jsonl": [cut(s, words) for words in LANGUAGE_WORDS for s in parts["learn"]],
        "pairs.jsonl": list(noisy_pairs(parts["learn"], PAIRS, rng)),
        "pairs_held_out.jsonl": list(clean_pairs(parts["pairs_held_out"], PAIRS_HELD_OUT, rng)),
        "gold.jsonl": [{"text": s.text, "rating": s.rating} for s in parts["gold"]],
        "prompts.jsonl": [cut(s, PROMPT_WORDS) for s in parts["prompts"]],
        "held_out.jsonl": [{**cut(s, PROMPT_WORDS), "rating": s.rating} for s in parts["held_out"]],
    }


def write(folder: Path, rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Writes each file as JSON lines."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, listed in rows.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in listed), "utf-8")


# ---- models -------------------------------------------------------------------------------------------


def commands(folder: Path, recipes: Path = RECIPES) -> dict[str, list[str]]:
    """What follows `tba`, by the run in `folder` that it makes."""
    return {
        "language": ["sft", str(recipes / "movies_sft.yaml"), f"task.path={folder / 'language.jsonl'}",
                     f"task.held_out_path={folder / 'held_out.jsonl'}"],
        "proxy": ["reward-model", str(recipes / "movies_proxy.yaml"), f"reward_model.path={folder / 'pairs.jsonl'}",
                  f"reward_model.held_out_path={folder / 'pairs_held_out.jsonl'}",
                  f"reward_model.model={folder / 'language' / 'final'}"],
    }


def make_models(folder: Path) -> None:
    """Runs what is not there yet; SystemExit if one of them fails."""
    for name, words in commands(folder).items():
        if (folder / name / "final" / "config.json").is_file():
            continue
        command = [sys.executable, "-m", "tba", *words, "--run", str(folder / name)]
        if code := subprocess.run(command, check=False).returncode:
            raise SystemExit(f"{' '.join(command)} ended with {code}; remove {folder / name}, and try again.")


def main(arguments: Sequence[str] | None = None) -> None:
    """Fetches, writes data files, and trains the two models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", action="store_true", help="data files alone, no models")
    chosen = parser.parse_args(arguments)
    inner = member(fetched(PACKAGE, cache_root(os.environ) / "movies"), INNER)
    snippets = read_snippets(member(inner, TEXTS).decode("utf-8"), member(inner, RATINGS).decode("utf-8"))
    parts = parted(snippets)
    rows = files(parts)
    write(chosen.folder, rows)
    agree = [row["agrees"] for row in rows["pairs.jsonl"]]
    print(f"{len(snippets)} snippets: {', '.join(f'{name} {len(part)}' for name, part in parts.items())}; of "
          f"{len(agree)} noisy pairs {sum(agree) / len(agree):.3f} agree with the means", flush=True)
    if not chosen.data:
        make_models(chosen.folder)


if __name__ == "__main__":
    main()
