"""A continuation with a key-value cache is what repeated whole forward passes would give."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

import jaxtrain
from jaxtrain import cli
from jaxtrain.data import ByteTokenizer
from jaxtrain.experiment.evaluation import LEAST_TEMPERATURE, LONGEST_SAMPLE
from jaxtrain.losses.cross_entropy import logits
from jaxtrain.mesh.mesh import make_mesh
from jaxtrain.nn.local import Local
from jaxtrain.nn.module import put_together
from jaxtrain.nn.stack import LayerLoop
from jaxtrain.scores import Alibi
from jaxtrain.session.first_state import initialise
from jaxtrain.step.assembly import Assembly, active_mesh, assemble
from jaxtrain.step.state import shardings
from jaxtrain.tokenizers import HuggingFaceVocabulary
from jaxtrain.weights import generate as generation
from jaxtrain.weights.generate import following, generate_ids

PROMPT, LENGTH = [3, 1, 4, 1, 5], 13


class Model(NamedTuple):
    assembly: Assembly
    params: dict[str, jax.Array]

    def continued(self, *, tokens: int = 8, temperature: float = 0.0, **options: int) -> list[int]:
        drawn: Any = dict(tokens=tokens, temperature=temperature, **options)
        return generate_ids(self.assembly, self.params, PROMPT, **drawn)


def untrained(experiment: jaxtrain.Experiment, **axes: int) -> Model:
    """Initial parameters, placed on the mesh."""
    spec = jaxtrain.mesh_from_axes(**(axes or {"data": 1}))
    assembly = assemble(experiment, spec)
    mesh = active_mesh(make_mesh(spec), assembly.sizes)
    where = shardings(assembly.abstract, assembly.splits, mesh)
    return Model(assembly, initialise(assembly, where).params)


def whole_forward(model: Model, length: int = LENGTH) -> Callable[[list[int]], np.ndarray]:
    """ids -> fp32 logits after them, from one pass over all of them, no cache.

    Always of one `length`, so that it compiles once: what comes after does not reach back.
    """

    @jax.jit
    def run(tokens: jax.Array) -> jax.Array:
        module = put_together(model.assembly.split.static, model.params)
        loop = LayerLoop(unroll=True, remat="none")
        table, batch, comm = module.embedding[...], {"tokens": tokens}, Local()
        context = module.context(batch, None, comm)
        x = module.enter({"embedding": table}, batch, context, comm, loop)
        x = module.hidden(module.run_period(x, context, comm, loop)[0], context, comm, loop)
        head = module.embedding[...] if module.config.tied else module.head[...]
        return logits(x, head, module.head_config)

    def after(ids: list[int]) -> np.ndarray:
        padded = jnp.asarray([(ids + [0] * length)[:length]], jnp.int32)
        return np.asarray(run(padded)[len(ids) - 1])

    return after


def sharpened(decoder: jaxtrain.Experiment, **changes: object) -> jaxtrain.Experiment:
    """Large initial weights, so that the likeliest token is not a matter of rounding."""
    init = jaxtrain.nn.Initialisation(std=0.5)
    model = replace(decoder.model, init=init, vocab_multiple=32, **changes)
    return replace(decoder, model=model)


def variants(decoder: jaxtrain.Experiment) -> dict[str, jaxtrain.Experiment]:
    block = decoder.model.period[0]
    windowed = replace(block, attention=replace(block.attention, window=3, kv_heads=1))
    flat = replace(block, attention=replace(block.attention, rope=None))
    sloped = replace(block, attention=replace(block.attention, rope=None, scores=Alibi(), window=6))
    routed = replace(block, mlp=jaxtrain.MoeConfig(block.mlp.hidden, experts=4))
    return {
        "one layer, tied": sharpened(decoder),
        "stacked pairs, windows": sharpened(
            decoder, layers=4, period=(windowed, block), tied=False
        ),
        "prefix, suffix, learned positions": sharpened(
            decoder, layers=3, prefix=(windowed,), suffix=(flat,), learned_positions=24, tied=False
        ),
        "functions of scores": sharpened(decoder, layers=4, period=(sloped, flat), tied=False),
        "experts": sharpened(decoder, layers=2, period=(routed,), tied=False),
    }


@pytest.mark.parametrize(
    "name",
    [
        "one layer, tied",
        "functions of scores",
        pytest.param("stacked pairs, windows", marks=pytest.mark.slow),
        pytest.param("prefix, suffix, learned positions", marks=pytest.mark.slow),
        "experts",
    ],
)
def test_greedy_is_argmax_over_repeated_whole_forwards(
    name: str, decoder: jaxtrain.Experiment
) -> None:
    model = untrained(variants(decoder)[name])
    found, after = model.continued(), whole_forward(model)
    assert len(set(found)) > 1, "a constant continuation would tell little"
    seen = list(PROMPT)
    for token in found:
        assert token == int(np.argmax(after(seen))), f"after {seen}"
        seen.append(token)


def test_a_cache_is_made_anew_where_longrope_changes_its_factors(
    decoder: jaxtrain.Experiment,
) -> None:
    """Every token is the likeliest of a forward pass over all before it, whose rows are turned by
    the short factors up to 8 tokens and by the long ones beyond."""
    block = decoder.model.period[0]
    pairs = block.attention.size(decoder.model.embed) // 2
    scaling = jaxtrain.attention.LongRope(
        (1.0,) * pairs, (9.0,) * pairs, factor=4.0, original_seq=8
    )
    rope = jaxtrain.attention.Rope(100.0, scaling)
    turned = replace(block, attention=replace(block.attention, rope=rope))
    model = untrained(sharpened(decoder, layers=2, period=(turned,)))
    found, seen = model.continued(), list(PROMPT)
    short, long = whole_forward(model, 8), whole_forward(model)
    assert np.abs(short(seen) - long(seen)).max() > 1, "factors that change what is said"
    for token in found:
        after = short if len(seen) <= 8 else long
        assert token == int(np.argmax(after(seen))), f"after {seen}"
        seen.append(token)
    assert len(seen) == LENGTH


@pytest.mark.parametrize(
    ("name", "temperature"),
    [
        ("one layer, tied", 0.0),
        ("one layer, tied", 0.8),
        ("experts", 0.0),
        ("functions of scores", 0.0),
    ],
)
def test_the_mesh_does_not_change_the_continuation(
    decoder: jaxtrain.Experiment, name: str, temperature: float
) -> None:
    experiment = variants(decoder)[name]
    alone = untrained(experiment)
    spread = untrained(experiment, data=2, fsdp=2, tensor=2)
    assert alone.continued(temperature=temperature) == spread.continued(temperature=temperature)


def test_draws_follow_the_temperature_and_the_seed(decoder: jaxtrain.Experiment) -> None:
    model = untrained(sharpened(decoder))
    hot = model.continued(temperature=3.0)
    assert hot == model.continued(temperature=3.0)
    assert hot != model.continued(temperature=3.0, seed=1)
    assert all(0 <= i < 16 for i in hot), "a padded id was drawn"
    assert hot[:3] == model.continued(temperature=3.0, tokens=3), "as many as are asked for"
    for cold in (1e-3, LEAST_TEMPERATURE):
        assert model.continued(temperature=cold) == model.continued(), "cold is greedy"


def test_draws_are_of_the_likeliest(decoder: jaxtrain.Experiment) -> None:
    model = untrained(sharpened(decoder))
    after, seen, ranks = whole_forward(model), list(PROMPT), []
    for token in model.continued(temperature=9.0, top_k=3):
        ranks.append([*np.argsort(-after(seen))].index(token))
        seen.append(token)
    assert {*ranks} == {0, 1, 2}
    assert model.continued(temperature=9.0, top_k=1) == model.continued()
    every = model.continued(temperature=9.0)
    for all_of_them in (16, 10**6):
        assert model.continued(temperature=9.0, top_k=all_of_them) == every


def test_every_token_is_drawn_with_a_key_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model to which many tokens are equally likely; also where a cache is made anew."""
    vocab = 2**14
    model = SimpleNamespace(
        empty_cache=lambda batch, length, dtype: jnp.zeros(()),
        decode=lambda tokens, caches, at, comm: (jnp.zeros((1, tokens.shape[1], vocab)), caches),
    )
    monkeypatch.setattr(generation, "put_together", lambda static, params: model)
    options = (None, Local(), dict, (len(PROMPT) + 3, LENGTH), 0.8, None)
    draws = generation._generate(*options, {}, jnp.asarray(PROMPT), jax.random.key(0)).tolist()
    assert len(draws) == LENGTH - len(PROMPT)
    assert len(set(draws)) == len(draws), "two draws with one key are the same"


