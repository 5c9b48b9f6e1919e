"""What no run in good faith asks for: refused with the rule, the value and what to do, at once."""

from __future__ import annotations

import json
import subprocess
import sys
from ast import literal_eval
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain
from jaxtrain import cli, violations
from jaxtrain.data import ByteTokenizer
from jaxtrain.experiment import config_of, with_fields
from jaxtrain.huggingface.config import family_and_fields
from jaxtrain.pipeline.schedule import ENTRIES, make_schedule
from jaxtrain.pipeline.table_file import read_schedule
from jaxtrain.sources import documents
from jaxtrain.weights.loading import load
from jaxtrain.weights.tokenizer_files import folder_tokenizer

BLOCK = jaxtrain.BlockConfig(jaxtrain.AttentionConfig(heads=2), jaxtrain.MlpConfig(hidden=8))
MODEL = jaxtrain.DecoderConfig(vocab=257, embed=8, layers=2, period=(BLOCK,))
MOE = replace(BLOCK, mlp=jaxtrain.MoeConfig(hidden=8, experts=4))
EXPERIMENT = jaxtrain.Experiment(
    model=MODEL, data=jaxtrain.TextData(seq=8), optimizer=jaxtrain.AdamW(1e-3), steps=2, batch=8
)


@pytest.fixture(autouse=True)
def at_once(answers_within: Any) -> Iterator[None]:
    with answers_within(30):
        yield


VALUES: dict[str, tuple[Callable[[], Any], str]] = {
    "a number among paths": (lambda: jaxtrain.TextFiles(("a", 3)), "patterns has 3; a path"),
    "a path that is none": (lambda: jaxtrain.data.JsonLines(3), "patterns has 3; a path"),
    "an empty path": (lambda: jaxtrain.data.Parquet(""), "patterns has ''; a path"),
    "a number held out": (
        lambda: jaxtrain.TextFiles("a", held_out_patterns=(1,)),
        "held_out_patterns has 1; a path",
    ),
    "a share in words": (
        lambda: jaxtrain.TextFiles("a", held_out="x"),
        "held_out='x' is a fraction",
    ),
    "tokens by number": (lambda: jaxtrain.data.TokenFiles((1,)), "paths has 1; a path"),
    "a tokenizer by number": (lambda: jaxtrain.data.TokenizerFile(3), "path=3 must be a text"),
    "a vocabulary of 1e9": (
        lambda: jaxtrain.data.BpeTokenizer(vocab=10**9),
        "vocab=1000000000 must be a whole number of at least 257 and at most 4194304",
    ),
    "a fractional vocabulary": (
        lambda: jaxtrain.data.BpeTokenizer(vocab=1e9),
        r"vocab=1000000000.0 must",
    ),
    "a frequency of 1e30": (
        lambda: jaxtrain.data.BpeTokenizer(min_frequency=10**30),
        "min_frequency=1000",
    ),
    "a row in words": (lambda: jaxtrain.TextData(seq="long"), "seq='long' must be a whole number"),
    "a chain in words": (
        lambda: jaxtrain.data.BigramChain("a", 8),
        "vocab='a' must be a whole number",
    ),
    "a seed of 65 bits": (
        lambda: replace(EXPERIMENT, seed=2**64),
        r"seed=18446744073709551616 must",
    ),
    "a seed to generate by": (
        lambda: jaxtrain.generate_text("run", "a", seed=2**64),
        r"seed=18446744073709551616 must lie in \[0, 2\*\*32\)",
    ),
    "a seed below 0": (lambda: jaxtrain.generate_text("run", "a", seed=-1), "seed=-1 must lie in"),
    "a schedule of 1000 x 100000": (
        lambda: make_schedule("one_f_one_b", 1000, 100_000),
        r"stages=1000, microbatches=100000, chunks=1: a table of some 101,000,000 entries; use f",
    ),
    "a schedule of 1e30": (
        lambda: make_schedule("gpipe", 10**30, 10**30),
        "use fewer microbatches",
    ),
    "999 devices": (
        lambda: next(jaxtrain.certify(EXPERIMENT, devices=999)),
        "devices=999: a certificate runs .* use 64 or fewer, such as 8",
    ),
    "a setting of brackets": (
        lambda: with_fields(EXPERIMENT, ["batch=" + "(" * 10**5]),
        "--set batch=",
    ),
}


@pytest.mark.parametrize("case", VALUES)
def test_a_value_beyond_any_is_refused_at_once(case: str) -> None:
    make, told = VALUES[case]
    with pytest.raises(ValueError, match=told):
        make()


