// The compressed boundaries on any number of ranks, on the cpu target and, as emu_boundary.cu, on the emulator. What they give
// is computed here again by the CPU's codecs, a stripe at a time, from every rank's data, and must be the same bits; what they
// send is counted where MPI is handed it.
// clang-format off
#include "mpi_wrap.h"  // first
// clang-format on

#include "llmc/comm/boundary.h"
#include "llmc/cpu/codec.h"

namespace {

#ifdef LLMC_CUDA  // each kernel runs in an emulator
const char* const all_codecs[] = {"none", "bf16", "taco", "hadint6", "hadint4:g=256:sr"};
constexpr size_t all_sizes[] = {0, 1, 1000};
#else
const char* const all_codecs[] = {
    "none",         "bf16",    "fp8",     "int8",    "taco",    "taco:g=32:fmt=e5m2", "taco:g=512:sr",
    "hadint8:g=64", "hadint7", "hadint6", "hadint5", "hadint4", "hadint4:g=256:sr"};
constexpr size_t all_sizes[] = {0, 1, 31, 128, 1000, 4097, 33000};
#endif

// What a rank holds: as the storage type keeps it.
std::vector<float> values(int rank, size_t n, size_t first = 0) { return stored(tensor(rank, n, first)); }

// GPUs: one transport after the other, and one order of streams after another.
Transport next_transport() {
    static int turn = 0;
    turn++;
#ifdef CUDA_EMU
    emu::streams_set(turn % 3 == 0 ? "eager" : turn % 3 == 1 ? "lazy" : "random:" + std::to_string(turn));
#endif
    return turn % 2 ? Transport::nccl : Transport::mpi;
}

// The boundaries of one tensor-parallel group, with a workspace of exactly the planned size.
struct Setup {
    Comm tp = world_make();
    Stream stream = test_device().stream;
    Boundaries bs;
    OnDevice<uint8_t> workspace{0};
    OnDevice<BoundaryDeviceCounters> counters{std::vector<BoundaryDeviceCounters>(boundary_count)};

