// The codecs on the GPU: one pass over memory each, a warp a tile of 512 values, all in registers (codec_group.cuh). Bytes and
// floats are those of codec/spec.h and cpu/codec.h.
//
// Moved a value, with e the bytes of E and w those of the codec (1 + 8 / G for taco): encode e + w, decode w + e, decode-reduce
// w for each peer, e for the own values and e, decode-reduce-encode the same with w in place of the last e.
//
// wire is codec_wire_bytes<E>(c, n) long and need not be aligned, but is read and written 8 and 16 bytes at a time if it is.
#pragma once
#include "llmc/cuda/codec_group.cuh"

namespace cuda {

constexpr int codec_threads = 256;
constexpr int codec_block = codec_threads / warp_size * codec_tile;  // values of a block
constexpr int codec_peers_max = 64;

// [peers], in rank order; null: the own values take the place.
struct CodecWires {
    const uint8_t* at[codec_peers_max];
    int peers;
};

inline CodecWires codec_wires(const uint8_t* const* wires, int peers) {
    check(peers <= codec_peers_max, "codec: %d peers take part in a reduction; at most %d can", peers, codec_peers_max);
    CodecWires list = {};
    std::copy(wires, wires + peers, list.at);
    list.peers = peers;
    return list;
}

// Calls f with the codec's kind. E: the type that `none` sends.
template <class E, class F>
void codec_dispatch(const Codec& c, F f) {
    const bool e4m3 = c.format == Fp8Format::e4m3;
    if (c.kind == Codec::none) return f(Plain<E>{});
    if (c.kind == Codec::bf16) return f(Plain<bf16>{});
    if (c.kind == Codec::fp8) return e4m3 ? f(Fp8Groups<Fp8Format::e4m3, false>{}) : f(Fp8Groups<Fp8Format::e5m2, false>{});
    if (c.kind == Codec::taco) return e4m3 ? f(Fp8Groups<Fp8Format::e4m3, true>{}) : f(Fp8Groups<Fp8Format::e5m2, true>{});
    if (c.kind == Codec::int8) return f(ByteGroups<false>{});
    return c.bits == 8 ? f(ByteGroups<true>{}) : f(SectionGroups{});
}

// The stripe's values that a warp works on.
struct CodecStripe {
    Codec codec;
    size_t n, groups, tiles;
};

inline CodecStripe codec_stripe(const Codec& c, size_t n) {
    return {c, n, codec_has_groups(c) ? codec_groups(c, n) : 0, ceil_div(n, size_t(codec_tile))};
}

__device__ __forceinline__ size_t codec_tile_of_warp() {
    return blockIdx.x * size_t(codec_threads / warp_size) + threadIdx.x / warp_size;
}

// Counts lanes that say so; all lanes of the warp call it.
__device__ __forceinline__ void nonfinite_add(uint64_t* nonfinite, bool broken) {
    const unsigned broken_lanes = __ballot_sync(full_warp, broken);
    if (nonfinite && broken_lanes && threadIdx.x % warp_size == 0)
        atomicAdd(reinterpret_cast<unsigned long long*>(nonfinite), static_cast<unsigned long long>(__popc(broken_lanes)));
}

template <class E, class Kind>
__global__ void __launch_bounds__(codec_threads, 4)
    codec_encode_kernel(CodecStripe stripe, uint8_t* __restrict__ wire, const E* __restrict__ x, uint64_t random,
                        uint64_t* nonfinite) {
    const size_t tile = codec_tile_of_warp();
    if (tile >= stripe.tiles) return;
    const CodecPlace place = codec_place(stripe.codec, tile * codec_tile, stripe.n, stripe.groups);
    float v[16];
    values_load(v, x, place);
    const bool finite = Kind::encode(stripe.codec, wire, v, place, random);
    nonfinite_add(nonfinite, !finite);
}

template <class E, class Kind>
__global__ void __launch_bounds__(codec_threads, 4)
    codec_decode_kernel(CodecStripe stripe, E* __restrict__ x, const uint8_t* __restrict__ wire) {
    const size_t tile = codec_tile_of_warp();
    if (tile >= stripe.tiles) return;
    const CodecPlace place = codec_place(stripe.codec, tile * codec_tile, stripe.n, stripe.groups);
    float v[16];
    Kind::decode(stripe.codec, v, Kind::load(stripe.codec, wire, place), place);
    if constexpr (std::is_same_v<E, float> && Kind::has_scales) {  // the NaN that spec.h says; in 16 bits all are one
        if (v[0] != v[0]) {
#pragma unroll
            for (int i = 0; i < 16; i++) v[i] = spec::float_of(spec::quiet_nan);
        }
    }
    values_store(x, v, place);
}

// sum: over the peers, in rank order. The bytes of the next peer are on their way while one is decoded.
template <class E, class Kind>
__device__ __forceinline__ void decode_reduce(const Codec& c, float (&sum)[16], const CodecWires& wires, const E* own,
                                              const CodecPlace& place) {
    typename Kind::Raw next = {};
    if (wires.at[0]) next = Kind::load(c, wires.at[0], place);
    for (int peer = 0; peer < wires.peers; peer++) {
        const typename Kind::Raw raw = next;
        if (peer + 1 < wires.peers && wires.at[peer + 1]) next = Kind::load(c, wires.at[peer + 1], place);
        float v[16];
        if (wires.at[peer])
            Kind::decode(c, v, raw, place);
        else
            values_load(v, own, place);
#pragma unroll
        for (int i = 0; i < 16; i++) sum[i] = peer == 0 ? v[i] : spec::add(sum[i], v[i]);
    }
}

// out may be own: a lane reads its values before it writes them.
template <class E, class Kind>
__global__ void __launch_bounds__(codec_threads, Kind::reduce_blocks)
    codec_decode_reduce_kernel(CodecStripe stripe, E* out, const __grid_constant__ CodecWires wires, const E* own) {
    const size_t tile = codec_tile_of_warp();
    if (tile >= stripe.tiles) return;
    const CodecPlace place = codec_place(stripe.codec, tile * codec_tile, stripe.n, stripe.groups);
    float sum[16];
    decode_reduce<E, Kind>(stripe.codec, sum, wires, own, place);
    values_store(out, sum, place);
}

template <class E, class Kind>
__global__ void __launch_bounds__(codec_threads, Kind::reduce_blocks)
    codec_decode_reduce_encode_kernel(CodecStripe stripe, uint8_t* __restrict__ wire, const __grid_constant__ CodecWires wires,
                                      const E* __restrict__ own, uint64_t random, uint64_t* nonfinite) {
    const size_t tile = codec_tile_of_warp();
    if (tile >= stripe.tiles) return;
    const CodecPlace place = codec_place(stripe.codec, tile * codec_tile, stripe.n, stripe.groups);
    float sum[16];
    decode_reduce<E, Kind>(stripe.codec, sum, wires, own, place);
    values_cut(sum, place);  // a short last group is sent whole, but its zeros do not decode to zeros
    const bool finite = Kind::encode(stripe.codec, wire, sum, place, random);
    nonfinite_add(nonfinite, !finite);
}

// partial: [blocks][2], each block's sums of x^2 and of (x - decoded)^2.
template <class E, class Kind>
__global__ void __launch_bounds__(codec_threads, 2)
    codec_error_kernel(CodecStripe stripe, double* __restrict__ partial, const E* __restrict__ x,
                       const uint8_t* __restrict__ wire) {
    SHARED_ARRAY(double, sums, [codec_threads / warp_size][2]);
    const size_t tile = codec_tile_of_warp();
    double signal = 0, noise = 0;
    if (tile < stripe.tiles) {
        const CodecPlace place = codec_place(stripe.codec, tile * codec_tile, stripe.n, stripe.groups);
        float decoded[16], values[16];
        Kind::decode(stripe.codec, decoded, Kind::load(stripe.codec, wire, place), place);
        values_load(values, x, place);
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const size_t at = place.at + size_t(i / codec_half * place.distance + i % codec_half);
            const double value = values[i], error = at < place.end ? value - decoded[i] : 0.0;
            signal += value * value;
            noise += error * error;
        }
    }
#pragma unroll
    for (int lanes = warp_size / 2; lanes > 0; lanes /= 2) {
        signal += __shfl_xor_sync(full_warp, signal, lanes);
        noise += __shfl_xor_sync(full_warp, noise, lanes);
    }
    if (threadIdx.x % warp_size == 0) sums[threadIdx.x / warp_size][0] = signal, sums[threadIdx.x / warp_size][1] = noise;
    __syncthreads();
    if (threadIdx.x < 2) {
        double sum = 0;
        for (int warp = 0; warp < codec_threads / warp_size; warp++) sum += sums[warp][threadIdx.x];
        partial[2 * size_t(blockIdx.x) + threadIdx.x] = sum;
    }
}

