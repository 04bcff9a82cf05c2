"""An adapter on a shared base: what trains, what travels, what is saved, and merging."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from support import LETTERS, STOP, TEMPERATURE, make_settings, random_draws
from tba import lora
from tba import metrics as m
from tba.batch import collate
from tba.engines.table import TableEngine
from tba.engines.transformers import TransformersEngine
from tba.policy import Policy, copy_out, load_policy, named_tensors
from tba.sections import LoraSettings
from tba.settings import ArchitectureSettings, SettingsError
from tba.trainer import Trainer

WIDTH, RANK, LAYERS = 16, 3, 2
SHAPE = ArchitectureSettings(layers=LAYERS, width=WIDTH, heads=2, positions=32)
PAIRS = [((1, 3), (5, 6, STOP)), ((1, 4, 5), (7, STOP)), ((1, 3), (3, 3, 3, STOP))]


def plain_policy(seed: int = 1) -> Policy:
    return load_policy("new-llama", architecture=SHAPE, characters=LETTERS, seed=seed, temperature=TEMPERATURE)


def adapted_policy(seed: int = 1, **adapter: Any) -> Policy:
    return load_policy(
        "new-llama", architecture=SHAPE, characters=LETTERS, seed=seed, temperature=TEMPERATURE,
        adapter=LoraSettings(**{"rank": RANK, "alpha": 5.0, **adapter}),
    )


def make_trainer(policy: Policy, **sections: Any) -> Trainer:
    return Trainer(policy, make_settings(
        objective={"beta": 0.37}, trainer={"learning_rate": 0.02, "clip_norm": None}, **sections
    ))


def trained(steps: int = 3, **sections: Any) -> Trainer:
    trainer = make_trainer(adapted_policy().trainable_copy(), **sections)
    for seed in range(steps):
        trainer.step(collate(random_draws((3, 2), seed=seed), max_tokens=60))
    return trainer


def base_tensors(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: t for name, t in policy.model.state_dict().items() if not lora.is_adapter_name(name)}


def adapter_size(names: int = 7) -> int:
    """Numbers in the adapter: rank (in + out) of each of a block's seven linear layers."""
    inner = 8 * WIDTH // 3
    shapes = [(WIDTH, WIDTH)] * 4 + [(WIDTH, inner)] * 2 + [(inner, WIDTH)]
    return LAYERS * sum(RANK * (a + b) for a, b in shapes[:names])


# ---- the same model until it is trained -------------------------------------------------------------


def test_a_fresh_adapter_changes_nothing_and_off_is_the_base_to_the_bit() -> None:
    plain, adapted = plain_policy(), adapted_policy()
    assert adapted.sequence_logps(PAIRS) == plain.sequence_logps(PAIRS)
    trainer = trained()
    assert trainer.policy.sequence_logps(PAIRS) != pytest.approx(plain.sequence_logps(PAIRS), abs=1e-2)
    assert trainer.policy.without_adapter().sequence_logps(PAIRS) == plain.sequence_logps(PAIRS)
    assert trainer.policy.sequence_logps(PAIRS) != plain.sequence_logps(PAIRS)  # turned off in the copy alone


def test_the_seed_fixes_the_adapter() -> None:
    one, again, other = (copy_out(adapted_policy(seed).model) for seed in (1, 1, 2))
    assert all((one[name] == again[name]).all() for name in one)
    assert any((one[name] != other[name]).any() for name in one)


def test_training_changes_the_adapter_alone() -> None:
    start = adapted_policy()
    before = {name: tensor.clone() for name, tensor in base_tensors(start).items()}
    trainer = make_trainer(start.trainable_copy())
    first = copy_out(trainer.policy.model)
    for seed in range(2):
        trainer.step(collate(random_draws((3, 2), seed=seed), max_tokens=60))
    after = copy_out(trainer.policy.model)
    assert all(bool((tensor == before[name]).all()) for name, tensor in base_tensors(trainer.policy).items())
    assert all((first[name] != after[name]).any() for name in first)
    grads = {name for name, p in trainer.policy.model.named_parameters() if p.grad is not None}
    assert grads == set(after)


def test_the_update_is_alpha_over_rank_b_a() -> None:
    policy = adapted_policy().frozen_copy()
    layer = policy.model.base_model.model.model.layers[0].self_attn.q_proj
    with torch.no_grad():
        layer.lora_B["default"].weight.normal_(generator=torch.Generator().manual_seed(0))
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
    a, b, w = (t.weight.double() for t in (layer.lora_A["default"], layer.lora_B["default"], layer.base_layer))
    expected = x.double() @ (w + 5.0 / RANK * b @ a).T
    assert float((layer(x).double() - expected).abs().max()) < 1e-6


# ---- one base ---------------------------------------------------------------------------------------


