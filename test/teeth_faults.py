#!/usr/bin/env python3
"""Faults that `make test-emu-teeth` plants, one at a time, in a copy of the sources: each must make a test fail.

They are slips that can really happen, compile, and change what a GPU computes for some legal input; many show only at an edge:
a tail, an odd size, a rare branch, a race. `old` stands exactly once in the file. Run alone, this checks that all still apply.
"""
import sys
from collections import namedtuple
from pathlib import Path

Fault = namedtuple("Fault", "name file old new effect")

FAULTS = [
    # attention
    Fault("attention_mma_diagonal_unmasked", "llmc/cuda/attention_mma.cuh",
          "if (query < forward_streamed - 1) {",
          "if (query < forward_streamed - 16) {",
          "heads wider than 64: the last warp of a block does not mask the diagonal, so queries see later keys"),
    Fault("attention_mma_store_in_use", "llmc/cuda/attention_mma.cuh",
          "const int unused = ceil_div(end, forward_streamed) % 2 * (2 * tile);",
          "const int unused = (ceil_div(end, forward_streamed) - 1) % 2 * (2 * tile);",
          "out passes through the stage that other warps may still read keys and values from: a race"),
    Fault("attention_mma_backward_tail", "llmc/cuda/attention_mma.cuh",
          "tiles = ceil_div(keys ? s.T - start : min(place.first + own_rows(Width), s.T), rows);",
          "tiles = (keys ? s.T - start : min(place.first + own_rows(Width), s.T)) / rows;",
          "the last T % 32 queries or keys are left out of the gradients"),
    Fault("attention_mma_group_start", "llmc/cuda/attention_mma.cuh",
          "if (keys && at >= s.T) at = start, head++;",
          "if (keys && at >= s.T) at = 0, head++;",
          "shared key heads: the queries of all but the first query head start at 0, and the last ones are left out"),
    Fault("attention_simt_tile_race", "llmc/cuda/attention_simt.cuh",
          "for (int k0 = 0; k0 <= q0; k0 += Tile) {\n        __syncthreads();\n",
          "for (int k0 = 0; k0 <= q0; k0 += Tile) {\n",
          "a fast warp loads the next keys and values over those that a slow one still reads"),
    # layer norm
    Fault("layernorm_partial_race", "llmc/cuda/layernorm.cuh",
          "// of the two halves of `partial`\n    for (long row = blockIdx.x; row < N; row += gridDim.x, turn ^= 1) {",
          "// of the two halves of `partial`\n    for (long row = blockIdx.x; row < N; row += gridDim.x) {",
          "backward of more rows than blocks: a warp writes the next row's sums over those that others still add up"),
    Fault("layernorm_variance_tail", "llmc/cuda/layernorm.cuh",
          "row_has<Packed, E>(k * norm_threads + thread, e, C)",
          "row_has<true, E>(k * norm_threads + thread, e, C)",
          "C not a multiple of a pack: the places behind the row's end count into the variance, as zeros off the mean"),
    Fault("layernorm_epsilon_outside_root", "llmc/cuda/layernorm.cuh",
          "return 1.0f / sqrtf(squares / float(C) + eps);",
          "return 1.0f / (sqrtf(squares / float(C)) + eps);",
          "eps is added to the deviation, not to the variance: far off for rows that are nearly constant"),
    # codecs
    Fault("codec_sum_not_cut", "llmc/cuda/codec.cuh",
          "    values_cut(sum, place);  // a short last group is sent whole, but its zeros do not decode to zeros\n",
          "",
          "n not a multiple of the group: what the padding decoded to goes into the scale and the transform of the sum"),
    Fault("codec_tiny_scales", "llmc/cuda/codec_group.cuh",
          "if (__all_sync(full_warp, s >= 0x1p-60f && s <= 0x1p60f)) {",
          "if (__all_sync(full_warp, s <= 0x1p60f)) {",
          "the reciprocal of a subnormal scale is infinite, and the codes of the group are garbage"),
    Fault("codec_level_ties", "llmc/cuda/codec_group.cuh",
          "return spec::bits_of(spec::add(v[i], 0x1.8p23f)); };",
          "return spec::bits_of(spec::add(floorf(spec::add(v[i], 0.5f)), 0x1.8p23f)); };",
          "int8, hadint: halves are rounded up instead of to even"),
    Fault("codec_bit_section_lanes", "llmc/cuda/codec_group.cuh",
          "const uint32_t received = __shfl_xor_sync(full_warp, own, half / 2);",
          "const uint32_t received = __shfl_xor_sync(full_warp, own, half);",
          "hadint5 and hadint7 in groups of 64 and more: the section of single bits takes them from the wrong lane"),
    Fault("codec_norm_other_kind", "llmc/cuda/codec_norm.cuh",
          "return a.kind == b.kind && a.format == b.format && (a.bits == 8) == (b.bits == 8);",
          "return a.kind == b.kind && a.format == b.format;",
          "hadint8 beside a hadint of fewer bits: the next gather is encoded in the first one's layout"),
    # linear layers and biases
    Fault("matmul_stale_pointers", "llmc/cuda/matmul.cuh",
          "    if (!fresh) matmul_pointers_set(plan, shape, at);\n",
          "",
          "a plan that is used again has the bias and the GELU input of the layer it was made for"),
    Fault("matmul_bias_gradient_overwritten", "llmc/cuda/matmul.cuh",
          "        if (dbias && !accumulate &&\n",
          "        if (dbias &&\n",
          "the epilogue overwrites dbias where it should be added to: biases learn from the last micro-batch only"),
    Fault("bias_ranges_tail", "llmc/cuda/bias.cuh",
          "stream, sums, x, N, C, ceil_div(N, long(ranges)), accumulate);",
          "stream, sums, x, N, C, N / ranges, accumulate);",
          "N not a multiple of the number of ranges: the last rows are left out of the bias's gradient"),
    # embeddings
    Fault("embedding_sort_range", "llmc/cuda/embedding.cuh",
          "EmbeddingKey{ids, first_row, rows}, n, rows, stream);",
          "EmbeddingKey{ids, first_row, rows}, n, rows - 1, stream);",
          "a table of 256 or 65536 rows: tokens of other ranks come among those of row 0, and hide what follows"),
    Fault("position_stripe_sign", "llmc/cuda/embedding.cuh",
          "long i = ((t - first_token) % T + T) % T;",
          "long i = (t + first_token) % T;",
          "a stripe that starts inside a sequence, not at its half: gradients go to other positions"),
    # classifier
    Fault("classifier_padding_counted", "llmc/cuda/classifier.cuh",
          "x[e] = p * size + e < valid_rows ? to_float(pack[e]) : -INFINITY;",
          "x[e] = to_float(pack[e]);",
          "a vocabulary that ends inside a pack: the padding's logits count into the softmax"),
    Fault("classifier_ignored_gradient", "llmc/cuda/classifier.cuh",
          "const int valid = targets[token] < 0 ? 0 : valid_rows, target",
          "const int valid = valid_rows, target",
          "tokens without a target have a gradient"),
    # update
    Fault("adamw_random_repeats", "llmc/cuda/optimizer.cuh",
          "philox(hyper.seed, first / 4 + draw, hyper.step)",
          "philox(hyper.seed, first / 4, hyper.step)",
          "16-bit weights without a master: elements 4 .. 7 of a thread are rounded by the random words of 0 .. 3"),
    Fault("norm_tail", "llmc/cuda/optimizer.cuh",
          "sweep_load(values, x, first, n, aligned && first + 4 <= n);",
          "sweep_load(values, x, first, n, aligned);",
          "n not a multiple of 4: what lies behind the gradient counts into its norm"),
    # streams, events and ranks
    Fault("all_reduce_norm_not_joined", "llmc/comm/boundary.h",
          "if (!fused) boundary_detail::sums_decode(bs, p, sums);\n    }\n    boundary_detail::stream_join(bs, stream);\n",
          "if (!fused) boundary_detail::sums_decode(bs, p, sums);\n    }\n",
          "without sequence parallelism: the next layer does not wait for the decoding of its input"),
    Fault("nccl_done_too_early", "llmc/comm/tensors_gpu.h",
          "    nccl(link.nccl.get(), link.stream);\n    event_record(request.done, link.stream);\n",
          "    event_record(request.done, link.stream);\n    nccl(link.nccl.get(), link.stream);\n",
          "what waits for a collective goes on when it starts"),
    Fault("staged_sent_too_early", "llmc/comm/staged.h",
          "        stream_synchronize(stream);\n        Request request = all_gather_begin(comm, host.get(), bytes);\n",
          "        Request request = all_gather_begin(comm, host.get(), bytes);\n",
          "MPI sends pinned memory before the copy from the GPU has filled it"),
    Fault("gradients_summed_too_early", "train_gpt.cu",
          "i + 1 == accumulation ? &sums : nullptr",
          "i == 0 ? &sums : nullptr",
          "dp ranks sum the first micro-batch's gradients; what later ones add stays on its rank"),
]


def main():
    """Prints where each fault stands with the tree; non-zero if one does not apply."""
    root, bad = Path(__file__).resolve().parent.parent, 0
    for fault in FAULTS:
        found = (root / fault.file).read_text().count(fault.old)
        bad += found != 1
        state = "OK" if found == 1 else f"stands {found} times, expected once: bring `old` up to date with the file"
        print(f"{fault.name}: {fault.file}: {state}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
