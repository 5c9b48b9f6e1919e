"""A Llama in PyTorch, made as ours is: torch.compile, fused attention, fused AdamW, nothing else.

The yardstick of `llama3_1b` on one GPU (extra `parity`); `jaxtrain bench gpu` looks for its best
batch and has it take turns with ours:

python experiments/baselines/torch_llama.py --preset llama3_1b --batch 8 --peak-tflops 989

prints one JSON line: step_s (of three rounds the median, after 4 warm-up steps), tokens_per_s,
mfu_full and mfu_causal (with --peak-tflops), peak_bytes, first_step_s, loss, parameters.

In bf16 weights and optimizer stay in fp32, products and the residual stream are bf16, norms, RoPE
and the loss fp32. The loss is made with its gradients over chunks of tokens, three products each.
Packed documents (--documents, tokens of one in the mean) are attended to by FlexAttention, which
leaves out the tiles between them, on a CPU, where it has no gradient, by a dense mask; whole rows
by scaled_dot_product_attention.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

STARTED = time.time()

import numpy as np  # noqa: E402 (the clock starts before the imports)
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn.attention.flex_attention import (  # noqa: E402
    BlockMask,
    create_block_mask,
    flex_attention,
)

sys.path.insert(0, str(Path(__file__).parents[2]))  # this checkout, installed or not
from jaxtrain.bench_gpu.documents import SyntheticDocuments, lengths  # noqa: E402
from jaxtrain.telemetry.flops import (  # noqa: E402
    AttentionFlops,
    Matmul,
    ModelFlops,
    forward_flops,
    mfu,
)

WARMUP, ROUNDS, SUCCESSORS = 4, 3, 4
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

Mask = BlockMask | Tensor | None
Batch = dict[str, Tensor]
"""tokens, targets, segments and positions [batch, seq], and weights of the loss."""


@dataclass(frozen=True)
class Llama:
    """Sizes; tied: the head is the embedding table. documents: tokens of one in the mean, 0 where
    rows are whole. chunk_tokens: tokens whose logits exist at once. The defaults are bench_6m's."""

    layers: int = 4
    embed: int = 256
    heads: int = 8
    kv_heads: int = 8
    hidden: int = 1024
    vocab: int = 4096
    tied: bool = False
    theta: float = 1e4
    seq: int = 256
    batch: int = 16
    documents: int = 0
    chunk_tokens: int = 8192

    @property
    def head_dim(self) -> int:
        return self.embed // self.heads

    def flops(self, documents: dict[int, float] | None = None) -> ModelFlops:
        """Matmul FLOPs of a forward pass over a batch; documents: how many of each length."""
        wide, narrow = self.embed, self.kv_heads * self.head_dim
        matmuls = (
            Matmul("attention", self.embed, 2 * wide + 2 * narrow, count=self.layers),
            Matmul("mlp", self.embed, self.hidden, count=3 * self.layers),
            Matmul("head", self.embed, self.vocab),
        )
        layer = AttentionFlops(self.heads, self.head_dim, count=self.layers)
        sizes = {"seq": self.seq, "sequences": self.batch}
        return forward_flops(matmuls, [layer], **sizes, documents=documents)


