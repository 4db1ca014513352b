#!/usr/bin/python3
"""Golden values for the model and for AdamW, from PyTorch in float64.

  /usr/bin/python3 test/oracle/make_model.py [DIR]        # default: test/golden

Writes DIR/model_a, model_b, model_c (.safetensors): a tiny GPT-2 each, with Hugging Face's names and orientation
(Conv1D weights are [in, out]):
  weight.NAME                 random values, exact in float32; biases and norms too, so that nothing is trivially zero
  ids, targets                int32 [B, T]
  logits [B, T, V], loss      the loss as float64 [1]: the mean over all B x T positions
  grad.NAME                   d loss / d weight
  adam10.NAME                 the weights after 10 AdamW steps on this batch: no clipping, decay on 2-D weights only
  __metadata__.config         config.json's keys;  __metadata__.adamw  the optimizer's settings
and DIR/adamw.safetensors: AdamW alone, at eps 1e-8:
  param.NAME, grad.NAME [10, ...], adam10.NAME            one 2-D tensor (decayed), two 1-D ones (not decayed)
Values are computed in float64 and rounded once, on writing. PyTorch (autograd, its AdamW) does all the mathematics.
"""
import json
import math
import os
import struct
import sys

import numpy as np
import torch
import torch.nn.functional as F

SHAPES = {  # layers, channels, heads, vocabulary, positions = T, sequences
    "model_a": dict(L=2, C=36, NH=3, V=97, T=17, B=2),
    "model_b": dict(L=3, C=32, NH=4, V=128, T=32, B=2),
    "model_c": dict(L=1, C=64, NH=2, V=64, T=8, B=3),
}
ADAMW = dict(lr=1e-3, beta1=0.9, beta2=0.95, weight_decay=0.1, eps=1e-4, steps=10)


def write_safetensors(path, tensors, metadata):
    """tensors: {name: numpy array of float32, float64 or int32}. The same input gives the same bytes."""
    kinds = {"float32": "F32", "float64": "F64", "int32": "I32"}
    header, body = {"__metadata__": metadata}, b""
    for name, array in tensors.items():
        data = np.ascontiguousarray(array).tobytes()
        header[name] = dict(dtype=kinds[str(array.dtype)], shape=list(array.shape),
                            data_offsets=[len(body), len(body) + len(data)])
        body += data
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + body)


def weights_make(shape, random):
    """{name: float64 leaf tensor} whose values are exact in float32, in the order of Hugging Face's GPT-2."""
    C, weights = shape["C"], {}

    def add(name, size, std, mean=0.0):
        values = (mean + std * random.standard_normal(size)).astype(np.float32)
        weights["transformer." + name] = torch.from_numpy(values).double().requires_grad_()

    def norm(name):
        add(name + ".weight", C, 0.2, mean=1.0)
        add(name + ".bias", C, 0.1)

    def conv1d(name, inputs, outputs):
        add(name + ".weight", (inputs, outputs), 0.7 / math.sqrt(inputs))
        add(name + ".bias", outputs, 0.1)

    add("wte.weight", (shape["V"], C), 0.06)
    add("wpe.weight", (shape["T"], C), 0.1)
    for layer in range(shape["L"]):
        h = "h.%d." % layer
        norm(h + "ln_1")
        conv1d(h + "attn.c_attn", C, 3 * C)
        conv1d(h + "attn.c_proj", C, C)
        norm(h + "ln_2")
        conv1d(h + "mlp.c_fc", C, 4 * C)
        conv1d(h + "mlp.c_proj", 4 * C, C)
    norm("ln_f")
    return weights


