"""A Llama in PyTorch: torch.compile, scaled_dot_product_attention, fused AdamW, nothing else.

The yardstick of `llama3_1b` on one GPU (extra `parity`):

python experiments/baselines/torch_llama.py --preset llama3_1b --batch 8 --peak-tflops 989

prints one JSON line: step_s (median after 4 warm-up steps), tokens_per_s, mfu_full and mfu_causal
(with --peak-tflops), peak_bytes, first_step_s, loss, parameters. bf16 is autocast over fp32 master
weights, as ours is. The largest batch that fits is the one to compare.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

STARTED = time.time()

import torch  # noqa: E402 (the clock starts before the imports)
import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[2]))  # this checkout, installed or not
from jaxtrain.telemetry.flops import (  # noqa: E402
    Attention,
    Matmul,
    ModelFlops,
    forward_flops,
    mfu,
)

WARMUP, SUCCESSORS = 4, 4


@dataclass(frozen=True)
class Llama:
    """Sizes; tied: the head is the embedding table. The defaults are bench_6m's."""

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

    @property
    def head_dim(self) -> int:
        return self.embed // self.heads

    def flops(self) -> ModelFlops:
        """Matmul FLOPs of a forward pass over a batch."""
        wide, narrow = self.embed, self.kv_heads * self.head_dim
        matmuls = (
            Matmul("attention", self.embed, 2 * wide + 2 * narrow, count=self.layers),
            Matmul("mlp", self.embed, self.hidden, count=3 * self.layers),
            Matmul("head", self.embed, self.vocab),
        )
        layer = Attention(self.heads, self.head_dim, count=self.layers)
        return forward_flops(matmuls, [layer], seq=self.seq, sequences=self.batch)


PRESETS = {
    "bench_6m": Llama(),
    # Llama 3.2 1B, model card; RoPE scaling changes no cost and is left out.
    "llama3_1b": Llama(16, 2048, 32, 8, 8192, 128256, tied=True, theta=5e5, seq=4096, batch=4),
}


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of x [batch, heads, seq, head_dim] by tables [seq, head_dim / 2]."""
    a, b = x.chunk(2, -1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Block(nn.Module):
    def __init__(self, config: Llama) -> None:
        super().__init__()
        self.config, embed = config, config.embed
        narrow = config.kv_heads * config.head_dim
        self.attention_norm = nn.RMSNorm(embed, eps=1e-5)
        self.query = nn.Linear(embed, embed, bias=False)
        self.key = nn.Linear(embed, narrow, bias=False)
        self.value = nn.Linear(embed, narrow, bias=False)
        self.out = nn.Linear(embed, embed, bias=False)
        self.mlp_norm = nn.RMSNorm(embed, eps=1e-5)
        self.gate = nn.Linear(embed, config.hidden, bias=False)
        self.up = nn.Linear(embed, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, embed, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, seq, embed = x.shape
        h = self.attention_norm(x)
        q, k, v = (
            project(h).view(rows, seq, -1, self.config.head_dim).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        grouped = self.config.kv_heads != self.config.heads
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        x = x + self.out(o.transpose(1, 2).reshape(rows, seq, embed))
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    def __init__(self, config: Llama) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab, config.embed)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.embed, eps=1e-5)
        self.head = nn.Linear(config.embed, config.vocab, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
        if config.tied:
            self.head.weight = self.embedding.weight
        pairs = torch.arange(0, config.head_dim, 2) / config.head_dim
        angles = torch.arange(config.seq)[:, None] * config.theta**-pairs
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean cross-entropy of tokens [batch, seq + 1], each predicted from those before it."""
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.head(self.norm(x)).flatten(0, 1)
        return F.cross_entropy(logits.float(), tokens[:, 1:].flatten())


def chain(config: Llama, device: torch.device, batches: int = 4) -> Tensor:
    """Batches of a random bigram chain, [batches, batch, seq + 1]: a token has 4 successors."""
    rng = torch.Generator().manual_seed(0)

    def draw(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=rng)

    following = draw(config.vocab, config.vocab, SUCCESSORS)
    columns = [draw(config.vocab, batches, config.batch)]
    for _ in range(config.seq):
        columns.append(following[columns[-1], draw(SUCCESSORS, batches, config.batch)])
    return torch.stack(columns, -1).to(device)


def make_step(
    config: Llama, device: torch.device, *, dtype: str, compiled: bool
) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """The model, and a function that trains it on one batch and gives the loss before."""
    model = Decoder(config).to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True
    )
    forward = torch.compile(model) if compiled else model
    cast = torch.autocast(device.type, torch.bfloat16) if dtype == "bf16" else nullcontext()

    def step(tokens: Tensor) -> Tensor:
        with cast:
            loss = forward(tokens)
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
    """`steps` steps, the first `WARMUP` not timed. peak_flops: of the device, for the MFU."""
    if steps <= WARMUP:
        raise ValueError(f"steps={steps} are all warm-up; use {WARMUP + 1} or more")
    model, step = make_step(config, device, dtype=dtype, compiled=compiled)
    data, seconds, losses, first_step_s = chain(config, device), [], [], 0.0
    for i in range(steps):
        began = time.perf_counter()
        losses.append(step(data[i % len(data)]).item())
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
        first_step_s = first_step_s or time.time() - STARTED
    step_s = statistics.median(seconds[WARMUP:])
    found: dict[str, Any] = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "step_s": step_s,
        "tokens_per_s": config.batch * config.seq / step_s,
        "peak_bytes": peak_bytes(device),
        "first_step_s": first_step_s,
        "loss": losses[-1],
        "first_loss": losses[0],
    }
    if peak_flops is not None:
        count = config.flops()
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