def test_copies_share_the_base_and_nothing_of_the_adapter() -> None:
    start = adapted_policy()
    copies = [start.frozen_copy(), start.trainable_copy(), start.without_adapter()]
    own = dict(start.model.named_parameters())
    for made in copies:
        for name, parameter in made.model.named_parameters():
            assert (parameter is own[name]) is not lora.is_adapter_name(name), name
    trainable = [n for n, p in copies[1].model.named_parameters() if p.requires_grad]
    assert trainable == [n for n in own if lora.is_adapter_name(n)]
    assert not any(p.requires_grad for made in (copies[0], copies[2]) for p in made.model.parameters())


def test_a_moving_reference_with_adapter_shares_the_base_of_the_policy() -> None:
    trainer = trained(reference={"kind": "reset", "every": 2})
    base = {id(p) for n, p in trainer.policy.model.named_parameters() if not lora.is_adapter_name(n)}
    reference = trainer._reference
    assert set(reference.state()) == set(named_tensors(trainer.policy.model))
    assert reference._policy is not None
    shared = {id(p) for n, p in reference._policy.model.named_parameters() if not lora.is_adapter_name(n)}
    assert shared == base


# ---- what travels -----------------------------------------------------------------------------------


def test_a_publication_holds_the_adapter_alone() -> None:
    trainer = trained(reference={"kind": "reset", "every": 2})
    published = trainer.publish(0)
    numbers = adapter_size()  # 2 x 3 x (4 x 32 + 3 x 58) = 1812, of a model with 6000 to 7000
    assert numbers == 1812
    assert sum(tensor.size for tensor in published.tensors.values()) == numbers
    assert published.reference is not None
    assert sum(tensor.size for tensor in published.reference.values()) == numbers
    assert sum(p.numel() for p in trainer.policy.model.parameters()) > 3 * numbers


@pytest.mark.parametrize("make", [TableEngine, TransformersEngine])
def test_an_engine_that_loads_a_publication_samples_as_the_trainer_would(make: Any) -> None:
    from support import make_prompt
    from tba.engines.protocol import Sampling

    trainer = trained()
    engine = make(adapted_policy().frozen_copy())
    engine.load(trainer.publish(0).tensors, 3)
    sampling = Sampling(max_new_tokens=4, temperature=TEMPERATURE)
    ((completions),) = engine.generate([make_prompt("p", (1, 3))], num_samples=6, sampling=sampling, seeds=[4])
    pairs = [((1, 3), c.tokens) for c in completions]
    assert [c.logp for c in completions] == pytest.approx(trainer.policy.sequence_logps(pairs), abs=1e-4)


@pytest.mark.parametrize("make", [TableEngine, TransformersEngine])
def test_an_adapter_may_be_loaded_in_the_midst_of_a_batch(make: Any) -> None:
    from support import make_prompt
    from tba.engines.protocol import Pause, Sampling

    trainer, start = trained(), adapted_policy()
    engine, tensors = make(start.frozen_copy()), trainer.publish(0).tensors
    pause = Pause(every=2, do=lambda: engine.load(tensors, 3))
    sampling = Sampling(max_new_tokens=4, temperature=TEMPERATURE)
    ((completions),) = engine.generate(
        [make_prompt("p", (1, 3))], num_samples=6, sampling=sampling, seeds=[4], pause=pause
    )
    pairs = [((1, 3), c.tokens) for c in completions]
    both = zip(completions, start.completion_logps(pairs), trainer.policy.completion_logps(pairs), strict=True)
    for completion, before, after in both:
        assert completion.logps == pytest.approx((*before[:2], *after[2:]), abs=1e-4)
    assert {c.token_versions for c in completions} >= {(0, 0, 3, 3)}


def test_an_engine_samples_in_bfloat16_on_a_base_of_its_own_and_holds_what_was_published() -> None:
    from support import make_prompt
    from tba.engines.protocol import Sampling

    trainer, start = trained(), adapted_policy()
    policy = start.sampling_copy("bfloat16")
    for name, tensor in policy.model.named_parameters():
        assert tensor.dtype == (torch.float32 if lora.is_adapter_name(name) else torch.bfloat16), name
        assert not tensor.requires_grad
    assert {tensor.dtype for tensor in start.model.parameters()} == {torch.float32}  # not that of the others
    inner = policy.model.get_base_model()
    assert inner.lm_head.weight is inner.get_input_embeddings().weight  # tied, as it was
    engine = TransformersEngine(policy)
    published = trainer.publish(0).tensors
    engine.load(published, 3)
    held = engine.tensors()
    assert held.keys() == published.keys()
    assert all((held[name] == published[name]).all() for name in held)
    sampling = Sampling(max_new_tokens=4, temperature=TEMPERATURE)
    ((completions),) = engine.generate([make_prompt("p", (1, 3))], num_samples=6, sampling=sampling, seeds=[4])
    gap = [abs(c.logp - own) for c, own in zip(
        completions, trainer.policy.sequence_logps([((1, 3), c.tokens) for c in completions]), strict=True
    )]
    assert 1e-5 < max(gap) < 0.2


def test_a_sampling_copy_in_the_same_precision_shares_the_base() -> None:
    start = adapted_policy()
    own = dict(start.model.named_parameters())
    for name, tensor in start.sampling_copy("float32").model.named_parameters():
        assert (tensor is own[name]) is not lora.is_adapter_name(name), name


