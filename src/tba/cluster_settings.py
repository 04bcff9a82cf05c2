"""Branches of the settings tree about processes: async mode, Ray, and what each process takes."""

from __future__ import annotations

import os
from collections.abc import Iterator

from pydantic import Field

from tba.sections import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section


def bound_cores() -> int:
    """Cores of this machine that the process is bound to."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class AsyncSettings(Section):
    """Async mode only."""

    lead: NonNegativeInt | None = None
    """Rounds a searcher may start beyond the newest published version; if null, as many as `buffer.max_age` allows,
    and without that any."""
    wait_limit_s: PositiveFloat = 120.0
    """Seconds any wait may last before the run says what is missing and ends."""
    lease_limit_s: PositiveFloat | None = None
    """Seconds a searcher may hold a prompt before it is handed out again; half of wait_limit_s if null."""
    max_restarts: NonNegativeInt = 5
    """Deaths of one searcher in a row before the run ends, if no searcher delivers a group between them."""
    threads: PositiveInt | None = None
    """Threads of each trainer rank and of each searcher; if null an even share of the cores, or the CPUs of `resources`
    on a cluster."""

    @property
    def longest_lease_s(self) -> float:
        """Seconds that a searcher may hold a prompt."""
        return self.wait_limit_s / 2 if self.lease_limit_s is None else self.lease_limit_s


class RaySettings(Section):
    """Where the processes of async mode run."""

    address: str | None = Field(default=None, min_length=1)
    """Ray cluster to join: `auto`, `host:port` or `ray://host:port`; one on this machine that the run starts and stops
    if null."""


class ShareSettings(Section):
    """What one process takes."""

    cpus: NonNegativeFloat | None = None
    """CPUs that Ray sets aside; if null 1 on a cluster that is joined, and 0 on this machine: cores are shared."""
    gpus: NonNegativeFloat = 0.0
    """GPUs that Ray sets aside; parts of one may be shared."""


class ResourceSettings(Section):
    """What each process of async mode takes."""

    trainer: ShareSettings = Field(default_factory=ShareSettings)
    """Each of its ranks."""
    searcher: ShareSettings = Field(default_factory=ShareSettings)
    """Each of them."""
    depot: ShareSettings = Field(default_factory=ShareSettings)
    """Buffer, leases and weight store; also each shard of the buffer."""
    evaluator: ShareSettings = Field(default_factory=ShareSettings)
    scorer: ShareSettings = Field(default_factory=ShareSettings)
    """Each of `search.scorer_processes`."""


def cluster_problems(*, mode: str, ray: RaySettings, resources: ResourceSettings) -> Iterator[str]:
    """What is wrong with the branches in this mode."""
    if mode == "async":
        return
    if ray.address is not None:
        yield f"ray.address = {ray.address!r} has no use in mode = {mode}, which is one process; set mode=async."
    for name in type(resources).model_fields:
        share: ShareSettings = getattr(resources, name)
        if share.cpus or share.gpus:
            yield (f"resources.{name} has no use in mode = {mode}, which is one process; set mode=async, or leave it "
                   f"out.")


def rank_problems(processes: int, mode: str, device: str, *, groups: int, gpus: float) -> Iterator[str]:
    """Why a trainer of so many ranks cannot be; `groups` are those of a batch, `gpus` a rank's."""
    if processes == 1:
        return
    if mode != "async":
        yield (f"trainer.processes = {processes}: mode = {mode} is one process; set mode=async, or "
               f"trainer.processes=1.")
    if processes > groups:
        yield (f"trainer.processes = {processes} is more than the {groups} groups of a batch, which ranks take whole; "
               f"lower it, or raise trainer.groups_per_step.")
    if device not in ("auto", "cpu"):
        yield (f"policy.device = {device!r} is one device, and trainer.processes = {processes} ranks need one each; "
               f"leave it out, and set resources.trainer.gpus=1.")
    if 0 < gpus < 1:
        yield (f"resources.trainer.gpus = {gpus:g} has ranks share a GPU, and NCCL takes one for each; set it to 1, or "
               f"trainer.processes=1.")
