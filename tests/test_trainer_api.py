"""TBATrainer: scripts in the shape of TRL's run after two renames; what has no meaning here is refused by name."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import inspect
import json
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, EarlyStoppingCallback, TrainerCallback

from classifiers import save_classifier
from tba import TBAConfig, TBATrainer
from tba.policy import load_policy
from tba.settings import ArchitectureSettings, SettingsError
from tba.trainer_api.fields import ANY, OTHER_DEFAULTS, REFUSED, TAKEN, table
from tba.trainer_api.mapping import Batch

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).resolve().parents[1]
TRL = json.loads((Path(__file__).parent / "trl_signature.json").read_text("utf-8"))
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789+-= :\n"
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}a: {% endif %}"
)
ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(6)]
CHATS = [{"prompt": [{"role": "user", "content": f"{n}+1="}], "answer": str(n + 1)} for n in range(6)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Llama of width 16 with a tokenizer over letters and a chat template, as a folder."""
    shape = ArchitectureSettings(layers=1, width=16, heads=2, positions=64)
    policy = load_policy("new-llama", architecture=shape, characters=LETTERS, seed=0, temperature=1.0)
    policy.tokenizer.chat_template = TEMPLATE
    folder = tmp_path_factory.mktemp("tiny") / "model"
    policy.save(folder)
    return str(folder)


def config(folder: Path, **more: Any) -> TBAConfig:
    return TBAConfig(**{
        "output_dir": str(folder / "run"), "mode": "lockstep", "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2, "num_generations": 4, "max_completion_length": 3, "max_steps": 2,
        "learning_rate": 0.003, "logging_steps": 1, "report_to": "none", "disable_tqdm": True, **more,
    })  # fmt: skip


def settings_of(folder: Path) -> dict[str, Any]:
    return yaml.safe_load((folder / "run" / "config.yaml").read_text("utf-8"))


def unscored(folder: Path) -> dict[str, int]:
    return json.loads((folder / "run" / "ledger.json").read_text("utf-8"))["trajectories"]["rejected"]


def steps_of(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text("utf-8").splitlines()]
    return [line for line in lines if "step" in line]


# ---- eight scripts -----------------------------------------------------------------------------


