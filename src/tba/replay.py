"""A past step's loss, computed again from what was recorded of it, and under other objectives."""

# Shape legend: N trajectories of a micro-batch or of the batch, T positions.

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tba import catalog
from tba import metrics as m
from tba.batch import Batch, MicroBatch, make_rows
from tba.loss import Loss
from tba.reading import check_settings
from tba.recorder import recorded_steps, rows_of_step
from tba.settings import Settings, SettingsError

TOLERANCE = 1e-6
"""Largest difference of two losses that are the same: times the logged one if that is above 1."""
NEAR = 3
"""Recorded steps named on either side of one that was not recorded."""

Row = Mapping[str, Any]
"""What was recorded of a trajectory: a row of the files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """What an objective makes of a recorded batch."""

    name: str
    loss: float
    """Batch loss, in the objective's unit."""
    residuals: tuple[float, ...]
    """[N] of each row, nats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A past step, computed again."""

    rows: Sequence[Row]
    """[N] what entered the loss."""
    logged: float | None
    """Loss in `metrics.jsonl`; None where it was not finite."""
    own: Computed
    """Under the run's objective."""
    other: Computed
    """Under the objective asked for; the run's if none was."""

    @property
    def difference(self) -> float:
        """Between the loss computed again and the logged one; 0 where neither is finite."""
        if self.logged is None or not math.isfinite(self.own.loss):
            return 0.0 if self.logged is None and not math.isfinite(self.own.loss) else math.inf
        return abs(self.own.loss - self.logged)

    @property
    def is_same(self) -> bool:
        """Whether the two agree within the tolerance."""
        return self.difference <= TOLERANCE * max(1.0, abs(self.logged or 0.0))


def replay(run: Path, settings: Settings, step: int, objective: str | None = None) -> Replay:
    """The step `step` of a run, under its own objective and under `objective`.

    Raises:
        SettingsError: the step was not recorded, there is no such objective, or it reads what was not recorded.
    """
    rows = rows_of_step(run, step)
    if not rows:
        raise SettingsError([_not_recorded(run, settings, step)])
    chosen = settings if objective is None else _with_objective(settings, objective)
    lacking = _lacking(chosen, rows)
    if lacking:
        known = [name for name in catalog.OBJECTIVES if _is_computable(settings, name, rows)]
        raise SettingsError([
            f"objective {chosen.objective.name!r} reads {lacking}, which step {step} of {str(run)!r} was recorded "
            f"without; what was recorded is enough for {', '.join(known)}."
        ])
    return Replay(
        rows=rows, logged=_logged(run, step), own=computed(settings, rows), other=computed(chosen, rows),
    )


def computed(settings: Settings, rows: Sequence[Row]) -> Computed:
    """The settings' objective on recorded rows, which hold what it reads."""
    loss = Loss(settings)
    if loss.learned_z is not None:
        loss.learned_z.put([row["prompt_id"] for row in rows], [row["log_z"] for row in rows])
    batch, logps = batch_of(rows)
    is_tempered = "scale" in catalog.OBJECTIVES[settings.objective.name].defaults
    prior = rows[0].get("prior") if is_tempered else None  # None too where an older version recorded
    total, residuals = 0.0, list[float]()
    for micro, logps_NT in zip(batch.micro_batches, logps, strict=True):
        found, share = loss.of(micro, batch, logps_NT, rows[0]["beta"], 1.0 if prior is None else prior)
        total += float(share)
        residuals += found.residual.tolist()
    return Computed(name=settings.objective.name, loss=total, residuals=tuple(residuals))


# ---- rows to tensors ----------------------------------------------------------------------------------


def batch_of(rows: Sequence[Row]) -> tuple[Batch, list[Tensor]]:
    """The batch in the micro-batches that it was trained in, and the policy's log-probs [N T] of each, nats."""
    sizes = Counter(row["group"] for row in rows)
    counted = sum(len(row["tokens"]) for row in rows if sizes[row["group"]] >= 2)
    parts: dict[int, list[Row]] = {}
    for row in rows:
        parts.setdefault(row["micro_batch"], []).append(row)
    made = [_micro_batch(part, sizes) for part in parts.values()]
    batch = Batch(
        micro_batches=tuple(micro for micro, _ in made), num_groups=sum(size >= 2 for size in sizes.values()),
        num_tokens=sum(len(row["prompt_tokens"]) + len(row["tokens"]) for row in rows), num_counted_tokens=counted,
    )
    return batch, [logps_NT for _, logps_NT in made]


