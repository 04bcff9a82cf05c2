"""How near training and sampling come to what this machine can multiply.

The limit of a piece of work is its multiplications, counted from the model's shape, at the rate that this machine's
matrix product reaches in the same precision on the same threads. `share` is limit over measured, both in processor's
seconds of one thread, so that other work beside it moves both alike. Counted of training: every linear layer at every
place that is read, forward and twice backward (once under an adapter, whose base takes no gradient), attention's two
products, and the head at the places of completions. Of sampling: the same forward for each id that is drawn.

`growth`: seconds over those of the first line, and what the count predicts. `memory`: peak of a process that computes
log-probs of 4,096 places with a vocabulary of 150,000 and their slopes, beyond weights and their slopes.

    python benchmarks/limit.py --parts rates training sampling --layers 30 --json limit.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from publish import PROMPT_TOKENS, SMOLLM2_135M, batch_of, make_model, median_s, settings_of

PARTS = ("rates", "training", "sampling", "growth", "memory")
ROUNDS = 3


def seconds(work: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Processor's seconds of `work`, the median after one that is not counted."""
    work()
    return median_s(work, rounds, time.process_time)


def rate_of(dtype: str, rows: int = 1024, width: int = 576, out: int = 1536) -> float:
    """Multiply-adds per second of one matrix product in the shape of a layer."""
    import torch

    kind = getattr(torch, dtype)
    left, right = torch.randn(rows, width, dtype=kind), torch.randn(width, out, dtype=kind)

    def work() -> None:
        for _ in range(50):
            left @ right

    return 50 * rows * width * out / seconds(work)


def products(shape: Mapping[str, int], *, places: int, attended: int, heads: int, passes: int) -> float:
    """Multiply-adds of `places` read, each attending to `attended` on the mean, and `heads` of them given logits."""
    width, inner, layers = shape["hidden_size"], shape["intermediate_size"], shape["num_hidden_layers"]
    narrow = width // shape["num_attention_heads"] * shape["num_key_value_heads"]
    linear = 2 * width * width + 2 * width * narrow + 3 * width * inner
    attention = 2 * attended * width
    return passes * (layers * places * (linear + attention) + heads * width * shape["vocab_size"])


def training(
    shape: Mapping[str, int], *, tokens: int, length: int, rank: int, autocast: str, rate: float
) -> dict[str, Any]:
    """A step of `tokens`: measured, its limit, and how much of it is the model's work."""
    from tba.assembly import make_policy, make_task_of
    from tba.trainer import Trainer

    with tempfile.TemporaryDirectory() as folder:
        settings = settings_of(make_model(Path(folder), shape), tokens=tokens, length=length, rank=rank)
        attention = "sdpa" if autocast == "none" else "eager"
        policy = settings.policy.model_copy(update={"autocast": autocast, "attention": attention})
        settings = settings.model_copy(update={"policy": policy})
        start = make_policy(settings, make_task_of(settings))
        trainer = Trainer(start.trainable_copy(), settings)
        batch = batch_of(settings, shape["vocab_size"], 0)
        model_s = _model_seconds(trainer, batch)
        step_s = seconds(lambda: trainer.step(batch))
    rows = sum(len(micro.reward_N) for micro in batch.micro_batches)
    prompts = settings.groups_per_step
    read = rows * (length - 1) + prompts * PROMPT_TOKENS  # each prompt once, and no completion's last id
    passes = 2 if rank else 3
    limit_s = products(
        shape, places=read, attended=(length + PROMPT_TOKENS) // 2, heads=rows * length, passes=passes
    ) / rate
    return {"tokens": batch.num_tokens, "step_s": step_s, "limit_s": limit_s, "share": limit_s / step_s,
            "model_share": min(1.0, model_s / step_s)}


def _model_seconds(trainer: Any, batch: Any) -> float:
    """What forward and backward of the batch's log-probs take alone."""
    def work() -> None:
        for micro in batch.micro_batches:
            for rows in micro.rows:
                trainer.policy.token_logps(rows).sum().backward()

    return seconds(work)


def sampling(shape: Mapping[str, int], *, prompts: int, length: int, dtype: str, rate: float) -> dict[str, Any]:
    """Completions of `length` ids, 8 of each prompt: measured and the limit of its products."""
    from tba.assembly import make_engine, make_policy, make_task_of
    from tba.engines.protocol import Sampling
    from tba.records import Prompt

    with tempfile.TemporaryDirectory() as folder:
        settings = settings_of(make_model(Path(folder), shape), tokens=512, length=length, rank=16)
        start = make_policy(settings, make_task_of(settings))
        engine = make_engine(settings, start.sampling_copy(dtype))
        asked = [Prompt(id=str(n), text="", tokens=tuple(range(3 + n, 3 + n + PROMPT_TOKENS))) for n in range(prompts)]
        drawn: list[int] = []

        def work() -> None:
            found = engine.generate(asked, num_samples=8, sampling=Sampling(max_new_tokens=length, temperature=1.0),
                                    seeds=list(range(prompts)))
            drawn.append(sum(len(completion.tokens) for group in found for completion in group))

        search_s = seconds(work)
    limit_s = products(
        shape, places=drawn[-1] + PROMPT_TOKENS * prompts, attended=PROMPT_TOKENS + length // 2, heads=drawn[-1],
        passes=1,
    ) / rate
    return {"tokens": drawn[-1], "search_s": search_s, "tokens_per_s": drawn[-1] / search_s, "limit_s": limit_s,
            "share": limit_s / search_s}


