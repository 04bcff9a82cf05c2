"""Every objective against a slow twin, in float64, and the identities that tie them to trajectory balance."""

from __future__ import annotations

import inspect
import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tba.catalog import OBJECTIVES as KNOBS
from tba.objectives import OBJECTIVES, token_weight
from test_objectives import REWARD as PAIR_REWARD
from test_objectives import gradient, table_logp, table_parameters

TWIN = 1e-9
TIGHT = 1e-8
BETA = 0.37
GROUP = [7, -3, 7, 900_000_000_000, -3, 7, 7, -3, 0, 5, 5]
"""Groups of 4, 3, 2, 1 and 1 rows, interleaved."""
REWARD = [0.3, 1.7, -0.6, 2.0, 0.9, 0.3, 1.1, 0.9, 0.5, 0.8, 0.8]
"""In group 7 the second best is not unique, in group -3 the worst is not, group 5 is flat."""
START = [0, 2, 1, 0, 3, 1, 0, 2, 0, 1, 2]
LENGTH = [3, 1, 4, 2, 2, 5, 1, 3, 2, 4, 2]
WIDTH = 7


@dataclass
class Data:
    """Rows as lists; per-token lists hold completion tokens only."""

    logps: list[list[float]]
    ref_logps: list[list[float]]
    behaviour_logps: list[list[float]]
    log_z: list[float]


def data(seed: int, spread: float = 0.6) -> Data:
    rng = random.Random(seed)
    behaviour = [[rng.uniform(-2.5, -0.4) for _ in range(n)] for n in LENGTH]
    near = [[b + rng.gauss(0, spread) for b in row] for row in behaviour]
    ref = [[b + rng.gauss(0, 0.5) for b in row] for row in behaviour]
    z = {g: rng.uniform(-2, 4) for g in GROUP}
    return Data(near, ref, behaviour, [z[g] for g in GROUP])


def placed(rows: list[list[float]]) -> Tensor:
    found = torch.zeros(len(rows), WIDTH, dtype=torch.float64)
    for row, (start, values) in enumerate(zip(START, rows, strict=True)):
        found[row, start : start + len(values)] = torch.tensor(values, dtype=torch.float64)
    return found


def mask() -> Tensor:
    return placed([[1.0] * n for n in LENGTH]) > 0


def evaluate(
    name: str, rows: Data, *, order: list[int] | None = None, beta: float = BETA, totals: tuple[int, int] | None = None,
    **knobs: Any,
) -> tuple[Any, Tensor]:
    """What an objective makes of the rows `order`, and its gradient with respect to each completion token [N T]."""
    order = list(range(len(GROUP))) if order is None else order
    function = OBJECTIVES[name]
    takes = inspect.signature(function).parameters
    set_to = {**KNOBS[name].defaults, **knobs}
    logps = placed(rows.logps)[order].requires_grad_(True)
    group = torch.tensor(GROUP)[order]
    groups, tokens = (None, None) if totals is None else totals
    given = {
        "logps": logps, "logp": logps.sum(-1), "ref_logp": placed(rows.ref_logps).sum(-1)[order],
        "ref_logps": placed(rows.ref_logps)[order], "behaviour_logps": placed(rows.behaviour_logps)[order],
        "reward": torch.tensor(REWARD, dtype=torch.float64)[order], "group": group,
        "log_z": torch.tensor(rows.log_z, dtype=torch.float64)[order],
        "weight": token_weight(
            mask()[order], group, set_to.get("normalise", "sequence"), num_groups=groups, num_tokens=tokens
        ),
    }
    found = function(
        **{key: value for key, value in given.items() if key in takes}, beta=beta,
        **{key: value for key, value in set_to.items() if key in takes},
    )
    (slope,) = torch.autograd.grad(found.loss, logps)
    return found, slope * mask()[order]


# ---- slow twins: one equation each, over Python lists -----------------------------------------------


