#!/usr/bin/env python3
"""Turn text files into token files that train_gpt reads. Python 3.8+, standard library only.

    prepare.py                                   Jane Austen and the King James Bible, 8 MB, from two Debian packages
    prepare.py --dataset shakespeare             Tiny Shakespeare, 1 MB, downloaded
    prepare.py --input a.txt b.txt --out DIR     any text files

Writes DIR/NAME_train_000000.bin .., DIR/NAME_val_000000.bin .. and DIR/tokenizer.json (Hugging Face tokenizers).
A .bin file is 256 little-endian int32 (20240520, 1, number of tokens; a number above 2^31 - 1 is written as -1 and then
its low and high half in words 4 and 5) followed by one uint16 for each token: llm.c's format.

Tokenizers: `bytes`, the id of a token is the byte's value (256 ids, any file works); `chars`, the characters that occur,
numbered in code point order (nanoGPT's character level).
Validation is the last part of each input file, so that it covers all of them.
"""
import argparse
import glob
import hashlib
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import urllib.request
import zlib
from array import array

MAGIC, VERSION, HEADER_BYTES = 20240520, 1, 1024
MAX_VOCAB = 65535  # ids are uint16, and 65535 is kept free (llm.c's evaluation files use it as a mark)
CHUNK = 1 << 20
SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = {
    "austen": "100e39346338b1cb2500131cc393d9e91ebd4afd340288b13c97e2939ef75237",
    "kjv": "6b40e3f13a6cf83937165995b4868d7eb1f429d0c96ddb8574bea5544101a914",
    "shakespeare": "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
}


class PrepareError(Exception):
    """What went wrong, in one sentence for the user."""


# ---------------------------------------------------------------------------------------------------------------------
# Token files

class TokenWriter:
    """`total` tokens into ceil(total / shard_tokens) files of nearly equal size (a short last shard would be useless
    to a trainer that needs T + 1 tokens). Nothing has its final name before commit()."""

    def __init__(self, stem, total, shard_tokens):
        self.stem, self.paths = stem, []
        count = (total + shard_tokens - 1) // shard_tokens
        self.sizes = [total * (i + 1) // count - total * i // count for i in range(count)]
        self.file, self.left = None, 0

    def write(self, ids):
        """ids: bytes-like, little-endian uint16 values."""
        ids = memoryview(ids).cast("B")
        while len(ids):
            if self.left == 0:
                self._next()
            part = ids[:2 * self.left]
            self.file.write(part)
            self.left -= len(part) // 2
            ids = ids[len(part):]

    def _next(self):
        self.close()
        size = self.sizes[len(self.paths)]
        path = "%s_%06d.bin" % (self.stem, len(self.paths))
        self.file = open(path + ".tmp", "wb")
        self.paths.append(path)
        header = [0] * 256
        header[:3] = MAGIC, VERSION, size
        if size >= 1 << 31:
            header[2], header[4], header[5] = -1, size & 0xffffffff, size >> 32
        self.file.write(struct.pack("<3iI2I250i", *header))
        self.left = size

    def close(self):
        if self.file:
            self.file.flush()
            os.fsync(self.file.fileno())
            self.file.close()
            self.file = None

    def commit(self):
        """Rename, and remove higher-numbered shards that an earlier run left: a glob would train on them."""
        for path in self.paths:
            os.replace(path + ".tmp", path)
        for path in set(glob.glob(glob.escape(self.stem) + "_[0-9][0-9][0-9][0-9][0-9][0-9].bin")) - set(self.paths):
            os.remove(path)

    def discard(self):
        if self.file:
            try:
                self.file.close()
            except OSError:  # a full disk again: the first error is already on its way
                pass
            self.file = None
        for path in self.paths:
            if os.path.exists(path + ".tmp"):
                os.remove(path + ".tmp")


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizers: measure(path) -> tokens in a file; chunks(path) -> uint16 ids piece by piece; json() -> tokenizer.json

def byte_characters():
    """GPT-2's printable stand-in for each byte: printable Latin-1 stands for itself, the rest is moved to U+0100 on."""
    printable = set(range(33, 127)) | set(range(161, 173)) | set(range(174, 256))
    moved = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(moved)) for b in range(256)]


