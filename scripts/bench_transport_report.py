#!/usr/bin/env python3
"""Turns results of scripts/bench --transport into its part of docs/performance.md, and prints the ratios.

    bench_transport_report.py RESULTS DOCS     RESULTS/*.json -> DOCS/performance.md (between its markers)

scripts/bench_transport runs it. Standard library only.
"""

import json
import pathlib
import statistics
import sys

from bench_report import number, table

BEGIN = "<!-- transport: scripts/bench --transport writes from here -->"
END = "<!-- transport: to here -->"

# The targets of docs/performance.md.
THROUGHPUT = 0.7    # of the echo's
P50 = 1.5           # times the echo's, one token, one caller
SERVER_ADDS = 30e-6  # seconds to the p50 of a one-token call, beyond its compute and the echo
MANY_OF_ONE = 0.8   # tokens/s of 16 clients of one token, of one client of 16 tokens
GOODPUT = 0.9       # of the peak, at three times its rate

COMPUTE = ("hash", "gather", "project", "gate", "h2d", "d2h")
NAMES = {"apply": "Apply by ticket, highway", "rows": "Lookup, rows-native"}
PATHS = {"unix": "unix socket", "tcp": "loopback TCP"}


def verdict(met: bool) -> str:
    return "met" if met else "**missed**"


def micros(seconds: float) -> str:
    return number(seconds * 1e6)


def gigabytes(stretch: dict) -> str:
    up, down = stretch["payload_bytes_up_per_second"], stretch["payload_bytes_down_per_second"]
    return f"{up / 1e9:.2f} / {down / 1e9:.2f}"


def compute_seconds(point: dict) -> float:
    """Of the engine, for a call."""
    stages = point["server"]["stages"]
    return sum(stages[name]["seconds"] for name in COMPUTE if name in stages) / max(1.0, point["server"]["calls"])


def echo_rows(results: dict[str, dict]) -> list[list[str]]:
    rows = []
    for kind in NAMES:
        for path in PATHS:
            for point in results[f"{kind}-{path}"]["points"]:
                service, echo = point["service"], point["echo"]
                tokens, callers = point["tokens_per_call"], point["concurrency"]
                # A side without one served call has no ratio.
                throughput, p50 = echo.get("throughput_ratio", 0.0), echo.get("p50_ratio", float("inf"))
                wanted = callers == 8 and (kind == "apply" or tokens == 64)
                limited = kind == "apply" and tokens == 1 and callers == 1
                rows.append([
                    NAMES[kind], PATHS[path], str(tokens), str(callers), number(service["calls_per_second"]),
                    gigabytes(service), gigabytes(echo),
                    f"{throughput:.2f}" + (f", {verdict(throughput >= THROUGHPUT)}" if wanted else ""),
                    micros(service["latency_seconds"]["p50"]), micros(echo["latency_seconds"]["p50"]),
                    f"{p50:.2f}" + (f", {verdict(p50 <= P50)}" if limited else ""),
                    micros(service["latency_seconds"]["p99"]), micros(compute_seconds(point)), str(service["failed"]),
                ])
    return rows


def other_rows(results: dict[str, dict]) -> list[list[str]]:
    rows = []
    for path in PATHS:
        point = next(p for p in results[f"apply-{path}"]["points"] if p["tokens_per_call"] == 1 and p["concurrency"] == 1)
        adds = (point["service"]["latency_seconds"]["p50"] - point["echo"]["latency_seconds"]["p50"]
                - compute_seconds(point))
        rows.append([f"the server adds to the p50 of a one-token Apply by ticket, beyond compute and echo, {PATHS[path]}",
                     f"{micros(adds)} us", f"<= {micros(SERVER_ADDS)} us", verdict(adds <= SERVER_ADDS)])
    ratio = statistics.median(
        results[f"many-{i}"]["points"][0]["service"]["tokens_per_second"]
        / results[f"one-{i}"]["points"][0]["service"]["tokens_per_second"] for i in (1, 2, 3))
    rows.append(["tokens/s of 16 clients of one token, of one client of 16 tokens", f"{ratio:.2f}", f">= {MANY_OF_ONE}",
                 verdict(ratio >= MANY_OF_ONE)])
    peak = results["peak"]["points"][0]["service"]["calls_per_second"]
    overload = results["overload"]["points"][0]["service"]
    goodput = overload["calls_per_second"] / peak
    refused = overload["errors"].get("RESOURCE_EXHAUSTED QUEUE_FULL", 0)
    rows.append([f"served at three times the peak's rate, of the peak ({number(peak)} calls/s; {refused} calls refused, "
                 f"after {micros(overload.get('failure_latency_seconds', {}).get('p50', 0))} us p50 as the caller sees it)",
                 f"{goodput:.2f}", f">= {GOODPUT}", verdict(goodput >= GOODPUT)])
    return rows


def section(results: dict[str, dict], machine: dict) -> list[str]:
    first = results["apply-unix"]
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores ({', '.join(machine['isa'])}), {machine['memory_gib']} GiB of memory, "
        f"{first['started'][:10]}; `scripts/bench --transport`: dim {first['server']['dim']}, hc {first['server']['hc']}, "
        f"{first['server']['layers']} engram layers, f32 highway. Server, echo and callers share this machine. Ratios are "
        f"medians of {first['rounds']} rounds in turn.",
        "",
    ]
    lines += table(["call", "over", "tokens", "callers", "calls/s", "GB/s up / down", "echo's", "of the echo", "p50 us",
                    "echo's", "times the echo's", "p99 us", "compute us", "failed"], echo_rows(results))
    return lines + table(["what", "is", "target", ""], other_rows(results))


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    folder, docs = map(pathlib.Path, sys.argv[1:])
    page = docs / "performance.md"
    text = page.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        sys.exit(f"bench_transport_report: {page} must have the lines '{BEGIN}' and '{END}' once each, in this order")
    names = [f"{kind}-{path}" for kind in NAMES for path in PATHS]
    names += [f"{kind}-{i}" for kind in ("many", "one") for i in (1, 2, 3)] + ["peak", "overload"]
    try:
        results = {name: json.loads((folder / f"{name}.json").read_text()) for name in names}
        machine = json.loads((folder / "machine.json").read_text())
    except FileNotFoundError as error:
        sys.exit(f"bench_transport_report: no {error.filename}: run scripts/bench --transport first")
    lines = section(results, machine)
    head, rest = text.split(BEGIN)
    tail = rest.split(END)[1]
    page.write_text(head + BEGIN + "\n\n" + "\n".join(lines) + "\n" + END + tail)
    print("\n" + "\n".join(lines) + f"\nwrote {page}")


if __name__ == "__main__":
    main()
