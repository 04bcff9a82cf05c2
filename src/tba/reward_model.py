"""Trains a reward model from preference pairs (Bradley-Terry), and measures it on held-out ones."""

# Shape legend: N pairs, T positions.

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tba.catalog import FRESH, MODELS
from tba.preference_metrics import calibration, wilson
from tba.preference_settings import RewardModelSettings
from tba.records import Prompt
from tba.rewards.inputs import Encoder, Input, TooLong, messages_of
from tba.rewards.models import RECORD, ModelScorer, end_logits, load_classifier, longest_of, padded, reading_of
from tba.settings import Settings, SettingsError
from tba.tasks.custom import is_chat
from tba.tasks.rows import Row, rows_of_dataset, rows_of_file

WARMUP_SHARE = 0.03
"""Share of the steps over which the learning rate rises."""
MEASURE_TOKENS = 16_384
"""Padded tokens of one forward pass over held-out pairs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two completions of one prompt, as the reward model reads them."""

    chosen: Input
    rejected: Input


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """Pairs to train on and pairs held out, and what was left out of both."""

    training: Sequence[Pair]
    held_out: Sequence[Pair]
    identical: int
    """Pairs whose two completions read the same."""
    too_long: int
    """Pairs of which one completion does not fit the model."""
    cut: int
    """Inputs whose prompt was cut from its left."""


class PairLoss(torch.nn.Module):
    """A classifier with the Bradley-Terry loss of pairs, as the training library takes it."""

    def __init__(self, model: Any, centre: float) -> None:
        """`centre` weighs the squared sum of a pair's scores."""
        super().__init__()
        self.model, self.centre = model, centre

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Mean loss, nats per pair, and scores [N, 2] of inputs [N, 2, T]: the preferred completion comes first."""
        more = {} if token_type_ids is None else {"token_type_ids": token_type_ids.flatten(0, 1)}
        logits = end_logits(self.model, input_ids.flatten(0, 1), attention_mask.flatten(0, 1), **more)
        scores_N2 = logits.float()[:, 0].view(-1, 2)
        return {"loss": bradley_terry(scores_N2, self.centre), "scores": scores_N2}


def bradley_terry(scores_N2: Tensor, centre: float = 0.0) -> Tensor:
    """Mean over pairs of -log sigmoid(s_chosen - s_rejected) + centre (s_chosen + s_rejected)^2, nats.

    The first term is the likelihood of Bradley and Terry (1952), as in Christiano et al. (arXiv 1706.03741) and
    Stiennon et al. (arXiv 2009.01325, 3.4); it leaves a constant free for each prompt, which the second holds near
    zero (Eisenstein et al., arXiv 2312.09244).
    """
    chosen_N, rejected_N = scores_N2.unbind(-1)
    likelihood_N = torch.nn.functional.logsigmoid(chosen_N - rejected_N)
    return (centre * (chosen_N + rejected_N) ** 2 - likelihood_N).mean()


def train_reward_model(settings: Settings, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Trains the reward model of `settings.reward_model`, saves it as a plain model folder; returns its report.

    The report holds accuracy and calibration on held-out pairs, before and after. The folder's config records how
    the model reads, so that `task.rewards: [{model: FOLDER}]` scores it as it was trained.

    Raises:
        SettingsError: the pairs or the model cannot be used.
    """
    chosen = settings.reward_model
    rows, kept = rows_of(chosen), held_out_rows_of(chosen)
    where = _start_of(settings)
    model, tokenizer, missing = _load(where, settings.seed)
    reads, _ = reading_of(model, tokenizer, chosen.reads, chosen.at_eos)
    if chosen.at_eos and tokenizer.eos_token_id is None:
        raise SettingsError([
            f"reward_model.at_eos = True, but the tokenizer of {where!r} has no EOS token; set it to false."
        ])
    longest = min(longest_of(model, tokenizer), chosen.max_tokens or longest_of(model, tokenizer))
    encoder = Encoder(tokenizer, reads=reads, at_eos=chosen.at_eos, max_tokens=longest)
    pairs = split_pairs(rows, chosen, encoder, settings.seed, kept)
    say(f"{len(pairs.training)} pairs to train on, {len(pairs.held_out)} held out, {pairs.identical} identical and "
        f"{pairs.too_long} too long ones left out, {pairs.cut} prompts cut")
    before = measured(model, encoder, pairs.held_out, chosen.bins)
    fit(model, tokenizer, pairs.training, chosen, settings.seed, folder, say)
    after = measured(model, encoder, pairs.held_out, chosen.bins)
    model.config.update({RECORD: {"reads": reads, "at_eos": chosen.at_eos}})
    model.config.pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return {
        "model": str(folder), "pairs": len(pairs.training), "held_out": len(pairs.held_out),
        "identical": pairs.identical, "too_long": pairs.too_long, "cut": pairs.cut, "new_weights": sorted(missing),
        "start": before, "final": after,
    }


