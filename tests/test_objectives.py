"""Trajectory balance: known answers, a slow twin, and the identities of its gradient, in float64."""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError
from torch import Tensor

from tba.catalog import OBJECTIVES as NAMES
from tba.objectives import OBJECTIVES, group_mean, trajectory_balance
from tba.policy import target_logps

BETA = 0.37
TIGHT = 1e-8
GROUP = (7, -3, 7, 900_000_000_000, -3, 7, 7, -3, 0)
"""Groups of 4, 3, 1 and 1 rows, interleaved; ids are arbitrary."""


def tensor(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def balance(
    logp: Sequence[float], ref: Sequence[float], reward: Sequence[float], group: Sequence[int], **options: object
) -> tuple[float, list[float]]:
    """Loss and its gradient with respect to `logp`."""
    logp_N = tensor(logp).requires_grad_(True)
    found = trajectory_balance(logp_N, tensor(ref), tensor(reward), torch.tensor(group), **options)
    found.loss.backward()
    assert logp_N.grad is not None
    return float(found.loss.detach()), logp_N.grad.tolist()


def on_reference(rewards: Sequence[Sequence[float]], **options: object) -> float:
    """Loss of groups with these rewards where the policy equals the reference."""
    logp = [-1.5 - 0.3 * n for n in range(sum(map(len, rewards)))]
    group = [number for number, of_group in enumerate(rewards) for _ in of_group]
    return balance(logp, logp, list(itertools.chain(*rewards)), group, **options)[0]


def random_rows(seed: int, size: int = len(GROUP)) -> tuple[list[float], list[float], list[float]]:
    rng = random.Random(seed)
    return tuple([rng.uniform(low, high) for _ in range(size)] for low, high in ((-9, -1), (-8, -2), (-1, 3)))


def by_group(group: Sequence[int]) -> dict[int, list[int]]:
    rows = defaultdict(list)
    for row, number in enumerate(group):
        rows[number].append(row)
    return rows


def slow_twin(
    logp: Sequence[float], ref: Sequence[float], reward: Sequence[float], group: Sequence[int], beta: float, scale: str
) -> tuple[float, list[float], list[float]]:
    """Loss, residuals and log Z by the formulas of DESIGN section 4, one row after the other."""
    residual, log_z, losses = [0.0] * len(group), [0.0] * len(group), []
    for rows in by_group(group).values():
        estimate = math.fsum(reward[j] / beta - (logp[j] - ref[j]) for j in rows) / len(rows)
        for j in rows:
            log_z[j] = estimate
            residual[j] = estimate + (logp[j] - ref[j]) - reward[j] / beta
        if len(rows) >= 2:
            factor = beta / 2 if scale == "advantage" else 1.0
            losses.append(factor * math.fsum(residual[j] ** 2 for j in rows) / len(rows))
    return (math.fsum(losses) / len(losses) if losses else 0.0), residual, log_z


# ---- known answers ------------------------------------------------------------------------------


def test_two_siblings_by_hand() -> None:
    # beta 0.5; l = (-1 - -2, -2 - -2.5) = (1, 0.5); r/beta = (2, 0); r/beta - l = (1, -0.5); log Z = 0.25
    # delta = 0.25 - (1, -0.5) = (-0.75, 0.75); mean square 0.5625; x beta/2 = 0.140625
    # A = (1 - 0.5) - 0.5 (1 - 0.75), and its negative = (0.375, -0.375); gradient = -A/2
    loss, slope = balance([-1, -2], [-2, -2.5], [1, 0], [4, 4], beta=0.5)
    assert loss == pytest.approx(0.140625, abs=TIGHT)
    assert slope == pytest.approx([-0.1875, 0.1875], abs=TIGHT)
    found = trajectory_balance(tensor([-1, -2]), tensor([-2, -2.5]), tensor([1, 0]), torch.tensor([4, 4]), beta=0.5)
    assert found.residual.tolist() == pytest.approx([-0.75, 0.75], abs=TIGHT)
    assert found.log_z.tolist() == pytest.approx([0.25, 0.25], abs=TIGHT)


@pytest.mark.parametrize(
    ("rewards", "loss"),
    [
        pytest.param([[0, 0, 0, 0], [1, 1, 1, 1]], 0.0, id="d01 equal text is not one group"),
        pytest.param([[0, 1]], 0.25, id="d02 one id is one group"),
        pytest.param([[0.4] * 4], 0.0, id="d04 flat"),
        pytest.param([[0, 0, 1, 1]], 0.25, id="d04 not flat"),
        pytest.param([[0.95, 0.95, 0.95, 0.95000001]], 0.0, id="d04 flat within tolerance"),
        pytest.param([[0, 1], [0.5, 0.5, 0.5], [0, 2]], 1.25 / 3, id="e01 mean over all groups"),
        pytest.param([[0, 1], [4, 5]], 0.25, id="e02"),
        pytest.param([[1, 0, 0]], 2 / 9, id="f05 unscored not in the mean"),
    ],
)
def test_cases_with_policy_equal_to_reference(rewards: list[list[float]], loss: float) -> None:
    assert on_reference(rewards, beta=1.0, scale="paper") == pytest.approx(loss, abs=1e-12)


def test_residual_uses_the_policy_of_now_f04() -> None:
    # logp now -4, reference -3.5, reward 1, beta 1: -4 + 3.5 - 1 = -1.5 beside log Z
    found = trajectory_balance(
        tensor([-4, -2]), tensor([-3.5, -2.5]), tensor([1, 0]), torch.tensor([0, 0]), beta=1.0, scale="paper"
    )
    assert float((found.residual - found.log_z)[0]) == pytest.approx(-1.5, abs=TIGHT)


def test_sampling_temperature_is_not_in_the_residual_f08() -> None:
    target, mask = torch.tensor([[0]]), torch.tensor([[True]])
    logp = target_logps(torch.tensor([[[2.0, 1.0, 0.0]]]), target, mask, 1.0).sum(-1).double()
    assert float(logp) == pytest.approx(-0.407606, abs=1e-6)
    found = trajectory_balance(logp, tensor([-1.0]), tensor([0.6]), torch.tensor([5]), beta=0.3)
    assert float((found.residual - found.log_z)[0]) == pytest.approx(-0.407606 + 1 - 2, abs=1e-6)


def test_empty_completion_is_finite_b08() -> None:
    # the empty completion has log-prob 0; only the objective could ever see one, since records refuse it
    loss, slope = balance([0.0, -0.9, -4.0], [0.0, -1.0, -3.0], [0, 0, 1], [1, 1, 1], beta=BETA)
    assert math.isfinite(loss)
    assert all(map(math.isfinite, slope))


def test_group_of_one_row_has_no_gradient_and_is_not_in_the_denominator() -> None:
    loss, slope = balance([-1, -2, -3], [-2, -2.5, -1], [1, 0, 9], [4, 4, 5], beta=0.5)
    assert loss == pytest.approx(0.140625, abs=TIGHT)
    assert slope == pytest.approx([-0.1875, 0.1875, 0.0], abs=TIGHT)


def test_only_groups_of_one_row_make_a_zero_loss() -> None:
    assert balance([-1, -2], [-2, -2.5], [1, 0], [4, 5], beta=BETA) == (0.0, [0.0, 0.0])


def test_flat_group_away_from_the_reference_pulls_back() -> None:
    # l = (0.2, -0.4), mean -0.1: A = -beta (0.3, -0.3); gradient = -A/2
    _, slope = balance([-1.8, -2.4], [-2, -2], [0.7, 0.7], [3, 3], beta=BETA)
    assert slope == pytest.approx([BETA * 0.15, -BETA * 0.15], abs=TIGHT)


# ---- slow twin and invariances ------------------------------------------------------------------

finite = st.floats(-20, 20, allow_nan=False, width=32)
rows = st.lists(
    st.tuples(finite, finite, finite, st.integers(-3, 3).map(lambda n: n * 12_345_678_901)), min_size=1, max_size=14
)
QUICK = settings(max_examples=40, deadline=None, derandomize=True)


@QUICK
@given(rows=rows, beta=st.floats(0.02, 3.0), scale=st.sampled_from(["advantage", "paper"]))
def test_agrees_with_the_slow_twin(rows: list[tuple[float, float, float, int]], beta: float, scale: str) -> None:
    logp, ref, reward, group = map(list, zip(*rows, strict=True))
    loss, residual, log_z = slow_twin(logp, ref, reward, group, beta, scale)
    found = trajectory_balance(
        tensor(logp), tensor(ref), tensor(reward), torch.tensor(group), beta=beta, scale=scale
    )
    assert float(found.loss) == pytest.approx(loss, rel=1e-9, abs=TIGHT)
    assert found.residual.tolist() == pytest.approx(residual, rel=1e-9, abs=TIGHT)
    assert found.log_z.tolist() == pytest.approx(log_z, rel=1e-9, abs=TIGHT)


@QUICK
@given(rows=rows, data=st.data())
def test_order_of_rows_does_not_matter(rows: list[tuple[float, float, float, int]], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(rows))))
    loss, slope = balance(*zip(*rows, strict=True), beta=BETA)
    again, moved = balance(*zip(*[rows[n] for n in order], strict=True), beta=BETA)
    assert again == pytest.approx(loss, rel=1e-12, abs=TIGHT)
    assert moved == pytest.approx([slope[n] for n in order], rel=1e-9, abs=TIGHT)