def gpt2_logits(weights, shape, ids):
    """[B, T, V]. Pre-norm blocks, tanh gelu, biases, classifier tied to the embedding."""
    L, C, NH = shape["L"], shape["C"], shape["NH"]
    B, T = ids.shape

    def norm(x, name):
        return F.layer_norm(x, (C,), weights[name + ".weight"], weights[name + ".bias"], 1e-5)

    def conv1d(x, name):
        return x @ weights[name + ".weight"] + weights[name + ".bias"]

    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    x = weights["transformer.wte.weight"][ids] + weights["transformer.wpe.weight"][:T]
    for layer in range(L):
        h = "transformer.h.%d." % layer
        qkv = conv1d(norm(x, h + "ln_1"), h + "attn.c_attn")
        q, k, v = (part.view(B, T, NH, C // NH).transpose(1, 2) for part in qkv.split(C, dim=2))
        scores = (q @ k.transpose(2, 3) / math.sqrt(C // NH)).masked_fill(future, -math.inf)
        mixed = (scores.softmax(dim=-1) @ v).transpose(1, 2).reshape(B, T, C)
        x = x + conv1d(mixed, h + "attn.c_proj")
        x = x + conv1d(F.gelu(conv1d(norm(x, h + "ln_2"), h + "mlp.c_fc"), approximate="tanh"), h + "mlp.c_proj")
    return norm(x, "transformer.ln_f") @ weights["transformer.wte.weight"].T


def gpt2_loss(weights, shape, ids, targets):
    return F.cross_entropy(gpt2_logits(weights, shape, ids).flatten(0, 1), targets.flatten())


def adamw_make(weights, eps):
    groups = [{"params": [w for w in weights.values() if w.dim() == 2], "weight_decay": ADAMW["weight_decay"]},
              {"params": [w for w in weights.values() if w.dim() == 1], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=ADAMW["lr"], betas=(ADAMW["beta1"], ADAMW["beta2"]), eps=eps)


def batch_make(shape, random):
    text = random.randint(0, shape["V"], (shape["B"], shape["T"] + 1)).astype(np.int32)
    return np.ascontiguousarray(text[:, :-1]), np.ascontiguousarray(text[:, 1:])


def as_float32(tensor):
    return tensor.detach().numpy().astype(np.float32)


def model_write(path, shape, seed):
    random = np.random.RandomState(seed)
    weights = weights_make(shape, random)
    ids, targets = batch_make(shape, random)
    batch = torch.from_numpy(ids).long(), torch.from_numpy(targets).long()
    out = {"ids": ids, "targets": targets}
    out.update({"weight." + name: as_float32(w) for name, w in weights.items()})
    out["logits"] = as_float32(gpt2_logits(weights, shape, batch[0]))

    optimizer = adamw_make(weights, ADAMW["eps"])
    for step in range(ADAMW["steps"]):
        optimizer.zero_grad()
        loss = gpt2_loss(weights, shape, *batch)
        loss.backward()
        if step == 0:
            out["loss"] = loss.detach().numpy().reshape(1)
            out.update({"grad." + name: as_float32(w.grad) for name, w in weights.items()})
        optimizer.step()
    out.update({"adam10." + name: as_float32(w) for name, w in weights.items()})

    config = dict(model_type="gpt2", architectures=["GPT2LMHeadModel"], n_layer=shape["L"], n_head=shape["NH"],
                  n_embd=shape["C"], n_inner=4 * shape["C"], vocab_size=shape["V"], n_positions=shape["T"],
                  layer_norm_epsilon=1e-5, activation_function="gelu_new", tie_word_embeddings=True)
    write_safetensors(path, out, dict(config=json.dumps(config), adamw=json.dumps(ADAMW)))


def adamw_write(path, seed):
    """AdamW fed the gradients that model_c's own training meets, rounded to float32 before they are used."""
    shape, eps, random = SHAPES["model_c"], 1e-8, np.random.RandomState(seed)
    weights = weights_make(shape, random)
    batch = [torch.from_numpy(array).long() for array in batch_make(shape, random)]
    kept = ["transformer." + name for name in ("wpe.weight", "h.0.mlp.c_fc.bias", "h.0.ln_1.weight")]
    out = {"param." + name: as_float32(weights[name]) for name in kept}
    gradients = {name: [] for name in kept}
    optimizer = adamw_make(weights, eps)
    for _ in range(ADAMW["steps"]):
        optimizer.zero_grad()
        gpt2_loss(weights, shape, *batch).backward()
        for name in kept:
            gradients[name].append(as_float32(weights[name].grad))
            weights[name].grad = torch.from_numpy(gradients[name][-1]).double()
        optimizer.step()
    out.update({"grad." + name: np.stack(gradients[name]) for name in kept})
    out.update({"adam10." + name: as_float32(weights[name]) for name in kept})
    write_safetensors(path, out, dict(adamw=json.dumps(dict(ADAMW, eps=eps))))


def main():
    torch.set_num_threads(1)  # the same sums everywhere
    out = sys.argv[1] if len(sys.argv) > 1 else os.path.join(os.path.dirname(os.path.abspath(__file__)), "../golden")
    os.makedirs(out, exist_ok=True)
    for seed, (name, shape) in enumerate(SHAPES.items(), 1):
        model_write(os.path.join(out, name + ".safetensors"), shape, seed)
    adamw_write(os.path.join(out, "adamw.safetensors"), 9)


if __name__ == "__main__":
    main()
