#!/usr/bin/env python3
"""data/prepare.py and scripts/ngram_baseline.py. Standard library only; no network."""
import contextlib
import hashlib
import io
import json
import math
import os
import random
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [os.path.join(ROOT, "data"), os.path.join(ROOT, "scripts")]
sys.dont_write_bytecode = True
import ngram_baseline  # noqa: E402
import prepare  # noqa: E402


def read_tokens(path):
    """An independent reader: (header words, ids)."""
    with open(path, "rb") as f:
        data = f.read()
    header = struct.unpack("<256i", data[:1024])
    return header, list(struct.unpack("<%dH" % ((len(data) - 1024) // 2), data[1024:]))


def lzw_encode(text):
    """compress(1)'s encoder, for lzw_decode: codes in blocks of eight of one width, the width growing with the table."""
    table = {bytes([i]): i for i in range(256)}
    next_code, width, codes, out = 257, 9, [], b""

    def flush():
        bits = sum(c << (width * i) for i, c in enumerate(codes))
        return bits.to_bytes((width * len(codes) + 7) // 8, "little")

    word, emitted = b"", 0
    for i in range(len(text) + 1):
        longer = word + text[i:i + 1]
        if i < len(text) and longer in table:
            word = longer
            continue
        codes.append(table[word])
        emitted += 1
        decoder_size = 257 + emitted - 1  # the decoder's table lags the encoder's by one
        if i < len(text):
            table[longer] = next_code
            next_code += 1
            word = text[i:i + 1]
        if decoder_size >= 1 << width and width < 16:
            out += flush().ljust(width, b"\0")
            codes, width = [], width + 1
        elif len(codes) == 8:
            out += flush()
            codes = []
    return out + flush()


class Case(unittest.TestCase):
    def setUp(self):
        self.dir = tempfile.mkdtemp(prefix="test_prepare_")
        self.out = os.path.join(self.dir, "out")

    def tearDown(self):
        shutil.rmtree(self.dir)

    def file(self, name, text):
        path = os.path.join(self.dir, name)
        with open(path, "wb") as f:
            f.write(text if isinstance(text, bytes) else text.encode())
        return path

    def run_main(self, *arguments):
        """(exit status, stdout, stderr)"""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = prepare.main(list(arguments))
        return status, out.getvalue(), err.getvalue()

    def refuse(self, arguments, *words):
        status, _, err = self.run_main(*arguments)
        self.assertEqual(status, 1)
        self.assertEqual(err.count("\n"), 1, err)  # one sentence
        for word in words:
            self.assertIn(word, err)

    def tokens(self, name):
        return read_tokens(os.path.join(self.out, name))

    def tokenizer(self):
        with open(os.path.join(self.out, "tokenizer.json"), encoding="utf-8") as f:
            return json.load(f)


class Prepare(Case):
    def test_bytes(self):
        text = bytes(random.Random(1).randrange(256) for _ in range(1000))
        path = self.file("any.dat", text)
        status, out, _ = self.run_main("--input", path, "--out", self.out)
        self.assertEqual(status, 0)
        header, train = self.tokens("any_train_000000.bin")
        _, val = self.tokens("any_val_000000.bin")
        self.assertEqual(header[:3], (20240520, 1, len(train)))
        self.assertEqual(set(header[3:]), {0})
        self.assertEqual(bytes(train + val), text)
        self.assertTrue(897 <= len(train) <= 900)
        self.assertEqual(sorted(os.listdir(self.out)), ["any_train_000000.bin", "any_val_000000.bin", "tokenizer.json"])
        for word in ("256 ids", "--train", "--val", "1000 bytes"):
            self.assertIn(word, out)

    def test_bytes_tokenizer_json(self):
        self.run_main("--input", self.file("a", "x" * 100), "--out", self.out)
        t = self.tokenizer()
        vocab = t["model"]["vocab"]
        self.assertEqual(sorted(vocab.values()), list(range(256)))
        for text, value in (("A", 65), ("Ġ", 32), ("Ċ", 10), ("Ā", 0), ("ÿ", 255), ("Ń", 173), ("ł", 160), ("ġ", 127)):
            self.assertEqual(vocab[text], value)  # GPT-2's table
        self.assertEqual(t["model"]["type"], "BPE")
        self.assertEqual(t["model"]["merges"], [])
        self.assertEqual(t["decoder"]["type"], "ByteLevel")
        self.assertEqual((t["pre_tokenizer"]["add_prefix_space"], t["pre_tokenizer"]["use_regex"]), (False, False))

    def test_bytes_do_not_cut_a_character(self):
        for shift in range(4):
            path = self.file("a", "x" * shift + "😀" * 100)
            self.run_main("--input", path, "--out", self.out)
            train = bytes(self.tokens("a_train_000000.bin")[1])
            val = bytes(self.tokens("a_val_000000.bin")[1])
            self.assertEqual(len((train + val).decode()), shift + 100)
            train.decode(), val.decode()
            self.assertTrue(0 <= int((400 + shift) * 0.9) - len(train) < 4)

    def test_chars(self):
        text = "b€a\r\n😀 a" * 100
        self.run_main("--input", self.file("c.txt", text), "--out", self.out, "--tokenizer", "chars")
        ids = self.tokens("c_train_000000.bin")[1] + self.tokens("c_val_000000.bin")[1]
        characters = sorted(set(text))
        self.assertEqual("".join(characters[i] for i in ids), text)
        self.assertEqual(len(self.tokens("c_train_000000.bin")[1]), int(len(text) * 0.9))
        t = self.tokenizer()
        self.assertEqual(t["model"]["vocab"], {c: i for i, c in enumerate(characters)})
        self.assertEqual((t["model"]["type"], t["decoder"]["type"]), ("WordLevel", "Fuse"))

    def test_several_files_share_the_validation(self):
        paths = [self.file("a", "a" * 1000), self.file("b", "b" * 200)]
        self.run_main("--input", *paths, "--out", self.out, "--name", "ab", "--val-fraction", "0.25")
        self.assertEqual(bytes(self.tokens("ab_train_000000.bin")[1]), b"a" * 750 + b"b" * 150)
        self.assertEqual(bytes(self.tokens("ab_val_000000.bin")[1]), b"a" * 250 + b"b" * 50)

    def test_shards(self):
        text = bytes(range(256)) * 40
        path = self.file("a", text)
        prepare.prepare([path], self.out, "s", shard_tokens=3000)
        names = sorted(n for n in os.listdir(self.out) if "train" in n)
        self.assertEqual(len(names), 4)  # 9,216 tokens
        parts = [self.tokens(n)[1] for n in names]
        self.assertEqual({len(p) for p in parts}, {2304})  # even sizes, none of them a scrap
        val = self.tokens("s_val_000000.bin")[1]
        self.assertEqual(bytes(sum(parts, []) + val), text)
        prepare.prepare([path], self.out, "s", shard_tokens=100000)  # fewer shards: the old ones go
        self.assertEqual(sorted(os.listdir(self.out)), ["s_train_000000.bin", "s_val_000000.bin", "tokenizer.json"])

    def test_pieces(self):
        """Files longer than one read."""
        before, prepare.CHUNK = prepare.CHUNK, 7
        try:
            text = "äöü€ abc" * 30
            path = self.file("p", text)
            prepare.prepare([path], self.out, "p", "bytes", 0.1, 50)
            prepare.prepare([path], self.out + "2", "p", "chars", 0.1, 50)
        finally:
            prepare.CHUNK = before
        for out, expected in ((self.out, list(text.encode())), (self.out + "2", [sorted(set(text)).index(c) for c in text])):
            names = sorted(n for n in os.listdir(out) if n.endswith(".bin"))
            ids = sum((read_tokens(os.path.join(out, n))[1] for n in names), [])
            self.assertEqual(ids, expected)

    def test_header_above_2_31(self):
        writer = prepare.TokenWriter(os.path.join(self.dir, "big"), (1 << 32) + 5, 1 << 40)
        writer.write(b"\1\0")
        writer.close()
        with open(os.path.join(self.dir, "big_000000.bin.tmp"), "rb") as f:
            header = struct.unpack("<4i2I", f.read(24))
        self.assertEqual(header, (20240520, 1, -1, 0, 5, 1))
        writer.discard()
        self.assertEqual(os.listdir(self.dir), [])

    def test_no_validation(self):
        self.run_main("--input", self.file("a", "a" * 10), "--out", self.out, "--val-fraction", "0")
        self.assertEqual(sorted(os.listdir(self.out)), ["a_train_000000.bin", "tokenizer.json"])

    def test_refusals(self):
        out = ["--out", self.out]
        good = self.file("good", "text " * 100)
        self.refuse(["--input", os.path.join(self.dir, "absent")] + out, "absent", "does not exist")
        self.refuse(["--input", self.dir] + out, self.dir, "regular file")
        self.refuse(["--input", good, self.file("empty", "")] + out, "empty")
        self.refuse(["--input", self.file("latin", b"caf\xe9 \xff")] + out + ["--tokenizer", "chars"], "latin", "not UTF-8", "0xe9")
        self.refuse(["--input", self.file("cut", b"caf\xc3")] + out + ["--tokenizer", "chars"], "cut", "not UTF-8")
        self.refuse(["--input", self.file("one", "x")] + out, "too short", "train")
        self.refuse(["--input", good, "--val-fraction", "1e-17"] + out, "too short", "val")
        self.refuse(["--input", good, "--val-fraction", "1"] + out, "--val-fraction")
        self.refuse(["--input", good, "--val-fraction", "nan"] + out, "--val-fraction")
        self.refuse(["--input", good, "--shard-tokens", "0"] + out, "--shard-tokens")
        self.refuse(["--input", good, "--name", "a/b"] + out, "a/b")
        many = "".join(chr(c) for c in range(0x20, 0x10f00) if not 0xd800 <= c < 0xe000)
        self.refuse(["--input", self.file("many", many)] + out + ["--tokenizer", "chars"], "%d different" % len(many), "65535")
        self.assertFalse(os.path.exists(self.out))
        self.refuse(["--input", good, "--out", os.path.join(good, "x")], good)

    def test_another_vocabulary_in_the_same_directory(self):
        self.run_main("--input", self.file("a", "abc" * 50), "--out", self.out)
        with open(os.path.join(self.out, "tokenizer.json")) as f:
            before = f.read()
        self.refuse(["--input", self.file("b", "abd" * 50), "--out", self.out, "--tokenizer", "chars"], "another vocabulary")
        with open(os.path.join(self.out, "tokenizer.json")) as f:
            self.assertEqual(f.read(), before)
        self.assertEqual(self.run_main("--input", self.file("b", "abd" * 50), "--out", self.out)[0], 0)
        os.remove(os.path.join(self.out, "tokenizer.json"))  # as in a directory of ids from elsewhere
        self.refuse(["--input", self.file("c", "abd" * 50), "--out", self.out], "another vocabulary")

    def test_a_full_disk_leaves_nothing_behind(self):
        path = self.file("a", bytes(range(256)) * 5000)
        os.makedirs(self.out)
        os.symlink("/dev/full", os.path.join(self.out, "a_val_000000.bin.tmp"))
        self.refuse(["--input", path, "--out", self.out], self.out, "No space left")
        self.assertEqual(os.listdir(self.out), [])

    @unittest.skipIf(os.geteuid() == 0, "root may write anywhere")
    def test_unwritable_out(self):
        os.makedirs(self.out)
        os.chmod(self.out, stat.S_IRUSR | stat.S_IXUSR)
        self.refuse(["--input", self.file("a", "abc" * 50), "--out", self.out], self.out, "Permission denied")

    def test_interpreter_and_defaults(self):
        done = subprocess.run([sys.executable, os.path.join(ROOT, "data", "prepare.py"), "--help"], stdout=subprocess.PIPE,
                              universal_newlines=True)
        self.assertEqual(done.returncode, 0)
        for word in ("--input", "--dataset", "--tokenizer", "--val-fraction", "--shard-tokens", "--out"):
            self.assertIn(word, done.stdout)


class Datasets(Case):
    def test_lzw(self):
        random_text = random.Random(5)
        for text in (b"a", b"aaaaaaaaaaaaaaaa" * 9, b"to be or not to be " * 300,
                     bytes(random_text.choice(b"abcd") for _ in range(60000)),
                     bytes(random_text.randrange(256) for _ in range(60000))):
            self.assertEqual(prepare.lzw_decode(lzw_encode(text), len(text)), text)
            self.assertEqual(prepare.lzw_decode(lzw_encode(text), 1 << 20)[:len(text)], text)
            if shutil.which("gzip"):  # which reads this format, and so vouches for the encoder above
                done = subprocess.run(["gzip", "-dc"], input=b"\x1f\x9d\x90" + lzw_encode(text), stdout=subprocess.PIPE)
                self.assertEqual(done.stdout, text)
        self.assertEqual(prepare.lzw_decode(bytes([0x61, 0xC4, 0x04, 0x04]), 9), b"abab")  # codes 97, 98, 257
        with self.assertRaises(ValueError):
            prepare.lzw_decode(b"\xff\xff\xff\xff", 10)

    def test_kjv(self):
        verses = b"Title\nGe1:1 In the beginning\nGe1:2 And the earth\nGe2:1 Thus\nExo1:1 Now these \n"
        windows = [verses[:30], verses[30:60], verses[60:]]
        packed = [lzw_encode(w) for w in windows]
        starts = [0x5c + 4 * 4]
        for p in packed:
            starts.append(starts[-1] + len(p))
        data = b"title".ljust(0x54, b"\0") + struct.pack(">II4I", 30, 3, *starts) + b"".join(packed)
        self.assertEqual(prepare.kjv_text(self.file("bible.data", data)),
                         b"In the beginning\nAnd the earth\n\nThus\n\nNow these\n")

    def test_austen(self):
        import zlib
        data = b""
        for novel in (["SECOND ", "", "line"], ["FIRST", "é"]):
            item = b"X\n" + struct.pack(">iiii", 3, 0x40201, 0x30500, 5) + b"UTF-8" + struct.pack(">ii", 16, len(novel))
            for line in novel:
                item += struct.pack(">ii", 0x40009, len(line.encode())) + line.encode()
            data += struct.pack(">I", len(item)) + zlib.compress(item)
        self.assertEqual(prepare.austen_text(self.file("Rdata.rdb", data)), "FIRST\né\n\n\nSECOND\n\nline\n".encode())

    def test_a_changed_source_is_refused(self):
        with self.assertRaisesRegex(prepare.PrepareError, "sha256"):
            prepare.save_checked("kjv", b"something else", self.dir)

    def test_no_apt(self):
        path = os.environ["PATH"]
        os.environ["PATH"] = self.dir
        try:
            self.refuse(["--out", self.out], "apt-get is not on this machine", "--input")
        finally:
            os.environ["PATH"] = path
        self.assertFalse(os.path.exists(self.out))

    def test_apt_fails(self):
        for tool, text in (("apt-get", "echo 'E: Unable to locate package'; exit 100"), ("dpkg-deb", "exit 1")):
            tool = self.file(tool, "#!/bin/sh\n%s\n" % text)
            os.chmod(tool, 0o755)
        path = os.environ["PATH"]
        os.environ["PATH"] = self.dir
        try:
            self.refuse(["--dataset", "austen-kjv", "--out", self.out], "r-cran-janeaustenr", "E: Unable to locate package", "--input")
        finally:
            os.environ["PATH"] = path

    def test_shakespeare_without_network(self):
        url, prepare.SHAKESPEARE_URL = prepare.SHAKESPEARE_URL, "http://127.0.0.1:9/input.txt"
        try:
            self.refuse(["--dataset", "shakespeare", "--out", self.out], "127.0.0.1:9", "--input")
        finally:
            prepare.SHAKESPEARE_URL = url

    def test_shakespeare_from_a_url(self):
        text = b"First Citizen:\n" * 100
        url, prepare.SHAKESPEARE_URL = prepare.SHAKESPEARE_URL, "file://" + self.file("input.txt", text)
        digest, prepare.SHA256["shakespeare"] = prepare.SHA256["shakespeare"], hashlib.sha256(text).hexdigest()
        try:
            self.assertEqual(self.run_main("--dataset", "shakespeare", "--out", self.out)[0], 0)
        finally:
            prepare.SHAKESPEARE_URL, prepare.SHA256["shakespeare"] = url, digest
        self.assertEqual(bytes(self.tokens("shakespeare_train_000000.bin")[1]), text[:1350])


class Baseline(Case):
    def losses(self, train, val):
        prepare.prepare([self.file("t", train)], self.out, "t", val_fraction=0, shard_tokens=400)
        prepare.prepare([self.file("v", val)], self.out, "v", val_fraction=0, shard_tokens=300)
        return ngram_baseline.ngram_loss(os.path.join(self.out, "t_*.bin"), os.path.join(self.out, "v_*.bin"))

    def test_by_hand(self):
        loss, trained, measured = self.losses(b"abcabd", b"abcx")
        self.assertEqual((trained, measured), (4, 2))
        # after "ab": c once of two; after "bc": x never, of one
        self.assertAlmostEqual(loss, -(math.log(2 / 258) + math.log(1 / 257)) / 2, places=12)

    def test_against_plain_loops(self):
        rng = random.Random(3)
        train, val = (bytes(rng.choice(b"abcde ") for _ in range(n)) for n in (1000, 500))
        before, ngram_baseline.CHUNK = ngram_baseline.CHUNK, 37
        try:
            loss, trained, measured = self.losses(train, val)
        finally:
            ngram_baseline.CHUNK = before
        count, context, total, n = {}, {}, 0.0, 0
        parts = [read_tokens(os.path.join(self.out, "t_train_%06d.bin" % i))[1] for i in range(3)]
        self.assertEqual(bytes(sum(parts, [])), train)
        for t in parts:
            for i in range(2, len(t)):
                count[tuple(t[i - 2:i + 1])] = count.get(tuple(t[i - 2:i + 1]), 0) + 1
                context[tuple(t[i - 2:i])] = context.get(tuple(t[i - 2:i]), 0) + 1
        for t in (read_tokens(os.path.join(self.out, "v_train_%06d.bin" % i))[1] for i in range(2)):
            for i in range(2, len(t)):
                total -= math.log((count.get(tuple(t[i - 2:i + 1]), 0) + 1) / (context.get(tuple(t[i - 2:i]), 0) + 256))
                n += 1
        self.assertEqual((trained, measured), (sum(len(t) - 2 for t in parts), n))
        self.assertAlmostEqual(loss, total / n, places=10)

    def test_refusals(self):
        for train, words in ((os.path.join(self.dir, "absent*.bin"), "no file matches"), (self.file("x.bin", b"abc"), "not a token file")):
            err = io.StringIO()
            with contextlib.redirect_stderr(err):
                self.assertEqual(ngram_baseline.main([train, train]), 1)
            self.assertIn(words, err.getvalue())
        prepare.prepare([self.file("c", "".join(map(chr, range(32, 1000))))], self.out, "c", "chars")
        with self.assertRaisesRegex(ValueError, "above 255"):
            ngram_baseline.count_trigrams(os.path.join(self.out, "c_train_*.bin"))


if __name__ == "__main__":
    unittest.main()
