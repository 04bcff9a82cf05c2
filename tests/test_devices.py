"""Models compute where the settings say, and nowhere else."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from makers import settings_with
from tba import assembly
from tba.devices import device_of
from tba.sections import SettingsError


def test_auto_is_what_there_is() -> None:
    assert device_of("auto", "x").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert device_of("cpu", "x") == torch.device("cpu")


@pytest.mark.parametrize(("name", "said"), [
    ("gpu", "policy.device = 'gpu' is no device; write cpu, cuda"),
    ("meta", "policy.device = 'meta' is no device"),
    ("cpu:3", "policy.device = 'cpu:3' is not here: this process sees 1 devices"),
    ("cuda:97", "policy.device = 'cuda:97' is not here: this process sees"),
])
def test_a_device_that_is_not_here_is_refused_with_the_way_out(name: str, said: str) -> None:
    with pytest.raises(SettingsError) as caught:
        device_of(name, "policy.device")
    assert said in str(caught.value)


def test_it_is_refused_before_a_model_loads_with_exit_code_two(tmp_path: object) -> None:
    words = ["train", "enumerable", "policy.device=cuda:97", "model=./nowhere-at-all", "--run", f"{tmp_path}/run"]
    done = subprocess.run([sys.executable, "-m", "tba", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_a_policy_is_made_on_its_device_and_all_copies_stay_there(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_with("enumerable", policy={"device": "cpu"})
    asked: list[str] = []

    def found(name: str, place: str) -> torch.device:
        asked.append(f"{place}={name}")
        return torch.device("meta")  # as far away as this machine has

    monkeypatch.setattr(assembly, "device_of", found)
    policy = assembly.make_policy(settings, assembly.make_task_of(settings))
    assert asked == ["policy.device=cpu"]
    copies = (policy, policy.trainable_copy(), policy.frozen_copy(), policy.without_adapter())
    assert {p.device.type for made in copies for p in made.model.parameters()} == {"meta"}


@pytest.mark.gpu
def test_a_step_on_a_gpu_is_that_of_the_cpu() -> None:
    from support import llama_policy, random_draws
    from tba.batch import collate
    from tba.trainer import Trainer

    losses = []
    for device in ("cpu", "cuda"):
        policy = llama_policy(1)
        policy.model.to(device)
        trainer = Trainer(policy.trainable_copy(), settings_with("enumerable"))
        losses.append(trainer.step(collate(random_draws([4, 4]), max_tokens=64))["train/loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