class BytesTokenizer:
    name, unit = "bytes", "bytes"

    def measure(self, path):
        return os.path.getsize(path)

    def finish(self):
        self.vocab = 256

    def chunks(self, path):
        with open(path, "rb") as f:
            while True:
                text = f.read(CHUNK)
                if not text:
                    return
                ids = bytearray(2 * len(text))
                ids[0::2] = text
                yield ids

    def cut(self, path, at):
        """Move a cut back to the start of a UTF-8 character, so that neither part begins in the middle of one."""
        with open(path, "rb") as f:
            f.seek(max(0, at - 3))
            before = f.read(4)
        back = min(3, at)
        for step in range(back + 1):
            if before[back - step] & 0xC0 != 0x80:
                return at - step
        return at  # not UTF-8: no matter

    def json(self):
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                 "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                 "vocab": {c: i for i, c in enumerate(byte_characters())}, "merges": []}
        return tokenizer_json(level, level, model)


class CharsTokenizer:
    name, unit = "chars", "characters"

    def __init__(self):
        self.found = set()

    def measure(self, path):
        count = 0
        for text in self._texts(path):
            self.found.update(text)
            count += len(text)
        return count

    def finish(self):
        self.vocab = len(self.found)
        if self.vocab > MAX_VOCAB:
            raise PrepareError("the text has %d different characters and a token file holds at most %d ids: "
                               "use --tokenizer bytes" % (self.vocab, MAX_VOCAB))
        self.ids = {c: i for i, c in enumerate(sorted(self.found))}

    def chunks(self, path):
        for text in self._texts(path):
            ids = array("H", map(self.ids.__getitem__, text))
            if sys.byteorder == "big":
                ids.byteswap()
            yield ids

    def cut(self, path, at):
        return at

    @staticmethod
    def _texts(path):
        try:
            with open(path, encoding="utf-8", newline="") as f:  # newline="": the text as it is, \r\n included
                while True:
                    text = f.read(CHUNK)
                    if not text:
                        return
                    yield text
        except UnicodeDecodeError as e:
            raise PrepareError("%s is not UTF-8 text (byte 0x%02x): convert it (iconv -t UTF-8) or use --tokenizer bytes"
                               % (path, e.object[e.start]))

    def json(self):
        split = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}
        model = {"type": "WordLevel", "vocab": self.ids, "unk_token": "<unk>"}
        return tokenizer_json(split, {"type": "Fuse"}, model)


def tokenizer_json(pre_tokenizer, decoder, model):
    return json.dumps({"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
                       "pre_tokenizer": pre_tokenizer, "post_processor": None, "decoder": decoder, "model": model},
                      ensure_ascii=False, indent=1)


# ---------------------------------------------------------------------------------------------------------------------
# Data sets

def debian_unpack(package, folder):
    """Fetch a Debian package and unpack it below `folder`; nothing is installed. Returns the folder."""
    for tool in ("apt-get", "dpkg-deb"):
        if not shutil.which(tool):
            raise PrepareError("the default text comes from Debian packages and %s is not on this machine: "
                               "give text of your own with --input FILE" % tool)
    folder = os.path.join(folder, package)
    os.makedirs(folder)
    os.chmod(folder, 0o777)  # apt drops to its own user for the download

    def apt(*arguments):
        return subprocess.run(["apt-get", "-q", "-o", "DPkg::Lock::Timeout=600", "-o", "Acquire::Retries=2", *arguments],
                              cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True)

    done = apt("download", package)
    if done.returncode and os.geteuid() == 0:  # the package lists are missing or old
        apt("update")
        done = apt("download", package)
    debs = glob.glob(os.path.join(folder, "*.deb"))
    if done.returncode or not debs:
        reasons = [line for line in done.stdout.splitlines() if line.startswith("E:")] or ["no package came"]
        hint = "" if os.geteuid() == 0 else "; run `sudo apt-get update` first,"
        raise PrepareError("apt-get download %s failed (%s)%s or give text of your own with --input FILE"
                           % (package, reasons[0], hint or ": check the network"))
    subprocess.run(["dpkg-deb", "-x", debs[0], folder], check=True)
    return folder


