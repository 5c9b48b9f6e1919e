"""The plain loop that a step is compared with, at an experiment's sizes.

`plain_loop.py` has one model. An experiment is compared, field by field, with that model at the
experiment's sizes, so that a new field is refused until the loop has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

from jaxtrain.attention.rotary.rope import Rope
from jaxtrain.data import BigramChain
from jaxtrain.experiment import Experiment
from jaxtrain.mesh.mesh import MeshSpec
from jaxtrain.mesh.sharding import fsdp, tensor
from jaxtrain.nn.norm import RMSNorm
from jaxtrain.optim.optimizer import AdamW, everything
from jaxtrain.transformer.attention import AttentionConfig
from jaxtrain.transformer.block import BlockConfig
from jaxtrain.transformer.decoder import DecoderConfig
from jaxtrain.transformer.essence import essence
from jaxtrain.transformer.feed_forward import MlpConfig

BASELINE = Path("baselines") / "plain_loop.py"
FREE = ("steps", "seed", "precision", "execution", "evaluation", "checkpoints", "logging")
"""Fields of an experiment that a benchmark sets itself or that change nothing in a step."""


def find_baseline(experiment: str | Path) -> Path:
    """Returns baselines/plain_loop.py next to the experiment file, or in this checkout's
    experiments/. Raises ValueError if neither exists."""
    checkout = Path(__file__).parents[2] / "experiments"
    places = [Path(experiment).parent / BASELINE, checkout / BASELINE]
    for place in places:
        if place.is_file():
            return place
    raise ValueError(
        f"there is no plain loop to measure against at {' or '.join(map(str, places))}; put the "
        f"experiment into experiments/ of a checkout, or copy {BASELINE} beside it"
    )


def plain_arguments(experiment: Experiment, spec: MeshSpec) -> list[str]:
    """Returns the loop's command line for this model on this mesh, without --dtype.

    Raises ValueError with every feature that the loop lacks.
    """
    model, head = experiment.model, "the plain loop of `bench step` lacks what this run asks for:"
    if essence(model) is None or not isinstance(experiment.data, BigramChain):
        raise ValueError(
            f"{head} it trains a DecoderConfig on a BigramChain, and this experiment has "
            f"{type(model).__name__} on {type(experiment.data).__name__}; see "
            f"experiments/bench_6m.py for one that it runs"
        )
    lacking = list(_differences(experiment, _plain(experiment), ""))
    lacking += _mesh_violations(experiment, spec)
    if not isinstance(experiment.batch, int):
        lacking.append(f"batch={experiment.batch}; the loop has one size, a whole number")
    if lacking:
        lines = "\n".join(f"  - {line}" for line in lacking)
        raise ValueError(f"{head}\n{lines}\nsee experiments/bench_6m.py for one that it runs")
    block = model.blocks[0]
    sizes = {
        "layers": model.layers,
        "embed": model.embed,
        "heads": block.attention.heads,
        "hidden": block.mlp.hidden,
        "vocab": model.vocab,
        "seq": experiment.data.seq,
        "batch": experiment.batch,
    }
    arguments = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    return ["--case", _case(spec), *arguments]


def _plain(experiment: Experiment) -> Experiment:
    """Returns the experiment that the loop runs at the sizes of `experiment`."""
    model, norm = experiment.model, RMSNorm(eps=1e-5)
    first = model.blocks[0]
    # The default and an explicit kv_heads equal to heads are the same model.
    explicit = {name: getattr(first.attention, name, None) for name in ("kv_heads", "head_dim")}
    kv_heads = explicit["kv_heads"] and first.attention.heads
    head_dim = explicit["head_dim"] and model.embed // first.attention.heads
    attention = AttentionConfig(first.attention.heads, kv_heads, head_dim, rope=Rope(1e4))
    block = BlockConfig(attention, MlpConfig(first.mlp.hidden), norm)
    plain = DecoderConfig(
        vocab=model.padded_vocab,
        embed=model.embed,
        layers=model.layers,
        period=(block,) * len(model.period),
        norm=norm,
        init=model.init,
        vocab_multiple=model.vocab_multiple,
        chunk_tokens=model.chunk_tokens,
    )
    optimizer = AdamW(1e-3, weight_decay=0.1, b1=0.9, b2=0.95, eps=1e-8, decay=everything)
    return replace(
        experiment,
        model=plain,
        data=BigramChain(vocab=model.vocab, seq=experiment.data.seq),
        optimizer=optimizer,
        microbatches=1,
        sharding=fsdp() | tensor(),
        clip_norm=1.0,
        ema_decay=None,
    )


def _differences(value: object, plain: object, path: str) -> Iterator[str]:
    """Yields `path=value` for each field in which `value` differs from the loop's."""
    if is_dataclass(value) and type(value) is type(plain):
        for field in fields(value):
            if path or field.name not in FREE:
                below = f"{path}.{field.name}".lstrip(".")
                yield from _differences(
                    getattr(value, field.name), getattr(plain, field.name), below
                )
    elif isinstance(value, tuple) and isinstance(plain, tuple) and len(value) == len(plain):
        for index, pair in enumerate(zip(value, plain, strict=True)):
            yield from _differences(*pair, f"{path}[{index}]")
    elif value != plain:
        yield f"{path}={_shown(value)}; the loop has {_shown(plain)}"


def _shown(value: object) -> str:
    return getattr(value, "__qualname__", None) or repr(value)


def _mesh_violations(experiment: Experiment, spec: MeshSpec) -> list[str]:
    """Returns a line for each mesh axis that the loop lacks, and for each size it would have to
    pad."""
    violations = [
        f"{spec.where}: mesh axis {axis}={size}; the loop splits over fsdp and tensor only"
        for axis, size in spec.shape.items()
        if size > 1 and axis not in ("fsdp", "tensor")
    ]
    model, block = experiment.model, experiment.model.blocks[0]
    sizes = {
        "fsdp": {"embed": model.embed, "vocab": model.vocab, "batch": experiment.batch},
        "tensor": {
            "heads": block.attention.heads,
            "hidden": block.mlp.hidden,
            "vocab": model.vocab,
        },
    }
    for axis, dims in sizes.items():
        n = spec.size(axis)
        violations += [
            f"{name}={size} does not split over {axis}={n}; use {-(-size // n) * n}"
            for name, size in dims.items()
            if isinstance(size, int) and size % n
        ]
    return violations


def _case(spec: MeshSpec) -> str:
    """Returns the loop's name of the split: `one`, `fsdp8`, `tp2fsdp4`."""
    names = {"tp": spec.size("tensor"), "fsdp": spec.size("fsdp")}
    return "".join(f"{name}{size}" for name, size in names.items() if size > 1) or "one"
