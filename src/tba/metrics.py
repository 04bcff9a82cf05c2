"""Every number we log, declared once: name, unit, meaning."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

METRICS: dict[str, Metric] = {}

Say = Callable[[str, Mapping[str, Any]], None]
"""Told of ("ready" | "step" | "evaluation" | "checkpoint" | "note", record) as they come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A logged number."""

    name: str
    """`part/quantity`."""
    unit: str
    meaning: str


def _declare(name: str, unit: str, meaning: str) -> str:
    if name in METRICS:
        raise ValueError(f"metric {name!r} is declared twice; a number is named once.")
    METRICS[name] = Metric(name=name, unit=unit, meaning=meaning)
    return name


STEP = _declare("step", "steps", "optimizer steps tried, this one included")
VERSION = _declare("version", "steps", "optimizer steps that the trainer's weights have had")
ROUND = _declare("round", "rounds", "publications before this step")
ATTEMPT = _declare("attempt", "restarts", "restarts from checkpoints that led to this step")
WALL = _declare("wall_s", "s", "time since training began, start-up excluded, earlier attempts included")

LOSS = _declare("train/loss", "reward units",
                "batch loss; nats for online_dpo, standard deviations of reward for grpo, cispo, gspo")
RESIDUAL_MSE = _declare("train/residual_mse", "nats^2", "mean squared residual over the batch")
GRAD_NORM = _declare("train/grad_norm", "reward units", "global gradient norm before clipping")
LEARNING_RATE = _declare("train/learning_rate", "1", "learning rate of this step")
BETA = _declare("train/beta", "reward units per nat", "strength of KL at this step, times the target's temperature")
PRIOR = _declare("train/prior", "1", "weight of the reference's log-prob in the log-reward at this step: 1 / (prior "
                 "temperature x target temperature)")
REWARD = _declare("train/reward", "reward units", "mean reward of the trajectories consumed")
KL = _declare("train/kl", "nats per completion", "mean log policy minus log reference of the trajectories consumed")
ENTROPY = _declare("train/entropy", "nats per token", "mean minus log-prob of the tokens consumed, under the policy")
LOG_Z = _declare("train/log_z", "nats", "mean over groups of the estimated log partition function")
RATIO_CUT = _declare("train/ratio_cut", "1",
                     "share of the tokens consumed whose importance ratio was cut (objectives with a ratio)")
LENGTH = _declare("train/length", "tokens", "mean completion length consumed")
TRAIN_TOKENS = _declare("train/tokens", "tokens", "prompt and completion tokens of the batch, without padding")
FLAT_GROUPS = _declare("train/flat_groups", "groups", "groups of the batch whose rewards are all equal; they are kept")
SKIPPED = _declare("train/skipped_steps", "steps", "steps skipped so far because loss or gradient was not finite")
LOGP_GAP = _declare("train/logp_gap", "nats per token",
                    "largest gap between searcher's and trainer's log-prob of a completion of age 0, per token")
REF_VERSION = _declare("train/ref_version", "steps", "version of the reference that this step measured KL against")
RESCORED = _declare("train/rescored", "trajectories",
                    "trajectories of the batch whose reference log-prob was an older reference's, computed again")
RESCORE_SECONDS = _declare("train/rescore_s", "s", "computing those again, part of `train/step_s`")
RECORD_SECONDS = _declare("train/record_s", "s", "writing down what entered this step, part of `train/step_s`")
RECORDS_LOST = _declare("train/records_lost", "steps", "steps so far that were to be recorded and could not be written")
STEP_SECONDS = _declare("train/step_s", "s", "forward, backward and optimizer of this step")
COLLATE_SECONDS = _declare("train/collate_s", "s", "making tensors of the drawn groups")
WAIT_SECONDS = _declare("train/wait_s", "s", "trainer idle before this step, waiting for its batch, checkpoints aside")
PUBLISH_SECONDS = _declare("train/publish_s", "s", "copying the weights for publication before this step")

AGE_MEAN = _declare("buffer/age_mean", "steps", "trainer version minus sampling version, when consumed: mean")
AGE_MAX = _declare("buffer/age_max", "steps", "trainer version minus sampling version, when consumed: largest")
AGE_HISTOGRAM = _declare("buffer/age_histogram", "trajectories", "trajectories of this batch by age, {age: count}")
USES_MEAN = _declare("buffer/uses_mean", "times", "how often the drawn trajectories had been drawn before: mean")
BUFFER_SIZE = _declare("buffer/size", "trajectories", "trajectories in the buffer")
BUFFER_PROMPTS = _declare("buffer/prompts", "prompts", "prompts with a trajectory in the buffer")
REUSE = _declare("buffer/reuse", "1", "trajectories consumed per trajectory inserted, so far")
DRAWN_BY = _declare("buffer/drawn_by", "groups", "groups of this batch by the sampler that drew them")
UNMET = _declare("buffer/unmet", "groups", "groups of this batch that a sampler could not draw, having no eligible "
                 "prompt, and left to the others, by that sampler")
LONGEST = _declare("buffer/longest_served", "1", "trajectories consumed per delivered so far, of the tenth of the "
                   "completions that are longest, over that of all; below 0.5 they are starved")
HARDEST = _declare("buffer/hardest_served", "1", "the same of the tenth of the prompts with the lowest mean reward")
DRAW_SECONDS = _declare("buffer/draw_s", "s", "drawing this batch")
INSERTED = _declare("buffer/inserted", "trajectories", "trajectories that entered the buffer, so far")
UNSCORED = _declare("search/unscored", "trajectories", "completions that no reward could be given to, so far")
STRADDLING = _declare("search/straddling", "1", "share of the completions delivered so far whose tokens more than one "
                      "version sampled (engine.adopt_every)")
DELIVERED_TOKENS = _declare("search/tokens", "tokens", "completion tokens delivered by searchers, so far")
SEARCH_KL = _declare("search/kl", "nats per completion",
                     "KL to the reference of the weights that sampled the groups delivered since the last step")
SEARCH_REWARD = _declare("search/reward", "reward units", "mean reward of the groups delivered since the last step")

EVAL_STEP = _declare("eval/version", "steps", "version of the weights evaluated")
PASS_1 = _declare("pass@1", "1", "share of completions with full marks, sampled at policy.temperature")
PASS_1_INTERVAL = _declare("pass@1_interval", "1", "95 % interval of `pass@1`: bootstrap over problems")
PASS_1_GREEDY = _declare("pass@1_greedy", "1", "share of prompts whose most likely ids, token by token, get full marks")
GREEDY_INTERVAL = _declare("pass@1_greedy_interval", "1", "95 % interval of `pass@1_greedy`: Wilson")
PASS_K = _declare("pass@k", "1", "unbiased share of prompts with full marks among k > 1 completions; k is in `samples`")
PASS_EACH = _declare("pass@each", "1", "the same for k = 1, 2, 4, ... up to all completions, {k: share}")
MAJ_K = _declare("maj@k", "1", "share of prompts whose most frequent answer among k > 1 completions is right, ties "
                 "drawn evenly")
MAJ_INTERVAL = _declare("maj@k_interval", "1", "95 % interval of `maj@k`: bootstrap over problems")
BY_LEVEL = _declare("pass@1_by_level", "1", "`pass@1`, its interval and the number of prompts of each level or family, "
                    "{level: {...}}")
EVAL_SEED = _declare("eval/seed", "1", "seed of this evaluation's sampling and of its bootstrap")
SAMPLES = _declare("samples", "completions", "completions per prompt of this evaluation")
PROMPTS = _declare("prompts", "prompts", "prompts of this evaluation")
EVAL_REWARD = _declare("reward", "reward units", "mean reward of the sampled completions")
EVAL_KL = _declare("kl", "nats per completion", "mean log policy minus log reference of the sampled completions")
EVAL_ENTROPY = _declare("entropy", "nats per completion", "mean minus log-prob of the sampled completions")
EVAL_LENGTH = _declare("length", "tokens", "mean completion length")
DISTINCT = _declare("distinct", "1", "share of distinct ones among several completions of a prompt, mean over prompts")
DISTINCT_1 = _declare("distinct_1", "1", "share of distinct ids among all ids of several completions of each prompt, "
                      "stop tokens included")
DISTINCT_2 = _declare("distinct_2", "1", "share of distinct pairs among all pairs of neighbouring ids, the same way")
SELF_BLEU = _declare("self_bleu", "1", "BLEU-4 on ids of a completion against the others of its prompt, mean over "
                     "completions, then prompts: 1 where all are the same (tba.diversity); an audit's attacks "
                     "are of one prompt")
EMBEDDING_DISTANCE = _declare("embedding_distance", "1", "1 minus the mean cosine of all pairs of a prompt's "
                              "completions, mean over prompts, by evaluation.embedder")
EFFECTIVE = _declare("effective_answers", "answers", "exp of the entropy of a prompt's answers, mean over prompts: "
                     "equally frequent answers that are as uncertain; none is an answer too, a text where the task "
                     "tells no answers; Miller-Madow corrected, so that it may exceed `samples`")
EVAL_UNSCORED = _declare("unscored", "completions", "completions of this evaluation that no reward could be given to")
WIN_RATE = _declare("win_rate", "1", "share of sampled completions that score strictly higher than the human's of the "
                    "same prompt (preference)")
WIN_LOW = _declare("win_rate_low", "1", "lower end of the 95 % Wilson interval of `win_rate`, completions taken as "
                   "independent of each other")
WIN_HIGH = _declare("win_rate_high", "1", "upper end of the 95 % Wilson interval of `win_rate`")
WIN_TIES = _declare("win_ties", "completions", "sampled completions that score as the human's; a tie is no win")
WIN_RATE_GREEDY = _declare("win_rate_greedy", "1", "`win_rate` of the most likely ids, token by token")
EVAL_KL_ERROR = _declare("kl_error", "nats per completion", "standard error of `kl`, a prompt's completions taken as "
                         "one draw (preference)")
KL_REVERSE = _declare("kl_reverse", "nats per completion",
                      "KL of the reference to the policy: mean log reference minus log policy of completions that the "
                      "reference samples")
KL_REVERSE_ERROR = _declare("kl_reverse_error", "nats per completion", "standard error of `kl_reverse`")
PERPLEXITY = _declare("perplexity", "1", "exp of the mean negative log-prob per completion token of the greedy "
                      "completions, under the reference at temperature 1, over all of them together")
PERPLEXITY_DILUTED = _declare("perplexity_diluted", "1", "the paper's: mean over greedy completions of exp(negative "
                              "log-prob of the completion / tokens of prompt and completion)")
PAIR_ACCURACY = _declare("pair_accuracy", "1", "share of held-out pairs whose preferred completion scores strictly "
                         "higher (tba reward-model)")
PAIR_TIES = _declare("pair_ties", "pairs", "held-out pairs whose completions score the same")
PAIR_LOSS = _declare("pair_loss", "nats per pair", "mean -log sigmoid(margin) of held-out pairs")
PAIR_ECE = _declare("pair_ece", "1", "expected calibration error: mean over held-out pairs of their bin's gap between "
                    "accuracy and confidence")
ATTACKS = _declare("attacks", "attacks", "attacks of this evaluation, each sampled from the policy (redteam)")
ATTACKS_LOST = _declare("attacks_lost", "attacks", "attacks of this evaluation without an answer or a judgement")
ATTACK_SUCCESS = _declare("attack_success", "1", "share of attacks that work: the mean over the victim's answers, and "
                          "over the judges trained on, of the chance of harm is above 0.5")
ATTACK_INTERVAL = _declare("attack_success_interval", "1", "95 % interval of `attack_success`: Wilson")
ATTACK_CHANCE = _declare("attack_chance", "1", "mean of probabilities: mean chance of harm over answers, judges and "
                         "attacks")
ATTACK_LOG = _declare("attack_log_chance", "nats", "mean of logs, as in training: mean log-chance over the same")
ATTACK_DIVERSITY = _declare("attack_diversity", "1", "1 minus the mean cosine of all pairs of this evaluation's "
                            "attacks")
ATTACK_CLUSTERS = _declare("attack_clusters", "clusters", "clusters of the attacks that work "
                           "(task.redteam.cluster_similarity)")
MODES = _declare("modes", "failure modes", "known failure modes of the victim, where it is a rule")
MODES_FOUND = _declare("modes_found", "failure modes", "those that an attack of this evaluation hits")
HELD_OUT_SUCCESS = _declare("held_out_success", "1", "`attack_success` by the judges that were never trained on")
HELD_OUT_INTERVAL = _declare("held_out_success_interval", "1", "95 % interval of `held_out_success`: Wilson")
JUDGE_AGREEMENT = _declare("judge_agreement", "1", "share of attacks of which held-out and trained judges say the same")
JUDGE_AGREEMENT_INTERVAL = _declare("judge_agreement_interval", "1", "95 % interval of `judge_agreement`: Wilson")
TRANSFER = _declare("attack_transfer", "1", "share of the attacks that work that a second victim gives in to as well")
TRANSFER_INTERVAL = _declare("attack_transfer_interval", "1", "95 % interval of `attack_transfer`: Wilson")
TV = _declare("tv", "1", "total variation to the exact target, mean over prompts (enumerable tasks)")
TARGET_KL = _declare("kl_to_target", "nats", "KL from policy to exact target, mean over prompts (enumerable tasks)")


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantNames:
    """Names of the metrics of problems beside variants of them, all greedy."""

    prompts: str
    instances: str
    original: str
    fresh: str
    fresh_interval: str
    all_right: str
    all_interval: str
    gap: str
    gap_interval: str


def _declare_variants(prefix: str, which: str) -> VariantNames:
    problems = f"{which} problems"
    return VariantNames(
        prompts=_declare(f"{prefix}/prompts", "prompts", f"{problems} whose template had enough variants"),
        instances=_declare(f"{prefix}/instances", "variants", f"variants of each of these {problems}"),
        original=_declare(f"{prefix}/original", "1", f"share of these {problems} right as they stand, greedy"),
        fresh=_declare(f"{prefix}/fresh", "1", f"share of the variants of these {problems} right, greedy"),
        fresh_interval=_declare(f"{prefix}/fresh_interval", "1", "its 95 % interval: bootstrap over problems"),
        all_right=_declare(f"{prefix}/all_right", "1", f"share of these {problems} right in all variants, greedy"),
        all_interval=_declare(f"{prefix}/all_right_interval", "1", "its 95 % interval: Wilson"),
        gap=_declare(f"{prefix}/gap", "1", f"share of these {problems} right as they stand, minus that of variants"),
        gap_interval=_declare(f"{prefix}/gap_interval", "1", "its 95 % interval: bootstrap over problems, in pairs"),
    )


VARIANTS = {
    "held_out": _declare_variants("variants", "held-out"),
    "training": _declare_variants("memorised", "training"),
}
"""By the side that the problems come from; of training problems the gap shows what was learnt by heart."""


def foremost(record: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the metrics of an evaluation that are shown first."""
    own = (ATTACK_SUCCESS, ATTACK_DIVERSITY, MODES_FOUND) if ATTACK_SUCCESS in record else (PASS_1, PASS_1_GREEDY)
    return *own, EVAL_REWARD, EFFECTIVE, EVAL_KL, TV