    Setup(const std::string& codec, size_t n, size_t threshold = 0, long first_step = 0) {
        boundaries_configure(bs, codec, {}, threshold, first_step);
        comm_tensors_open(tp, test_device().device, next_transport());
        boundaries_open(bs, tp, test_device().device);
        bs.counters = counters.data;
        bs.seed = 77;
        bs.step = 3;
        bs.micro_batch = 2;
        workspace_make(n);
    }
    void workspace_make(size_t n) {
        workspace.resize(boundary_workspace_bytes(bs, n));
        bs.workspace = workspace.data;
    }
    std::vector<float> gather(BoundaryId id, int layer, size_t n, const std::vector<float>& from) {
        OnDevice<uint8_t> wire(gather_wire_bytes(bs, id, n));
        OnDevice<floatX> local(from), out(n * tp.size), again(n * tp.size);
        Pending pending = gather_begin(bs, id, layer, local.data, wire.data, n, stream);
        gather_finish(bs, pending, out.data, stream);
        gather_decode(bs, id, again.data, wire.data, n, stream);
        const std::vector<float> values = out.floats();
        CHECK(std::ranges::equal(bits(again.floats()), bits(values)));
        return values;
    }
    std::vector<float> gather(BoundaryId id, int layer, size_t n) { return gather(id, layer, n, values(tp.rank, n)); }
    std::vector<float> reduce_scatter(BoundaryId id, int layer, size_t n) {
        const std::vector<float> from = values(tp.rank, n * tp.size);
        OnDevice<floatX> x(from), out(n);
        Pending pending = reduce_scatter_begin(bs, id, layer, x.data, n, stream);
        reduce_scatter_finish(bs, pending, out.data, stream);
        const std::vector<float> values = out.floats();
        CHECK(same(x.floats(), from));
        return values;
    }
    std::vector<float> all_reduce(BoundaryId id, int layer, size_t n, const std::vector<float>& from) {
        OnDevice<floatX> x(from);
        Pending pending = all_reduce_begin(bs, id, layer, x.data, n, stream);
        all_reduce_finish(bs, pending, stream);
        return x.floats();
    }
    std::vector<float> all_reduce(BoundaryId id, int layer, size_t n) {
        return all_reduce(id, layer, n, values(tp.rank, n * tp.size));
    }
    // What the device counted for a boundary; its counters start anew.
    BoundaryDeviceCounters found(BoundaryId id) {
        const BoundaryDeviceCounters all = counters.get()[id];
        counters.set(std::vector<BoundaryDeviceCounters>(boundary_count));
        bs.list[id].counters = {};
        return all;
    }
    static std::vector<uint32_t> bits(const std::vector<float>& x) {
        std::vector<uint32_t> all;
        for (float value : x) all.push_back(std::isnan(value) ? 0x7fc00000 : std::bit_cast<uint32_t>(value));
        return all;
    }
    RoundingKey key(BoundaryId id, int layer, int rank, int stripe) const {
        return {bs.seed, bs.step, bs.micro_batch, uint32_t(layer), uint32_t(id), uint32_t(rank), uint32_t(stripe)};
    }
};

std::vector<float> through_codec(const Codec& codec, const float* x, size_t n, const RoundingKey& key) {
    std::vector<uint8_t> wire(codec_bytes(codec, n));
    std::vector<float> out(n);
    cpu::codec_encode(codec, wire.data(), x, n, key, nullptr, {});
    cpu::codec_decode(codec, out.data(), wire.data(), n, {});
    return out;
}

// What rank `owner` must find for its stripe: all contributions in rank order, its own exact. Summed in float32.
std::vector<float> reduced_stripe(const Setup& s, const Codec& codec, BoundaryId id, int layer, int owner, size_t n) {
    std::vector<float> sum(n);
    for (int r = 0; r < s.tp.size; r++) {
        std::vector<float> part = values(r, n, owner * n);
        if (r != owner) part = through_codec(codec, part.data(), n, s.key(id, layer, r, owner));
        for (size_t i = 0; i < n; i++) sum[i] = r == 0 ? part[i] : sum[i] + part[i];
    }
    return sum;
}

std::vector<float> gathered(const Setup& s, const Codec& codec, BoundaryId id, int layer, size_t n) {
    std::vector<float> all;
    for (int r = 0; r < s.tp.size; r++) {
        const std::vector<float> part = stored(through_codec(codec, values(r, n).data(), n, s.key(id, layer, r, r)));
        all.insert(all.end(), part.begin(), part.end());
    }
    return all;
}

std::vector<float> all_reduced(const Setup& s, const Codec& codec, BoundaryId id, int layer, size_t n) {
    std::vector<float> all;
    for (int r = 0; r < s.tp.size; r++) {
        const std::vector<float> sum = reduced_stripe(s, codec, id, layer, r, n);
        const std::vector<float> part = stored(through_codec(codec, sum.data(), n, s.key(id, layer, r, s.tp.size)));
        all.insert(all.end(), part.begin(), part.end());
    }
    return all;
}

// E(n) of the published closed form, written anew.
size_t closed_form(const std::string& spec, size_t n) {
    if (spec == "none") return sizeof(floatX) * n;
    if (spec == "bf16") return 2 * n;
    const size_t at = spec.find("g="), group = at == std::string::npos ? 128 : std::stoul(spec.substr(at + 2));
    const size_t bits = spec.starts_with("hadint") ? size_t(spec[6] - '0') : 8, scales = spec.starts_with("taco") ? 8 : 4;
    return (n + group - 1) / group * (group * bits / 8 + scales);
}

// Every rank must hold the same bits.
void check_same_on_all_ranks(Comm& comm, const std::vector<float>& x) {
    uint64_t digest = x.size();
    for (float value : x) digest = mix(digest, std::bit_cast<uint32_t>(value));
    for (uint64_t other : gather_values(comm, digest, "digest")) CHECK(other == digest);
}

}  // namespace

