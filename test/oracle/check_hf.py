"""Logits of a checkpoint as Hugging Face's transformers computes them, in float32.

  build/venv/bin/python test/oracle/check_hf.py DIR IDS OUT

IDS: text, one sequence of token ids a line, all of one length. OUT: raw little-endian float32 [lines, length, vocab].
"""
import os
import sys

os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"
import torch
from transformers import GPT2LMHeadModel


def main():
    directory, ids_file, out = sys.argv[1:]
    with open(ids_file) as f:
        ids = torch.tensor([[int(word) for word in line.split()] for line in f if line.strip()])
    model, info = GPT2LMHeadModel.from_pretrained(directory, output_loading_info=True, torch_dtype=torch.float32)
    wrong = {kind: names for kind, names in info.items() if names}
    if wrong:
        sys.exit("check_hf: %s does not hold exactly this model's tensors: %s" % (directory, wrong))
    with torch.no_grad():
        logits = model.eval()(ids).logits
    logits.numpy().astype("<f4").tofile(out)


if __name__ == "__main__":
    main()
