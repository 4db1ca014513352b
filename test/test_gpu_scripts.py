"""scripts/gpu_check.sh on the emulator: its table, its numbers, what it does when a stage fails; and the folder that
scripts/gpu_bundle.sh prepares for a machine without network, moved and used."""
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

from program import ENVIRONMENT, HAVE_MPI, ROOT

sys.path.insert(0, os.path.join(ROOT, "scripts"))
import gpu_check  # noqa: E402

LIBRARIES = """
#include <mpi.h>
#include <cblas.h>
#include <unistd.h>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <string>
// Prints the sum of the ranks, as MPI finds it, times 2, as BLAS finds it, and what libraries rank 0 and mpirun have loaded.
int main(int argc, char** argv) {
    MPI_Init(&argc, &argv);
    float rank, sum, two = 2, product = 0;
    int r;
    MPI_Comm_rank(MPI_COMM_WORLD, &r);
    rank = float(r);
    MPI_Allreduce(&rank, &sum, 1, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, 1, 1, 1, 1, &two, 1, &sum, 1, 0, &product, 1);
    std::string line;
    if (r == 0) {
        std::printf("product %g\\n", product);
        std::fflush(stdout);
        for (std::string process : {std::string("self"), std::to_string(getppid())}) {
            std::ifstream maps("/proc/" + process + "/maps");
            while (std::getline(maps, line)) std::cout << line << "\\n";
        }
    }
    MPI_Finalize();
}
"""


def run(command, **environment):
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=dict(ENVIRONMENT, **environment))


def check(out, *arguments):
    done = run(["scripts/gpu_check.sh", "--emu", "--out", out, *arguments])
    with open(os.path.join(out, "gpu_emu.json")) as file:
        return done, json.load(file)