TEST_CASE("values, bits and bytes, for each collective, codec and size") {
    int turn = 0;
    for (const char* spec : all_codecs) {
        for (size_t n : all_sizes) {
            CAPTURE(spec);
            CAPTURE(n);
            Setup s(spec, n);
            const int t = s.tp.size, layer = turn % 5;
            const BoundaryId id = BoundaryId(turn++ % boundary_count);
            const Codec codec = codec_parse(spec);
            const BoundaryCounters& counters = s.bs.list[id].counters;
            uint64_t wire_bytes = 0;
            const auto check_counters = [&](const Sent& sent, uint64_t exchanges) {
                wire_bytes += counters.wire_bytes;
                CHECK(counters.calls == (t > 1));
                CHECK(counters.wire_bytes == exchanges * (t - 1) * closed_form(spec, n));
                CHECK(counters.raw_bytes == exchanges * (t - 1) * 2 * n);
                if (device_is_host) CHECK(sent.bytes() == counters.wire_bytes);
                if (t > 1) CHECK(counters.codec == codec);
                s.bs.list[id].counters = {};
            };

            Sent sent;
            std::vector<float> out = s.gather(id, layer, n);
            check_counters(sent, 1);
            CHECK(same(out, gathered(s, t > 1 ? codec : Codec{}, id, layer, n)));
            check_same_on_all_ranks(s.tp, out);

            sent = {};
            out = s.reduce_scatter(id, layer, n);
            check_counters(sent, 1);
            CHECK(same(out, stored(reduced_stripe(s, codec, id, layer, s.tp.rank, n))));

            sent = {};
            out = s.all_reduce(id, layer, n);
            check_counters(sent, 2);
            CHECK(same(out, all_reduced(s, t > 1 ? codec : Codec{}, id, layer, n)));
            check_same_on_all_ranks(s.tp, out);
            if (t > 1 && n > 0) CHECK(wire_bytes > 0);
            for (const Boundary& other : s.bs.list) CHECK(other.counters.calls == 0);
        }
    }
}

TEST_CASE("stochastic rounding differs by seed, step, micro-batch, layer, boundary, rank and stripe, and repeats") {
    const size_t n = 500;
    Setup s("hadint4:sr", n);
    const auto encoded = [&](int rank, int stripe) {  // the same values each time
        return through_codec(codec_parse("hadint4:sr"), tensor(0, n).data(), n, s.key(attn_in_fwd, 1, rank, stripe));
    };
    CHECK(same(encoded(2, 3), encoded(2, 3)));
    CHECK_FALSE(same(encoded(2, 3), encoded(2, 4)));
    CHECK_FALSE(same(encoded(2, 3), encoded(1, 3)));
    if (s.tp.size == 1) return;
    const std::vector<float> first = s.gather(attn_in_fwd, 1, n);
    CHECK(same(first, s.gather(attn_in_fwd, 1, n)));
    CHECK_FALSE(same(first, s.gather(attn_in_fwd, 2, n)));
    CHECK_FALSE(same(first, s.gather(mlp_in_fwd, 1, n)));
    s.bs.micro_batch++;
    CHECK_FALSE(same(first, s.gather(attn_in_fwd, 1, n)));
    s.bs.micro_batch--;
    s.bs.step++;
    CHECK_FALSE(same(first, s.gather(attn_in_fwd, 1, n)));
    s.bs.step--;
    s.bs.seed++;
    CHECK_FALSE(same(first, s.gather(attn_in_fwd, 1, n)));
}

TEST_CASE("without a codec nothing is copied that need not be") {
    const size_t n = 1000;
    Setup s("none", n);
    const OnDevice<floatX> local(values(s.tp.rank, n));
    REQUIRE(gather_is_raw(s.bs, mlp_in_fwd, n));
    REQUIRE(gather_wire_bytes(s.bs, mlp_in_fwd, n) == n * s.tp.size * sizeof(floatX));
    for (bool in_place : {false, true}) {
        OnDevice<floatX> all(std::vector<float>(n * s.tp.size, NAN));
        floatX* own = all.data + s.tp.rank * n;
        if (in_place) all.set(values(s.tp.rank, n), s.tp.rank * n);
        uint8_t* wire = reinterpret_cast<uint8_t*>(all.data);
        Pending pending = gather_begin(s.bs, mlp_in_fwd, 0, in_place ? own : local.data, wire, n, s.stream);
        gather_finish(s.bs, pending, all.data, s.stream);
        CHECK(same(all.floats(), gathered(s, Codec{}, mlp_in_fwd, 0, n)));
    }
}

