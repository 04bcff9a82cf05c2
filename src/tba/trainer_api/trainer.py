"""TBATrainer: a script for TRL's GRPOTrainer, run as a TBA run."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.integrations.integration_utils import get_reporting_integration_callbacks
from transformers.trainer_callback import (
    CallbackHandler,
    DefaultFlowCallback,
    PrinterCallback,
    ProgressCallback,
)
from transformers.trainer_utils import TrainOutput

from tba import assembly, loggers, lora
from tba import metrics as m
from tba.policy import Policy, copy_out, load_tokenizer
from tba.reading import check_settings
from tba.rewards.carried import packed
from tba.run import Run, RunDirectory, resumed
from tba.settings import Settings, SettingsError
from tba.tasks.script import Brought, Script
from tba.trainer_api.config import TBAConfig
from tba.trainer_api.events import Events, prefixed
from tba.trainer_api.fields import arguments_problems
from tba.trainer_api.hub import Hub
from tba.trainer_api.inputs import Rewards, model_type_of, rewards_of, rows_of, save_model, tokenizer_of
from tba.trainer_api.mapping import Batch, loggers_of, problems_of, steps_of, tree_of

START = "start"
"""Folder of the run directory with a model that was given as an object."""


class TrainingFailedError(RuntimeError):
    """A run that ended with an error; the message is the run's."""


