// Tensor-parallel boundaries: where activations and gradients cross between ranks, encoded by a codec on the way.
//
// A tensor [tokens, C] is cut in t contiguous stripes of n values, one a rank.
//   all-gather      encode own stripe -> all-gather of bytes -> decode all stripes
//   reduce-scatter  encode each peer's stripe -> all-to-all of bytes -> decode-reduce in float32
//   all-reduce      the same, re-encoding the sum in the same pass, -> all-gather of bytes -> decode (two-shot)
// A rank's own summand is used exact. What is gathered is always decoded from the bytes, the owner's stripe too: all ranks
// compute with the same values. Payload sent by one rank: (t-1) E(n), for the all-reduce 2 (t-1) E(n), with
// E = codec_wire_bytes. With t = 1 values pass exact and nothing is counted.
//
// Each collective is a begin and a finish, for overlap with compute. `begin` starts after what is on the caller's stream,
// what comes on it after `finish` waits; in between codecs run on a stream of their own and bytes travel on the
// communication stream, ordered by events. The tensors belong to the collective until it is finished. Reductions share the
// workspace, so that only one is in flight at a time.
#pragma once
#include <map>

#include "llmc/comm/boundary_log.h"
#include "llmc/comm/tensors.h"
#include "llmc/dtype.h"
#include "llmc/ops.h"
#include "llmc/residual_norm.h"
#include "llmc/spans.h"

struct Boundary {
    Codec codec;
    size_t threshold_bytes = 0;  // float32 bytes of a stripe below which it goes uncompressed
    long first_step = 0;         // steps before it go uncompressed
    BoundaryCounters counters;
};

struct Boundaries {
    std::array<Boundary, boundary_count> list;
    Comm* tp = nullptr;
    Stream stream;  // of the codecs
    uint64_t seed = 0;
    uint32_t step = 0, micro_batch = 0;  // key of stochastic rounding, with the data-parallel rank in micro_batch
    bool sample_snr = false;
    uint8_t* workspace = nullptr;                // boundary_workspace_bytes of the device
    BoundaryDeviceCounters* counters = nullptr;  // [boundary_count], of the device; null: not counted
    Spans spans;
};

// Sets every boundary's codec to `all`, then those named in `single`; bytes and steps as in struct Boundary.
inline void boundaries_configure(Boundaries& bs, const std::string& all, const std::map<std::string, std::string>& single,
                                 size_t threshold_bytes, long first_step) {
    for (Boundary& b : bs.list) b = {codec_parse(all), threshold_bytes, first_step, {}};
    for (const auto& [name, spec] : single) {
        const BoundaryId id = boundary_find(name);
        check(id != boundary_count, "there is no boundary '%s'; allowed: %s", name.c_str(), boundaries_text().c_str());
        bs.list[id].codec = codec_parse(spec);
    }
}

// The boundaries are those of this group, and work on this device.
inline void boundaries_open(Boundaries& bs, Comm& tp, Device& device) {
    bs.tp = &tp;
    bs.stream = stream_make(device);
}

// The codec in force for a stripe of n values at this step.
inline Codec boundary_codec(const Boundaries& bs, BoundaryId id, size_t n) {
    const Boundary& b = bs.list[id];
    const bool raw = bs.tp->size == 1 || n * sizeof(float) < b.threshold_bytes || bs.step < b.first_step;
    return raw ? Codec{} : b.codec;
}

// E(n): bytes of a stripe of n values on the wire.
constexpr size_t stripe_bytes(const Codec& codec, size_t n) { return codec_wire_bytes<floatX>(codec, n); }

// A boundary's collective in flight.
struct Pending {
    BoundaryId id;
    int layer;
    Codec codec;
    size_t n;        // values of a stripe
    uint8_t* wire;   // gather: all stripes' bytes
    floatX* tensor;  // reductions: the summands [t][n]
    TensorRequest request;
};