def rows_of() -> list[list[int]]:
    """Rows of each group of at least two."""
    found = defaultdict(list)
    for row, number in enumerate(GROUP):
        found[number].append(row)
    return [rows for rows in found.values() if len(rows) >= 2]


def average(values: list[Any]) -> Any:
    return sum(values) / len(values)


def stopped(value: Any) -> float:
    """Without gradient."""
    return float(value.detach()) if isinstance(value, Tensor) else value


class Twin:
    """An objective's loss from a leaf per token, so that its gradient is autograd's over scalars."""

    def __init__(self, rows: Data, beta: float, **knobs: Any) -> None:
        self.leaf = [[torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in row] for row in rows.logps]
        self.rows, self.beta, self.knobs = rows, beta, knobs

    def total(self, row: int) -> Tensor:
        return sum(self.leaf[row])

    def ratio(self, row: int) -> Tensor:
        """l_j"""
        return self.total(row) - sum(self.rows.ref_logps[row])

    def token_ratio(self, row: int, place: int) -> Tensor:
        return torch.exp(self.leaf[row][place] - self.rows.behaviour_logps[row][place])

    def k3(self, row: int, place: int) -> Tensor:
        gap = self.rows.ref_logps[row][place] - self.leaf[row][place]
        return torch.exp(gap) - gap - 1

    def spread(self, term: Callable[[int, int], Any]) -> Any:
        """The mean of `term` over tokens as `normalise` says."""
        how = self.knobs["normalise"]
        if how == "token":
            counted = [(row, place) for rows in rows_of() for row in rows for place in range(LENGTH[row])]
            return average([term(row, place) for row, place in counted])
        return average([
            average([
                sum(term(row, place) for place in range(LENGTH[row])) / (LENGTH[row] if how == "sequence" else how)
                for row in rows
            ]) for rows in rows_of()
        ])

    def centred(self, value: Callable[[int], float]) -> dict[int, float]:
        return {row: value(row) - average([value(j) for j in rows]) for rows in rows_of() for row in rows}

    def in_deviations(self) -> dict[int, float]:
        found = {}
        for rows in rows_of():
            mean = average([REWARD[j] for j in rows])
            deviation = math.sqrt(average([(REWARD[j] - mean) ** 2 for j in rows]))
            found |= {j: (REWARD[j] - mean) / (deviation + 1e-6) for j in rows}
        return found

    # ---- one method an objective ----

    def trajectory_balance(self) -> Any:
        losses = []
        for rows in rows_of():
            log_z = average([REWARD[j] / self.beta - stopped(self.ratio(j)) for j in rows])
            losses.append(average([(log_z + self.ratio(j) - REWARD[j] / self.beta) ** 2 for j in rows]))
        return average(losses) * (self.beta / 2 if self.knobs["scale"] == "advantage" else 1)

    def trajectory_balance_learned_z(self) -> Any:
        losses = [
            average([(self.rows.log_z[j] + self.ratio(j) - REWARD[j] / self.beta) ** 2 for j in rows])
            for rows in rows_of()
        ]
        return average(losses) * (self.beta / 2 if self.knobs["scale"] == "advantage" else 1)

    def tba_prime(self) -> Any:
        advantage = self.centred(lambda j: REWARD[j] - self.beta * stopped(self.ratio(j)))

        def term(row: int, place: int) -> Any:
            if self.knobs["ratio"] == "off":
                return advantage[row] * self.leaf[row][place]
            rho = self.token_ratio(row, place)
            kept = rho if stopped(rho) <= self.knobs["ratio_max"] else self.knobs["ratio_max"]
            return advantage[row] * (kept if self.knobs["ratio"] == "clamp" else stopped(kept) * self.leaf[row][place])

        return -self.spread(term)

    def kimi_k15(self) -> Any:
        losses = []
        for rows in rows_of():
            mean = average([REWARD[j] for j in rows])
            losses.append(average([(REWARD[j] - mean - self.beta * self.ratio(j)) ** 2 for j in rows]))
        return average(losses) / (2 * self.beta)

    def reinforce(self) -> Any:
        advantage = self.centred(lambda j: REWARD[j] - self.beta * stopped(self.ratio(j)))
        return -average([average([advantage[j] * self.total(j) for j in rows]) for rows in rows_of()])

    def rloo(self) -> Any:
        losses = []
        for rows in rows_of():
            value = {j: REWARD[j] - self.beta * stopped(self.ratio(j)) for j in rows}
            losses.append(average([
                (value[j] - average([value[i] for i in rows if i != j])) * self.total(j) for j in rows
            ]))
        return -average(losses)

    def surrogate(self, rho: Tensor, advantage: float) -> Any:
        low, high = self.knobs["clip"]
        held = min(max(stopped(rho), 1 - low), 1 + high)
        return rho * advantage if stopped(rho) * advantage <= held * advantage else held * advantage

    def clipped(self, advantage: dict[int, float], rho: Callable[[int, int], Tensor]) -> Any:
        return -self.spread(
            lambda row, place: self.surrogate(rho(row, place), advantage[row]) - self.beta * self.k3(row, place)
        )

    def grpo(self) -> Any:
        return self.clipped(self.in_deviations(), self.token_ratio)

    def dr_grpo(self) -> Any:
        return self.clipped(self.centred(lambda j: REWARD[j]), self.token_ratio)

    def gspo(self) -> Any:
        def rho(row: int, _: int) -> Tensor:
            gaps = [a - b for a, b in zip(self.leaf[row], self.rows.behaviour_logps[row], strict=True)]
            return torch.exp(average(gaps))

        self.knobs["normalise"] = "sequence"
        return self.clipped(self.in_deviations(), rho)

    def ppo_clip(self) -> Any:
        def value(j: int) -> float:
            return REWARD[j] - self.beta * (sum(self.rows.behaviour_logps[j]) - sum(self.rows.ref_logps[j]))

        advantage = self.centred(value)
        return -self.spread(lambda row, place: self.surrogate(self.token_ratio(row, place), advantage[row]))

    def cispo(self) -> Any:
        advantage = self.in_deviations()
        return -self.spread(
            lambda row, place: min(stopped(self.token_ratio(row, place)), self.knobs["ratio_max"])
            * advantage[row] * self.leaf[row][place] - self.beta * self.k3(row, place)
        )

    def online_dpo(self) -> Any:
        losses = []
        for rows in rows_of():
            top, bottom = max(REWARD[j] for j in rows), min(REWARD[j] for j in rows)
            pairs = [(a, b) for a in rows for b in rows if REWARD[a] == top > bottom == REWARD[b]]
            losses.append(average([
                -torch.log(1 / (1 + torch.exp(-self.beta * (self.ratio(a) - self.ratio(b))))) for a, b in pairs
            ]) if pairs else 0.0)
        return average(losses)

    def run(self, name: str) -> tuple[float, Tensor]:
        loss = getattr(self, name)()
        loss.backward()
        slopes = [[0.0 if leaf.grad is None else float(leaf.grad) for leaf in row] for row in self.leaf]
        return float(loss.detach()), placed(slopes)


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("trajectory_balance", {}), ("trajectory_balance", {"scale": "paper"}),
    ("trajectory_balance_learned_z", {}), ("trajectory_balance_learned_z", {"scale": "paper"}),
    *[("tba_prime", {"ratio": ratio, "ratio_max": 1.3, "normalise": how})
      for ratio in ("off", "clamp", "cispo") for how in ("sequence", "token", 5.5)],
    ("kimi_k15", {}), ("reinforce", {}), ("rloo", {}),
    *[(name, {"clip": (0.23, 0.31), "normalise": how})
      for name in ("grpo", "dr_grpo", "ppo_clip") for how in ("sequence", "token", 5.5)],
    *[("cispo", {"ratio_max": 1.3, "normalise": how}) for how in ("sequence", "token", 5.5)],
    ("gspo", {"clip": (0.43, 0.77)}), ("gspo", {}), ("online_dpo", {}),
]  # fmt: skip
each = pytest.mark.parametrize(
    ("name", "knobs"), VARIANTS, ids=[" ".join([n, *map(str, k.values())]) for n, k in VARIANTS]
)


