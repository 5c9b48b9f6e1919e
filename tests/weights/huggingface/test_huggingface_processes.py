"""Two processes: each reads its own shards, both take part in a write, and fail together."""

from __future__ import annotations

import json
from pathlib import Path

import process_group
import pytest
from safetensors.numpy import load_file
from tiny_families import LLAMA, random_params, template

from jaxtrain.huggingface import write_folder

WORKER = """
import json, sys
import jax

index, port, out = sys.argv[1:]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=int(index))
from tiny_families import LLAMA, template
from jaxtrain.huggingface import read_params, target, write_folder
from jaxtrain.huggingface.folder import Folder

boxes, read = {}, Folder.read


def noted(self, name, box):
    boxes.setdefault(name, []).append(box)
    return read(self, name, box)


Folder.read = noted
params = read_params("in", LLAMA, template(LLAMA, fsdp=2, tensor=2))
write_folder("out", LLAMA, params, shard_bytes=2000)
refused = []
save, calls = target.save_file, []


def full(arrays, path, **options):
    calls.append(path)
    if len(calls) == 2:
        raise OSError(28, "No space left on device")
    save(arrays, path, **options)


target.save_file = full
for folder in ("out", "other"):
    try:
        write_folder(folder, LLAMA, params, shard_bytes=2000)
    except ValueError as error:
        refused.append(str(error))
with open(out, "w") as file:
    json.dump({"boxes": boxes, "refused": refused}, file)
"""


@pytest.mark.slow
def test_two_processes_read_write_and_fail_as_one(tmp_path: Path) -> None:
    write_folder(tmp_path / "in", LLAMA, random_params(LLAMA, template(LLAMA)), shard_bytes=2000)
    (tmp_path / "worker.py").write_text(WORKER)
    process_group.run(
        tmp_path,
        2,
        lambda index, port: ["worker.py", index, port, f"{index}.json"],
        modules=Path(__file__).parent,
        seconds=120,
    )
    found = [json.loads((tmp_path / f"{index}.json").read_text()) for index in range(2)]

    # fsdp lies across the processes, and splits the columns of [out, in].
    name = "model.layers.1.self_attn.q_proj.weight"
    for index in range(2):
        columns = [8 * index, 8 * index + 8]
        assert sorted(found[index]["boxes"][name]) == [[[0, 8], columns], [[8, 16], columns]]
        assert found[index]["boxes"]["model.norm.weight"] == [[[0, 16]]]

    files = {p.name: p for p in (tmp_path / "in").iterdir()}
    assert files.keys() == {p.name for p in (tmp_path / "out").iterdir()}
    for name, file in files.items():
        assert file.read_bytes() == (tmp_path / "out" / name).read_bytes(), name
    assert load_file(sorted((tmp_path / "out").glob("*.safetensors"))[0])

    first, second = (each["refused"] for each in found)
    assert "is there already" in first[0] and "No space left" in first[1]
    assert all("process 0 could not write" in each for each in second) and len(second) == 2
    assert not (tmp_path / "other").exists() and not list(tmp_path.glob(".*partial*"))
