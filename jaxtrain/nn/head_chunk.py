"""How many tokens' logits are made at a time, where nobody says."""

from __future__ import annotations

from jaxtrain.mesh.hardware import Chip

LEAST_CHUNK = 2048
"""Tokens, on any machine."""
MOST_WAITING = 1 / 8
"""Of a chunk's products' time, for reading and writing the head's gradient."""
MOST_MEMORY = 1 / 20
"""Of a chip's, for the logits of a chunk in fp32, of which a few are there at a time."""


def chunk_tokens_of(chip: Chip, columns: int) -> int:
    """Tokens of a chunk, a power of two, for `columns` of the vocabulary on a device.

    A chunk of c tokens takes three products, 6 c embed columns FLOPs, and adds to the head's
    gradient, which is fp32: 8 embed columns bytes go through the memory. So c grows until that is
    `MOST_WAITING` of the products' time at the chip's 16-bit peak, or the logits too large.
    """
    tokens, bandwidth = LEAST_CHUNK, chip.hbm_bandwidth_gbytes * 1e9
    room = MOST_MEMORY * chip.hbm_gbytes * 1e9
    while 8 / bandwidth > MOST_WAITING * 6 * tokens / chip.bf16_flops:
        if 2 * tokens * columns * 4 > room:
            break
        tokens *= 2
    return tokens