@each
@pytest.mark.parametrize("seed", [1, 2])
def test_loss_and_gradient_are_those_of_the_slow_twin(name: str, knobs: dict[str, Any], seed: int) -> None:
    rows = data(seed)
    found, slope = evaluate(name, rows, **knobs)
    loss, expected = Twin(rows, BETA, **{**KNOBS[name].defaults, **knobs}).run(name)
    assert float(found.loss.detach()) == pytest.approx(loss, abs=TWIN)
    assert float((slope - expected).abs().max()) < TWIN
    assert float(expected.abs().max()) > 1e-3
    assert found.loss.dtype == torch.float64


def test_no_two_variants_agree() -> None:
    """The constants of the twins tell every formula from every other, except where an identity says otherwise."""
    rows = data(1)
    slopes = {f"{n} {k}": evaluate(n, rows, **k)[1] for n, k in VARIANTS}
    losses = {f"{n} {k}": float(evaluate(n, rows, **k)[0].loss.detach()) for n, k in VARIANTS}
    for one, other in itertools.combinations(slopes, 2):
        same_slope = float((slopes[one] - slopes[other]).abs().max()) < 1e-4
        assert not same_slope or {one.split()[0], other.split()[0]} == {"trajectory_balance", "reinforce"}, (one, other)
        assert abs(losses[one] - losses[other]) > 1e-4, (one, other)