def _micro_batch(rows: Sequence[Row], sizes: Mapping[int, int]) -> tuple[MicroBatch, Tensor]:
    """One micro-batch, every trajectory in a row of its own, and the policy's log-probs [N T]."""
    whole = make_rows([(row["prompt_tokens"], row["tokens"]) for row in rows])
    mask_NT = whole.completion_NT
    groups = [row["group"] for row in rows]

    def placed(column: str) -> Tensor | None:
        """Values of each token in their places, zero elsewhere; None if a row has none."""
        lists = [row[column] for row in rows]
        if any(values is None for values in lists):
            return None
        found_NT = torch.zeros(mask_NT.shape)
        found_NT[mask_NT] = torch.tensor([value for values in lists for value in values])
        return found_NT

    behaviour_NT, logps_NT = placed("behaviour_logps"), placed("logps")
    assert logps_NT is not None, "every recorded row has the policy's log-probs"
    micro = MicroBatch(
        rows=(whole,), row_N=torch.arange(len(rows)), group_N=torch.tensor(groups),
        reward_N=torch.tensor([row["reward"] for row in rows]),
        ref_logp_N=torch.tensor([row["ref_logp"] for row in rows]),
        ref_version_N=torch.tensor([row["ref_version"] for row in rows]),
        behaviour_logps_NT=torch.zeros(mask_NT.shape) if behaviour_NT is None else behaviour_NT,
        ref_logps_NT=placed("ref_logps"), searcher_logp_N=torch.tensor([row["searcher_logp"] for row in rows]),
        version_N=torch.tensor([row["version"] for row in rows]), length_N=mask_NT.sum(1),
        prompt_ids=tuple(row["prompt_id"] for row in rows),
        num_groups=sum(sizes[group] >= 2 for group in set(groups)),
        num_counted_tokens=sum(len(row["tokens"]) for row in rows if sizes[row["group"]] >= 2),
    )
    return micro, logps_NT


# ---- what cannot be -----------------------------------------------------------------------------------


def _with_objective(settings: Settings, name: str) -> Settings:
    """The settings with another objective, at its defaults; unchanged if it is the run's own."""
    if name == settings.objective.name:
        return settings
    tree = settings.resolved()
    dropped = (*catalog.KNOBS, *catalog.TEMPERATURES)
    kept = {key: value for key, value in tree["objective"].items() if key not in dropped}
    buffer = {**tree["buffer"], "keep_logps": None}  # what was kept is known from the record
    return check_settings({**tree, "objective": {**kept, "name": name}, "buffer": buffer})


def _is_computable(settings: Settings, name: str, rows: Sequence[Row]) -> bool:
    try:
        return not _lacking(_with_objective(settings, name), rows)
    except SettingsError:
        return False


def _lacking(settings: Settings, rows: Sequence[Row]) -> str:
    """What the settings' objective reads and the rows do not hold, in words; '' if they hold all of it."""
    reads = catalog.reads(settings.objective)
    asked = {
        "log_z": ("a learned log Z", "log_z_rate" in settings.objective_knobs),
        "behaviour_logps": ("the behaviour log-prob of each token", "behaviour_logps" in reads),
        "ref_logps": ("the reference log-prob of each token", "ref_logps" in reads),
    }
    return " and ".join(
        words for column, (words, is_read) in asked.items() if is_read and any(row[column] is None for row in rows)
    )


def _not_recorded(run: Path, settings: Settings, step: int) -> str:
    steps = recorded_steps(run)
    trainer = settings.trainer
    if not steps:
        way_out = "wait for more of them" if trainer.record_every else "set it to 1 or more in the next run"
        return (f"step {step} of {str(run)!r} is not recorded, and no other step is, with "
                f"trainer.record_every = {trainer.record_every}; {way_out}.")
    near = [*[s for s in steps if s < step][-NEAR:], *[s for s in steps if s > step][:NEAR]]
    return (f"step {step} of {str(run)!r} is not recorded; near it are {', '.join(map(str, near))}. "
            f"trainer.record_every = {trainer.record_every} says how often a step is, and "
            f"trainer.record_mib = {trainer.record_mib} how much is kept.")


