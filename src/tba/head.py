"""Log-probs of ids from hidden states, a piece of the vocabulary's logits at a time."""

# Shape legend: M places of all rows together, C those of a piece, H width, V vocabulary, S ids that stop.

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from tba import lora
from tba.limits import FREE, Limits

PIECE = 2**24
"""Logits that are held at a time: 64 MiB in float32."""
WORTH = 2**22
"""Logits below which all are computed at once: pieces would save 16 MiB at most."""


def target_logps(
    logits: Float[Tensor, "N T V"], target: Int[Tensor, "N T"], mask: Bool[Tensor, "N T"], temperature: float
) -> Float[Tensor, "N T"]:
    """Log-probs of `target` under softmax(logits / temperature), nats, zero where `mask` is False."""
    scaled = logits.float() / temperature
    picked = scaled.gather(-1, target[..., None])[..., 0] - scaled.logsumexp(-1)
    return torch.where(mask, picked, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """A causal LM in two: what makes hidden states, and the linear layer that makes logits of them."""

    body: Any
    linear: nn.Linear

    def logps(
        self, hidden_MH: Float[Tensor, "M H"], target_M: Int[Tensor, " M"], temperature: float, *,
        limits: Limits = FREE, place_M: Int[Tensor, " M"] | None = None, stop_S: Int[Tensor, " S"] | None = None,
        piece: int = PIECE,
    ) -> Float[Tensor, " M"]:
        """Log-probs of `target_M` at the places whose hidden states are given, nats, float32.

        The values of `target_logps`, without the [M V] logits: at most `piece` of them are there at a time, forward
        and backward. `limits` at `place_M` of their completions take `stop_S` out. Products are taken in the
        precision of autocast where that is on.
        """
        kind = hidden_MH.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden_MH.dtype
        limited = None if limits == FREE else (limits, place_M, stop_S)
        is_trained = torch.is_grad_enabled()
        weight, bias = self.linear.weight, self.linear.bias
        options = _Options(
            temperature=temperature, limited=limited, rows=max(1, piece // len(weight)), dtype=dtype,
            wants_hidden=is_trained and hidden_MH.requires_grad,
            wants_weight=is_trained and any(x is not None and x.requires_grad for x in (weight, bias)),
        )
        return _Logps.apply(hidden_MH, weight, bias, target_M, options)  # type: ignore[no-any-return]


def head_of(model: nn.Module) -> Head | None:
    """The two parts of a causal LM, with or without adapter; None if its logits are not plainly those of its head.

    Whether they are is tried once for each model: what its head gives is put in place of the logits, and must come
    out unchanged (some models scale or cap logits afterwards), and the head must be given what the body ends with.
    """
    inner: Any = model.get_base_model() if lora.has_adapter(model) else model  # type: ignore[operator]
    body = getattr(inner, getattr(inner, "base_model_prefix", "") or "model", None)
    linear = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    if body is None or body is inner or type(linear) is not nn.Linear:  # a head with an adapter is another type
        return None
    head = Head(body=body, linear=linear)
    if inner not in _PLAIN:
        _PLAIN[inner] = _is_plain(inner, head)
    return head if _PLAIN[inner] else None


_PLAIN: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


@torch.no_grad()
def _is_plain(inner: Any, head: Head) -> bool:
    device, num_ids = head.linear.weight.device, len(head.linear.weight)
    ids = torch.arange(min(3, num_ids), device=device)[None]
    given: list[Tensor] = []
    stand_in = torch.linspace(-90.0, 90.0, ids.numel() * num_ids, device=device).view(1, -1, num_ids)

    def replace(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        given.append(args[0])
        return stand_in.to(output.dtype)

    handle = head.linear.register_forward_hook(replace)
    try:
        logits = inner(input_ids=ids).logits
    finally:
        handle.remove()
    hidden = getattr(head.body(input_ids=ids), "last_hidden_state", None)
    return (
        hidden is not None and len(given) == 1 and given[0].shape == hidden.shape
        and torch.allclose(given[0], hidden, rtol=1e-4, atol=1e-5)
        and torch.equal(logits.to(stand_in.dtype), stand_in.to(head.linear.weight.dtype).to(stand_in.dtype))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """How log-probs are computed; see `Head.logps`."""

    temperature: float
    limited: tuple[Limits, Any, Any] | None
    rows: int
    """Places of a piece."""
    dtype: torch.dtype
    """Of the products."""
    wants_hidden: bool
    wants_weight: bool

    def logits(self, hidden_CH: Tensor, weight: Tensor, bias: Tensor | None, at: slice) -> Tensor:
        """[C V] logits over the temperature, float32, in memory of their own."""
        found = nn.functional.linear(hidden_CH, weight, bias).float()
        found.div_(self.temperature)
        if self.limited is None:
            return found
        limits, place_M, stop_S = self.limited
        return limits.banned(found, place_M[at], stop_S)

    def pieces(self, num_places: int) -> list[slice]:
        """Places of each piece."""
        return [slice(at, min(at + self.rows, num_places)) for at in range(0, num_places, self.rows)]


class _Logps(torch.autograd.Function):
    """Log-probs of targets.

    With z = W h / temperature, d log p(y) / d z = onehot(y) - softmax(z). Where the weight takes no gradient, as under
    an adapter, that times W is all that the way back needs, so it is made on the way forth, where the logits are at
    hand; otherwise these are computed a second time.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, opt: _Options) -> Tensor:
        h, w = hidden.to(opt.dtype), weight.to(opt.dtype)
        b = None if bias is None else bias.to(opt.dtype)
        norm = torch.empty(len(h), dtype=torch.float32, device=h.device)
        logps = torch.empty_like(norm)
        slope = torch.empty_like(h) if opt.wants_hidden and not opt.wants_weight else None
        for at in opt.pieces(len(h)):
            logits = opt.logits(h[at], w, b, at)
            norm[at] = logits.logsumexp(-1)
            logps[at] = logits.gather(-1, target[at, None])[:, 0] - norm[at]
            if slope is not None:
                slope[at] = _rise(logits, target[at], norm[at]).to(opt.dtype) @ w
        ctx.opt, ctx.kinds = opt, (hidden.dtype, weight.dtype)
        ctx.save_for_backward(*((slope,) if slope is not None else (h, w, b, target, norm) if opt.wants_weight else ()))
        return logps

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        opt, (grad,) = ctx.opt, grads
        of_hidden, of_weight = ctx.kinds
        scale = (grad / opt.temperature)[:, None]
        if not opt.wants_weight:
            (slope,) = ctx.saved_tensors
            return (scale * slope).to(of_hidden), None, None, None, None
        h, w, b, target, norm = ctx.saved_tensors
        d_hidden = torch.empty_like(h) if opt.wants_hidden else None
        d_weight = torch.zeros(w.shape, dtype=of_weight, device=w.device)
        d_bias = None if b is None else torch.zeros(b.shape, dtype=of_weight, device=w.device)
        for at in opt.pieces(len(h)):
            rise = _rise(opt.logits(h[at], w, b, at), target[at], norm[at]).mul_(scale[at])
            if d_bias is not None:
                d_bias += rise.sum(0)
            rise = rise.to(opt.dtype)
            if d_hidden is not None:
                d_hidden[at] = rise @ w
            if opt.dtype == of_weight:
                d_weight.addmm_(rise.T, h[at])
            else:
                d_weight += rise.T @ h[at]
        return None if d_hidden is None else d_hidden.to(of_hidden), d_weight, d_bias, None, None


def _rise(logits_CV: Tensor, target_C: Tensor, norm_C: Tensor) -> Tensor:
    """[C V] how each target's log-prob rises with each logit; in the memory of the logits."""
    found = logits_CV.sub_(norm_C[:, None]).exp_().neg_()
    found.scatter_add_(1, target_C[:, None], torch.ones_like(norm_C)[:, None])
    return found