class Temporary(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        directory = tempfile.TemporaryDirectory()
        cls.addClassCleanup(directory.cleanup)
        cls.directory = directory.name


@unittest.skipUnless(HAVE_MPI, "MPI is not on this machine")
class Check(Temporary):
    def test_all_stages(self):
        done, report = check(self.directory, "--cases", "*norm*")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertEqual(list(report["stages"]), ["build", "kernels", "train", "bench"])
        self.assertTrue(all(stage["ok"] for stage in report["stages"].values()))
        self.assertEqual(report["kernels"]["test_kernels"]["failed"], 0)
        self.assertGreaterEqual(report["kernels"]["test_kernels"]["passed"], 6)
        self.assertEqual(report["reference"], "build/cpu")
        self.assertEqual(len(report["train"]), 3)
        for run_of in report["train"].values():
            self.assertLess(run_of["losses"][9], run_of["losses"][0])
            self.assertLessEqual(run_of["worst"], 1e-4)
        self.assertGreater(len(report["bench"]), 90)
        with open(os.path.join(self.directory, "gpu_emu.md")) as file:
            written = file.read()
        self.assertIn(written, done.stdout)  # the same on the terminal
        for row in report["bench"]:
            self.assertGreater(row["us"], 0)
            self.assertGreater(row["floor_us"], 0)
            self.assertAlmostEqual(row["percent"], 100 * row["floor_us"] / row["us"], delta=1 + 0.01 * row["percent"])
            self.assertIn("| %s " % row["kernel"], written)
        self.assertEqual({len(line.split("|")) for line in written.splitlines() if "|" in line}, {7})
        for kernel in ("layernorm_forward", "layernorm_backward", "attention_forward", "attention_backward", "adamw_update",
                       "matmul_forward fc + bias + gelu", "classifier_finish, one chunk", "codec_encode taco",
                       "codec_decode_reduce_layernorm + encode hadint8"):
            self.assertIn(kernel, [row["kernel"] for row in report["bench"]])

    def test_a_stage_that_fails_is_reported_and_the_others_still_run(self):
        done, report = check(self.directory, "--limit", "kernels=0.01", "kernels", "bench")
        self.assertEqual(done.returncode, 1, done.stdout)
        self.assertFalse(report["ok"])
        self.assertFalse(report["stages"]["kernels"]["ok"])
        self.assertTrue(report["stages"]["bench"]["ok"])
        self.assertRegex(done.stdout, r"\| kernels +\|[^\n]*FAILED")
        self.assertRegex(done.stdout, r"\| kernels: test_kernels +\|[^\n]*1 FAILED")
        self.assertRegex(done.stdout, r"\| adamw_update +\|")
        self.assertIn("kernels test_kernels: ran out of time", done.stderr)

    def test_no_case_is_a_failure(self):
        done, report = check(self.directory, "--cases", "there is none", "kernels")
        self.assertEqual(done.returncode, 1, done.stdout)
        self.assertEqual(report["kernels"]["test_kernels"], {"passed": 0, "failed": 1})

    def test_words_that_are_not_known(self):
        for arguments in (["trian"], ["--limit", "train"], ["--limit", "trian=3"]):
            done = run(["scripts/gpu_check.sh", "--emu", *arguments])
            self.assertEqual(done.returncode, 2)
            self.assertIn(arguments[-1], done.stderr)


class Losses(unittest.TestCase):
    def test_compare(self):
        compare, falling = gpu_check.losses_compare, [4 - 0.1 * i for i in range(10)]
        self.assertEqual(compare(falling, falling, False), 0)
        for i in range(10):
            off = falling[:i] + [falling[i] * 1.001] + falling[i + 1:]
            self.assertAlmostEqual(compare(falling, off, False), 1e-3, delta=1e-9)
            self.assertGreater(compare(falling, off, True), 5e-5)
        for wrong in (falling[:9], [], falling[:9] + [float("nan")]):
            self.assertFalse(compare(falling, wrong, False) <= 1e-4)
            self.assertFalse(compare(falling, wrong, True) <= 1e-4)
        self.assertFalse(compare(falling[::-1], falling[::-1], False) <= 1e-4)  # nothing was learnt

    def test_the_limits_hold_six_minutes(self):
        self.assertLessEqual(sum(gpu_check.SECONDS.values()), gpu_check.ALL_SECONDS)
        self.assertLessEqual(gpu_check.ALL_SECONDS, 360)


class Lacking(unittest.TestCase):
    def test_the_bundle_gives_what_is_missing_and_nothing_else(self):
        full = {"MISSING": "", "HAVE_MPI": "1", "HAVE_DOCTEST": "1"}
        self.assertEqual(gpu_check.config_lacks(full), set())
        self.assertEqual(gpu_check.bundle_environment("/b", set(), {"PATH": "/p"}), {})
        lacks = gpu_check.config_lacks({"MISSING": " nlohmann/json BLAS", "HAVE_DOCTEST": "1"})
        self.assertEqual(lacks, {"nlohmann/json", "BLAS", "MPI"})
        given = gpu_check.bundle_environment("/b", lacks, {"PATH": "/p"})
        self.assertEqual((given["PATH"], given["MPICC"]), ("/b/bin:/p", "/b/bin/mpicc"))
        self.assertEqual(given["CPLUS_INCLUDE_PATH"], "/b/include")
        self.assertIn("-L/b/lib", given["BLAS_LIBS"])


@unittest.skipUnless(HAVE_MPI and shutil.which("ompi_info"), "Open MPI is not on this machine")
class Bundle(Temporary):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.made, cls.bundle = os.path.join(cls.directory, "made"), os.path.join(cls.directory, "moved", "here")
        done = run(["scripts/gpu_bundle.sh", cls.made])
        if done.returncode != 0:
            raise AssertionError(done.stdout + done.stderr)
        os.mkdir(os.path.dirname(cls.bundle))
        os.rename(cls.made, cls.bundle)

    def test_content(self):
        for path in ("include/doctest/doctest.h", "include/nlohmann/json.hpp", "include/CLI/CLI.hpp", "include/openmpi/mpi.h",
                     "include/openblas/cblas.h", "bin/mpirun", "bin/mpicc", "lib/libmpi.so.40", "lib/openmpi3/mca_btl_vader.so",
                     "lib/libopenblas.so.0", "reference.json"):
            self.assertTrue(os.path.isfile(os.path.join(self.bundle, path)), path)
        files = [os.path.join(at, name) for at, _, names in os.walk(self.bundle) for name in names]
        self.assertEqual([path for path in files if os.path.islink(path)], [])
        self.assertLessEqual(sum(map(os.path.getsize, files)), 64 << 20)
        with open(os.path.join(self.bundle, "reference.json")) as file:
            reference = json.load(file)
        self.assertEqual(set(reference), set(gpu_check.RUNS))
        for losses in reference.values():
            self.assertEqual(len(losses), 10)
            self.assertLess(losses[9], losses[0])

    def test_a_bundle_that_is_too_large_is_refused(self):
        done = run(["scripts/gpu_bundle.sh", os.path.join(self.directory, "large")], MAX_MB="20")
        self.assertEqual(done.returncode, 1, done.stdout)
        self.assertRegex(done.stderr, r"at most 20 may be brought. The biggest files: lib/libopenblas\.so\.0 \(\d+\.\d MB\)")

    def test_programs_run_on_the_moved_mpi_and_on_nothing_of_the_systems(self):
        environment = dict(ENVIRONMENT, **gpu_check.bundle_environment(self.bundle, {"MPI", "BLAS"}, ENVIRONMENT))
        source, program = os.path.join(self.directory, "a.cpp"), os.path.join(self.directory, "a.out")
        with open(source, "w") as file:
            file.write(LIBRARIES)
        compiling, linking = (run([environment["MPICC"], "--showme:" + what]).stdout.split() for what in ("compile", "link"))
        built = run(["g++", "-std=c++20", "-DOMPI_SKIP_MPICXX=1", source, "-o", program, *compiling,
                     *environment["BLAS_CFLAGS"].split(), *linking, *environment["BLAS_LIBS"].split()])
        self.assertEqual(built.returncode, 0, built.stderr)
        done = run(["mpirun", "-np", "2", program], **environment)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("product 2", done.stdout)
        paths = set(re.findall(r" (/.*\.so[.\d]*)$", done.stdout, re.M))
        own = re.compile(r"/(lib(mpi|open-(rte|pal)|pmix|hwloc|event|openblas|gfortran|munge)|mca_)[^/]*$")
        mpi = [path for path in paths if own.search(path)]
        self.assertEqual([path for path in mpi if not path.startswith(self.bundle + "/")], [])
        for name in ("/libmpi.so.40", "/libopen-pal.so.40", "/libpmix.so.2", "/mca_btl_vader.so", "/libopenblas.so.0"):
            self.assertIn(name, [re.search("/[^/]*$", path)[0] for path in mpi])
        # without mpirun, and so without LD_LIBRARY_PATH, as configure's probe runs: the loader finds all by the program's path
        alone = run([program], OPAL_PREFIX=environment["OPAL_PREFIX"], LD_DEBUG="libs", PATH="/nowhere")
        self.assertNotRegex(alone.stderr, r"error while loading")
        self.assertIn("calling init: %s/lib/libopen-rte.so.40" % self.bundle, alone.stderr)


if __name__ == "__main__":
    unittest.main()