def test_the_largest_schedules_published_are_far_within() -> None:
    assert ENTRIES > 10 * 64 * 4 * (2048 + 64)
    assert make_schedule("interleaved", 64, 512, 4).stages == 64


MODELS: dict[str, tuple[jaxtrain.DecoderConfig, str]] = {
    "layers": (
        replace(MODEL, layers=10**9),
        "layers=1000000000 is more than any model has",
    ),
    "vocab": (replace(MODEL, vocab=10**10), "vocab=10000000000 is more than any"),
    "embed": (replace(MODEL, embed=2**31), "embed=2147483648 is more than any"),
    "positions": (
        replace(MODEL, learned_positions=2**40),
        "learned_positions=1099511627776 is",
    ),
    "experts": (
        replace(MODEL, period=(replace(MOE, mlp=replace(MOE.mlp, experts=10**9)),)),
        "block 0: mlp.experts=1000000000 is more than",
    ),
    "experts of all layers": (
        replace(MODEL, layers=1024, period=(replace(MOE, mlp=replace(MOE.mlp, experts=2048)),)),
        "mlp.experts of all layers=2097152 is more than any",
    ),
    "hidden": (
        replace(MODEL, period=(replace(BLOCK, mlp=replace(BLOCK.mlp, hidden=10**12)),)),
        "block 0: mlp.hidden=1000000000000 is",
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_beyond_any_is_refused_wherever_it_comes_from(name: str, tmp_path: Path) -> None:
    model, told = MODELS[name]
    with pytest.raises(ValueError, match=told):
        jaxtrain.check(replace(EXPERIMENT, model=model), jaxtrain.mesh_from_axes(data=1))
    (tmp_path / "checkpoints").mkdir()
    stored = {"experiment": config_of(replace(EXPERIMENT, model=model))}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    with pytest.raises(ValueError, match=told):
        load(tmp_path)


# Folders of weights.

HOSTILE = (10**9, 10**30, -1, 1.5, "a", "", [], [[1]], {}, {"a": 1}, None, True)


@pytest.mark.parametrize("mixture", [False, True])
def test_a_field_of_a_folders_config_is_read_or_refused(mixture: bool, tmp_path: Path) -> None:
    """Each field with each of these: a model that is sound, or a ValueError, and no other error."""
    rotary = replace(
        MODEL, period=(replace(MOE if mixture else BLOCK, norm=jaxtrain.nn.RMSNorm()),)
    )
    family, fields = family_and_fields(rotary)
    written = {"model_type": family.model_type, **fields}
    (tmp_path / "config.json").write_text(json.dumps(written))
    assert jaxtrain.huggingface_config(tmp_path).layers == 2
    for name in {**family.defaults, **written}:
        for value in HOSTILE:
            (tmp_path / "config.json").write_text(json.dumps({**written, name: value}))
            try:
                assert not jaxtrain.huggingface_config(tmp_path).violations()
            except ValueError as error:
                assert "is not a model that can be read here" in str(error), (name, value)
    (tmp_path / "config.json").write_text(json.dumps({**written, "num_hidden_layers": 10**9}))
    with pytest.raises(ValueError, match="num_hidden_layers=1000000000 is more than any model has"):
        jaxtrain.huggingface_config(tmp_path)


NO_TOKENIZERS = {
    "nothing": "",
    "no tokenizer": "{}",
    "a list": "[]",
    "half of one": ByteTokenizer().published().json[:500],
    "another kind of model": '{"version": "1.0", "model": {"type": "none"}}',
    "endless": "[" * 10**5,
    "an id of 4e9": '{"version": "1.0", "added_tokens": [], "model": '
    '{"type": "BPE", "vocab": {"a": 4000000000}, "merges": []}}',
}


@pytest.mark.parametrize("case", NO_TOKENIZERS)
def test_a_tokenizer_json_that_is_none_is_told(case: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(NO_TOKENIZERS[case])
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "a"}')
    told = r"tokenizer.json cannot be used as a tokenizer: .+"
    with pytest.raises(ValueError, match=told):
        jaxtrain.data.TokenizerFile(str(path), eos="a").build(iter, corpus="", cache_dir=tmp_path)
    with pytest.raises(ValueError, match=told):
        folder_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "config.json").write_text('{"eos_token_id": 0}')
    with pytest.raises(ValueError, match=told):
        folder_tokenizer(tmp_path)


FILES = {
    "tokenizer_config.json": ("eos_token", "bos_token", "tokenizer_class", "add_bos_token"),
    "generation_config.json": ("eos_token_id", "bos_token_id"),
    "config.json": ("eos_token_id", "bos_token_id", "architectures"),
}


def test_what_a_folder_says_of_its_tokens_is_read_or_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(ByteTokenizer().published().json)
    for file, names in FILES.items():
        for name in names:
            for value in (*HOSTILE, {"content": 3}, ["LlamaForCausalLM"], [10**30, 256]):
                for each in FILES:
                    (tmp_path / each).write_text("{}")
                (tmp_path / file).write_text(json.dumps({name: value}))
                try:
                    found = folder_tokenizer(tmp_path)
                    assert found is not None and found.vocabulary.eos in (97, 256), (
                        file,
                        name,
                        value,
                    )
                except ValueError as error:
                    assert "cannot be used as a tokenizer" in str(error), (file, name, value)


# Text, tables, experiments.


def test_lines_of_json_that_nest_without_end_are_told(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": ' + "[" * 10**5 + "\n")
    source = jaxtrain.data.JsonLines(str(tmp_path / "a.jsonl"), held_out=0.0)
    with pytest.raises(ValueError, match=r"a.jsonl:2: nests too deep; take the line out"):
        list(documents(source, "train"))


@pytest.mark.parametrize("cell", ["F4000000000", "F0.999999999", f"F{'9' * 5000}"])
def test_a_table_names_no_more_work_than_it_has_ticks(cell: str, tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text(f"{cell},\nB0, F0\n, B0\n")
    with pytest.raises(ValueError, match=r"is no work; write F3|works of a kind for every stage"):
        read_schedule(tmp_path / "mine.csv")


def test_a_large_schedule_is_told_and_not_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["schedule", "--kind", "one_f_one_b", "--stages", "64", "--microbatches", "4096"]
    assert cli.main(given) == 0
    said = capsys.readouterr().out
    assert "4222 ticks of 64 stages are not drawn" in said and "bubble" in said
    assert cli.main([*given, "--svg", str(tmp_path / "a.svg")]) == cli.REFUSED
    assert "are no picture; draw fewer microbatches" in capsys.readouterr().err
    assert cli.main([*given[:-2], "--microbatches", "1000000"]) == cli.REFUSED
    assert "use fewer microbatches or stages" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("import sys\nsys.exit(3)", "does not load: line 2: SystemExit: 3"),
        ("def experiment():\n    raise SystemExit('no')", r"failed: line 2: SystemExit: no"),
    ],
)
def test_an_experiment_that_leaves_is_told(
    text: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(text)
    assert cli.main(["train", str(tmp_path / "mine.py")]) == cli.REFUSED
    assert told in capsys.readouterr().err


def test_output_that_nobody_reads_ends_a_command_quietly() -> None:
    given = ["schedule", "--kind", "one_f_one_b", "--stages", "16", "--microbatches", "64"]
    command = subprocess.Popen(
        [sys.executable, "-m", "jaxtrain", *given],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert command.stdout is not None and command.stderr is not None
    command.stdout.close()
    said = command.stderr.read()
    command.stderr.close()
    assert (command.wait(), said) == (141, "")


NUMBERS: dict[str, tuple[Callable[[str, Any], list[str]], Any, str]] = {
    "a count": (violations.count, np.int64(8), "8"),
    "a count of JAX": (violations.count, jnp.int32(3), "3"),
    "a power of two": (violations.power_of_two, np.uint8(4), "4"),
    "a fraction": (violations.fraction, np.float32(0.1), "0.1"),
    "a rate": (violations.positive, np.float16(0.25), "0.25"),
    "a share": (violations.ratio, jnp.float32(1), "1.0"),
    "a least number": (partial(violations.at_least, least=2), np.int8(2), "2"),
    "a flag": (violations.flag, np.True_, "True"),
}


@pytest.mark.parametrize("what", NUMBERS)
def test_a_number_of_another_library_is_told_as_pythons(what: str) -> None:
    """Where that keeps the rule; else the rule is told."""
    check, number, remedy = NUMBERS[what]
    (said,) = check("n", number)
    assert said == f"n={number!r} is not of a type of Python's own; use n={remedy}"
    assert check("n", literal_eval(remedy)) == []
    (said,) = check("n", np.float32(-1))
    assert said.startswith(f"n={np.float32(-1)!r} must ")


def test_a_field_takes_pythons_numbers() -> None:
    """Those alone can be read again from a config."""
    with pytest.raises(ValueError, match=r"batch=.+ is a int64; use int\(\.\.\.\) of it$"):
        replace(EXPERIMENT, batch=np.int64(8))
    assert replace(EXPERIMENT, batch=int(np.int64(8))).batch == 8
