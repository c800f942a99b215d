"""The cause that limits a run, for given measurements of each rank."""

from types import SimpleNamespace
from typing import Any


def cause_of(ranks: list[dict[str, Any]]) -> str:
    """Adapter: the cause that the verdict names, such as "input-bound by storage"."""
    from engine.log import verdict
    from pipeline.feed.step_times import StepTimes

    row = []
    for rank in ranks:
        between = rank["data_wait"] + rank["late"] + (0.0 if rank["on_gpu"] else rank["copy"])
        row.append(
            StepTimes(
                steps=1,
                seconds=rank["period_ms"] / 1e3,
                images_per_second=rank["rate"],
                data_wait_fraction=rank["data_wait"],
                late_fraction=rank["late"],
                ranks_wait_fraction=rank["ranks_wait"],
                copy_fraction=rank["copy"],
                compute_fraction=1 - between - rank["ranks_wait"],
                cpu_wait_fraction=rank["core_wait"],
                idle_steps_fraction=rank["drained"],
                copy_ms=rank["copy_ms"],
                image_cpu_ms=rank["cpu_ms"],
                image_storage_ms=rank["storage_ms"],
                image_cpu_wait_ms=rank["core_ms"],
            )
        )
    first = ranks[0]
    on_device = first["decoder"] in ("gpu", "hybrid")
    stage = SimpleNamespace(device_decodes=first["decoder"] == "gpu")
    feed: Any = SimpleNamespace(
        train=SimpleNamespace(cuda=first["on_gpu"]),
        pool=SimpleNamespace(active=first["workers"]),
        decode_mode=first["decoder"] if on_device else "cpu",
        datasets=SimpleNamespace(train=SimpleNamespace(stage=stage)),
        step_rate=first["step_rate"],
    )
    run = verdict.combine(row, feed)
    return verdict.cause_of(run, row, feed, first["graph_refused"] or "")


def current_answers(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the stored lines with this code's answers.

    The first line has values of a typical rank, every later line the values that differ on
    `all` ranks and on each of the `ranks`. The cause does not depend on the rank order.
    """
    usual, *cases = lines
    found = [usual]
    for case in cases:
        ranks = [{**usual, **case["all"], **rank} for rank in case["ranks"]]
        causes = sorted({cause_of(ranks), cause_of(ranks[::-1])})
        found.append({**case, "cause": " or ".join(causes)})
    return found
