"""What goes wrong in a run ends it on all ranks, soon, with one message that says what and where; checkpoints stay whole.

Each case runs on one rank and, under mpirun, on two.
"""
import json
import os
import shutil
import signal
import struct
import subprocess
import unittest

from program import *


class FailureTest(ProgramTest):
    def fails(self, arguments, *words, tp=True):
        """Fails with one message that holds all of `words`, on one rank and on two."""
        counts = [1, 2] if HAVE_MPI else [1]
        jobs = [(arguments + (["--tp", str(ranks)] if tp else []), ranks) for ranks in counts]
        for (_, ranks), done in zip(jobs, run_all(jobs)):
            with self.subTest(ranks=ranks):
                self.assert_fails(done, words)

    def checkpoint(self):
        """out/ with one finished run of 4 steps; its checkpoint's directory."""
        self.run_ok(self.both + ["--steps", "4", "--out", self.path("out")])
        return self.path("out/step_00000004")


class Data(FailureTest):
    def test_missing_file(self):
        self.fails(SMALL + ["--train", self.path("none.bin")], "no token file matches", self.path("none.bin"), "prepare.py")

    def test_empty_glob(self):
        self.fails(self.base + ["--val", self.path("b_*.bin")], "no token file matches", "b_*.bin")

    def test_train_is_not_given(self):
        self.fails(SMALL, "--train is missing", "prepare.py")

    def test_a_directory_for_a_file(self):
        self.fails(SMALL + ["--train", self.directory], self.directory, "not a regular file")

    def test_wrong_magic(self):
        write(self.train, token_bytes(text_ids(100), magic=77))
        self.fails(self.base, self.train, "magic 77", "expected 20240520")

    def test_wrong_version(self):
        write(self.train, token_bytes(text_ids(100), version=9))
        self.fails(self.base, self.train, "version 9", "expected 1")

    def test_shorter_than_its_header_says(self):
        write(self.train, token_bytes(text_ids(100), count=101))
        self.fails(self.base, self.train, "1224 bytes", "101 tokens", "1226 bytes", "cut short")

    def test_shorter_than_a_header(self):
        write(self.val, b"short")
        self.fails(self.both, self.val, "5 bytes", "1024")

    def test_longer_sequences_than_the_file(self):
        write(self.val, token_bytes(text_ids(16)))
        self.fails(self.both, self.val, "16 tokens", "T = 16", "at least 17")

    def test_id_outside_the_vocabulary(self):
        ids = text_ids(5000)
        ids[::20] = [VOCAB] * len(ids[::20])
        write(self.train, token_bytes(ids))
        self.fails(self.base + ["--steps", "4"], self.train, "has id 61", "vocabulary has 61")

    def test_id_outside_the_vocabulary_in_the_validation_set(self):
        ids = text_ids(200)
        ids[100] = 1000
        write(self.val, token_bytes(ids))
        self.fails(self.both + ["--steps", "1"], self.val, "token 100", "id 1000", "vocabulary has 61")

    def test_check_data_finds_one_bad_id_deep_in_the_file(self):
        ids = text_ids(300000)
        ids[299999] = 61  # the last token, which short runs never read
        write(self.train, token_bytes(ids))
        self.run_ok(self.base + ["--steps", "1"])
        self.fails(self.base + ["--steps", "1", "--check-data"], self.train, "token 299999", "id 61")

    def test_tokenizer_larger_than_the_model(self):
        write(self.path("tokenizer.json"), tokenizer_bytes(100))
        self.fails(self.base, "tokenizer.json", "100 tokens", "vocabulary 61")

    def test_corrupt_tokenizer(self):
        write(self.path("tokenizer.json"), tokenizer_bytes(50)[:-9])
        self.fails(self.base, self.path("tokenizer.json"), "not valid JSON")

    def test_prompt_that_cannot_be_encoded_is_found_before_step_1(self):
        write(self.path("tokenizer.json"), tokenizer_bytes(50))
        arguments = self.base + ["--sample-every", "5", "--prompt", "hello"]
        self.fails(arguments, "tokenizer.json", "no id for byte 0x68")
        self.assertFalse("step 1/" in Run(arguments).finish().stdout)

    def test_empty_prompt(self):
        write(self.path("tokenizer.json"), tokenizer_bytes(50))
        self.fails(self.base + ["--sample-every", "5", "--prompt", ""], "--prompt", "empty")


