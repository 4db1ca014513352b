// Communication on any number of ranks: byte exchanges, sums, groups, errors, and the compressed boundaries, whose results
// are computed here again, one stripe at a time, from every rank's data. MPI is wrapped (PMPI) to count what it is handed.
// clang-format off
#include "mpi_main.h"  // first: doctest does not compile under the macros of llmc/check.h
// clang-format on

#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>

#include "llmc/comm/agree.h"
#include "llmc/comm/boundary.h"
#include "llmc/comm/mesh.h"

namespace {

uint64_t isend_bytes = 0, other_sends = 0;

}  // namespace

// What this rank hands to MPI. The transport is meant to use MPI_Isend alone; anything else would be seen.
extern "C" {
int MPI_Isend(const void* data, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm, MPI_Request* request) {
    int size = 0;
    PMPI_Type_size(type, &size);
    isend_bytes += uint64_t(count) * size;
    return PMPI_Isend(data, count, type, to, tag, comm, request);
}
int MPI_Send(const void* data, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm) {
    other_sends++;
    return PMPI_Send(data, count, type, to, tag, comm);
}
int MPI_Allreduce(const void* from, void* to, int count, MPI_Datatype type, MPI_Op op, MPI_Comm comm) {
    other_sends++;
    return PMPI_Allreduce(from, to, count, type, op, comm);
}
int MPI_Alltoall(const void* from, int n, MPI_Datatype type, void* to, int m, MPI_Datatype to_type, MPI_Comm comm) {
    other_sends++;
    return PMPI_Alltoall(from, n, type, to, m, to_type, comm);
}
int MPI_Allgather(const void* from, int n, MPI_Datatype type, void* to, int m, MPI_Datatype to_type, MPI_Comm comm) {
    other_sends++;
    return PMPI_Allgather(from, n, type, to, m, to_type, comm);
}
int MPI_Bcast(void* data, int count, MPI_Datatype type, int root, MPI_Comm comm) {
    other_sends++;
    return PMPI_Bcast(data, count, type, root, comm);
}
}