@QUICK
@given(rows=rows, shift=st.lists(finite, min_size=7, max_size=7))
def test_shifting_the_rewards_of_a_group_changes_nothing(
    rows: list[tuple[float, float, float, int]], shift: list[float]
) -> None:
    logp, ref, reward, group = map(list, zip(*rows, strict=True))
    moved = [r + shift[g // 12_345_678_901 + 3] for r, g in zip(reward, group, strict=True)]
    loss, slope = balance(logp, ref, reward, group, beta=BETA)
    again, slope_again = balance(logp, ref, moved, group, beta=BETA)
    assert again == pytest.approx(loss, rel=1e-9, abs=TIGHT)
    assert slope_again == pytest.approx(slope, rel=1e-9, abs=TIGHT)


def test_group_mean_against_a_loop() -> None:
    value, *_ = random_rows(3)
    rows_of = by_group(GROUP)
    expected = [math.fsum(value[j] for j in rows_of[g]) / len(rows_of[g]) for g in GROUP]
    assert group_mean(tensor(value), torch.tensor(GROUP)).tolist() == pytest.approx(expected, abs=TIGHT)


# ---- the gradient, for any data -----------------------------------------------------------------


def advantages(logp: Sequence[float], ref: Sequence[float], reward: Sequence[float]) -> list[float]:
    """-dloss/dlogp of each row of `GROUP`, the closed form: A_j / K over the number of counted groups."""
    counted = [rows for rows in by_group(GROUP).values() if len(rows) >= 2]
    found = [0.0] * len(GROUP)
    for rows in counted:
        size = len(rows)
        mean_r = math.fsum(reward[j] for j in rows) / size
        mean_l = math.fsum(logp[j] - ref[j] for j in rows) / size
        for j in rows:
            found[j] = ((reward[j] - mean_r) - BETA * (logp[j] - ref[j] - mean_l)) / size / len(counted)
    return found


@pytest.mark.parametrize("seed", range(3))
def test_gradient_is_minus_the_advantage_for_any_data(seed: int) -> None:
    logp, ref, reward = random_rows(seed)
    _, slope = balance(logp, ref, reward, GROUP, beta=BETA)
    expected = [-a for a in advantages(logp, ref, reward)]
    assert slope == pytest.approx(expected, abs=TIGHT)
    step = 1e-4
    for row in range(len(GROUP)):  # the loss is quadratic: central differences are exact but for rounding
        up, down = logp.copy(), logp.copy()
        up[row] += step
        down[row] -= step
        # log Z follows logp here, so this is the derivative with log Z not detached
        difference = slow_twin(up, ref, reward, GROUP, BETA, "advantage")[0]
        difference -= slow_twin(down, ref, reward, GROUP, BETA, "advantage")[0]
        assert difference / (2 * step) == pytest.approx(slope[row], abs=TIGHT)


@pytest.mark.parametrize("detached", [True, False])
def test_gradient_does_not_depend_on_detaching_log_z(detached: bool) -> None:
    logp, ref, reward = random_rows(11)
    logp_N = tensor(logp).requires_grad_(True)
    losses = []
    for rows in by_group(GROUP).values():
        ratio = logp_N[rows] - tensor(ref)[rows] - tensor(reward)[rows] / BETA
        log_z = -ratio.mean().detach() if detached else -ratio.mean()
        if len(rows) >= 2:
            losses.append(BETA / 2 * (log_z + ratio).square().mean())
    torch.stack(losses).mean().backward()
    assert logp_N.grad is not None
    assert balance(logp, ref, reward, GROUP, beta=BETA)[1] == pytest.approx(logp_N.grad.tolist(), abs=TIGHT)


def test_residual_and_log_z_carry_no_gradient() -> None:
    logp_N = tensor([-1, -2]).requires_grad_(True)
    found = trajectory_balance(logp_N, tensor([-1, -1]), tensor([0, 1]), torch.tensor([0, 0]), beta=BETA)
    assert (found.loss.requires_grad, found.residual.requires_grad, found.log_z.requires_grad) == (True, False, False)


def test_scale_paper_is_advantage_without_half_beta() -> None:
    data = random_rows(5)
    loss, slope = balance(*data, GROUP, beta=BETA)
    paper, paper_slope = balance(*data, GROUP, beta=BETA, scale="paper")
    assert loss == pytest.approx(paper * BETA / 2, abs=TIGHT)
    assert slope == pytest.approx([s * BETA / 2 for s in paper_slope], abs=TIGHT)


@pytest.mark.parametrize(("scale", "ratio"), [("advantage", 1.0), ("paper", 10.0)])
def test_annealing_beta_on_the_reference(scale: str, ratio: float) -> None:
    logp, _, reward = random_rows(6)
    _, before = balance(logp, logp, reward, GROUP, beta=BETA, scale=scale)
    _, after = balance(logp, logp, reward, GROUP, beta=BETA / 10, scale=scale)
    assert max(map(abs, before)) > 0.01
    assert after == pytest.approx([ratio * slope for slope in before], abs=TIGHT)


# ---- a policy that can be enumerated ------------------------------------------------------------

PAIRS = list(itertools.product(range(3), repeat=2))
"""Every completion of two ids out of three symbols."""
REWARD = [math.sin(2.3 * n) for n in range(9)]


def table_logp(first: Tensor, second: Tensor) -> Tensor:
    """[9] log-prob of each pair under a tabular softmax policy."""
    return (first.log_softmax(-1)[:, None] + second.log_softmax(-1)).reshape(-1)


def table_parameters(seed: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in ((3,), (3, 3)))


def gradient(value: Callable[[Tensor], Tensor]) -> Tensor:
    """[12] gradient of `value` (of the log-probs) with respect to the policy's parameters."""
    parameters = [p.requires_grad_(True) for p in table_parameters(1)]
    value(table_logp(*parameters)).backward()
    return torch.cat([p.grad.reshape(-1) for p in parameters if p.grad is not None])


@pytest.mark.parametrize("size", [2, 3])
def test_expected_descent_on_policy_is_the_gradient_of_reward_minus_kl(size: int) -> None:
    ref = table_logp(*table_parameters(2))
    reward = tensor(REWARD)

    def expected_loss(logp: Tensor) -> Tensor:
        total = logp.new_zeros(())
        for picked in map(list, itertools.product(range(9), repeat=size)):
            found = trajectory_balance(
                logp[picked], ref[picked], reward[picked], torch.zeros(size, dtype=torch.long), beta=BETA
            )
            total = total + logp[picked].sum().exp().detach() * found.loss  # a tuple of independent draws
        return total

    def reward_minus_kl(logp: Tensor) -> Tensor:
        return (logp.exp() * (reward - BETA * (logp - ref))).sum()

    descent = -gradient(expected_loss)
    assert float(descent.abs().max()) > 0.05
    assert float((descent - (size - 1) / size * gradient(reward_minus_kl)).abs().max()) < TIGHT


def test_every_residual_is_zero_at_the_target_where_log_z_is_exact() -> None:
    ref = table_logp(*table_parameters(2))
    raw = ref + tensor(REWARD) / BETA
    log_z = float(raw.logsumexp(0))
    picked = torch.tensor([0, 4, 4, 8, 1, 7, 3, 2])  # data of any age: no distribution in particular
    found = trajectory_balance(
        (raw - log_z)[picked], ref[picked], tensor(REWARD)[picked], torch.tensor([0, 0, 0, 1, 1, 2, 0, 1]), beta=BETA
    )
    assert abs(log_z) > 0.5
    assert found.residual.abs().max() < TIGHT
    assert found.log_z.tolist() == pytest.approx([log_z] * 8, abs=TIGHT)
    assert float(found.loss) < TIGHT


# ---- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.0, -0.1, math.nan])
def test_beta_must_be_positive(beta: float) -> None:
    with pytest.raises(ValueError, match=f"objective.beta = {beta}"):
        on_reference([[0, 1]], beta=beta)


def test_unknown_scale_is_named() -> None:
    with pytest.raises(ValueError, match="'papper' is unknown; known: advantage, paper"):
        on_reference([[0, 1]], beta=BETA, scale="papper")


def test_shape_that_would_broadcast_is_refused() -> None:
    column = tensor([1, 0])[:, None]
    with pytest.raises(TypeCheckError):
        trajectory_balance(tensor([-1, -2]), tensor([-1, -2]), column, torch.tensor([0, 0]), beta=BETA)


def test_names_of_settings_are_those_of_the_room() -> None:
    assert list(OBJECTIVES) == list(NAMES)
    assert OBJECTIVES["trajectory_balance"] is trajectory_balance
