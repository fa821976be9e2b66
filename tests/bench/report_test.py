#!/usr/bin/env python3
"""What scripts/bench does with results, on real ones of the small geometry.

    report_test.py KERNELS_BENCH STEP_BENCH
"""

import pathlib
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree

ROOT = pathlib.Path(__file__).resolve().parents[2]
REPORT = ROOT / "scripts" / "bench_report.py"
KERNELS, STEP = sys.argv.pop(1), sys.argv.pop(1)


def write(results: pathlib.Path, docs: pathlib.Path) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-B", str(REPORT), "write", str(results), str(docs)],
                          capture_output=True, text=True, check=False)


class ReportTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.results = pathlib.Path(folder.name)
        for name, program, wanted in (("kernels-1", KERNELS, "/small/(0|1|16)/"), ("step-1", STEP, "/(1|10)/")):
            subprocess.run([program, f"--benchmark_filter={wanted}", "--benchmark_min_time=0.001",
                            f"--benchmark_out={cls.results / name}.json", "--benchmark_out_format=json"],
                           stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
        machine = subprocess.run([sys.executable, "-B", str(REPORT), "machine"], capture_output=True, check=True)
        (cls.results / "machine.json").write_bytes(machine.stdout)

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.docs = pathlib.Path(folder.name)

    def test_tables_stand_between_the_markers_and_what_is_around_them_stays(self) -> None:
        page = self.docs / "performance.md"
        original = (ROOT / "docs" / "performance.md").read_text()
        begin, end = (f"<!-- figures: {what} -->" for what in ("scripts/bench writes from here", "to here"))
        page.write_text(original)
        for _ in range(2):  # the second time over its own tables
            done = write(self.results, self.docs)
            self.assertEqual(done.returncode, 0, done.stderr)
        text = page.read_text()
        self.assertEqual(text.split(begin)[0], original.split(begin)[0])
        self.assertEqual(text.split(end)[1], original.split(end)[1])
        tables = text.split(begin)[1].split(end)[0]
        for heading in ("Limits", "Hash", "Gather", "Projection", "Gate", "A whole step", "Commit"):
            self.assertRegex(tables, rf"### {heading}[^\n]*\n\n\|[^\n]*\n\|[-|]+\n\| ", f"a table with rows: {heading}")
        plot = xml.etree.ElementTree.parse(self.docs / "performance-growth.svg").getroot()
        self.assertTrue(plot.findall("{http://www.w3.org/2000/svg}polyline"), "the plot has lines")

    def test_a_page_without_its_markers_is_left_alone(self) -> None:
        page = self.docs / "performance.md"
        page.write_text("# Performance\n")
        done = write(self.results, self.docs)
        self.assertEqual(done.returncode, 1)
        self.assertIn("must have the lines", done.stderr)
        self.assertEqual(page.read_text(), "# Performance\n")


if __name__ == "__main__":
    unittest.main()
