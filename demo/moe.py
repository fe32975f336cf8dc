"""A lean training implementation of the Qwen3-MoE architecture in plain PyTorch, for CPUs.

The mathematics is that of ``Qwen3MoeForCausalLM``: RMSNorm before each block, per-head
query/key norms, rotary positions, grouped-query attention, SwiGLU, and a router that takes the
softmax over all experts, keeps the top K and renormalises. What differs is how it is computed:
tokens are sorted by expert, each expert is one dense product over its own contiguous rows (no
capacity limit, no dropped token), and the backward pass only gathers, never scatters.

Axis letters: L layers, E experts, K experts a token, T tokens, H hidden, F expert intermediate,
B sequences, S tokens a sequence, N heads, D head size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 1e-6
ATTENTION_BLOCK = 128  # queries a block


@dataclass(frozen=True)
class Shape:
    """Sizes of the model; field names follow the Transformers configuration."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 768
    moe_intermediate_size: int = 64
    num_hidden_layers: int = 8
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    num_experts: int = 32
    num_experts_per_tok: int = 4
    dense_layers: tuple[int, ...] = (0,)
    rope_theta: float = 10_000.0
    max_position_embeddings: int = 2048

    @property
    def moe_layers(self) -> list[int]:
        """Indices of the layers with experts."""
        return [n for n in range(self.num_hidden_layers) if n not in self.dense_layers]


def rope_tables(shape: Shape, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles, float32 [S, D]."""
    half = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angles = torch.outer(torch.arange(length, dtype=torch.float32), shape.rope_theta**-half)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm in float32, result bfloat16; x [..., H]."""
    x = x.float()
    return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight.float()).bfloat16()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return (x.float() * cos + turned.float() * sin).bfloat16()


