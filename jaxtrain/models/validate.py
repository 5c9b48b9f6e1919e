"""What is wrong with a decoder's fields, and with how a mesh would split it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from jaxtrain.mesh.sharding import ShardingRules, ways

if TYPE_CHECKING:
    from jaxtrain.models.decoder import DecoderConfig


def violations(config: DecoderConfig) -> list[str]:
    """Each wrong field with its remedy."""
    found = []
    fixed, n = len(config.prefix) + len(config.suffix), len(config.period)
    if n == 0 or (config.layers - fixed) % max(n, 1) or config.layers - fixed < n:
        near = fixed + max(1, (config.layers - fixed) // max(n, 1)) * max(n, 1)
        found.append(
            f"layers={config.layers} is not prefix + suffix ({fixed}) plus a multiple of the "
            f"period ({n} blocks); use layers={near} or {near + max(n, 1)}"
        )
        return found
    for name in ("vocab", "embed", "vocab_multiple", "chunk_tokens"):
        if not isinstance(getattr(config, name), int) or getattr(config, name) < 1:
            found.append(f"{name}={getattr(config, name)}; use at least 1")
    for name in ("learned_positions", "logit_softcap"):
        value = getattr(config, name)
        if value is not None and value <= 0:
            found.append(f"{name}={value}; use a positive one, or None for none")
    for at, block in enumerate(dict.fromkeys(config.blocks)):
        a, where = block.attention, f"block {at}"
        counts = {"heads": a.heads, "kv_heads": a.key_heads, "mlp.hidden": block.mlp.hidden}
        if missing := [f"{name}={count}" for name, count in counts.items() if count < 1]:
            found.append(f"{where}: {', '.join(missing)}; use at least 1")
            continue
        for name in ("head_dim", "window", "softcap"):
            value = getattr(a, name)
            if value is not None and value <= 0:
                found.append(f"{where}: {name}={value}; use a positive one, or None")
        if a.head_dim is None and config.embed % a.heads:
            found.append(
                f"{where}: embed={config.embed} is not a multiple of heads={a.heads}; "
                f"set head_dim or use embed={config.embed // a.heads * a.heads or a.heads}"
            )
        if a.heads % a.key_heads:
            fitting = max(k for k in range(1, min(a.heads, a.key_heads) + 1) if a.heads % k == 0)
            found.append(
                f"{where}: heads={a.heads} is not a multiple of kv_heads={a.key_heads}; use "
                f"kv_heads={fitting}"
            )
        if a.rope is not None and a.size(config.embed) % 2:
            found.append(f"{where}: head_dim={a.size(config.embed)} is odd; RoPE rotates pairs")
        if not 0.0 <= block.dropout < 1.0:
            found.append(f"{where}: dropout={block.dropout}; use a share in [0, 1)")
    if config.learned_positions is None and any(b.attention.rope is None for b in config.blocks):
        found.append("some block has no rope and there are no learned positions; set either")
    if not 0.0 <= config.dropout < 1.0:
        found.append(f"dropout={config.dropout}; use a share in [0, 1)")
    return found


def mesh_violations(
    config: DecoderConfig, rules: ShardingRules, sizes: Mapping[str, int], *, explicit: bool
) -> list[str]:
    """What does not split: whole heads and the padded vocabulary over their mesh axes."""
    lookup, found = dict(rules.activations), []
    split = {
        name: tuple(a for a in lookup.get(name, ()) if sizes.get(a, 1) > 1)
        for name in ("heads", "kv_heads", "mlp", "vocab")
    }
    for block in dict.fromkeys(config.blocks):
        a = block.attention
        counts = {"heads": a.heads, "kv_heads": a.key_heads}
        for name, count in counts.items():
            n = ways(split[name], sizes)
            if count % n:
                fits = [str(k) for k in range(1, count + 1) if count % k == 0 and k > 1]
                near = sorted({count // n * n or n, -(-count // n) * n})
                found.append(
                    f"{name}={count} does not split over {' x '.join(split[name])}={n}; use "
                    f"{' or '.join(map(str, near))} {name}, or "
                    f"{split[name][-1]}={' or '.join(fits) or 1}"
                )
    if split["heads"] != split["kv_heads"]:
        found.append(
            f"the activations table splits heads over {split['heads']} and kv_heads over "
            f"{split['kv_heads']}: a query head would meet another group's keys; split both alike"
        )
    elif explicit and len(set(split.values())) > 1:
        found.append(
            f"the explicit mode splits heads, kv_heads, mlp and vocab over the same mesh axes; the "
            f"activations table has {split}; use the tensor() preset, or execution.mode='gspmd'"
        )
    return list(dict.fromkeys(found))
