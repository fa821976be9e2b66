#!/usr/bin/env python3
"""What scripts/bench --worker does with results, on real ones of a tiny model.

    worker_report_test.py SERVER BENCH MODEL
"""

import pathlib
import subprocess
import sys
import tempfile
import time
import unittest
import xml.etree.ElementTree

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
SERVER, BENCH, MODEL = sys.argv.pop(1), sys.argv.pop(1), sys.argv.pop(1)


def measure(results: pathlib.Path, folder: pathlib.Path) -> None:
    socket = f"unix:{folder}/engram.sock"
    with open(folder / "server.out", "wb") as out:
        server = subprocess.Popen([SERVER, "--model", MODEL, "--listen", socket, "--http-listen", "127.0.0.1:0",
                                   "--drain-delay-secs", "0"], stdout=out, stderr=subprocess.STDOUT)
    try:
        metrics = ""
        for _ in range(600):
            lines = (folder / "server.out").read_text().splitlines()
            if "ready" in lines:
                prefix = "metrics on http://"
                metrics = next(line for line in lines if line.startswith(prefix))[len(prefix):-len("/metrics")]
                break
            time.sleep(0.05)
        common = [BENCH, "worker", "--target", socket, "--metrics", metrics, "--duration", "0.2", "--warm-up", "0",
                  "--batch", "2", "--workers", "1,2", "--tp", "2"]
        for name, more in (("broadcast", ["--form", "rows-native,rows-bf16,kv,update", "--fanout", "broadcast",
                                          "--baseline", "local", "--model", MODEL]),
                           ("slice", ["--form", "rows-native", "--fanout", "slice"])):
            subprocess.run(common + more + ["--json", str(results / f"{name}.json")], stdout=subprocess.DEVNULL, check=True)
    finally:
        server.terminate()
        server.wait()
    machine = subprocess.run([sys.executable, "-B", str(SCRIPTS / "bench_report.py"), "machine"], capture_output=True,
                             check=True)
    (results / "machine.json").write_bytes(machine.stdout)


def write(results: pathlib.Path, docs: pathlib.Path) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-B", str(SCRIPTS / "bench_worker_report.py"), str(results), str(docs)],
                          capture_output=True, text=True, check=False)


class WorkerReportTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.results = pathlib.Path(folder.name) / "results"
        cls.results.mkdir()
        measure(cls.results, pathlib.Path(folder.name))

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.docs = pathlib.Path(folder.name)

    def test_the_table_stands_between_the_markers_and_what_is_around_them_stays(self) -> None:
        page = self.docs / "performance.md"
        original = (ROOT / "docs" / "performance.md").read_text()
        begin, end = (f"<!-- worker: {what} -->" for what in ("scripts/bench --worker writes from here", "to here"))
        page.write_text(original)
        for _ in range(2):  # the second time over its own table
            done = write(self.results, self.docs)
            self.assertEqual(done.returncode, 0, done.stderr)
        text = page.read_text()
        self.assertEqual(text.split(begin)[0], original.split(begin)[0])
        self.assertEqual(text.split(end)[1], original.split(end)[1])
        rows = [line for line in text.split(begin)[1].split(end)[0].splitlines() if line.startswith("| ")]
        # A header, 4 forms by 2 numbers of workers, each at a server and in the own process; slices of one form.
        self.assertEqual(len(rows), 1 + 4 * 2 * 2 + 2)
        self.assertEqual(len({row.count("|") for row in rows}), 1, "every row has as many cells")
        plot = xml.etree.ElementTree.parse(self.docs / "performance-worker.svg").getroot()
        self.assertEqual(len(plot.findall("{http://www.w3.org/2000/svg}polyline")), 3 + 2 + 4)

    def test_without_results_or_markers_nothing_is_written(self) -> None:
        page = self.docs / "performance.md"
        page.write_text("# Performance\n")
        self.assertIn("must have the lines", write(self.results, self.docs).stderr)
        self.assertEqual(page.read_text(), "# Performance\n")
        page.write_text((ROOT / "docs" / "performance.md").read_text())
        self.assertIn("run scripts/bench --worker first", write(self.docs, self.docs).stderr)
        self.assertFalse((self.docs / "performance-worker.svg").exists())


if __name__ == "__main__":
    unittest.main()
