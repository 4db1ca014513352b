"""Helpers of the tests that drive the built trainer as a user does: small data, runs on one or more ranks, logs, tensors.

The program is build/cpu/train_gpt, the one without MPI where that is the only one, or what TRAIN_GPT names.
"""
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import tempfile
import time
import unittest
import uuid

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BUILDS = [os.path.join(ROOT, "build", build, "train_gpt") for build in ("cpu", "cpu-nompi")]
PROGRAM = os.path.abspath(os.environ.get("TRAIN_GPT") or next((path for path in BUILDS if os.path.exists(path)), BUILDS[0]))
HAVE_MPI = shutil.which("mpirun") is not None and "nompi" not in PROGRAM
SECONDS = 30  # no run of a test, right or wrong, may take longer
MARK = "TRAIN_GPT_TEST_RUN"  # an environment variable by which all processes of a run are found

ENVIRONMENT = dict(os.environ, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", **{  # scripts/mpi_env.sh
    "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none", "OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "vader,self",
    "OMPI_MCA_odls_base_sigkill_timeout": "0"})  # mpirun's patience with the other ranks of a failed run

needs_mpi = unittest.skipUnless(HAVE_MPI, "MPI is not on this machine")

VOCAB, T, B = 61, 16, 4
SMALL = ["--model", "gpt2:d2,c=32,heads=4,vocab=%d" % VOCAB, "--seq", str(T), "--micro-batch", str(B), "--threads", "1",
         "--lr", "1e-2"]


# ---- data ----

def token_bytes(ids, magic=20240520, version=1, count=None):
    return struct.pack("<256i", magic, version, len(ids) if count is None else count, *[0] * 253) + struct.pack(
        "<%dH" % len(ids), *ids)


def write(path, data):
    with open(path, "wb" if isinstance(data, bytes) else "w") as f:
        f.write(data)
    return path


def read(path):
    with open(path, "rb") as f:
        return f.read()


def text_ids(count, vocab=VOCAB, seed=1):
    """Tokens that follow a rule half of the time, so that there is something to learn."""
    draw = random.Random(seed)
    ids = [0]
    while len(ids) < count:
        ids.append((3 * ids[-1] + 1) % vocab if draw.random() < 0.5 else draw.randrange(vocab))
    return ids


def tokenizer_bytes(vocab=256):
    """A byte-level tokenizer in Hugging Face's format: id = byte, drawn as GPT-2 draws bytes."""
    plain = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or b >= 174]
    odd = [b for b in range(256) if b not in plain]
    char = {b: chr(b) for b in plain}
    char.update({b: chr(256 + i) for i, b in enumerate(odd)})
    return json.dumps({"version": "1.0", "added_tokens": [], "decoder": {"type": "ByteLevel"},
                       "model": {"type": "BPE", "vocab": {char[b]: b for b in range(vocab)}, "merges": []}})


# ---- runs ----

class Done:
    def __init__(self, status, stdout, stderr, seconds):
        self.status, self.stdout, self.stderr, self.seconds = status, stdout, stderr, seconds
        self.complaints = [line for line in stderr.splitlines() if line.startswith("train_gpt:")]


def tail(text, lines=20):
    """The end of an output, for messages of failed tests."""
    return "\n".join(text.splitlines()[-lines:])


