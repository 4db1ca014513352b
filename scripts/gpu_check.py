#!/usr/bin/env python3
"""Everything a new GPU has to show, in stages; one that fails is reported, the others still run, and the exit status is 1.

  build    nvcc for this GPU alone: the kernel tests, an area a program, the benchmark, the float32 trainer; and the cpu target
  kernels  every kernel against the CPU op of the same name (test/test_kernels.cu), in float32, bfloat16 and float16
  train    ten steps of a tiny model in float32, on one rank and on two that share the GPU; the losses are the cpu target's
  bench    each kernel's time against its byte or FLOP floor (dev/cuda/bench_kernels.cu)

The table goes to the terminal and to OUT/gpu_NAME.md, all numbers to OUT/gpu_NAME.json, what programs printed to
build/gpu_check/. What the machine lacks (MPI, BLAS, headers) comes from the folder that scripts/gpu_bundle.sh prepared, if it
was brought. With --emu the same runs on the emulator: then times say nothing.
"""
import argparse
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
LOGS = os.path.join(ROOT, "build", "gpu_check")
CORES = len(os.sched_getaffinity(0))
SECONDS = {"build": 165, "kernels": 60, "train": 50, "bench": 50}  # at most, of each stage
ALL_SECONDS = 350  # what a slow start takes, later stages lose

TRAIN = ["--model", "gpt2:d2,c=64,heads=4,vocab=61", "--seq", "32", "--micro-batch", "2", "--steps", "10", "--threads", "1",
         "--lr", "1e-2"]
RUNS = {  # flags, ranks, lossy
    "tp 1": ([], 1, False),
    "tp 2, none": (["--tp", "2", "--tp-codec", "none"], 2, False),
    "tp 2, taco": (["--tp", "2", "--tp-codec", "taco", "--global-batch", "32", "--lr", "1e-3"], 2, True),
}
# Of each step's loss. A codec amplifies: once one value is rounded to another code, two runs have rounding noise of their own,
# 3e-4 of a loss of 64 tokens. Lossy runs are compared by the mean of their steps, 10240 tokens.
TOLERANCE = 1e-4


class Failed(Exception):
    """A stage's end, in one sentence."""


# ---- programs ----

def run_all(jobs, seconds, environment):
    """{name: command} side by side. {name: (exit status, None if the time ran out; its output)}"""
    os.makedirs(LOGS, exist_ok=True)
    end = time.monotonic() + seconds
    started, done = {}, {}
    for name, command in jobs.items():
        log = os.path.join(LOGS, re.sub(r"\W+", "_", name) + ".log")
        with open(log, "wb") as out:
            started[name] = log, subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                                                  cwd=ROOT, env=environment, start_new_session=True)
    try:
        for name, (_, process) in started.items():
            try:
                done[name] = process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                done[name] = None
    finally:
        for ending, patience in ((signal.SIGTERM, 3), (signal.SIGKILL, None)):  # mpirun ends its ranks when told to
            for _, process in started.values():
                try:
                    os.killpg(process.pid, ending)
                    process.wait(patience)
                except (ProcessLookupError, subprocess.TimeoutExpired):
                    pass
    for name, (log, _) in started.items():
        with open(log, errors="replace") as file:
            done[name] = done[name], file.read()
    return done


def told(name, status, text):
    """Why it failed, and the end of what it said."""
    why = "ran out of time" if status is None else "exit status %d" % status
    return "%s: %s\n%s" % (name, why, "\n".join("    " + line for line in text.splitlines()[-12:]))


# ---- the machine ----

def config_read():
    with open(os.path.join(ROOT, "build", "config.mk")) as file:
        return dict(re.findall(r"^(\w+) := ?(.*)$", file.read(), re.M))


def config_lacks(config):
    lacks = {word for word in config.get("MISSING", "compiler").split()}
    return lacks | {word for word, key in (("MPI", "HAVE_MPI"), ("doctest", "HAVE_DOCTEST")) if key not in config}