PRESETS = {
    "bench_6m": Llama(),
    # Llama 3.2 1B, model card; RoPE scaling changes no cost and is left out.
    "llama3_1b": Llama(
        layers=16,
        embed=2048,
        heads=32,
        kv_heads=8,
        hidden=8192,
        vocab=128256,
        tied=True,
        theta=5e5,
        seq=4096,
        batch=4,
        documents=1000,
    ),
}


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of x [batch, heads, seq, head_dim] by tables [batch, 1, seq, head_dim / 2], in fp32."""
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class Linear(nn.Linear):
    """x W^T in the dtype of x, whatever W rests in."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Norm(nn.RMSNorm):
    """In fp32."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float()).to(x.dtype)


class Block(nn.Module):
    def __init__(self, config: Llama) -> None:
        super().__init__()
        self.config, embed = config, config.embed
        narrow = config.kv_heads * config.head_dim
        self.attention_norm = Norm(embed, eps=1e-5)
        self.query = Linear(embed, embed, bias=False)
        self.key = Linear(embed, narrow, bias=False)
        self.value = Linear(embed, narrow, bias=False)
        self.out = Linear(embed, embed, bias=False)
        self.mlp_norm = Norm(embed, eps=1e-5)
        self.gate = Linear(embed, config.hidden, bias=False)
        self.up = Linear(embed, config.hidden, bias=False)
        self.down = Linear(config.hidden, embed, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask) -> Tensor:
        rows, seq, embed = x.shape
        h = self.attention_norm(x)
        q, k, v = (
            project(h).view(rows, seq, -1, self.config.head_dim).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        grouped = self.config.kv_heads != self.config.heads
        if isinstance(mask, BlockMask):
            o = flex_attention(q, k, v, block_mask=mask, enable_gqa=grouped)
        else:
            seen: dict[str, Any] = {"is_causal": True} if mask is None else {"attn_mask": mask}
            o = F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped, **seen)
        x = x + self.out(o.transpose(1, 2).reshape(rows, seq, embed))
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class ChunkedLoss(torch.autograd.Function):
    """The weighted sum of cross-entropies, its gradients made where the logits are: they exist for
    one chunk of tokens at a time, and are not made again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, head: Tensor, targets: Tensor, weights: Tensor, chunk: int
    ) -> Tensor:
        w = head.to(x.dtype)
        total = torch.zeros((), dtype=torch.float32, device=x.device)
        dhead, parts = torch.zeros_like(head, dtype=torch.float32), []
        for at in range(0, len(x), chunk):
            rows, wanted = x[at : at + chunk], targets[at : at + chunk, None]
            weight = weights[at : at + chunk, None]
            logits = (rows @ w.T).float()
            lse = logits.logsumexp(-1, keepdim=True)
            total = total + ((lse - logits.gather(-1, wanted)) * weight).sum()
            dlogits = (logits - lse).exp() * weight
            dlogits = dlogits.scatter_add(-1, wanted, -weight).to(x.dtype)
            parts.append(dlogits @ w)
            dhead = dhead + (dlogits.T @ rows).float()
        ctx.save_for_backward(torch.cat(parts), dhead)
        return total

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        dx, dhead = ctx.saved_tensors
        return dx * d.to(dx.dtype), dhead * d, None, None, None