namespace {

Comm world_make() {
    Comm world = comm_world();
    world.timeout_s = 60;  // a rank whose check threw leaves the others waiting
    return world;
}

// What MPI was handed since this was made.
struct Sent {
    uint64_t bytes_before = isend_bytes, others_before = other_sends;
    uint64_t bytes() const { return other_sends == others_before ? isend_bytes - bytes_before : UINT64_MAX; }
};

uint64_t mix(uint64_t a, uint64_t b) {
    uint64_t x = (a + 1) * 0x9E3779B97F4A7C15u + b;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

// Rank `rank`'s tensor: bell-shaped, with outliers, known to all.
std::vector<float> tensor(int rank, size_t n) {
    std::vector<float> x(n);
    for (size_t i = 0; i < n; i++) {
        const uint64_t bits = mix(rank, i);
        const float bell = float(bits & 0xffff) + float(bits >> 16 & 0xffff) + float(bits >> 32 & 0xffff) - 98302.5f;
        x[i] = bell * (i % 97 == 5 ? 1e-3f : 3e-5f);
    }
    return x;
}

std::vector<uint8_t> pattern(int key, size_t bytes) {
    std::vector<uint8_t> data(bytes);
    for (size_t i = 0; i < bytes; i++) data[i] = uint8_t(mix(key + 1000, i));
    return data;
}

bool same(const void* a, const void* b, size_t bytes) { return bytes == 0 || memcmp(a, b, bytes) == 0; }
bool same(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && same(a.data(), b.data(), a.size() * sizeof(float));
}

const char* const all_codecs[] = {
    "none",         "bf16",    "fp8",     "int8",    "taco",    "taco:g=32:fmt=e5m2", "taco:g=512:sr",
    "hadint8:g=64", "hadint7", "hadint6", "hadint5", "hadint4", "hadint4:g=256:sr"};

// The boundaries of one tensor-parallel group, with a workspace of exactly the planned size.
struct Setup {
    Comm tp = world_make();
    Boundaries bs;
    std::vector<uint8_t> workspace;

    Setup(const std::string& codec, size_t n, size_t threshold = 0, long first_step = 0) {
        boundaries_configure(bs, codec, {}, threshold, first_step);
        bs.tp = &tp;
        bs.seed = 77;
        bs.step = 3;
        bs.micro_batch = 2;
        workspace.resize(boundary_workspace_bytes(bs, n));
        bs.workspace = workspace.data();
    }
    std::vector<float> gather(BoundaryId id, int layer, size_t n) {
        std::vector<uint8_t> wire(gather_wire_bytes(bs, id, n));
        std::vector<float> out(n * tp.size), again(n * tp.size);
        const std::vector<float> local = tensor(tp.rank, n);
        Pending pending = gather_begin(bs, id, layer, local.data(), wire.data(), n, {});
        gather_finish(bs, pending, out.data(), {});
        gather_decode(bs, id, again.data(), wire.data(), n, {});
        CHECK(same(again, out));
        return out;
    }
    std::vector<float> reduce_scatter(BoundaryId id, int layer, size_t n) {
        std::vector<float> x = tensor(tp.rank, n * tp.size), out(n);
        Pending pending = reduce_scatter_begin(bs, id, layer, x.data(), n, {});
        reduce_scatter_finish(bs, pending, out.data(), {});
        CHECK(same(x, tensor(tp.rank, n * tp.size)));
        return out;
    }
    std::vector<float> all_reduce(BoundaryId id, int layer, size_t n) {
        std::vector<float> x = tensor(tp.rank, n * tp.size);
        Pending pending = all_reduce_begin(bs, id, layer, x.data(), n, {});
        all_reduce_finish(bs, pending, {});
        return x;
    }
    RoundingKey key(BoundaryId id, int layer, int rank, int stripe) const {
        return {bs.seed, bs.step, bs.micro_batch, uint32_t(layer), uint32_t(id), uint32_t(rank), uint32_t(stripe)};
    }
};

std::vector<float> through_codec(const Codec& codec, const float* x, size_t n, const RoundingKey& key) {
    std::vector<uint8_t> wire(codec_bytes(codec, n));
    std::vector<float> out(n);
    cpu::codec_encode(codec, wire.data(), x, n, key, {});
    cpu::codec_decode(codec, out.data(), wire.data(), n, {});
    return out;
}

// What rank `owner` must find for its stripe: all contributions in rank order, its own exact.
std::vector<float> reduced_stripe(const Setup& s, const Codec& codec, BoundaryId id, int layer, int owner, size_t n) {
    std::vector<float> sum(n);
    for (int r = 0; r < s.tp.size; r++) {
        const std::vector<float> x = tensor(r, n * s.tp.size);
        std::vector<float> part(x.begin() + owner * n, x.begin() + (owner + 1) * n);
        if (r != owner) part = through_codec(codec, part.data(), n, s.key(id, layer, r, owner));
        for (size_t i = 0; i < n; i++) sum[i] = r == 0 ? part[i] : sum[i] + part[i];
    }
    return sum;
}

std::vector<float> gathered(const Setup& s, const Codec& codec, BoundaryId id, int layer, size_t n) {
    std::vector<float> all;
    for (int r = 0; r < s.tp.size; r++) {
        const std::vector<float> part = through_codec(codec, tensor(r, n).data(), n, s.key(id, layer, r, r));
        all.insert(all.end(), part.begin(), part.end());
    }
    return all;
}

std::vector<float> all_reduced(const Setup& s, const Codec& codec, BoundaryId id, int layer, size_t n) {
    std::vector<float> all;
    for (int r = 0; r < s.tp.size; r++) {
        const std::vector<float> sum = reduced_stripe(s, codec, id, layer, r, n);
        const std::vector<float> part = through_codec(codec, sum.data(), n, s.key(id, layer, r, s.tp.size));
        all.insert(all.end(), part.begin(), part.end());
    }
    return all;
}

// E(n) of the published closed form, written anew.
size_t closed_form(const std::string& spec, size_t n) {
    if (spec == "none") return 4 * n;
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

TEST_CASE("byte exchanges of any size, in one message or in pieces") {
    for (size_t piece : {size_t(1) << 30, size_t(1000), size_t(1)}) {
        for (size_t bytes : {0, 1, 3, 64, 1000, 1001, 200000}) {
            if (piece == 1 && bytes > 64) continue;
            CAPTURE(piece);
            CAPTURE(bytes);
            Comm world = world_make();
            world.piece = piece;
            const int size = world.size, rank = world.rank;

            std::vector<uint8_t> slots(bytes * size, 0xEE);
            std::ranges::copy(pattern(rank, bytes), slots.begin() + rank * bytes);
            Sent sent;
            Request request = all_gather_begin(world, slots.data(), bytes, {});
            const size_t counted = request.sent_bytes;
            request_finish(world, request, "test");
            CHECK(counted == (size - 1) * bytes);
            CHECK(sent.bytes() == counted);
            for (int r = 0; r < size; r++) CHECK(same(slots.data() + r * bytes, pattern(r, bytes).data(), bytes));

            std::vector<uint8_t> from(bytes * size), to(bytes * size, 0xEE);
            for (int r = 0; r < size; r++) std::ranges::copy(pattern(rank * 100 + r, bytes), from.begin() + r * bytes);
            sent = {};
            request = all_to_all_begin(world, to.data(), from.data(), bytes, {});
            CHECK(sent.bytes() == request.sent_bytes);
            CHECK(sent.bytes() == (size - 1) * bytes);
            request_finish(world, request, "test");
            for (int r = 0; r < size; r++) {
                const std::vector<uint8_t> expected =
                    r == rank ? std::vector<uint8_t>(bytes, 0xEE) : pattern(r * 100 + rank, bytes);
                CHECK(same(to.data() + r * bytes, expected.data(), bytes));
            }

            for (int root = 0; root < size; root++) {
                std::vector<uint8_t> data = rank == root ? pattern(root, bytes) : std::vector<uint8_t>(bytes);
                broadcast(world, data.data(), bytes, root);
                CHECK(same(data.data(), pattern(root, bytes).data(), bytes));
            }
        }
    }
}

TEST_CASE("several exchanges in flight finish in any order") {
    Comm world = world_make();
    const size_t bytes = 100000;
    std::vector<std::vector<uint8_t>> slots;
    std::vector<Request> requests;
    for (int i = 0; i < 3; i++) slots.emplace_back(bytes * world.size);
    for (int i = 0; i < 3; i++) {
        std::ranges::copy(pattern(world.rank + 50 * i, bytes), slots[i].begin() + world.rank * bytes);
        requests.push_back(all_gather_begin(world, slots[i].data(), bytes, {}));
    }
    for (int i : {2, 0, 1}) request_finish(world, requests[i], "test");
    for (int i = 0; i < 3; i++)
        for (int r = 0; r < world.size; r++) CHECK(same(&slots[i][r * bytes], pattern(r + 50 * i, bytes).data(), bytes));
}

TEST_CASE("numbers and texts") {
    Comm world = world_make();
    const auto number = [](int r) { return r % 3 == 0 ? 1e16 : r % 3 == 1 ? 3.0 : -1e16; };  // the order of summation shows
    double sum = 0;
    for (int r = 0; r < world.size; r++) sum += number(r);
    CHECK(all_reduce_sum(world, number(world.rank)) == sum);
    for (int r = 0; r < world.size; r++) CHECK(all_reduce_max(world, world.rank == r ? -1.0 : -2.0) == -1.0);

    const auto text = [](int r) { return std::string(r % 2 * (r + 1) * 1000, char('a' + r)); };
    const std::vector<std::string> texts = gather_text(world, text(world.rank));
    REQUIRE(int(texts.size()) == world.size);
    for (int r = 0; r < world.size; r++) CHECK(texts[r] == text(r));
    for (const std::string& empty : gather_text(world, "")) CHECK(empty.empty());
    barrier(world);
}

TEST_CASE("sums of floats are in rank order, for any size and block") {
    Comm world = world_make();
    for (size_t stripe : {size_t(1) << 20, size_t(1), size_t(7), size_t(1000)}) {
        for (size_t n : {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 100, 1001, 70001}) {
            if (n / stripe > 2000) continue;
            CAPTURE(stripe);
            CAPTURE(n);
            std::vector<float> expected = tensor(0, n), x = tensor(world.rank, n);
            for (int r = 1; r < world.size; r++) {
                const std::vector<float> part = tensor(r, n);
                for (size_t i = 0; i < n; i++) expected[i] += part[i];
            }
            all_reduce_sum(world, x.data(), n, stripe);
            CHECK(same(x, expected));
        }
    }
}

TEST_CASE("the mesh has tp innermost and refuses what does not fit") {
    Comm world = world_make();
    const auto members = [&](Comm& comm) { return gather_values(comm, world.rank, "members"); };
    for (int tp = 1; tp <= world.size; tp++) {
        CAPTURE(tp);
        if (world.size % tp != 0) {
            CHECK_THROWS_WITH_AS(mesh_make(tp, 1, 60), doctest::Contains("does not divide"), Error);
            continue;
        }
        Mesh mesh = mesh_make(tp, 1, 61);
        REQUIRE(mesh.tp.size == tp);
        REQUIRE(mesh.dp.size == world.size / tp);
        const std::vector<int> in_tp = members(mesh.tp), in_dp = members(mesh.dp);
        for (int i = 0; i < tp; i++) CHECK(in_tp[i] == world.rank / tp * tp + i);
        for (int i = 0; i < mesh.dp.size; i++) CHECK(in_dp[i] == world.rank % tp + i * tp);
        for (const Comm* comm : {&mesh.world, &mesh.tp, &mesh.dp}) CHECK(comm->timeout_s == 61);
        CHECK(std::string(mesh.tp.axis) + mesh.dp.axis + mesh.world.axis == "tpdpworld");
    }
    CHECK_THROWS_WITH_AS(mesh_make(1, 2, 60), doctest::Contains("pipelines come in a later version"), Error);
    CHECK_THROWS_WITH_AS(mesh_make(0, 1, 60), doctest::Contains("at least 1"), Error);
    CHECK_THROWS_WITH_AS(mesh_make(-1, 1, 60), doctest::Contains("at least 1"), Error);
    CHECK(comm_ranks_on_host(world) == world.size);
}

TEST_CASE("all ranks throw the error of the lowest that has one") {
    Comm world = world_make();
    CHECK_NOTHROW(agree(world, ""));
    for (int lowest = 0; lowest < world.size; lowest++) {
        const auto fail_from = [&](int from) {
            if (world.rank >= from) fail("rank %d cannot read it", world.rank);
        };
        const std::string expected = format_text("rank %d cannot read it", lowest);
        CHECK_THROWS_WITH_AS(together(world, [&] { fail_from(lowest); }), expected.c_str(), AgreedError);
    }
    CHECK_THROWS_WITH_AS(together(world,
                                  [&] {
                                      if (world.rank == world.size - 1) throw std::bad_alloc();
                                  }),
                         "std::bad_alloc", AgreedError);
    int ran = 0;
    CHECK_NOTHROW(together(world, [&] { ran = 1; }));
    CHECK(ran == 1);
}

TEST_CASE("boundaries: values, bits and bytes, for each collective, codec and size") {
    int turn = 0;
    for (const char* spec : all_codecs) {
        for (size_t n : {0, 1, 31, 128, 1000, 4097, 33000}) {
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
                CHECK(sent.bytes() == counters.wire_bytes);
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
            CHECK(same(out, reduced_stripe(s, codec, id, layer, s.tp.rank, n)));

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

TEST_CASE("boundaries: stochastic rounding differs by step, micro-batch, layer and boundary, and repeats") {
    const size_t n = 500;
    Setup s("hadint4:sr", n);
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
}

TEST_CASE("boundaries: without a codec nothing is copied that need not be") {
    const size_t n = 1000;
    Setup s("none", n);
    std::vector<float> all(n * s.tp.size);
    const std::vector<float> local = tensor(s.tp.rank, n);
    REQUIRE(gather_is_raw(s.bs, mlp_in_fwd, n));
    REQUIRE(gather_wire_bytes(s.bs, mlp_in_fwd, n) == all.size() * sizeof(float));
    for (bool in_place : {false, true}) {
        float* own = &all[s.tp.rank * n];
        std::ranges::fill(all, NAN);
        if (in_place) std::ranges::copy(local, own);
        uint8_t* wire = reinterpret_cast<uint8_t*>(all.data());
        Pending pending = gather_begin(s.bs, mlp_in_fwd, 0, in_place ? own : local.data(), wire, n, {});
        gather_finish(s.bs, pending, all.data(), {});
        CHECK(same(all, gathered(s, Codec{}, mlp_in_fwd, 0, n)));
    }
}

TEST_CASE("boundaries: below the threshold and before the first step nothing is compressed") {
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
            CHECK(sent.bytes() == (s.tp.size - 1) * codec_bytes(codec, n));
            CHECK(same(s.reduce_scatter(embed_bwd, 0, n), reduced_stripe(s, codec, embed_bwd, 0, s.tp.rank, n)));
            CHECK(same(s.all_reduce(embed_bwd, 0, n), all_reduced(s, codec, embed_bwd, 0, n)));
        }
    }
}

TEST_CASE("boundaries: buffers hold every stripe up to the planned size, compressed or not") {
    for (const char* spec : {"none", "bf16", "taco", "taco:g=512", "hadint4"}) {
        for (size_t threshold : {0, 100, 3000, 100000}) {
            for (long first_step : {0, 10}) {
                Setup s(spec, 1000, threshold, first_step);
                const size_t wire = gather_wire_bytes(s.bs, head_fwd, 1000), t = size_t(s.tp.size);
                size_t most = 0;
                for (size_t n = 1; n <= 1000; n++) {
                    for (uint32_t step : {0, 20}) {
                        s.bs.step = step;
                        most = std::max(most, codec_bytes(boundary_codec(s.bs, head_fwd, n), n));
                    }
                }
                CAPTURE(spec);
                CAPTURE(threshold);
                CAPTURE(first_step);
                CHECK(wire >= t * most);
                CHECK(wire <= std::max(t * most, t * 3000));  // nor is memory wasted
                CHECK(s.workspace.size() == (t > 1 ? 2 * wire : 0));
            }
        }
    }
}

TEST_CASE("boundaries: sampled SNR is that of what this rank encoded, and sampling changes nothing") {
    const size_t n = 4097;
    Setup s("hadint6", n);
    const int t = s.tp.size;
    if (t == 1) return;
    const Codec codec = codec_parse("hadint6");
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
        const BoundaryCounters counters = std::exchange(s.bs.list[head_bwd].counters, {});
        CHECK(counters.signal == doctest::Approx(signal).epsilon(1e-9));
        CHECK(counters.noise == doctest::Approx(noise).epsilon(1e-9));
        signal = noise = 0;
    };
    const auto plain = [&] {
        return std::tuple(s.gather(head_bwd, 0, n), s.reduce_scatter(head_bwd, 0, n), s.all_reduce(head_bwd, 0, n));
    };
    const auto expected = plain();
    check_sums();  // none were taken
    s.bs.sample_snr = true;

    CHECK(same(s.gather(head_bwd, 0, n), std::get<0>(expected)));
    add(tensor(s.tp.rank, n), s.tp.rank);
    check_sums();

    const std::vector<float> x = tensor(s.tp.rank, n * t);
    for (int collective : {1, 2}) {
        for (int r = 0; r < t; r++)
            if (r != s.tp.rank) add({x.begin() + r * n, x.begin() + (r + 1) * n}, r);
        if (collective == 2) add(reduced_stripe(s, codec, head_bwd, 0, s.tp.rank, n), t);
        const std::vector<float> out = collective == 1 ? s.reduce_scatter(head_bwd, 0, n) : s.all_reduce(head_bwd, 0, n);
        CHECK(same(out, collective == 1 ? std::get<1>(expected) : std::get<2>(expected)));
        check_sums();
    }
    s.gather(head_bwd, 0, n);
    add(tensor(s.tp.rank, n), s.tp.rank);
    const BoundaryRecord record = boundaries_records_take(s.bs)[head_bwd];
    CHECK(record.snr_db == doctest::Approx(10 * std::log10(signal / noise)));
    CHECK(record.snr_db > 30);
    CHECK(record.codec == "hadint6");
    CHECK(record.calls == 1);
    CHECK(boundaries_records_take(s.bs)[head_bwd].calls == 0);

    boundaries_configure(s.bs, "none", {}, 0, 0);
    s.workspace.resize(boundary_workspace_bytes(s.bs, n));
    s.bs.workspace = s.workspace.data();
    plain();
    CHECK(std::isnan(boundaries_records_take(s.bs)[head_bwd].snr_db));
}

TEST_CASE("boundaries: a group that is not finite is NaN on every rank, and counted") {
    const size_t n = 300;
    for (const char* spec : {"fp8", "int8", "taco", "hadint8", "hadint4:sr"}) {
        CAPTURE(spec);
        Setup s(spec, n);
        const int t = s.tp.size, rank = s.tp.rank;
        if (t == 1) return;
        std::vector<uint8_t> wire(gather_wire_bytes(s.bs, attn_out_bwd, n));
        std::vector<float> local = tensor(rank, n), out(n * t);
        if (rank == 0) local[130] = INFINITY;
        Pending pending = gather_begin(s.bs, attn_out_bwd, 0, local.data(), wire.data(), n, {});
        gather_finish(s.bs, pending, out.data(), {});
        CHECK(s.bs.list[attn_out_bwd].counters.nonfinite == (rank == 0));
        for (size_t i = 0; i < out.size(); i++) CHECK(std::isnan(out[i]) == (i >= 128 && i < 256));

        // in the last rank's stripe: rank 0 counts its group, the owner the sum's
        std::vector<float> x = tensor(rank, n * t);
        if (rank == 0) x[(t - 1) * n + 5] = NAN;
        s.bs.list[attn_out_bwd].counters = {};
        pending = all_reduce_begin(s.bs, attn_out_bwd, 0, x.data(), n, {});
        all_reduce_finish(s.bs, pending, {});
        CHECK(s.bs.list[attn_out_bwd].counters.nonfinite == uint64_t((rank == 0) + (rank == t - 1)));
        for (size_t i = 0; i < x.size(); i++) CHECK(std::isnan(x[i]) == (i >= (t - 1) * n && i < (t - 1) * n + 128));
    }
}

TEST_CASE("boundaries: one codec for all, another for some; unknown names are refused") {
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

TEST_CASE("boundaries: time is counted and traced by boundary") {
    const size_t n = 5000;
    Setup s("taco", n);
    if (s.tp.size == 1) return;
    Trace trace = trace_make(s.tp.rank);
    s.bs.trace = &trace;
    s.gather(mlp_out_bwd, 0, n);
    s.all_reduce(mlp_out_bwd, 0, n);
    for (const char* category : {"encode", "wire", "decode"}) {
        CAPTURE(category);
        double seconds = 0;
        for (const TraceEvent& event : trace.events) {
            CHECK(std::string(event.name) == "mlp_out.bwd");
            if (std::string(event.category) == category) seconds += event.end_s - event.begin_s;
        }
        const BoundaryCounters& c = s.bs.list[mlp_out_bwd].counters;
        const double counted = category[0] == 'e' ? c.encode_s : category[0] == 'w' ? c.wire_s : c.decode_s;
        CHECK(counted > 0);
        CHECK(counted == doctest::Approx(seconds).epsilon(1e-6));
    }
}

// The two ways in which a run ends from within communication. Each kills the process, so it happens in a run of its own:
// this program again, on four ranks, told by MPI_COMM_ENDING which.
TEST_CASE("a rank that is missing or fails ends the run") {
    Comm world = world_make();
    const char* ending = getenv("MPI_COMM_ENDING");
    if (ending && world.size == 4) {
        if (std::string(ending) == "abort") {
            if (world.rank == 1) comm_abort("cannot read x");
            barrier(world);
        }
        Mesh mesh = mesh_make(2, 1, 1.5);
        mesh.world.timeout_s = 60;
        Setup s("taco", 100);
        s.bs.tp = &mesh.tp;
        for (int i = 0; i < 3; i++) {
            if (i == 2 && world.rank == 3) sleep(30);
            s.reduce_scatter(mlp_out_bwd, 0, 100);
        }
        barrier(mesh.world);
        return;
    }
    if (world.size > 2) return;  // once is enough
    if (world.rank == 0) {
        for (const std::string which : {"abort", "watchdog"}) {
            // a run within a run must not see the outer one's variables
            const std::string command =
                "for v in $(env | sed -n 's/^\\(\\(OMPI\\|PMIX\\|ORTE\\|OPAL\\|PRTE\\)_[A-Za-z0-9_]*\\)=.*/\\1/p'); do unset $v; "
                "done; "
                ". '" PROJECT_ROOT "/scripts/mpi_env.sh'; OMP_NUM_THREADS=1 MPI_COMM_ENDING=" +
                which + " mpirun -np 4 '" + std::filesystem::read_symlink("/proc/self/exe").string() +
                "' '--test-case=a rank that is missing*' 2>&1 </dev/null";
            const double begin = seconds_now();
            FILE* pipe = popen(command.c_str(), "r");
            REQUIRE(pipe);
            std::string text;
            for (int c; (c = fgetc(pipe)) != EOF;) text += char(c);
            const int status = pclose(pipe);
            CAPTURE(text);
            CHECK(WIFEXITED(status));
            CHECK(WEXITSTATUS(status) != 0);
            CHECK(seconds_now() - begin < 25);
            const std::string expected =
                which == "abort"
                    ? "train_gpt: rank 1: cannot read x\n"
                    : "train_gpt: rank 2: waited over 1.5 s in 'mlp_out.bwd', collective 3 of its tp group, for rank 3: ";
            const size_t at = text.find(expected);
            CHECK(at != std::string::npos);
            CHECK(text.find("train_gpt:", at + 1) == std::string::npos);
        }
    }
    barrier(world);
}