namespace boundary_detail {

// Most bytes that a stripe of up to n values can take in this run. One below the threshold may exceed a longer one above.
inline size_t stripe_bytes_max(const Boundaries& bs, BoundaryId id, size_t n) {
    const Boundary& b = bs.list[id];
    const bool raw_at_any_size = bs.tp->size == 1 || b.first_step > 0;
    const size_t raw_values = raw_at_any_size ? n : std::min(n, b.threshold_bytes / sizeof(float));
    return std::max(stripe_bytes(b.codec, n), raw_values * sizeof(floatX));
}

inline SpanScope encode_span(Boundaries& bs, BoundaryId id, Stream stream) {
    return {bs.spans, boundary_names[id], "encode", stream, &bs.list[id].counters.encode_s};
}
inline SpanScope decode_span(Boundaries& bs, BoundaryId id, Stream stream) {
    return {bs.spans, boundary_names[id], "decode", stream, &bs.list[id].counters.decode_s};
}

inline RoundingKey rounding_key(const Boundaries& bs, BoundaryId id, int layer, int stripe) {
    return {bs.seed, bs.step, bs.micro_batch, uint32_t(layer), uint32_t(id), uint32_t(bs.tp->rank), uint32_t(stripe)};
}

inline uint64_t* nonfinite(Boundaries& bs, BoundaryId id) { return bs.counters ? &bs.counters[id].nonfinite : nullptr; }

inline bool snr_wanted(const Boundaries& bs, const Codec& codec) {
    return bs.sample_snr && bs.counters && codec.kind != Codec::none;
}

// Adds the power of the values and of what encoding did to them.
inline void snr_sample(Boundaries& bs, BoundaryId id, const Codec& codec, const uint8_t* wire, const floatX* x, size_t n) {
    op::codec_error_add(codec, &bs.counters[id].signal, x, wire, n, bs.stream);
}

// Encodes stripe number `stripe` of the tensor, and measures the error where asked.
inline void stripe_encode(Boundaries& bs, BoundaryId id, int layer, const Codec& codec, uint8_t* wire, const floatX* x, size_t n,
                          int stripe) {
    {
        const SpanScope span = encode_span(bs, id, bs.stream);
        op::codec_encode(codec, wire, x, n, rounding_key(bs, id, layer, stripe), nonfinite(bs, id), bs.stream);
    }
    if (snr_wanted(bs, codec)) snr_sample(bs, id, codec, wire, x, n);
}

inline void call_add(Boundaries& bs, const Pending& p) {
    if (bs.tp->size == 1) return;
    bs.list[p.id].counters.calls++;
    bs.list[p.id].counters.codec = p.codec;
}

// Makes the codecs wait for the bytes, and counts them.
inline void wire_finish(Boundaries& bs, BoundaryId id, TensorRequest& request, size_t n) {
    if (bs.tp->size == 1) return;
    BoundaryCounters& counters = bs.list[id].counters;
    request_finish(*bs.tp, request, bs.stream);
    counters.raw_bytes += (bs.tp->size - 1) * n * 2;
    counters.wire_bytes += request.sent_bytes;
    span_add(bs.spans, {boundary_names[id], "wire", &counters.wire_s, request.started, request.done}, bs.stream);
}

// The caller's stream goes on after the codecs.
inline void stream_join(Boundaries& bs, Stream stream) { stream_follow(bs.spans.events, stream, bs.stream); }

}  // namespace boundary_detail

// ---- all-gather ----

// Bytes of the buffer that keeps a gather's wire bytes: t stripes of n values, in the largest form this run can need.
inline size_t gather_wire_bytes(const Boundaries& bs, BoundaryId id, size_t n) {
    return bs.tp->size * boundary_detail::stripe_bytes_max(bs, id, n);
}

// Whether a gather's wire bytes are the values themselves, floatX: then nothing needs decoding.
inline bool gather_is_raw(const Boundaries& bs, BoundaryId id, size_t n) { return boundary_codec(bs, id, n).kind == Codec::none; }

// This rank's stripe in a gather's wire bytes.
inline uint8_t* gather_own_wire(const Boundaries& bs, BoundaryId id, uint8_t* wire, size_t n) {
    return wire + bs.tp->rank * stripe_bytes(boundary_codec(bs, id, n), n);
}