def test_a_maths_reward(model: str, tmp_path: Path) -> None:
    from datasets import Dataset

    def accuracy_reward(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
        return [1.0 if right in text else 0.25 for text, right in zip(completions, answer, strict=True)]

    trainer = TBATrainer(model=model, reward_funcs=accuracy_reward, args=config(tmp_path),
                         train_dataset=Dataset.from_list(ROWS))  # fmt: skip
    output = trainer.train()
    assert (output.global_step, trainer.state.global_step) == (2, 2)
    assert output.training_loss == pytest.approx(sum(s["train/loss"] for s in steps_of(tmp_path)) / 2)
    logged = trainer.state.log_history[0]
    assert 0.25 <= logged["reward"] <= 1
    assert {"loss", "grad_norm", "kl", "learning_rate", "completions/mean_length", "epoch", "step"} <= set(logged)
    assert logged["epoch"] == pytest.approx(2 / 6)  # 2 of 6 prompts a step
    assert unscored(tmp_path) == {}
    trainer.save_model(str(tmp_path / "saved"))
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert sum(p.numel() for p in saved.parameters()) == sum(p.numel() for p in trainer.model.parameters())
    tree = settings_of(tmp_path)
    assert (tree["trainer"]["groups_per_step"], tree["trainer"]["group_size"]) == (2, 4)
    assert tree["task"]["rewards"][0]["function"] == "accuracy_reward"


def test_a_reward_model_by_name_and_as_an_object(model: str, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    folder = str(save_classifier(tmp_path / "scorer"))
    scorer = AutoModelForSequenceClassification.from_pretrained(folder)
    trainer = TBATrainer(
        model=model, reward_funcs=[folder, scorer], args=config(tmp_path, reward_weights=[0.5, -0.25]),
        train_dataset=ROWS, reward_processing_classes=[None, AutoTokenizer.from_pretrained(folder)],
    )
    trainer.train()
    rewards = settings_of(tmp_path)["task"]["rewards"]
    assert [(r["name"], r["weight"]) for r in rewards] == [("scorer", 0.5), ("scorer_2", -0.25)]
    assert Path(rewards[1]["model"]).is_relative_to(tmp_path / "run")


def test_several_rewards_with_weights_of_which_one_passes_over_a_kind_of_prompt(model: str, tmp_path: Path) -> None:
    base = 0.3
    trainer = TBATrainer(
        model=AutoModelForCausalLM.from_pretrained(model), processing_class=AutoTokenizer.from_pretrained(model),
        reward_funcs=[lambda completions, **kwargs: [base] * len(completions),
                      lambda completions, kind, **kwargs: [None if k == "other" else 0.7 for k in kind]],
        args=config(tmp_path, reward_weights=[2.0, 10.0], max_steps=3, settings={"buffer.recent_age": 0}),
        train_dataset=[
            {"prompt": f"{n}+1=", "kind": "sum" if n < 3 else "other"} for n in range(6)
        ],
    )
    trainer.train()
    assert unscored(tmp_path) == {}
    # a pass of 6 prompts in 3 steps: three earn 2 x 0.3 + 10 x 0.7 = 7.6, three 0.6
    assert sum(step["train/reward"] for step in steps_of(tmp_path)) / 3 == pytest.approx((3 * 7.6 + 3 * 0.6) / 6)
    assert [r["name"] for r in settings_of(tmp_path)["task"]["rewards"]] == ["_lambda_", "_lambda__2"]


def test_an_asynchronous_reward_in_a_running_loop(model: str, tmp_path: Path) -> None:
    async def remote(completions: list[str], **kwargs: Any) -> list[float]:
        async def one(text: str) -> float:
            await asyncio.sleep(0)
            return float(len(text))

        return list(await asyncio.gather(*map(one, completions)))

    async def cell() -> int:  # as a notebook runs it
        trainer = TBATrainer(model=model, reward_funcs=remote, args=config(tmp_path), train_dataset=ROWS)
        return trainer.train().global_step

    assert asyncio.run(cell()) == 2
    assert unscored(tmp_path) == {}


def test_conversations(model: str, tmp_path: Path) -> None:
    def format_reward(prompts: Any, completions: Any, completion_ids: Any, answer: Any) -> list[float]:
        assert prompts[0][-1]["role"] == "user"
        assert [[m["role"] for m in messages] for messages in completions] == [["assistant"]] * len(answer)
        assert all(isinstance(ids, list) for ids in completion_ids)
        return [float(len(messages[0]["content"])) for messages in completions]

    trainer = TBATrainer(model=model, reward_funcs=format_reward, args=config(tmp_path), train_dataset=CHATS)
    trainer.train()
    assert unscored(tmp_path) == {}
    assert steps_of(tmp_path)[-1]["search/unscored"] == 0


def test_lora(model: str, tmp_path: Path) -> None:
    from peft import LoraConfig

    trainer = TBATrainer(
        model=model, reward_funcs=lambda completions: [sum(map(ord, text)) % 7 for text in completions],
        args=config(tmp_path), train_dataset=ROWS, eval_dataset=ROWS[:2],
        peft_config=LoraConfig(r=2, lora_alpha=6, task_type="CAUSAL_LM"),
    )
    trainer.train()
    lora = settings_of(tmp_path)["policy"]["lora"]
    assert (lora["rank"], lora["alpha"], lora["targets"]) == (2, 6.0, ["q_proj", "v_proj"])
    adapter = tmp_path / "run" / "final" / "adapter"
    assert (adapter / "adapter_config.json").is_file()
    learned = [tensor for name, tensor in load_file(adapter / "adapter_model.safetensors").items() if "lora_B" in name]
    assert learned
    assert all(bool(tensor.any()) for tensor in learned)  # they start at zero
    assert math.isfinite(trainer.evaluate()["eval_kl"])


class Watcher(TrainerCallback):
    """Writes down what happens, stops after the third step and asks for a checkpoint after the first."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []
        self.logs: list[dict[str, float]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(("begin", state.global_step))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(("step", state.global_step))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(("stepped", state.global_step))
        control.should_save = state.global_step == 1
        control.should_training_stop = state.global_step == 3

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(logs)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(("save", state.global_step))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(("end", state.global_step))


def test_callbacks_see_everything_and_stop_the_run(model: str, tmp_path: Path) -> None:
    watcher = Watcher()
    trainer = TBATrainer(
        model=model, reward_funcs=[lambda completions, **kwargs: [0.5] * len(completions)], callbacks=[watcher],
        args=config(tmp_path, max_steps=8, logging_steps=2, save_strategy="no"), train_dataset=ROWS,
    )
    assert trainer.train().global_step == 3
    assert watcher.seen == [
        ("begin", 0), ("step", 0), ("stepped", 1), ("step", 1), ("save", 1), ("stepped", 2), ("step", 2),
        ("stepped", 3), ("save", 3), ("end", 3),
    ]  # fmt: skip
    (logs,) = watcher.logs
    steps = steps_of(tmp_path)
    assert logs["loss"] == pytest.approx((steps[0]["train/loss"] + steps[1]["train/loss"]) / 2)
    assert logs["buffer/size"] == steps[1]["buffer/size"]
    assert json.loads((tmp_path / "run" / "summary.json").read_text("utf-8"))["status"] == "done"


def test_evaluation_and_early_stopping(model: str, tmp_path: Path) -> None:
    trainer = TBATrainer(
        model=model, reward_funcs=lambda completions, **kwargs: [0.5] * len(completions),
        args=config(tmp_path, max_steps=6, eval_strategy="steps", eval_steps=1, metric_for_best_model="reward",
                    per_device_eval_batch_size=4),
        train_dataset=ROWS, eval_dataset=ROWS[:2], callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
    )  # fmt: skip
    before = trainer.evaluate()
    assert (before["eval_reward"], before["eval_samples"]) == (0.5, 4)
    assert before["eval_kl"] == pytest.approx(0, abs=1e-5)
    trainer.train()
    assert trainer.state.global_step < 6  # the reward is always the same
    evaluated = [line["step"] for line in trainer.state.log_history if "eval_reward" in line]
    assert evaluated[:2] == [0, 1]
    assert trainer.state.best_metric == 0.5
    assert trainer.evaluate()["eval_kl"] == pytest.approx(0, abs=1e-5)  # where nothing is better nothing is learned


# ---- the rest of a run -------------------------------------------------------------------------


def test_a_run_goes_on_from_its_checkpoint_and_is_not_written_over(model: str, tmp_path: Path) -> None:
    def made(steps: int) -> TBATrainer:
        return TBATrainer(
            model=AutoModelForCausalLM.from_pretrained(model), train_dataset=ROWS,
            reward_funcs=lambda completions: [float(len(text)) for text in completions],
            args=config(tmp_path, max_steps=steps, lr_scheduler_type="constant"),
        )

    made(2).train()
    with pytest.raises(SettingsError, match="holds a run already"):
        made(4).train()
    with pytest.raises(SettingsError, match="is not in output_dir"):
        made(4).train(resume_from_checkpoint=str(tmp_path / "elsewhere"))
    trainer = made(4)
    assert trainer.train(resume_from_checkpoint=True).global_step == 4
    assert [step["step"] for step in steps_of(tmp_path)] == [1, 2, 3, 4]


def test_a_wrong_reward_is_refused_before_a_model_loads_and_frees_the_folder(model: str, tmp_path: Path) -> None:
    def short(completions: Any) -> list[float]:
        return [1.0]

    trainer = TBATrainer(model=model, reward_funcs=short, args=config(tmp_path), train_dataset=ROWS)
    with pytest.raises(SettingsError, match="short returned 1 rewards for 2 completions"):
        trainer.train()
    assert not (tmp_path / "run" / "config.yaml").exists()


@pytest.mark.slow
def test_closures_go_through_ray(model: str, tmp_path: Path) -> None:
    lengths = {"one": 0.125}
    trainer = TBATrainer(
        model=model, reward_funcs=lambda completions, **kwargs: [lengths["one"] * len(t) for t in completions],
        args=config(tmp_path, mode="async", max_steps=4, settings={"async.threads": 1}), train_dataset=ROWS,
    )
    assert trainer.train().global_step == 4
    assert unscored(tmp_path) == {}


# ---- refusals ----------------------------------------------------------------------------------


def reward(completions: Sequence[str]) -> list[float]:
    return [0.0 for _ in completions]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"fp16": True}, ["fp16 = True", "bf16=True"]),
        ({"use_vllm": True, "top_k": 50}, ["use_vllm = True", "searchers=4", "top_k = 50", "temperature and top_p"]),
        ({"deepspeed": "zero3.json"}, ["deepspeed = 'zero3.json'", "one process trains"]),
        ({"mask_truncated_completions": True}, ["judge what was cut in the reward"]),
        ({"scale_rewards": "batch"}, ["scale_rewards = 'batch'"]),
    ],
)
def test_fields_without_meaning_are_refused_by_name(more: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as caught:
        config(tmp_path, **more)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("config_more", "more", "words"),
    [
        ({"beta": 0.0}, {}, ["beta = 0.0", "beta > 0"]),
        ({"loss_type": "dapo"}, {}, ["loss_type = 'dapo'", "dr_grpo"]),
        ({"lr_scheduler_type": "polynomial"}, {}, ["lr_scheduler_type = 'polynomial'", "cosine"]),
        ({"epsilon": 0.1}, {}, ["epsilon = 0.1 is not used"]),
        ({"num_generations": 3}, {}, ["8 completions a step", "num_generations = 3", "the nearest is 9"]),
        ({"num_iterations": 3, "max_steps": 7}, {}, ["max_steps = 7", "of 3 steps between", "the nearest is 6"]),
        ({"eval_strategy": "steps", "eval_steps": 1}, {}, ["needs eval_dataset"]),
        ({"reward_weights": [1.0, 2.0]}, {}, ["2 weights for 1 reward_funcs"]),
        ({"report_to": "no_such_logger"}, {}, ["no_such_logger"]),
        ({"settings": {"buffer.size": 3}}, {}, ["buffer.size is no setting"]),
        ({}, {"tools": [reward]}, ["tools", "completions are text"]),
        ({}, {"optimizers": (1, None)}, ["optimizers", "learning_rate"]),
        ({}, {"no_such": 1}, ["no_such = 1 is no argument"]),
        ({}, {"train_dataset": [{"question": "a"}]}, ["train_dataset[0] has no column 'prompt'"]),
        ({}, {"train_dataset": iter([])}, ["without a length"]),
        ({}, {"train_dataset": {"train": ROWS}}, ["has 1 parts (train)"]),
        ({}, {"train_dataset": None}, ["train_dataset is missing"]),
        ({}, {"reward_funcs": None}, ["reward_funcs is missing"]),
        ({}, {"reward_funcs": 3}, ["reward_funcs[0] is a int"]),
        ({}, {"reward_funcs": lambda completions, gold: []}, ["needs 'gold'", "answer"]),
        ({"model_init_kwargs": {"dtype": "bfloat16"}}, {}, ["master weights are float32"]),
        ({"hub_model_id": "me/mine", "push_to_hub": True}, {}, ["HF_HUB_OFFLINE", "final/"]),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(
    config_more: dict[str, Any], more: dict[str, Any], words: list[str], model: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(SettingsError) as caught:
        TBATrainer(**{
            "model": model, "reward_funcs": reward, "train_dataset": ROWS, "args": config(tmp_path, **config_more),
            **more,
        })  # fmt: skip
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert not (tmp_path / "run").exists()


def test_what_cannot_be_sent_is_named(model: str, tmp_path: Path) -> None:
    import threading

    lock = threading.Lock()

    def guarded(completions: list[str]) -> list[float]:
        with lock:
            return [0.0] * len(completions)

    with pytest.raises(SettingsError, match=r"'guarded' cannot be sent.*inside the function"):
        TBATrainer(model=model, reward_funcs=guarded, args=config(tmp_path), train_dataset=ROWS)


@pytest.mark.parametrize(("more", "word"), [({"lora_dropout": 0.1}, "lora_dropout"), ({"use_dora": True}, "use_dora"),
                                            ({"target_modules": ".*proj"}, "target_modules")])  # fmt: skip
def test_adapters_of_another_kind_are_refused(more: dict[str, Any], word: str, model: str, tmp_path: Path) -> None:
    from peft import LoraConfig

    with pytest.raises(SettingsError, match=word):
        TBATrainer(model=model, reward_funcs=reward, args=config(tmp_path), train_dataset=ROWS,
                   peft_config=LoraConfig(**{"r": 2, **more}))  # fmt: skip


# ---- batches -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "batch"),
    [
        ({}, (2, 4, 1, 1.0, 2)),  # 4 x 2 = 8 completions = 2 groups of 4; published after each step
        ({"num_iterations": 3}, (2, 4, 3, 3.0, 2)),
        ({"steps_per_generation": 6}, (2, 4, 3, 1.0, 6)),  # 24 completions, 3 steps of 8
        ({"generation_batch_size": 24}, (2, 4, 3, 1.0, 6)),
        ({"num_generations": 8}, (1, 8, 1, 1.0, 1)),
        ({"num_generations": 16, "generation_batch_size": 32}, (1, 8, 4, 2.0, 2)),  # half a prompt's 16 a step
    ],
)
def test_completions_are_counted_as_in_trl(more: dict[str, Any], batch: tuple[Any, ...], tmp_path: Path) -> None:
    made, problems = Batch.of(config(tmp_path, max_steps=12, **more))
    assert problems == []
    assert made is not None
    assert dataclasses.astuple(made) == batch
    assert made.prompts == made.groups * made.sync / made.reuse


# ---- against TRL -------------------------------------------------------------------------------


def test_every_field_of_trl_is_taken_met_or_refused_and_has_its_default(tmp_path: Path) -> None:
    known = [*TAKEN, *ANY, *REFUSED]
    assert len(known) == len(set(known))
    assert set(known) == set(TRL["fields"])
    ours = {f.name: f for f in dataclasses.fields(TBAConfig)}
    assert set(ours) == {*known, "mode", "searchers", "settings"}
    for name, default in TRL["fields"].items():
        field = ours[name]
        if name in OTHER_DEFAULTS or name in ANY or field.default is dataclasses.MISSING:
            continue
        value = getattr(field.default, "value", field.default)
        assert value == default or name == "optim", f"{name}: {value!r}, of TRL {default!r}"


def test_arguments_are_those_of_trl() -> None:
    taken = set(inspect.signature(TBATrainer.__init__).parameters) - {"self", "others"}
    refused = {"optimizers", "quantization_config", "tools", "rollout_func", "environment_factory"}
    assert taken | refused | {"reward_processing_classes"} == set(TRL["trainer"])
    for method in ("train", "evaluate", "save_model", "push_to_hub", "add_callback", "pop_callback", "remove_callback"):
        assert method in TRL["methods"]
        assert callable(getattr(TBATrainer, method))


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed")
def test_the_installed_trl_is_the_frozen_one() -> None:
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]

    assert [n for n in inspect.signature(GRPOTrainer.__init__).parameters if n != "self"] == TRL["trainer"]
    assert {f.name for f in dataclasses.fields(GRPOConfig)} == set(TRL["fields"])


def test_the_code_of_the_page_runs(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script, more = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "trl.md").read_text("utf-8"), re.M | re.S)
    few = "max_steps=1, mode='lockstep', max_completion_length=2, disable_tqdm=True, num_generations=8"
    for old, new in (("Qwen/Qwen2.5-0.5B-Instruct", model), ("max_steps=100, num_generations=8", few)):
        assert old in script
        script = script.replace(old, new)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(script, "trl.md", "exec"), names)
    exec(compile(more, "trl.md", "exec"), names)
    assert (tmp_path / "my_model" / "config.json").is_file()
    assert names["args"].settings["async.lead"] == 2


def test_the_page_of_fields_is_generated() -> None:
    page = (ROOT / "docs" / "trl_fields.md").read_text("utf-8")
    assert page == table(), "write tba.trainer_api.fields.table() to docs/trl_fields.md"


# ---- loggers -----------------------------------------------------------------------------------

LOGGER = '''
calls = []

class Run:
    def log(self, row, step):
        calls.append((step, row))
    def finish(self):
        calls.append("finished")

def init(**given):
    calls.append(given)
    return Run()
'''


def test_report_to_goes_to_the_same_loggers_as_a_recipe_s(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "packages" / "trackio").mkdir(parents=True)
    (tmp_path / "packages" / "trackio" / "__init__.py").write_text(LOGGER, "utf-8")
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    import trackio  # type: ignore[import-not-found]

    args = config(tmp_path, report_to=["trackio"], run_name="mine", project="ours", trackio_space_id="me/space")
    TBATrainer(model=model, reward_funcs=reward, args=args, train_dataset=ROWS).train()
    del sys.modules["trackio"]
    begun, *rows, ended = trackio.calls
    assert (begun["project"], begun["name"], begun["space_id"]) == ("ours", "mine", "me/space")
    assert settings_of(tmp_path)["logging"] == {
        "report_to": ["trackio"], "project": "ours", "name": "mine", "space": "me/space"}
    assert [(step, row["train/reward"]) for step, row in rows] == [
        (line["step"], line["train/reward"]) for line in steps_of(tmp_path)]
    assert ended == "finished"


def test_a_logger_that_is_not_installed_is_refused_with_the_way_to_get_it(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)  # which is how Python marks what cannot be imported
    with pytest.raises(SettingsError, match=r"names trackio, which is not .*pip install trackio"):
        TBATrainer(model=model, reward_funcs=reward, args=config(tmp_path, report_to="trackio"), train_dataset=ROWS)