def bundle_mpi(bundle, environment):
    """What Open MPI needs to run from a folder other than the one it was made for."""
    lib = bundle + "/lib"
    return dict(PATH=bundle + "/bin:" + environment["PATH"], MPICC=bundle + "/bin/mpicc", OPAL_PREFIX=bundle,
                OPAL_BINDIR=bundle + "/bin", OPAL_LIBDIR=lib, OPAL_PKGLIBDIR=lib + "/openmpi3", OPAL_DATADIR=bundle + "/share",
                OPAL_PKGDATADIR=bundle + "/share/openmpi", OPAL_SYSCONFDIR=bundle + "/etc", PMIX_PREFIX=bundle, PMIX_LIBDIR=lib,
                PMIX_PKGLIBDIR=lib + "/pmix", HWLOC_PLUGINS_PATH=lib + "/hwloc")


def bundle_environment(bundle, lacks, environment):
    """What the build and the runs take from the bundle: only what the machine lacks."""
    added = bundle_mpi(bundle, environment) if "MPI" in lacks else {}
    if "BLAS" in lacks:
        added["BLAS_CFLAGS"] = "-I%s/include/openblas" % bundle
        added["BLAS_LIBS"] = "-L{0}/lib -Wl,--disable-new-dtags -Wl,-rpath,{0}/lib -Wl,--no-as-needed -lopenblas".format(bundle)
    if lacks & {"nlohmann/json", "CLI11", "doctest"}:
        added["CPLUS_INCLUDE_PATH"] = bundle + "/include"
    return added


def configure(bundle, environment):
    """build/config.mk, with the bundle's parts where this machine has none. Returns it and the environment of all programs."""
    def look():
        done = run_all({"configure": ["scripts/configure.sh"]}, 60, environment)["configure"]
        if done[0] != 0:
            raise Failed(told("scripts/configure.sh", *done))
    if not os.path.exists(os.path.join(ROOT, "build", "config.mk")):
        look()
    lacks = config_lacks(config_read())
    if lacks and os.path.isdir(bundle):
        environment = dict(environment, **bundle_environment(bundle, lacks, environment))
        look()
    config = config_read()
    if bundle in config.get("MPI_LIBS", ""):
        environment = dict(environment, **bundle_mpi(bundle, environment))
    lacks = config_lacks(config)
    if lacks:
        raise Failed("this machine lacks %s, and the bundle '%s' %s: make one where there is a network, by "
                     "scripts/gpu_bundle.sh, and bring it (--bundle DIR)" % (", ".join(sorted(lacks)), bundle,
                                                  "has not got it" if os.path.isdir(bundle) else "is not there"))
    return config, environment


def gpu_find(environment):
    """(name, NN as in sm_NN) of the GPU that programs will use."""
    try:
        listed = subprocess.run(["nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader", "-i",
                                 environment["CUDA_VISIBLE_DEVICES"]], capture_output=True, text=True)
    except FileNotFoundError:
        raise Failed("no nvidia-smi: is there an NVIDIA GPU and its driver? (--emu runs the check on the emulator)")
    found = re.match(r"(.+), (\d+)\.(\d+)\s*$", listed.stdout)
    if listed.returncode != 0 or not found:
        raise Failed("nvidia-smi names no GPU: %s" % (listed.stdout + listed.stderr).strip())
    return found[1], found[2] + found[3]


# ---- stages: each returns a word for the table, and adds its numbers to the report ----