// wire [t][E(n)], where this rank's stripe is encoded already.
inline Pending gather_begin_encoded(Boundaries& bs, BoundaryId id, int layer, uint8_t* wire, size_t n, Stream stream) {
    Pending p{id, layer, boundary_codec(bs, id, n), n, wire, nullptr, {}};
    p.request = tensor_all_gather_begin(*bs.tp, wire, stripe_bytes(p.codec, n), boundary_names[id], stream);
    boundary_detail::call_add(bs, p);
    return p;
}

// local [n] -> wire [t][E(n)]; finish decodes into out [t][n]. If gather_is_raw, `out` may be `wire` itself, and `local`
// its stripe of this rank's number: then nothing is copied.
inline Pending gather_begin(Boundaries& bs, BoundaryId id, int layer, const floatX* local, uint8_t* wire, size_t n,
                            Stream stream) {
    const Codec codec = boundary_codec(bs, id, n);
    uint8_t* own = gather_own_wire(bs, id, wire, n);
    stream_follow(bs.spans.events, bs.stream, stream);
    if (codec.kind != Codec::none || own != reinterpret_cast<const uint8_t*>(local))
        boundary_detail::stripe_encode(bs, id, layer, codec, own, local, n, bs.tp->rank);
    return gather_begin_encoded(bs, id, layer, wire, n, bs.stream);
}

// out [t][n] from wire bytes received earlier at the same step, as in backward.
inline void gather_decode(Boundaries& bs, BoundaryId id, floatX* out, const uint8_t* wire, size_t n, Stream stream) {
    const Codec codec = boundary_codec(bs, id, n);
    const SpanScope span = boundary_detail::decode_span(bs, id, stream);
    for (int r = 0; r < bs.tp->size; r++) op::codec_decode(codec, out + r * n, wire + r * stripe_bytes(codec, n), n, stream);
}

inline void gather_finish(Boundaries& bs, Pending& p, floatX* out, Stream stream) {
    boundary_detail::wire_finish(bs, p.id, p.request, p.n);
    stream_follow(bs.spans.events, bs.stream, stream);  // `out` may have been in use until now
    if (reinterpret_cast<uint8_t*>(out) != p.wire) gather_decode(bs, p.id, out, p.wire, p.n, bs.stream);
    boundary_detail::stream_join(bs, stream);
}

// ---- reduce-scatter ----

// Bytes of Boundaries::workspace for stripes of up to n values: what is sent and what is received in a reduction.
inline size_t boundary_workspace_bytes(const Boundaries& bs, size_t n) {
    size_t bytes = 0;
    for (int i = 0; i < boundary_count; i++) bytes = std::max(bytes, boundary_detail::stripe_bytes_max(bs, BoundaryId(i), n));
    return bs.tp->size == 1 ? 0 : 2 * bs.tp->size * bytes;
}

// tensor [t][n]: this rank's summands. Every peer's stripe is encoded and sent to it.
inline Pending reduce_scatter_begin(Boundaries& bs, BoundaryId id, int layer, floatX* tensor, size_t n, Stream stream) {
    Pending p{id, layer, boundary_codec(bs, id, n), n, nullptr, tensor, {}};
    const int t = bs.tp->size;
    const size_t bytes = stripe_bytes(p.codec, n);
    uint8_t *received = bs.workspace, *sent = reinterpret_cast<uint8_t*>(tensor);
    stream_follow(bs.spans.events, bs.stream, stream);
    if (p.codec.kind != Codec::none) {
        sent = received + t * bytes;
        for (int r = 0; r < t; r++) {
            if (r != bs.tp->rank) boundary_detail::stripe_encode(bs, id, layer, p.codec, sent + r * bytes, tensor + r * n, n, r);
        }
    }
    p.request = tensor_all_to_all_begin(*bs.tp, received, sent, bytes, boundary_names[id], bs.stream);
    boundary_detail::call_add(bs, p);
    return p;
}

