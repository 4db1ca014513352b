#!/usr/bin/env bash
# From a clean clone to a GPT that writes English: Jane Austen and the King James Bible, byte by byte, on two
# tensor-parallel ranks that compress everything they exchange with TACO.
#
#   make quickstart        under 6 minutes on 2 cores, of which training takes 3 to 4
#
# Expected: a validation loss at least 0.15 nats a byte below a 3-gram model's, and a sample whose words are nearly all
# English. The steps are as many as this machine does in TRAIN_SECONDS (180), found by a short run before.
# Leaves run/quickstart/: run.jsonl (log), loss.png, sample.txt and the trained model, a Hugging Face directory.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${TRAIN_SECONDS:-180}
data=data/austen-kjv out=run/quickstart
begin=$SECONDS
python=/usr/bin/python3

scripts/install_deps.sh
make --no-print-directory -j"$(nproc)"
. scripts/mpi_env.sh
rm -rf $out
mkdir -p $out
echo "== Text"
[ -e $data/tokenizer.json ] || $python data/prepare.py --dataset austen-kjv --val-fraction 0.02 --out $data | tee $out/prepare.txt
$python scripts/ngram_baseline.py "$data/*train*.bin" "$data/*val*.bin" | tee $out/ngram.txt
baseline=$(sed -n 's/.*val loss \([0-9.]*\).*/\1/p' $out/ngram.txt)

run=(mpirun -np 2 ./train_gpt --tp 2 --tp-codec taco --threads 1 --model gpt2:d4,c=192,heads=6
    --train "$data/*train*.bin" --seq 128 --micro-batch 8 --lr 3e-3 --min-lr 1e-4 --warmup 100 --beta2 0.99)

echo "== Training: ${run[*]}"
"${run[@]}" --steps 40 --warmup 0 --log $out/speed.jsonl > $out/speed.txt
steps=$($python -c '
import json, statistics, sys
ms = statistics.median([line["ms"] for line in map(json.loads, sys.stdin) if "ms" in line][10:])
print(max(200, int(1e3 * float(sys.argv[1]) / ms) // 100 * 100))' "$seconds" < $out/speed.jsonl)
echo "$steps steps fit in $seconds seconds here"
every=$((steps / 4))
trained=$SECONDS
"${run[@]}" --steps "$steps" --val "$data/*val*.bin" --val-every $every --sample-every "$steps" --sample-tokens 500 --temperature 0.6 \
    --out $out/model --save-every 0 --log $out/run.jsonl --print-every 100
trained=$((SECONDS - trained))

echo "== Result"
scripts/plot.py $out/run.jsonl --out $out/loss.png --terminal --line "3-gram=$baseline" --title "Loss, nats a byte"
$python - "$baseline" "$data" $out <<'CODE'
import glob, json, re, sys

baseline, data, out = float(sys.argv[1]), sys.argv[2], sys.argv[3]
lines = [json.loads(line) for line in open(out + "/run.jsonl")]
loss = [line["val_loss"] for line in lines if "val_loss" in line][-1]
record = [line for line in lines if "sample" in line][-1]
sample = record["sample"][len(record["prompt"]):][:500]
open(out + "/sample.txt", "w").write(sample + "\n")


def words(text):
    return re.findall(r"[a-z]+", text.lower())


known = set()
for path in glob.glob(data + "/*train*.bin"):
    with open(path, "rb") as f:
        known.update(words(f.read()[1024::2].decode("latin-1")))
written = words(sample)
if sample and sample[-1].isalpha():
    written = written[:-1]  # cut by the sample's end
share = sum(word in known for word in written) / max(1, len(written))
print("validation loss        %.4f nats a byte" % loss)
print("3-gram's, same text    %.4f: the model is %.4f below (expected: at least 0.15)" % (baseline, baseline - loss))
print("words of the sample    %.0f%% of %d occur in the training text (expected: at least 80%%)" % (100 * share, len(written)))
good = loss <= baseline - 0.15 and share >= 0.8
print("quickstart: " + ("as expected" if good else "NOT as expected"))
sys.exit(0 if good else 1)
CODE
echo "trained for $trained s; all of it took $((SECONDS - begin)) s. The curve is in $out/loss.png, the model in $out/model"
