"""Policy: ids in, log-probs out; templates; weights in and out; folders."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import processors

from support import LETTERS, STOP, TEMPERATURE, llama_policy, slow_logps, table_policy
from tba.batch import make_rows
from tba.policy import Policy, copy_in, copy_out, load_policy, named_tensors, target_logps
from tba.settings import ArchitectureSettings, SettingsError

MAKERS = {"llama": llama_policy, "table": table_policy}
BOS = 1
PAIRS = [((1, 3, 4), (5, 0, STOP)), ((1, 5), (STOP,)), ((1, 4, 3), (0, 0, 3, 1)), ((1, 5), (STOP,))]


def load(model: Path, **options: Any) -> Policy:
    arguments = {"architecture": ArchitectureSettings(), "characters": "", "seed": 0, "temperature": TEMPERATURE}
    return load_policy(str(model), **{**arguments, **options})


# ---- log-probs ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("logits", "temperature", "expected"),
    [
        pytest.param([2.0, 1.0, 0.0], 0.5, -0.142932, id="c01"),  # -log(1 + e^-2 + e^-4)
        pytest.param([1.0, 1.0, 1.0], 0.5, -1.098612, id="c02 reference"),  # -log 3
        pytest.param([2.0, 1.0, 0.0], 1.0, -0.407606, id="f08"),  # -log(1 + e^-1 + e^-2)
    ],
)
def test_log_prob_at_the_policys_temperature(logits: list[float], temperature: float, expected: float) -> None:
    found = target_logps(torch.tensor([[logits]]), torch.tensor([[0]]), torch.tensor([[True]]), temperature)
    assert found.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("kind", MAKERS)
def test_token_logps_equal_one_unpadded_forward_each(kind: str) -> None:
    policy = MAKERS[kind](3)
    rows = make_rows(PAIRS)
    found = policy.token_logps(rows)
    assert found.dtype == torch.float32
    for row, (prompt, completion) in enumerate(PAIRS):
        expected = torch.stack(slow_logps(policy, prompt, completion)).tolist()
        assert found[row][rows.completion_NT[row]].tolist() == pytest.approx(expected, abs=1e-5)
    assert not found[~rows.completion_NT].any()


LONG, SHORT = (1, 3, 4, 3, 5, 3), (1, 5, 3, 5)
SIBLINGS = [
    (LONG, (5, 0, STOP)), (LONG, (STOP,)), (SHORT, (4, 4, 4, 0)), (SHORT, (3, STOP)),
    (LONG, (0, 5, 5, 3)), (SHORT, (STOP,)), (LONG, (4, STOP)), (SHORT, (0, STOP)),
]


def read_places(policy: Policy) -> list[tuple[int, ...]]:
    """Shapes of what the model is given from now on."""
    shapes: list[tuple[int, ...]] = []
    policy.model.register_forward_pre_hook(
        lambda model, args, given: shapes.append(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    return shapes


def test_a_prompt_is_read_once_for_all_of_its_completions() -> None:
    policy, plain = llama_policy(3).trainable_copy(), llama_policy(3).trainable_copy()
    shapes = read_places(policy)
    rows = make_rows(SIBLINGS)
    assert rows.prompt_N.tolist() == [0, 0, 1, 1, 0, 1, 0, 1]
    found = policy.token_logps(rows)
    assert shapes == [(2, 6), (8, 3)]  # 36 positions; 8 rows of 6 + 4 - 1 are 72
    slow = [torch.stack(slow_logps(plain, *pair)) for pair in SIBLINGS]
    for row, expected in enumerate(slow):
        assert found[row][rows.completion_NT[row]].tolist() == pytest.approx(expected.tolist(), abs=1e-5)
    assert not found[~rows.completion_NT].any()
    weight_N = torch.tensor([0.3, -1.1, 0.7, 2.0, -0.4, 0.9, 1.3, -0.2])
    (found.sum(1) * weight_N).sum().backward()
    torch.stack([w * one.sum() for w, one in zip(weight_N, slow, strict=True)]).sum().backward()
    for (name, one), other in zip(policy.model.named_parameters(), plain.model.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.allclose(one.grad, other.grad, atol=1e-5), name


def test_completions_of_one_token_need_the_prompts_only() -> None:
    policy = llama_policy(3)
    pairs = [((1, 3, 4), (5,)), ((1, 3, 4), (STOP,)), ((1, 3, 4), (0,))]
    shapes = read_places(policy)
    found = policy.sequence_logps(pairs)
    assert shapes == [(1, 3)]
    assert found == pytest.approx([slow_logps(policy, *pair)[0].item() for pair in pairs], abs=1e-5)


def test_prompts_are_read_with_their_rows_where_little_would_be_saved() -> None:
    policy = llama_policy(3)
    shapes = read_places(policy)
    policy.sequence_logps([((1, 3), (5, 4, 4, 0, STOP)), ((1, 3), (4, 4, 0, 0, STOP))])
    assert shapes == [(2, 6)]  # 12 positions; apart they are 2 + 2 x 4 = 10, more than three quarters


def test_a_model_without_a_cache_reads_whole_rows() -> None:
    policy = table_policy(3)
    shapes = read_places(policy)
    policy.token_logps(make_rows([((1, 3, 4), (5,)), ((1, 3, 4), (STOP,)), ((1, 3, 4), (0,))]))
    assert shapes == [(3, 3)]


@pytest.mark.parametrize("max_tokens", [1, 11, 1000])
def test_sequence_logps_come_in_the_order_asked(max_tokens: int) -> None:
    policy = llama_policy(3)
    expected = [sum(map(float, slow_logps(policy.frozen_copy(), *pair))) for pair in PAIRS]
    found = policy.sequence_logps(PAIRS, max_tokens=max_tokens)
    assert found == pytest.approx(expected, abs=1e-5)
    assert found[1] == found[3]


def test_a_completion_is_read_under_its_own_prompt() -> None:
    policy = llama_policy(3)
    one, other = policy.sequence_logps([((1, 3), (5, STOP)), ((1, 4), (5, STOP))])
    assert abs(one - other) > 0.01


def test_dropout_of_the_model_is_off_c07(tmp_path: Path) -> None:
    llama_policy(3).save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.5}))
    loaded = load(tmp_path)
    rows = make_rows(PAIRS)
    for policy in (loaded, loaded.trainable_copy(), loaded.frozen_copy()):
        assert torch.equal(policy.token_logps(rows), policy.token_logps(rows))
    loaded.model.train()  # the dropout would bite
    assert not torch.equal(loaded.token_logps(rows), loaded.token_logps(rows))


def test_log_softmax_is_float32_under_bfloat16_c04() -> None:
    policy = llama_policy(3)
    half = dataclasses.replace(policy, autocast=True)
    rows = make_rows(PAIRS)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        logits = policy.model(input_ids=rows.input_NT, attention_mask=rows.attention_NT).logits
    assert logits.dtype == torch.bfloat16
    exact = (logits.double() / TEMPERATURE).log_softmax(-1).gather(-1, rows.target_NT[..., None])[..., 0]
    found = half.token_logps(rows).detach()
    assert found.dtype == torch.float32
    assert (found - exact)[rows.completion_NT].abs().max() < 1e-5
    gap = (found - policy.token_logps(rows)).abs().max()
    assert 1e-5 < gap < 0.3  # the forward did run in bfloat16


def test_gradient_under_bfloat16_reaches_float32_weights() -> None:
    policy = dataclasses.replace(llama_policy(3).trainable_copy(), autocast=True)
    policy.token_logps(make_rows(PAIRS)).sum().backward()
    assert {p.grad.dtype for p in policy.model.parameters()} == {torch.float32}


# ---- text to ids and back -----------------------------------------------------------------------


@pytest.mark.parametrize("text", ["abc", "<bos>abc", "<bos><bos>abc"])
def test_bos_comes_exactly_once_b01_b02(text: str) -> None:
    assert llama_policy().encode(text) == (BOS, 3, 4, 5)


def test_no_stop_token_is_appended_to_a_prompt() -> None:
    policy = llama_policy()
    policy.tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", BOS), ("<eos>", STOP)]
    )
    assert policy.tokenizer("ab")["input_ids"] == [BOS, 3, 4, STOP]
    assert policy.encode("ab") == (BOS, 3, 4)


def test_a_tokenizer_without_bos_gets_none() -> None:
    policy = llama_policy()
    policy.tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    policy.tokenizer.bos_token = None
    assert policy.encode("aab") == (3, 3, 4)


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['content'] }}h{% endfor %}"
    "{% if add_generation_prompt %}gf{% endif %}"
)


def test_chat_template_once_with_one_assistant_header_b10() -> None:
    policy = llama_policy()
    policy.tokenizer.chat_template = TEMPLATE
    ids = policy.encode([{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}])
    assert ids == (BOS, *[LETTERS.index(c) + 3 for c in "abhchgf"])
    assert policy.decode(ids).count("gf") == 1


def test_chat_template_without_bos_gets_none() -> None:
    policy = llama_policy()
    policy.tokenizer.chat_template = TEMPLATE.removeprefix("{{ bos_token }}")
    assert policy.encode([{"role": "user", "content": "ab"}]) == tuple(LETTERS.index(c) + 3 for c in "abhgf")


def test_decode_drops_special_ids_only() -> None:
    assert llama_policy().decode([BOS, 3, 0, 10, STOP]) == "ah"


def test_every_stop_id_of_the_generation_config_counts_b05() -> None:
    policy = llama_policy()
    assert policy.stop_ids == {STOP}
    policy.model.generation_config.eos_token_id = [1, 106]
    assert policy.stop_ids == {1, 106, STOP}
    fake = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=None))
    assert dataclasses.replace(policy, model=fake).stop_ids == {STOP}


# ---- copies and weights -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MAKERS)
def test_copies_are_independent(kind: str) -> None:
    policy = MAKERS[kind](1)
    frozen, trainable = policy.frozen_copy(), policy.trainable_copy()
    before = copy_out(frozen.model)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(1.0)
    assert all(np.array_equal(before[name], tensor) for name, tensor in copy_out(frozen.model).items())
    assert all(np.array_equal(before[name], tensor) for name, tensor in copy_out(trainable.model).items())
    assert not any(p.requires_grad for p in frozen.model.parameters())
    assert all(p.requires_grad for p in frozen.trainable_copy().model.parameters())
    assert frozen.temperature == trainable.temperature == TEMPERATURE


def test_copy_out_does_not_follow_later_changes() -> None:
    policy = table_policy(1)
    out = copy_out(policy.model)
    kept = {name: tensor.copy() for name, tensor in out.items()}
    with torch.no_grad():
        policy.model.logits.add_(1.0)
    assert all(np.array_equal(out[name], kept[name]) for name in kept)


@pytest.mark.parametrize("make_copy", [lambda p: p, Policy.frozen_copy])
def test_a_tied_tensor_is_named_once_and_arrives_twice(make_copy: Callable[[Policy], Policy]) -> None:
    source, target = make_copy(llama_policy(1)), make_copy(llama_policy(2))
    names = set(named_tensors(source.model))
    assert len(names & {"lm_head.weight", "model.embed_tokens.weight"}) == 1
    copy_in(target.model, copy_out(source.model))
    assert torch.equal(target.model.lm_head.weight, source.model.lm_head.weight)
    assert torch.equal(target.model.get_input_embeddings().weight, source.model.get_input_embeddings().weight)
    assert target.sequence_logps(PAIRS) == source.sequence_logps(PAIRS)


Change = Callable[[dict[str, Any]], Any]
CHANGES: dict[str, Change] = {
    "one missing": lambda tensors: tensors.pop(sorted(tensors)[-1]),
    "one too many": lambda tensors: tensors.update(extra=np.zeros(3, np.float32)),
    "one renamed": lambda tensors: tensors.update(renamed=tensors.pop(sorted(tensors)[0])),
    "transposed": lambda tensors: tensors.update({n: t.T for n, t in tensors.items() if t.ndim == 2}),
    "would broadcast": lambda tensors: tensors.update({n: t[:1] for n, t in tensors.items() if t.ndim == 1}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_weights_that_do_not_fit_change_nothing(change: str) -> None:
    policy = llama_policy(1)
    before = copy_out(policy.model)
    tensors = {name: tensor + 1 for name, tensor in before.items()}
    CHANGES[change](tensors)
    with pytest.raises(ValueError, match="do not fit the model"):
        copy_in(policy.model, tensors)
    assert all(np.array_equal(before[name], tensor) for name, tensor in copy_out(policy.model).items())


def test_copy_in_takes_arrays_that_cannot_be_written_to() -> None:
    source, target = table_policy(1), table_policy(2)
    tensors = copy_out(source.model)
    for tensor in tensors.values():
        tensor.flags.writeable = False
    copy_in(target.model, tensors)
    assert torch.equal(source.model.logits, target.model.logits)


# ---- making, saving, loading --------------------------------------------------------------------


@pytest.mark.parametrize("kind", MAKERS)
def test_saved_and_loaded_policy_is_the_same(kind: str, tmp_path: Path) -> None:
    policy = MAKERS[kind](4)
    policy.save(tmp_path)
    loaded = load(tmp_path)
    ours, theirs = copy_out(policy.model), copy_out(loaded.model)
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    assert {t.dtype for t in theirs.values()} == {np.dtype("float32")}
    assert loaded.sequence_logps(PAIRS) == policy.sequence_logps(PAIRS)
    assert loaded.encode("<bos>ab") == policy.encode("ab")
    assert loaded.stop_ids == policy.stop_ids
    assert not loaded.model.training
    assert not list(tmp_path.glob("*.bin"))


def test_master_weights_are_float32_whatever_the_folder_holds(tmp_path: Path) -> None:
    policy = llama_policy(4)
    policy.model.bfloat16()
    policy.save(tmp_path)
    assert {p.dtype for p in load(tmp_path).model.parameters()} == {torch.float32}


def test_a_folder_with_pickled_weights_is_not_loaded(tmp_path: Path) -> None:
    policy = llama_policy(4)
    policy.save(tmp_path)
    torch.save(policy.model.state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(OSError, match="safetensors"):
        load(tmp_path)


@pytest.mark.parametrize("kind", MAKERS)
def test_a_fresh_model_is_a_function_of_the_seed_and_leaves_chance_alone(kind: str) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    one, same, other = (copy_out(MAKERS[kind](seed).model) for seed in (1, 1, 2))
    assert torch.equal(torch.rand(3), expected)
    assert all(np.array_equal(one[name], same[name]) for name in one)
    assert not all(np.array_equal(one[name], other[name]) for name in one)


def test_a_fresh_model_needs_characters() -> None:
    with pytest.raises(SettingsError, match="lists its characters"):
        load(Path("new-llama"))


def test_a_table_too_large_is_refused_with_its_size() -> None:
    with pytest.raises(ValueError, match=r"positions = 9 with 6 ids needs 5764801 rows"):  # 7 ** 8
        table_policy(positions=9)


def test_the_table_tells_every_context_apart() -> None:
    policy = table_policy(1, positions=4)
    contexts = [(1, a, b) for a in range(6) for b in range(6)]
    logits = policy.model(input_ids=torch.tensor(contexts)).logits[:, -1]
    assert len(logits.unique(dim=0)) == len(contexts)


def test_the_built_in_model_loads() -> None:
    policy = load(Path("arithmetic"))
    assert policy.encode("3+15-7=")[0] == policy.tokenizer.bos_token_id
    assert policy.stop_ids == {policy.tokenizer.eos_token_id}
