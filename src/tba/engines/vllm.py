"""vLLM in the searcher's own process: weights are adopted in place, a full model's or an adapter's."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tba import lora
from tba.engine_settings import EngineSettings
from tba.engines.foreign import ForeignEngine, Request, longest_of, save_base
from tba.policy import Policy

RANKS = (8, 16, 32, 64, 128, 256, 512)
"""Adapters for which vLLM makes room; the least that is enough is chosen."""
MANY = 256
"""Completions under way at a time if nothing else is said."""
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # its engine here, so that weights are handed over and not written to files
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # cores are shared out by the run
    "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1",
}
"""Set where they are not, before it is imported."""


class VllmEngine(ForeignEngine):
    """See `ForeignEngine`."""

    def __init__(self, policy: Policy, *, rows: int | None = None, options: EngineSettings | None = None) -> None:
        """Samples with `policy`, which `load` overwrites: give the engine a copy of its own.

        At most `rows` completions are under way at a time.
        """
        options = options or EngineSettings()
        self._vllm = Vllm(policy.model, rows or MANY, options)
        super().__init__(policy, self._vllm, options.dtype)

    def close(self) -> None:
        """Lets go of vLLM's memory and of temporary files."""
        self._vllm.close()


class Vllm:
    """vLLM with the weights of a model."""

    def __init__(self, model: Any, rows: int, options: EngineSettings) -> None:
        """`model` may have an adapter, which is then all that changes."""
        self._temporary = tempfile.TemporaryDirectory(prefix="tba-vllm-")  # goes at the process's exit at the latest
        self._folder = Path(self._temporary.name)
        save_base(model, self._folder / "base")
        for name, value in {**ENVIRONMENT, "VLLM_CPU_KVCACHE_SPACE": str(options.vllm.cache_gib)}.items():
            os.environ.setdefault(name, value)
        from vllm import LLM  # pyright: ignore[reportMissingImports]

        adapted: dict[str, Any] = {}
        if lora.has_adapter(model):
            rank = next(iter(model.peft_config.values())).r
            adapted = {"enable_lora": True, "max_loras": 1, "max_lora_rank": next(r for r in RANKS if r >= rank)}
        self._llm: Any = LLM(
            model=str(self._folder / "base"), skip_tokenizer_init=True, dtype=options.dtype, seed=0,
            enforce_eager=options.vllm.eager, max_model_len=longest_of(model), max_num_seqs=rows,
            gpu_memory_utilization=options.vllm.memory, enable_prefix_caching=True, disable_log_stats=True,
            logprobs_mode="processed_logprobs", max_logprobs=1, **adapted,
        )
        shutil.rmtree(self._folder / "base")
        self._adapter: Any = None
        if adapted:
            self._take_adapter(model)

    def sample(self, requests: Sequence[Request], stop_ids: Sequence[int]) -> list[tuple[list[int], list[float]]]:
        """See `Backend.sample`."""
        from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

        outputs = self._llm.generate(
            [{"prompt_token_ids": request.ids} for request in requests],
            [SamplingParams(
                temperature=request.sampling.temperature, top_p=request.sampling.top_p, max_tokens=request.length,
                min_tokens=request.least, seed=request.seed, stop_token_ids=list(stop_ids), ignore_eos=True, logprobs=0,
                detokenize=False,
            ) for request in requests],
            use_tqdm=False, lora_request=self._adapter,
        )
        made = [output.outputs[0] for output in outputs]
        return [(list(one.token_ids), _logps(one.logprobs, one.token_ids)) for one in made]

    def prompt_logps(self, ids: Sequence[int]) -> list[float]:
        """See `Backend.prompt_logps`."""
        from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

        (output,) = self._llm.generate(
            [{"prompt_token_ids": list(ids)}],
            SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False, ignore_eos=True),
            use_tqdm=False, lora_request=self._adapter,
        )
        return _logps(output.prompt_logprobs[1:], ids[1:])

    def adopt(self, model: Any, version: int) -> None:
        """See `Backend.adopt`."""
        del version
        if self._adapter is not None:
            self._take_adapter(model)
        else:
            weights = ((name, tensor.detach()) for name, tensor in model.state_dict().items())
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
            if model.config.tie_word_embeddings:  # its packed copy is not made anew in every build
                self._llm.apply_model(_repack_head)
        self._llm.reset_prefix_cache()

    def _take_adapter(self, model: Any) -> None:
        """The adapter takes the place of the one before; the base is not touched."""
        from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

        folder = str(self._folder / "adapter")
        model.save_pretrained(folder, safe_serialization=True)
        self._llm.llm_engine.add_lora(LoRARequest("policy", 1, folder, load_inplace=True))
        self._adapter = LoRARequest("policy", 1, folder)

    @property
    def unfinished(self) -> int:
        """Requests that are not done."""
        return self._llm.llm_engine.get_num_unfinished_requests()

    def close(self) -> None:
        """Lets go of memory and files."""
        self._llm.llm_engine.engine_core.shutdown()
        self._temporary.cleanup()


def _repack_head(model: Any) -> None:
    model.lm_head.quant_method.process_weights_after_loading(model.lm_head)


def _logps(listed: Sequence[Any], ids: Sequence[int]) -> list[float]:
    return [float(at[id].logprob) for at, id in zip(listed, ids, strict=True)]
