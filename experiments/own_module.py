"""A model of one's own: any flax nnx.Module with a method loss. Here a gated convolutional byte
language model (Dauphin et al. 2017) with BatchNorm and Dropout, which jaxtrain has no idea of.

    jaxtrain train experiments/own_module.py --mesh meshes/cpu_8.toml --simulate

Time on two CPU cores: 12 minutes, measured beside other programs (five to nine for each core);
alone perhaps 3, an estimate. Held-out loss: 1.83 nats a byte = 2.64 bits, 58% of the unigram
entropy (an interpolated bigram model reaches 3.52 bits).

What jaxtrain does for such a module: shards the parameters that name their logical axes (the others
are whole on every device), keeps BatchNorm's averages and Dropout's keys through steps, checkpoints
and skipped steps, and calls `eval()` on it before held-out data. Collectives are XLA's ("gspmd").
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxtrain import AdamW, Evaluation, Experiment, TextData, WarmupCosine
from jaxtrain.data import ByteTokenizer, StdlibSource


@dataclass(frozen=True)
class GatedConvolutions:
    """Fields of the model. `build` takes the place of jaxtrain's own configs."""

    vocab: int
    embed: int
    layers: int
    width: int
    dropout: float = 0.0

    def build(self, rngs: nnx.Rngs) -> ConvolutionalModel:
        return ConvolutionalModel(self, rngs)


class GatedLayer(nnx.Module):
    """x + dropout(a * sigmoid(b)), (a, b) a causal convolution of BatchNorm(x)."""

    def __init__(self, config: GatedConvolutions, rngs: nnx.Rngs) -> None:
        embed, width = config.embed, config.width
        # Logical axes in flax's own spelling: the first dim over fsdp, the second over tensor.
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
        self.width, self.norm = width, nnx.BatchNorm(embed, momentum=0.9, rngs=rngs)
        self.linear = nnx.Linear(width * embed, 2 * embed, kernel_init=init, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        # A convolution as one matmul over shifted inputs: XLA's own is slower on CPU.
        seq = x.shape[1]
        padded = jnp.pad(self.norm(x), ((0, 0), (self.width - 1, 0), (0, 0)))
        near = [padded[:, shift : shift + seq] for shift in range(self.width)]
        a, b = jnp.split(self.linear(jnp.concatenate(near, axis=-1)), 2, axis=-1)
        return x + self.dropout(a * jax.nn.sigmoid(b))


class ConvolutionalModel(nnx.Module):
    """A byte is predicted from the layers * (width - 1) + 1 before it.

    In training BatchNorm looks at the whole microbatch, later bytes too, as it does in any sequence
    model; held-out loss uses the running averages and sees the past alone.
    """

    def __init__(self, config: GatedConvolutions, rngs: nnx.Rngs) -> None:
        init = nnx.with_partitioning(nnx.initializers.normal(0.02), ("vocab", "embed"))
        self.embedding = nnx.Embed(config.vocab, config.embed, embedding_init=init, rngs=rngs)
        self.layers = nnx.List([GatedLayer(config, rngs) for _ in range(config.layers)])
        self.norm = nnx.LayerNorm(config.embed, rngs=rngs)

    def loss(
        self, batch: dict[str, jax.Array], *, key: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """(sum, count): summed negative log-likelihood in nats, and the weight it sums over.

        `batch` holds tokens, targets and weights, [rows, seq]. `key` is the step's random key, None
        on held-out data; this model's Dropout draws from its own.
        """
        x = self.embedding(batch["tokens"])
        for layer in self.layers:
            x = layer(x)
        logits = self.embedding.attend(self.norm(x)).astype(jnp.float32)
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return jnp.sum(nats * batch["weights"]), jnp.sum(batch["weights"])


def experiment() -> Experiment:
    return Experiment(
        model=GatedConvolutions(vocab=264, embed=128, layers=6, width=5, dropout=0.1),
        data=TextData(StdlibSource(), ByteTokenizer(), seq=256, isolate_documents=False),
        optimizer=AdamW(WarmupCosine(4e-3, warmup=40), weight_decay=0.1),
        steps=200,
        batch=32,
        evaluation=Evaluation(every=100, batches=8),
    )