namespace boundary_detail {

// Waits for the peers' stripes; their bytes in rank order, null at this rank's place.
inline std::vector<const uint8_t*> stripes_finish(Boundaries& bs, Pending& p, Stream stream) {
    wire_finish(bs, p.id, p.request, p.n);
    stream_follow(bs.spans.events, bs.stream, stream);
    std::vector<const uint8_t*> stripes(bs.tp->size);
    for (int r = 0; r < bs.tp->size; r++) stripes[r] = r == bs.tp->rank ? nullptr : bs.workspace + r * stripe_bytes(p.codec, p.n);
    return stripes;
}

inline void stripes_reduce(Boundaries& bs, const Pending& p, const std::vector<const uint8_t*>& stripes, floatX* out) {
    op::codec_decode_reduce(p.codec, out, stripes.data(), p.tensor + bs.tp->rank * p.n, bs.tp->size, p.n, bs.stream);
}

inline void residual_norm(const ResidualNorm<floatX>& norm, const floatX* b, size_t n, Stream stream) {
    op::residual_layernorm_forward(norm.residual, norm.out, norm.mean, norm.rstd, norm.a, b, norm.add_bias, norm.weight,
                                   norm.bias, long(n) / norm.C, norm.C, norm.eps, stream);
}

}  // namespace boundary_detail

// out [n]: the sum over ranks of this rank's stripe.
inline void reduce_scatter_finish(Boundaries& bs, Pending& p, floatX* out, Stream stream) {
    const std::vector<const uint8_t*> stripes = boundary_detail::stripes_finish(bs, p, stream);
    {
        const SpanScope span = boundary_detail::decode_span(bs, p.id, bs.stream);
        boundary_detail::stripes_reduce(bs, p, stripes, out);
    }
    boundary_detail::stream_join(bs, stream);
}

// The gather of a norm's output, norm.out [n].
struct NextGather {
    BoundaryId id;
    int layer;
    uint8_t* wire;
};

// The same with the bias, residual and norm that follow and, with `next`, the encoding of the norm's output, in one kernel
// where there is one. Returns whether next->wire holds the encoded stripe: then gather_begin_encoded, else gather_begin.
// sum [n] is scratch. The bits are the same either way.
inline bool reduce_scatter_finish_norm(Boundaries& bs, Pending& p, const ResidualNorm<floatX>& norm, const NextGather* next,
                                       floatX* sum, Stream stream) {
    const std::vector<const uint8_t*> stripes = boundary_detail::stripes_finish(bs, p, stream);
    Codec next_codec;
    uint8_t* next_wire = nullptr;
    RoundingKey key;
    uint64_t* nonfinite = nullptr;
    if (next) next_codec = boundary_codec(bs, next->id, p.n);
    // a sample of the error needs the values beside the bytes
    if (next && next_codec.kind != Codec::none && !boundary_detail::snr_wanted(bs, next_codec)) {
        next_wire = gather_own_wire(bs, next->id, next->wire, p.n);
        key = boundary_detail::rounding_key(bs, next->id, next->layer, bs.tp->rank);
        nonfinite = boundary_detail::nonfinite(bs, next->id);
    }
    bool fused;
    {
        const SpanScope span = boundary_detail::decode_span(bs, p.id, bs.stream);
        fused = op::codec_decode_reduce_layernorm(p.codec, stripes.data(), p.tensor + bs.tp->rank * p.n, bs.tp->size, p.n, norm,
                                                  next_codec, next_wire, key, nonfinite, bs.stream);
        if (!fused) boundary_detail::stripes_reduce(bs, p, stripes, sum);
    }
    boundary_detail::stream_join(bs, stream);
    if (!fused) boundary_detail::residual_norm(norm, sum, p.n, stream);
    return fused && next_wire;
}

// ---- all-reduce ----

// tensor [t][n] becomes its sum over ranks, the same bits on all of them.
inline Pending all_reduce_begin(Boundaries& bs, BoundaryId id, int layer, floatX* tensor, size_t n, Stream stream) {
    return reduce_scatter_begin(bs, id, layer, tensor, n, stream);
}

