// Tensor-parallel boundaries: where activations and gradients cross between ranks, encoded by a codec on the way.
//
// A tensor [tokens, C] is cut in t contiguous stripes of n values, one a rank.
//   all-gather      encode own stripe -> all-gather of bytes -> decode all stripes
//   reduce-scatter  encode each peer's stripe -> all-to-all of bytes -> decode-reduce in float32
//   all-reduce      the same, re-encoding the sum in the same pass, -> all-gather of bytes -> decode (two-shot)
// A rank's own summand is used exact. What is gathered is always decoded from the bytes, the owner's stripe too: all ranks
// compute with the same values. Payload sent by one rank: (t-1) E(n), for the all-reduce 2 (t-1) E(n), with
// E = codec_bytes. Each collective is a begin and a finish, for overlap with compute; reductions share the workspace, so
// that only one is in flight at a time. With t = 1 values pass exact and nothing is counted.
#pragma once
#include <array>
#include <map>
#include <utility>

#include "llmc/codec/codec.h"
#include "llmc/comm/comm.h"
#include "llmc/cpu/codec.h"
#include "llmc/log.h"
#include "llmc/trace.h"

enum BoundaryId {
    embed_fwd,
    attn_in_fwd,
    attn_out_fwd,
    mlp_in_fwd,
    mlp_out_fwd,
    head_fwd,
    embed_bwd,
    attn_in_bwd,
    attn_out_bwd,
    mlp_in_bwd,
    mlp_out_bwd,
    head_bwd,
    boundary_count
};
inline constexpr std::array<const char*, boundary_count> boundary_names = {
    "embed.fwd", "attn_in.fwd", "attn_out.fwd", "mlp_in.fwd", "mlp_out.fwd", "head.fwd",
    "embed.bwd", "attn_in.bwd", "attn_out.bwd", "mlp_in.bwd", "mlp_out.bwd", "head.bwd"};

struct BoundaryCounters {
    Codec codec;                                        // of the latest call
    uint64_t calls = 0, raw_bytes = 0, wire_bytes = 0;  // sent by this rank; raw: had it been bf16
    uint64_t nonfinite = 0;                             // groups with a NaN or an infinity
    double encode_s = 0, wire_s = 0, decode_s = 0;
    double signal = 0, noise = 0;  // sums of squares of the values encoded here and of their errors, where sampled
};

struct Boundary {
    Codec codec;
    size_t threshold_bytes = 0;  // float32 bytes of a stripe below which it goes uncompressed
    long first_step = 0;         // steps before it go uncompressed
    BoundaryCounters counters;
};

struct Boundaries {
    std::array<Boundary, boundary_count> list;
    Comm* tp = nullptr;
    uint64_t seed = 0;
    uint32_t step = 0, micro_batch = 0;  // key of stochastic rounding, with the data-parallel rank in micro_batch
    bool sample_snr = false;
    uint8_t* workspace = nullptr;  // boundary_workspace_bytes
    Trace* trace = nullptr;
};

// Sets every boundary's codec to `all`, then those named in `single`; bytes and steps as in struct Boundary.
inline void boundaries_configure(Boundaries& bs, const std::string& all, const std::map<std::string, std::string>& single,
                                 size_t threshold_bytes, long first_step) {
    for (Boundary& b : bs.list) b = {codec_parse(all), threshold_bytes, first_step, {}};
    for (const auto& [name, spec] : single) {
        const auto at = std::find(boundary_names.begin(), boundary_names.end(), name);
        if (at == boundary_names.end()) {
            std::string names;
            for (const char* known : boundary_names) names += std::string(" ") + known;
            fail("there is no boundary '%s'; allowed:%s", name.c_str(), names.c_str());
        }
        bs.list[at - boundary_names.begin()].codec = codec_parse(spec);
    }
}

// The codec in force for a stripe of n values at this step.
inline Codec boundary_codec(const Boundaries& bs, BoundaryId id, size_t n) {
    const Boundary& b = bs.list[id];
    const bool raw = bs.tp->size == 1 || n * sizeof(float) < b.threshold_bytes || bs.step < b.first_step;
    return raw ? Codec{} : b.codec;
}

