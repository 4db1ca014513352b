#!/usr/bin/python3
"""Do the tests of the CUDA code bite? Plants the faults of test/teeth_faults.py, one at a time, and runs the tests on each.

  test/teeth.py [WORD ..]     only the faults whose name or file holds one of the words

Each fault goes into a copy of the sources in build/teeth/, which is built by the same Makefile. What is run depends on the
fault's file alone (TESTS); a fault that no test sees there meets the trainer's tests too. A fault is caught when a test fails,
crashes, hangs or is ended by the emulator. The same tests run on a copy without fault first: they must pass. A build that fails
catches nothing, it is an error. Ends with "N of M faults caught"; the status is 0 when that is at least 23 of 25.
"""
import concurrent.futures
import os
import shutil
import subprocess
import sys
import time

from run import CORES, MPI_ENVIRONMENT, ROOT
from teeth_faults import FAULTS

SECONDS = 240  # for one test
TESTS = {  # by the start of the file's name in llmc/cuda/: the area of the kernel tests
    "attention": "attention", "layernorm": "norm", "row": "norm", "codec": "codec", "matmul": "matmul", "bias": "matmul",
}
TRAINER_TESTS = ["one_rank", "tensor_parallel", "sequence_parallelism", "data_parallel", "staged", "legal_order", "recompute"]


def plan_of(file):
    """The tests that a fault in this file has to get past: (program, ranks) each; the trainer's come last."""
    name = os.path.basename(file)
    if file.startswith("llmc/cuda/") and name not in ("device.cuh", "common.cuh"):
        area = next((area for start, area in TESTS.items() if name.startswith(start)), "elementwise")
        return [("kernels_" + area, 1)]
    if file.startswith("llmc/"):
        return [(program, ranks) for program in ("emu_comm", "emu_boundary") for ranks in (2, 3)]
    return []


def copy_sources(tree):
    shutil.rmtree(tree, ignore_errors=True)
    for part in ("llmc", "dev/emu", "scripts", "test"):
        shutil.copytree(os.path.join(ROOT, part), os.path.join(tree, part))
    for part in ("Makefile", "train_gpt.cu"):
        shutil.copy(os.path.join(ROOT, part), tree)
    for name in ("cpu", "emu", "emu-fp32-asan"):  # what the trainer's tests compare with or ask for; emu-fp32 is the tree's own
        os.makedirs(os.path.join(tree, "build", name))
        os.symlink(os.path.join(ROOT, "build", name, "train_gpt"), os.path.join(tree, "build", name, "train_gpt"))
    shutil.copy(os.path.join(ROOT, "build", "config.mk"), os.path.join(tree, "build"))


def run(command, tree, seconds, **environment):
    """Whether it ended with status 0, in time."""
    environment = dict(os.environ, **MPI_ENVIRONMENT, OMP_NUM_THREADS="1", **environment)
    with open(os.path.join(tree, "log"), "ab") as log:
        try:
            return subprocess.run(command, cwd=tree, env=environment, stdout=log, stderr=log, timeout=seconds).returncode == 0
        except subprocess.TimeoutExpired:
            return False


def build(tree, target, *flags):
    if not run(["make", "--no-print-directory", "TARGET=emu", target, *flags], tree, 1800):
        raise RuntimeError("%s does not build: see %s" % (target, os.path.join(tree, "log")))


def caught_by(tree, plan):
    """The first test that fails on the sources in `tree`, or None."""
    for program, ranks in plan:
        target = "build/emu/test/" + program
        build(tree, target)
        if not run((["mpirun", "-np", str(ranks)] if ranks > 1 else []) + [target], tree, SECONDS):
            return "%s np=%d" % (program, ranks)
    return None


def caught_by_trainer(tree):
    """The same, of the trainer's tests."""
    build(tree, "build/emu-fp32/train_gpt", "PRECISION=fp32")
    for name in TRAINER_TESTS:
        if not run([sys.executable, "-m", "unittest", "discover", "-s", "test", "-p", "test_emu_train.py", "-k", name], tree, 600):
            return "test_emu_train %s" % name
    return None


def try_fault(fault):
    tree = os.path.join(ROOT, "build", "teeth", fault.name)
    copy_sources(tree)
    path = os.path.join(tree, fault.file)
    with open(path) as f:
        text = f.read()
    if text.count(fault.old) != 1:
        raise RuntimeError("%s: its text occurs %d times in %s, expected once" % (fault.name, text.count(fault.old), fault.file))
    with open(path, "w") as f:
        f.write(text.replace(fault.old, fault.new))
    start = time.time()
    caught = caught_by(tree, plan_of(fault.file)) or caught_by_trainer(tree)
    print("%-7s %-36s %-30s %s  (%.0f s)" % ("caught" if caught else "MISSED", fault.name, fault.file, caught or fault.effect, time.time() - start),
          flush=True)
    shutil.rmtree(tree)
    return caught is not None


def check_control(name, check, *arguments):
    """Without a fault nothing is caught."""
    tree = os.path.join(ROOT, "build", "teeth", name)
    copy_sources(tree)
    caught = check(tree, *arguments)
    if caught:
        raise RuntimeError("%s fails without any fault: see %s" % (caught, os.path.join(tree, "log")))
    shutil.rmtree(tree)


def main():
    words = sys.argv[1:]
    faults = [fault for fault in FAULTS if not words or any(word in fault.name + fault.file for word in words)]
    plans = {str(plan): plan for plan in (plan_of(fault.file) for fault in faults)}
    with concurrent.futures.ThreadPoolExecutor(CORES) as pool:
        controls = [pool.submit(check_control, "control_trainer", caught_by_trainer)]
        controls += [pool.submit(check_control, "control_%d" % i, caught_by, plan) for i, plan in enumerate(plans.values())]
        for control in controls:
            control.result()
        caught = sum(pool.map(try_fault, faults))
    print("%d of %d faults caught" % (caught, len(faults)))
    sys.exit(0 if caught * 25 >= len(faults) * 23 else 1)


if __name__ == "__main__":
    main()
