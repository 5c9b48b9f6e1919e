"""Default number of tokens whose logits exist at a time."""

from __future__ import annotations

from jaxtrain.mesh.hardware import Chip

LEAST_CHUNK = 2048
"""Fewest tokens of a chunk, on any machine."""
MOST_WAITING = 1 / 8
"""Largest time for reading and writing the head's gradient, as a share of the products' time."""
MOST_MEMORY = 1 / 20
"""Share of a chip's memory for a chunk's fp32 logits, of which a few copies exist at a time."""


def chunk_tokens_of(chip: Chip, columns: int) -> int:
    """Tokens of a chunk, a power of two, for `columns` of the vocabulary on a device.

    A chunk of c tokens takes three products, 6 c embed columns FLOPs, and adds to the head's fp32
    gradient: 8 embed columns bytes go through the memory. c grows until that takes `MOST_WAITING`
    of the products' time at the chip's 16-bit peak, or until the logits are too large.
    """
    tokens, bandwidth = LEAST_CHUNK, chip.hbm_bandwidth_gbytes * 1e9
    room = MOST_MEMORY * chip.hbm_gbytes * 1e9
    while 8 / bandwidth > MOST_WAITING * 6 * tokens / chip.bf16_flops:
        if 2 * tokens * columns * 4 > room:
            break
        tokens *= 2
    return tokens