# ---- pairs --------------------------------------------------------------------------------------------


def rows_of(chosen: RewardModelSettings) -> list[Row]:
    """Rows with prompt, chosen and rejected, each checked.

    Raises:
        SettingsError: rows cannot be read, lack a column, or hold something else than text.
    """
    if chosen.dataset is not None:
        return checked_pairs(
            rows_of_dataset(chosen.dataset, chosen.split, columns_of(chosen), "reward_model.dataset"), chosen)
    return checked_pairs(rows_of_file(str(chosen.path), columns_of(chosen)), chosen)


def held_out_rows_of(chosen: RewardModelSettings) -> list[Row] | None:
    """Rows of `reward_model.held_out_path`, each checked; None if pairs are held out of the others.

    Raises:
        SettingsError: see `rows_of`.
    """
    path = chosen.held_out_path
    return None if path is None else checked_pairs(rows_of_file(path, columns_of(chosen)), chosen)


def columns_of(chosen: RewardModelSettings) -> dict[str, str]:
    """Columns that each row must have, and the setting that names each."""
    return {getattr(chosen, key): f"reward_model.{key}" for key in
            ("prompt_column", "chosen_column", "rejected_column")}


def checked_pairs(rows: list[Row], chosen: RewardModelSettings) -> list[Row]:
    """`rows`, if each holds a prompt and two texts.

    Raises:
        SettingsError: with the place of every other one.
    """
    problems = []
    for place, row in rows:
        if not isinstance(row[chosen.prompt_column], str) and not is_chat(row[chosen.prompt_column]):
            problems.append(f"{place}: {chosen.prompt_column!r} is neither text nor a list of messages.")
        problems += [f"{place}: {key!r} holds a {type(row[key]).__name__}; it must hold a completion's text."
                     for key in (chosen.chosen_column, chosen.rejected_column) if not isinstance(row[key], str)]
    if problems:
        raise SettingsError(problems[:20])
    return rows


def split_pairs(
    rows: Sequence[Row], chosen: RewardModelSettings, encoder: Encoder, seed: int, kept: Sequence[Row] | None = None
) -> Pairs:
    """The pairs as ids, in two parts: `kept` is held out, else whole prompts are drawn until enough pairs are.

    Raises:
        SettingsError: one of the parts is empty, or a pair is in both.
    """
    made, identical, too_long = encoded(rows, chosen, encoder)
    if kept is not None:
        apart, same, long = encoded(kept, chosen, encoder)
        training, held_out = ([p for of in side.values() for p in of] for side in (made, apart))
        if shared := set(training) & set(held_out):
            raise SettingsError([
                f"reward_model.held_out_path = {chosen.held_out_path!r} shares {len(shared)} pairs with those to train "
                f"on; take them out of one of the two."
            ])
        return _both(Pairs(
            training=training, held_out=held_out, identical=identical + same, too_long=too_long + long, cut=encoder.cut
        ), f"{len(rows)} pairs to train on and {len(kept)} held out")
    names = list(made)
    random.Random(f"reward model {seed}").shuffle(names)
    wanted = round(chosen.held_out * sum(map(len, made.values())))
    held_out = []
    while names and len(held_out) < wanted:
        held_out += made[names.pop()]
    training = [pair for name in sorted(names) for pair in made[name]]
    return _both(
        Pairs(training=training, held_out=held_out, identical=identical, too_long=too_long, cut=encoder.cut),
        f"{len(rows)} pairs of {len(made)} prompts, with reward_model.held_out = {chosen.held_out:g},",
    )


def _both(pairs: Pairs, given: str) -> Pairs:
    if not pairs.training or not pairs.held_out:
        raise SettingsError([
            f"{given} give {len(pairs.training)} to train on and {len(pairs.held_out)} held out; both need one."
        ])
    return pairs


def encoded(
    rows: Sequence[Row], chosen: RewardModelSettings, encoder: Encoder
) -> tuple[dict[str, list[Pair]], int, int]:
    """Pairs as ids by prompt, and how many were left out as identical and as too long."""
    made: dict[str, list[Pair]] = {}
    identical = too_long = 0
    for place, row in rows:
        asked = row[chosen.prompt_column]
        columns = {} if isinstance(asked, str) else {"messages": asked}
        prompt = Prompt(id=place, tokens=(0,), text=asked if isinstance(asked, str) else "", columns=columns)
        messages = messages_of(prompt)
        try:
            both = [encoder.encode(messages, row[key]) for key in (chosen.chosen_column, chosen.rejected_column)]
        except TooLong:
            too_long += 1
            continue
        if both[0] == both[1]:
            identical += 1
            continue
        made.setdefault(repr(messages), []).append(Pair(chosen=both[0], rejected=both[1]))
    return made, identical, too_long


