"""Branches of the settings tree about reward models, preference prompts and reward-model training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field

from tba.sections import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section

Reading = Literal["auto", "text", "chat", "pair", "completion"]
"""How a reward model is shown a prompt and its completion."""
Activation = Literal["none", "sigmoid", "softmax", "log_softmax"]
Protocol = Literal["score", "classify", "pooling", "chat"]
"""What an endpoint is asked, and in which words it answers."""

JUDGE = (
    "Rate the answer to the request from {low} (useless) to {high} (excellent). Reply with the number alone.\n\n"
    "<request>\n{prompt}\n</request>\n\n<answer>\n{completion}\n</answer>"
)
"""What a judge is asked if the settings say nothing else."""


class CallSettings(Section):
    """How an endpoint is called."""

    endpoint: str | None = None
    """Address of a server: http://host:port."""
    served_model: str | None = None
    """endpoint: name of the model there."""
    limit_s: PositiveFloat = 10.0
    """endpoint: seconds that one call may take, from connecting to the last byte."""
    retries: NonNegativeInt = 3
    """endpoint: further calls after one that failed in a way that may pass."""
    backoff_s: NonNegativeFloat = 0.5
    """endpoint: seconds before the first further call; twice as long before each next one."""
    concurrency: PositiveInt = 16
    """endpoint: calls in flight at once; the searcher waits for the rest."""
    key_env: str | None = None
    """endpoint: environment variable that holds the key of the Authorization header."""


class RewardSettings(CallSettings):
    """One scorer, a function, a model or an endpoint, and its weight in the reward."""

    name: str | None = None
    """Name of its part in `reward_parts`; the last word of function, model or endpoint if left out."""
    weight: float = Field(default=1.0, allow_inf_nan=False)
    """Reward units per unit of its score."""
    function: str | None = None
    """A reward function, `module:function` or `file.py:function`."""
    model: str | None = None
    """A sequence-classification model: a folder or a Hugging Face id; safetensors only."""
    without_eos: float | None = Field(default=None, allow_inf_nan=False)
    """Score of a completion that the length limit cut (the paper's -1); the model's own if null."""
    index: NonNegativeInt | None = None
    """Label whose score counts; if null, the mean over the labels."""

    activation: Activation = "none"
    """model: what is done to the logits of one text before the label is picked."""
    reads: Reading = "auto"
    """model: prompt and completion as one text, as a chat, as a text pair, or the completion alone; auto: what the
    model's folder says, else chat if its tokenizer has a template, else text."""
    at_eos: bool | None = None
    """model: end a completion that stopped by itself with the model's EOS, so that the score is read there; if null,
    what the model's folder says, else no."""
    max_tokens: PositiveInt | None = None
    """model: longest input, in tokens; the prompt is cut from its left. The model's own limit if null."""
    batch_tokens: PositiveInt = 16_384
    """model: padded tokens that one forward pass may hold."""
    device: str = "auto"
    """model: cpu, cuda, cuda:1, ...; auto: cuda if there is one."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """model: precision of its weights and of the forward pass."""

    protocol: Protocol = "score"
    """endpoint: vLLM's /score, /classify or /pooling, or a judge behind /v1/chat/completions."""
    judge: str = JUDGE
    """endpoint, chat: what the judge is asked, with {prompt}, {completion}, {low} and {high}."""
    judge_range: tuple[float, float] = Field(default=(0.0, 10.0), strict=False)
    """endpoint, chat: lowest and highest number that counts as a judgement."""

    @property
    def part(self) -> str:
        """Name of its part of the reward."""
        if self.function is not None:
            return self.name or self.function.rpartition(":")[2]
        return self.name or str(self.model or self.endpoint).rstrip("/").rsplit("/", 1)[-1]


class PreferenceSettings(Section):
    """preference: where prompts come from and how they are asked."""

    dataset: str | None = None
    """Hugging Face id, or a folder, that the `datasets` library loads; `task.path` is a file instead."""
    split: str = "train"
    """dataset: rows to train on."""
    held_out_split: str | None = None
    """dataset: rows to evaluate on; without it the last `task.held_out` rows of `split`."""
    format: Literal["plain", "tldr"] = "plain"
    """plain: `task.prompt_column` as it is; tldr: columns subreddit, title and post in the TL;DR format."""
    reference_column: str | None = None
    """Column with a human's completion, for the win-rate."""
    id_column: str | None = "id"
    """Column that names a prompt, each its own; the row's place does where there is none, or if null."""
    too_long: Literal["refuse", "drop"] = "refuse"
    """What becomes of a prompt above `task.max_prompt_tokens`; the tldr format shortens its post first."""