// One warp: signal_noise [2] += the sums over blocks, in a fixed order.
template <int Threads>
__global__ void __launch_bounds__(Threads, 1)
    codec_error_sum_kernel(double* signal_noise, const double* __restrict__ partial, size_t blocks) {
    double sum = 0;
    for (size_t i = threadIdx.x; i < 2 * blocks; i += warp_size) sum += partial[i];
#pragma unroll
    for (int lanes = warp_size / 2; lanes > 1; lanes /= 2) sum += __shfl_xor_sync(full_warp, sum, lanes);
    if (threadIdx.x < 2) signal_noise[threadIdx.x] += sum;
}

// ---- the ops: see cpu/codec.h ----

inline dim3 codec_grid(size_t n) { return dim3(unsigned(ceil_div(n, size_t(codec_block)))); }

template <class E>
void codec_encode(const Codec& c, uint8_t* wire, const E* x, size_t n, const RoundingKey& key, uint64_t* nonfinite,
                  Stream stream) {
    if (n == 0) return;
    if (c.kind == Codec::none) return device_copy(wire, x, n * sizeof(E), stream);
    codec_dispatch<E>(c, [&]<class Kind>(Kind) {
        launch(codec_encode_kernel<E, Kind>, codec_grid(n), dim3(codec_threads), 0, stream, codec_stripe(c, n), wire, x,
               spec::rounding_stream(key), nonfinite);
    });
}