def _heads(
    x: Tensor,
    ln: Tensor,
    qkv: Tensor,
    qn: Tensor,
    kn: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    kv_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, each bfloat16 [B * N, S, D]; x float32 [B, S, H]."""
    batch, length, _ = x.shape
    size = qn.shape[0]
    mixed = F.linear(_norm(x, ln), qkv).view(batch, length, heads + 2 * kv_heads, size)
    q, k, v = mixed.split((heads, kv_heads, kv_heads), dim=2)
    q = _rotate(_norm(q, qn).transpose(1, 2), cos, sin)
    k = _rotate(_norm(k, kn).transpose(1, 2), cos, sin).repeat_interleave(heads // kv_heads, dim=1)
    v = v.transpose(1, 2).repeat_interleave(heads // kv_heads, dim=1)
    flat = (batch * heads, length, size)
    return q.reshape(flat), k.reshape(flat), v.reshape(flat)


def _merge(x: Tensor, y: Tensor, out: Tensor) -> Tensor:
    """Output projection and residual; x float32 [B, S, H], y bfloat16 [B * N, S, D]."""
    batch, length, _ = x.shape
    y = y.view(batch, -1, length, y.shape[-1]).transpose(1, 2).reshape(batch, length, -1)
    return x + F.linear(y, out).float()


def _softmax(scores: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Masked softmax; scores bfloat16 [B * N, C, S], mask float32 [C, S]."""
    scores = scores.float() * scale + mask
    exps = (scores - scores.amax(dim=-1, keepdim=True)).exp()
    return (exps / exps.sum(dim=-1, keepdim=True)).bfloat16()


def _softmax_backward(probs: Tensor, grad: Tensor, scale: float) -> Tensor:
    """Gradient of ``_softmax`` in the scores."""
    probs, grad = probs.float(), grad.float()
    return (probs * (grad - (probs * grad).sum(dim=-1, keepdim=True)) * scale).bfloat16()


def _dense(x: Tensor, ln: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Residual SwiGLU block; x float32 [B, S, H]."""
    gate, up = F.linear(_norm(x, ln), gate_up).chunk(2, dim=-1)
    return x + F.linear(F.silu(gate) * up, down).float()


def _route(x: Tensor, ln: Tensor, router: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Norm and router; x float32 [B, S, H].

    Gives the normed hidden state bfloat16 [T, H], weights float32 [T, K], expert numbers [T, K]
    and the mean router probability of each expert float32 [E].
    """
    h = _norm(x, ln).view(-1, x.shape[-1])
    probs = F.linear(h, router).float().softmax(dim=-1)
    weights, experts = probs.topk(top_k, dim=-1)
    return h, weights / weights.sum(dim=-1, keepdim=True), experts, probs.mean(dim=0)


def _swiglu(gate_up: Tensor, weight: Tensor) -> Tensor:
    """silu(gate) * up * weight; gate_up [R, 2F] bfloat16, weight float32 [R]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up * weight[:, None]).bfloat16()


def _swiglu_backward(grad: Tensor, gate_up: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of ``_swiglu`` in gate_up [R, 2F] bfloat16 and weight [R] float32."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    grad = grad.float()
    sigmoid = gate.sigmoid()
    act = gate * sigmoid
    d_weight = (grad * act * up).sum(dim=-1)
    scaled = grad * weight[:, None]
    d_gate = scaled * up * (sigmoid + act * (1 - sigmoid))
    return torch.cat((d_gate, scaled * act), dim=-1).bfloat16(), d_weight


def _gather_sum(rows: Tensor, index: Tensor) -> Tensor:
    """Sum of K rows a token: rows bfloat16 [T * K, H], index [T, K] -> float32 [T, H]."""
    total = rows[index[:, 0]].float()
    for k in range(1, index.shape[1]):
        total = total + rows[index[:, k]].float()
    return total


def _cross_entropy(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Summed loss (nats), and its gradient in the logits; logits bfloat16 [R, V], target [R]."""
    wide = logits.float()
    top = wide.amax(dim=-1, keepdim=True)
    exps = (wide - top).exp()
    total = exps.sum(dim=-1, keepdim=True)
    loss = (total.log() + top - wide.gather(1, target[:, None])).sum()
    ids = torch.arange(logits.shape[1])
    grad = exps / total - (ids[None, :] == target[:, None]).float()
    return loss, grad.bfloat16()


class Kernels:
    """The functions above, compiled or as they are."""

    def __init__(self, compiled: bool) -> None:
        def wrap(function: Callable) -> Callable:
            return torch.compile(function, dynamic=False) if compiled else function

        self.heads = wrap(_heads)
        self.merge = wrap(_merge)
        self.softmax = wrap(_softmax)
        self.softmax_backward = wrap(_softmax_backward)
        self.dense = wrap(_dense)
        self.route = wrap(_route)
        self.norm = wrap(_norm)
        self.swiglu = wrap(_swiglu)
        self.swiglu_backward = wrap(_swiglu_backward)
        self.gather_sum = wrap(_gather_sum)
        self.cross_entropy = wrap(_cross_entropy)


class _Attention(torch.autograd.Function):
    """Causal attention in blocks of queries, each against the keys up to its own end."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx, q: Tensor, k: Tensor, v: Tensor, kernels: Kernels, block: int
    ) -> Tensor:
        """q, k, v bfloat16 [B * N, S, D]; gives the same."""
        length = q.shape[1]
        scale = q.shape[2] ** -0.5
        mask = torch.full((length, length), float("-inf")).triu(1)
        out = torch.empty_like(q)
        kept = []
        for start in range(0, length, block):
            stop = min(start + block, length)
            scores = torch.bmm(q[:, start:stop], k[:, :stop].transpose(1, 2))
            probs = kernels.softmax(scores, mask[start:stop, :stop], scale)
            out[:, start:stop] = torch.bmm(probs, v[:, :stop])
            kept.append(probs)
        ctx.save_for_backward(q, k, v, *kept)
        ctx.kernels, ctx.block, ctx.scale = kernels, block, scale
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        """Gradients in q, k and v."""
        q, k, v, *kept = ctx.saved_tensors
        length = q.shape[1]
        d_q = torch.empty_like(q)
        d_k, d_v = torch.zeros(k.shape), torch.zeros(v.shape)
        for index, start in enumerate(range(0, length, ctx.block)):
            stop = min(start + ctx.block, length)
            probs, part = kept[index], grad[:, start:stop]
            d_probs = torch.bmm(part, v[:, :stop].transpose(1, 2))
            d_scores = ctx.kernels.softmax_backward(probs, d_probs, ctx.scale)
            d_q[:, start:stop] = torch.bmm(d_scores, k[:, :stop])
            d_k[:, :stop] += torch.bmm(d_scores.transpose(1, 2), q[:, start:stop])
            d_v[:, :stop] += torch.bmm(probs.transpose(1, 2), part)
        return d_q, d_k.bfloat16(), d_v.bfloat16(), None, None


class _Experts(torch.autograd.Function):
    """All experts of one layer over all tokens, each on its own rows."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx,
        x: Tensor,
        weights: Tensor,
        experts: Tensor,
        counts: list[int],
        gate_up: Tensor,
        down: Tensor,
        kernels: Kernels,
    ) -> Tensor:
        """x bfloat16 [T, H], weights/experts [T, K], gate_up [E, 2F, H], down [E, H, F]."""
        tokens, top_k = experts.shape
        order = torch.sort(experts.reshape(-1).to(torch.int16), stable=True).indices
        place = torch.empty_like(order)
        place[order] = torch.arange(order.numel())
        place = place.view(tokens, top_k)
        rows = x[order // top_k]
        weight = weights.reshape(-1)[order]
        hidden = x.new_empty(order.numel(), gate_up.shape[1])
        start = 0
        for expert, count in enumerate(counts):
            if count:
                stop = start + count
                torch.mm(rows[start:stop], gate_up[expert].t(), out=hidden[start:stop])
                start = stop
        act = kernels.swiglu(hidden, weight)
        out = torch.empty_like(rows)
        start = 0
        for expert, count in enumerate(counts):
            if count:
                stop = start + count
                torch.mm(act[start:stop], down[expert].t(), out=out[start:stop])
                start = stop
        ctx.save_for_backward(rows, hidden, act, weight, order, place, gate_up, down)
        ctx.counts, ctx.kernels = counts, kernels
        return kernels.gather_sum(out, place)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        """Gradients in x, weights, gate_up and down."""
        rows, hidden, act, weight, order, place, gate_up, down = ctx.saved_tensors
        kernels: Kernels = ctx.kernels
        top_k = place.shape[1]
        grad_rows = grad.bfloat16()[order // top_k]
        d_act = torch.empty_like(act)
        d_down = torch.zeros_like(down)
        start = 0
        for expert, count in enumerate(ctx.counts):
            if count:
                stop = start + count
                torch.mm(grad_rows[start:stop], down[expert], out=d_act[start:stop])
                torch.mm(grad_rows[start:stop].t(), act[start:stop], out=d_down[expert])
                start = stop
        # ``act`` carries the routing weight, so ``d_act`` is the gradient of the weighted product.
        d_hidden, d_weight = kernels.swiglu_backward(d_act, hidden, weight)
        d_rows = torch.empty_like(rows)
        d_gate_up = torch.zeros_like(gate_up)
        start = 0
        for expert, count in enumerate(ctx.counts):
            if count:
                stop = start + count
                torch.mm(d_hidden[start:stop], gate_up[expert], out=d_rows[start:stop])
                torch.mm(d_hidden[start:stop].t(), rows[start:stop], out=d_gate_up[expert])
                start = stop
        d_x = kernels.gather_sum(d_rows, place).bfloat16()
        d_weights = d_weight[place]
        return d_x, d_weights, None, None, d_gate_up, d_down, None


class _Head(torch.autograd.Function):
    """Tied output layer and summed cross entropy, in chunks; never holds all the logits."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx, x: Tensor, weight: Tensor, target: Tensor, kernels: Kernels, chunk: int
    ) -> Tensor:
        """x bfloat16 [T, H], weight [V, H], target [T]; gives the sum of the losses in nats."""
        total = torch.zeros(())
        d_x = torch.empty_like(x)
        d_weight = torch.zeros(weight.shape)
        for start in range(0, x.shape[0], chunk):
            part = slice(start, start + chunk)
            loss, grad = kernels.cross_entropy(x[part] @ weight.t(), target[part])
            total += loss
            torch.mm(grad, weight, out=d_x[part])
            d_weight += grad.t() @ x[part]
        ctx.save_for_backward(d_x, d_weight)
        return total

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        """Gradients worked out in the forward pass, scaled."""
        d_x, d_weight = ctx.saved_tensors
        return d_x * grad.bfloat16(), (d_weight * grad).bfloat16(), None, None, None


class Model:
    """Parameters (bfloat16 leaves by name) and the training forward pass."""

    def __init__(self, shape: Shape, length: int, seed: int = 0, compiled: bool = True) -> None:
        self.shape = shape
        self.length = length
        self.kernels = Kernels(compiled)
        self.cos, self.sin = rope_tables(shape, length)
        generator = torch.Generator().manual_seed(seed)
        h, f, e = shape.hidden_size, shape.moe_intermediate_size, shape.num_experts
        heads, kv, d = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
        deep = 1 / math.sqrt(2 * shape.num_hidden_layers)

        def normal(*size: int, std: float) -> Tensor:
            return torch.randn(*size, generator=generator) * std

        wide = h**-0.5
        master: dict[str, Tensor] = {"embed": normal(shape.vocab_size, h, std=0.02)}
        for n in range(shape.num_hidden_layers):
            master[f"{n}.ln1"] = torch.ones(h)
            master[f"{n}.qkv"] = normal((heads + 2 * kv) * d, h, std=wide)
            master[f"{n}.o"] = normal(h, heads * d, std=(heads * d) ** -0.5 * deep)
            master[f"{n}.qn"] = torch.ones(d)
            master[f"{n}.kn"] = torch.ones(d)
            master[f"{n}.ln2"] = torch.ones(h)
            if n in shape.dense_layers:
                inner = shape.intermediate_size
                master[f"{n}.gate_up"] = normal(2 * inner, h, std=wide)
                master[f"{n}.down"] = normal(h, inner, std=inner**-0.5 * deep)
            else:
                master[f"{n}.router"] = normal(e, h, std=0.02)
                master[f"{n}.gate_up"] = normal(e, 2 * f, h, std=wide)
                master[f"{n}.down"] = normal(e, h, f, std=f**-0.5 * deep)
        master["norm"] = torch.ones(h)
        self.weights = {k: v.bfloat16().requires_grad_() for k, v in master.items()}
        self.master = master

    def hidden(self, tokens: Tensor) -> tuple[Tensor, Tensor, list[list[int]]]:
        """Final hidden state bfloat16 [T, H], auxiliary loss, tokens by expert in each layer.

        ``tokens`` is int64 [B, S]. The auxiliary loss is the sum over layers of
        E * sum_e(share of assignments to e * mean probability of e), 1 a layer when balanced.
        """
        shape, weights, kernels = self.shape, self.weights, self.kernels
        x = F.embedding(tokens, weights["embed"]).float()
        aux = torch.zeros(())
        loads: list[list[int]] = []
        for n in range(shape.num_hidden_layers):
            q, k, v = kernels.heads(
                x,
                *(weights[f"{n}.{name}"] for name in ("ln1", "qkv", "qn", "kn")),
                self.cos,
                self.sin,
                shape.num_attention_heads,
                shape.num_key_value_heads,
            )
            y = _Attention.apply(q, k, v, kernels, ATTENTION_BLOCK)
            x = kernels.merge(x, y, weights[f"{n}.o"])
            up, down = weights[f"{n}.gate_up"], weights[f"{n}.down"]
            if n in shape.dense_layers:
                x = kernels.dense(x, weights[f"{n}.ln2"], up, down)
                continue
            h, top, experts, probs = kernels.route(
                x, weights[f"{n}.ln2"], weights[f"{n}.router"], shape.num_experts_per_tok
            )
            count = torch.bincount(experts.reshape(-1), minlength=shape.num_experts)
            loads.append(count.tolist())
            aux = aux + shape.num_experts * (count / experts.numel() * probs).sum()
            y = _Experts.apply(h, top, experts, loads[-1], up, down, kernels)
            x = x + y.view_as(x)
        return kernels.norm(x, weights["norm"]).view(-1, shape.hidden_size), aux, loads

    def loss(self, tokens: Tensor, target: Tensor, chunk: int = 2048) -> tuple[Tensor, Tensor, list[list[int]]]:
        """Mean cross entropy in nats a token, auxiliary loss, loads; tokens, target [B, S]."""
        h, aux, loads = self.hidden(tokens)
        total = _Head.apply(h, self.weights["embed"], target.reshape(-1), self.kernels, chunk)
        return total / target.numel(), aux, loads


def hf_tensors(shape: Shape, weights: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The weights under the names that Transformers stores for Qwen3-MoE."""
    heads, kv, d = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
    yield "model.embed_tokens.weight", weights["embed"]
    for n in range(shape.num_hidden_layers):
        root = f"model.layers.{n}"
        yield f"{root}.input_layernorm.weight", weights[f"{n}.ln1"]
        q, k, v = weights[f"{n}.qkv"].split((heads * d, kv * d, kv * d))
        for name, tensor in (("q", q), ("k", k), ("v", v), ("o", weights[f"{n}.o"])):
            yield f"{root}.self_attn.{name}_proj.weight", tensor
        yield f"{root}.self_attn.q_norm.weight", weights[f"{n}.qn"]
        yield f"{root}.self_attn.k_norm.weight", weights[f"{n}.kn"]
        yield f"{root}.post_attention_layernorm.weight", weights[f"{n}.ln2"]
        gate_up, down = weights[f"{n}.gate_up"], weights[f"{n}.down"]
        if n in shape.dense_layers:
            gate, up = gate_up.chunk(2)
            for name, tensor in (("gate", gate), ("up", up), ("down", down)):
                yield f"{root}.mlp.{name}_proj.weight", tensor
            continue
        yield f"{root}.mlp.gate.weight", weights[f"{n}.router"]
        for expert in range(shape.num_experts):
            gate, up = gate_up[expert].chunk(2)
            for name, tensor in (("gate", gate), ("up", up), ("down", down[expert])):
                yield f"{root}.mlp.experts.{expert}.{name}_proj.weight", tensor
    yield "model.norm.weight", weights["norm"]
