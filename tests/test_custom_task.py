"""Prompts from a user's file: tolerant of what editors do, exact about what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tba.settings import SettingsError, TaskSettings
from tba.tasks.custom import Custom, read_rows


def encode(text: object) -> tuple[int, ...]:
    return tuple(range(len(str(text).split()) + 1))


def custom(path: Path, **more: object) -> Custom:
    settings = TaskSettings(name="custom", path=str(path), reward="my_rewards:score", **{"held_out": 1, **more})
    return Custom(settings, max_new_tokens=4, score_limit_s=1.0)


def test_byte_order_mark_blank_lines_and_carriage_returns_are_tolerated(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'\xef\xbb\xbf\n{"prompt":"a","answer":"1"}\n   \n{"prompt":"b","answer":"2"}\r\n\n')
    assert [row for _, row in read_rows(file, "prompt")] == [
        {"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}
    ]


def test_a_bad_line_is_named_with_blank_lines_counted(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('\n{"prompt":"a"}\n   \n{"prompt": \n')
    with pytest.raises(SettingsError, match=r"rows\.jsonl:4 \(line 4\) is not JSON"):
        read_rows(file, "prompt")


@pytest.mark.parametrize("line", ['{"prompt": "\\ud800"}', '{"prompt": "a", "x": ["\\udfff"]}', "[" * 100_000])
def test_what_is_no_text_or_too_deep_is_a_bad_line(line: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt":"a"}\n' + line + "\n")
    with pytest.raises(SettingsError, match=r"rows\.jsonl:2 \(line 2\) "):
        read_rows(file, "prompt")


def test_a_missing_column_is_named_with_those_that_are_there(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"question": "2+2?", "answer": "4"}\n')
    with pytest.raises(SettingsError) as caught:
        read_rows(file, "prompt")
    for word in ("prompt", "question", "answer", "line 1", "prompt_column"):
        assert word in str(caught.value)


def test_too_long_a_prompt_is_refused_with_its_place_length_and_limit(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt":"short"}\n{"prompt":"one two three four five six seven eight nine"}\n{"prompt":"x"}\n')
    with pytest.raises(SettingsError, match=r"rows\.jsonl:2: the prompt has 10 tokens.*= 8"):
        custom(file, max_prompt_tokens=8).prompts(encode)


def test_other_columns_travel_with_the_prompt_and_the_last_rows_are_held_out(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "2+2?", "answer": "4", "level": 3}\n{"prompt": [{"role": "user", "content": "hi"}]}\n')
    task = custom(file)
    (prompt,), (held,) = task.prompts(encode), task.held_out(encode)
    assert dict(prompt.columns) == {"answer": "4", "level": 3}
    assert held.text == "user: hi"
    assert prompt.id != held.id


@pytest.mark.parametrize("row", ['{"prompt": 3}', '{"prompt": ""}', '{"prompt": [{"role": "user"}]}', "[1]"])
def test_a_prompt_of_another_shape_is_refused(tmp_path: Path, row: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(row + "\n")
    with pytest.raises(SettingsError, match="line 1"):
        read_rows(file, "prompt")
