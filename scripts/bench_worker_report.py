#!/usr/bin/env python3
"""Turns results of scripts/bench --worker into its part of docs/performance.md and a plot beside it.

    bench_worker_report.py RESULTS DOCS     RESULTS/{broadcast,slice,machine}.json -> DOCS/performance.md (between its
                                            markers) and DOCS/performance-worker.svg

scripts/bench_worker runs it. Standard library only.
"""

import json
import pathlib
import sys

import bench_plot
from bench_report import number, table

BEGIN = "<!-- worker: scripts/bench --worker writes from here -->"
END = "<!-- worker: to here -->"

# The plot's least slowdown, percent: its axis is logarithmic.
LEAST_PERCENT = 0.1


def name_of(run: dict, fanout: str) -> str:
    if run["table"] == "local":
        return f"{run['form']}, own process"
    return run["form"] if fanout == "broadcast" else f"{run['form']}, a slice a rank"


def megabytes(count: float) -> str:
    return number(count / 1e6)


def percent(share: float | None) -> str:
    return "–" if share is None else f"{share * 100:.1f} %"


def row(run: dict, fanout: str) -> list[str]:
    local = run["table"] == "local"
    waits = [f"{layer['exposed_ms']['p50']:.2f} / {layer['exposed_ms']['p99']:.2f}" for layer in run["layers"]]
    return [name_of(run, fanout), str(run["workers"]), number(run["tokens_per_second"]),
            number(run["emitted_per_second"]), percent(run["hidden"]), *waits, percent(run["slowdown"]),
            "–" if local else megabytes(run["bytes_up_per_step"]), "–" if local else megabytes(run["bytes_down_per_step"]),
            percent(run.get("engine_busy")), percent(run.get("machine_busy")), str(sum(run["errors"].values())),
            run["bound_by"]]


def section(results: dict[str, dict], machine: dict) -> list[str]:
    options = results["broadcast"]["options"]
    layers = [layer["layer"] for layer in results["broadcast"]["runs"][0]["layers"]]
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores ({', '.join(machine['isa'])}), {machine['memory_gib']} GiB of memory; "
        f"`scripts/bench --worker`: {results['broadcast']['server']}; server and workers share this machine, over a unix "
        f"socket. Steps of {options['step_ms']:g} ms, {options['depth']} layers, {options['batch']} sequences of 1 + "
        f"{options['spec_k']} tokens, drafts accepted at {options['accept']:g}, at most {options['prefill_chunk']} prompt "
        f"tokens in a step, {options['dtype']} highway, {options['duration_secs']:g} s a run. {options['tp']} ranks: one "
        "fetches for all, except where a slice a rank is written.",
        "",
    ]
    header = ["form", "workers", "tokens/s", "of them emitted", "hidden"]
    header += [f"wait at layer {layer}, p50 / p99 ms" for layer in layers]
    header += ["slowdown", "MB up a step", "MB down", "engine busy", "processors busy", "errors", "bound by"]
    runs = [(run, fanout) for fanout, result in results.items() for run in result["runs"]]
    # Of one form all lines together, in the order of the first run.
    forms = list(dict.fromkeys(run["form"] for run, _ in runs))
    names = list(dict.fromkeys(name_of(run, fanout) for form in forms for run, fanout in runs if run["form"] == form))
    rows = [row(run, fanout) for name in names for run, fanout in runs if name_of(run, fanout) == name]
    return lines + table(header, rows) + ["![Slowdown by workers on one server](performance-worker.svg)", ""]


def plot(results: dict[str, dict]) -> str:
    def panel(title: str, forms: tuple[str, ...]) -> bench_plot.Panel:
        lines: dict[str, dict[int, float]] = {}
        for fanout, result in results.items():
            for run in result["runs"]:
                if run["form"] in forms:
                    slowdown = max(run["slowdown"] * 100, LEAST_PERCENT)
                    lines.setdefault(name_of(run, fanout), {})[run["workers"]] = slowdown
        return bench_plot.Panel(title, "workers on one server", dict(list(lines.items())[:4]))

    return bench_plot.draw([
        panel("native rows: slowdown, %", ("rows-native",)),
        panel("bf16 rows: slowdown, %", ("rows-bf16",)),
        panel("kv, update: slowdown, %", ("kv", "update")),
    ])


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    folder, docs = map(pathlib.Path, sys.argv[1:])
    page = docs / "performance.md"
    text = page.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        sys.exit(f"bench_worker_report: {page} must have the lines '{BEGIN}' and '{END}' once each, in this order")
    try:
        results = {name: json.loads((folder / f"{name}.json").read_text()) for name in ("broadcast", "slice")}
        machine = json.loads((folder / "machine.json").read_text())
    except FileNotFoundError as error:
        sys.exit(f"bench_worker_report: no {error.filename}: run scripts/bench --worker first")
    head, rest = text.split(BEGIN)
    tail = rest.split(END)[1]
    page.write_text(head + BEGIN + "\n\n" + "\n".join(section(results, machine)) + "\n" + END + tail)
    (docs / "performance-worker.svg").write_text(plot(results))
    print(f"wrote {page} and {docs / 'performance-worker.svg'}")


if __name__ == "__main__":
    main()