namespace boundary_detail {

// Most bytes that a stripe of up to n values can take in this run. One below the threshold may exceed a longer one above.
inline size_t stripe_bytes_max(const Boundaries& bs, BoundaryId id, size_t n) {
    const Boundary& b = bs.list[id];
    const bool raw_at_any_size = bs.tp->size == 1 || b.first_step > 0;
    return std::max(codec_bytes(b.codec, n), std::min(n * sizeof(float), raw_at_any_size ? SIZE_MAX : b.threshold_bytes));
}

struct Timer {
    Boundaries& bs;
    BoundaryId id;
    const char* category;
    double& total;
    double begin = seconds_now();
    ~Timer() {
        const double end = seconds_now();
        total += end - begin;
        trace_add(bs.trace, boundary_names[id], category, begin, end);
    }
};

inline RoundingKey rounding_key(const Boundaries& bs, BoundaryId id, int layer, int stripe) {
    return {bs.seed, bs.step, bs.micro_batch, uint32_t(layer), uint32_t(id), uint32_t(bs.tp->rank), uint32_t(stripe)};
}

// Adds the power of the values and of what encoding did to them.
inline void snr_sample(BoundaryCounters& counters, const Codec& codec, const uint8_t* wire, const floatX* x, size_t n,
                       Stream stream) {
    double sums[2] = {};
    cpu::codec_error_add(codec, sums, x, wire, n, stream);
    counters.signal += sums[0];
    counters.noise += sums[1];
}

inline bool snr_wanted(const Boundaries& bs, const Codec& codec) { return bs.sample_snr && codec.kind != Codec::none; }

// Encodes stripe number `stripe` of the tensor, and measures the error where asked.
inline void stripe_encode(Boundaries& bs, BoundaryId id, int layer, const Codec& codec, uint8_t* wire, const floatX* x, size_t n,
                          int stripe, Stream stream) {
    BoundaryCounters& counters = bs.list[id].counters;
    {
        Timer timer{bs, id, "encode", counters.encode_s};
        cpu::codec_encode(codec, wire, x, n, rounding_key(bs, id, layer, stripe), &counters.nonfinite, stream);
    }
    if (snr_wanted(bs, codec)) snr_sample(counters, codec, wire, x, n, stream);
}

inline void call_add(Boundaries& bs, BoundaryId id, const Codec& codec) {
    if (bs.tp->size == 1) return;
    bs.list[id].counters.calls++;
    bs.list[id].counters.codec = codec;
}

inline void sent_add(Boundaries& bs, BoundaryId id, const Request& request, size_t n) {
    bs.list[id].counters.raw_bytes += (bs.tp->size - 1) * n * 2;
    bs.list[id].counters.wire_bytes += request.sent_bytes;
}

}  // namespace boundary_detail

// A boundary's collective in flight.
struct Pending {
    BoundaryId id;
    int layer;
    Codec codec;
    size_t n;        // values of a stripe
    uint8_t* wire;   // gather: all stripes' bytes
    floatX* tensor;  // reductions: the summands [t][n]
    Request request;
};

// Bytes of the buffer that keeps a gather's wire bytes: t stripes of n values, in the largest form this run can need.
inline size_t gather_wire_bytes(const Boundaries& bs, BoundaryId id, size_t n) {
    return bs.tp->size * boundary_detail::stripe_bytes_max(bs, id, n);
}

// Whether a gather's wire bytes are the float32 values themselves: then nothing needs decoding.
inline bool gather_is_raw(const Boundaries& bs, BoundaryId id, size_t n) { return boundary_codec(bs, id, n).kind == Codec::none; }

// Bytes of Boundaries::workspace for stripes of up to n values: what is sent and what is received in a reduction.
inline size_t boundary_workspace_bytes(const Boundaries& bs, size_t n) {
    size_t bytes = 0;
    for (int i = 0; i < boundary_count; i++) bytes = std::max(bytes, boundary_detail::stripe_bytes_max(bs, BoundaryId(i), n));
    return bs.tp->size == 1 ? 0 : 2 * bs.tp->size * bytes;
}