def growth(shape: Mapping[str, int], rate: float, scale: float) -> list[dict[str, Any]]:
    """Steps of equal token counts with longer completions, and of larger vocabularies, beside what the count says."""
    lines = []
    tokens = int(8192 * scale)
    for length in (128, 512, 2048):
        found = training(shape, tokens=tokens, length=int(length * scale), rank=0, autocast="none", rate=rate)
        lines.append({"what": "length", "value": int(length * scale), **found})
    for vocabulary in (10_000, 50_000, 150_000):
        wide = {**shape, "vocab_size": vocabulary}
        found = training(wide, tokens=int(1024 * scale), length=64, rank=0, autocast="none", rate=rate)
        lines.append({"what": "vocabulary", "value": vocabulary, **found})
    for line in lines:
        first = next(other for other in lines if other["what"] == line["what"])
        line["grew"] = line["step_s"] / first["step_s"]
        line["predicted"] = line["limit_s"] / first["limit_s"]
    return lines


def memory(places: int = 4096, vocabulary: int = 150_000, width: int = 64) -> dict[str, float]:
    """Peak MiB of a process for log-probs and slopes, all logits at once and in pieces, less weights and slopes."""
    peaks = {}
    for way in ("nothing", "pieces", "all"):
        script = (
            "from limit import logps_of, peak_mib\n"
            f"logps_of({way!r}, {places}, {vocabulary}, {width})\n"
            "print(peak_mib())\n"
        )
        done = subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parent, capture_output=True, text=True,
                              check=True)
        peaks[way] = float(done.stdout.split()[-1])
    beyond = {way: peaks[way] - peaks["nothing"] for way in ("pieces", "all")}
    return {"pieces_mib": beyond["pieces"], "all_mib": beyond["all"], "ratio": beyond["pieces"] / beyond["all"]}


def peak_mib() -> float:
    """Most memory that this process has had; `getrusage` would count that of the process it came from as well."""
    (line,) = (line for line in Path("/proc/self/status").read_text("ascii").splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def logps_of(way: str, places: int, vocabulary: int, width: int) -> None:
    """Log-probs and slopes by either way; `nothing` holds the weight and its slope alone."""
    import torch

    from tba.head import Head, target_logps

    torch.manual_seed(0)
    linear = torch.nn.Linear(width, vocabulary, bias=False)
    linear.weight.grad = torch.ones_like(linear.weight)
    hidden, target = torch.randn(places, width, requires_grad=True), torch.randint(vocabulary, (places,))
    if way == "nothing":
        return
    if way == "pieces":
        logps = Head(body=None, linear=linear).logps(hidden, target, 1.0)
    else:
        logps = target_logps(linear(hidden)[None], target[None], torch.ones(1, places, dtype=torch.bool), 1.0)
    logps.sum().backward()


def measured(parts: list[str], layers: int, scale: float) -> dict[str, Any]:
    """What was asked for; sizes are multiplied by `scale` for a trial."""
    shape = {**SMOLLM2_135M, "num_hidden_layers": layers}
    rates = {dtype: rate_of(dtype) for dtype in ("float32", "bfloat16")}
    found: dict[str, Any] = {"multiply_adds_per_s": rates}
    if "training" in parts:
        found["training"] = [
            {"rank": rank, "autocast": autocast, **training(
                shape, tokens=int(1024 * scale), length=48, rank=rank, autocast=autocast,
                rate=rates["float32" if autocast == "none" else autocast],
            )}
            for rank in (0, 16) for autocast in ("none", "bfloat16")
        ]
    if "sampling" in parts:
        found["sampling"] = [
            {"dtype": dtype, **sampling(
                shape, prompts=max(1, int(8 * scale)), length=32, dtype=dtype, rate=rates[dtype]
            )}
            for dtype in ("float32", "bfloat16")
        ]
    if "growth" in parts:
        found["growth"] = growth({**shape, "num_hidden_layers": max(1, layers // 15)}, rates["float32"], scale)
    if "memory" in parts:
        found["memory"] = memory(places=max(64, int(4096 * scale)))
    found["peak_mib"] = peak_mib()
    return found


def main() -> None:
    """Measures, prints a line for each piece of work, and writes all figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--layers", type=int, default=SMOLLM2_135M["num_hidden_layers"], help="fewer for a trial")
    parser.add_argument("--scale", type=float, default=1.0, help="of tokens and lengths; below 1 for a trial")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    import torch

    torch.set_num_threads(given.threads)
    found = measured(given.parts, given.layers, given.scale)
    for name, value in found.items():
        for line in value if isinstance(value, list) else [value]:
            shown = line if isinstance(line, dict) else {name: line}
            print(name, "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in shown.items()))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1), "utf-8")


if __name__ == "__main__":
    main()
