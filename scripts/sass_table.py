#!/usr/bin/python3
"""What a warp executes of each kernel: its hot path and its loops, from nvcc's machine code. For dev/ROOFLINE.md.

  scripts/sass_table.py --nvdisasm NVDISASM [--nvcc NVCC] [--precision bf16|fp32|fp16] [--arch sm_80] [NAME ..]

NAME: text in the names of kernels to show, as `codec_encode_kernel<bf16, taco e4m3>`; none: all. Prints Markdown. The hot path
goes from the kernel's start to its end by the branches that lead to many bytes in few accesses, to products and shuffles, and to
few other instructions, through each loop once: that of aligned data, of rounding to nearest, of operands without special cases.
A loop's row counts one turn of it, inner loops once. Instructions whose predicate is false count: they are issued. Compiled as
ptxas_table.py does.
"""
import argparse
import os
import re
import shutil
import sys
import tempfile

import ptxas_table

ACCESSES = ptxas_table.ACCESSES
OTHERS = ("LDSM", "HMMA", "HGMMA", "MUFU", "SHFL", "BAR")


def blocks_read(code):
    """Basic blocks in listing order, [instructions (kind, modifiers, predicated)], and {block: [blocks that may follow]}."""
    blocks, places, jumps, targets, ended = [[]], {}, {}, {}, False
    for label, predicate, name, operands in re.findall(
            r"^(\.L_x_\d+):|^\s+/\*[0-9a-f]{4,}\*/ +(@!?U?P\w+ +)?([A-Z][\w.]*) *(.*?) *;", code, flags=re.M):
        if (label or ended) and blocks[-1]:
            blocks.append([])
        ended = False
        at = len(blocks) - 1
        if label:
            places[label] = at
            continue
        kind, *modifiers = name.split(".")
        blocks[-1].append((kind, modifiers, bool(predicate)))
        target = re.search(r"\.L_x_\d+", operands)
        barrier = re.search(r"\bB\d+", operands)
        conditional = bool(predicate) or bool(re.match(r"!?U?P\d", operands))
        if kind == "BSSY":
            targets[barrier[0]] = target[0]
        elif kind in ("BRA", "CALL") and target and "DIV" not in modifiers:  # DIV: for lanes of a warp that lost each other
            jumps[at] = (target[0], conditional)
            ended = True
        elif kind == "BSYNC":
            jumps[at] = (targets[barrier[0]], bool(predicate))
            ended = True
        elif kind in ("EXIT", "RET") and not predicate:
            jumps[at] = (None, False)
            ended = True
    follow = {}
    for at in range(len(blocks)):
        target, conditional = jumps.get(at, (None, True))
        follow[at] = ([places[target]] if target in places else []) + ([at + 1] if conditional and at + 1 < len(blocks) else [])
    return blocks, follow


def width_of(modifiers):
    return next((ptxas_table.WIDTH[m] for m in modifiers if m in ptxas_table.WIDTH), 4)


def score(instructions):
    """Many bytes by few accesses, products and shuffles are good, other instructions are not."""
    points = -len(instructions)
    for kind, modifiers, predicated in instructions:
        if kind in ("LDG", "STG", "LDGSTS", "LDS") and not (predicated and width_of(modifiers) <= 2):
            points += 20 * (width_of(modifiers) - 2)
        points += 1000 * (kind in ("HMMA", "SHFL"))
    return points


def edges_sort(follow):
    """Blocks, each after those that may follow it, and the edges that close a loop, {from: [to]}."""
    order, state, back, stack = [], {0: 1}, {}, [(0, iter(follow[0]))]
    while stack:
        at, rest = stack[-1]
        then = next(rest, None)
        if then is None:
            order.append(at)
            state[at] = 2
            stack.pop()
        elif state.get(then) == 1:  # still being visited
            back.setdefault(at, []).append(then)
        elif then not in state:
            state[then] = 1
            stack.append((then, iter(follow[then])))
    return order, back


def path_find(blocks, follow):
    """The hot path, [blocks], and its loops, [(first, last)] as places in it."""
    order, back = edges_sort(follow)
    once = {at: [then for then in follow[at] if then not in back.get(at, [])] for at in follow}
    reach = {}
    for at in order:
        reach[at] = {at}.union(*(reach[then] for then in once[at]))
    for at, starts in back.items():  # from the end of a loop to what follows when its start leaves it
        once[at] = once[at] + [out for start in starts for out in once[start] if at not in reach[out]]
    best = {}
    for at in edges_sort(once)[0]:
        most, then = max([(best[then][0], then) for then in once[at] if then in best], default=(0, None))
        best[at] = (score(blocks[at]) + most, then)
    path = [0]
    while best[path[-1]][1] is not None:
        path.append(best[path[-1]][1])
    loops = {}
    for last, at in enumerate(path):
        for end in [at] + [then for then in follow[at] if len(blocks[then]) == 1]:  # a jump back may be a block of its own
            loops.update((path.index(start), last) for start in back.get(end, []) if start in path)
    return path, sorted(loops.items())


def row_print(name, instructions):
    counts = {}
    for kind, modifiers, _ in instructions:
        key = (kind, width_of(modifiers) if kind in ACCESSES else 0)
        counts[key] = counts.get(key, 0) + 1
    cells = [" ".join("%dx%d" % (n, w) for (k, w), n in sorted(counts.items(), key=lambda c: -c[0][1]) if k == kind)
             for kind in ACCESSES] + [str(counts.get((kind, 0), "")) for kind in OTHERS]
    print("| %s | %d | %s |" % (name, len(instructions), " | ".join(cells)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--nvdisasm", required=True)
    parser.add_argument("--nvcc", default="nvcc")
    parser.add_argument("--precision", choices=("bf16", "fp32", "fp16"), default="bf16")
    parser.add_argument("--arch", default="sm_80")
    arguments = parser.parse_args()
    for program in (arguments.nvcc, "c++filt", arguments.nvdisasm):
        if not shutil.which(program):
            sys.exit("sass_table.py: '%s' was not found: nvcc and nvdisasm come with NVIDIA's CUDA toolkit, c++filt with binutils"
                     % program)
    arguments.source = os.path.join(ptxas_table.ROOT, "train_gpt.cu")
    with tempfile.TemporaryDirectory() as folder:
        kernels, cubin = ptxas_table.compile_for(arguments.arch, arguments, folder)
        listing = ptxas_table.run([arguments.nvdisasm, "-c", cubin])
    ptxas_table.names_add(kernels)
    wanted = {k: v["name"] for k, v in kernels.items() if not arguments.names or any(n in v["name"] for n in arguments.names)}
    if not wanted:
        sys.exit("sass_table.py: no kernel has %s in its name; run it without names to see all" % " or ".join(arguments.names))
    print("| %s | instructions | %s |\n|---|%s" % (arguments.arch, " | ".join(ACCESSES + OTHERS), "--:|" * 12))
    code = {re.search(r"\.text\.(\w+)", s)[1]: s for s in re.split(r"^(?=\s*\.section\s+\.text\.)", listing, flags=re.M)[1:]}
    for mangled, name in sorted(wanted.items(), key=lambda item: item[1]):
        blocks, follow = blocks_read(code[mangled])
        path, loops = path_find(blocks, follow)
        row_print("`%s`" % name, [i for at in path for i in blocks[at]])
        for first, last in loops:
            row_print("&nbsp; loop", [i for at in path[first:last + 1] for i in blocks[at]])


if __name__ == "__main__":
    main()
