"""`jaxtrain generate` and `jaxtrain export`: use a run's weights, and write them for other
tools."""

from __future__ import annotations

import argparse
import os
import sys


def add_options(generate: argparse.ArgumentParser) -> None:
    generate.add_argument("model", help="RUN or RUN@STEP, or a folder of published weights")
    generate.add_argument("--prompt", required=True, help="the text to go on with")
    about = "the prompt is a message, and the model answers by its tokenizer's chat template"
    generate.add_argument("--chat", action="store_true", help=about)
    generate.add_argument("--tokens", type=int, default=200)
    generate.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest")
    generate.add_argument("--top-k", type=int, help="draw from so many likeliest; default all")
    generate.add_argument("--seed", type=int, default=0)
    generate.add_argument("--step", type=int, help="of a run; default the newest that is durable")
    add_trust(generate)


def add_trust(command: argparse.ArgumentParser) -> None:
    """Adds --trust, for commands that read a run's own model."""
    text = "a module of your own that the run may name, and is then imported; may be repeated"
    command.add_argument("--trust", action="append", default=[], metavar="MODULE", help=text)


def trusted(options: argparse.Namespace) -> tuple[str, ...]:
    """Returns the modules that are trusted; one in the working directory can be imported, as by
    `python -m jaxtrain`."""
    if options.trust and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    return tuple(options.trust)


def generate_command(options: argparse.Namespace) -> int:
    from jaxtrain.weights.generate import generate_text

    text = generate_text(
        options.model,
        [{"role": "user", "content": options.prompt}] if options.chat else options.prompt,
        tokens=options.tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        seed=options.seed,
        step=options.step,
        trust=trusted(options),
    )
    print(text if options.chat else options.prompt + text)
    return 0


def add_export_options(export: argparse.ArgumentParser) -> None:
    export.add_argument("run_dir", metavar="RUN", help="RUN or RUN@STEP")
    export.add_argument(
        "--out", required=True, help="the folder to write, or its address; must not be there yet"
    )
    export.add_argument("--step", type=int, help="default the newest that is durable")
    kinds = ("float32", "bfloat16", "float16")
    about = "write the adapters of LoRA alone, as a folder of peft"
    export.add_argument("--adapters", action="store_true", help=about)
    export.add_argument("--dtype", choices=kinds, help="of the files; default the run's own")
    add_trust(export)


def export_command(options: argparse.Namespace) -> int:
    # Nothing is computed. The model may fit the host's memory but not an accelerator's.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from jaxtrain.weights.export import export

    chosen = {"step": options.step, "dtype": options.dtype, "trust": trusted(options)}
    chosen["adapters"] = options.adapters
    print(export(options.run_dir, options.out, **chosen))
    return 0