class Decoder(nn.Module):
    def __init__(self, config: Llama, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        self.embedding = nn.Embedding(config.vocab, config.embed)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = Norm(config.embed, eps=1e-5)
        self.head = Linear(config.embed, config.vocab, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
        if config.tied:
            self.head.weight = self.embedding.weight
        pairs = torch.arange(0, config.head_dim, 2) / config.head_dim
        angles = torch.arange(config.seq)[:, None] * config.theta**-pairs
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, batch: Batch, mask: Mask = None) -> Tensor:
        """Weighted mean cross-entropy of the targets."""
        x = self.embedding(batch["tokens"]).to(self.dtype)
        cos, sin = (table[batch["positions"]][:, None] for table in (self.cos, self.sin))
        for block in self.blocks:
            x = block(x, cos, sin, mask)
        x, targets, weights = (
            each.flatten(0, 1) for each in (self.norm(x), batch["targets"], batch["weights"])
        )
        total = ChunkedLoss.apply(x, self.head.weight, targets, weights, self.config.chunk_tokens)
        return total / weights.sum()


def visible_in(segments: Tensor) -> Callable[..., Tensor]:
    """As FlexAttention asks for it: the key is of the query's document, and not behind it."""

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (segments[row, query] == segments[row, key])

    return visible


def documents_mask(segments: Tensor) -> Mask:
    """A query sees what came before it in its own document."""
    rows, seq = segments.shape
    if segments.device.type == "cpu":
        same = segments[:, None, :, None] == segments[:, None, None, :]
        return same & torch.ones(seq, seq, dtype=torch.bool).tril()
    seen = visible_in(segments)
    return create_block_mask(seen, rows, None, seq, seq, device=segments.device)


def batches_of(config: Llama, device: torch.device) -> list[Batch]:
    """One of packed documents of random tokens, as ours is timed with; or four of a random bigram
    chain, in which each token has 4 successors."""
    if config.documents:
        given = SyntheticDocuments(config.vocab, config.seq, config.documents)
        rows = given.open("train", seed=0, cache_dir=Path())
        found = [rows.rows(np.arange(config.batch))]
    else:
        found = [_whole_rows(chain) for chain in _chains(config, 4)]
    return [
        {
            name: torch.from_numpy(np.ascontiguousarray(rows[name])).to(device, kind)
            for name, kind in (
                *((name, torch.int64) for name in ("tokens", "targets", "positions", "segments")),
                ("weights", torch.float32),
            )
        }
        for rows in found
    ]


def _whole_rows(tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Of tokens [batch, seq + 1], each predicted from those before it."""
    ones = np.ones_like(tokens[:, 1:])
    fields = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "segments": ones}
    return {**fields, "positions": np.cumsum(ones, 1) - 1, "weights": ones.astype(np.float32)}


def _chains(config: Llama, count: int) -> np.ndarray:
    """[count, batch, seq + 1]."""
    rng = np.random.default_rng(0)
    following = rng.integers(0, config.vocab, (config.vocab, SUCCESSORS))
    columns = [rng.integers(0, config.vocab, (count, config.batch))]
    for _ in range(config.seq):
        choice = rng.integers(0, SUCCESSORS, (count, config.batch))
        columns.append(following[columns[-1], choice])
    return np.stack(columns, -1)


def make_step(
    config: Llama, device: torch.device, *, dtype: str, compiled: bool
) -> tuple[nn.Module, Callable[[Batch, Mask], Tensor]]:
    """The model, and a function that trains it on one batch and gives the loss before."""
    model = Decoder(config, DTYPES[dtype]).to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True
    )
    forward = torch.compile(model, dynamic=False) if compiled else model

    def step(batch: Batch, mask: Mask) -> Tensor:
        loss = forward(batch, mask)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return model, step


def peak_bytes(device: torch.device) -> int:
    """The most the GPU has held, or this process on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def measure(
    config: Llama,
    *,
    dtype: str,
    steps: int,
    compiled: bool,
    device: torch.device,
    peak_flops: float | None = None,
) -> dict[str, Any]:
    """`steps` steps, the first `WARMUP` not timed, the others in `ROUNDS` rounds that are handed to
    the device at once. peak_flops: of the device, for the MFU."""
    each = (steps - WARMUP) // ROUNDS
    if each < 1:
        raise ValueError(f"steps={steps} leave no rounds; use {WARMUP + ROUNDS} or more")
    model, step = make_step(config, device, dtype=dtype, compiled=compiled)
    data = [
        (batch, documents_mask(batch["segments"]) if config.documents else None)
        for batch in batches_of(config, device)
    ]
    seconds, losses, first_step_s, done = [], [], 0.0, 0
    for count in (*[1] * WARMUP, *[each] * ROUNDS):
        began, loss = time.perf_counter(), None
        for _ in range(count):
            loss, done = step(*data[done % len(data)]), done + 1
        losses.append(loss.item())  # waits for the device
        seconds.append((time.perf_counter() - began) / count)
        first_step_s = first_step_s or time.time() - STARTED
    rounds = seconds[WARMUP:]
    step_s = statistics.median(rounds)
    found: dict[str, Any] = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "step_s": step_s,
        "spread": (max(rounds) - min(rounds)) / step_s,
        "tokens_per_s": config.batch * config.seq / step_s,
        "peak_bytes": peak_bytes(device),
        "first_step_s": first_step_s,
        "loss": losses[-1],
        "first_loss": losses[0],
    }
    if peak_flops is not None:
        positions = data[0][0]["positions"].cpu().numpy()
        count = config.flops(lengths(positions) if config.documents else None)
        for name, flops in (("full", count.train_full), ("causal", count.train_causal)):
            found[f"mfu_{name}"] = mfu(
                flops, step_s=step_s, peak_flops_per_device=peak_flops, devices=1
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="a torch train step of a Llama, timed")
    parser.add_argument("--preset", choices=tuple(PRESETS), default="bench_6m")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--steps", type=int, default=14, help="warm-up included")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--peak-tflops", type=float, help="dense peak of the device, for the MFU")
    for each in fields(Llama):
        if each.name not in ("tied", "theta"):
            parser.add_argument(f"--{each.name.replace('_', '-')}", type=int)
    options = parser.parse_args()
    given = {f.name: getattr(options, f.name, None) for f in fields(Llama)}
    config = replace(PRESETS[options.preset], **{k: v for k, v in given.items() if v is not None})
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = measure(
        config,
        dtype=options.dtype,
        steps=options.steps,
        compiled=not options.eager,
        device=device,
        peak_flops=options.peak_tflops and options.peak_tflops * 1e12,
    )
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    print(json.dumps({"model": options.preset, "dtype": options.dtype, "device": name, **found}))


if __name__ == "__main__":
    main()