# ---- what is saved ----------------------------------------------------------------------------------


def test_the_final_folder_is_a_plain_model_equal_to_base_plus_adapter(tmp_path: Path) -> None:
    trainer = trained()
    before = trainer.policy.sequence_logps(PAIRS)
    trainer.policy.save(tmp_path)
    assert trainer.policy.sequence_logps(PAIRS) == before
    merged = load_policy(
        str(tmp_path), architecture=SHAPE, characters="", seed=0, temperature=TEMPERATURE
    )
    assert not lora.has_adapter(merged.model)
    # float32 sums of a different order, so relative to the size of the numbers
    worst = max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(merged.sequence_logps(PAIRS), before, strict=True))
    assert worst < 1e-6
    assert not any(map(lora.is_adapter_name, load_file(tmp_path / "model.safetensors")))


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_the_exported_adapter_on_the_base_is_the_policy(tmp_path: Path) -> None:
    from peft import PeftModel

    trainer = trained()
    trainer.policy.save(tmp_path)
    found = Policy(
        model=PeftModel.from_pretrained(plain_policy().model, str(tmp_path / "adapter")).eval(),
        tokenizer=trainer.policy.tokenizer, temperature=TEMPERATURE,
    )  # fmt: skip
    assert found.sequence_logps(PAIRS) == trainer.policy.sequence_logps(PAIRS)


def test_a_checkpoint_holds_the_adapter_alone_and_goes_on_to_the_bit(tmp_path: Path) -> None:
    trainer = trained(reference={"kind": "ema", "decay": 0.5})
    trainer.save(tmp_path)
    saved = load_file(tmp_path / "trainer.safetensors")
    parts = {"weights.", "reference.", "optimizer.exp_avg.", "optimizer.exp_avg_sq."}
    for part in parts:
        assert sum(t.numel() for n, t in saved.items() if n.startswith(part)) == adapter_size(), part
    resumed = make_trainer(adapted_policy().trainable_copy(), reference={"kind": "ema", "decay": 0.5})
    resumed.load(tmp_path)
    batch = collate(random_draws((3, 2), seed=9), max_tokens=60)
    clocks = {m.STEP_SECONDS: 0, m.RESCORE_SECONDS: 0}
    assert {**trainer.step(batch), **clocks} == {**resumed.step(batch), **clocks}
    assert trainer.publish(0).digest == resumed.publish(0).digest
    assert math.isfinite(sum(resumed.policy.sequence_logps(PAIRS)))


# ---- settings ---------------------------------------------------------------------------------------


def test_targets_choose_the_layers_and_unknown_ones_are_refused() -> None:
    names = set(copy_out(adapted_policy(targets=("q_proj", "v_proj")).model))
    assert len(names) == LAYERS * 2 * 2
    assert all("q_proj" in name or "v_proj" in name for name in names)
    with pytest.raises(SettingsError, match=r"policy\.lora\.targets.*not_there"):
        adapted_policy(targets=("not_there",))


def test_an_adapter_on_a_table_is_refused_before_a_model_loads() -> None:
    with pytest.raises(ValueError, match=r"policy\.lora\.rank = 2"):
        make_settings(model="new-table", engine={"name": "table"}, policy={"lora": {"rank": 2}})


# ---- whole runs -------------------------------------------------------------------------------------


def test_a_run_trains_an_adapter_and_its_final_model_is_evaluated_as_any(tmp_path: Path) -> None:
    from tba import jobs
    from tba.reading import read_settings
    from tba.run import Run, RunDirectory

    words = ["mode=lockstep", "trainer.steps=4", "trainer.sync_every=2", "trainer.groups_per_step=8",
             "policy.lora.rank=4", "search.batch_prompts=8", "evaluation.every=0", "evaluation.prompts=8",
             "trainer.learning_rate=0.01", "policy.lora.targets=[q_proj, v_proj]", "buffer.initial=0", "buffer.reuse=1",
             "trainer.warmup_steps=0"]
    settings = read_settings("arithmetic", words)
    directory = RunDirectory(tmp_path / "run")
    directory.create(settings)
    summary = Run(settings, directory, lambda kind, record: None).execute()
    assert summary["status"] == "done"
    assert summary["start"][m.EVAL_KL] == pytest.approx(0.0, abs=1e-5)
    assert abs(summary["final"][m.EVAL_KL]) > 1e-3  # an estimate from samples, of either sign
    saved = load_file(next((tmp_path / "run" / "checkpoints").iterdir()) / "trainer.safetensors")
    assert all(lora.is_adapter_name(name) for name in saved)
    found = jobs.evaluate(*jobs.subject_of(str(tmp_path / "run"), None))
    for name in (m.PASS_1, m.EVAL_KL, m.EVAL_REWARD, m.EVAL_LENGTH):
        assert found[name] == pytest.approx(summary["final"][name], abs=1e-4), name
    assert "one base" in jobs.arithmetic_of(settings)["memory"]