class Options(FailureTest):
    def test_unknown_flag(self):
        self.fails(self.base + ["--stepz", "3"], "unknown flag --stepz", "did you mean --steps?")

    def test_misspelt_key_in_the_config_file(self):
        config = write(self.path("run.json"), json.dumps({"steps": 3, "micro_bach": 4}))
        self.fails(self.base + ["--config", config], config, '"micro_bach"', "did you mean micro_batch?")

    def test_wrong_type_in_the_config_file(self):
        config = write(self.path("run.json"), json.dumps({"steps": "many"}))
        self.fails(self.base + ["--config", config], config, '"steps"', "whole number", "many")

    def test_config_file_that_is_no_json(self):
        config = write(self.path("run.json"), "{steps: 3}")
        self.fails(self.base + ["--config", config], config, "not valid JSON")

    def test_missing_config_file(self):
        self.fails(self.base + ["--config", self.path("none.json")], self.path("none.json"))

    def test_unknown_codec(self):
        self.fails(self.base + ["--tp-codec", "tacco"], "--tp-codec", "'tacco'", "allowed: none, bf16, fp8, int8, taco")

    def test_codec_target_above_the_formats_maximum(self):
        self.fails(self.base + ["--tp-codec", "taco:target=57734"], "target 57734", "e4m3", "448")

    def test_unknown_boundary(self):
        self.fails(self.base + ["--codec", "attn.fwd=taco"], "--codec", "'attn.fwd'", "attn_in.fwd")

    def test_unknown_model(self):
        self.fails(self.base + ["--model", "gpt2:d7"], "gpt2:d7", "7 layers")

    @needs_mpi
    def test_heads_do_not_divide_over_tp(self):
        done = Run(self.base + ["--model", "gpt2:d1,c=33,heads=3", "--tp", "2"], 2).finish()
        self.assert_fails(done, ["3 heads", "--tp 2"])

    @needs_mpi
    def test_tokens_do_not_divide_over_tp(self):
        done = Run(self.base + ["--micro-batch", "1", "--seq", "13", "--tp", "2"], 2).finish()
        self.assert_fails(done, ["--micro-batch 1", "--seq 13", "13 tokens", "--tp 2"])

    @needs_mpi
    def test_one_rank_has_the_wrong_data(self):
        """What only rank 1 sees wrong is told once, and ends both."""
        ids = text_ids(10 * T + 1)
        ids[1 * T + 5] = 99  # of the second window: with --micro-batch 1 that is the second data-parallel rank's
        write(self.val, token_bytes(ids))
        self.assert_fails(Run(self.both + ["--micro-batch", "1", "--steps", "1"], 2).finish(), [self.val, "token 21", "id 99"])

    def test_tp_does_not_divide_the_ranks(self):
        self.fails(self.base + ["--tp", "3"], "--tp 3", "does not divide", tp=False)

    def test_pipelines_are_refused(self):
        self.fails(self.base + ["--pp", "2"], "--pp 2", tp=False)

    def test_more_memory_than_there_is(self):
        self.fails(self.base + ["--micro-batch", "200000000"], "memory")


