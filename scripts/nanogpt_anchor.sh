#!/usr/bin/env bash
# nanoGPT's CPU recipe on Tiny Shakespeare's characters, with and without compressed tensor parallelism.
#
#   scripts/nanogpt_anchor.sh [TEXT]        default: data/tinyshakespeare.txt
#
# Nine runs of 2,000 steps (three seeds; tp=1, tp=2 with taco, tp=2 with hadint8), 2 threads in all: 10 to 20 minutes.
# Expected: mean validation loss at tp=1 at most 1.905 (nanoGPT in PyTorch: 1.8825 and 1.8948 with two seeds), each codec
# within 0.01 of it on average, a step at tp=1 in at most 0.6 of PyTorch's time.
# Recipe: 4 layers, 4 heads, 128 channels, T 64, batch 12, lr 1e-3 to 1e-4 cosine after 100 steps of warm-up, AdamW 0.9 / 0.99,
# weight decay 0.1, clipping at 1, no dropout; the first 90% of the text to train on, the rest to validate on, all of it.
set -euo pipefail
cd "$(dirname "$0")/.."
text=${1:-data/tinyshakespeare.txt}
[ -r "$text" ] || { echo "nanogpt_anchor: cannot read '$text': give the path of Tiny Shakespeare as argument (data/prepare.py --dataset shakespeare can fetch it)" >&2; exit 1; }
[ -x ./train_gpt ] || { echo "nanogpt_anchor: ./train_gpt is not built: run make" >&2; exit 1; }
. scripts/mpi_env.sh
data=data/nanogpt-chars out=run/nanogpt_anchor
mkdir -p $out
rm -f $out/*.jsonl
python3 data/prepare.py --input "$text" --tokenizer chars --val-fraction 0.1 --out $data > $out/prepare.txt

train() {  # NAME RANKS CODEC SEED
    mpirun -np "$2" ./train_gpt --model gpt2:d4,c=128,heads=4 --train "$data/*train*.bin" --val "$data/*val*.bin" \
        --tp "$2" --threads $((2 / $2)) --tp-codec "$3" --seed "$4" --micro-batch 12 --seq 64 --global-batch 12 --steps 2000 \
        --lr 1e-3 --min-lr 1e-4 --warmup 100 --schedule cosine --beta1 0.9 --beta2 0.99 --weight-decay 0.1 --clip 1 \
        --val-every 2000 --val-batches 0 --log "$out/$1-$4.jsonl" > "$out/$1-$4.txt"
    echo "$1, seed $4: $(grep validation "$out/$1-$4.txt" | tail -n 1)"
}
for seed in 1 2 3; do
    scripts/bench_torch.py nanogpt --steps 60 --no-sgemm >> $out/torch.jsonl
    train tp1-none 1 none $seed
    train tp2-taco 2 taco $seed
    train tp2-hadint8 2 hadint8 $seed
done
python3 - $out <<'CODE'
import json, statistics, sys

seeds, loss, ms = (1, 2, 3), {}, {}
for name in ("tp1-none", "tp2-taco", "tp2-hadint8"):
    for seed in seeds:
        lines = [json.loads(line) for line in open("%s/%s-%d.jsonl" % (sys.argv[1], name, seed))]
        loss[name, seed] = [line["val_loss"] for line in lines if "val_loss" in line][-1]
        ms[name, seed] = statistics.median(line["ms"] for line in lines if "ms" in line)
torch = [json.loads(line)["step_ms"] for line in open(sys.argv[1] + "/torch.jsonl")]
print("%-12s" % "run", "".join("%10s" % ("seed %d" % seed) for seed in seeds), "%10s %12s %10s" % ("mean", "- tp1-none", "ms/step"))
mean = {}
for name in ("tp1-none", "tp2-taco", "tp2-hadint8"):
    losses = [loss[name, seed] for seed in seeds]
    mean[name] = statistics.mean(losses)
    print("%-12s" % name, "".join("%10.4f" % value for value in losses), "%10.4f %12.4f %10.1f" % (
        mean[name], mean[name] - mean["tp1-none"], statistics.median(ms[name, seed] for seed in seeds)))
share = statistics.median(ms["tp1-none", seed] / t for seed, t in zip(seeds, torch))
print("PyTorch's step, the same model: %.1f ms; ours at tp=1 takes %.2f of it" % (statistics.median(torch), share))
bars = [("mean loss at tp=1", mean["tp1-none"], 1.905), ("taco's distance", abs(mean["tp2-taco"] - mean["tp1-none"]), 0.01),
        ("hadint8's distance", abs(mean["tp2-hadint8"] - mean["tp1-none"]), 0.01), ("share of PyTorch's time", share, 0.6)]
for name, value, bar in bars:
    print("%-24s %8.4f   at most %.3f  %s" % (name, value, bar, "PASS" if value <= bar else "FAIL"))
sys.exit(any(value > bar for _, value, bar in bars))
CODE
