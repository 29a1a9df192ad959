"""The same decoder and AdamW in PyTorch, eager: the other system to be measured against.

Written as its users write it: `scaled_dot_product_attention` with `is_causal` (the batch is
one document a row), `rms_norm` and `cross_entropy` from `torch.nn.functional`, the fused or
the multi-tensor AdamW. Only `experiments.bench` imports this; PyTorch is no dependency.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch  # pyrefly: ignore[missing-import]
import torch.nn.functional as F  # noqa: N812  # pyrefly: ignore[missing-import]

from experiments.bench.plain_jax import EPSILON, ROPE_THETA


def rotate(x, cos, sin):
    """Rotary embedding in the half-rotation layout."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Decoder(torch.nn.Module):
    """Holds the arrays of `plain_jax`'s parameters, matrices transposed to [out, in]."""

    def __init__(self, params: dict[str, Any], heads: int, length: int):
        super().__init__()
        self.heads = heads
        self.embedding = parameter(params["embedding"])
        self.head = parameter(params["head"].T)
        self.final_norm = parameter(params["final_norm"])
        self.layers = torch.nn.ModuleList(
            torch.nn.ParameterDict({name: parameter(x.T) for name, x in layer.items()})
            for layer in params["layers"]
        )
        half = self.embedding.shape[1] // heads // 2
        frequency = ROPE_THETA ** -(torch.arange(half) / half)
        angles = torch.arange(length)[:, None] * frequency
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def attend(self, x, layer):
        split = lambda y: y.view(*y.shape[:2], self.heads, -1).transpose(1, 2)
        q = rotate(split(F.linear(x, layer["query"])), self.cos, self.sin)
        k = rotate(split(F.linear(x, layer["key"])), self.cos, self.sin)
        v = split(F.linear(x, layer["value"]))
        context = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.linear(context.transpose(1, 2).reshape(x.shape), layer["attention_output"])

    def loss(self, tokens, labels):
        """Mean cross-entropy in nats of int64 [B, T] `tokens` and `labels`."""
        x = F.embedding(tokens, self.embedding)
        norm = lambda y, scale: F.rms_norm(y, scale.shape, scale, EPSILON)
        for layer in self.layers:
            x = x + self.attend(norm(x, layer["attention_norm"]), layer)
            y = norm(x, layer["mlp_norm"])
            y = F.silu(F.linear(y, layer["gate"])) * F.linear(y, layer["up"])
            x = x + F.linear(y, layer["down"])
        logits = F.linear(norm(x, self.final_norm), self.head)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def gradients(self) -> dict[str, Any]:
        """The gradients now held, as `plain_jax`'s tree of NumPy arrays."""
        grad = lambda p: p.grad.numpy()
        return {
            "embedding": grad(self.embedding),
            "head": grad(self.head).T,
            "final_norm": grad(self.final_norm),
            "layers": [{name: grad(p).T for name, p in layer.items()} for layer in self.layers],
        }


def parameter(x: np.ndarray) -> torch.nn.Parameter:
    """A trainable copy of `x`."""
    return torch.nn.Parameter(torch.tensor(x).contiguous())


def make_step(
    model: Decoder,
    tokens: np.ndarray,
    labels: np.ndarray,
    learning_rate,
    b1,
    b2,
    epsilon,
    weight_decay,
    clip_norm,
    *,
    fused: bool,
) -> Callable[[], float]:
    """A step that updates `model` and returns the loss; AdamW fused, or multi-tensor."""
    tokens, labels = torch.tensor(tokens).long(), torch.tensor(labels).long()
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    kind = {"fused": True} if fused else {"foreach": True}
    optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(b1, b2), eps=epsilon, **kind)

    def step():
        optimizer.zero_grad(set_to_none=True)
        value = model.loss(tokens, labels)
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        return value.item()

    return step


def threads() -> int:
    """How many threads PyTorch computes with."""
    return torch.get_num_threads()
