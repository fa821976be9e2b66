#!/usr/bin/env python3
"""scripts/gpu-check carry and server without a GPU: the real programs, and a module that computes on the host.

    gpu_check_server_test.py PROGRAM_DIRECTORY MODULE
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

import gpu_check_test

PROGRAMS, MODULE = sys.argv.pop(1), sys.argv.pop(1)


class Server(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        nvidia_smi = self.folder / "nvidia-smi"
        nvidia_smi.write_text(gpu_check_test.NVIDIA_SMI, encoding="utf-8")
        nvidia_smi.chmod(0o755)
        self.carried = self.folder / "carried"
        run = self.run_script("carry", "--programs", PROGRAMS, str(self.carried))
        self.assertEqual(run.returncode, 0, run)

    def run_script(self, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
        environment = dict(os.environ, PATH=f"{self.folder}:{os.environ['PATH']}", SIMT_DEVICE_BYTES="1000000000",
                           ENGRAM_MAX_BATCH_TOKENS="256", ENGRAM_PREPARE_MEMORY_BYTES="16MiB", **settings)
        return subprocess.run([gpu_check_test.SCRIPT, *arguments], capture_output=True, text=True, check=False,
                              env=environment)

    def serve(self, **settings: str) -> tuple[subprocess.CompletedProcess[str], str]:
        out = self.folder / "out"
        run = self.run_script("server", "--quick", "--module", MODULE, "--out", str(out), str(self.carried), **settings)
        return run, (out / "gpu-results.md").read_text(encoding="utf-8")

    def test_what_is_carried_is_all_but_the_c_library(self) -> None:
        names = {path.name for path in (self.carried / "lib").iterdir()}
        self.assertTrue(any(name.startswith("libgrpc++") for name in names), names)
        self.assertTrue(any(name.startswith("libstdc++") for name in names), names)
        for name in names:
            self.assertIsNone(re.match(r"ld-linux|lib(c|m|dl|pthread|cuda|cublasLt)\.so", name), name)

    def test_both_residencies_are_checked_measured_and_written_behind_the_kernels(self) -> None:
        (self.folder / "out").mkdir()
        (self.folder / "out" / "gpu-results.md").write_text("# Kept\n\n## Server\n\nold\n", encoding="utf-8")
        run, results = self.serve()
        self.assertEqual(run.returncode, 0, run)
        self.assertTrue(results.startswith("# Kept\n\n## Server\n\n| what |"), results)
        self.assertNotIn("old", results)
        for residency in ("device", "host"):
            for line in (f"PASS known results of tests/data/tiny, --residency {residency}",
                         f"PASS replies of the made-up model recomputed, --residency {residency}",
                         f"### engram-bench --prepare, --residency {residency}", f"cuda sm_90, tables in {residency}"):
                self.assertIn(line, results)

    def test_a_server_that_does_not_start_is_told(self) -> None:
        run, results = self.serve(SIMT_DRIVER="0")
        self.assertEqual(run.returncode, 1, run)
        self.assertIn("FAIL server with tiny.gguf, --residency device: engram-server: --backend cuda: no CUDA driver", results)


if __name__ == "__main__":
    unittest.main()
