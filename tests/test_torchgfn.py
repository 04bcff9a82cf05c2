"""Scale "paper" against torchgfn's log-partition variance: an independent implementation of the same loss."""

from __future__ import annotations

import pytest
import torch
from gfn.gflownet import LogPartitionVarianceGFlowNet
from gfn.gym import HyperGrid
from gfn.modules import DiscretePolicyEstimator
from gfn.samplers import Sampler
from gfn.utils.modules import DiscreteUniform, Tabular
from torch import Tensor

from tba.objectives import trajectory_balance

HEIGHT = 6
BETA = 0.37
EXIT = 1
"""Action that ends a walk; the other one, 0, goes one place on."""


def walk_logps(table: Tensor, steps: Tensor) -> Tensor:
    """Log-prob of walks of so many steps and an exit: at the last place there is nothing but the exit."""
    logp = table.log_softmax(-1)
    ahead = torch.cat([table.new_zeros(1), logp[:-1, 0].cumsum(0)])
    stop = torch.cat([logp[:-1, EXIT], table.new_zeros(1)])
    return (ahead + stop)[steps]


class Walks(HyperGrid):
    """A grid of one dimension is a tree of walks, as completions over one symbol and a stop token are."""

    def __init__(self, reference: Tensor) -> None:
        super().__init__(ndim=1, height=HEIGHT, preprocessor_name="Enum")
        self.reference = reference

    def log_reward(self, final_states: object) -> Tensor:
        """log pi_ref(y) + r(y) / beta"""
        steps = final_states.tensor[..., 0]  # type: ignore[attr-defined]
        return (walk_logps(self.reference, steps) + rewards(steps) / BETA).float()


def rewards(steps: Tensor) -> Tensor:
    return torch.sin(2.3 * steps.double()) * 0.4


@pytest.mark.parametrize("seed", range(3))
def test_scale_paper_is_the_log_partition_variance_of_a_single_prompt(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    table, reference = (torch.randn(HEIGHT, 2, generator=draw, dtype=torch.float64) * 0.5 for _ in range(2))
    env = Walks(reference)
    forward = DiscretePolicyEstimator(Tabular(HEIGHT, 2), n_actions=2, preprocessor=env.preprocessor)
    backward = DiscretePolicyEstimator(
        DiscreteUniform(1), n_actions=2, preprocessor=env.preprocessor, is_backward=True
    )
    with torch.no_grad():
        forward.module.table.copy_(table)
    theirs = LogPartitionVarianceGFlowNet(pf=forward, pb=backward)
    torch.manual_seed(seed)
    # walks of another policy than the one that learns: epsilon 0.5
    walks = Sampler(forward).sample_trajectories(env, n_trajectories=23, save_logprobs=False, epsilon=0.5)
    loss = theirs.loss(env, walks, recalculate_all_logprobs=True)
    loss.backward()

    steps = walks.last_states.tensor[..., 0]
    assert len(steps.unique()) > 3
    table = forward.module.table.detach().double().requires_grad_(True)
    ours = trajectory_balance(
        walk_logps(table, steps), walk_logps(reference, steps), rewards(steps), torch.zeros(23, dtype=torch.long),
        beta=BETA, scale="paper",
    )
    ours.loss.backward()
    assert float(ours.loss.detach()) > 0.1
    assert float(ours.loss.detach() - loss.detach()) == pytest.approx(0.0, abs=1e-6)
    assert float((table.grad - forward.module.table.grad).abs().max()) < 1e-6
    assert float(table.grad.abs().max()) > 0.01
