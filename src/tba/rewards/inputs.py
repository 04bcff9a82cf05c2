"""What a reward model reads: prompt and completion by its own tokenizer and template."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tba.records import Prompt
from tba.rewards.shapes import MESSAGES

Format = Literal["text", "chat", "pair", "completion"]


class TooLong(ValueError):
    """A completion that does not fit a reward model, even with nothing of its prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """One row of a reward model's batch."""

    ids: tuple[int, ...]
    segments: tuple[int, ...] = ()
    """Segment of each id, for models that tell the two texts of a pair apart; else empty."""


class Encoder:
    """Prompt and completion to a reward model's ids; the completion is never cut.

    Completions are untrusted: what reads like a special token of this tokenizer is taken out of them, so that no
    completion can end its own turn or start another.
    """

    def __init__(self, tokenizer: Any, *, reads: Format, at_eos: bool, max_tokens: int) -> None:
        """`at_eos` appends the tokenizer's EOS where a completion stopped by itself, unless it is there already."""
        self.tokenizer, self.reads, self.at_eos, self.max_tokens = tokenizer, reads, at_eos, max_tokens
        self.cut = 0
        """Inputs whose prompt was cut, so far."""
        added = tokenizer.added_tokens_decoder.values()
        self._special = {*tokenizer.all_special_tokens, *(t.content for t in added if t.special)} - {""}

    def encode(self, messages: Sequence[dict[str, str]], text: str, *, stopped: bool = True) -> Input:
        """Ids of what `messages_of` a prompt gives and a completion's text: at most `max_tokens`.

        Of a prompt that is too long its left goes, as little as will do.

        Raises:
            TooLong: the completion alone is longer.
        """
        text = without(whole_characters(text), self._special)
        made = self._render(messages, text, stopped)
        if len(made.ids) <= self.max_tokens:
            return made
        characters = sum(len(message["content"]) for message in messages)

        def fits(cut: int) -> bool:
            return len(self._render(cut_left(messages, cut), text, stopped).ids) <= self.max_tokens

        cut = bisect_left(range(characters + 1), True, key=fits)
        if cut > characters:
            least = len(self._render(cut_left(messages, characters), text, stopped).ids)
            raise TooLong(f"the completion takes {least} tokens of the reward model's {self.max_tokens}")
        self.cut += 1
        return self._render(cut_left(messages, cut), text, stopped)

    def _render(self, messages: Sequence[dict[str, str]], text: str, stopped: bool) -> Input:
        tokenizer, asked = self.tokenizer, messages[-1]["content"] if len(messages) == 1 else plain(messages)
        segments: Sequence[int] = ()
        if self.reads == "chat":
            answered = [*messages, {"role": "assistant", "content": text}]
            rendered = tokenizer.apply_chat_template(answered, tokenize=False)
            ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
        elif self.reads == "pair":
            made = tokenizer(asked, text)
            ids, segments = made["input_ids"], made.get("token_type_ids", ())
        else:
            ids = tokenizer(asked + text if self.reads == "text" else text)["input_ids"]
        if self.at_eos and stopped and ids[-1:] != [tokenizer.eos_token_id]:
            ids, segments = [*ids, tokenizer.eos_token_id], [*segments, *segments[-1:]]
        return Input(ids=tuple(ids), segments=tuple(segments))


def messages_of(prompt: Prompt) -> list[dict[str, str]]:
    """The prompt as chat messages: its column of them, else its text as the user's one message."""
    given: Any = prompt.columns.get(MESSAGES) or [{"role": "user", "content": prompt.text}]
    return [{"role": m["role"], "content": whole_characters(m["content"])} for m in given]


def plain(messages: Sequence[dict[str, str]]) -> str:
    """Messages as one text, for a model without chat template."""
    return "".join(f"{m['role']}: {m['content']}\n" for m in messages)


def cut_left(messages: Sequence[dict[str, str]], characters: int) -> list[dict[str, str]]:
    """The messages without the first `characters` of their contents; emptied ones keep their turn."""
    left = []
    for message in messages:
        gone = min(characters, len(message["content"]))
        characters -= gone
        left.append({**message, "content": message["content"][gone:]})
    return left


def without(text: str, words: Iterable[str]) -> str:
    """`text` with every occurrence of `words` taken out, those too that only their removal makes."""
    before = None
    while before != text:
        before = text
        for word in words:
            text = text.replace(word, "")
    return text


def whole_characters(text: str) -> str:
    """`text` with halves of surrogate pairs, which no tokenizer reads, as question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")
