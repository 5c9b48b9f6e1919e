"""How many rows of a mixture may go where, as plain numbers: what is traced, and what is predicted
of it, go by the same ones."""

from __future__ import annotations


def sent_rows(
    tokens: int, k: int, experts: int, devices: int, group: int | None, taken: int | None
) -> int:
    """Rows that a device may send to another one, which has its part of all `experts`: those of all
    its tokens, or as many as the experts there take, each `taken` of every `group` of tokens."""
    local = experts // devices
    most = tokens * min(k, local)
    if group is None or taken is None:
        return most
    return min(most, tokens // group * taken * local)


def chunk_count(tokens: int, chunk: int | None, group: int | None) -> int:
    """Into how many runs of equal length tokens are cut that go one after another: as few as make
    none longer than `chunk`, or as short as a group of those that compete for capacity."""
    if chunk is None or tokens <= chunk:
        return 1
    units = tokens // (group or 1)
    whole = (n for n in range(1, units + 1) if units % n == 0)
    return next(n for n in whole if n == units or tokens // n <= chunk)
