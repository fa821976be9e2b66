#!/usr/bin/env python3
"""What scripts/bench --transport does with results, on real ones of a tiny model.

    transport_report_test.py SERVER BENCH MODEL
"""

import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
SERVER, BENCH, MODEL = sys.argv.pop(1), sys.argv.pop(1), sys.argv.pop(1)


def measure(results: pathlib.Path, folder: pathlib.Path) -> None:
    """Every file that the report reads, each kind measured once."""
    socket = f"unix:{folder}/engram.sock"
    with open(folder / "server.out", "wb") as out:
        server = subprocess.Popen([SERVER, "--model", MODEL, "--listen", socket, "--http-listen", "127.0.0.1:0",
                                   "--drain-delay-secs", "0", "--max-queue-tokens", "64"],
                                  stdout=out, stderr=subprocess.STDOUT)
    try:
        metrics = ""
        for _ in range(600):
            lines = (folder / "server.out").read_text().splitlines()
            if "ready" in lines:
                prefix = "metrics on http://"
                metrics = next(line for line in lines if line.startswith(prefix))[len(prefix):-len("/metrics")]
                break
            time.sleep(0.05)
        common = [BENCH, "--target", socket, "--metrics", metrics, "--duration", "0.1", "--warmup", "0"]
        echo = ["--baseline", "echo", "--rounds", "1", "--concurrency", "1,8"]
        for name, more in (("apply-unix", echo + ["--prepare", "--tokens-per-call", "1,4"]),
                           ("rows-unix", echo + ["--form", "rows-native", "--tokens-per-call", "1,64"]),
                           ("many-1", ["--concurrency", "16"]),
                           ("one-1", ["--tokens-per-call", "16"]),
                           ("peak", ["--concurrency", "8"]),
                           ("overload", ["--rate", "2000"])):
            subprocess.run(common + more + ["--json", str(results / f"{name}.json")], stdout=subprocess.DEVNULL,
                           stderr=subprocess.DEVNULL, check=True)
    finally:
        server.terminate()
        server.wait(60)
    for kind in ("apply", "rows"):
        shutil.copy(results / f"{kind}-unix.json", results / f"{kind}-tcp.json")
    for kind in ("many", "one"):
        for number in (2, 3):
            shutil.copy(results / f"{kind}-1.json", results / f"{kind}-{number}.json")


class TransportReportTest(unittest.TestCase):
    def test_the_page_gets_its_tables_between_the_markers_and_keeps_the_rest(self):
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            results, docs = folder / "results", folder / "docs"
            results.mkdir()
            docs.mkdir()
            measure(results, folder)
            machine = subprocess.run([sys.executable, "-B", SCRIPTS / "bench_report.py", "machine"], check=True,
                                     capture_output=True, text=True).stdout
            (results / "machine.json").write_text(machine)
            before = (ROOT / "docs/performance.md").read_text()
            (docs / "performance.md").write_text(before)
            command = [sys.executable, "-B", SCRIPTS / "bench_transport_report.py", results, docs]
            printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            after = (docs / "performance.md").read_text()

            begin, end = "<!-- transport: scripts/bench --transport writes from here -->", "<!-- transport: to here -->"
            self.assertEqual(before.split(begin)[0], after.split(begin)[0])
            self.assertEqual(before.split(end)[1], after.split(end)[1])
            section = after.split(begin)[1].split(end)[0]
            self.assertIn(section.strip(), printed)
            self.assertEqual(section.count("| Apply by ticket, highway |"), 8)
            self.assertEqual(section.count("| Lookup, rows-native |"), 8)
            self.assertIn("16 clients of one token", section)
            self.assertIn("three times the peak's rate", section)
            point = json.loads((results / "apply-unix.json").read_text())["points"][0]
            self.assertIn(f" | {point['echo']['throughput_ratio']:.2f} | ", section)
            self.assertNotIn("nan", section)

            subprocess.run(command, check=True, capture_output=True)
            self.assertEqual((docs / "performance.md").read_text(), after, "writing twice changes nothing")

    def test_a_missing_result_is_named(self):
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            shutil.copy(ROOT / "docs/performance.md", folder)
            run = subprocess.run([sys.executable, "-B", SCRIPTS / "bench_transport_report.py", folder, folder],
                                 capture_output=True, text=True, check=False)
            self.assertNotEqual(run.returncode, 0)
            self.assertIn("apply-unix.json: run scripts/bench --transport first", run.stderr)


if __name__ == "__main__":
    unittest.main()
