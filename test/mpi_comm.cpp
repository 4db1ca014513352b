// Communication on any number of ranks: byte exchanges, sums, groups of ranks, and how a run ends when a rank fails.
// clang-format off
#include "mpi_wrap.h"  // first
// clang-format on

#include <unistd.h>

#include "llmc/comm/agree.h"
#include "llmc/comm/boundary.h"
#include "llmc/comm/mesh.h"

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
            Request request = all_gather_begin(world, slots.data(), bytes);
            const size_t counted = request.sent_bytes;
            request_finish(world, request, "test");
            CHECK(counted == (size - 1) * bytes);
            CHECK(sent.bytes() == counted);
            for (int r = 0; r < size; r++) CHECK(same(slots.data() + r * bytes, pattern(r, bytes).data(), bytes));

            std::vector<uint8_t> from(bytes * size), to(bytes * size, 0xEE);
            for (int r = 0; r < size; r++) std::ranges::copy(pattern(rank * 100 + r, bytes), from.begin() + r * bytes);
            sent = {};
            request = all_to_all_begin(world, to.data(), from.data(), bytes);
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
        requests.push_back(all_gather_begin(world, slots[i].data(), bytes));
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

// The two ways in which a run ends from within communication. Each kills the process, so it happens in a run of its own:
// this program again, on six ranks, told by MPI_COMM_ENDING which.
TEST_CASE("a rank that is missing or fails ends the run") {
    Comm world = world_make();
    const char* ending = getenv("MPI_COMM_ENDING");
    if (ending && world.size == 6) {
        if (std::string(ending) == "abort") {
            if (world.rank == 1) comm_abort("cannot read x");
            barrier(world);
        }
        Mesh mesh = mesh_make(3, 1, 60);
        mesh.world.timeout_s = 60;
        Boundaries bs;
        boundaries_configure(bs, "taco", {}, 0, 0);
        Device device;
        boundaries_open(bs, mesh.tp, device);
        std::vector<uint8_t> wire(gather_wire_bytes(bs, mlp_out_bwd, 100));
        std::vector<float> local(100), out(300);
        for (int i = 0; i < 3; i++) {
            if (i == 2) {
                barrier(mesh.world);  // so that only rank 5 is late, however slow the machine
                if (world.rank == 3) mesh.tp.timeout_s = 1.5;
                if (world.rank == 5) sleep(30);
            }
            Pending pending = gather_begin(bs, mlp_out_bwd, 0, local.data(), wire.data(), 100, {});
            gather_finish(bs, pending, out.data(), {});
        }
        barrier(mesh.world);
        return;
    }
    if (world.size > 2) return;  // once is enough
    if (world.rank == 0) {
        for (const std::string which : {"abort", "watchdog"}) {
            const NestedRun run = run_nested("MPI_COMM_ENDING=" + which, 6, "a rank that is missing*");
            const std::string& text = run.text;
            CAPTURE(text);
            CHECK(run.status > 0);
            CHECK(run.seconds < 25);
            const std::string expected =
                which == "abort"
                    ? "train_gpt: rank 1: cannot read x\n"
                    : "train_gpt: rank 3: waited over 1.5 s in 'mlp_out.bwd', collective 3 of its tp group, for rank 5: ";
            const size_t at = text.find(expected);
            CHECK(at != std::string::npos);
            CHECK(text.find("train_gpt:", at + 1) == std::string::npos);
        }
    }
    barrier(world);
}