// local [n] -> wire [t][E(n)]; finish decodes into out [t][n]. If gather_is_raw, `out` may be `wire` itself, and `local`
// its stripe of this rank's number: then nothing is copied.
inline Pending gather_begin(Boundaries& bs, BoundaryId id, int layer, const floatX* local, uint8_t* wire, size_t n,
                            Stream stream) {
    Pending p{id, layer, boundary_codec(bs, id, n), n, wire, nullptr, {}};
    const size_t bytes = codec_bytes(p.codec, n);
    BoundaryCounters& counters = bs.list[id].counters;
    uint8_t* own = wire + bs.tp->rank * bytes;
    if (p.codec.kind != Codec::none || own != reinterpret_cast<const uint8_t*>(local))
        boundary_detail::stripe_encode(bs, id, layer, p.codec, own, local, n, bs.tp->rank, stream);
    boundary_detail::Timer timer{bs, id, "wire", counters.wire_s};
    p.request = all_gather_begin(*bs.tp, wire, bytes, stream);
    boundary_detail::sent_add(bs, id, p.request, n);
    boundary_detail::call_add(bs, id, p.codec);
    return p;
}

// out [t][n] from wire bytes received earlier at the same step, as in backward.
inline void gather_decode(Boundaries& bs, BoundaryId id, floatX* out, const uint8_t* wire, size_t n, Stream stream) {
    const Codec codec = boundary_codec(bs, id, n);
    boundary_detail::Timer timer{bs, id, "decode", bs.list[id].counters.decode_s};
    for (int r = 0; r < bs.tp->size; r++) cpu::codec_decode(codec, out + r * n, wire + r * codec_bytes(codec, n), n, stream);
}

inline void gather_finish(Boundaries& bs, Pending& p, floatX* out, Stream stream) {
    {
        boundary_detail::Timer timer{bs, p.id, "wire", bs.list[p.id].counters.wire_s};
        request_finish(*bs.tp, p.request, boundary_names[p.id]);
    }
    if (reinterpret_cast<uint8_t*>(out) != p.wire) gather_decode(bs, p.id, out, p.wire, p.n, stream);
}

// tensor [t][n]: this rank's summands. Every peer's stripe is encoded and sent to it.
inline Pending reduce_scatter_begin(Boundaries& bs, BoundaryId id, int layer, floatX* tensor, size_t n, Stream stream) {
    Pending p{id, layer, boundary_codec(bs, id, n), n, nullptr, tensor, {}};
    const int t = bs.tp->size;
    const size_t bytes = codec_bytes(p.codec, n);
    BoundaryCounters& counters = bs.list[id].counters;
    uint8_t *received = bs.workspace, *sent = reinterpret_cast<uint8_t*>(tensor);
    if (p.codec.kind != Codec::none) {
        sent = received + t * bytes;
        for (int r = 0; r < t; r++) {
            if (r != bs.tp->rank)
                boundary_detail::stripe_encode(bs, id, layer, p.codec, sent + r * bytes, tensor + r * n, n, r, stream);
        }
    }
    boundary_detail::Timer timer{bs, id, "wire", counters.wire_s};
    p.request = all_to_all_begin(*bs.tp, received, sent, bytes, stream);
    boundary_detail::sent_add(bs, id, p.request, n);
    boundary_detail::call_add(bs, id, p.codec);
    return p;
}

namespace boundary_detail {

// Waits for the peers' stripes; their bytes in rank order, null at this rank's place.
inline std::vector<const uint8_t*> stripes_wait(Boundaries& bs, Pending& p) {
    {
        Timer timer{bs, p.id, "wire", bs.list[p.id].counters.wire_s};
        request_finish(*bs.tp, p.request, boundary_names[p.id]);
    }
    std::vector<const uint8_t*> stripes(bs.tp->size);
    for (int r = 0; r < bs.tp->size; r++) stripes[r] = r == bs.tp->rank ? nullptr : bs.workspace + r * codec_bytes(p.codec, p.n);
    return stripes;
}

}  // namespace boundary_detail

