"""Measured requests to numbers: vLLM's definitions, goodput, one JSON object a run, and a plot.

Any thread. It never knows sockets.

    TTFT  sent -> first event          E2EL  sent -> last event
    TPOT  (E2EL - TTFT) / (output tokens - 1), one a request
    ITL   every gap between events, all requests together: events, not tokens, so a server that merges
          tokens into fewer events shows it here and nowhere else
"""

import datetime
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .. import __version__
from .tally import Measured

PERCENTILES = (50, 90, 99)
METRICS: dict[str, Callable[[Measured], float | None]] = {
    "ttft": lambda one: one.first_s - one.sent_s,
    "tpot": lambda one: (one.last_s - one.first_s) / (one.num_output_tokens - 1) if one.num_output_tokens > 1 else None,
    "e2el": lambda one: one.last_s - one.sent_s,
}


def goodput_limits(text: str) -> dict[str, float]:
    """"ttft:200,tpot:50" to milliseconds by metric.

    Raises:
        ValueError: an unknown metric, or no number.
    """
    limits = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition(":")
        if name not in METRICS:
            raise ValueError(f"goodput knows {', '.join(METRICS)}, got {name!r}")
        limits[name] = float(value)
    return limits


def summary(measured: Sequence[Measured], duration_s: float, limits: dict[str, float]) -> dict[str, Any]:
    """The numbers of one run, failed requests counted and left out of the times."""
    good = [one for one in measured if one.error is None]
    num_output = sum(one.num_output_tokens for one in good)
    num_prompt = sum(one.num_prompt_tokens for one in good)
    result: dict[str, Any] = {
        "num_requests": len(measured),
        "num_failed": len(measured) - len(good),
        "errors": dict(Counter(one.error for one in measured if one.error is not None).most_common(5)),
        "duration_s": round(duration_s, 4),
        "prompt_tokens": num_prompt,
        "output_tokens": num_output,
        "output_tokens_counted_as_events": any(one.tokens_are_events for one in good),
        "requests_per_s": _rate(len(good), duration_s),
        "output_tokens_per_s": _rate(num_output, duration_s),
        "total_tokens_per_s": _rate(num_prompt + num_output, duration_s),
        "num_events": sum(len(one.gaps_s) + 1 for one in good),
    }
    for name, metric in METRICS.items():
        result[f"{name}_ms"] = _spread([value for one in good if (value := metric(one)) is not None])
    result["itl_ms"] = _spread([gap for one in good for gap in one.gaps_s])
    result["send_lag_ms"] = _spread([one.sent_s - one.planned_s for one in measured])
    if limits:
        num_met = sum(_meets(one, limits) for one in good)
        result["goodput"] = {"limits_ms": limits, "num_met": num_met, "requests_per_s": _rate(num_met, duration_s)}
    return result


def _rate(num: float, duration_s: float) -> float:
    return round(num / duration_s, 3) if duration_s else 0.0


def _meets(one: Measured, limits: dict[str, float]) -> bool:
    values = {name: METRICS[name](one) for name in limits}
    return all(value is None or value * 1e3 <= limits[name] for name, value in values.items())


def _spread(values_s: list[float]) -> dict[str, float] | None:
    """Mean and percentiles in milliseconds; None of nothing."""
    if not values_s:
        return None
    values_s.sort()
    spread = {"mean": sum(values_s) / len(values_s)} | {f"p{p}": percentile(values_s, p) for p in PERCENTILES}
    return {name: round(value * 1e3, 3) for name, value in spread.items()}


def percentile(ordered: Sequence[float], percent: float) -> float:
    """As numpy's default: linear between the neighbours."""
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def where() -> dict[str, Any]:
    """The command, versions and hardware of what measures; the server may be on another machine."""
    return {
        "command": shlex.join(sys.orig_argv),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {"asyncllm": __version__, "python": platform.python_version(), "system": platform.platform()},
        "hardware": {"cpu": _cpu(), "num_cores": os.cpu_count(), "gpus": _gpus()},
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(": ")[2] for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _gpus() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.split("\n")[:-1] if done.returncode == 0 else []


def check_plot() -> None:
    """Told before the measuring, not after.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        import matplotlib.figure  # type: ignore[import-not-found,unused-ignore]  # noqa: F401
    except ImportError:
        raise ValueError("a plot needs matplotlib, which is not installed: pip install 'asyncllm[bench]'") from None


def plot(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Latency against load, as a PNG."""
    from matplotlib.figure import Figure  # type: ignore[import-not-found,unused-ignore]

    figure = Figure(figsize=(12, 4), layout="constrained")
    labels = [str(run["load"]["value"]) for run in runs]
    for axes, name in zip(figure.subplots(1, 3), ("ttft_ms", "tpot_ms", "itl_ms"), strict=True):
        for mark in ("p50", "p99"):
            axes.plot(labels, [(run[name] or {}).get(mark) for run in runs], marker="o", label=mark)
        axes.set(title=name, xlabel=runs[0]["load"]["kind"], ylabel="ms", ylim=(0, None))
        axes.legend()
    figure.savefig(path)
