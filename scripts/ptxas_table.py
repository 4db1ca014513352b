#!/usr/bin/python3
"""What nvcc makes of each kernel: registers, shared memory, spills, and how many blocks fit on an A100, an H100 and an RTX 4090.

  scripts/ptxas_table.py [--nvcc NVCC] [--precision bf16|fp32|fp16] [SOURCE]     SOURCE: train_gpt.cu
  scripts/ptxas_table.py --sass NVDISASM ..     also what loads and stores the machine code has, for dev/ROOFLINE.md

Prints Markdown. Ends with status 1, and a line for each reason on stderr, if a kernel spills or has local memory, or if fewer
of its blocks fit on an A100 or H100 than its __launch_bounds__ promise. No kernel is exempt.
nvdisasm is in NVIDIA's CUDA toolkit and, alone, in the Python package nvidia-cuda-nvdisasm.
"""
import argparse
import concurrent.futures
import os
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

# Of a multiprocessor: the machine code that it runs, warps, blocks, shared memory in all and of a block, both in bytes. The
# build has no code for sm_89 alone (CUDA_ARCHS in the Makefile): a 4090 runs that for sm_80.
GPUS = {
    "A100": ("sm_80", 64, 32, 164 << 10, 163 << 10),
    "H100": ("sm_90", 64, 32, 228 << 10, 227 << 10),
    "RTX 4090": ("sm_80", 48, 24, 100 << 10, 99 << 10),
}
MUST_HOLD = ("A100", "H100")  # what __launch_bounds__ promise; the 4090 has fewer warps and less shared memory

# Shared memory that the launch asks for, most where it depends on the shape: C++ of the kernel's template arguments.
DYNAMIC_SHARED = {
    "attention_forward_mma": "cuda::forward_shared({1})",
    "attention_backward_mma": "cuda::backward_shared({1})",
    "attention_forward_simt": "cuda::simt_forward_shared({1}, {1} == 32 ? 64 : 128)",
    "attention_backward_simt": "cuda::simt_backward_shared({1}, {1} == 32 ? 64 : 128, {2})",
    "codec_norm_kernel": "sizeof(cuda::Pack<{0}>) * {2} * cuda::norm_threads",
}
FORMULAS_FROM = ("llmc/device.h", "llmc/cuda/attention.cuh", "llmc/cuda/codec_norm.cuh")

SHORTER = (  # of names
    (r"\bcuda::", ""), (r"\b__nv_bfloat16\b", "bf16"), (r"\b__half\b", "fp16"),
    (r"\(Fp8Format\)0", "e4m3"), (r"\(Fp8Format\)1", "e5m2"), (r"\(Own\)0", "queries"), (r"\(Own\)1", "keys"),
    (r"Groups<Fp8Code<(\w+)>, false, false>", r"fp8 \1"), (r"Groups<Fp8Code<(\w+)>, true, false>", r"taco \1"),
    (r"Groups<LevelCode, false, false>", "int8"), (r"Groups<LevelCode, true, false>", "hadint8"),
    (r"Groups<LevelCode, true, true>", "hadint4..7"), (r"Plain<(\w+)>", r"\1 wire"), (r" >", ">"),
)


def run(command):
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit("ptxas_table.py: failed with status %d: %s\n%s" % (done.returncode, " ".join(command), done.stdout + done.stderr))
    return done.stdout + done.stderr


def arguments_split(name):
    """The kernel's own name and its template arguments, from its demangled name."""
    name = re.sub(r"^void ", "", name)
    at = re.match(r"[\w:~]+", name).end()
    kernel, arguments, depth = name[:at], [""], 0
    for c in name[at:]:
        depth += {"<": 1, "(": 1, ">": -1, ")": -1}.get(c, 0)
        if depth == 0:
            break
        if depth == 1 and c == ",":
            arguments.append("")
        elif depth > 1 or c != "<":
            arguments[-1] += c
    return kernel.split("::")[-1], [a.strip() for a in arguments] if name[at] == "<" else []


def nvcc(arguments, *options):
    return run([arguments.nvcc, "-std=c++20", "-O3", "--expt-relaxed-constexpr", "-Xcudafe", "--diag_suppress=1675", "-x", "cu",
                "-DLLMC_CUDA", "-DLLMC_NO_MPI", "-DFLOATX_" + arguments.precision.upper(), "-I" + ROOT, *options])