def lzw_decode(data, size):
    """compress(1)'s LZW without its 3-byte header, at most `size` bytes: codes of 9 to 16 bits, low bit first, in
    blocks of eight (what is left of a block is skipped where the width changes); 256 empties the table."""
    table, out, made = [bytes([i]) for i in range(256)] + [b""], [], 0
    width, at, last = 9, 0, None
    while made < size and at < len(data):
        block = int.from_bytes(data[at:at + width], "little")
        codes = 8 * len(data[at:at + width]) // width
        at += width
        for _ in range(codes):
            code = block & ((1 << width) - 1)
            block >>= width
            if code == 256:
                del table[257:]
                width, last = 9, None
                break
            if code > len(table) or (last is None and code > 255):
                raise ValueError("bad LZW code")
            text = table[code] if code < len(table) else last + last[:1]
            if last is not None and len(table) < 65536:
                table.append(last + text[:1])
            last = text
            out.append(text)
            made += len(text)
            if made >= size:
                break
            if len(table) >= 1 << width and width < 16:
                width += 1
                break
    return b"".join(out)[:size]


def kjv_text(path):
    """The King James Bible from bible.data: a 0x54-byte title, window size, number of windows, window offsets and the
    end of the file (big-endian), then the windows, LZW each; inside, a line a verse: 'Ge1:1 In the beginning ...'.
    Made into a line a verse without its number, and an empty line between chapters."""
    with open(path, "rb") as f:
        data = f.read()
    size, count = struct.unpack(">II", data[0x54:0x5c])
    starts = struct.unpack(">%dI" % (count + 1), data[0x5c:0x60 + 4 * count])
    text = b"".join(lzw_decode(data[a:b], size) for a, b in zip(starts, starts[1:])).decode("latin-1")
    parts, chapter = [], None
    for book, number, verse, words in re.findall(r"^(\S+?)(\d+):(\d+) (.*)$", text, re.M):
        if (book, number) != chapter and chapter:
            parts.append("")
        chapter = (book, number)
        parts.append(words.strip())
    return ("\n".join(parts) + "\n").encode()


def austen_text(path):
    """Jane Austen's six novels from R's lazy-load file: for each object 4 bytes of length and a zlib stream, in it a
    character vector in R's XDR form (version 3), a string a line."""
    with open(path, "rb") as f:
        data = f.read()
    novels = []
    while len(data) > 4:
        stream = zlib.decompressobj()
        item = stream.decompress(data[4:])
        data = stream.unused_data
        at = 18 + struct.unpack(">i", item[14:18])[0]  # X\n, three versions, the name of the encoding
        kind, lines = struct.unpack(">ii", item[at:at + 8])
        if kind != 16:
            raise ValueError("an object that is not a character vector")
        at += 8
        novel = []
        for _ in range(lines):
            length = struct.unpack(">i", item[at + 4:at + 8])[0]
            novel.append(item[at + 8:at + 8 + length].rstrip())
            at += 8 + length
        novels.append(b"\n".join(novel))
    return b"\n\n\n".join(sorted(novels)) + b"\n"


def save_checked(name, text, folder):
    found = hashlib.sha256(text).hexdigest()
    if found != SHA256[name]:
        raise PrepareError("the text of %s is not the expected one (sha256 %s, expected %s): its source has changed; "
                           "give text of your own with --input FILE" % (name, found[:16], SHA256[name][:16]))
    path = os.path.join(folder, name + ".txt")
    with open(path, "wb") as f:
        f.write(text)
    return path


