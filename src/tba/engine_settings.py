"""The branch of the settings tree about what samples completions."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field

from tba.preference_settings import CallSettings, address_problems
from tba.sections import PositiveFloat, PositiveInt, Probability, Section


class VllmSettings(Section):
    """vllm: memory and compilation."""

    memory: Probability = 0.4
    """Share of the GPU's memory that it takes; a trainer on the same GPU needs the rest."""
    cache_gib: PositiveInt = 1
    """Without a GPU: GiB of keys and values."""
    eager: bool = True
    """Whether it computes as it reads, or compiles first: faster then, after a minute."""


class ServerSettings(CallSettings):
    """vllm_server: a server that is up already, and how it takes weights."""

    folder: str | None = None
    """Folder that the server reads too, under the same path: each version is written there, and read by it."""
    limit_s: PositiveFloat = 60.0
    """endpoint: seconds that one call may take, from connecting to the last byte."""


class EngineSettings(Section):
    """What samples completions."""

    name: str = "transformers"
    """A key of ENGINES."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision in which searchers sample; of vllm_server, that of the server. In bfloat16 transformers has only the
    base under an adapter, which itself stays float32, and digests are of it. Evaluations sample in float32."""
    rows: PositiveInt | None = None
    """Completions under way at a time, at most, of `transformers` and `vllm`: further prompts of
    `search.batch_prompts` take the place of those that have ended, so that a long one holds up none. All if null."""
    adopt_every: PositiveInt | None = None
    """New tokens of a batch between two looks at the newest publication, which is adopted in the midst of the batch;
    only between batches if null. Async mode only."""
    vllm: VllmSettings = Field(default_factory=VllmSettings)
    server: ServerSettings = Field(default_factory=ServerSettings)


def engine_problems(engine: EngineSettings, num_samples: int) -> Iterator[str]:
    """What is wrong with the branch by itself; a prompt has `num_samples` completions."""
    rows = engine.rows
    if rows is not None and engine.name in ("table", "vllm_server"):
        yield f"engine.rows = {rows} is for engine.name=transformers or vllm, not {engine.name}; leave it out."
    if rows is not None and rows < num_samples:
        yield (f"engine.rows = {rows} has no room for the {num_samples} completions of a prompt (search.num_samples); "
               f"raise it, or leave it out.")
    if engine.name == "vllm" and importlib.util.find_spec("vllm") is None:
        yield ("engine.name = vllm: vLLM is not installed here; docs/engines.md says how to, or use "
               "engine.name=transformers.")
    if engine.name == "vllm_server":
        yield from _server_problems(engine.server)


def _server_problems(server: ServerSettings) -> Iterator[str]:
    if server.endpoint is None:
        yield "engine.server.endpoint is missing: engine.name = vllm_server needs an address, http://host:port."
    else:
        yield from address_problems(server.endpoint, "engine.server")
    if server.served_model is None:
        yield "engine.server.served_model is missing: the server is asked for a model by name; give that of the base."
    if server.folder is None:
        yield "engine.server.folder is missing: weights reach the server through a folder that both read; give one."
    elif not Path(server.folder).is_dir() or not os.access(server.folder, os.W_OK):
        yield (f"engine.server.folder = {server.folder!r} is no folder that can be written to; make it, or give "
               f"another.")