def test_every_name_is_covered_and_says_what_it_needs() -> None:
    assert {name for name, _ in VARIANTS} == set(OBJECTIVES) == set(KNOBS)
    for name, function in OBJECTIVES.items():
        takes = inspect.signature(function).parameters
        assert KNOBS[name].needs == {"behaviour_logps", "ref_logps"} & set(takes), name
        defaults = {key: p.default for key, p in takes.items() if p.kind is p.KEYWORD_ONLY and key != "beta"}
        elsewhere = {"normalise", "log_z_per", "log_z_rate"} & set(KNOBS[name].defaults)
        assert defaults == {key: v for key, v in KNOBS[name].defaults.items() if key not in elsewhere}, name
        assert ("weight" in takes) == ("normalise" in elsewhere or name == "gspo"), name


# ---- order and cuts ------------------------------------------------------------------------------


@each
def test_order_of_rows_does_not_matter(name: str, knobs: dict[str, Any]) -> None:
    rows = data(3)
    found, slope = evaluate(name, rows, **knobs)
    for seed in range(3):
        order = random.Random(seed).sample(range(len(GROUP)), len(GROUP))
        again, moved = evaluate(name, rows, order=order, **knobs)
        assert float((again.loss - found.loss).detach().abs()) < TWIN
        assert float((moved - slope[order]).abs().max()) < TWIN
        assert torch.equal(torch.isnan(again.residual), torch.isnan(found.residual))


@each
def test_groups_may_be_dealt_to_micro_batches_in_any_way(name: str, knobs: dict[str, Any]) -> None:
    rows = data(4)
    found, slope = evaluate(name, rows, **knobs)
    counted = rows_of()
    totals = (len(counted), sum(LENGTH[j] for of_group in counted for j in of_group))
    by_weight = "weight" in inspect.signature(OBJECTIVES[name]).parameters
    for cut in ([[7], [-3], [5], [0], [900_000_000_000]], [[7, 0], [5, -3, 900_000_000_000]]):
        loss, gathered = 0.0, torch.zeros_like(slope)
        for numbers in cut:
            order = [j for j, g in enumerate(GROUP) if g in numbers]
            part, moved = evaluate(name, rows, order=order, totals=totals if by_weight else None, **knobs)
            share = 1.0 if by_weight else sum(GROUP.count(g) >= 2 for g in numbers) / len(counted)
            loss += share * float(part.loss.detach())
            gathered[order] += share * moved
        assert loss == pytest.approx(float(found.loss.detach()), abs=TWIN)
        assert float((gathered - slope).abs().max()) < TWIN


