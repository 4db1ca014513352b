"""The trainer as a user drives it: checkpoints and resume, Hugging Face's reading of them, signals, logs, flags, samples."""
import array
import glob
import json
import math
import os
import re
import signal
import struct
import subprocess
import unittest

from program import *

VENV_PYTHON = os.path.join(ROOT, "build", "venv", "bin", "python")
STATE_KEYS = {"format_version", "step", "sequences", "tokens", "best_val_loss", "run"}


class Resume(ProgramTest):
    def resumed_equals_straight(self, flags, ranks):
        """40 steps at once, and 20 + 20, in two processes: the same bytes."""
        common = self.both + flags + ["--steps", "40", "--val-every", "8", "--save-every", "10"]
        straight, halves = self.path("straight"), self.path("halves")
        self.run_ok(common + ["--out", straight, "--log", straight + ".jsonl"], ranks)
        first = self.run_ok(common + ["--out", halves, "--log", halves + ".jsonl", "--stop-step", "20"], ranks)
        self.assertNotIn("step 21/", first.stdout)
        self.assertEqual(read(halves + "/latest"), b"step_00000020\n")
        done = self.run_ok(common + ["--out", halves, "--log", halves + ".jsonl", "--resume"], ranks)
        self.assertIn("resumed from " + halves + "/step_00000020", done.stdout)
        self.assertNotIn("step 20/", done.stdout)
        for step in ("/step_00000020", "/step_00000030", "/step_00000040"):
            self.assert_same_files(straight + step, halves + step)
        self.assertEqual(losses(straight + ".jsonl"), losses(halves + ".jsonl"))
        self.assertEqual(sorted(losses(halves + ".jsonl")), list(range(1, 41)))
        self.assertLess(losses(halves + ".jsonl")[40], losses(halves + ".jsonl")[1] - 0.3)  # it learns at all
        first_half = {step: loss for step, loss in val_losses(halves + ".jsonl").items() if step != 20}  # 20: a run's end
        self.assertEqual(val_losses(straight + ".jsonl"), first_half)

    def test_one_rank(self):
        self.resumed_equals_straight([], 1)

    def test_one_rank_accumulation_and_block_recompute(self):
        self.resumed_equals_straight(["--global-batch", "8", "--recompute", "block"], 1)

    @needs_mpi
    def test_tp2_taco(self):
        self.resumed_equals_straight(["--tp", "2", "--tp-codec", "taco"], 2)

    @needs_mpi
    def test_tp2_stochastic_rounding_accumulation_and_block_recompute(self):
        self.resumed_equals_straight(["--tp", "2", "--tp-codec", "hadint6:sr", "--global-batch", "12", "--recompute", "block"], 2)

    @needs_mpi
    def test_tp2_without_sequence_parallelism_after_codec_warmup(self):
        self.resumed_equals_straight(["--tp", "2", "--sp", "off", "--tp-codec", "hadint4:sr", "--codec-warmup", "25",
                                      "--recompute", "gelu"], 2)

    @needs_mpi
    def test_dp2_tp2(self):
        self.resumed_equals_straight(["--tp", "2", "--tp-codec", "taco:sr", "--micro-batch", "2"], 4)

    @needs_mpi
    def test_checkpoint_of_tp2_goes_on_at_other_sizes(self):
        common = self.both + ["--steps", "40"]
        self.run_ok(common + ["--stop-step", "20", "--out", self.path("out"), "--tp", "2"], 2)
        jobs = [(common + ["--log", self.path("stayed.jsonl"), "--tp", "2"], 2)]
        for tp in (1, 4):
            jobs.append((common + ["--resume", self.path("out"), "--log", self.path("tp%d.jsonl" % tp), "--tp", str(tp)], tp))
        jobs.append((common + ["--resume", self.path("out"), "--log", self.path("dp2.jsonl"), "--micro-batch", "2"], 2))
        for done in run_all(jobs):
            self.assertEqual(done.status, 0, tail(done.stderr))
        stayed = {step: loss for step, loss in losses(self.path("stayed.jsonl")).items() if step > 20}
        for other in ("tp1", "tp4", "dp2"):
            moved = losses(self.path(other + ".jsonl"))
            self.assertEqual(sorted(moved), sorted(stayed))
            for step, loss in stayed.items():
                self.assertLessEqual(abs(moved[step] / loss - 1), 3e-6, "%s, step %d" % (other, step))

    def test_log_drops_what_came_after_the_checkpoint(self):
        out, log = self.path("out"), self.path("log.jsonl")
        common = self.base + ["--steps", "12", "--save-every", "4", "--out", out, "--log", log]
        self.run_ok(common + ["--stop-step", "8"])
        before = losses(log)
        write(out + "/latest", "step_00000004\n")
        self.run_ok(common + ["--resume"])
        self.assertEqual({step: losses(log)[step] for step in before}, before)
        self.assertEqual(list(losses(log)), list(range(1, 13)))


