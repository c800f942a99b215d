"""The cause that limits a run, for measured numbers of each rank."""

from typing import Any


def cause_of(ranks: list[dict[str, Any]]) -> str:
    """Adapter: the cause that the verdict names, such as "input-bound by storage"."""
    from engine.log.verdict import verdict
    from pipeline.feed.step_times import StepTimes

    measured = []
    for rank in ranks:
        values = {name: value for name, value in rank.items() if name in StepTimes._fields}
        if values["decoder"] in ("gpu", "hybrid"):
            decoder = "none" if values["decoder"] == "gpu" else "region"
            values |= {"decode_mode": values["decoder"], "decoder": decoder}
        values |= {"steps": 1, "seconds": rank["period_ms"] / 1e3}
        measured.append(StepTimes(**values))
    return verdict(measured)[0]


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
