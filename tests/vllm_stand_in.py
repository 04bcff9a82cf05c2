"""A server that speaks as vLLM's does, on loopback, with a model of our own behind it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tba.engines.protocol import Sampling
from tba.engines.table import TableEngine
from tba.policy import Policy
from tba.records import Prompt

Twist = Callable[[str, dict[str, Any], dict[str, Any]], Any]
"""(path, request, reply) -> what is sent instead; a status alone if it is a number, text as it is."""


class StandIn:
    """Samples with a policy, whose adapter or whole weights it reads from the folder that it is told of."""

    def __init__(self, policy: Policy, base: str) -> None:
        self.policy, self.base, self.adapters = policy, base, {base: None}
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.twist: Twist = lambda path, request, reply: reply
        self._lock = threading.Lock()

    def answer(self, path: str, request: dict[str, Any]) -> Any:
        with self._lock:
            self.asked.append((path, request))
            if path == "/v1/load_lora_adapter":
                self.adapters[request["lora_name"]] = load_file(
                    Path(request["lora_path"]) / "adapter_model.safetensors")
                return "Success: LoRA adapter added successfully."
            if path == "/v1/unload_lora_adapter":
                del self.adapters[request["lora_name"]]
                return "Success: LoRA adapter removed successfully."
            if path == "/collective_rpc":
                tensors = load_file(Path(request["kwargs"]["weights_path"]) / "model.safetensors")
                self.policy.model.load_state_dict(tensors, strict=False)
                return {"results": [None]}
            return {} if path == "/reset_prefix_cache" else self._completion(request)

    @torch.no_grad()
    def _completion(self, request: dict[str, Any]) -> dict[str, Any]:
        adapter = self.adapters[request["model"]]
        if adapter is not None:
            own = {name.replace(".weight", ".default.weight"): tensor for name, tensor in adapter.items()}
            self.policy.model.load_state_dict(own, strict=False)
        ids = request["prompt"]
        if "prompt_logprobs" in request:
            logps = self.policy.model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
            listed = [{str(id): {"logprob": float(logps[place, id])}} for place, id in enumerate(ids[1:])]
            return {"choices": [{"prompt_logprobs": [None, *listed]}]}
        sampling = Sampling(max_new_tokens=request["max_tokens"], temperature=request["temperature"],
                            top_p=request["top_p"])
        prompt = Prompt(id="p", tokens=tuple(ids), text="")
        ((made,),) = TableEngine(self.policy).generate([prompt], num_samples=1, sampling=sampling,
                                                       seeds=[request["seed"]])
        return {"choices": [{"token_ids": list(made.tokens), "logprobs": {
            "token_logprobs": list(made.behaviour_logps or made.logps)}}]}


@contextmanager
def serving(stand_in: StandIn) -> Iterator[str]:
    """The address under which it answers."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            reply = stand_in.twist(self.path, request, stand_in.answer(self.path, request))
            self.send_response(reply if isinstance(reply, int) else 200)
            text = reply if isinstance(reply, str) else json.dumps(reply)  # what is done is told in plain text
            body = b"" if isinstance(reply, int) else text.encode()
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *unused: Any) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
