"""What publishing costs the trainer, at a Llama of SmolLM2-135M's shape with random weights.

The trainer's process publishes after every step. `cpu_share` is what its thread computes for a publication over what it
computes in all, which holds on a machine that is busy with other things. The rest is wall-clock. The process on a Ray
of its own, as in an async run, fed three batches ahead: `share` is the time that its thread spends on publications over
all its time (training, waiting, publishing), `ratio` the median publication over the median step with it. Then what
others pay for the same tensors: a fresh copy and one into a recycled buffer, a digest, an adoption by an engine. Ratios
within one run count: seconds move with whatever else the machine does.

    python benchmarks/publish.py --steps 6 --tokens 1024 --json publish.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import random
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

SMOLLM2_135M = {
    "num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3,
    "intermediate_size": 1536, "vocab_size": 49152,
}
PROMPT_TOKENS = 16
GROUP_SIZE = 4
AHEAD = 3
"""Steps handed to the trainer before the first is done, as the driver does."""


def make_model(folder: Path, shape: Mapping[str, int]) -> Path:
    """A model folder with random weights and a small tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    from tba.tokenizers import character_tokenizer

    tokenizer = character_tokenizer("0123456789+-=")
    config = LlamaConfig(**shape, max_position_embeddings=2048, tie_word_embeddings=True,
                         pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id,
                         eos_token_id=tokenizer.eos_token_id)
    torch.manual_seed(0)
    logging.disable_progress_bar()
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def settings_of(folder: Path, *, tokens: int, length: int, rank: int) -> Any:
    """Settings under which a step has about `tokens` prompt and completion tokens, and publishes."""
    from tba.reading import read_settings

    groups = max(1, round(tokens / GROUP_SIZE / (length + PROMPT_TOKENS)))
    return read_settings("arithmetic", [
        f"model={folder}", "mode=async", f"policy.lora.rank={rank}", f"search.max_new_tokens={length}",
        f"search.num_samples={GROUP_SIZE}", f"trainer.group_size={GROUP_SIZE}", f"trainer.groups_per_step={groups}",
        "buffer.reuse=1", "trainer.sync_every=1",
        "trainer.micro_batch_tokens=512", "trainer.record_every=0", "async.wait_limit_s=7200",
    ])


def batch_of(settings: Any, vocabulary: int, seed: int) -> Any:
    """A batch of random ids."""
    from tba.batch import collate
    from tba.buffer.entries import Draw
    from tba.records import Completion, Prompt, Trajectory

    rng, draws = random.Random(seed), []
    length, size = settings.search.max_new_tokens, settings.trainer.group_size
    for number in range(settings.groups_per_step):
        prompt = Prompt(id=f"p{number}", text="", tokens=tuple(rng.choices(range(3, vocabulary), k=PROMPT_TOKENS)))
        made = tuple(
            Trajectory(prompt_id=prompt.id, reward=rng.random(), ref_logp=-10.0 * length, completion=Completion(
                tokens=tuple(rng.choices(range(3, vocabulary), k=length)), text="", logps=(-10.0,) * length, version=0,
                finish="length",
            ))
            for _ in range(size)
        )
        draws.append(Draw(prompt=prompt, trajectories=made, sampler="recent", prompt_probability=1.0,
                          item_probabilities=(1 / size,) * size, ages=(0,) * size, uses=(0,) * size))
    return collate(draws, max_tokens=settings.trainer.micro_batch_tokens)


@contextlib.contextmanager
def own_ray() -> Iterator[None]:
    """Ray on this machine, gone afterwards."""
    import ray

    with tempfile.TemporaryDirectory(prefix="tba-") as temp:
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=temp,
                 logging_level=logging.ERROR, object_store_memory=4 * 2**30)
        try:
            yield
        finally:
            ray.shutdown()


def trained(settings: Any, vocabulary: int, *, steps: int, threads: int) -> list[dict[str, Any]]:
    """Metrics of the steps of a trainer's process that is handed them as the driver hands them."""
    import ray

    from tba import metrics as m
    from tba.cluster.trainer import TrainerProcess

    make: Any = ray.remote(concurrency_groups={"feed": 1, "publish": 1})
    with own_ray(), tempfile.TemporaryDirectory() as run:
        process = make(TrainerProcess).remote(settings.resolved(), threads, None, run)
        ray.get(process.ready.remote(run))
        ray.get(process.begin.remote())
        handed, published, found = deque[Any](), deque[Any](maxlen=2), list[dict[str, Any]]()
        while len(found) < steps:
            while len(handed) < AHEAD and len(found) + len(handed) < steps:
                step = len(found) + len(handed)
                published.append(process.publication.options(num_returns=3).remote(step))
                drawn = (batch_of(settings, vocabulary, step), {m.SEARCH_KL: math.nan}, [])
                handed.append(process.step.remote(step + 1, process.feed.remote(step + 1, drawn)))
            found.append(ray.get(handed.popleft()))
        ray.get(published[-1][0])
    return found