template <class E>
void codec_decode(const Codec& c, E* x, const uint8_t* wire, size_t n, Stream stream) {
    if (n == 0) return;
    if (c.kind == Codec::none) return device_copy(x, wire, n * sizeof(E), stream);
    codec_dispatch<E>(c, [&]<class Kind>(Kind) {
        launch(codec_decode_kernel<E, Kind>, codec_grid(n), dim3(codec_threads), 0, stream, codec_stripe(c, n), x, wire);
    });
}

template <class E>
void codec_decode_reduce(const Codec& c, E* out, const uint8_t* const* wires, const E* own, int peers, size_t n, Stream stream) {
    if (n == 0) return;
    codec_dispatch<E>(c, [&]<class Kind>(Kind) {
        launch(codec_decode_reduce_kernel<E, Kind>, codec_grid(n), dim3(codec_threads), 0, stream, codec_stripe(c, n), out,
               codec_wires(wires, peers), own);
    });
}

template <class E>
void codec_decode_reduce_encode(const Codec& c, uint8_t* wire, const uint8_t* const* wires, const E* own, int peers, size_t n,
                                const RoundingKey& key, uint64_t* nonfinite, Stream stream) {
    if (n == 0) return;
    codec_dispatch<E>(c, [&]<class Kind>(Kind) {
        launch(codec_decode_reduce_encode_kernel<E, Kind>, codec_grid(n), dim3(codec_threads), 0, stream, codec_stripe(c, n),
               wire, codec_wires(wires, peers), own, spec::rounding_stream(key), nonfinite);
    });
}

template <class E>
void codec_error_add(const Codec& c, double* signal_noise, const E* x, const uint8_t* wire, size_t n, Stream stream) {
    if (n == 0) return;
    const dim3 grid = codec_grid(n);
    Scratch<double> partial(2 * size_t(grid.x), stream);
    codec_dispatch<E>(c, [&]<class Kind>(Kind) {
        launch(codec_error_kernel<E, Kind>, grid, dim3(codec_threads), 0, stream, codec_stripe(c, n), partial.data, x, wire);
    });
    launch(codec_error_sum_kernel<warp_size>, dim3(1), dim3(warp_size), 0, stream, signal_noise, partial.data, size_t(grid.x));
}

}  // namespace cuda