def compile_for(arch, arguments, folder):
    """The kernels for one arch, {mangled name: what ptxas says and the PTX declares}, and the file of their machine code."""
    place, cubin = os.path.join(folder, arch), os.path.join(folder, arch + ".cubin")
    os.mkdir(place)
    said = nvcc(arguments, "-cubin", "-arch=" + arch, "-Xptxas", "-v", "--keep", "--keep-dir", place, "-o", cubin,
                os.path.abspath(arguments.source))
    kernels = {}
    for name, stack, stores, loads, used in re.findall(
            r"function '(\w+)' for.*\n.*\n *(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads\n(.*)", said):
        shared = re.search(r"(\d+) bytes smem", used)
        kernels[name] = dict(stack=int(stack), spills=int(stores) + int(loads), registers=int(re.search(r"Used (\d+)", used)[1]),
                             shared=int(shared[1]) if shared else 0)
    ptx = next(file for file in os.listdir(place) if file.endswith(".ptx"))
    with open(os.path.join(place, ptx)) as file:
        for entry in re.split(r"^(?=\.(?:visible|weak) \.entry )", file.read(), flags=re.M)[1:]:
            kernel, head = kernels[re.search(r"\.entry (\w+)", entry)[1]], entry.split("{", 1)[0]
            threads, blocks = re.search(r"\.maxntid (\d+)", head), re.search(r"\.minnctapersm (\d+)", head)
            kernel.update(bounded=bool(threads and blocks), threads=int(threads[1]) if threads else 1024,
                          blocks=int(blocks[1]) if blocks else 1, dynamic="dynamic_shared_memory" in entry)
    return kernels, cubin


def names_add(kernels):
    names = run(["c++filt", *kernels]).splitlines()
    for kernel, name in zip(kernels.values(), names):
        kernel["base"], kernel["arguments"] = arguments_split(name)
        kernel["name"] = kernel["base"] + ("<%s>" % ", ".join(kernel["arguments"]) if kernel["arguments"] else "")
        for long, short in SHORTER:
            kernel["name"] = re.sub(long, short, kernel["name"])


def dynamic_shared_add(kernels, arguments, folder):
    """Evaluates DYNAMIC_SHARED by the compiler: numbers that the headers' formulas give."""
    wanted = [k for k in kernels.values() if k["dynamic"]]
    unknown = sorted({k["base"] for k in wanted} - set(DYNAMIC_SHARED))
    if unknown:
        sys.exit("ptxas_table.py: how much dynamic shared memory do they take? Add to DYNAMIC_SHARED: " + ", ".join(unknown))
    if not wanted:
        return
    source, ptx = os.path.join(folder, "shared.cu"), os.path.join(folder, "shared.ptx")
    with open(source, "w") as file:
        file.writelines('#include "%s"\n' % header for header in FORMULAS_FROM)
        for i, k in enumerate(wanted):
            file.write("__device__ size_t dynamic_%d = %s;\n" % (i, DYNAMIC_SHARED[k["base"]].format(*k["arguments"])))
    nvcc(arguments, "-ptx", "-o", ptx, source)
    with open(ptx) as file:
        for i, value in re.findall(r" dynamic_(\d+) = (\d+);", file.read()):
            wanted[int(i)]["dynamic"] = int(value)


