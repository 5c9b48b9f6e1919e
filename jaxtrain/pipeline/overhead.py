"""Overheads of a schedule besides its time: useless work, memory, and whether the schedule pays.

In lock-step a stage works in every tick, on garbage where it has no work: an idle tick costs as
much arithmetic and as many bytes as a busy one.
"""

from __future__ import annotations

from jaxtrain.pipeline.analysis import cost, slots, spans
from jaxtrain.pipeline.schedule import Costs, Schedule, make_schedule

ROUNDING = 1e-9
"""Tolerance of costs: a sum of thirds may be rounded."""


def ticks_of(schedule: Schedule, kind: str) -> int:
    """Number of ticks in which any stage, and so every stage, does that kind of work."""
    return sum(span.stop - span.start for span in spans(schedule) if kind in span.kinds)


def executed_over_useful(schedule: Schedule, *, keep_residuals: bool) -> float:
    """Arithmetic of the blocks that all stages run in a step, divided by the useful part: F, the
    input's and the weights' gradients, equal in cost, once for each microbatch. Without residuals
    every B runs F again. Remat is not counted."""
    work = {"F": 1, "B": 1 if schedule.weight is not None else 2, "W": 1}
    run = sum(work[kind] * ticks_of(schedule, kind) for kind in schedule.tables)
    if not keep_residuals:
        run += ticks_of(schedule, "B")
    return run / (3 * schedule.microbatches * schedule.chunks)


def handed_over_useful(schedule: Schedule) -> float:
    """Activations and gradients that stages send in a step, divided by those that a stage reads;
    1.0 if nothing is sent. Loops in which no stage reads any send none."""
    senders = schedule.stages if schedule.chunks > 1 else schedule.stages - 1
    sent = read = 0
    for kind, table, end, last in (
        ("F", schedule.forward, -1, schedule.chunks - 1),
        ("B", schedule.backward, 0, 0),
    ):
        ends = (table[:, end] >= 0) & (table[:, end] % schedule.chunks == last)
        arriving = (table >= 0).sum(1) - ends
        for span in spans(schedule):
            arrived = int(arriving[span.start : span.stop].sum())
            if kind in span.kinds and arrived:
                sent, read = sent + senders * (span.stop - span.start), read + arrived
    return sent / read if read else 1.0


def published_in_flight(schedule: Schedule) -> tuple[str, list[int]] | None:
    """Returns the publication, and for each stage the number of works whose activations it keeps at
    once; None if there is no such figure. In the publications stages are not in lock-step.

    GPipe: Huang et al. 2019, section 2.3. 1F1B and its interleaved form: Narayanan et al. 2021,
    section 2.2, and Megatron-LM's warm-up of 2(R - 1 - r) + (V - 1)R works for M divided by R.
    ZB-H1: Qi et al. 2023, section 3.1.
    """
    r, m, v = schedule.stages, schedule.microbatches, schedule.chunks
    if schedule.kind == "gpipe":
        return "Huang et al. 2019", [m] * r
    if schedule.kind == "one_f_one_b":
        return "Narayanan et al. 2021", [min(m, r - stage) for stage in range(r)]
    if schedule.kind == "interleaved" and m % r == 0:
        warm = [2 * (r - 1 - stage) + (v - 1) * r for stage in range(r)]
        return "Narayanan et al. 2021", [min(m * v, count + 1) for count in warm]
    if schedule.kind == "zero_bubble" and v == 1:
        return "ZB-H1, Qi et al. 2023", [min(m, r)] * r
    return None


def warnings(schedule: Schedule, costs: Costs = Costs()) -> list[str]:  # noqa: B008 (frozen)
    """Reasons why another table is better; empty for 1F1B, and if the table pays."""
    plain = make_schedule("one_f_one_b", schedule.stages, schedule.microbatches)
    reasons, own, plain_cost = [], cost(schedule, costs), cost(plain, costs)
    if own >= plain_cost * (1 - ROUNDING):
        of_plain = slots(plain)
        more = {k: n for k, n in slots(schedule).items() if n > of_plain.get(k, 0)}
        than = ", ".join(f"{n} {k} for {of_plain.get(k, 0)}" for k, n in more.items())
        if more or own > plain_cost * (1 + ROUNDING):
            reasons.append(
                f"no cheaper than 1F1B: costs {own:g} where one_f_one_b costs {plain_cost:g}, and "
                f"{f'holds {than}' if more else 'saves no memory'}{_remedy(schedule)}"
            )
    if schedule.weight is not None and schedule.stages == 2:
        reasons.append(
            "zero bubble does not pay on two stages: it saves at most one W a step, and B and W "
            "apart cost more than B whole in every microbatch (a seventh of a W where it was "
            "measured, experiments/LOG.md of 2026-11-22); use one_f_one_b or interleaved"
        )
    return reasons


def _remedy(schedule: Schedule) -> str:
    """The nearest numbers of microbatches with which chunks pay; else the plain schedule."""
    r, m = schedule.stages, schedule.microbatches
    if schedule.kind in ("interleaved", "zero_bubble") and schedule.chunks > 1 and m % r:
        near = [count for count in (m - m % r, m + r - m % r) if count]
        return f"; use one_f_one_b, or microbatches={' or '.join(map(str, near))}"
    return "; use one_f_one_b"