class TBATrainer:
    """Trains `model` on the prompts of `train_dataset` so that `reward_funcs` are high: TRL's GRPOTrainer in shape.

    `args.output_dir` becomes a run directory as of `tba train`, with `final/` as a plain model folder. What has no
    meaning here is refused by name, everything at once, before a model is loaded.
    """

    def __init__(
        self, model: Any, reward_funcs: Any = None, args: TBAConfig | None = None, train_dataset: Any = None,
        eval_dataset: Any = None, processing_class: Any = None, *, callbacks: Any = None, peft_config: Any = None,
        **others: Any,
    ) -> None:
        """A model, or its folder or Hugging Face id; a reward or several; data sets with a column `prompt`.

        `reward_funcs` are functions (prompts, completions, completion_ids, **columns), names of reward models, or
        sequence-classification models with their `reward_processing_classes`.

        Raises:
            SettingsError: with everything that is wrong.
        """
        self.args = args if args is not None else TBAConfig()
        self._given_model, self._given_tokenizer = model, processing_class
        problems = list(arguments_problems({k: v for k, v in others.items() if k != "reward_processing_classes"}))
        problems += problems_of(self.args)
        batch, wrong = Batch.of(self.args)
        training, wrong_rows = rows_of(train_dataset, "train_dataset")
        if train_dataset is None:
            wrong_rows = ["train_dataset is missing: give a datasets.Dataset or a list of dicts with a prompt each."]
        self._held_out, wrong_held_out = rows_of(eval_dataset, "eval_dataset")
        columns = tuple(training[0][1]) if training else ()
        rewards, wrong_rewards = rewards_of(
            reward_funcs, self.args.reward_weights, others.get("reward_processing_classes"), columns)
        adapter, wrong_adapter = self._adapter_of(peft_config)
        carried, wrong_functions = packed(rewards.functions)
        problems += [*wrong, *wrong_rows, *wrong_held_out, *wrong_rewards, *wrong_adapter, *wrong_functions]
        self._hub = Hub(self.args)
        problems += self._hub.problems()
        is_evaluated = self.args.eval_strategy != "no" or self.args.eval_on_start
        if self.args.eval_strategy != "no" and eval_dataset is None:
            chosen = getattr(self.args.eval_strategy, "value", self.args.eval_strategy)
            problems.append(f"eval_strategy = {chosen!r} needs eval_dataset; give one, or set eval_strategy='no'.")
        integrations = self._integrations(problems)
        problems += loggers.missing(loggers_of(self.args))
        if problems or batch is None:
            raise SettingsError(problems)
        steps = steps_of(self.args, batch, len(training))
        self._directory = Path(self.args.output_dir or "trainer_output")
        self._brought = Brought(
            training=training, held_out=self._held_out if is_evaluated else (), carried=carried)
        self._settings = self._settings_of(batch, steps, rewards, adapter)
        self._plain = check_settings(_without_adapter(self._settings))
        self.processing_class = load_tokenizer(
            self._settings.policy.tokenizer or self._settings.model,
            trust_remote_code=self._settings.policy.trust_remote_code,
        )
        shown = [] if self.args.disable_tqdm else [ProgressCallback]
        self.callback_handler = CallbackHandler(
            [DefaultFlowCallback, *integrations, *(callbacks or []), *(shown or [PrinterCallback])],
            self._given_model if not isinstance(model, str) else None, self.processing_class, None, None,
        )
        self._events = Events(
            self.args, self.callback_handler, steps=steps,
            steps_per_epoch=max(1.0, len(training) * batch.sync / batch.prompts),
        )
        self._events.call("on_init_end")
        self._summary: Mapping[str, Any] = {}

    # ---- what TRL's trainer has ----

    @property
    def state(self) -> Any:
        """The TrainerState that callbacks see."""
        return self._events.state

    @property
    def control(self) -> Any:
        """The TrainerControl that callbacks set."""
        return self._events.control

    @property
    def model(self) -> Any:
        """The model: the trained one once training has ended, an adapter merged in."""
        return self._policy().model

    def add_callback(self, callback: Any) -> None:
        """Has `callback`, an object or its class, take part."""
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Takes a callback out, and returns it."""
        return self.callback_handler.pop_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        """Takes a callback out."""
        self.callback_handler.remove_callback(callback)

    def train(self, resume_from_checkpoint: bool | str | None = None) -> TrainOutput:
        """Trains to the last step, or until a callback stops it; returns its last figures.

        `resume_from_checkpoint`: True, or the run directory or its newest checkpoint, goes on from there.

        Raises:
            SettingsError: the run directory is taken, or there is nothing to go on from.
            TrainingFailedError: the run failed.
            KeyboardInterrupt: it was interrupted, after a checkpoint.
        """
        resume = resume_from_checkpoint if resume_from_checkpoint is not None else self.args.resume_from_checkpoint
        run = self._run_of(resume)
        self._events.run = run
        self._events.resume_at(run.step)
        summary = self._summary = run.execute()
        if summary["status"] == "failed":
            raise TrainingFailedError(f"{summary['message']} (run directory {self._directory})")
        self._events.call("on_train_end")
        if summary["status"] == "interrupted":
            raise KeyboardInterrupt(f"interrupted after step {summary['steps']}: see resume_from_checkpoint")
        if self.args.push_to_hub:
            self.push_to_hub()
        history = [line["loss"] for line in self.state.log_history if "loss" in line]
        figures = {"train_runtime": summary["wall_s"], "train_loss": m.mean(history), "epoch": self.state.epoch}
        return TrainOutput(summary["steps"], m.mean(history), figures)

    def evaluate(self, eval_dataset: Any = None, *, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Metrics of the model as it is now on `eval_dataset`, or that of the trainer: reward, pass@1, kl and others.

        Raises:
            SettingsError: there is no such data set, or its rows are wrong.
        """
        rows, problems = (self._held_out, []) if eval_dataset is None else rows_of(eval_dataset, "eval_dataset")
        if problems or not rows:
            raise SettingsError(problems or ["evaluate() needs eval_dataset: give it here, or to the trainer."])
        settings, start = self._plain, assembly.make_policy(self._plain, assembly.make_task_of(self._plain))
        task = Script(
            settings.task, max_new_tokens=settings.search.max_new_tokens, score_limit_s=settings.search.score_limit_s,
            brought=Brought(training=rows, held_out=rows, carried=self._brought.carried),
        )
        task.examine()
        policy = self._policy()
        questions = assembly.Questions(task=task, training=(), held_out=task.held_out(policy.encode))
        evaluator = assembly.make_evaluator(settings, questions, start)
        found = evaluator.evaluate(
            copy_out(policy.model), self.state.global_step, prompts=len(rows), samples=settings.evaluation.samples,
            beta=settings.final_beta,
        )
        task.close()
        metrics = prefixed(found.metrics, metric_key_prefix)
        self._events.call("on_evaluate", metrics=metrics)
        return metrics

    def save_model(self, output_dir: str | None = None) -> None:
        """Writes the model as a plain folder, an adapter merged in and beside it; default `final/` of the run."""
        folder = Path(output_dir) if output_dir is not None else self._directory / "final"
        if output_dir is None and self._trained() is not None:
            return
        self._policy().save(folder)

    def push_to_hub(self, commit_message: str = "End of training") -> Any:
        """Pushes the trained model; what is wrong with the hub is said when the trainer is made."""
        self._events.call("on_push_begin")
        trained = self._trained()
        if trained is None:
            raise SettingsError(["push_to_hub(): there is no trained model yet; call train() first."])
        return self._hub.push(trained, commit_message)

    # ---- inside ----

    def _adapter_of(self, config: Any) -> tuple[dict[str, Any], list[str]]:
        """`policy.lora` of `peft_config`, and what is wrong with it."""
        if getattr(self._given_model, "peft_config", None) is not None:
            return {}, ["model has an adapter already; give its base model, and peft_config for a new one."]
        return ({}, []) if config is None else lora.settings_of(config, model_type_of(self._given_model))

    def _integrations(self, problems: list[str]) -> list[Any]:
        """Callbacks of what `report_to` names besides our loggers; what keeps one from being made is in `problems`."""
        found: list[Any] = []
        others = [name for name in self.args.report_to or () if name not in loggers.LOGGERS]
        try:
            for callback in get_reporting_integration_callbacks(others):
                found.append(callback())
        except (ImportError, RuntimeError, ValueError) as error:
            problems.append(f"report_to = {self.args.report_to!r}: {error} Install what is missing, or leave it out.")
        return found

    def _settings_of(self, batch: Batch, steps: int, rewards: Rewards, adapter: Mapping[str, Any]) -> Settings:
        """The settings of the run; model objects are written into its directory, where every process finds them."""
        place = self._directory
        if (place / "config.yaml").exists():  # a run is there: nothing of it is written over
            place = Path(tempfile.mkdtemp(prefix="tba-"))
            weakref.finalize(self, shutil.rmtree, place, ignore_errors=True)
        model, tokenizer = self._given_model, None
        if not isinstance(model, str):
            model = save_model(model, self._given_tokenizer or tokenizer_of(model), place / START)
        elif self._given_tokenizer is not None:
            tokenizer = str(place / START)
            self._given_tokenizer.save_pretrained(tokenizer)
        scorers = [dict(entry) for entry in rewards.settings]
        for entry in scorers:
            if entry["name"] in rewards.models:
                scorer, reader = rewards.models[entry["name"]]
                entry["model"] = save_model(scorer, reader or tokenizer_of(scorer), place / "rewards" / entry["name"])
        return check_settings(tree_of(
            self.args, batch, steps=steps, held_out=len(self._brought.held_out), model=model, tokenizer=tokenizer,
            rewards=scorers, lora=adapter,
        ))

    def _run_of(self, resume: bool | str | None) -> Run:
        path = self._directory
        if resume:
            if isinstance(resume, (str, Path)) and path.resolve() not in (Path(resume).resolve(),
                                                                          *Path(resume).resolve().parents):
                raise SettingsError([
                    f"resume_from_checkpoint = {str(resume)!r} is not in output_dir = {str(path)!r}; set output_dir to "
                    f"the run directory, and resume_from_checkpoint=True: the newest checkpoint is used."
                ])
            settings = self._settings
            if not isinstance(self._given_model, str) and (path / START).is_dir():
                settings = check_settings({**settings.resolved(), "model": str(path / START)})
            return resumed(path, settings, self._events.say, self._brought)
        if (path / "config.yaml").exists():
            raise SettingsError([
                f"output_dir = {str(path)!r} holds a run already; choose another, or go on with "
                f"train(resume_from_checkpoint=True)."
            ])
        directory = RunDirectory(path)
        directory.create(self._settings, into=True)
        try:
            return Run(self._settings, directory, self._events.say, brought=self._brought)
        except SettingsError:
            (path / "config.yaml").unlink()  # made a moment ago: the corrected script may have the name
            raise

    def _trained(self) -> Path | None:
        """The folder of the trained model, once there is one."""
        final = self._directory / "final"
        return final if self._summary and final.is_dir() else None

    def _policy(self) -> Policy:
        """The model as it is now, an adapter merged in."""
        trained = self._trained()
        settings = self._plain if trained is None else check_settings(
            {**self._plain.resolved(), "model": str(trained)})
        return assembly.make_policy(settings, assembly.make_task_of(settings))


def _without_adapter(settings: Settings) -> dict[str, Any]:
    tree = settings.resolved()
    tree["policy"]["lora"] = {}
    return tree