def blocks_that_fit(gpu, kernel):
    """As cuda_occupancy.h has it: four partitions of 16384 registers, given to warps 256 at a time; 1 KB of shared memory of each
    block is the system's."""
    _, warps, blocks, shared, shared_of_block = GPUS[gpu]
    own_warps = -(-kernel["threads"] // 32)
    warp_registers = -(-kernel["registers"] * 32 // 256) * 256
    own_shared = -(-(kernel["shared"] + kernel["dynamic"] + 1024) // 128) * 128
    if own_shared > shared_of_block + 1024:
        return 0
    return min(blocks, warps // own_warps, 16384 // warp_registers * 4 // own_warps, shared // own_shared)


def table_print(kernels):
    """kernels: {arch: {mangled name: kernel}}. Returns what is wrong with them."""
    faults = []
    print("| kernel | threads | promised | shared | spills |",
          " | ".join("%s: registers | blocks | warps" % gpu for gpu in GPUS), "|")
    print("|---|" + "--:|" * (4 + 3 * len(GPUS)))
    for mangled, first in sorted(kernels[GPUS["A100"][0]].items(), key=lambda item: item[1]["name"]):
        name, spills, cells = first["name"], {}, []
        for gpu, (arch, warps, *_) in GPUS.items():
            kernel = kernels[arch][mangled]
            if kernel["spills"] or kernel["stack"]:
                spills[arch] = "%s: %d B, stack %d B" % (arch, kernel["spills"], kernel["stack"])
            blocks = blocks_that_fit(gpu, kernel)
            cells.append("%d | %d | %.0f%%" % (kernel["registers"], blocks, 100 * blocks * -(-kernel["threads"] // 32) / warps))
            if gpu in MUST_HOLD and blocks < first["blocks"]:
                faults.append("%s: %d blocks fit on an %s multiprocessor, its __launch_bounds__ promise %d: use fewer registers or "
                              "less shared memory, or promise less" % (name, blocks, gpu, first["blocks"]))
        if not first["bounded"]:
            faults.append("%s: has no __launch_bounds__(threads, blocks)" % name)
        if spills:
            faults.append("%s: registers are spilled (%s): promise fewer blocks in __launch_bounds__, or hold fewer values"
                          % (name, "; ".join(spills.values())))
        shared = "%d + %d" % (first["shared"], first["dynamic"]) if first["dynamic"] else first["shared"] or ""
        print("| `%s` | %d | %d | %s | %s |" % (name, first["threads"], first["blocks"], shared, "; ".join(spills.values()) or 0),
              " | ".join(cells), "|")
    return faults


# --- machine code

WIDTH = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
ACCESSES = ("LDG", "STG", "LDGSTS", "LDS", "STS")


def sass_read(code):
    """Counts of accesses by kind and bytes, of other instructions by kind, and the most bytes that loads from global memory have on
    their way to a thread at once: from the load to the first instruction that names a register of its result, in listing order.
    Loads of less than 8 bytes, which are for rows that are not aligned and the like, do not count."""
    counts, flying, most = {}, {}, 0
    for instruction, operands in re.findall(r"/\*[0-9a-f]{4,}\*/ +(?:@!?U?P\w+ +)?([A-Z][\w.]*) *(.*?) *;", code):
        kind, *modifiers = instruction.split(".")
        width = next((WIDTH[m] for m in modifiers if m in WIDTH), 4)
        key = (kind, width if kind in ACCESSES else 0)
        counts[key] = counts.get(key, 0) + 1
        named = [int(r) for r in re.findall(r"\bR(\d+)", operands)]
        for first in [f for f in flying if any(f <= r < f + flying[f] // 4 for r in named)]:
            del flying[first]
        if kind == "LDG" and width >= 8:
            flying[named[0]] = width
            most = max(most, sum(flying.values()))
    return counts, most


def sass_print(kernels, cubins, nvdisasm):
    for gpu in MUST_HOLD:
        arch, code = GPUS[gpu][0], {}
        for section in re.split(r"^(?=\s*\.section\s+\.text\.)", run([nvdisasm, "-c", cubins[arch]]), flags=re.M)[1:]:
            code[re.search(r"\.text\.(\w+)", section)[1]] = section
        print("\nMachine code for %s: accesses to memory, count x bytes a thread; of all paths, each instruction once.\n" % arch)
        print("| kernel | instructions |", " | ".join(ACCESSES),
              "| local | LDSM | HMMA | MUFU | SHFL | in flight: B a thread | KB an SM |")
        print("|---|" + "--:|" * 13)
        for mangled, kernel in sorted(kernels[arch].items(), key=lambda item: item[1]["name"]):
            counts, flying = sass_read(code[mangled])
            widths = [" ".join("%dx%d" % (n, w) for (k, w), n in sorted(counts.items(), key=lambda c: -c[0][1]) if k == kind)
                      for kind in ACCESSES]
            others = [str(sum(counts.get((kind, 0), 0) for kind in kinds) or "")
                      for kinds in (("LDL", "STL"), ("LDSM",), ("HMMA",), ("MUFU",), ("SHFL",))]
            print("| `%s` | %d | %s | %d | %.0f |" % (kernel["name"], sum(counts.values()), " | ".join(widths + others), flying,
                                                    flying * kernel["threads"] * blocks_that_fit(gpu, kernel) / 1024))


INTRODUCTION = """\
# What nvcc %s makes of the kernels of %s, %s

`make ptxas` writes this table (scripts/ptxas_table.py) and fails if a kernel spills or holds less than it promises.

promised: blocks a multiprocessor, by `__launch_bounds__`. shared: bytes a block, static + dynamic (the most, where it depends on
the shape). spills: bytes stored and loaded. blocks: that fit on a multiprocessor; warps: of those that it can hold. An RTX 4090 runs
the A100's code.
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="?", default=os.path.join(ROOT, "train_gpt.cu"))
    parser.add_argument("--nvcc", default="nvcc")
    parser.add_argument("--precision", choices=("bf16", "fp32", "fp16"), default="bf16")
    parser.add_argument("--sass", metavar="NVDISASM")
    arguments = parser.parse_args()
    for program in (arguments.nvcc, "c++filt", arguments.sass):
        if program is not None and not shutil.which(program):
            sys.exit("ptxas_table.py: '%s' was not found: nvcc and nvdisasm come with NVIDIA's CUDA toolkit, c++filt with binutils"
                     % program)
    archs = sorted({arch for arch, *_ in GPUS.values()})
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        made = dict(zip(archs, pool.map(lambda arch: compile_for(arch, arguments, folder), archs)))
        kernels = {arch: made[arch][0] for arch in archs}
        for of_arch in kernels.values():
            names_add(of_arch)
            dynamic_shared_add(of_arch, arguments, folder)
        version = re.search(r"V([\d.]+)", run([arguments.nvcc, "--version"]))[1]
        print(INTRODUCTION % (version, os.path.basename(arguments.source), arguments.precision))
        faults = table_print(kernels)
        if arguments.sass:
            sass_print(kernels, {arch: made[arch][1] for arch in archs}, arguments.sass)
    for fault in faults:
        print("ptxas_table.py: " + fault, file=sys.stderr)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