TEST_CASE("below the threshold and before the first step nothing is compressed") {
    const Codec taco = codec_parse("taco");
    Setup s("taco", 1000, 2000, 5);  // 500 values and more are compressed, from step 5
    if (s.tp.size == 1) return;
    for (uint32_t step : {4, 5}) {
        for (size_t n : {499, 500}) {
            CAPTURE(step);
            CAPTURE(n);
            s.bs.step = step;
            const Codec codec = step < 5 || n < 500 ? Codec{} : taco;
            CHECK(gather_is_raw(s.bs, embed_bwd, n) == (codec.kind == Codec::none));
            Sent sent;
            CHECK(same(s.gather(embed_bwd, 0, n), gathered(s, codec, embed_bwd, 0, n)));
            if (device_is_host) CHECK(sent.bytes() == (s.tp.size - 1) * codec_bytes(codec, n));
            CHECK(same(s.reduce_scatter(embed_bwd, 0, n), stored(reduced_stripe(s, codec, embed_bwd, 0, s.tp.rank, n))));
            CHECK(same(s.all_reduce(embed_bwd, 0, n), all_reduced(s, codec, embed_bwd, 0, n)));
        }
    }
}

TEST_CASE("buffers hold every stripe up to the planned size, compressed or not") {
    for (const char* spec : {"none", "bf16", "taco", "taco:g=512", "hadint4"}) {
        for (size_t threshold : {0, 100, 3000, 100000}) {
            for (long first_step : {0, 10}) {
                Setup s(spec, 1000, threshold, first_step);
                const size_t wire = gather_wire_bytes(s.bs, head_fwd, 1000), t = size_t(s.tp.size);
                size_t most = 0;
                for (size_t n = 1; n <= 1000; n++) {
                    for (uint32_t step : {0, 20}) {
                        s.bs.step = step;
                        most = std::max(most, stripe_bytes(boundary_codec(s.bs, head_fwd, n), n));
                    }
                }
                CAPTURE(spec);
                CAPTURE(threshold);
                CAPTURE(first_step);
                CHECK(wire >= t * most);
                CHECK(wire <= std::max(t * most, t * 3000));  // nor is memory wasted
                CHECK(s.workspace.n == (t > 1 ? 2 * wire : 0));
            }
        }
    }
}

TEST_CASE("sampled SNR is that of what this rank encoded, and sampling changes nothing") {
    const size_t n = 4097;
    Setup s("hadint6", n);
    const int t = s.tp.size;
    if (t == 1) return;
    const Codec codec = codec_parse("hadint6");
    const double close = sizeof(floatX) < 4 ? 0.02 : 1e-9;  // of an all-reduce the stored sum is measured, the exact one sent
    double signal = 0, noise = 0;
    const auto add = [&](const std::vector<float>& x, int stripe) {
        const std::vector<float> decoded = through_codec(codec, x.data(), n, {});
        CAPTURE(stripe);
        for (size_t i = 0; i < n; i++) {
            signal += double(x[i]) * x[i];
            noise += (double(x[i]) - decoded[i]) * (double(x[i]) - decoded[i]);
        }
    };
    const auto check_sums = [&] {
        const BoundaryDeviceCounters counters = s.found(head_bwd);
        CHECK(counters.signal == doctest::Approx(signal).epsilon(close));
        CHECK(counters.noise == doctest::Approx(noise).epsilon(close));
        signal = noise = 0;
    };
    const auto plain = [&] {
        return std::tuple(s.gather(head_bwd, 0, n), s.reduce_scatter(head_bwd, 0, n), s.all_reduce(head_bwd, 0, n));
    };
    const auto expected = plain();
    check_sums();  // none were taken
    s.bs.sample_snr = true;

    CHECK(same(s.gather(head_bwd, 0, n), std::get<0>(expected)));
    add(values(s.tp.rank, n), s.tp.rank);
    check_sums();

    const std::vector<float> x = values(s.tp.rank, n * t);
    for (int collective : {1, 2}) {
        for (int r = 0; r < t; r++)
            if (r != s.tp.rank) add({x.begin() + r * n, x.begin() + (r + 1) * n}, r);
        if (collective == 2) add(stored(reduced_stripe(s, codec, head_bwd, 0, s.tp.rank, n)), t);
        const std::vector<float> out = collective == 1 ? s.reduce_scatter(head_bwd, 0, n) : s.all_reduce(head_bwd, 0, n);
        CHECK(same(out, collective == 1 ? std::get<1>(expected) : std::get<2>(expected)));
        check_sums();
    }
    s.gather(head_bwd, 0, n);
    add(values(s.tp.rank, n), s.tp.rank);
    const BoundaryRecord record = boundaries_records_take(s.bs, s.stream)[head_bwd];
    CHECK(record.snr_db == doctest::Approx(10 * std::log10(signal / noise)));
    CHECK(record.snr_db > 30);
    CHECK(record.codec == "hadint6");
    CHECK(record.calls == 1);
    CHECK(boundaries_records_take(s.bs, s.stream)[head_bwd].calls == 0);

    boundaries_configure(s.bs, "none", {}, 0, 0);
    s.workspace_make(n);
    plain();
    CHECK(std::isnan(boundaries_records_take(s.bs, s.stream)[head_bwd].snr_db));
}

