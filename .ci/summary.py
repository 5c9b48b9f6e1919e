"""Prints what CI's test runs cost and left out, from the files that tests/report.py wrote.

    python .ci/summary.py FOLDER

Exits with 1 where a test was skipped, and run in no other step, for a reason that .ci/skips.txt
does not have.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

SLOWEST = 15


def known_reasons(text: str) -> list[str]:
    """Beginnings of the reasons for which CI may skip; lines with a # only say why."""
    return [line.strip() for line in text.splitlines() if line.strip() and line[0] != "#"]


def skipped(reports: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Why, of each test that was run in no step, or of a module that was skipped whole."""
    ran = set()
    for step, r in reports.items():
        tests = {test for test in r["seconds"] if test not in r["skipped"]}
        ran |= tests
        if not step.endswith("a tenth"):  # of a module that is run in part it may have any part
            ran |= {test.partition("::")[0] for test in tests}
    every = [pair for r in reports.values() for pair in r["skipped"].items()]
    return {test: why for test, why in every if test not in ran}


def lines(reports: dict[str, dict[str, Any]], known: list[str]) -> tuple[list[str], list[str]]:
    """The summary of reports by step, and the reasons for skips that are not known."""
    seconds = [(s, step, test) for step, r in reports.items() for test, s in r["seconds"].items()]
    skips = Counter(skipped(reports).values())
    unknown = sorted(why for why in skips if not why.startswith(tuple(known)))
    failed = [f"  {step}: {test}" for step, r in reports.items() for test in r["failed"]]
    peaks = [f"{step} {r['largest_bytes'] / 1e9:.2f} GB" for step, r in reports.items()]
    out = ["slowest tests:"]
    out += [
        f"  {s:6.1f} s  {step}: {test}" for s, step, test in sorted(seconds)[: -SLOWEST - 1 : -1]
    ]
    out += [f"largest process of tests: {', '.join(peaks)}"]
    out += [f"skipped in every step: {sum(skips.values())}"]
    out += [f"  {n:4d}  {why}" for why, n in sorted(skips.items())]
    out += [f"  NOT in .ci/skips.txt: {why}" for why in unknown]
    return [*out, f"failed: {len(failed)}", *failed], unknown


def main(folder: Path) -> int:
    reports = {
        path.stem: json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(folder.glob("*.json"))
    }
    known = known_reasons(Path(__file__).with_name("skips.txt").read_text(encoding="utf-8"))
    text, unknown = lines(reports, known)
    print("\n".join(text))
    return 1 if unknown else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