// out [n]: the sum over ranks of this rank's stripe.
inline void reduce_scatter_finish(Boundaries& bs, Pending& p, floatX* out, Stream stream) {
    const std::vector<const uint8_t*> stripes = boundary_detail::stripes_wait(bs, p);
    boundary_detail::Timer timer{bs, p.id, "decode", bs.list[p.id].counters.decode_s};
    cpu::codec_decode_reduce(p.codec, out, stripes.data(), p.tensor + bs.tp->rank * p.n, bs.tp->size, p.n, stream);
}

// tensor [t][n] becomes its sum over ranks, the same bits on all of them.
inline Pending all_reduce_begin(Boundaries& bs, BoundaryId id, int layer, floatX* tensor, size_t n, Stream stream) {
    return reduce_scatter_begin(bs, id, layer, tensor, n, stream);
}

inline void all_reduce_finish(Boundaries& bs, Pending& p, Stream stream) {
    const int t = bs.tp->size, rank = bs.tp->rank;
    const std::vector<const uint8_t*> stripes = boundary_detail::stripes_wait(bs, p);
    BoundaryCounters& counters = bs.list[p.id].counters;
    const size_t bytes = codec_bytes(p.codec, p.n);
    floatX* own = p.tensor + rank * p.n;
    const bool raw = p.codec.kind == Codec::none;
    // the sends are complete, so their half of the workspace takes the gathered bytes
    uint8_t* wire = raw ? reinterpret_cast<uint8_t*>(p.tensor) : bs.workspace + t * bytes;
    {
        boundary_detail::Timer timer{bs, p.id, "decode", counters.decode_s};
        if (raw) {
            cpu::codec_decode_reduce(p.codec, own, stripes.data(), own, t, p.n, stream);
        } else {
            // stripe number t: the sum rounds independently of its summands
            const RoundingKey key = boundary_detail::rounding_key(bs, p.id, p.layer, t);
            cpu::codec_decode_reduce_encode(p.codec, wire + rank * bytes, stripes.data(), own, t, p.n, key, &counters.nonfinite,
                                            stream);
        }
    }
    if (boundary_detail::snr_wanted(bs, p.codec)) {
        cpu::codec_decode_reduce(p.codec, own, stripes.data(), own, t, p.n, stream);
        boundary_detail::snr_sample(counters, p.codec, wire + rank * bytes, own, p.n, stream);
    }
    Request gather;
    {
        boundary_detail::Timer timer{bs, p.id, "wire", counters.wire_s};
        gather = all_gather_begin(*bs.tp, wire, bytes, stream);
        boundary_detail::sent_add(bs, p.id, gather, p.n);
        request_finish(*bs.tp, gather, boundary_names[p.id]);
    }
    if (raw) return;
    boundary_detail::Timer timer{bs, p.id, "decode", counters.decode_s};
    for (int r = 0; r < t; r++) cpu::codec_decode(p.codec, p.tensor + r * p.n, wire + r * bytes, p.n, stream);
}

// ---- what the log shows ----

// What the boundaries did since the last call, which starts their counters anew: a record each, without calls too.
inline std::vector<BoundaryRecord> boundaries_records_take(Boundaries& bs) {
    std::vector<BoundaryRecord> records;
    for (int i = 0; i < boundary_count; i++) {
        const BoundaryCounters c = std::exchange(bs.list[i].counters, {});
        BoundaryRecord r;
        r.name = boundary_names[i];
        r.codec = codec_text(c.calls ? c.codec : bs.list[i].codec);
        r.calls = c.calls;
        r.raw_bytes = c.raw_bytes;
        r.wire_bytes = c.wire_bytes;
        r.nonfinite = c.nonfinite;
        r.encode_ms = 1e3 * c.encode_s;
        r.wire_ms = 1e3 * c.wire_s;
        r.decode_ms = 1e3 * c.decode_s;
        if (c.signal > 0 && c.noise > 0) r.snr_db = 10 * std::log10(c.signal / c.noise);
        records.push_back(r);
    }
    return records;
}