class RewardModelSettings(Section):
    """Training a reward model from preference pairs (`tba reward-model`)."""

    model: str | None = None
    """Folder or Hugging Face id to start from, with or without a score head; the recipe's `model` if null."""
    path: str | None = None
    """JSONL or Parquet file of pairs."""
    dataset: str | None = None
    """Hugging Face id, or a folder, of pairs, instead of `path`."""
    split: str = "train"
    """dataset: rows used."""
    prompt_column: str = "prompt"
    """Column with the prompt: text or chat messages."""
    chosen_column: str = "chosen"
    """Column with the preferred completion."""
    rejected_column: str = "rejected"
    """Column with the other one."""
    held_out: Fraction = 0.1
    """Share of the pairs kept for accuracy and calibration; pairs of one prompt stay on one side."""
    held_out_path: str | None = None
    """JSONL or Parquet file of pairs kept for them instead."""
    reads: Reading = "auto"
    """As in `task.rewards`; recorded in the model's folder."""
    at_eos: bool = True
    """As in `task.rewards`; recorded in the model's folder."""
    max_tokens: PositiveInt | None = None
    """Longest input, in tokens; the prompt is cut from its left. The model's own limit if null."""
    epochs: PositiveFloat = 1.0
    """Passes over the pairs."""
    batch_size: PositiveInt = 64
    """Pairs per optimizer step."""
    micro_batch: PositiveInt = 8
    """Pairs per forward pass; divides `batch_size`."""
    learning_rate: PositiveFloat = 1e-5
    """Peak learning rate of AdamW; linear warm-up over 3 % of the steps, cosine to zero."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's decoupled weight decay."""
    centre: NonNegativeFloat = 0.0
    """Weight of the squared sum of a pair's scores in the loss, which keeps their mean near zero."""
    bins: PositiveInt = 10
    """Rows of the reliability table."""


def rewards_problems(rewards: Sequence[RewardSettings], place: str = "task.rewards") -> Iterator[str]:
    """What is wrong with a list of scorers."""
    for number, reward in enumerate(rewards):
        yield from _reward_problems(reward, f"{place}.{number}")
    parts = [reward.part for reward in rewards]
    for part in sorted({p for p in parts if parts.count(p) > 1}):
        yield f"{place}: {parts.count(part)} scorers are named {part!r}; give each a name of its own."
    if rewards and not any(reward.weight for reward in rewards):
        yield f"{place}: every weight is 0, so that no completion is better than another; give one a weight."


def _reward_problems(reward: RewardSettings, place: str) -> Iterator[str]:
    scorers = {"function": reward.function, "model": reward.model, "endpoint": reward.endpoint}
    if sum(scorer is not None for scorer in scorers.values()) != 1:
        said = ", ".join(f"{key} = {scorer!r}" for key, scorer in scorers.items())
        yield f"{place}: {said}; give exactly one of the three."
    if reward.model is not None:
        yield from classifier_problems(f"{place}.model", reward.model)
    if reward.activation in ("softmax", "log_softmax") and reward.index is None:
        yield (f"{place}.activation = {reward.activation!r} sums to the same for every text; give {place}.index, "
               f"the label that counts.")
    if reward.endpoint is None:
        return
    yield from address_problems(reward.endpoint, place)
    if reward.activation != "none":
        yield (f"{place}.activation = {reward.activation!r} is of a model; an endpoint's numbers are taken as they "
               f"are; leave it out.")
    if reward.protocol == "chat":
        yield from _judge_problems(reward, place)


def address_problems(endpoint: str, place: str) -> Iterator[str]:
    """What is wrong with the address of an endpoint whose settings are at `place` of the tree."""
    address = urlsplit(endpoint)
    if address.scheme not in ("http", "https") or not address.hostname:
        yield f"{place}.endpoint = {endpoint!r} is no address of the form http://host:port; write it so."