class Run:
    """The program in the background: Run([...], ranks=2); then .line("step 3") .ranks() .signal(SIGUSR1) .finish()"""

    def __init__(self, arguments, ranks=1, program=PROGRAM, seconds=SECONDS, **environment):
        self.program, self.seconds = program, seconds
        self.mark = environment[MARK] = str(uuid.uuid4())
        self.stdout, self.stderr = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")
        launcher = ["mpirun", "-np", str(ranks)] if ranks > 1 else []
        self.begin = time.time()
        self.process = subprocess.Popen(launcher + [program] + arguments, stdin=subprocess.DEVNULL, stdout=self.stdout,
                                        stderr=self.stderr, env=dict(ENVIRONMENT, **environment), start_new_session=True)

    def output(self, file):
        file.seek(0)
        return file.read()

    def line(self, text):
        """Waits until the program has printed `text`."""
        while text not in self.output(self.stdout):
            if self.process.poll() is not None or time.time() > self.begin + self.seconds:
                self.end()
                raise AssertionError("'%s' was never printed:\n%s\n%s" % (
                    text, tail(self.output(self.stdout)), tail(self.output(self.stderr))))
            time.sleep(0.01)

    def ranks(self):
        """Process ids of the trainer (mpirun's own is left out), by what /proc says."""
        mark, found = (MARK + "=" + self.mark).encode(), []
        for name in os.listdir("/proc") if os.path.isdir("/proc") else []:
            try:
                if name.isdigit() and mark in read("/proc/%s/environ" % name).split(b"\0"):
                    if os.path.realpath("/proc/%s/exe" % name) == os.path.realpath(self.program):
                        found.append(int(name))
            except OSError:
                pass  # it ended meanwhile, or it is someone else's
        return sorted(found)

    def signal(self, number):
        self.process.send_signal(number)

    def end(self):
        for pid in [self.process.pid] + self.ranks():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait()

    def finish(self):
        """Waits for the end, which must come in time and leave no rank running."""
        try:
            status = self.process.wait(max(0.1, self.begin + self.seconds - time.time()))
        except subprocess.TimeoutExpired:
            self.end()
            raise AssertionError("still running after %d s:\n%s\n%s" % (
                self.seconds, tail(self.output(self.stdout)), tail(self.output(self.stderr))))
        deadline = time.time() + 5
        while self.ranks() and time.time() < deadline:
            time.sleep(0.05)
        left = self.ranks()
        self.end()
        if left:
            raise AssertionError("ranks left running: %s" % left)
        with self.stdout, self.stderr:
            return Done(status, self.output(self.stdout), self.output(self.stderr), time.time() - self.begin)


def run_all(jobs):
    """[(arguments, ranks)] side by side; the results in order."""
    return [run.finish() for run in [Run(arguments, ranks) for arguments, ranks in jobs]]


class ProgramTest(unittest.TestCase):
    """Each test has a directory of its own with small token files: self.train, self.val; self.path(name)."""

    @classmethod
    def setUpClass(cls):
        if not os.path.exists(PROGRAM):
            raise unittest.SkipTest("%s is not built" % PROGRAM)

    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = directory.name
        self.train = write(self.path("a_train.bin"), token_bytes(text_ids(5000)))
        self.val = write(self.path("a_val.bin"), token_bytes(text_ids(20 * T + 1, seed=2)))
        self.base = SMALL + ["--train", self.train]
        self.both = self.base + ["--val", self.val]

    def path(self, name):
        return os.path.join(self.directory, name)

    def run_ok(self, arguments, ranks=1):
        done = Run(arguments, ranks).finish()
        self.assertEqual(done.status, 0, tail(done.stdout) + tail(done.stderr))
        self.assertEqual(done.complaints, [])
        return done

    def assert_fails(self, done, words):
        text = tail(done.stdout) + "\n" + tail(done.stderr)
        self.assertNotEqual(done.status, 0, text)
        self.assertEqual(len(done.complaints), 1, text)
        for word in words:
            self.assertIn(word, done.complaints[0])

    def assert_same_files(self, first, second, names=("model.safetensors", "optimizer.safetensors")):
        for name in names:
            self.assertTrue(read(first + "/" + name) == read(second + "/" + name), "%s differs: %s, %s" % (name, first, second))


# ---- what runs leave ----

def read_log(path):
    with open(path) as f:
        return [json.loads(line) for line in f]


def losses(path):
    """{step: loss} of a log; a step that is there twice is an error."""
    found = [(line["step"], line["loss"]) for line in read_log(path) if "loss" in line]
    assert len(found) == len(dict(found)), "steps twice in " + path
    return dict(found)


def val_losses(path):
    return {line["step"]: line["val_loss"] for line in read_log(path) if "val_loss" in line}


def read_safetensors(path):
    """({name: (dtype, shape, bytes)}, header) in the file's order."""
    data = read(path)
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + size])
    body = data[8 + size:]
    return {name: (t["dtype"], t["shape"], body[t["data_offsets"][0]:t["data_offsets"][1]])
            for name, t in header.items() if name != "__metadata__"}


def write_safetensors(path, tensors):
    header, body = {"__metadata__": {"format": "pt"}}, b""
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    write(path, struct.pack("<Q", len(text)) + text + body)
