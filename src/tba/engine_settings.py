"""The branch of the settings tree about what samples completions."""

from __future__ import annotations

from typing import Literal

from tba.sections import PositiveInt, Section


class EngineSettings(Section):
    """What samples completions."""

    name: str = "transformers"
    """A key of ENGINES."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision in which searchers sample. In bfloat16 only the base under an adapter, which itself stays float32, and
    digests are of it. Evaluations sample in float32."""
    rows: PositiveInt | None = None
    """Completions under way at a time, at most, of `transformers`: further prompts of `search.batch_prompts` take the
    place of those that have ended, so that a long one holds up none. All at once if null."""
    adopt_every: PositiveInt | None = None
    """New tokens of a batch between two looks at the newest publication, which is adopted in the midst of the batch;
    only between batches if null. Async mode only."""