def _logged(run: Path, step: int) -> float | None:
    """The loss that `metrics.jsonl` holds for a step.

    Raises:
        SettingsError: it holds none.
    """
    file = run / "metrics.jsonl"
    for line in file.read_text("utf-8").splitlines() if file.is_file() else ():
        if f'"{m.STEP}":{step}' in line and (found := json.loads(line)).get(m.STEP) == step:
            return found[m.LOSS]
    raise SettingsError([f"{str(file)!r} has no line for step {step}, which is recorded; go on with: tba resume {run}"])


# ---- for people ---------------------------------------------------------------------------------------


def summary_of(found: Replay) -> dict[str, str]:
    """Name to figure, of the whole step."""
    rows, first = found.rows, found.rows[0]
    ages = [first["policy_version"] - row["version"] for row in rows]
    groups = {row["group"]: row["sampler"] for row in rows}
    logged = "not finite" if found.logged is None else f"{found.logged:.9g}"
    verdict = "the same" if found.is_same else "NOT the same"
    shown = {
        "step": str(first["step"]), "round": str(first["round"]), "version": str(first["policy_version"]),
        "beta": f"{first['beta']:g}", "groups": f"{len(groups)}, {len(rows)} trajectories",
        "drawn by": ", ".join(f"{name} {count}" for name, count in Counter(groups.values()).most_common()),
        "ages": f"{min(ages)} to {max(ages)} steps, mean {m.mean(ages):.3g}",
        "mean reward": f"{m.mean(row['reward'] for row in rows):.6g}",
        "loss logged": logged, f"loss recomputed ({found.own.name})": f"{found.own.loss:.9g}",
        "difference": f"{found.difference:.3g}, {verdict} within {TOLERANCE:g} (relative above 1)",
    }
    if found.other is not found.own and found.other.name != found.own.name:
        shown[f"loss under {found.other.name}"] = f"{found.other.loss:.9g}"
    return shown


def groups_of(found: Replay) -> list[dict[str, Any]]:
    """Each group's trajectories side by side, those with the largest mean squared residual first."""
    groups: dict[int, dict[str, Any]] = {}
    for row, residual in zip(found.rows, found.other.residuals, strict=True):
        group = groups.setdefault(row["group"], {
            "group": row["group"], "prompt_id": row["prompt_id"], "prompt": row["prompt"], "sampler": row["sampler"],
            "numbers": [], "ages": [], "rewards": [], "logps": [], "ref_logps": [], "residuals": [],
        })
        group["numbers"].append(row["number"])
        group["ages"].append(row["policy_version"] - row["version"])
        group["rewards"].append(row["reward"])
        group["logps"].append(math.fsum(row["logps"]))
        group["ref_logps"].append(row["ref_logp"])
        group["residuals"].append(residual)

    def size(group: Mapping[str, Any]) -> float:
        mean = m.mean(value**2 for value in group["residuals"])
        return mean if math.isfinite(mean) else math.inf

    return sorted(groups.values(), key=size, reverse=True)


def line_of(group: Mapping[str, Any]) -> str:
    """A group on one line; its texts are untrusted."""
    lists = {"rewards": "rewards", "logps": "log-probs", "ref_logps": "of the reference", "residuals": "residuals"}
    figures = "  ".join(f"{word} {' '.join(f'{v:.4g}' for v in group[key])}" for key, word in lists.items())
    named = " ".join("?" if number is None else str(number) for number in group["numbers"])
    ages = " ".join(map(str, group["ages"]))
    text = group["prompt"] or group["prompt_id"]
    return f"{text}  group {group['group']}  numbers {named}  ages {ages}  {figures}"


def plain(found: Replay, most: int) -> dict[str, Any]:
    """All of it as plain data, with at most `most` groups."""
    first = found.rows[0]
    return {
        **{name: first[name] for name in ("step", "round", "policy_version", "beta")},
        "objective": found.own.name, "logged": found.logged, "recomputed": found.own.loss,
        "difference": found.difference, "same": found.is_same, "under": {found.other.name: found.other.loss},
        "groups": groups_of(found)[:most],
    }
