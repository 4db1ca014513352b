#!/usr/bin/python3
"""Loss curves of one or several runs, from their JSON logs: a PNG, a plot in the terminal, or both.

  scripts/plot.py run/a.jsonl run/b.jsonl --out loss.png --terminal [--title TEXT] [--line NAME=LOSS ..]

Training loss is drawn faint and, over it, its running mean; validation loss as points. --line adds a horizontal line,
as in --line "3-gram=1.95".
"""
import argparse
import json
import math
import os
import shutil
import sys


def read_run(path):
    """(steps and training losses, steps and validation losses)"""
    train, val = [], []
    with open(path) as log:
        for number, line in enumerate(log, 1):
            try:
                record = json.loads(line)
            except ValueError:
                sys.exit("plot.py: %s, line %d is not JSON: is it a run's --log file?" % (path, number))
            if record.get("loss") is not None:
                train.append((record["step"], record["loss"]))
            if record.get("val_loss") is not None:
                val.append((record["step"], record["val_loss"]))
    if not train and not val:
        sys.exit("plot.py: %s holds no losses" % path)
    return train, val


def running_mean(points, share=0.02):
    """The mean over a window of `share` of the run around each point; the window shrinks towards both ends."""
    sums, half = [0.0], int(share * len(points) / 2)
    for _, value in points:
        sums.append(sums[-1] + value)
    out = []
    for i, (step, _) in enumerate(points):
        reach = min(half, i, len(points) - 1 - i)
        out.append((step, (sums[i + reach + 1] - sums[i - reach]) / (2 * reach + 1)))
    return out


def plot_png(path, runs, lines, title):
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120)
    for i, (name, (train, val)) in enumerate(runs.items()):
        color = "C%d" % (i % 10)
        if train:
            axes.plot(*zip(*train), color=color, alpha=0.2, linewidth=0.7)
            axes.plot(*zip(*running_mean(train)), color=color, linewidth=1.5, label=name + " training")
        if val:
            axes.plot(*zip(*val), color=color, marker="o", markersize=4, linewidth=1, linestyle="--", label=name + " validation")
    for name, value in lines:
        axes.axhline(value, color="grey", linestyle=":", linewidth=1.2, label="%s %.3f" % (name, value))
    axes.set_ylim(*value_range(runs, lines))
    axes.set(xlabel="step", ylabel="loss, nats per token", title=title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)


def value_range(runs, lines):
    """From the least value to where most of the run lies: the first steps of a run would flatten all the rest."""
    values = [v for name, v in lines]
    for train, val in runs.values():
        smooth = [v for _, v in running_mean(train)]
        values += [v for _, v in val[1:] or val] + smooth[len(smooth) // 40:]
    low, high = min(values), max(values)
    margin = 0.05 * (high - low) or 0.1
    return low - margin, high + margin


def plot_terminal(runs, lines, title):
    columns = min(100, shutil.get_terminal_size((80, 24)).columns) - 9
    rows = 16
    low, high = value_range(runs, lines)
    last = max(points[-1][0] for pair in runs.values() for points in pair if points)
    grid = [[" "] * columns for _ in range(rows)]

    def put(step, value, mark):
        row = round((high - value) / (high - low) * (rows - 1))
        column = round(step / last * (columns - 1))
        if 0 <= row < rows and math.isfinite(value):
            grid[row][column] = mark

    for _, value in lines:
        for column in range(0, columns, 2):
            put(column / (columns - 1) * last, value, "-")
    legend = []
    for i, (name, (train, val)) in enumerate(runs.items()):
        dot, big = ".+x*"[i % 4], "oABC"[i % 4]
        smooth = running_mean(train)
        for step, value in smooth:
            put(step, value, dot)
        for step, value in val:
            put(step, value, big)
        legend.append("%s: training %s" % (name, dot) + (", validation %s" % big if val else ""))
    legend += ["%s %.3f: - -" % line for line in lines]
    print(title)
    for row in range(rows):
        value = "%7.3f" % (high - (high - low) * row / (rows - 1)) if row % 5 == 0 else " " * 7
        print(value + " |" + "".join(grid[row]).rstrip())
    print(" " * 8 + "+" + "-" * columns)
    print(" " * 8 + "0" + ("step %d" % last).rjust(columns))
    print("  " + "; ".join(legend))


def named_value(text):
    name, _, value = text.rpartition("=")
    try:
        return name, float(value)
    except ValueError:
        raise argparse.ArgumentTypeError("expected NAME=LOSS, found '%s'" % text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", nargs="+", metavar="RUN.jsonl")
    parser.add_argument("--out", metavar="FILE.png")
    parser.add_argument("--terminal", action="store_true")
    parser.add_argument("--title", default="")
    parser.add_argument("--line", type=named_value, action="append", default=[], metavar="NAME=LOSS")
    options = parser.parse_args()
    if not options.out and not options.terminal:
        parser.error("nothing to do: give --out FILE.png, --terminal or both")
    runs = {os.path.splitext(os.path.basename(path))[0]: read_run(path) for path in options.logs}
    if len(runs) < len(options.logs):  # files of one name in different directories
        runs = {path: read_run(path) for path in options.logs}
    if options.terminal:
        plot_terminal(runs, options.line, options.title)
    if options.out:
        plot_png(options.out, runs, options.line, options.title)
        print("wrote " + options.out)


if __name__ == "__main__":
    main()