class Output(FailureTest):
    def test_out_below_a_file(self):
        self.fails(self.base + ["--out", self.train + "/out"], "--out", self.train + "/out", "Not a directory")

    @unittest.skipUnless(os.path.isdir("/proc"), "there is no /proc")
    def test_out_that_cannot_be_made(self):
        self.fails(self.base + ["--out", "/proc/out"], "--out", "'/proc/out'", "cannot be written")

    def test_out_that_is_not_empty(self):
        os.mkdir(self.path("out"))
        write(self.path("out/notes"), "mine")
        self.fails(self.base + ["--out", self.path("out")], "--out", self.path("out"), "not empty", "--resume")
        self.assertEqual(os.listdir(self.path("out")), ["notes"])

    def test_log_and_trace_that_cannot_be_written_are_found_before_step_1(self):
        for flag in ("--log", "--trace"):
            arguments = self.base + ["--steps", "3", flag, self.path("none/file")]
            self.fails(arguments, flag, self.path("none/file"), "No such file or directory")
            self.assertFalse("step 1/" in Run(arguments).finish().stdout)

    @unittest.skipUnless(os.path.exists("/dev/full"), "there is no /dev/full")
    def test_log_on_a_full_disk(self):
        self.fails(self.base + ["--log", "/dev/full"], "--log", "/dev/full", "No space left")

    def test_disk_full_while_saving(self):
        disk = self.path("disk")
        os.mkdir(disk)
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", disk], capture_output=True)
        if mounted.returncode:
            self.skipTest("mounting a small tmpfs is not allowed here: " + mounted.stderr.decode().strip())
        self.addCleanup(subprocess.run, ["umount", "-l", disk], check=True)
        for ranks in [1, 2] if HAVE_MPI else [1]:
            with self.subTest(ranks=ranks):
                out = "%s/%d" % (disk, ranks)
                arguments = self.both + ["--tp", str(ranks), "--steps", "30", "--save-every", "1", "--keep", "0"]
                done = Run(arguments + ["--out", out], ranks).finish()
                self.assert_fails(done, ["could not be saved", out, "No space left on device", "as they were"])
                saved = sorted(os.listdir(out))
                self.assertGreater(len(saved), 1)
                self.assertEqual(read(out + "/latest").decode().strip(), [name for name in saved if name != "latest"][-1])
                self.assertEqual([name for name in saved if "." in name], [])
                again = self.run_ok(arguments + ["--resume", out, "--stop-step", str(len(saved))], ranks)
                self.assertIn("resumed from " + out, again.stdout)
                shutil.rmtree(out)


class Checkpoints(FailureTest):
    """Directories that cannot be loaded, by --resume and by --model."""

    def model_fails(self, checkpoint, *words):
        self.fails(self.base + ["--steps", "6", "--resume", checkpoint], *words)
        self.fails(self.base + ["--steps", "6", "--model", checkpoint], *words)

    def test_resume_from_nothing(self):
        os.mkdir(self.path("out"))
        self.fails(self.base + ["--out", self.path("out"), "--resume"], "nothing to resume", self.path("out"))
        self.fails(self.base + ["--resume", self.path("none")], "nothing to resume", self.path("none"))
        self.fails(self.base + ["--resume"], "--resume", "--out")

    def test_latest_names_what_is_gone(self):
        shutil.rmtree(self.checkpoint())
        self.fails(self.base + ["--out", self.path("out"), "--resume"], "step_00000004")

    def test_truncated(self):
        file = self.checkpoint() + "/model.safetensors"
        whole = read(file)
        for size in (0, 100, len(whole) - 1):
            write(file, whole[:size])
            self.model_fails(self.path("out/step_00000004"), file)

    def test_corrupt_header(self):
        file = self.checkpoint() + "/model.safetensors"
        whole = bytearray(read(file))
        whole[8:10] = b"x}"
        write(file, bytes(whole))
        self.model_fails(self.path("out/step_00000004"), file, "header")

    def test_impossible_header_length(self):
        file = self.checkpoint() + "/model.safetensors"
        write(file, struct.pack("<Q", 1 << 60) + read(file)[8:])
        self.model_fails(self.path("out/step_00000004"), file)

    def tensors_changed(self, change, file="model.safetensors"):
        path = self.checkpoint() + "/" + file
        tensors = read_safetensors(path)
        change(tensors)
        write_safetensors(path, tensors)
        return self.path("out/step_00000004")

    def test_tensor_of_the_wrong_shape(self):
        name = "transformer.h.1.mlp.c_fc.weight"

        def change(tensors):
            dtype, shape, data = tensors[name]
            tensors[name] = (dtype, shape[::-1], data)
        self.model_fails(self.tensors_changed(change), name, "[128, 32]", "[32, 128]", "model.safetensors")

    def test_missing_tensor(self):
        name = "transformer.h.0.ln_2.bias"
        self.model_fails(self.tensors_changed(lambda tensors: tensors.pop(name)), "lacks", name)

    def test_extra_tensor(self):
        name = "transformer.h.2.ln_1.bias"
        self.model_fails(self.tensors_changed(lambda tensors: tensors.update({name: ("F32", [1], bytes(4))})), name)

    def test_tensor_of_an_unknown_type(self):
        name = "transformer.ln_f.bias"
        self.model_fails(self.tensors_changed(lambda tensors: tensors.update({name: ("I32", [32], bytes(128))})), name, "I32",
                         "F32")

    def test_missing_moment(self):
        checkpoint = self.tensors_changed(lambda tensors: tensors.pop("v.transformer.ln_f.bias"), "optimizer.safetensors")
        self.fails(self.base + ["--steps", "6", "--resume", checkpoint], "lacks", "v.transformer.ln_f.bias")

    def test_missing_optimizer_file(self):
        os.remove(self.checkpoint() + "/optimizer.safetensors")
        self.fails(self.base + ["--resume", self.path("out")], "optimizer.safetensors")

    def test_corrupt_trainer_state(self):
        checkpoint = self.checkpoint()
        for text, word in (("{", "not valid JSON"), ("{}", "format_version"), ('{"format_version": 2}', "format_version is 2")):
            write(checkpoint + "/trainer_state.json", text)
            self.fails(self.base + ["--resume", checkpoint], "trainer_state.json", word)

    def test_config_that_is_not_gpt2(self):
        config = self.checkpoint() + "/config.json"
        write(config, read(config).decode().replace('"gpt2"', '"bert"'))
        self.model_fails(self.path("out/step_00000004"), config, "'bert'")

    def test_sequences_longer_than_the_models(self):
        self.fails(self.base + ["--model", self.checkpoint(), "--seq", "17"], "--seq 17", "16 positions")


