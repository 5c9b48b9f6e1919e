"""Numbers of rows in a mixture's buffers, as integers for both the trace and its prediction."""

from __future__ import annotations


def sent_rows(
    tokens: int, k: int, experts: int, devices: int, group: int | None, limit: int | None
) -> int:
    """Largest number of rows that a device sends to another one, which has its part of `experts`.
    With capacity each expert takes at most `limit` rows of every `group` of tokens."""
    local = experts // devices
    most = tokens * min(k, local)
    if group is None or limit is None:
        return most
    return min(most, tokens // group * limit * local)


def chunk_count(tokens: int, chunk: int | None, group: int | None) -> int:
    """Number of equal chunks that tokens are processed in: the fewest of which none is longer than
    `chunk`, unless that is shorter than a group of tokens that compete for capacity."""
    if chunk is None or tokens <= chunk:
        return 1
    units = tokens // (group or 1)
    divisors = (n for n in range(1, units + 1) if units % n == 0)
    return next(n for n in divisors if n == units or tokens // n <= chunk)