@each
def test_rows_of_a_group_of_one_have_no_part(name: str, knobs: dict[str, Any]) -> None:
    alone = [j for j, g in enumerate(GROUP) if GROUP.count(g) == 1]
    _, slope = evaluate(name, data(5), **knobs)
    assert float(slope[alone].abs().max()) == 0.0
    found, nothing = evaluate(name, data(5), order=alone, **knobs)
    assert float(found.loss.detach()) == 0.0
    assert float(nothing.abs().max()) == 0.0


# ---- what an objective does not see ---------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, knobs in KNOBS.items() if "behaviour_logps" not in knobs.needs])
def test_objectives_without_a_ratio_do_not_ask_for_behaviour(name: str) -> None:
    assert "behaviour_logps" not in inspect.signature(OBJECTIVES[name]).parameters


def test_tba_prime_refuses_a_ratio_without_behaviour_log_probs() -> None:
    ones = torch.ones(2, 3)
    given = {"logps": -ones, "ref_logp": -ones[:, 0], "weight": ones / 6, "reward": ones[:, 0],
             "group": torch.zeros(2, dtype=torch.long), "beta": BETA}  # fmt: skip
    with pytest.raises(ValueError, match="'clamp' needs behaviour log-probs"):
        OBJECTIVES["tba_prime"](behaviour_logps=None, ratio="clamp", **given)
    with pytest.raises(ValueError, match="'clip' is unknown; known: off, clamp, cispo"):
        OBJECTIVES["tba_prime"](behaviour_logps=-ones, ratio="clip", **given)
    OBJECTIVES["tba_prime"](behaviour_logps=None, **given)


@pytest.mark.parametrize("name", [name for name, knobs in KNOBS.items() if knobs.needs_beta])
def test_objectives_that_need_beta_refuse_zero(name: str) -> None:
    with pytest.raises(ValueError, match=r"objective.beta = 0.0 must be positive"):
        evaluate(name, data(1), beta=0.0)


@pytest.mark.parametrize("name", [name for name, knobs in KNOBS.items() if not knobs.needs_beta])
def test_without_beta_the_reference_does_not_matter(name: str) -> None:
    rows = data(1)
    found, slope = evaluate(name, rows, beta=0.0)
    loss, expected = Twin(rows, 0.0, **KNOBS[name].defaults).run(name)
    assert float(found.loss.detach()) == pytest.approx(loss, abs=TWIN)
    assert float((slope - expected).abs().max()) < TWIN
    rows.ref_logps = [[9 * value for value in row] for row in rows.ref_logps]
    assert torch.equal(evaluate(name, rows, beta=0.0)[1], slope)
    assert bool(torch.isnan(found.residual).all())


@pytest.mark.parametrize("how", ["sequences", 0.0, -2.0])
def test_an_unknown_normalisation_is_refused(how: Any) -> None:
    with pytest.raises(ValueError, match=r"objective.normalise = .* must be sequence, token or a positive number"):
        token_weight(mask(), torch.tensor(GROUP), how)


def test_tokens_whose_ratio_was_cut_are_counted() -> None:
    rows = data(1)
    rows.logps = [list(row) for row in rows.behaviour_logps]
    rows.logps[2][1] += 1.0   # row 2 has the worst: A < 0, and the ratio may grow
    rows.logps[6][0] += 1.0   # row 6 has the best of group 7: A > 0
    rows.logps[3][0] += 1.0   # a group of one
    assert REWARD[6] == max(REWARD[j] for j, g in enumerate(GROUP) if g == 7)
    cut = {name: evaluate(name, rows, **knobs)[0].cut for name, knobs in
           (("grpo", {}), ("cispo", {"ratio_max": 2.0}), ("tba_prime", {"ratio": "clamp", "ratio_max": 2.0}))}
    assert cut["grpo"].tolist() == [0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0]
    assert cut["cispo"].tolist() == [0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0]
    assert cut["tba_prime"].tolist() == cut["cispo"].tolist()
    whole = evaluate("gspo", rows)[0].cut
    assert int(whole[6]) == LENGTH[6]
    assert evaluate("reinforce", rows)[0].cut is None


