"""Registers, spills and occupancy of all kernels (scripts/ptxas_table.py): nothing spills, everything fits as promised, and
dev/results/ptxas.md says so. Needs nvcc, no GPU."""
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

SPILLS = """
template <class E>
__global__ void __launch_bounds__(1024, 2) greedy(float* x) {  // 32 registers for 100 values
    float values[100];
#pragma unroll
    for (int i = 0; i < 100; i++) values[i] = x[threadIdx.x + 1024 * i];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 100; i++) x[threadIdx.x + 1024 * i] = values[99 - i] * values[i];
}
template __global__ void greedy<float>(float*);
"""
DOES_NOT_FIT = """
__global__ void __launch_bounds__(128, 8) crowded(float* x) {  // 8 times 40 KB
    __shared__ float all[10240];
    for (int i = threadIdx.x; i < 10240; i += 128) all[i] = x[i];
    __syncthreads();
    x[threadIdx.x] = all[threadIdx.x * 79];
}
"""
NO_PROMISE = "__global__ void unbounded(float* x) { x[threadIdx.x] = 1; }"
DYNAMIC = """
__global__ void __launch_bounds__(128, 1) unknown(float* x) {
    extern __shared__ unsigned char dynamic_shared_memory[];
    x[threadIdx.x] = dynamic_shared_memory[threadIdx.x];
}
"""


def find_nvcc():
    try:
        with open(os.path.join(ROOT, "build", "config.mk")) as config:
            found = re.search(r"^NVCC := (.+)$", config.read(), re.M)
            return found and found[1]
    except FileNotFoundError:
        return shutil.which("nvcc")


NVCC = find_nvcc()


def table(*arguments):
    return subprocess.run([sys.executable, os.path.join(ROOT, "scripts/ptxas_table.py"), *arguments], capture_output=True, text=True)


def rows(text):
    """{kernel: the rest of its row}"""
    return dict(re.findall(r"^\| `(.+?)` \|(.*)$", text, re.M))


@unittest.skipUnless(NVCC, "no nvcc: NVIDIA's CUDA toolkit is not installed")
class Kernels(unittest.TestCase):
    def test_all_kernels_hold_what_they_promise_and_the_committed_table_is_theirs(self):
        done = table("--nvcc", NVCC)
        self.assertEqual(done.returncode, 0, done.stderr)
        with open(os.path.join(ROOT, "dev/results/ptxas.md")) as file:
            committed = file.read()
        fresh = rows(done.stdout)
        self.assertGreater(len(fresh), 50)
        advice = "make ptxas writes dev/results/ptxas.md anew"
        self.assertEqual(sorted(rows(committed)), sorted(fresh), advice)
        if committed.splitlines()[0] == done.stdout.splitlines()[0]:  # of the same nvcc
            self.assertEqual(rows(committed), fresh, advice)

    def plant(self, code):
        with tempfile.NamedTemporaryFile("w", suffix=".cu") as file:
            file.write(code)
            file.flush()
            return table("--nvcc", NVCC, file.name)

    def test_a_spill_is_reported(self):
        done = self.plant(SPILLS)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertRegex(done.stderr, r"greedy<float>: registers are spilled \(sm_80: \d+ B, stack \d+ B; sm_90: \d+ B")

    def test_blocks_that_do_not_fit_are_reported(self):
        done = self.plant(DOES_NOT_FIT)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("crowded: 4 blocks fit on an A100 multiprocessor, its __launch_bounds__ promise 8", done.stderr)
        self.assertIn("crowded: 5 blocks fit on an H100 multiprocessor, its __launch_bounds__ promise 8", done.stderr)

    def test_a_kernel_without_promise_is_reported(self):
        done = self.plant(NO_PROMISE)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("unbounded: has no __launch_bounds__(threads, blocks)", done.stderr)

    def test_dynamic_shared_memory_must_be_known(self):
        done = self.plant(DYNAMIC)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("Add to DYNAMIC_SHARED: unknown", done.stderr)

    def test_code_that_does_not_compile_is_shown(self):
        done = self.plant("__global__ void broken(")
        self.assertEqual(done.returncode, 1)
        self.assertIn("error: expected a", done.stderr)


class Words(unittest.TestCase):
    def test_nvcc_that_is_not_there_is_named(self):
        done = table("--nvcc", "/nowhere/nvcc")
        self.assertEqual(done.returncode, 1)
        self.assertIn("'/nowhere/nvcc' was not found", done.stderr)


if __name__ == "__main__":
    unittest.main()
