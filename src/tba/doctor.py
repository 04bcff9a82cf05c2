"""What `tba doctor` tells of a machine: versions, devices, cores, memory, disk, what is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path

from tba.cluster_settings import bound_cores

NEEDED = (
    "torch", "transformers", "ray", "peft", "datasets", "safetensors", "pydantic", "pyarrow", "plotly", "math-verify",
)
"""Packages without which no run starts, or not every one."""
WANTED = {
    "reasoning-gym": "task.families (pip install 'tba[maths]')",
    "gguf": "model smollm2-135m (pip install 'tba[smollm2]')",
    "trl": "comparing scripts with TRL's own",
    **{name: f"logging.report_to=[{name}]" for name in ("tensorboard", "wandb", "mlflow", "trackio")},
}
"""Packages that something needs, and what does."""
FREE_DISK_GIB = 5.0
FREE_SHARED_GIB = 1.0
"""Below these the disk is named as short: checkpoints, and what Ray's processes share."""


def examine() -> tuple[dict[str, str], list[str]]:
    """(what there is, one line a thing; what is missing or short, and for what). Nothing is changed or fetched."""
    found = {
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        **{name: version_of(name) or "missing" for name in ("tba", *NEEDED)},
        "devices": ", ".join(devices()), "cores": f"{cores():g}", "memory": memory(),
        "disk here": f"{_free_gib(Path.cwd()):.1f} GiB free in {Path.cwd()}",
    }
    shared = Path("/dev/shm")
    if shared.is_dir():
        found["shared memory"] = f"{_free_gib(shared):.1f} GiB free in {shared}"
    found |= {name: version for name in WANTED if (version := version_of(name))}
    return found, list(_lacking(shared))


def _lacking(shared: Path) -> Iterator[str]:
    for name in NEEDED:
        if version_of(name) is None:
            yield f"{name} is missing; install it with: pip install {name}"
    for name, what in WANTED.items():
        if version_of(name) is None:
            yield f"{name} is not there; it is for {what}"
    if cores() < 2:
        yield f"{cores():g} core: searchers and trainer share it; mode=lockstep is as fast there"
    if _free_gib(Path.cwd()) < FREE_DISK_GIB:
        yield f"less than {FREE_DISK_GIB:g} GiB free here; a checkpoint takes 12 bytes a parameter trained"
    if shared.is_dir() and _free_gib(shared) < FREE_SHARED_GIB:
        yield f"less than {FREE_SHARED_GIB:g} GiB free in {shared}; Ray's processes share published weights there"


def version_of(package: str) -> str | None:
    """The installed version, without importing it; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def devices() -> list[str]:
    """What torch can compute on."""
    if importlib.util.find_spec("torch") is None:
        return ["none: torch is missing"]
    import torch

    cuda = [f"cuda:{n} {torch.cuda.get_device_name(n)}" for n in range(torch.cuda.device_count())]
    return ["cpu", *cuda, *(["mps"] if torch.backends.mps.is_available() else [])]


def cores() -> float:
    """Cores that this process may use: those it is bound to, or the container's share if that is less."""
    bound = bound_cores()
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text("utf-8").split()
    except (OSError, ValueError):
        return bound
    return bound if quota == "max" else min(bound, int(quota) / int(period))


def memory() -> str:
    """Memory of the machine, and what of it is free."""
    try:
        lines = Path("/proc/meminfo").read_text("utf-8").splitlines()
    except OSError:
        return "not known on this system"
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    return f"{kib['MemTotal'] / 2**20:.1f} GiB, {kib['MemAvailable'] / 2**20:.1f} GiB free"


def _free_gib(path: Path) -> float:
    return shutil.disk_usage(path).free / 2**30
