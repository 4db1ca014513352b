#!/usr/bin/python3
"""Runs all tests and ends with one line, "N passed, N failed". `make test` builds everything first.

  test/run.py [WORD ..]     only the tests whose name holds one of the words, as in "codec", "mpi_", "asan"

What runs: each test/test_*.cpp (doctest), each test/mpi_*.cpp under mpirun at several numbers of ranks; the CUDA code's
test/test_*.cu and test/emu_*.cu likewise, on the emulator; all of them again in sanitizer builds; each test/test_*.py
(unittest). A test that was not built, crashed, ran out of time or held no
case has failed. Everything a test prints is kept in build/test-logs/.
"""
import glob
import os
import re
import signal
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
LOGS = os.path.join(ROOT, "build", "test-logs")
CORES = len(os.sched_getaffinity(0))

RANKS = {  # how many ranks a multi-rank test runs on; DEFAULT_RANKS for the ones not named here
    "emu_comm": [1, 2, 3, 4],
}
DEFAULT_RANKS = [1, 2, 3, 4, 8]
SANITIZER_RANKS = [2, 3]
SECONDS = {  # time limits; DEFAULT_SECONDS for the ones not named here. The sanitizer build has three times as much.
    "test_failures.py": 600, "test_train.py": 600, "test_emu_train.py": 600,  # a hundred small runs, which wait for cores on a busy machine
}
DEFAULT_SECONDS = 240
MPI_ENVIRONMENT = {  # scripts/mpi_env.sh
    "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none", "OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "vader,self",
}
SANITIZER_ENVIRONMENT = {
    "": {},
    "asan": {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1"},  # MPI itself leaks
    "tsan": {"TSAN_OPTIONS": "halt_on_error=1 detect_deadlocks=0 ignore_noninstrumented_modules=1",
             "OMP_NUM_THREADS": "1"},  # TSan does not see OpenMP's barriers: it would report the CPU ops
}
SUITES = [  # build, its sources
    ("cpu", "test_*.cpp mpi_*.cpp"), ("cpu-asan", "test_*.cpp mpi_*.cpp"),
    ("emu", "test_*.cu emu_*.cu"), ("emu-asan", "test_*.cu emu_*.cu"), ("emu-tsan", "test_*.cu"),
]


def job(name, command, ranks, seconds, **environment):
    environment.setdefault("OMP_NUM_THREADS", str(max(1, CORES // ranks)))
    return dict(name=name, command=command, seconds=seconds, environment=environment)


def jobs_list(have_mpi):
    jobs = []
    for build, patterns in SUITES:
        target, _, sanitizer = build.partition("-")
        suffix = "" if build == "cpu" else " " + (sanitizer if target == "cpu" else build)
        directory = os.path.join(ROOT, "build", build if have_mpi else target + "-nompi" + build[len(target):], "test")
        for source in sorted(path for pattern in patterns.split() for path in glob.glob(os.path.join(ROOT, "test", pattern))):
            name = os.path.splitext(os.path.basename(source))[0]
            multi = not name.startswith("test_")
            if multi and not have_mpi:
                jobs.append(dict(name=name + suffix, skip="no MPI on this machine"))
                continue
            binary = os.path.join(directory, name)
            seconds = SECONDS.get(name, DEFAULT_SECONDS) * (3 if sanitizer else 1)
            wanted = RANKS.get(name, DEFAULT_RANKS)
            if sanitizer:
                wanted = [ranks for ranks in wanted if ranks in SANITIZER_RANKS] or wanted[:1]
            for ranks in wanted if multi else [1]:
                command = ["mpirun", "-np", str(ranks), binary] if multi else [binary]
                jobs.append(job(name + suffix + (" np=%d" % ranks if multi else ""), command, ranks, seconds,
                                **SANITIZER_ENVIRONMENT[sanitizer]))
    for source in sorted(glob.glob(os.path.join(ROOT, "test", "test_*.py"))):
        name = os.path.basename(source)
        jobs.append(job(name, [sys.executable, "-m", "unittest", "discover", "-v", "-s", "test", "-p", name], 1, SECONDS.get(name, DEFAULT_SECONDS)))
    return jobs


def run(one, log):
    """Exit status; None when the time ran out."""
    environment = dict(os.environ, **MPI_ENVIRONMENT)
    environment.update(one["environment"])
    with open(log, "wb") as out:
        process = subprocess.Popen(one["command"], stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                                   cwd=ROOT, env=environment, start_new_session=True)
        try:
            return process.wait(one["seconds"])
        except subprocess.TimeoutExpired:
            return None
        finally:  # whatever the test left running goes with it; mpirun ends its ranks when told to
            for ending, patience in ((signal.SIGTERM, 3), (signal.SIGKILL, None)):
                try:
                    os.killpg(process.pid, ending)
                    process.wait(patience)
                except (ProcessLookupError, subprocess.TimeoutExpired):
                    pass


def count_cases(text):
    """(passed, failed, skipped) by what the test printed. Under mpirun several ranks may print a summary: the worst one counts."""
    ran = failed = skipped = 0
    for line in re.finditer(r"test cases: *\d+ *\| *(\d+) passed *\| *(\d+) failed *\|(?: *(\d+) skipped)?", text):
        ran, failed = max(ran, int(line[1]) + int(line[2])), max(failed, int(line[2]))
        skipped = max(skipped, int(line[3] or 0))
    unittest = re.search(r"^Ran (\d+) tests? in", text, re.M)
    if unittest:
        verdict = text[unittest.end():]
        failed = sum(int(n) for n in re.findall(r"(?:failures|errors|unexpected successes)=(\d+)", verdict))
        skipped = sum(int(n) for n in re.findall(r"skipped=(\d+)", verdict))
        ran = int(unittest[1]) - skipped
    return max(0, ran - failed), failed, skipped


def main():
    words = sys.argv[1:]
    os.makedirs(LOGS, exist_ok=True)
    try:
        with open(os.path.join(ROOT, "build", "config.mk")) as config:
            have_mpi = "HAVE_MPI := 1" in config.read()
    except FileNotFoundError:
        sys.exit("run.py: nothing is built yet: run make test")
    all_passed = all_failed = all_skipped = 0
    begin = time.time()
    for one in jobs_list(have_mpi):
        name = one["name"]
        if words and not any(word in name for word in words):
            continue
        if "skip" in one:
            print("skip  %-34s %s" % (name, one["skip"]), flush=True)
            all_skipped += 1
            continue
        log = os.path.join(LOGS, re.sub(r"[ =]", "_", name) + ".log")
        start = time.time()
        if os.path.isabs(one["command"][-1]) and not os.path.exists(one["command"][-1]):
            problem, text, passed, failed, skipped = "was not built", "", 0, 0, 0
        else:
            status = run(one, log)
            with open(log, errors="replace") as f:
                text = re.sub(r"\x1b\[[0-9;]*m", "", f.read())  # doctest sees a terminal under mpirun, and colours it
            passed, failed, skipped = count_cases(text)
            problem = None
            if status is None:
                problem = "ran out of time: %d s" % one["seconds"]
            elif passed + failed + skipped == 0:
                problem = "reported no test case (exit status %d)" % status
            elif status != 0 and failed == 0:
                problem = "exit status %d" % status
        if problem:
            failed += 1
        all_passed, all_failed, all_skipped = all_passed + passed, all_failed + failed, all_skipped + skipped
        print("%s  %-34s %3d passed%s%s  %6.1f s%s" % (
            "FAIL" if failed else "ok  ", name, passed, ", %d failed" % failed if failed else "",
            ", %d skipped" % skipped if skipped else "", time.time() - start, "  " + problem if problem else ""), flush=True)
        if skipped:
            for reason in re.findall(r"skipped ['\"](.*)['\"]", text):
                print("      skipped: " + reason)
        if failed and text:
            lines = text.splitlines()
            print("\n".join("      | " + line for line in lines[-60:]))
            print("      (%d lines in %s)" % (len(lines), os.path.relpath(log, ROOT)), flush=True)
    print("%d skipped, %.0f s" % (all_skipped, time.time() - begin))
    print("%d passed, %d failed" % (all_passed, all_failed))
    sys.exit(1 if all_failed or not all_passed else 0)


if __name__ == "__main__":
    main()