# ---- identities ------------------------------------------------------------------------------------


def test_reinforce_and_tba_prime_have_the_gradient_of_trajectory_balance_u1() -> None:
    rows = data(6)
    _, expected = evaluate("trajectory_balance", rows)
    for name, knobs in (("reinforce", {}), ("tba_prime", {"normalise": 1.0})):
        assert float((evaluate(name, rows, **knobs)[1] - expected).abs().max()) < TIGHT


def test_rloo_is_reinforce_times_k_over_k_less_one() -> None:
    rows = data(6)
    factor = torch.tensor([GROUP.count(g) / max(1, GROUP.count(g) - 1) for g in GROUP], dtype=torch.float64)[:, None]
    assert float((evaluate("rloo", rows)[1] - factor * evaluate("reinforce", rows)[1]).abs().max()) < TIGHT


def test_kimi_is_tba_prime_on_the_reference_and_beta_lbar_gbar_away_elsewhere_u4() -> None:
    rows = data(7)
    _, prime = evaluate("tba_prime", rows, normalise=1.0)
    _, kimi = evaluate("kimi_k15", rows)
    # minus the gradients: (1/K) sum_j (A_j - A^K_j) g_j = beta lbar gbar, with g_j = 1 at each token of row j
    expected = torch.zeros_like(prime)
    for of_group in rows_of():
        mean_l = average([sum(rows.logps[j]) - sum(rows.ref_logps[j]) for j in of_group])
        expected[of_group] = BETA * mean_l * mask()[of_group].double() / len(of_group) / len(rows_of())
    assert float(expected.abs().max()) > 0.01
    assert float((kimi - prime - expected).abs().max()) < TIGHT
    rows.ref_logps = rows.logps
    assert float((evaluate("kimi_k15", rows)[1] - evaluate("tba_prime", rows, normalise=1.0)[1]).abs().max()) < TIGHT


def test_learned_log_z_at_the_groups_own_estimate_is_trajectory_balance() -> None:
    rows = data(8)
    found, expected = evaluate("trajectory_balance", rows)
    rows.log_z = found.log_z.tolist()
    assert float((evaluate("trajectory_balance_learned_z", rows)[1] - expected).abs().max()) < TIGHT


def test_gradient_of_learned_log_z_is_beta_times_the_mean_residual() -> None:
    log_z = torch.tensor([0.7] * 2 + [-1.3] * 3, dtype=torch.float64, requires_grad=True)
    logp, ref, reward = (torch.tensor(v, dtype=torch.float64) for v in
                         ([-3.0, -1, -2, -4, -2.5], [-2.0, -2, -3, -3, -2.6], [0.4, 1.0, 0.2, -0.3, 0.8]))
    found = OBJECTIVES["trajectory_balance_learned_z"](
        logp, ref, reward, torch.tensor([0, 0, 1, 1, 1]), log_z, beta=BETA
    )
    (slope,) = torch.autograd.grad(found.loss, log_z)
    assert float(slope[:2].sum()) == pytest.approx(BETA * float(found.residual[:2].mean()) / 2, abs=TIGHT)
    assert float(slope[2:].sum()) == pytest.approx(BETA * float(found.residual[2:].mean()) / 2, abs=TIGHT)


@pytest.mark.parametrize("name", ["trajectory_balance", "tba_prime", "reinforce", "rloo", "kimi_k15"])
def test_dividing_beta_by_ten_on_the_reference_moves_no_gradient(name: str) -> None:
    rows = data(9)
    rows.ref_logps = rows.logps
    _, before = evaluate(name, rows)
    _, after = evaluate(name, rows, beta=BETA / 10)
    assert float(before.abs().max()) > 0.01
    assert float((after - before).abs().max()) < TWIN


