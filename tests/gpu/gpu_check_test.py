#!/usr/bin/env python3
"""scripts/gpu-check without a GPU: where there is none, and, with programs that stand in, what it writes and says.

    gpu_check_test.py [PROGRAM DIRECTORY]

PROGRAM DIRECTORY holds gpu_test and gpu_bench, where the CUDA toolkit built them. Standard library only.
"""

import os
import pathlib
import shutil
import stat
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "gpu-check"
NAMED = __name__ == "__main__" and len(sys.argv) > 1 and not sys.argv[1].startswith("-")
PROGRAMS = pathlib.Path(sys.argv.pop(1)) if NAMED else None

NVIDIA_SMI = """#!/bin/sh
case "$*" in
  -L) echo "GPU 0: Stand-in" ;;
  *compute_cap*) echo 9.0 ;;
  *) echo "stand-in" ;;
esac
"""
GPU_TEST = """#!/bin/sh
echo "PASS of $*"
"""
GPU_BENCH = """#!/bin/sh
printf '### Bars\\n\\n| what | bar | measured | met |\\n| --- | --- | --- | --- |\\n| gate | 0.8 | 0.9 | yes |\\n'
"""
COMPUTE_SANITIZER = """#!/bin/sh
while [ "$1" != --error-exitcode ]; do shift; done
shift 2
exec "$@"
"""


def has_device() -> bool:
    return shutil.which("nvidia-smi") is not None or bool(list(pathlib.Path("/dev").glob("nvidia[0-9]*")))


class GpuCheck(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.out = self.folder / "out"
        for name, text in {"nvidia-smi": NVIDIA_SMI, "compute-sanitizer": COMPUTE_SANITIZER, "gpu_test": GPU_TEST,
                           "gpu_bench": GPU_BENCH}.items():
            self.program(name, text)

    def program(self, name: str, text: str) -> None:
        path = self.folder / name
        path.write_text(text, encoding="utf-8")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def run_script(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = dict(os.environ, PATH=f"{self.folder}:{os.environ['PATH']}")
        return subprocess.run([SCRIPT, *arguments], capture_output=True, text=True, check=False, env=environment)

    def check(self, *more: str) -> tuple[subprocess.CompletedProcess[str], str]:
        """A run with the programs that stand in, and what it wrote."""
        run = self.run_script("--out", str(self.out), "--programs", str(self.folder), *more)
        results = self.out / "gpu-results.md"
        return run, results.read_text(encoding="utf-8") if results.exists() else ""

    def test_is_sound_bash(self) -> None:
        self.assertEqual(subprocess.run(["bash", "-n", SCRIPT], check=False).returncode, 0)

    def test_help_and_wrong_arguments(self) -> None:
        self.assertEqual(self.run_script("--help").returncode, 0)
        for arguments, what in ((["--frob"], "--frob"), (["--limit", "x"], "--limit"), (["carry"], "folder"),
                                (["server", "--out"], "--out"), (["somewhere"], "somewhere")):
            run = self.run_script(*arguments)
            self.assertEqual(run.returncode, 2, run)
            self.assertIn(what, run.stderr)

    @unittest.skipIf(has_device(), "this machine has a device")
    def test_without_a_device_is_exit_three_and_writes_nothing(self) -> None:
        (self.folder / "nvidia-smi").unlink()
        for arguments in ([], ["server", str(self.folder)]):
            run = self.run_script("--out", str(self.out), *arguments) if not arguments else self.run_script(
                *arguments, "--out", str(self.out))
            self.assertEqual(run.returncode, 3, run)
            self.assertRegex(run.stderr, "gpu-check: no device: .*nvidia-smi")
            self.assertFalse(self.out.exists())

    def test_a_driver_without_a_device_is_exit_three(self) -> None:
        self.program("nvidia-smi", "#!/bin/sh\necho 'No devices were found'\nexit 6\n")
        run, results = self.check()
        self.assertEqual((run.returncode, results), (3, ""))
        self.assertIn("No devices were found", run.stderr)

    def test_a_device_that_only_nvidia_smi_sees_is_exit_three(self) -> None:
        self.program("gpu_test", "#!/bin/sh\necho 'gpu_test: no device: CUDA error 803' >&2\nexit 3\n")
        run, results = self.check()
        self.assertEqual((run.returncode, results), (3, ""))
        self.assertIn("CUDA error 803", run.stderr)

    def test_what_passes_is_written(self) -> None:
        run, results = self.check()
        self.assertEqual(run.returncode, 0, run)
        for line in ("PASS gpu_test (", "PASS gpu_bench (", "PASS compute-sanitizer memcheck", "PASS compute-sanitizer racecheck",
                     "| device | stand-in", "| gate | 0.8 | 0.9 | yes |", "| revision | "):
            self.assertIn(line, results)
        self.assertIn("| gate | 0.8 | 0.9 | yes |", run.stdout)
        self.assertNotIn("What failed", results)

    def test_what_fails_is_written_and_told(self) -> None:
        self.program("gpu_test", '#!/bin/sh\necho "FAIL rows: value 7"\nexit 1\n')
        run, results = self.check()
        self.assertEqual(run.returncode, 1, run)
        for line in ("FAIL gpu_test: exit code 1", "FAIL rows: value 7", "FAIL compute-sanitizer memcheck", "PASS gpu_bench"):
            self.assertIn(line, results)

    def test_a_bench_that_fails_is_told_with_its_last_lines(self) -> None:
        self.program("gpu_bench", '#!/bin/sh\necho "gpu_bench: create_gemm: out of memory" >&2\nexit 1\n')
        run, results = self.check()
        self.assertEqual(run.returncode, 1, run)
        self.assertIn("FAIL gpu_bench: exit code 1", results)
        self.assertIn("create_gemm: out of memory", results)

    def test_what_does_not_end_meets_the_limit(self) -> None:
        self.program("gpu_test", "#!/bin/sh\nexec sleep 100\n")
        run, results = self.check("--limit", "2")
        self.assertEqual(run.returncode, 1, run)
        self.assertIn("at the limit of 2 s in all", results)

    def test_a_carried_folder_without_a_server_is_told(self) -> None:
        run = self.run_script("server", str(self.folder), "--out", str(self.out))
        self.assertEqual(run.returncode, 2, run)
        self.assertIn("bin/engram-server is missing", run.stderr)


@unittest.skipIf(PROGRAMS is None, "no programs were named")
class Programs(unittest.TestCase):
    def test_gpu_test_lists_its_checks(self) -> None:
        run = subprocess.run([PROGRAMS / "gpu_test", "--list"], capture_output=True, text=True, check=True)
        for check in ("instruction: ", "rows: ", "projection: ", "gemm: ", "gate: "):
            self.assertIn("\n" + check, "\n" + run.stdout)
        self.assertIn(" (quick)\n", run.stdout)

    def test_wrong_arguments(self) -> None:
        for program in ("gpu_test", "gpu_bench"):
            self.assertEqual(subprocess.run([PROGRAMS / program, "--frob"], capture_output=True, check=False).returncode, 2)

    @unittest.skipIf(has_device(), "this machine has a device")
    def test_without_a_device_is_exit_three(self) -> None:
        for program in ("gpu_test", "gpu_bench"):
            run = subprocess.run([PROGRAMS / program, "--quick"], capture_output=True, text=True, check=False)
            self.assertEqual(run.returncode, 3, run)
            self.assertRegex(run.stderr, f"^{program}: no device: ")


if __name__ == "__main__":
    unittest.main()
