"""How a problem is put to the model: the paper's prompt, VinePPO's, a chat turn, a Jinja text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tba.settings import SettingsError, TaskSettings
from tba.tasks.maths_rows import Problem

Asked = str | list[dict[str, str]]
"""A prompt as text, or as chat messages."""

PROMPTS = {
    "paper": "[MATH TASK] Problem:\n{{ question }}\n\nSolution:\n",
    "vineppo": "[MATH_TASK] Problem:\n{{ question }}\n\nSolution:",
    "template": "{{ question }}\n",
    "chat": "{{ question }}",
}
"""Template of each format, or its default: the official TBA code's, and that of VinePPO's supervised stage, which
made the start model of both and differs from it in two characters."""


class Asker:
    """Renders problems as `task.format` says."""

    def __init__(self, settings: TaskSettings) -> None:
        """Raises SettingsError: `task.template` is no Jinja text, or asks for what there is not."""
        import jinja2
        from jinja2.sandbox import SandboxedEnvironment

        text = settings.template if settings.template is not None else PROMPTS[settings.format]
        self._format = settings.format
        try:
            environment = SandboxedEnvironment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
            self._template = environment.from_string(text)
            rendered = self._template.render(question="7+5?", level="1")
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise SettingsError([
                f"task.template = {text[:80]!r} cannot be rendered: {error}; it may use question and level."
            ]) from error
        if "7+5?" not in rendered:
            raise SettingsError([f"task.template = {text[:80]!r} leaves the question out; write {{{{ question }}}}."])

    def ask(self, problem: Problem, shots: Sequence[Problem] = ()) -> Asked:
        """The prompt of a problem, with `shots` solved before it."""
        if self._format == "chat":
            turns: list[dict[str, str]] = []
            for shot in shots:
                turns += [_turn("user", self._render(shot)), _turn("assistant", shot.solution)]
            return [*turns, _turn("user", self._render(problem))]
        solved = [f"{self._render(shot)}{self.answer(shot.solution).rstrip()}\n\n" for shot in shots]
        return "".join(solved) + self._render(problem)

    def answer(self, text: str) -> str:
        """`text` as the completion that the format trains for: VinePPO's begins and ends with a line break."""
        return f"\n{text}\n" if self._format == "vineppo" else text

    def _render(self, problem: Problem) -> str:
        return self._template.render(question=problem.question, level=problem.level or "")


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def as_text(asked: Any) -> str:
    """A prompt as text for people."""
    return asked if isinstance(asked, str) else "\n".join(f"{m['role']}: {m['content']}" for m in asked)
