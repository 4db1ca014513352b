"""The scripts that judge runs: loss curves from logs, and the test runner's counting."""
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def load(path):
    spec = importlib.util.spec_from_file_location(os.path.basename(path)[:-3], os.path.join(ROOT, path))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Plot(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.log, self.png = directory.name + "/run.jsonl", directory.name + "/loss.png"
        lines = [{"run": {}}] + [{"step": s, "loss": 1 + 4 / s} for s in range(1, 101)] + [{"step": 100, "val_loss": 1.125}]
        with open(self.log, "w") as f:
            f.writelines(json.dumps(line) + "\n" for line in lines + [{"step": 101, "loss": None}])

    def plot(self, *arguments):
        return subprocess.run([sys.executable, os.path.join(ROOT, "scripts/plot.py"), *arguments], capture_output=True, text=True)

    def test_reads_both_curves_and_leaves_out_unknown_losses(self):
        train, val = load("scripts/plot.py").read_run(self.log)
        self.assertEqual((len(train), train[0], train[-1]), (100, (1, 5.0), (100, 1.04)))
        self.assertEqual(val, [(100, 1.125)])

    def test_running_mean_is_centred(self):
        line = [(step, 2.0 * step) for step in range(100)]
        self.assertEqual(load("scripts/plot.py").running_mean(line, share=0.1), line)

    def test_terminal(self):
        done = self.plot(self.log, "--terminal", "--line", "3-gram=1.2")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("3-gram 1.200", done.stdout)
        self.assertIn("step 100", done.stdout)
        rows = [row for row in done.stdout.splitlines() if "|" in row]
        self.assertIn("o", rows[-3] + rows[-2] + rows[-1])  # the validation loss lies near the bottom

    @unittest.skipUnless(importlib.util.find_spec("matplotlib"), "matplotlib is not installed (scripts/install_deps.sh)")
    def test_png(self):
        done = self.plot(self.log, "--out", self.png)
        self.assertEqual(done.returncode, 0, done.stderr)
        with open(self.png, "rb") as f:
            self.assertEqual(f.read(8), b"\x89PNG\r\n\x1a\n")

    def test_a_file_that_is_no_log_is_named(self):
        with open(self.log, "w") as f:
            f.write("step 1 loss 3\n")
        done = self.plot(self.log, "--terminal")
        self.assertEqual(done.returncode, 1)
        self.assertIn(self.log + ", line 1 is not JSON", done.stderr)


class Runner(unittest.TestCase):
    def test_counts(self):
        count = load("test/run.py").count_cases
        doctest = "[doctest] test cases: %d | %d passed | %d failed | %d skipped\n"
        self.assertEqual(count(doctest % (5, 4, 1, 2)), (4, 1, 2))
        self.assertEqual(count(doctest % (5, 5, 0, 0) + doctest % (5, 3, 2, 0)), (3, 2, 0))  # two ranks: one saw failures
        self.assertEqual(count("Ran 7 tests in 0.1s\n\nOK (skipped=2)\n"), (5, 0, 2))
        self.assertEqual(count("Ran 7 tests in 0.1s\n\nFAILED (failures=1, errors=2)\n"), (4, 3, 0))
        self.assertEqual(count("Segmentation fault\n"), (0, 0, 0))


if __name__ == "__main__":
    unittest.main()
