#!/usr/bin/env bash
# A training step's speed on this CPU: ours against the machine's own sgemm and against PyTorch, alternately in one run.
#
#   scripts/bench_cpu.sh [ROUNDS [SHAPE ..]]     default: 3 rounds of gpt2 (124M, B 4, T 64) and small (6 layers, C 384, T 256)
#   make bench                                   builds first
#
# Cost: about 3 minutes on 2 cores. Expected: PASS in each line (70% of sgemm; 1.15x PyTorch, whose own sgemm must be
# within 90% of ours for the comparison to be fair; 124M in less than 2.3 GB).
set -eu
cd "$(dirname "$0")/.."
rounds=${1:-3}
shift || true
shapes=${*:-gpt2 small}
threads=2
ours=build/cpu/dev/bench_step
[ -x $ours ] || { echo "bench_cpu: $ours is not built: run make dev" >&2; exit 1; }
/usr/bin/python3 -c "import torch" 2> /dev/null || { echo "bench_cpu: PyTorch is missing: run scripts/install_deps.sh --test" >&2; exit 1; }
mkdir -p run
results=run/bench_cpu.jsonl
: > $results
for shape in $shapes; do
    for round in $(seq "$rounds"); do
        echo "$shape, round $round of $rounds" >&2
        OMP_NUM_THREADS=$threads $ours "$shape" 5 | sed 's/^/ours /' >> $results
        scripts/bench_torch.py "$shape" --steps 5 --threads $threads | sed 's/^/torch /' >> $results
    done
done
/usr/bin/python3 - $results <<'CODE'
import json, statistics, sys

rows = {}
for line in open(sys.argv[1]):
    who, text = line.split(" ", 1)
    row = json.loads(text)
    rows.setdefault(row["shape"], {}).setdefault(who, []).append(row)


def median(runs, key):
    return statistics.median(run[key] for run in runs)


failed = 0
print("%-8s %-8s %10s %10s %12s %9s" % ("shape", "program", "ms/step", "GFLOP/s", "sgemm", "peak MB"))
for shape, both in rows.items():
    for who, runs in both.items():
        print("%-8s %-8s %10.1f %10.1f %12.1f %9.0f" % (
            (shape, who) + tuple(median(runs, key) for key in ("step_ms", "gflops", "sgemm_gflops", "peak_mb"))))
for shape, both in rows.items():
    ours, torch = both["ours"], both["torch"]
    # Rounds are compared pair by pair: what slows the machine for a while slows both.
    bars = [("share of sgemm", statistics.median(o["gflops"] / o["sgemm_gflops"] for o in ours), 0.70, ">="),
            ("PyTorch's step / ours", statistics.median(t["step_ms"] / o["step_ms"] for o, t in zip(ours, torch)), 1.15, ">="),
            ("PyTorch's sgemm / ours", statistics.median(t["sgemm_gflops"] / o["sgemm_gflops"] for o, t in zip(ours, torch)),
             0.90, ">=")]
    if shape == "gpt2":
        bars.append(("peak GB", max(o["peak_mb"] for o in ours) / 1000, 2.3, "<"))
    for name, value, bar, sense in bars:
        good = value >= bar if sense == ">=" else value < bar
        failed += not good
        print("%-8s %-24s %6.2f   %s %.2f  %s" % (shape, name, value, sense, bar, "PASS" if good else "FAIL"))
sys.exit(1 if failed else 0)
CODE
