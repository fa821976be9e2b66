#!/usr/bin/env python3
"""Turns results of the benchmarks into the tables of docs/performance.md and a plot beside it.

    bench_report.py machine                 what this machine is, as JSON
    bench_report.py write RESULTS DOCS      RESULTS/*.json -> DOCS/performance.md (between its markers) and
                                            DOCS/performance-growth.svg

scripts/bench runs both. Standard library only.
"""

import datetime
import json
import math
import pathlib
import re
import sys

import bench_plot

BEGIN = "<!-- figures: scripts/bench writes from here -->"
END = "<!-- figures: to here -->"

# The targets of docs/performance.md, by tokens: times the faster of the peers named, in the same run.
PROJECTION_TARGETS = {
    1: (1.0, ("ggml",)),
    4: (1.5, ("ggml", "onednn")),
    8: (1.3, ("ggml", "onednn")),
    16: (1.0, ("ggml", "onednn")),
    64: (0.95, ("onednn",)),
    256: (0.95, ("onednn",)),
}
HASH_TARGET = 5e6  # tokens/s and thread
# Of touching one byte of each row, 8 GiB table: 15 M rows/s where 2 threads touch 70 M, 30 M where they touch 110 M.
GATHER_TARGETS = {"4KiB": 15 / 70, "huge": 30 / 110}
GATE_TARGET = 0.7  # of copying, from 256 tokens on

MICROSECONDS = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6}
NOT_COUNTERS = {"real_time", "cpu_time", "iterations", "threads", "repetitions", "repetition_index", "family_index",
                "per_family_instance_index"}


class Figures:
    """The best of all runs of each benchmark: its microseconds, and its counters in that run."""

    def __init__(self, results: pathlib.Path):
        self.time: dict[str, float] = {}
        self.counters: dict[str, dict[str, float]] = {}
        self.limits: dict[str, float] = {}
        self.loads: list[float] = []
        self.dates: list[str] = []
        for path in sorted(results.glob("*.json")):
            if path.name != "machine.json":
                self._read(json.loads(path.read_text()))

    def _read(self, run: dict) -> None:
        self.loads += run["context"].get("load_avg", [])[:1]
        self.dates.append(run["context"]["date"])
        for entry in run["benchmarks"]:
            if entry.get("run_type") != "iteration" or entry.get("error_occurred"):
                continue
            name = re.sub(r"/(real|manual)_time$", "", entry["run_name"])
            counters = {key: value for key, value in entry.items()
                        if isinstance(value, (int, float)) and key not in NOT_COUNTERS}
            if name.startswith("limits/"):
                for key, value in counters.items():
                    self.limits[key] = max(self.limits.get(key, 0.0), value)
                continue
            time = entry["real_time"] * MICROSECONDS[entry["time_unit"]]
            if name not in self.time or time < self.time[name]:
                self.time[name], self.counters[name] = time, counters

    def series(self, prefix: str) -> dict[int, float]:
        """Microseconds by the number that ends the name."""
        pattern = re.compile(re.escape(prefix) + r"/(\d+)$")
        found = {int(match[1]): time for name, time in self.time.items() if (match := pattern.match(name))}
        return dict(sorted(found.items()))

    def projections(self, geometry: str) -> dict[str, dict[int, float]]:
        """Of each implementation, ours by source type and peers by library."""
        names = sorted({name.split("/")[0] for name in self.time if name.startswith("project_")})
        return {name[len("project_"):]: self.series(f"{name}/{geometry}") for name in names}


def describe_machine() -> dict:
    cpu = pathlib.Path("/proc/cpuinfo").read_text()
    memory = pathlib.Path("/proc/meminfo").read_text()

    def field(text: str, name: str) -> str:
        match = re.search(rf"^{name}\s*:\s*(.*)$", text, re.MULTILINE)
        return match[1] if match else ""

    flags = set(field(cpu, "flags").split())
    isa = [flag for flag in ("avx2", "fma", "avx512f", "avx512bw", "avx512_bf16", "amx_bf16") if flag in flags]
    family, model = field(cpu, "cpu family"), field(cpu, "model")
    return {
        "cpu": field(cpu, "model name") + (f" (family {family}, model {model})" if family else ""),
        "cores": len(re.findall(r"^processor\s*:", cpu, re.MULTILINE)),
        "isa": isa,
        "memory_gib": round(int(field(memory, "MemTotal").split()[0]) / 2**20),
    }


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows] + [""]


def number(value: float | None) -> str:
    """Three significant digits; a dash for what was not measured."""
    if value is None:
        return "–"
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{round(value, digits):,.{digits}f}"


def ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def verdict(value: float | None, target: float, small: bool = False) -> str:
    if value is None or small:  # targets are of the released geometry
        return "–"
    return "met" if value >= target else "**missed**"


def limits_table(figures: Figures) -> list[str]:
    limit = figures.limits
    rows = [
        ["reading memory", number(limit["read_GB/s"]) + " GB/s"],
        ["copying, read and written together", number(limit["copy_GB/s"]) + " GB/s"],
        ["one byte at random places of a 2.1 GB table", number(limit["touch_M/s"]) + " M/s"],
        ["bf16 multiply-add, 2 operations each", number(limit["bf16_GFLOP/s"]) + " GFLOP/s"],
    ]
    return ["### Limits", ""] + table(["what the machine does at best, all threads", ""], rows)


def hash_table(figures: Figures, geometry: str, threads: int) -> list[str]:
    rows = []
    for tokens, time in figures.series(f"hash/{geometry}").items():
        rate = tokens / time * 1e6
        # Few tokens are one thread's work (a grain is 32 tokens).
        busy = max(1, min(threads, tokens // 32))
        rows.append([str(tokens), number(time), number(rate / 1e6), number(rate / busy / 1e6),
                     verdict(rate / busy, HASH_TARGET) if tokens >= 16 else ""])
    return ["### Hash: 2 layers × 24 columns", ""] + table(
        ["T", "µs", "M tokens/s", "per busy thread", f"target {HASH_TARGET / 1e6:.0f} M"], rows)


def gather_table(figures: Figures, geometry: str) -> list[str]:
    rows = []
    for tokens, time in figures.series(f"gather/{geometry}").items():
        rate = figures.counters[f"gather/{geometry}/{tokens}"]["rows/s"] / 1e6
        rows.append([str(tokens), number(time), number(rate), ratio(rate / figures.limits["touch_M/s"])])
    return ["### Gather: 24 rows a token, 2.1 GB table", ""] + table(
        ["T", "µs", "M rows/s", "of touching one byte each"], rows)


def projection_table(figures: Figures, geometry: str, outputs: int, inputs: int) -> list[str]:
    all_ = figures.projections(geometry)
    peers = {name: times for name, times in all_.items() if name.startswith(("onednn", "ggml"))}
    ours = {name: times for name, times in all_.items() if name not in peers}
    q2k = next((times for name, times in ours.items() if name.startswith("q2k")), {})
    bf16 = next((times for name, times in ours.items() if name.startswith("bf16")), {})
    header = ["T", "Q2_K, µs", "limit, µs", "limit / ours", "bf16, µs"]
    header += [f"{name.replace('_', ' ')}, µs" for name in peers] + ["the better peer / ours", "target", ""]
    rows = []
    for tokens, time in q2k.items():
        read = outputs * inputs / 256 * 84 / (figures.limits["read_GB/s"] * 1e3)
        peak = figures.limits["bf16_GFLOP/s"]
        limit = max(read, 2 * outputs * inputs * tokens / (peak * 1e3) if peak else 0)
        target, against = PROJECTION_TARGETS.get(tokens, (None, ()))
        rivals = [times[tokens] for name, times in peers.items() if name.startswith(against or ("onednn", "ggml"))
                  and tokens in times]
        better = min(rivals) / time if rivals else None
        rows.append([str(tokens), number(time), number(limit), ratio(limit / time), number(bf16.get(tokens))]
                    + [number(times.get(tokens)) for times in peers.values()]
                    + [ratio(better), "" if target is None else f"{target:g} × {' or '.join(against)}",
                       "" if target is None else verdict(better, target, geometry == "small")])
    return [f"### Projection: [T, {inputs}] × [{inputs}, {outputs}]", ""] + table(header, rows)


def gate_table(figures: Figures, geometry: str, dim: int, copies: int) -> list[str]:
    rows = []
    for tokens, time in figures.series(f"gate/{geometry}").items():
        moved = tokens * (copies * dim * 8 + dim * (copies + 1) * 2) / (time * 1e3)  # GB/s
        share = moved / figures.limits["copy_GB/s"]
        rows.append([str(tokens), number(time), number(time / tokens), number(moved), ratio(share),
                     verdict(share, GATE_TARGET, geometry == "small") if tokens >= 256 else ""])
    return ["### Gate: f32 highway", ""] + table(
        ["T", "µs", "µs a token", "GB/s", "of copying", f"target {GATE_TARGET:g}"], rows)


def step_table(figures: Figures) -> list[str]:
    rows = []
    for form in ("highway_f32", "kv", "rows_native", "prepared"):
        for tokens, time in figures.series(f"step/{form}").items():
            counters = figures.counters[f"step/{form}/{tokens}"]
            rows.append([form, str(tokens), number(time), number(time / tokens)]
                        + [number(counters.get(stage) or None) for stage in ("hash", "gather", "project", "gate")])
    return ["### A whole step, both layers", ""] + table(
        ["form", "T", "µs", "µs a token", "of it hash", "gather", "project", "gate"], rows)


def growth_tables(figures: Figures) -> list[str]:
    lines = []
    sizes = figures.series("gather_growth/4KiB") | figures.series("gather_growth/huge")
    if sizes:
        rows = []
        for size in sorted(sizes):
            row = [f"{size} GiB"]
            for pages in ("4KiB", "huge"):
                counters = figures.counters.get(f"gather_growth/{pages}/{size}", {})
                rate, touch = counters.get("rows/s"), counters.get("touch_M/s")
                share = rate / 1e6 / touch if rate and touch else None
                row += [number(rate and rate / 1e6), number(touch), ratio(share)]
                row.append(verdict(share, GATHER_TARGETS[pages]) if size == 8 else "")
            rows.append(row)
        lines += ["### Gather as the table grows, T = 256", ""] + table(
            ["table", "4 KiB pages, M rows/s", "touch, M/s", "share", f"target {GATHER_TARGETS['4KiB']:.2f}", "huge pages, M rows/s",
             "touch, M/s", "share", f"target {GATHER_TARGETS['huge']:.2f}"], rows)
    rows = []
    for name in sorted((n for n in figures.time if n.startswith("commit/")),
                       key=lambda n: [int(part) for part in n.split("/")[1:]]):
        _, sessions, claims = name.split("/")
        time = figures.time[name]
        rows.append([f"{int(sessions):,}", claims, number(time), number(time / int(claims))])
    lines += ["### Commit, as sessions are open", ""] + table(
        ["sessions open", "sequences in the call", "µs", "µs a sequence"], rows)
    return lines


def write_report(results: pathlib.Path, docs: pathlib.Path) -> None:
    page = docs / "performance.md"
    text = page.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        sys.exit(f"bench_report: {page} must have the lines '{BEGIN}' and '{END}' once each, in this order")
    figures = Figures(results)
    if not figures.limits:
        sys.exit(f"bench_report: no limits among the results in {results}: run scripts/bench first")
    machine = json.loads((results / "machine.json").read_text())
    small = not any("/released/" in name for name in figures.time)
    geometry, dim, copies, columns = ("small", 64, 4, 3) if small else ("released", 5120, 4, 24)
    date = datetime.datetime.fromisoformat(min(figures.dates)).date()
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores ({', '.join(machine['isa'])}), {machine['memory_gib']} GiB of memory; "
        f"{date}, `scripts/bench`. Load average when runs began: {min(figures.loads):.1f} to {max(figures.loads):.1f}. "
        "Of every figure the best run counts, for limits and peers as for ours.",
        "",
    ]
    lines += limits_table(figures) + hash_table(figures, geometry, machine["cores"]) + gather_table(figures, geometry)
    lines += projection_table(figures, geometry, dim * (copies + 1), columns * 256)
    lines += gate_table(figures, geometry, dim, copies) + step_table(figures) + growth_tables(figures)
    lines += ["![Growth over tokens, table size and sessions](performance-growth.svg)", ""]
    head, rest = text.split(BEGIN)
    tail = rest.split(END)[1]
    page.write_text(head + BEGIN + "\n\n" + "\n".join(lines) + "\n" + END + tail)

    steps = {form: {t: time / t for t, time in figures.series(f"step/{form}").items()}
             for form in ("highway_f32", "kv", "prepared", "rows_native")}
    rates = {pages: {size: figures.counters[f"gather_growth/{pages}/{size}"]["rows/s"] / 1e6
                     for size in figures.series(f"gather_growth/{pages}")} for pages in ("huge", "4KiB")}
    commits = {f"{claims} in a call": {int(n.split("/")[1]): time / claims for n, time in figures.time.items()
                                       if re.fullmatch(rf"commit/\d+/{claims}", n)} for claims in (1, 10)}
    (docs / "performance-growth.svg").write_text(bench_plot.draw([
        bench_plot.Panel("step: µs a token", "tokens in the step", steps),
        bench_plot.Panel("gather: M rows/s", "GiB of table", rates, log_y=False),
        bench_plot.Panel("commit: µs a sequence", "sessions open", commits, log_y=False),
    ]))
    print(f"wrote {page} and {docs / 'performance-growth.svg'}")


def main() -> None:
    match sys.argv[1:]:
        case ["machine"]:
            print(json.dumps(describe_machine(), indent=1))
        case ["write", results, docs]:
            write_report(pathlib.Path(results), pathlib.Path(docs))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