def _judge_problems(reward: RewardSettings, place: str) -> Iterator[str]:
    low, high = reward.judge_range
    if not low < high:
        yield f"{place}.judge_range = [{low:g}, {high:g}] holds no number; the first must be below the second."
    if reward.served_model is None:
        yield f"{place}.served_model is missing: a judge behind /v1/chat/completions is asked for by name; give it."
    if "{completion}" not in reward.judge:
        yield f"{place}.judge = {reward.judge[:60]!r} shows the judge no completion; write {{completion}} into it."


def classifier_problems(key: str, model: str) -> Iterator[str]:
    """What is wrong with a classifier's folder or id that can be seen without loading it."""
    path = Path(model)
    if path.is_dir():
        if not (path / "config.json").is_file():
            yield f"{key} = {model!r} is a folder without config.json; give a Hugging Face model folder."
        elif not list(path.glob("*.safetensors")):
            yield f"{key} = {model!r} holds no .safetensors file; other weight files may run code and are refused."
    elif path.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1 or path.exists():
        yield f"{key} = {model!r} is no model folder, and no Hugging Face id of the form owner/name; give one of them."


def preference_problems(task: Any) -> Iterator[str]:
    """What is wrong with the settings `task` of the preference task."""
    chosen = task.preference
    yield from source_problems("task.path", task.path, "task.preference.dataset", chosen.dataset)
    for key in ("path", "held_out_path"):
        path = getattr(task, key)
        if path is not None:
            yield from file_problems(f"task.{key}", path)
    if task.held_out_path is not None and chosen.dataset is not None:
        yield (f"task.held_out_path = {task.held_out_path!r} goes with task.path; a data set's held-out rows are "
               f"task.preference.held_out_split.")
    yield from rewards_problems(task.rewards)
    yield from function_problems(task.rewards)


def function_problems(rewards: Sequence[RewardSettings], place: str = "task.rewards") -> Iterator[str]:
    """Functions that are not named as a recipe names them."""
    for number, reward in enumerate(rewards):
        if reward.function is not None and not all(reward.function.rpartition(":")):
            yield (f"{place}.{number}.function = {reward.function!r} names no function; write module:function or "
                   f"file.py:function.")


def scorer_problems(task: Any) -> Iterator[str]:
    """What keeps the settings `task` from scoring; warm start and reward-model training need no scorer."""
    if task.name == "preference" and not task.rewards:
        yield "task.rewards is empty: the preference task needs a scorer; give [{model: FOLDER-or-ID}]."


def imitation_problems(task: Any) -> Iterator[str]:
    """What keeps the settings `task` from giving completions to imitate."""
    if task.name == "preference" and task.preference.reference_column is None:
        yield ("task.preference.reference_column is missing: a warm start imitates humans' completions; name their "
               "column.")


def source_problems(path_key: str, path: str | None, dataset_key: str, dataset: str | None) -> Iterator[str]:
    """What is wrong with where rows come from: a file or a data set."""
    if (path is None) == (dataset is None):
        yield (f"{path_key} = {path!r} and {dataset_key} = {dataset!r}; give exactly one of the two: a file, or a "
               f"data set.")


def file_problems(key: str, path: str) -> Iterator[str]:
    """What is wrong with a file of rows that can be seen without reading it."""
    if not Path(path).is_file():
        yield f"{key} = {path!r} is not a file; give the path of a .jsonl or .parquet file."


def reward_model_problems(chosen: RewardModelSettings) -> Iterator[str]:
    """What is wrong with the settings of `tba reward-model` that can be seen before a model loads."""
    yield from source_problems("reward_model.path", chosen.path, "reward_model.dataset", chosen.dataset)
    if chosen.path is not None:
        yield from file_problems("reward_model.path", chosen.path)
    if chosen.held_out_path is not None:
        yield from file_problems("reward_model.held_out_path", chosen.held_out_path)
    if chosen.model is not None:
        yield from classifier_problems("reward_model.model", chosen.model)
    if chosen.batch_size % chosen.micro_batch:
        yield (f"reward_model.batch_size = {chosen.batch_size} is not a multiple of reward_model.micro_batch = "
               f"{chosen.micro_batch}; change one of them.")
    names = [chosen.prompt_column, chosen.chosen_column, chosen.rejected_column]
    if len(set(names)) < 3:
        yield f"reward_model: prompt, chosen and rejected columns are {names}; each must be another."
