// The codecs fused with what follows a row-parallel layer: bias, residual, layer norm, and the encoding for the next gather.
//
//   codec_decode_reduce_layernorm   sequence parallel: b = the sum over peers of this rank's rows
//   codec_decode_layernorm          otherwise: b = all rows, from the gathered stripes
//
// Then residual = a + (b + add_bias), out = layernorm(residual), and out is encoded. The same bits as these steps one by one:
// b, residual and out are rounded to E where the single steps would store them. Saved a value: b is not written and read
// (2 e, with e the bytes of E), nor is out read again for its encoding (e), nor written if nobody wants it (e).
//
// A block of 128 threads has one row. Its warps decode tiles of 512 values into shared memory; from there the row goes through
// the registers of norm_row (layernorm.cuh), back to shared memory, and tile by tile to the wire.
//
// What cannot be fused is refused with false, and nothing is done: rows that are not whole groups, longer than 8192 or not
// aligned; stripes that are not whole rows; codec none, which needs no decoding.
#pragma once
#include "llmc/cuda/codec.cuh"
#include "llmc/cuda/layernorm.cuh"

namespace cuda {

// peers > 0: the row is a sum over them. 0: rows are in the wires' stripes one after another.
struct CodecRows {
    Codec codec;
    size_t groups;  // of a wire
    long rows;      // of a wire
    Codec next;
    size_t next_groups;
};

// Blocks an SM that the registers of decoding and of a row of `values` floats a thread allow.
template <class Kind>
constexpr int codec_norm_blocks(int values) {
    return std::min(2 * Kind::reduce_blocks, values <= 16 ? 5 : values <= 32 ? 4 : 3);
}

template <class E, class Kind, int Packs>
__global__ void __launch_bounds__(norm_threads, codec_norm_blocks<Kind>(Packs* Pack<E>::size))
    codec_norm_kernel(CodecRows rows, const __grid_constant__ CodecWires wires, const E* own, ResidualNorm<E> norm,
                      uint8_t* next_wire, uint64_t random, uint64_t* nonfinite) {
    SHARED_DYNAMIC(E, shared_row);  // [C]
    SHARED_ARRAY(float, partial, [norm_partials]);
    const long row = blockIdx.x;
    const int C = norm.C, thread = int(threadIdx.x), warp = thread / warp_size;
    const auto in_row = [&](CodecPlace place, size_t row_start) {
        place.at -= row_start, place.end -= row_start;
        return place;
    };

    const long stripe = wires.peers ? 0 : row / rows.rows;
    const size_t start = size_t(row - stripe * rows.rows) * size_t(C);  // of the row in its wire
    for (int first = warp * codec_tile; first < C; first += norm_threads / warp_size * codec_tile) {
        const CodecPlace place = codec_place(rows.codec, start + size_t(first), start + size_t(C), rows.groups);
        float b[16];
        if (wires.peers)
            decode_reduce<E, Kind>(rows.codec, b, wires, own, place);
        else
            Kind::decode(rows.codec, b, Kind::load(rows.codec, wires.at[stripe], place), place);
        values_store(shared_row, b, in_row(place, start));
    }
    __syncthreads();
    float x[Packs][Pack<E>::size];
#pragma unroll
    for (int k = 0; k < Packs; k++) {
        const Pack<E> pack = row_pack_load<true>(shared_row, k * norm_threads + thread, C);
#pragma unroll
        for (int e = 0; e < Pack<E>::size; e++) x[k][e] = to_float(pack[e]);
    }
    norm_row<E, Packs, true>(x, norm, row, partial);
    if (!next_wire) return;
#pragma unroll
    for (int k = 0; k < Packs; k++) {
        Pack<E> pack;
#pragma unroll
        for (int e = 0; e < Pack<E>::size; e++) pack[e] = from_float<E>(x[k][e]);
        row_pack_store<true>(shared_row, k * norm_threads + thread, C, pack);
    }
    __syncthreads();
    const size_t next_start = size_t(row) * size_t(C);
    for (int first = warp * codec_tile; first < C; first += norm_threads / warp_size * codec_tile) {
        const CodecPlace place = codec_place(rows.next, next_start + size_t(first), next_start + size_t(C), rows.next_groups);
        float v[16];
        values_load(v, shared_row, in_row(place, next_start));
        const bool finite = Kind::encode(rows.next, next_wire, v, place, random);
        nonfinite_add(nonfinite, !finite);
    }
}

// Whether both are of one kind (codec_group.cuh), so that one kernel can decode the first and encode the second.
inline bool codec_same_kind(const Codec& a, const Codec& b) {
    return a.kind == b.kind && a.format == b.format && (a.bits == 8) == (b.bits == 8);
}

template <class E>
bool codec_norm_fusable(const Codec& c, const ResidualNorm<E>& norm) {
    const int whole = codec_has_groups(c) ? c.group : codec_half;
    return c.kind != Codec::none && norm.C % whole == 0 && norm.C <= norm_max_columns &&
           rows_are_packed<E>(norm.residual, norm.C) && all_aligned(norm.out, norm.a, norm.add_bias, norm.weight, norm.bias);
}

template <class E>
void codec_norm_launch(const CodecRows& rows, long count, const CodecWires& wires, const E* own, const ResidualNorm<E>& norm,
                       uint8_t* next_wire, const RoundingKey& key, uint64_t* nonfinite, Stream stream) {
    if (count == 0) return;
    codec_dispatch<E>(rows.codec, [&]<class Kind>(Kind) {
        norm_packs_dispatch<E>(norm.C, [&](auto packs) {
            launch(codec_norm_kernel<E, Kind, decltype(packs)::value>, dim3(unsigned(count)), dim3(norm_threads),
                   size_t(norm.C) * sizeof(E), stream, rows, wires, own, norm, next_wire, spec::rounding_stream(key), nonfinite);
        });
    });
}

// n values of whole rows from the wires of all peers, as in codec_decode_reduce. next_wire: out, encoded by `next`; null: not
// wanted. norm.out may be null if next_wire is not.
template <class E>
bool codec_decode_reduce_layernorm(const Codec& c, const uint8_t* const* wires, const E* own, int peers, size_t n,
                                   const ResidualNorm<E>& norm, const Codec& next, uint8_t* next_wire, const RoundingKey& key,
                                   uint64_t* nonfinite, Stream stream) {
    const bool encoded_here = next_wire && codec_same_kind(c, next) && codec_norm_fusable(next, norm);
    if (!codec_norm_fusable(c, norm) || n % size_t(norm.C) != 0 || (!norm.out && !encoded_here)) return false;
    CodecRows rows = {c, codec_has_groups(c) ? codec_groups(c, n) : 0, long(n) / norm.C, next, 0};
    if (encoded_here && codec_has_groups(next)) rows.next_groups = codec_groups(next, n);
    codec_norm_launch(rows, rows.rows, codec_wires(wires, peers), own, norm, encoded_here ? next_wire : nullptr, key, nonfinite,
                      stream);
    if (next_wire && !encoded_here) codec_encode(next, next_wire, norm.out, n, key, nonfinite, stream);
    return true;
}

// wires: [stripes], of stripe_values values each: together all rows.
template <class E>
bool codec_decode_layernorm(const Codec& c, const uint8_t* const* wires, int stripes, size_t stripe_values,
                            const ResidualNorm<E>& norm, Stream stream) {
    if (!codec_norm_fusable(c, norm) || stripe_values % size_t(norm.C) != 0 || !norm.out) return false;
    CodecWires list = codec_wires(wires, stripes);
    list.peers = 0;
    const CodecRows rows = {c, codec_has_groups(c) ? codec_groups(c, stripe_values) : 0, long(stripe_values) / norm.C, {}, 0};
    codec_norm_launch<E>(rows, stripes * rows.rows, list, nullptr, norm, nullptr, {}, nullptr, stream);
    return true;
}

}  // namespace cuda