TEST_CASE("a group that is not finite is NaN on every rank, and counted") {
    const size_t n = 300;
    for (const char* spec : {"fp8", "int8", "taco", "hadint8", "hadint4:sr"}) {
        CAPTURE(spec);
        Setup s(spec, n);
        const int t = s.tp.size, rank = s.tp.rank;
        if (t == 1) return;
        std::vector<float> local = values(rank, n);
        if (rank == 0) local[130] = INFINITY;
        const std::vector<float> out = s.gather(attn_out_bwd, 0, n, local);
        CHECK(s.found(attn_out_bwd).nonfinite == (rank == 0));
        for (size_t i = 0; i < out.size(); i++) CHECK(std::isnan(out[i]) == (i >= 128 && i < 256));

        // in the last rank's stripe: rank 0 counts its group, the owner the sum's
        std::vector<float> x = values(rank, n * t);
        if (rank == 0) x[(t - 1) * n + 5] = NAN;
        x = s.all_reduce(attn_out_bwd, 0, n, x);
        CHECK(s.found(attn_out_bwd).nonfinite == uint64_t((rank == 0) + (rank == t - 1)));
        for (size_t i = 0; i < x.size(); i++) CHECK(std::isnan(x[i]) == (i >= (t - 1) * n && i < (t - 1) * n + 128));
    }
}

TEST_CASE("one codec for all, another for some; unknown names are refused") {
    Boundaries bs;
    boundaries_configure(bs, "taco", {{"attn_in.bwd", "bf16"}, {"head.fwd", "hadint6:g=64"}}, 4096, 7);
    for (int i = 0; i < boundary_count; i++) {
        const char* expected = i == attn_in_bwd ? "bf16" : i == head_fwd ? "hadint6:g=64" : "taco";
        CHECK(codec_text(bs.list[i].codec) == expected);
        CHECK(bs.list[i].threshold_bytes == 4096);
        CHECK(bs.list[i].first_step == 7);
    }
    CHECK(std::string(boundary_names[attn_in_bwd]) == "attn_in.bwd");
    CHECK(std::string(boundary_names[head_fwd]) == "head.fwd");
    CHECK_THROWS_WITH_AS(boundaries_configure(bs, "taco", {{"attn.fwd", "bf16"}}, 0, 0),
                         doctest::Contains("'attn.fwd'; allowed: embed.fwd attn_in.fwd"), Error);
    CHECK_THROWS_AS(boundaries_configure(bs, "taco", {{"head.fwd", "zip"}}, 0, 0), Error);
}

TEST_CASE("time is counted and traced by boundary") {
    const size_t n = 5000;
    Setup s("taco", n);
    if (s.tp.size == 1) return;
    Trace trace = trace_make(s.tp.rank);
    s.bs.spans.trace = &trace;
    boundaries_records_take(s.bs, s.stream);  // the timeline begins
    s.gather(mlp_out_bwd, 0, n);
    s.all_reduce(mlp_out_bwd, 0, n);
    const BoundaryRecord record = boundaries_records_take(s.bs, s.stream)[mlp_out_bwd];
    for (const char* category : {"encode", "wire", "decode"}) {
        CAPTURE(category);
        double seconds = 0;
        for (const TraceEvent& event : trace.events) {
            CHECK(std::string(event.name) == "mlp_out.bwd");
            if (std::string(event.category) == category) seconds += event.end_s - event.begin_s;
        }
        const double counted = category[0] == 'e' ? record.encode_ms : category[0] == 'w' ? record.wire_ms : record.decode_ms;
        CHECK(counted > 0);
        CHECK(counted == doctest::Approx(1e3 * seconds).epsilon(1e-6));
    }
}