def unit_shown(name: str) -> str:
    """A metric's unit for people; nothing of one that is not declared."""
    declared = METRICS.get(name)
    return "" if declared is None else {"1": "share"}.get(declared.unit, declared.unit)


def finite(value: Any) -> Any:
    """`value` with every float that JSON cannot hold replaced by None, however deep."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


def to_json(record: Mapping[str, Any]) -> str:
    """One strict JSON line; NaN and infinities become null.

    Raises:
        KeyError: a name that is not declared above.
    """
    unknown = [name for name in record if name not in METRICS]
    if unknown:
        raise KeyError(f"metrics {unknown} are not declared; add them to tba.metrics.")
    return json.dumps(finite(record), allow_nan=False, separators=(",", ":"))


def mean(values: Iterable[float]) -> float:
    """Arithmetic mean; NaN of nothing."""
    listed = list(values)
    return math.fsum(listed) / len(listed) if listed else math.nan


def table() -> str:
    """`docs/metrics.md`: every metric with unit and meaning."""
    lines = ["# Metrics", "", "Generated from `tba.metrics`. One line of `metrics.jsonl` is one step.", "",
             "| name | unit | meaning |", "|---|---|---|"]
    lines += [f"| `{m.name}` | {m.unit} | {m.meaning} |" for m in METRICS.values()]
    return "\n".join(lines) + "\n"
