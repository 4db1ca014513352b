#!/usr/bin/python3
"""PyTorch's time for one training step of a GPT-2 on this CPU, in float32: the peer that bench_cpu.sh times us against.

  scripts/bench_torch.py gpt2|small|nanogpt [--steps 5] [--threads 2] [--no-sgemm]

Prints one JSON line: step_ms (median of forward + backward + AdamW), gflops, sgemm_gflops, peak_mb, ...

The model is GPT-2's with the tanh gelu, biases and the classifier tied to the embedding, no dropout; attention is
written out, as torch 1.13 has no fused one. A token costs 6 N + 12 L C T operations, N the parameters without the
position table. sgemm_gflops is torch.mm over the model's own products (forward, input and weight gradient of each
linear layer): all their operations over all their time.
"""
import argparse
import json
import math
import os
import resource
import statistics
import time

SHAPES = {  # layers, channels, heads, vocabulary, tokens a sequence, sequences
    "gpt2": dict(L=12, C=768, NH=12, V=50257, T=64, B=4, positions=1024),
    "small": dict(L=6, C=384, NH=6, V=256, T=256, B=8, positions=256),
    "nanogpt": dict(L=4, C=128, NH=4, V=65, T=64, B=12, positions=64),
}
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("shape", choices=SHAPES)
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--no-sgemm", action="store_true")
options = parser.parse_args()

# Before torch is loaded: PyTorch's OpenMP threads and OpenBLAS's own ones take turns, and a spinning one slows the other.
os.environ.update(OMP_NUM_THREADS=str(options.threads), OPENBLAS_NUM_THREADS=str(options.threads))
os.environ.update(OMP_WAIT_POLICY="passive", GOMP_SPINCOUNT="0")
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.set_num_threads(options.threads)


class Block(nn.Module):
    def __init__(self, s):
        super().__init__()
        C = s["C"]
        self.heads = s["NH"]
        self.ln_1, self.ln_2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.qkv, self.proj = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.fc, self.out = nn.Linear(C, 4 * C), nn.Linear(4 * C, C)

    def forward(self, x, future):
        B, T, C = x.shape
        q, k, v = (part.view(B, T, self.heads, -1).transpose(1, 2) for part in self.qkv(self.ln_1(x)).split(C, dim=2))
        scores = (q @ k.transpose(2, 3)) * (self.heads / C) ** 0.5
        mixed = scores.masked_fill(future, -math.inf).softmax(dim=-1) @ v
        x = x + self.proj(mixed.transpose(1, 2).reshape(B, T, C))
        return x + self.out(F.gelu(self.fc(self.ln_2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(s["V"], s["C"]), nn.Embedding(s["positions"], s["C"])
        self.blocks = nn.ModuleList(Block(s) for _ in range(s["L"]))
        self.ln_f = nn.LayerNorm(s["C"])
        self.register_buffer("future", torch.ones(s["T"], s["T"], dtype=torch.bool).triu(1))
        for name, p in self.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(p, 0.0, 0.02 / math.sqrt(2 * s["L"]) if name.endswith(("proj.weight", "out.weight")) else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, ids, targets):
        x = self.wte(ids) + self.wpe.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x, self.future)
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def step_measure(s, steps):
    """(milliseconds of each step, GFLOP of a step, parameters, last loss)"""
    torch.manual_seed(1337)
    model = GPT(s)
    optimizer = torch.optim.AdamW(
        [{"params": [p for p in model.parameters() if p.dim() == 2], "weight_decay": 0.1},
         {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0}],
        lr=6e-4, betas=(0.9, 0.95), eps=1e-8)
    times, warm_up = [], 2
    for step in range(warm_up + steps):
        text = torch.randint(0, s["V"], (s["B"], s["T"] + 1))
        ids, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = model(ids, targets)
        loss.backward()
        optimizer.step()
        if step >= warm_up:
            times.append((time.perf_counter() - start) * 1e3)
    parameters = sum(p.numel() for p in model.parameters())
    counted = parameters - s["positions"] * s["C"]
    work = s["B"] * s["T"] * (6 * counted + 12 * s["L"] * s["C"] * s["T"]) / 1e9
    return times, work, parameters, loss.item()


def sgemm_measure(s):
    """GFLOP/s of torch.mm over the model's own products."""
    N, C, L = s["B"] * s["T"], s["C"], s["L"]
    layers = [(C, 3 * C, L), (C, C, L), (C, 4 * C, L), (4 * C, C, L), (C, s["V"], 1)]  # inputs, outputs, how many
    work = spent = 0.0
    for inputs, outputs, count in layers:
        x, w, dy = torch.randn(N, inputs), torch.randn(outputs, inputs), torch.randn(N, outputs)
        for a, b in ((x, w.T), (dy, w), (dy.T, x)):
            out = torch.mm(a, b)
            gflop = 2e-9 * N * inputs * outputs
            times = []
            for _ in range(max(3, min(20, int(2 / gflop)))):
                start = time.perf_counter()
                torch.mm(a, b, out=out)
                times.append(time.perf_counter() - start)
            work += count * gflop
            spent += count * statistics.median(times)
    return work / spent


def main():
    s = SHAPES[options.shape]
    times, work, parameters, loss = step_measure(s, options.steps)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    step_ms = statistics.median(times)
    result = dict(program="PyTorch " + torch.__version__, shape=options.shape, threads=options.threads,
                  parameters=parameters, steps=options.steps, step_ms=round(step_ms, 2), step_ms_min=round(min(times), 2),
                  gflops=round(work / step_ms * 1e3, 1), peak_mb=round(peak), loss=round(loss, 4))
    if not options.no_sgemm:
        result["sgemm_gflops"] = round(sgemm_measure(s), 1)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