class Checkpoint(ProgramTest):
    def test_names_contents_and_pruning(self):
        out = self.path("out")
        write(self.path("tokenizer.json"), tokenizer_bytes(VOCAB))
        self.run_ok(self.both + ["--steps", "10", "--save-every", "2", "--keep", "2", "--out", out, "--seed", "7"])
        self.assertEqual(sorted(os.listdir(out)), ["latest", "step_00000008", "step_00000010"])
        self.assertEqual(read(out + "/latest"), b"step_00000010\n")
        checkpoint = out + "/step_00000010"
        self.assertEqual(sorted(os.listdir(checkpoint)), ["config.json", "model.safetensors", "optimizer.safetensors",
                                                          "tokenizer.json", "trainer_state.json"])
        self.assertEqual(read(checkpoint + "/tokenizer.json"), read(self.path("tokenizer.json")))
        state = json.loads(read(checkpoint + "/trainer_state.json"))
        self.assertLessEqual(STATE_KEYS, set(state))
        self.assertEqual((state["step"], state["sequences"], state["tokens"]), (10, 10 * B, 10 * B * T))
        self.assertEqual((state["run"]["seed"], state["run"]["steps"], state["run"]["schedule"]), (7, 10, "cosine"))
        self.assertLess(state["best_val_loss"], math.log(VOCAB) + 0.1)
        model, optimizer = (read_safetensors(checkpoint + "/%s.safetensors" % name) for name in ("model", "optimizer"))
        self.assertEqual(list(optimizer), ["m." + name for name in model] + ["v." + name for name in model])
        self.assertEqual(model["transformer.wte.weight"][:2], ("F32", [VOCAB, 32]))  # no padding
        self.assertEqual(model["transformer.h.1.attn.c_attn.weight"][:2], ("F32", [32, 96]))  # Conv1D: [in, out]
        self.assertEqual(len(model), 4 + 12 * 2)
        self.assertEqual({dtype for dtype, _, _ in optimizer.values()}, {"F32"})

    def test_keep_0_keeps_all(self):
        self.run_ok(self.base + ["--steps", "5", "--save-every", "1", "--keep", "0", "--out", self.path("out")])
        self.assertEqual(len(glob.glob(self.path("out/step_*"))), 5)

    def val_loss(self, flags):
        """Of the weights that are loaded: one step at learning rate 0 leaves them as they are."""
        log = self.path("val.jsonl")
        self.run_ok(SMALL + ["--train", self.train, "--val", self.val, "--steps", "1", "--lr", "0", "--log", log] + flags)
        return val_losses(log)[1]

    def test_model_directory(self):
        common = self.both + ["--steps", "20", "--log", self.path("log.jsonl"), "--out", self.path("out")]
        self.run_ok(common + (["--tp", "2"] if HAVE_MPI else []), 2 if HAVE_MPI else 1)
        checkpoint = self.path("out/step_00000020")
        logged = val_losses(self.path("log.jsonl"))[20]
        self.assertLessEqual(abs(self.val_loss(["--model", checkpoint]) - logged), 3e-6)
        # in bfloat16, and under names without "transformer.": as the same weights, rounded, in float32
        tensors = read_safetensors(checkpoint + "/model.safetensors")
        short, rounded = {}, {}
        for name, (_, shape, data) in tensors.items():
            words = [(word + 0x7fff + (word >> 16 & 1)) >> 16 for word in struct.unpack("<%dI" % (len(data) // 4), data)]
            short[name.replace("transformer.", "")] = ("BF16", shape, struct.pack("<%dH" % len(words), *words))
            rounded[name] = ("F32", shape, struct.pack("<%dI" % len(words), *[word << 16 for word in words]))
        found = []
        for change in (short, rounded):
            write_safetensors(checkpoint + "/model.safetensors", change)
            found.append(self.val_loss(["--model", checkpoint]))
        self.assertEqual(found[0], found[1])
        self.assertNotEqual(found[0], logged)
        self.assertLess(abs(found[0] - logged), 0.01)

    def test_model_config_file(self):
        self.run_ok(self.both + ["--steps", "1", "--out", self.path("out")])
        done = self.run_ok(self.both + ["--model", self.path("out/step_00000001/config.json"), "--steps", "1"])
        self.assertIn("2 layers, 32 channels, 4 heads, vocabulary 61", done.stdout)

    @unittest.skipUnless(os.path.exists(VENV_PYTHON), "build/venv with transformers is not there (scripts/install_deps.sh --test)")
    def test_transformers_gives_the_same_logits(self):
        """Losses of prefixes of several sequences, whose differences are single tokens' log-probabilities; the whole
        validation set; and the likeliest continuation."""
        common = self.both + ["--steps", "30", "--log", self.path("log.jsonl"), "--out", self.path("out")]
        flags = ["--sample-every", "30", "--temperature", "0", "--sample-tokens", str(T - 1)]
        self.run_ok(common + flags + (["--tp", "2"] if HAVE_MPI else []), 2 if HAVE_MPI else 1)
        checkpoint = self.path("out/step_00000030")
        ids = struct.unpack("<%dH" % (20 * T + 1), read(self.val)[1024:])
        windows = [ids[i * T:(i + 1) * T + 1] for i in range(20)]
        sample = [int(word) for word in read_log(self.path("log.jsonl"))[-1]["sample"].split()]
        rows = [window[:T] for window in windows] + [sample]
        write(self.path("ids"), "\n".join(" ".join(map(str, row)) for row in rows))
        subprocess.run([VENV_PYTHON, os.path.join(ROOT, "test/oracle/check_hf.py"), checkpoint, self.path("ids"), self.path("raw")],
                       check=True, stderr=subprocess.DEVNULL)
        raw = array.array("f", read(self.path("raw")))
        logits = [[raw[(row * T + t) * VOCAB:(row * T + t + 1) * VOCAB] for t in range(T)] for row in range(len(rows))]

        def token_loss(row, t, target):
            largest = max(logits[row][t])
            return math.log(math.fsum(math.exp(x - largest) for x in logits[row][t])) + largest - logits[row][t][target]
        expected = [[token_loss(row, t, window[t + 1]) for t in range(T)] for row, window in enumerate(windows)]
        logged = val_losses(self.path("log.jsonl"))[30]
        self.assertLessEqual(abs(logged - math.fsum(map(math.fsum, expected)) / (20 * T)), 3e-6)
        for row in (0, 7, 19):
            for length in (1, 2, 9, T):
                write(self.path("one.bin"), token_bytes(windows[row][:length + 1]))
                found = self.val_loss(["--model", checkpoint, "--val", self.path("one.bin"), "--seq", str(length)])
                self.assertLessEqual(abs(found * length - math.fsum(expected[row][:length])), 4e-6 * length)
        for t in range(T - 1):
            self.assertEqual(sample[t + 1], max(range(VOCAB), key=lambda i: logits[20][t][i]))


class Signals(ProgramTest):
    def stops_and_resumes(self, ranks, number, to_each_rank):
        flags = ["--tp", str(ranks), "--tp-codec", "hadint8:sr" if ranks > 1 else "none"]
        run = Run(self.both + flags + ["--steps", "100000", "--schedule", "constant", "--warmup", "0", "--out",
                                       self.path("stopped"), "--sample-every", "1000000"], ranks)
        run.line("step     20/")
        if to_each_rank:
            for pid in run.ranks():
                os.kill(pid, number)
        else:
            run.signal(number)
        done = run.finish()
        self.assertEqual((done.status, done.complaints), (0, []), tail(done.stdout) + tail(done.stderr))
        step = int(re.search(r"stopped by a signal after step (\d+)", done.stdout)[1])
        self.assertLess(step, 100000)
        self.assertEqual(read(self.path("stopped/latest")).decode(), "step_%08d\n" % step)
        if step > 2500:
            self.skipTest("%d steps before the signal came through: too many to repeat" % step)
        ending = ["--schedule", "constant", "--warmup", "0", "--steps", str(step + 10)]
        jobs = [(self.both + flags + ending + ["--print-every", "1000"] + where, ranks) for where in (
            ["--out", self.path("stopped"), "--resume"], ["--out", self.path("straight")])]
        for again in run_all(jobs):
            self.assertEqual(again.status, 0, tail(again.stderr))
        name = "/step_%08d" % (step + 10)
        self.assert_same_files(self.path("stopped" + name), self.path("straight" + name))

    def test_sigterm(self):
        self.stops_and_resumes(1, signal.SIGTERM, False)

    def test_sigusr1(self):
        self.stops_and_resumes(1, signal.SIGUSR1, False)

    @needs_mpi
    def test_sigusr1_forwarded_by_mpirun(self):
        self.stops_and_resumes(2, signal.SIGUSR1, False)

    @needs_mpi
    def test_sigterm_to_one_rank_after_the_other(self):
        self.stops_and_resumes(2, signal.SIGTERM, True)


class Flags(ProgramTest):
    def test_help(self):
        text = self.run_ok(["--help"]).stdout
        for group in ("Model", "Data", "Parallel", "Training", "Optimizer", "Compression", "Validation and samples", "Output"):
            self.assertIn("\n%s:" % group, text)
        for word in ("none  bf16  fp8  int8  taco  hadint8", "fmt=e4m3|e5m2", "d12 768/12", "d48 1600/25", "attn_in.bwd",
                     "--global-batch SEQUENCES", "mpirun -np 2"):
            self.assertIn(word, text)

    def test_help_and_config_are_printed_once(self):
        for flags in (["--help"], ["--print-config"]):
            one, two = run_all([(flags, 1), (flags, 2 if HAVE_MPI else 1)])
            self.assertEqual(two.status, 0)
            self.assertEqual(len(one.stdout.splitlines()), len(two.stdout.splitlines()))

    def test_printed_config_reads_back(self):
        flags = self.both + ["--lr", "3e-4", "--beta2", "0.99", "--codec", "attn_in.bwd=bf16", "--codec", "head.fwd=taco:g=64",
                             "--sp", "off", "--prompt", "a \"quoted\"\n line", "--schedule", "wsd", "--seed", "18446744073709551615"]
        printed = self.run_ok(flags + ["--print-config"]).stdout
        self.assertEqual(json.loads(printed)["lr"], 3e-4)
        config = write(self.path("run.json"), printed)
        self.assertEqual(self.run_ok(["--config", config, "--print-config"]).stdout, printed)

    def test_a_flag_beats_the_file(self):
        config = write(self.path("run.json"), json.dumps({"steps": 7, "micro-batch": 2, "codec": {"head.fwd": "bf16"}}))
        flags = ["--config", config, "--steps", "9", "--codec", "head.fwd=taco", "--print-config"]
        printed = json.loads(self.run_ok(flags).stdout)
        self.assertEqual((printed["steps"], printed["micro_batch"], printed["codec"]), (9, 2, {"head.fwd": "taco"}))
        self.assertEqual(json.loads(self.run_ok(flags[2:] + flags[:2]).stdout), printed)

    def test_a_run_from_a_file_equals_one_from_flags(self):
        flags = self.both + ["--steps", "5"]
        config = write(self.path("run.json"), self.run_ok(flags + ["--print-config"]).stdout)
        self.run_ok(flags + ["--log", self.path("flags.jsonl")])
        self.run_ok(["--config", config, "--log", self.path("file.jsonl")])
        self.assertEqual(losses(self.path("flags.jsonl")), losses(self.path("file.jsonl")))


class Reports(ProgramTest):
    def test_first_line_of_the_log(self):
        self.run_ok(self.both + ["--steps", "3", "--log", self.path("log.jsonl"), "--seed", "5"])
        run = read_log(self.path("log.jsonl"))[0]["run"]
        self.assertEqual((run["config"]["seed"], run["ranks"], run["dp"], run["model"]["n_embd"]), (5, 1, 1, 32))
        self.assertLessEqual({"host", "compiler", "started", "parameters"}, set(run))

    @needs_mpi
    def test_wire_bytes_are_the_closed_form(self):
        """Bytes handed to MPI by rank 0 in a step, from B T C L and tp, for each boundary; sp on and off."""
        layers, C = 2, 32
        crossings = {  # calls a step and micro-batch: {boundary: calls}
            "on": {"embed": 1, "attn_in": layers, "attn_out": layers, "mlp_in": layers, "mlp_out": layers, "head": 1},
            "off": {"embed.fwd": 1, "attn_out.fwd": layers, "mlp_out.fwd": layers, "attn_in.bwd": layers, "mlp_in.bwd": layers,
                    "head.bwd": 1}}
        cases = [("on", 2, "taco", 128, 8, []), ("off", 2, "taco", 128, 8, []), ("on", 4, "taco:g=256", 256, 8, []),
                 ("off", 4, "taco:g=512", 512, 8, ["--micro-batch", "6"]), ("on", 2, "hadint8:g=64", 64, 4, []),
                 ("on", 2, "taco", 128, 8, ["--recompute", "block"]), ("on", 2, "taco", 128, 8, ["--seq", "13"])]
        for case, (sp, t, codec, G, scales, extra) in enumerate(cases):
            with self.subTest(sp=sp, tp=t, codec=codec, extra=extra):
                log = self.path("%d.jsonl" % case)
                flags = ["--tp", str(t), "--sp", sp, "--tp-codec", codec, "--log", log, "--steps", "2", "--snr-every", "0"] + extra
                batch = 6 if "--micro-batch" in extra else B
                length = 13 if "--seq" in extra else T
                self.run_ok(self.base + flags + ["--global-batch", str(2 * batch)], t)
                n = batch * length * C // t
                encoded = -(-n // G) * (G + scales)
                times = 1 if sp == "on" else 2
                calls = {}
                for name, count in crossings[sp].items():
                    for place in [name] if "." in name else [name + ".fwd", name + ".bwd"]:
                        again = "block" in extra and place in ("attn_in.fwd", "attn_out.fwd", "mlp_in.fwd")
                        calls[place] = 2 * count * (2 if again else 1)  # two micro-batches
                for line in read_log(log)[1:]:
                    found = line["boundaries"]
                    self.assertEqual({name: b["calls"] for name, b in found.items()}, calls)
                    for name, count in calls.items():
                        self.assertEqual(found[name]["wire"], count * times * (t - 1) * encoded, name)
                        self.assertEqual(found[name]["raw"], count * times * (t - 1) * 2 * n, name)
                    self.assertEqual(line["wire_bytes"], sum(calls.values()) * times * (t - 1) * encoded)
                    self.assertEqual(line["raw_bytes"], sum(calls.values()) * times * (t - 1) * 2 * n)

    @needs_mpi
    def test_table_of_boundaries(self):
        done = self.run_ok(self.both + ["--steps", "3", "--tp", "2", "--tp-codec", "taco", "--codec", "head.bwd=hadint8"], 2)
        table = done.stdout[done.stdout.index("Tensor-parallel boundaries"):].splitlines()
        rows = {line.split()[0]: line.split() for line in table if line.split() and "." in line.split()[0]}
        self.assertEqual(len(rows), 12)
        self.assertEqual((rows["attn_in.fwd"][1:3], rows["head.bwd"][1]), (["taco", "6"], "hadint8"))
        self.assertEqual((rows["attn_in.fwd"][5], rows["head.bwd"][5]), ("1.882", "1.939"))  # TACO.md's ratios against bf16
        self.assertTrue(25 < float(rows["mlp_in.fwd"][6]) < 45, rows["mlp_in.fwd"])  # dB

    @needs_mpi
    def test_trace_has_each_rank_and_category(self):
        trace = self.path("trace.json")
        self.run_ok(self.both + ["--steps", "2", "--tp", "2", "--tp-codec", "taco", "--trace", trace], 2)
        events = [e for e in json.loads(read(trace))["traceEvents"] if e["ph"] == "X"]
        self.assertEqual({(e["pid"], e["cat"]) for e in events},
                         {(rank, cat) for rank in (0, 1) for cat in ("compute", "encode", "wire", "decode")})
        self.assertLessEqual({"embed.fwd", "attn_in.bwd", "block_forward", "block_backward"}, {e["name"] for e in events})
        self.assertTrue(all(e["dur"] >= 0 and e["ts"] >= 0 for e in events))

    def samples(self, flags, ranks):
        log = self.path("samples%d.jsonl" % ranks)
        self.run_ok(self.both + flags + ["--log", log, "--tp", str(ranks), "--steps", "20"], ranks)
        return [line["sample"] for line in read_log(log) if "sample" in line]

    @needs_mpi
    def test_likeliest_sample_is_the_same_at_tp2(self):
        write(self.path("tokenizer.json"), tokenizer_bytes(VOCAB))
        flags = ["--sample-every", "10", "--temperature", "0", "--prompt", "1 2", "--sample-tokens", "40"]
        one, two = self.samples(flags, 1), self.samples(flags, 2)
        self.assertEqual(len(one), 2)
        self.assertEqual(one, two)
        self.assertTrue(all(sample.startswith("1 2") and len(sample) == 43 for sample in one), one)

    def test_samples_keep_to_the_tokenizer_where_the_model_has_more_ids(self):
        write(self.path("tokenizer.json"), tokenizer_bytes(50))
        sample, = self.samples(["--sample-every", "20", "--top-k", "0", "--temperature", "1", "--prompt", "1"], 1)
        self.assertEqual(len(sample), 257)
        self.assertTrue(all(ord(char) < 50 for char in sample))

    def test_print_every(self):
        done = self.run_ok(self.base + ["--steps", "10", "--print-every", "4"])
        self.assertEqual(re.findall(r"^step +(\d+)/", done.stdout, re.M), ["1", "4", "8", "10"])

    def test_prepared_text(self):
        """From text to a sample, with data/prepare.py."""
        text = "".join("line %d of a text that is not long\n" % i for i in range(400))
        source = write(self.path("text.txt"), text)
        subprocess.run(["python3", os.path.join(ROOT, "data/prepare.py"), "--input", source, "--tokenizer", "chars", "--out",
                        self.path("data")], check=True, stdout=subprocess.DEVNULL)
        done = self.run_ok(["--model", "gpt2:d1,c=32,heads=2", "--train", self.path("data/*train*.bin"), "--val",
                            self.path("data/*val*.bin"), "--seq", "32", "--threads", "1", "--lr", "1e-2", "--steps", "60",
                            "--sample-every", "60", "--prompt", "line ", "--sample-tokens", "30"])
        self.assertIn("--- sample after step 60 ---\nline ", done.stdout)
        self.assertLess(float(re.search(r"validation loss (\S+),", done.stdout)[1]), 2.2)


if __name__ == "__main__":
    unittest.main()