class InMidRun(FailureTest):
    def test_divergence_stops_the_run_and_leaves_the_last_checkpoint(self):
        checkpoint = self.checkpoint()
        before = {name: read(checkpoint + "/" + name) for name in os.listdir(checkpoint)}
        for ranks in [1, 2] if HAVE_MPI else [1]:
            for codec in ("none", "taco", "hadint6:sr") if ranks > 1 else ("none",):
                with self.subTest(ranks=ranks, codec=codec):
                    arguments = self.both + ["--out", self.path("out"), "--resume", "--tp", str(ranks), "--tp-codec", codec]
                    done = Run(arguments + ["--steps", "40", "--lr", "1e30", "--clip", "0"], ranks).finish()
                    self.assert_fails(done, ["step 6", "loss", "norm", "lower --lr"])
                    self.assertEqual(done.status, 1)
                    self.assertEqual(before, {name: read(checkpoint + "/" + name) for name in os.listdir(checkpoint)})
                    self.assertEqual(read(self.path("out/latest")), b"step_00000004\n")
        self.assertIn("resumed from " + checkpoint, self.run_ok(self.both + ["--resume", self.path("out"), "--steps", "5"]).stdout)

    def test_samples_of_a_diverged_model(self):
        self.fails(self.base + ["--steps", "40", "--lr", "1e30", "--clip", "0", "--sample-every", "1"], "sampling", "diverged")

    def test_killed_rank(self):
        for ranks in [1, 2] if HAVE_MPI else [1]:
            with self.subTest(ranks=ranks):
                out = self.path("out%d" % ranks)
                arguments = self.both + ["--tp", str(ranks), "--steps", "1000000", "--save-every", "1", "--out", out, "--print-every", "1000"]
                run = Run(arguments, ranks)
                run.line("step 20: saved")
                pids = run.ranks()
                self.assertEqual(len(pids), ranks)
                os.kill(pids[-1], signal.SIGKILL)
                done = run.finish()  # in time, and no rank left
                self.assertNotEqual(done.status, 0)
                self.assertLessEqual(len(done.complaints), 1, done.stderr)
                latest = read(out + "/latest").decode().strip()
                self.assertGreaterEqual(latest, "step_00000020")
                again = self.run_ok(arguments + ["--resume", "--stop-step", str(int(latest[5:]) + 1)], ranks)
                self.assertIn("resumed from %s/%s" % (out, latest), again.stdout)

    @needs_mpi
    def test_rank_that_hangs_is_named(self):
        run = Run(self.base + ["--tp", "2", "--steps", "1000000", "--comm-timeout", "2", "--print-every", "10"], 2)
        run.line("20/1000000")
        pids = run.ranks()
        os.kill(pids[-1], signal.SIGSTOP)
        done = run.finish()
        self.assert_fails(done, ["rank ", "waited over 2 s", "collective", "--comm-timeout"])


if __name__ == "__main__":
    unittest.main()