class Check:
    def __init__(self, emu, bundle, cases, environment):
        self.emu, self.cases, self.environment = emu, cases, environment
        self.bundle = os.path.abspath(bundle)
        self.report = {"device": "emulator" if emu else None, "stages": {}, "kernels": {}, "train": {}, "bench": []}
        self.areas = sorted(re.findall(r"\btest_(\w+)\.cuh", " ".join(os.listdir(os.path.join(ROOT, "test", "kernels")))))
        target = "emu" if emu else "cuda"
        self.build = "build/" + target
        self.trainer = os.path.join(ROOT, "build", target + "-fp32", "train_gpt")
        self.cpu = os.path.join(ROOT, "build", "cpu", "train_gpt")
        self.arch = None
        self.problem = None
        try:
            if not emu:
                self.report["device"], self.arch = gpu_find(environment)
            self.config, self.environment = configure(self.bundle, environment)
        except Failed as failed:
            self.problem = failed  # of the build; later stages run what is there

    def kernel_programs(self):
        return {"test_kernels": "/test/test_kernels"} if self.emu else {area: "/test/kernels_" + area for area in self.areas}

    def stage_build(self, seconds):
        if self.problem:
            raise self.problem
        make = ["make", "-k", "-j%d" % CORES]
        target = ["TARGET=emu"] if self.emu else ["TARGET=cuda", "CUDA_ARCHS=" + self.arch]
        programs = [self.build + path for path in list(self.kernel_programs().values()) + ["/dev/bench_kernels"]]
        done = run_all({
            "build kernels": make + target + programs,
            "build trainer": make + target + ["PRECISION=fp32", os.path.relpath(self.trainer, ROOT)],
            "build cpu": make + ["TARGET=cpu", os.path.relpath(self.cpu, ROOT)],
        }, seconds, self.environment)
        # without a cpu target there are the bundle's reference losses
        broken = [told(name, *result) for name, result in done.items() if result[0] != 0]
        if any(done[name][0] != 0 for name in ("build kernels", "build trainer")):
            raise Failed("\n".join(broken))
        return "for sm_%s" % self.arch if self.arch else "for the emulator"

    def stage_kernels(self, seconds):
        jobs, broken = {}, []
        for name, path in self.kernel_programs().items():
            if os.path.exists(os.path.join(ROOT, self.build + path)):
                jobs["kernels " + name] = [self.build + path] + (["-tc=" + self.cases] if self.cases else [])
            else:
                broken.append("kernels %s: %s was not built" % (name, self.build + path))
                self.report["kernels"][name] = {"passed": 0, "failed": 1}
        environment = dict(self.environment, OMP_NUM_THREADS=str(max(1, CORES // max(1, len(jobs)))))
        for name, (status, text) in run_all(jobs, seconds, environment).items():
            counts = re.search(r"test cases: *\d+ *\| *(\d+) passed *\| *(\d+) failed", re.sub(r"\x1b\[[0-9;]*m", "", text))
            passed, failed = (int(counts[1]), int(counts[2])) if counts else (0, 0)
            if status != 0 or passed == 0:
                failed = max(failed, 1)
                broken.append(told(name, status, text))
            self.report["kernels"][name.split()[1]] = {"passed": passed, "failed": failed}
        if broken:
            raise Failed("\n".join(broken))
        return "%d cases" % sum(area["passed"] for area in self.report["kernels"].values())

    def stage_train(self, seconds):
        end = time.monotonic() + seconds
        data = data_write(os.path.join(LOGS, "tiny_train.bin"))
        if os.path.exists(self.cpu):
            expected_of, reference = lambda name, left: losses_of(self.cpu, name, data, left, self.environment), "build/cpu"
        else:
            reference = os.path.join(self.bundle, "reference.json")
            if not os.path.exists(reference):
                raise Failed("no losses to compare with: build/cpu/train_gpt was not built, and there is no %s" % reference)
            with open(reference) as file:
                brought = json.load(file)
            expected_of = lambda name, left: brought[name]
        self.report["reference"] = reference
        broken = []
        for name in RUNS:
            try:
                expected = expected_of(name, end - time.monotonic())
                found = losses_of(self.trainer, name, data, end - time.monotonic(), self.environment, ["--comm", "mpi"])
                worst = losses_compare(expected, found, RUNS[name][2])
                self.report["train"][name] = {"losses": found, "expected": expected, "worst": worst}
            except Failed as failed:
                broken.append(str(failed))
                self.report["train"][name] = {"worst": None}
                continue
            if not worst <= TOLERANCE:
                broken.append("train %s: the loss is %.1e off the cpu target's, %.0e is allowed:\n    %s\n    %s" % (
                    name, worst, TOLERANCE, found, expected))
        if broken:
            raise Failed("\n".join(broken))
        return "against " + os.path.relpath(reference, ROOT)

    def stage_bench(self, seconds):
        program, out = self.build + "/dev/bench_kernels", os.path.join(LOGS, "bench.jsonl")
        if not os.path.exists(os.path.join(ROOT, program)):
            raise Failed("bench: %s was not built" % program)
        if os.path.exists(out):
            os.remove(out)
        command = [program, "--json", out] + (["--tiny"] if self.emu else [])
        status, text = run_all({"bench": command}, seconds, self.environment)["bench"]
        if os.path.exists(out):  # what it got to
            with open(out) as file:
                lines = [json.loads(line) for line in file.read().splitlines()]
            self.report["bench_device"], self.report["bench"] = (lines[0] if lines else None), lines[1:]
        if status != 0:
            raise Failed(told("bench", status, text))
        return "%d kernels" % len(self.report["bench"])


# ---- training ----

def data_write(path):
    """5000 tokens in llm.c's format that follow a rule half of the time, 12 of the vocabulary only: ten steps learn that."""
    state, ids = 1, [0]
    while len(ids) < 5000:
        state = (1103515245 * state + 12345) % 2**31
        ids.append((3 * ids[-1] + 1) % 12 if state >> 30 else (state >> 16) % 12)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(struct.pack("<256i", 20240520, 1, len(ids), *[0] * 253) + struct.pack("<%dH" % len(ids), *ids))
    return path


def losses_of(program, name, data, seconds, environment, more=()):
    """The losses of a run of RUNS, a step each."""
    if not os.path.exists(program):
        raise Failed("train %s: %s was not built" % (name, os.path.relpath(program, ROOT)))
    flags, ranks, _ = RUNS[name]
    label = "train %s %s" % (name, os.path.basename(os.path.dirname(program)))
    log = os.path.join(LOGS, re.sub(r"\W+", "_", label) + ".jsonl")
    if os.path.exists(log):
        os.remove(log)
    command = ["mpirun", "-np", str(ranks), program] + TRAIN + ["--train", data, "--log", log] + list(flags) + list(more)
    status, text = run_all({label: command}, seconds, environment)[label]
    if status != 0:
        raise Failed(told(label, status, text))
    with open(log) as file:
        return [line["loss"] for line in map(json.loads, file) if "loss" in line]


def losses_compare(expected, found, lossy):
    """The largest relative difference; infinite where there is nothing to compare, or the model did not learn."""
    if len(expected) != 10 or len(found) != 10 or not expected[-1] < expected[0]:
        return float("inf")
    pairs = [(sum(expected), sum(found))] if lossy else zip(expected, found)
    worst = [abs(f / e - 1) for e, f in pairs]
    return max(worst) if all(w == w for w in worst) else float("inf")


# ---- the table ----

def table(report):
    rows = [("what", "measured", "floor, limit", "floor / time", "")]
    for name, stage in report["stages"].items():
        word = stage["word"] if stage["ok"] else "FAILED"
        rows.append((name, "%.1f s" % stage["seconds"], "%.0f s" % stage["limit"], "", word))
    for name, area in report["kernels"].items():
        word = "%d FAILED" % area["failed"] if area["failed"] else "ok"
        rows.append(("kernels: " + name, "%d passed" % area["passed"], "0 failed", "", word))
    for name, run in report["train"].items():
        worst = run["worst"]
        rows.append(("train: " + name, "-" if worst is None else "%.1e off" % worst, "%.0e" % TOLERANCE, "",
                     "ok" if worst is not None and worst <= TOLERANCE else "FAILED"))
    for row in report["bench"]:
        rows.append((row["kernel"], "%.1f us" % row["us"], "%.1f us" % row["floor_us"], "%.0f%%" % row["percent"],
                     "%s, %.4g GB/s" % (row["bound"], 1e3 * row["mb"] / row["us"]) if row["bound"] == "bytes"
                     else "%s, %.4g TFLOP/s" % (row["bound"], 1e3 * row["gflop"] / row["us"])))
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["| {:<{}} | {:>{}} | {:>{}} | {:>{}} | {:<{}} |".format(*sum(zip(row, widths), ())) for row in rows]
    lines.insert(1, "|" + "|".join("-" * (w + 1) + ("-" if i in (0, 4) else ":") for i, w in enumerate(widths)) + "|")
    return "\n".join(lines) + "\n"


def head(report):
    device = report.get("bench_device")
    text = "# %s, %s\n\n" % (report["device"] or "no GPU", "all passed" if report["ok"] else "NOT all passed")
    commit = " at commit " + report["commit"] if report["commit"] else ""
    text += "`%s`%s; %.0f s in all.\n" % (report["command"], commit, report["seconds"])
    if device:
        text += ("Kernels: {precision}, B {B}, T {T}, C {C}, NH {NH}, V {V}; floors by {gb_per_s:.0f} GB/s and {tflops:.4g} "
                 "TFLOP/s. How to read it: dev/cuda/README.md.\n".format(**device))
    return text + "\n"


def main():
    parser = argparse.ArgumentParser(prog="gpu_check.sh", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help="only these: " + " ".join(SECONDS))
    parser.add_argument("--emu", action="store_true", help="on the emulator, with tiny shapes and three times the time")
    parser.add_argument("--out", default=os.path.join(ROOT, "dev", "results"), metavar="DIR")
    parser.add_argument("--name", help="of the result; default: the GPU's")
    parser.add_argument("--bundle", default=os.path.join(ROOT, "build", "gpu_bundle"), metavar="DIR")
    parser.add_argument("--cases", metavar="PATTERN", help="only the kernel tests of these names, as in '*norm*'")
    parser.add_argument("--limit", action="append", default=[], metavar="STAGE=SECONDS", help="another limit for a stage")
    parser.add_argument("--reference", metavar="FILE", help="only write the cpu target's losses there, for the bundle")
    options = parser.parse_args()
    times = 3 if options.emu else 1
    limits = {}
    for text in options.limit:
        stage, _, seconds = text.partition("=")
        if stage not in SECONDS or not re.fullmatch(r"\d+(\.\d+)?", seconds):
            parser.error("--limit %s: expected STAGE=SECONDS, STAGE one of %s" % (text, ", ".join(SECONDS)))
        limits[stage] = float(seconds)
    for stage in options.stages:
        if stage not in SECONDS:
            parser.error("stage '%s': expected one of %s" % (stage, ", ".join(SECONDS)))

    if options.reference:
        data = data_write(os.path.join(LOGS, "tiny_train.bin"))
        cpu = os.path.join(ROOT, "build", "cpu", "train_gpt")
        losses = {name: losses_of(cpu, name, data, 60, os.environ) for name in RUNS}
        with open(options.reference, "w") as file:
            json.dump(losses, file, indent=1)
        return

    begin = time.monotonic()
    environment = dict(os.environ, CUDA_VISIBLE_DEVICES=os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0])
    check = Check(options.emu, options.bundle, options.cases, environment)
    report = check.report
    report["commit"] = ""
    if shutil.which("git"):
        head_is = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        report["commit"] = head_is.stdout.strip()
    report["command"] = "scripts/gpu_check.sh " + " ".join(sys.argv[1:])
    for stage in options.stages or SECONDS:
        stage_begin = time.monotonic()
        limit = limits.get(stage, min(times * SECONDS[stage], max(0, times * ALL_SECONDS - (stage_begin - begin))))
        print("%s .." % stage, file=sys.stderr, flush=True)
        try:
            word, ok = getattr(check, "stage_" + stage)(limit), True
        except Failed as failed:
            word, ok = str(failed), False
            print(word, file=sys.stderr, flush=True)
        report["stages"][stage] = {"ok": ok, "word": word, "seconds": time.monotonic() - stage_begin, "limit": limit}
    report["ok"] = all(stage["ok"] for stage in report["stages"].values())
    report["seconds"] = time.monotonic() - begin

    name = options.name or ("emu" if options.emu else re.sub(r"\W+", "_", report["device"] or "none").strip("_").lower())
    os.makedirs(options.out, exist_ok=True)
    path = os.path.join(options.out, "gpu_" + name)
    with open(path + ".json", "w") as file:
        json.dump(report, file, indent=1)
    with open(path + ".md", "w") as file:
        file.write(head(report) + table(report))
    print(head(report) + table(report) + "\nwritten to %s.json and .md" % path)
    sys.exit(0 if report["ok"] else 1)


if __name__ == "__main__":
    try:
        main()
    except Failed as failed:
        sys.exit("gpu_check: %s" % failed)