def dataset_austen_kjv(folder):
    sources = [("austen", "r-cran-janeaustenr", "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb", austen_text),
               ("kjv", "bible-kjv-text", "usr/lib/bible.data", kjv_text)]
    paths = []
    for name, package, inside, read in sources:
        unpacked = debian_unpack(package, folder)
        try:
            text = read(os.path.join(unpacked, inside))
        except (OSError, ValueError, IndexError, struct.error, zlib.error) as e:
            raise PrepareError("the Debian package %s is laid out in a way this program does not know (%s): "
                               "give text of your own with --input FILE" % (package, e))
        paths.append(save_checked(name, text, folder))
    return paths


def dataset_shakespeare(folder):
    try:
        with urllib.request.urlopen(SHAKESPEARE_URL, timeout=30) as reply:
            text = reply.read()
    except OSError as e:  # URLError, timeouts and refused connections are all OSErrors
        raise PrepareError("Tiny Shakespeare could not be downloaded (%s): fetch %s elsewhere and give it with "
                           "--input input.txt --tokenizer chars" % (getattr(e, "reason", e), SHAKESPEARE_URL))
    return [save_checked("shakespeare", text, folder)]


DATASETS = {"austen-kjv": dataset_austen_kjv, "shakespeare": dataset_shakespeare}


# ---------------------------------------------------------------------------------------------------------------------
# The work

def check_inputs(paths):
    for path in paths:
        if not os.path.exists(path):
            raise PrepareError("input file %s does not exist" % path)
        if not os.path.isfile(path):
            raise PrepareError("input %s is not a regular file" % path)
        if os.path.getsize(path) == 0:
            raise PrepareError("input file %s is empty" % path)


def check_out(out, name, tokenizer_text):
    """Refuse to put a second vocabulary beside token files of the first: there is one tokenizer.json a directory."""
    path = os.path.join(out, "tokenizer.json")
    others = [p for p in glob.glob(os.path.join(glob.escape(out), "*.bin"))
              if not re.match(re.escape(name) + r"_(train|val)_\d{6}\.bin$", os.path.basename(p))]
    if not others:
        return
    found = None
    if os.path.exists(path):
        with open(path, encoding="utf-8") as f:
            found = f.read()
    if found != tokenizer_text:
        raise PrepareError("%s holds %s, tokenized with another vocabulary: choose another --out"
                           % (out, os.path.basename(sorted(others)[0])))


def split(tokenizer, path, total, val_fraction):
    """Number of tokens of the training part: nanoGPT's rule, the first int(0.9 n)."""
    at = int(total * (1 - val_fraction))
    return tokenizer.cut(path, at) if 0 < at < total else at