namespace boundary_detail {

// Up to the sums' bytes on every rank: their stripes in rank order.
inline std::vector<const uint8_t*> sums_gather(Boundaries& bs, Pending& p, Stream stream) {
    const int t = bs.tp->size, rank = bs.tp->rank;
    const std::vector<const uint8_t*> stripes = stripes_finish(bs, p, stream);
    const size_t bytes = stripe_bytes(p.codec, p.n);
    floatX* own = p.tensor + rank * p.n;
    const bool raw = p.codec.kind == Codec::none;
    // the sends are complete, so their half of the workspace takes the gathered bytes
    uint8_t* wire = raw ? reinterpret_cast<uint8_t*>(p.tensor) : bs.workspace + t * bytes;
    {
        const SpanScope span = decode_span(bs, p.id, bs.stream);
        if (raw) {
            stripes_reduce(bs, p, stripes, own);
        } else {
            // stripe number t: the sum rounds independently of its summands
            op::codec_decode_reduce_encode(p.codec, wire + rank * bytes, stripes.data(), own, t, p.n,
                                           rounding_key(bs, p.id, p.layer, t), nonfinite(bs, p.id), bs.stream);
        }
    }
    if (snr_wanted(bs, p.codec)) {
        stripes_reduce(bs, p, stripes, own);
        snr_sample(bs, p.id, p.codec, wire + rank * bytes, own, p.n);
    }
    TensorRequest gather = tensor_all_gather_begin(*bs.tp, wire, bytes, boundary_names[p.id], bs.stream);
    wire_finish(bs, p.id, gather, p.n);
    std::vector<const uint8_t*> sums(t);
    for (int r = 0; r < t; r++) sums[r] = wire + r * bytes;
    return sums;
}

inline void sums_decode(Boundaries& bs, const Pending& p, const std::vector<const uint8_t*>& sums) {
    if (p.codec.kind == Codec::none) return;
    for (int r = 0; r < bs.tp->size; r++) op::codec_decode(p.codec, p.tensor + r * p.n, sums[r], p.n, bs.stream);
}

}  // namespace boundary_detail

inline void all_reduce_finish(Boundaries& bs, Pending& p, Stream stream) {
    const std::vector<const uint8_t*> sums = boundary_detail::sums_gather(bs, p, stream);
    {
        const SpanScope span = boundary_detail::decode_span(bs, p.id, bs.stream);
        boundary_detail::sums_decode(bs, p, sums);
    }
    boundary_detail::stream_join(bs, stream);
}

// The same with the bias, residual and norm of all t n values that follow, in one kernel where there is one; the sum itself
// need not appear in `tensor`.
inline void all_reduce_finish_norm(Boundaries& bs, Pending& p, const ResidualNorm<floatX>& norm, Stream stream) {
    const std::vector<const uint8_t*> sums = boundary_detail::sums_gather(bs, p, stream);
    const int t = bs.tp->size;
    bool fused;
    {
        const SpanScope span = boundary_detail::decode_span(bs, p.id, bs.stream);
        fused = op::codec_decode_layernorm(p.codec, sums.data(), t, p.n, norm, bs.stream);
        if (!fused) boundary_detail::sums_decode(bs, p, sums);
    }
    boundary_detail::stream_join(bs, stream);
    if (!fused) boundary_detail::residual_norm(norm, p.tensor, t * p.n, stream);
}

// ---- what the log shows ----

// What the boundaries did since the last call, which starts their counters anew: a record each, without calls too. Waits
// for `stream`.
inline std::vector<BoundaryRecord> boundaries_records_take(Boundaries& bs, Stream stream) {
    std::array<BoundaryDeviceCounters, boundary_count> found{};
    spans_resolve(bs.spans, stream);
    if (bs.counters) {
        device_download(found.data(), bs.counters, boundary_counters_bytes(), stream);
        device_zero(bs.counters, boundary_counters_bytes(), stream);
    }
    std::vector<BoundaryRecord> records;
    for (int i = 0; i < boundary_count; i++) {
        const BoundaryCounters host = std::exchange(bs.list[i].counters, {});
        records.push_back(boundary_record(BoundaryId(i), bs.list[i].codec, host, found[i]));
    }
    return records;
}
