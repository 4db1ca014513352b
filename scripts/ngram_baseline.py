#!/usr/bin/env python3
"""Validation loss of a 3-gram model of bytes: the value that a trained model has to beat. Standard library only.

    ngram_baseline.py 'DIR/*train*.bin' 'DIR/*val*.bin'

Two bytes a, b of context and add-one smoothing over 256 symbols, fitted on the training files:
    p(c | a, b) = (count(a b c) + 1) / (count(a b .) + 256)
The loss is the mean of -ln p over the bytes of the validation files that have two bytes before them, in nats per byte.
The files are those of data/prepare.py with --tokenizer bytes: 1,024 bytes of header, then a uint16 for each byte.
"""
import glob
import math
import struct
import sys
from collections import Counter

HEADER_BYTES, MAGIC, VERSION = 1024, 20240520, 1
CHUNK = 1 << 24  # tokens at a time, which bounds the memory


def token_bytes(path):
    """The bytes of a token file in pieces; each piece repeats the last two bytes of the one before."""
    with open(path, "rb") as f:
        header = f.read(HEADER_BYTES)
        if len(header) < HEADER_BYTES or struct.unpack("<2i", header[:8]) != (MAGIC, VERSION):
            raise ValueError("%s is not a token file of uint16 tokens (magic %d, version %d)" % (path, MAGIC, VERSION))
        before = b""
        while True:
            ids = f.read(2 * CHUNK)
            if not ids:
                return
            if any(ids[1::2]):
                raise ValueError("%s holds token ids above 255: the baseline needs data prepared with --tokenizer bytes" % path)
            yield before + ids[0::2]
            before = (before + ids[0::2])[-2:]


def count_trigrams(pattern):
    """Counter of byte triples over all files that match; none spans two files."""
    paths = sorted(glob.glob(pattern))
    if not paths:
        raise ValueError("no file matches '%s'" % pattern)
    counts = Counter()
    for path in paths:
        for text in token_bytes(path):
            counts.update(zip(text, text[1:], text[2:]))
    return counts


def ngram_loss(train_pattern, val_pattern):
    """(nats per byte, number of training triples, number of validation triples)"""
    train, val = count_trigrams(train_pattern), count_trigrams(val_pattern)
    contexts = Counter()
    for (a, b, _), n in train.items():
        contexts[a, b] += n
    total = sum(val.values())
    if total == 0:
        raise ValueError("the files '%s' hold fewer than three tokens" % val_pattern)
    loss = sum(n * math.log((contexts[t[:2]] + 256) / (train[t] + 1)) for t, n in val.items())
    return loss / total, sum(train.values()), total


def main(arguments):
    if len(arguments) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        loss, trained, measured = ngram_loss(*arguments)
    except (OSError, ValueError) as e:
        print("ngram_baseline.py: %s" % e, file=sys.stderr)
        return 1
    print("3-gram baseline: val loss %.4f nats/byte (fitted on %d bytes, measured on %d)" % (loss, trained, measured))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