def prepare(inputs, out, name, tokenizer_name="bytes", val_fraction=0.1, shard_tokens=100000000):
    """Tokenise `inputs` into out/name_*.bin; returns a dict for the summary. Raises PrepareError and OSError."""
    if not 0 <= val_fraction < 1:
        raise PrepareError("--val-fraction is %g and must be at least 0 and below 1" % val_fraction)
    if shard_tokens < 1:
        raise PrepareError("--shard-tokens is %d and must be at least 1" % shard_tokens)
    if not name or "/" in name:
        raise PrepareError("--name '%s' cannot be part of a file name" % name)
    check_inputs(inputs)
    tokenizer = {"bytes": BytesTokenizer, "chars": CharsTokenizer}[tokenizer_name]()
    totals = [tokenizer.measure(path) for path in inputs]
    tokenizer.finish()
    cuts = [split(tokenizer, path, total, val_fraction) for path, total in zip(inputs, totals)]
    counts = {"train": sum(cuts), "val": sum(totals) - sum(cuts)}
    for part in counts:
        if counts[part] == 0 and (part == "train" or val_fraction > 0):
            raise PrepareError("the text is too short (%d %s): nothing is left for the %s part at --val-fraction %g"
                               % (sum(totals), tokenizer.unit, part, val_fraction))
    os.makedirs(out, exist_ok=True)
    text = tokenizer.json()
    check_out(out, name, text)

    stem = os.path.join(out, name)
    writers = {part: TokenWriter("%s_%s" % (stem, part), counts[part], shard_tokens) for part in ("train", "val")}
    json_path = os.path.join(out, "tokenizer.json")
    try:
        for path, total, cut in zip(inputs, totals, cuts):
            at = 0
            for ids in tokenizer.chunks(path):
                ids = memoryview(ids).cast("B")
                first = max(0, min(cut - at, len(ids) // 2))
                writers["train"].write(ids[:2 * first])
                writers["val"].write(ids[2 * first:])
                at += len(ids) // 2
            if at != total:
                raise PrepareError("input file %s changed while it was read (%d %s, then %d)"
                                   % (path, total, tokenizer.unit, at))
        with open(json_path + ".tmp", "w", encoding="utf-8") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        for writer in writers.values():
            writer.close()
        os.replace(json_path + ".tmp", json_path)
        for writer in writers.values():
            writer.commit()
    finally:  # after a commit there is nothing to discard
        for writer in writers.values():
            writer.discard()
        if os.path.exists(json_path + ".tmp"):
            os.remove(json_path + ".tmp")
    return {"tokenizer": tokenizer.name, "unit": tokenizer.unit, "vocab": tokenizer.vocab, "counts": counts, "stem": stem,
            "paths": {part: writers[part].paths for part in writers}}


def print_summary(inputs, result):
    print("input: %s" % ", ".join("%s (%d bytes)" % (os.path.basename(p), os.path.getsize(p)) for p in inputs))
    print("tokenizer: %s, %d ids" % (result["tokenizer"], result["vocab"]))
    for part, paths in result["paths"].items():
        print("%-5s %11d %s in %d file%s, %.1f MB: %s" %
              (part, result["counts"][part], result["unit"], len(paths), "" if len(paths) == 1 else "s",
               sum(map(os.path.getsize, paths)) / 1e6, paths[0] if paths else "none"))
    flags = " ".join("--%s '%s_%s_*.bin'" % (part, result["stem"], part) for part, paths in result["paths"].items() if paths)
    print("train with:\n  ./train_gpt --model gpt2:d6,c=384,heads=6 %s" % flags)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--input", nargs="+", metavar="FILE", help="text files")
    source.add_argument("--dataset", choices=sorted(DATASETS), help="text to fetch (default: austen-kjv)")
    parser.add_argument("--tokenizer", choices=["bytes", "chars"], default="bytes", help="default: bytes")
    parser.add_argument("--out", metavar="DIR", help="where to write (default: NAME beside this program)")
    parser.add_argument("--name", help="first part of the file names (default: the data set's, or the first file's)")
    parser.add_argument("--val-fraction", type=float, default=0.1, metavar="F",
                        help="share of each file, its end, that goes to validation (default: 0.1)")
    parser.add_argument("--shard-tokens", type=int, default=100000000, metavar="N",
                        help="most tokens in one file (default: 100000000)")
    options = parser.parse_args(arguments)

    name = options.name or (os.path.splitext(os.path.basename(options.input[0]))[0] if options.input
                            else options.dataset or "austen-kjv")
    out = options.out or os.path.join(os.path.relpath(os.path.dirname(os.path.abspath(__file__))), name)
    folder = tempfile.mkdtemp(prefix="prepare_")
    os.chmod(folder, 0o755)
    try:
        inputs = options.input or DATASETS[options.dataset or "austen-kjv"](folder)
        result = prepare(inputs, out, name, options.tokenizer, options.val_fraction, options.shard_tokens)
        print_summary(inputs, result)
        return 0
    except PrepareError as e:
        print("prepare.py: %s" % e, file=sys.stderr)
    except OSError as e:
        print("prepare.py: %s%s" % (e.filename + ": " if e.filename else "writing to %s: " % out, e.strerror), file=sys.stderr)
    except KeyboardInterrupt:
        print("prepare.py: interrupted, nothing was written", file=sys.stderr)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 1


if __name__ == "__main__":
    sys.exit(main())