def on_the_thread(settings: Any, vocabulary: int, *, steps: int, threads: int) -> dict[str, float]:
    """The same without Ray, one step after another, in seconds that the trainer's own thread computed.

    That is what a publication costs it on a machine that is busy with other things: waiting for a core is left out.
    With one thread only: others that help are not counted.
    """
    from tba import metrics as m
    from tba.cluster.trainer import TrainerProcess

    with tempfile.TemporaryDirectory() as run:
        process = TrainerProcess(settings.resolved(), threads, None, run)
        publish, published = process._publish, list[float]()

        def timed() -> None:
            started = time.thread_time()
            publish()
            published.append(time.thread_time() - started)

        process._publish = timed  # type: ignore[method-assign]
        process.publication(0)
        spent = [process._thread.submit(time.thread_time).result()]
        for step in range(1, steps + 1):
            process.feed(step, (batch_of(settings, vocabulary, step), {m.SEARCH_KL: math.nan}, []))
            process.step(step, None)
            spent.append(process._thread.submit(time.thread_time).result())
            process.publication(step)
    both = [after - before for before, after in pairwise(spent)]
    counted = range(AHEAD - 1, steps)
    publish_s = statistics.median(published[place] for place in counted)
    step_s = statistics.median(both[place] - published[place] for place in counted)
    return {"cpu_step_s": step_s, "cpu_publish_s": publish_s, "cpu_first_publish_s": published[0],
            "cpu_share": publish_s / (step_s + publish_s)}


def stall_of(found: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """What publications took of the trainer's time; without the first steps, whose publications find no buffer."""
    from tba import metrics as m

    counted = found[AHEAD:]
    spent = {name: [step[name] for step in counted] for name in (m.STEP_SECONDS, m.PUBLISH_SECONDS, m.WAIT_SECONDS)}
    step_s, publish_s = (statistics.median(spent[name]) for name in (m.STEP_SECONDS, m.PUBLISH_SECONDS))
    return {
        "steps": len(counted), "tokens": counted[0][m.TRAIN_TOKENS], "step_s": step_s, "publish_s": publish_s,
        "first_publish_s": found[0][m.PUBLISH_SECONDS], "ratio": publish_s / (step_s + publish_s),
        "share": sum(spent[m.PUBLISH_SECONDS]) / sum(map(sum, spent.values())),
    }


def median_s(work: Callable[[], Any], times: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Median seconds of a call, as `clock` counts them."""
    seconds = []
    for _ in range(times):
        started = clock()
        work()
        seconds.append(clock() - started)
    return statistics.median(seconds)


def parts_of(settings: Any, *, threads: int, times: int) -> dict[str, float]:
    """Seconds of what a publication's tensors go through."""
    from tba import assembly
    from tba.cluster.start import start_process
    from tba.policy import copy_out
    from tba.searcher import Searcher
    from tba.weights import Weights, digests

    _, task, policy = start_process(settings.resolved(), threads)
    model = policy.model
    tensors = copy_out(model)
    found = {"mib": sum(tensor.nbytes for tensor in tensors.values()) / 2**20}
    found["fresh_copy_s"] = median_s(lambda: copy_out(model), times)
    found["recycled_copy_s"] = median_s(lambda: copy_out(model, tensors), times)
    found["digest_s"] = median_s(lambda: digests(tensors), times)
    searcher: Searcher = assembly.make_searcher(settings, task, policy, "searcher-0")
    weights = Weights.of(tensors, version=1, round_=1)
    found["adoption_s"] = median_s(lambda: searcher.adopt(weights), times)
    return found


def main() -> None:
    """Measures, prints a table, and writes JSON."""
    parser = argparse.ArgumentParser(description="What publishing costs the trainer.")
    parser.add_argument("--steps", type=int, default=6, help="steps counted")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a step")
    parser.add_argument("--length", type=int, default=112, help="tokens of a completion")
    parser.add_argument("--layers", type=int, default=SMOLLM2_135M["num_hidden_layers"], help="fewer for a trial")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rank", type=int, nargs="*", default=[0, 16], help="of the adapter; 0: the full model")
    parser.add_argument("--without-ray", action="store_true", help="only what the thread computed, and the parts")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    shape = {**SMOLLM2_135M, "num_hidden_layers": chosen.layers}
    results = []
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), shape)
        for rank in chosen.rank:
            settings = settings_of(Path(folder), tokens=chosen.tokens, length=chosen.length, rank=rank)
            size = {"steps": chosen.steps + AHEAD, "threads": chosen.threads}
            row: dict[str, float] = {"rank": rank, "tokens": chosen.tokens}
            row |= on_the_thread(settings, shape["vocab_size"], **size)
            print(row, flush=True)
            row |= parts_of(settings, threads=chosen.threads, times=5)
            if not chosen.without_ray:
                row |= stall_of(trained(settings, shape["vocab_size"], **size))
            results.append(row)
            print("  ".join(f"{name} {value:.4g}" for name, value in row.items()), flush=True)
    if chosen.json is not None:
        chosen.json.write_text(json.dumps({"shape": shape, "threads": chosen.threads, "results": results}, indent=1))


if __name__ == "__main__":
    main()
