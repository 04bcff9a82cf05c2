"""The TL;DR format: a forum post as a prompt that asks for its summary, shortened until it fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

COLUMNS: tuple[str, ...] = ("subreddit", "title", "post")
"""Columns of a row in this format."""


def tldr_prompt(row: Mapping[str, Any], count: Callable[[str], int], most_tokens: int) -> str:
    """The prompt of a post, at most `most_tokens` by `count`.

    Of a post that is too long the last paragraph goes, with the line break before it, again and again; where no line
    break is left, its last character. (OpenAI's summarize-from-feedback rule, which the paper's TL;DR data follow.)

    Raises:
        ValueError: subreddit and title alone are too long.
    """
    for post in shortened(str(row["post"])):
        text = f"SUBREDDIT: r/{row['subreddit']}\n\nTITLE: {row['title']}\n\nPOST: {post}\n\nTL;DR:"
        tokens = count(text)
        if tokens <= most_tokens:
            return text
    raise ValueError(f"subreddit and title alone take {tokens} tokens, more than {most_tokens}.")


def shortened(post: str) -> Iterator[str]:
    """The post, and what is left of it after each cut, down to nothing."""
    yield post
    while post:
        line_break = post.rfind("\n")
        post = post[:line_break] if line_break >= 0 else post[:-1]
        yield post


def tldr_reference(summary: str) -> str:
    """A human's summary as a completion: with a space before it, as the paper's; the stop token is the policy's own."""
    return f" {summary}"