def test_what_cannot_be_generated_is_refused(decoder: jaxtrain.Experiment) -> None:
    block = decoder.model.period[0]
    flat = replace(block, attention=replace(block.attention, rope=None))
    model = untrained(sharpened(decoder, period=(flat,), learned_positions=8))
    with pytest.raises(ValueError, match="at least one"):
        generate_ids(model.assembly, model.params, [], tokens=1, temperature=0.0)
    with pytest.raises(ValueError, match="8 learned positions; use at most 3 new tokens"):
        model.continued(tokens=4)


BAD = [
    (-5, 0.8, ["tokens=-5"]),
    (0, 0.8, ["tokens=0 must be a whole number of 1 or more"]),
    (True, 0.8, ["tokens=True"]),
    (8, -1.0, ["temperature=-1.0 must be a finite number"]),
    (8, math.nan, ["temperature=nan"]),
    (8, 1e-45, ["temperature=1e-45 must be 0, the likeliest token, or at least 1e-30"]),
    (0, math.inf, ["tokens=0", "temperature=inf"]),
    (10**9, -1.0, ["tokens=1000000000 is more", "use 1048576 or less", "temperature=-1.0"]),
]


def test_likeliest_tokens_that_are_none_are_refused_with_all_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere = str(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"tokens=0.*top_k=0 must be a whole number of 1 or more"):
        jaxtrain.generate_text(nowhere, "a", tokens=0, top_k=0)
    assert cli.main(["generate", nowhere, "--prompt", "a", "--top-k", "-1"]) == cli.REFUSED
    assert "top_k=-1" in capsys.readouterr().err


