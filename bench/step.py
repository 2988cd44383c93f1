"""Where a decode step's time goes, on the GPU and on the host: overlap on and off, with and without a busy thread.

    python -m bench.step MODEL [--rows 256] [--picture step.png] [--option num_pages=900 ...]

One JSON line for each of the four cases, over the steps in which every row decodes; medians unless said. `gpu_ms` is
a step's device time, `gap_us` the time from a step's end to the next one's begin, `occupancy` the sum of device times
over the wall time. Host phases are given twice: `wall`, and `cpu`, the GPU thread's own CPU time, which waiting for
the GIL or the device does not count into. The picture shows a few steps of both lanes, overlap on above overlap off.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from .burst import House, burning, generate, machine, open_house, request

PHASES = ("receive", "schedule", "launch", "wait", "commit", "hand_off")
PYTHON = ("receive", "schedule", "launch", "commit", "hand_off")  # all that is not waiting


class Span(NamedTuple):
    phase: str
    begin_s: float  # perf_counter
    end_s: float
    cpu_s: float


class Recorder:
    """Times the engine's phases by standing in for its methods."""

    def __init__(self, engine: Any) -> None:
        self.spans: list[Span] = []
        self.num_rows: dict[int, int] = {}  # of each scheduled step
        for owner, name, phase in (
            (engine, "_receive", "receive"), (engine.scheduler, "schedule", "schedule"),
            (engine.runner, "launch", "launch"), (engine, "_wait", "wait"),
            (engine.scheduler, "commit", "commit"), (engine, "_hand_off", "hand_off"),
        ):  # fmt: skip
            setattr(owner, name, self._timed(getattr(owner, name), phase))

    def _timed(self, method: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            begin_s, cpu_s = time.perf_counter(), time.thread_time()
            result = method(*args)
            self.spans.append(Span(phase, begin_s, time.perf_counter(), time.thread_time() - cpu_s))
            if phase == "schedule" and result is not None:
                self.num_rows[result.step] = result.num_rows if (result.lengths == 1).all() else 0
            return result

        return call

    def take(self) -> tuple[list[Span], dict[int, int]]:
        taken = self.spans, self.num_rows
        self.spans, self.num_rows = [], {}
        return taken


class Profile(NamedTuple):
    spans: list[Span]  # of a second run, without the events that time the device
    num_host_steps: int
    picture: list[Span]  # of the run with events
    steps: list[tuple[float, float]]  # device (begin, end) in seconds of perf_counter
    full: list[tuple[float, float]]  # those in which every row decodes


async def profile(house: House, recorder: Recorder, rows: int, seed: int) -> Profile:
    fresh = random.Random(seed)

    async def work() -> tuple[list[Span], dict[int, int]]:
        recorder.take()
        await generate(house.llm, [request(fresh, 512, 96, temperature=0.6) for _ in range(rows)])
        await asyncio.sleep(0.05)  # the engine's last hand-off
        return recorder.take()

    house.clock.take()
    zero_s = house.clock.mark()
    picture, num_rows = await work()
    events = house.clock.take_steps()
    in_s = {step: (zero_s + begin / 1e3, zero_s + end / 1e3) for step, (begin, end) in events.items()}
    full = [in_s[step] for step in sorted(in_s) if num_rows.get(step) == rows]
    on_step, house.runner.on_step = house.runner.on_step, None
    spans, num_rows = await work()
    house.runner.on_step = on_step
    inside, num_host_steps = _steady(spans, num_rows, rows)
    return Profile(inside, num_host_steps, picture, [in_s[step] for step in sorted(in_s)], full)


def _steady(spans: list[Span], num_rows: dict[int, int], rows: int) -> tuple[list[Span], int]:
    """The spans of the steps in which every row decodes, less the first and last few, and how many steps they are."""
    schedules = [span for span in spans if span.phase == "schedule"]
    full = [span for span, count in zip(schedules, num_rows.values(), strict=False) if count == rows][3:-3]
    begin_s, end_s = full[0].begin_s, full[-1].begin_s
    return [span for span in spans if begin_s <= span.begin_s < end_s], len(full) - 1


def figures(taken: Profile) -> dict[str, Any]:
    begin_s, end_s = taken.full[2][0], taken.full[-3][1]
    inside, num_host_steps = taken.spans, taken.num_host_steps
    steps = [step for step in taken.full if begin_s <= step[0] and step[1] <= end_s]
    gaps = [later[0] - earlier[1] for earlier, later in zip(steps, steps[1:], strict=False)]
    result: dict[str, Any] = {
        "num_steps": len(steps),
        "gpu_ms": _ms([end - begin for begin, end in steps]),
        "step_ms": _ms([later[0] - earlier[0] for earlier, later in zip(steps, steps[1:], strict=False)]),
        "gap_us_p50": round(1e6 * statistics.median(gaps), 1),
        "gap_us_p99": round(1e6 * sorted(gaps)[int(0.99 * len(gaps))], 1),
        "occupancy": round(sum(end - begin for begin, end in steps) / (end_s - begin_s), 4),
    }
    for phase in PHASES:
        mine = [span for span in inside if span.phase == phase]
        # receive, wait and hand_off can come more than once a step: their sum, a step.
        result[f"{phase}_wall_ms"] = round(1e3 * sum(span.end_s - span.begin_s for span in mine) / num_host_steps, 4)
        result[f"{phase}_cpu_ms"] = round(1e3 * sum(span.cpu_s for span in mine) / num_host_steps, 4)
    result["python_cpu_ms"] = round(sum(result[f"{phase}_cpu_ms"] for phase in PYTHON), 4)
    result["python_wall_ms"] = round(sum(result[f"{phase}_wall_ms"] for phase in PYTHON), 4)
    return result


def _ms(seconds: list[float]) -> float:
    return round(1e3 * statistics.median(seconds), 4)


def draw(path: str, cases: dict[str, Profile], num_steps: int = 4) -> None:
    """The timeline: for each case, the engine thread's phases above the GPU's steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colors = dict(zip(PHASES, ("#999999", "#4477aa", "#ee6677", "#dddddd", "#228833", "#ccbb44"), strict=True))
    figure, axes = pyplot.subplots(len(cases), 1, figsize=(14, 2.6 * len(cases)), sharex=True)
    for axis, (name, taken) in zip(axes, cases.items(), strict=True):
        middle = len(taken.full) // 2
        shown = taken.full[middle : middle + num_steps]
        zero_s, end_s = shown[0][0] - 0.002, shown[-1][1] + 0.001
        for i, (begin_s, until_s) in enumerate(step for step in taken.steps if zero_s <= step[0] <= end_s):
            bar = [(1e3 * (begin_s - zero_s), 1e3 * (until_s - begin_s))]
            axis.broken_barh(bar, (0, 0.8), color="#333333" if i % 2 else "#666666")
        for span in taken.picture:
            if zero_s <= span.begin_s <= end_s:
                bar = [(1e3 * (span.begin_s - zero_s), 1e3 * (span.end_s - span.begin_s))]
                axis.broken_barh(bar, (1, 0.8), color=colors[span.phase])
        axis.set_yticks([0.4, 1.4], ["GPU", "engine thread"])
        axis.set_title(name, loc="left", fontsize=10)
    axes[-1].set_xlabel("ms")
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=colors[phase]) for phase in PHASES]
    axes[0].legend(handles, PHASES, ncol=len(PHASES), fontsize=8, loc="upper right")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


async def run(args: argparse.Namespace) -> None:
    options = {name: json.loads(value) for name, _, value in (pair.partition("=") for pair in args.option)}
    cases: dict[str, Profile] = {}
    async with open_house(args.model, **options) as house:
        recorder = Recorder(house.engine)
        await profile(house, recorder, args.rows, 0)
        for overlap in (True, False):
            house.engine._step = house.engine.overlap_step if overlap else house.engine.serial_step
            for burn in (False, True):
                if burn:
                    with burning():
                        taken = await profile(house, recorder, args.rows, 2 + overlap)
                else:
                    taken = await profile(house, recorder, args.rows, 4 + overlap)
                name = f"overlap {'on' if overlap else 'off'}{', beside a thread that burns 70% of a core' * burn}"
                cases[name] = taken
                line = {"bench": "step", "rows": args.rows, "overlap": overlap, "burn": burn} | figures(taken)
                print(json.dumps(line | machine() | {"model": house.llm.model_name}), flush=True)
    if args.picture:
        draw(args.picture, cases)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--picture", help="where to put the timeline, a PNG")
    parser.add_argument("--option", nargs="*", default=[], help="Config fields as name=json")
    import uvloop

    uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