# ---- training and measuring ---------------------------------------------------------------------------


def fit(
    model: Any, tokenizer: Any, pairs: Sequence[Pair], chosen: RewardModelSettings, seed: int, folder: Path,
    say: Callable[[str], None],
) -> None:
    """Trains the classifier in place with the training loop of `transformers`."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Tell(TrainerCallback):
        """Passes what the loop logs on to `say`."""

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if "loss" in (logs or {}):
                say(f"step {state.global_step}/{state.max_steps}  loss {float(logs['loss']):.4f} nats per pair")

    steps = math.ceil(len(pairs) / chosen.batch_size) * chosen.epochs
    arguments = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=min(chosen.micro_batch, chosen.batch_size),
        gradient_accumulation_steps=max(1, chosen.batch_size // chosen.micro_batch), num_train_epochs=chosen.epochs,
        learning_rate=chosen.learning_rate, lr_scheduler_type="cosine", warmup_steps=math.ceil(WARMUP_SHARE * steps),
        weight_decay=chosen.weight_decay, max_grad_norm=1.0, seed=seed % 2**32, save_strategy="no",
        logging_strategy="steps", logging_steps=max(1, round(steps / 20)), report_to="none", disable_tqdm=True,
        remove_unused_columns=False, use_cpu=not torch.cuda.is_available(), dataloader_pin_memory=False,
    )
    model.requires_grad_(True)
    loop = Trainer(
        model=PairLoss(model, chosen.centre), args=arguments, train_dataset=list(pairs),  # type: ignore[arg-type]
        data_collator=lambda batch: stacked(batch, tokenizer), callbacks=[Tell()],
    )
    for callback in [c for c in loop.callback_handler.callbacks if type(c).__name__ == "PrinterCallback"]:
        loop.remove_callback(callback)
    loop.train()
    model.eval().requires_grad_(False)


def stacked(pairs: Sequence[Pair], tokenizer: Any) -> dict[str, Tensor]:
    """A batch [N, 2, T] of pairs, padded to the longest of all."""
    rows = padded([text for pair in pairs for text in (pair.chosen, pair.rejected)], tokenizer)
    return {name: tensor.view(len(pairs), 2, -1) for name, tensor in rows.items()}


def measured(model: Any, encoder: Encoder, pairs: Sequence[Pair], bins: int) -> dict[str, Any]:
    """Accuracy with its interval, ties, loss, expected calibration error and reliability table on `pairs`."""
    scorer = ModelScorer(model.eval(), encoder, index=0, activation="none", batch_tokens=MEASURE_TOKENS)
    scores = scorer.scores([text for pair in pairs for text in (pair.chosen, pair.rejected)])
    margins = [a - b for a, b in zip(scores[::2], scores[1::2], strict=True)]
    found = calibration(margins, bins)
    low, high = wilson(sum(m > 0 for m in margins), len(margins))
    mean = math.fsum(scores) / len(scores)
    return {
        "pair_accuracy": found.accuracy, "pair_accuracy_low": low, "pair_accuracy_high": high,
        "pair_ties": found.ties, "pair_loss": found.loss, "pair_ece": found.ece, "score_mean": mean,
        "score_sd": math.sqrt(math.fsum((s - mean) ** 2 for s in scores) / len(scores)),
        "reliability": [asdict(row) for row in found.bins],
    }


def _start_of(settings: Settings) -> str:
    """Folder or id of the model to start from."""
    where = settings.reward_model.model or settings.model
    if where in FRESH:
        raise SettingsError([
            f"reward_model.model = {where!r} is made from scratch and has no folder; give a model folder or a Hugging "
            f"Face id, for example one that tba sft has saved."
        ])
    return str(resources.files("tba").joinpath("assets", where)) if where in MODELS else where


def _load(where: str, seed: int) -> tuple[Any, Any, Mapping[str, Any]]:
    """The classifier with one label, whose head is drawn from the seed where the files have none."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, tokenizer, missing = load_classifier(where, "reward_model.model", labels=1)
    inner = [name for name in missing if name.startswith(f"{model.base_model_prefix}.")]
    if inner:
        raise SettingsError([
            f"reward_model.model = {where!r} lacks weights of the model itself ({', '.join(inner[:3])}); give a "
            f"whole one."
        ])
    return model, tokenizer, missing
