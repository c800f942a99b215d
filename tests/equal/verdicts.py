"""The cause that limits a run, for measured numbers of each rank."""

from typing import Any

# Stored name -> today's, where they differ. Shares of the time, images/s, and ms.
NAMES = {
    "name": "place",
    "alone": "step_alone",
    "wait": "wait_fraction",
    "late": "late_fraction",
    "copy": "copy_fraction",
    "drained": "drained_fraction",
    "ranks": "ranks_fraction",
    "core": "core_fraction",
}


def cause_of(ranks: list[dict[str, Any]]) -> str:
    """Adapter: the cause that the verdict names, such as "input-bound by storage"."""
    from engine.tune.measured import Measured, figures_of
    from engine.tune.verdict import judge

    measured = []
    for rank in ranks:
        values = {NAMES.get(key, key): value for key, value in rank.items()}
        if values["decoder"] in ("gpu", "hybrid"):
            values |= {"mode": values["decoder"], "decoder": "region"}
        measured.append(Measured(**values))
    return judge(figures_of(measured))[0].partition(":")[0]


def answered(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The stored lines with the answers of this code.

    The first line has the numbers of a usual rank; each other line what differs on `all` ranks,
    and on each of the `ranks`. The cause does not depend on the order of the ranks.
    """
    usual, *cases = lines
    found = [usual]
    for case in cases:
        ranks = [{**usual, **case["all"], **rank} for rank in case["ranks"]]
        causes = sorted({cause_of(ranks), cause_of(ranks[::-1])})
        found.append({**case, "cause": " or ".join(causes)})
    return found