@pytest.mark.parametrize(("tokens", "temperature", "told"), BAD)
def test_numbers_that_a_sample_refuses_are_refused_before_anything_is_loaded(
    tokens: int, temperature: float, told: list[str], tmp_path: Path
) -> None:
    """All at once, and by all that take them: of a model nothing is asked, not even to be there."""
    given: Any = dict(tokens=tokens, temperature=temperature)
    session: Any = SimpleNamespace(
        assembly=SimpleNamespace(description=SimpleNamespace(can={"generation"}))
    )
    where = ["--tokens", str(int(tokens)), f"--temperature={temperature}", "--prompt", "a"]
    acts = [
        lambda: jaxtrain.generate_text(tmp_path / "nowhere", "a", **given),
        lambda: jaxtrain.generate(session, "a", **given),
    ]
    if tokens <= LONGEST_SAMPLE:  # that length `check` tells, with all else
        acts.append(lambda: jaxtrain.Sample("a", **given))
    for act in acts:
        with pytest.raises(ValueError) as caught:
            act()
        assert all(part in str(caught.value) for part in told), caught.value
    if tokens is not True:
        assert cli.main(["generate", str(tmp_path / "nowhere"), *where]) == cli.REFUSED


# The text of what follows a prompt.


def metaspace() -> Tokenizer:
    """As of Mistral."""
    ids = {token: i for i, token in enumerate(["?", *PIECES])}
    found = Tokenizer(models.WordLevel(ids, unk_token="?"))
    found.pre_tokenizer = pre_tokenizers.Metaspace()
    found.decoder = decoders.Metaspace()
    return found


def stripped() -> Tokenizer:
    """As of Llama 2: a space is put before a text and the first taken away again."""
    pieces = [(token, -1.0) for token in ["?", *PIECES, *BYTES, "\u2581"]]
    found = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    found.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    found.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return found


def byte_level() -> Tokenizer:
    found = Tokenizer.from_str(ByteTokenizer().published().json)
    found.add_special_tokens(["?"])
    return found


PIECES = [f"\u2581{word}" for word in ("the", "capital", "of", "France", "is", "Paris")]
BYTES = [f"<0x{i:02X}>" for i in range(256)]
KINDS = {"Metaspace": metaspace, "Strip": stripped, "bytes": byte_level}


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_and_what_follows_it_are_one_text(kind: str) -> None:
    """Wherever the ids of a text are cut, both sides together are the text."""
    vocabulary = HuggingFaceVocabulary(KINDS[kind]().to_str(), eos="?")
    text = "the capital of France is Paris"
    ids = vocabulary.encode(text)
    assert vocabulary.decode(ids) == text
    for cut in range(len(ids) + 1):
        prompt = vocabulary.decode(ids[:cut])
        assert prompt + following(vocabulary.decode, ids[:cut], ids[cut:]) == text


def test_bytes_that_spoil_the_prompt_do_not_take_its_place() -> None:
    """A run of bytes that is no UTF-8 is decoded as so many signs of damage, from its first."""
    vocabulary = HuggingFaceVocabulary(stripped().to_str(), eos="?")
    first = vocabulary.encode("\u00e9")
    wrong = [1 + len(PIECES) + 0xFF]
    assert vocabulary.decode(first) == "\u00e9"
    assert vocabulary.decode([*first, *wrong]) == "\ufffd" * 3
    assert following(vocabulary.decode, first, wrong) == "\ufffd"
