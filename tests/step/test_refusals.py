"""What would train something else than was asked is refused, or made right, before it runs."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import Asking

import jaxtrain
from jaxtrain.attention.kernels import Reference
from jaxtrain.data import BigramChain
from jaxtrain.mesh.sharding import ShardingRules, table
from jaxtrain.nn.local import Local
from jaxtrain.step.assembly import assemble

SPLIT = {"heads": "tensor", "mlp": "tensor", "vocab": "tensor"}


@pytest.mark.parametrize(
    ("entries", "axes", "message"),
    [
        ({"batch": "data", **SPLIT}, {"tensor": 2}, "kv_heads over .*: a query head would meet"),
        ({"batch": "data", "seq": "fsdp"}, {"data": 2, "fsdp": 2}, "splits seq over .'fsdp'"),
    ],
)
def test_splits_that_change_attention_are_refused(decoder, entries, axes, message):
    for mode in ("explicit", "gspmd"):
        experiment = replace(
            decoder,
            sharding=ShardingRules(activations=table(entries)),
            execution=jaxtrain.Execution(mode=mode),
        )
        with pytest.raises(ValueError, match=message):
            assemble(experiment, jaxtrain.mesh_from_axes(**axes))


@pytest.mark.parametrize(
    ("metric", "message"),
    [("bits_per_byte", "a BigramChain stand for no bytes"), ("los", "an evaluation has eval_loss")],
)
def test_the_best_by_what_nobody_measures_is_refused(decoder, metric, message):
    keep = jaxtrain.checkpoint.Keep(best=jaxtrain.checkpoint.Best(metric))
    policy = jaxtrain.SavePolicy(every=1, keep=keep)
    given = replace(decoder, checkpoints=policy, evaluation=jaxtrain.Evaluation())
    with pytest.raises(ValueError, match=message):
        assemble(given, jaxtrain.mesh_from_axes(data=1))


def test_a_rule_for_an_axis_nobody_has_is_refused(decoder):
    experiment = replace(decoder, sharding=ShardingRules(params=table({"embd": "fsdp"})))
    with pytest.raises(ValueError, match="split 'embd', an axis that no leaf has; did you mean"):
        assemble(experiment, jaxtrain.mesh_from_axes(fsdp=2))


@pytest.mark.slow
def test_blocks_of_different_head_dim_rotate_by_their_own_tables(decoder):
    """Each of two blocks, alone in a model, must turn by tables of its own head_dim."""

    def block(size):
        return jaxtrain.BlockConfig(
            jaxtrain.AttentionConfig(heads=2, head_dim=size), jaxtrain.MlpConfig(hidden=16)
        )

    config = replace(decoder.model, layers=2, prefix=(block(8),), period=(block(2),))
    model = config.build(jax.random.key(0), kernel=Reference())
    batch = {"tokens": jnp.arange(8)[None], "targets": jnp.arange(8)[None]}
    context = model.context(batch, None, Local())
    shapes = [cos.shape[-1] for cos, _ in context.ropes]
    assert shapes == [4, 1] and np.isfinite(model.loss(batch)[0])


def test_weights_and_moments_in_bfloat16_train_on(decoder, opened, stepped):
    precision = jaxtrain.optim.Precision(
        params=jnp.bfloat16, compute=jnp.bfloat16, matmul="default"
    )
    session = opened(replace(decoder, precision=precision))
    losses = [stepped(session)["loss"] for _ in range(12)]
    moments = {leaf.dtype for leaf in jax.tree.leaves(session.state.optimizer) if leaf.ndim}
    assert moments == {jnp.dtype(jnp.bfloat16)} and losses[-1] < losses[0]


def test_fp16_without_a_loss_scale_is_refused_by_name_too():
    with pytest.raises(ValueError, match="loss_scale=LossScale"):
        jaxtrain.optim.Precision(compute="float16")


def test_a_large_batch_in_fp16_does_not_overflow_its_scale(decoder, opened, stepped):
    """The loss scale acts on a mean: it does not shrink as the batch grows."""
    experiment = replace(decoder, precision=jaxtrain.optim.fp16, batch=512)
    session = opened(experiment)
    found = [stepped(session) for _ in range(4)]
    assert found[-1]["skipped"] == 0 and found[-1]["loss_scale"] == 2.0**15


def test_another_corpus_is_refused_on_resume(own, tmp_path):
    saved = replace(own, checkpoints=jaxtrain.SavePolicy(every=2))
    arguments = dict(run_dir=tmp_path / "run", cache_dir=tmp_path / "cache")
    jaxtrain.train(saved, jaxtrain.mesh_from_axes(data=1), steps=2, **arguments)

    class Renamed(type(saved.data.open("train", seed=0, cache_dir=tmp_path))):
        pass

    opened = Renamed(saved.data, seed=0, length=1 << 20)
    opened.digest = "0123456789abcdef"
    patched = pytest.MonkeyPatch()
    patched.setattr(BigramChain, "open", lambda *_, **__: opened)
    with patched.context(), pytest.raises(ValueError, match="another corpus"):
        jaxtrain.train(saved, jaxtrain.mesh_from_axes(data=1), steps=4, **arguments)
    patched.undo()


def test_a_finished_run_says_what_it_reached(own, tmp_path, capsys):
    saved = replace(own, steps=4, checkpoints=jaxtrain.SavePolicy(every=4))
    mesh, arguments = jaxtrain.mesh_from_axes(data=1), dict(run_dir=tmp_path, cache_dir=tmp_path)
    first = jaxtrain.train(saved, mesh, **arguments)
    again = jaxtrain.train(saved, mesh, **arguments)
    assert again.loss == first.loss and "all 4 steps are done" in capsys.readouterr().out


@pytest.mark.parametrize("steps", [0, -3, 21])
def test_steps_outside_the_experiment_are_refused(own, steps):
    with pytest.raises(ValueError, match=r"at least 1 step and at most experiment\.steps=20"):
        jaxtrain.train(own, jaxtrain.mesh_from_axes(data=1), steps=steps)


@pytest.mark.parametrize(
    "text", ["import os\nos.environ['NO_SUCH']\n", "def experiment():\n    return missing\n"]
)
def test_a_broken_experiment_file_is_told_with_its_line(tmp_path, text):
    path = tmp_path / "broken.py"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"broken.py.* line 2: (KeyError|NameError)"):
        jaxtrain.load_experiment(path)


def test_a_stop_without_checkpoints_does_not_claim_a_save(own, tmp_path):
    result = jaxtrain.train(
        own, jaxtrain.mesh_from_axes(data=1), run_dir=tmp_path, callbacks=[Asking(lambda: True)]
    )
    assert result.stopped and result.saved is None and result.steps == 1


def test_algorithms_for_the_mode_without_collectives_of_ours_are_refused(decoder):
    execution = jaxtrain.Execution(mode="gspmd", reducer=jaxtrain.collectives.Hierarchical())
    with pytest.raises(ValueError, match="under gspmd XLA sums the gradients: use reducer=Lax"):
        assemble(replace(decoder, execution=execution), jaxtrain.mesh_from_axes(data=2))
    execution = jaxtrain.Execution(mode="gspmd", reduce_layers=True)
    with pytest.raises(ValueError, match="XLA chooses when it sums: use reduce_layers=False"):
        assemble(replace(decoder, execution=execution), jaxtrain.mesh_from_axes(data=2))
    execution = jaxtrain.Execution(mode="gspmd", collectives=jaxtrain.collectives.Collectives())
    with pytest.raises(ValueError, match="under gspmd XLA chooses them: use collectives=None"):
        assemble(replace(decoder, execution=execution), jaxtrain.mesh_from_axes(fsdp=2))