def test_dividing_beta_by_ten_makes_the_papers_scale_ten_times_as_large() -> None:
    rows = data(9)
    rows.ref_logps = rows.logps
    _, before = evaluate("trajectory_balance", rows, scale="paper")
    _, after = evaluate("trajectory_balance", rows, scale="paper", beta=BETA / 10)
    assert float((after - 10 * before).abs().max()) < TWIN


# ---- on a policy that can be enumerated ------------------------------------------------------------


def expected_descent(name: str, size: int, ref: Tensor) -> Tensor:
    """Minus the mean gradient over every group of `size` independent draws from the policy."""
    reward = torch.tensor(PAIR_REWARD, dtype=torch.float64)

    def mean_loss(logp: Tensor) -> Tensor:
        total = logp.new_zeros(())
        for picked in map(list, itertools.product(range(9), repeat=size)):
            found = OBJECTIVES[name](
                logp[picked], ref[picked], reward[picked], torch.zeros(size, dtype=torch.long), beta=BETA
            )
            total = total + logp[picked].sum().exp().detach() * found.loss
        return total

    return -gradient(mean_loss)


@pytest.mark.parametrize(
    ("name", "of_reward", "of_kl"),
    [("reinforce", lambda k: (k - 1) / k, lambda k: (k - 1) / k), ("rloo", lambda k: 1, lambda k: 1),
     ("kimi_k15", lambda k: (k - 1) / k, lambda k: 1)],
)  # fmt: skip
@pytest.mark.parametrize("size", [2, 3])
def test_expected_descent_on_policy_u2(name: str, of_reward: Any, of_kl: Any, size: int) -> None:
    ref = table_logp(*table_parameters(2))
    reward = torch.tensor(PAIR_REWARD, dtype=torch.float64)
    grad_reward = gradient(lambda logp: (logp.exp() * reward).sum())
    grad_kl = gradient(lambda logp: (logp.exp() * (logp - ref)).sum())
    expected = of_reward(size) * grad_reward - of_kl(size) * BETA * grad_kl
    assert float(expected.abs().max()) > 0.05
    assert float((expected_descent(name, size, ref) - expected).abs().max()) < TIGHT


def test_kimi_against_trajectory_balance_by_finite_differences_u4() -> None:
    ref, reward = table_logp(*table_parameters(2)), torch.tensor(PAIR_REWARD, dtype=torch.float64)
    picked, step = [0, 4, 4, 8, 1], 1e-5
    group = torch.zeros(len(picked), dtype=torch.long)
    first, second = table_parameters(1)
    flat = torch.cat([first, second.reshape(-1)])

    def logp_of(values: Tensor) -> Tensor:
        return table_logp(values[:3], values[3:].reshape(3, 3))[picked]

    def slope_of(value: Callable[[Tensor], Tensor]) -> Tensor:
        moves = step * torch.eye(12, dtype=torch.float64)
        return torch.stack([(value(logp_of(flat + d)) - value(logp_of(flat - d))) / (2 * step) for d in moves])

    def loss(name: str) -> Callable[[Tensor], Tensor]:
        # nothing in kimi is detached, and detaching log Z changes no gradient: differences see the whole of both
        return lambda logp: OBJECTIVES[name](logp, ref[picked], reward[picked], group, beta=BETA).loss

    ascent = {name: -slope_of(loss(name)) for name in ("trajectory_balance", "kimi_k15")}
    mean_l = (logp_of(flat) - ref[picked]).mean()
    expected = BETA * mean_l * slope_of(lambda logp: logp.mean())
    assert float(expected.abs().max()) > 0.01
    gap = ascent["trajectory_balance"] - ascent["kimi_k15"]
    assert float((gap - expected).abs().max()) < TIGHT
