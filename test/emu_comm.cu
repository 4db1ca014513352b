// Collectives on tensors in device memory, by NCCL (dev/emu/nccl.h) and staged through the host, on any number of ranks, in
// every order of streams that the emulator knows; what its NCCL refuses; and the watchdog.
// clang-format off
#include "mpi_wrap.h"  // first
// clang-format on

#include <unistd.h>

#include "llmc/comm/boundary_log.h"
#include "llmc/comm/mesh.h"
#include "llmc/comm/tensors.h"
#include "llmc/spans.h"
#include "refused.h"

namespace {

// Runs `work(comm, stream)` with each transport, in several orders of streams.
template <class Work>
void everywhere(Work work) {
    for (const Transport transport : {Transport::nccl, Transport::mpi}) {
        Comm world = world_make();
        comm_tensors_open(world, test_device().device, transport);
        for (const std::string streams : {"lazy", "eager", "random:1", "random:2"}) {
            emu::streams_set(streams);
            CAPTURE(transport == Transport::nccl);
            CAPTURE(streams);
            work(world, test_device().stream);
        }
        emu::streams_set("lazy");
    }
}

void copy(void* to, const void* from, size_t bytes, Stream stream) {
    if (bytes) device_copy(to, from, bytes, stream);
}

}  // namespace

TEST_CASE("bytes of any size reach their place, after what was on the stream and before what follows") {
    everywhere([](Comm& world, Stream stream) {
        const int size = world.size, rank = world.rank;
        for (size_t bytes : {0, 1, 3, 64, 1001, 70000}) {
            CAPTURE(bytes);
            // copies on the stream fill the input and take the output: a collective out of order finds or leaves 0xFF
            const OnDevice<uint8_t> own(pattern(rank, bytes));
            OnDevice<uint8_t> slots(std::vector<uint8_t>(bytes * size, 0xff)), out(std::vector<uint8_t>(bytes * size, 0xff));
            copy(slots.data + rank * bytes, own.data, bytes, stream);
            TensorRequest request = tensor_all_gather_begin(world, slots.data, bytes, "gather", stream);
            request_finish(world, request, stream);
            copy(out.data, slots.data, bytes * size, stream);
            CHECK(request.sent_bytes == (size - 1) * bytes);
            const std::vector<uint8_t> gathered = out.get();
            for (int r = 0; r < size; r++) CHECK(same(gathered.data() + r * bytes, pattern(r, bytes).data(), bytes));

            std::vector<uint8_t> from(bytes * size);
            for (int r = 0; r < size; r++) std::ranges::copy(pattern(rank * 100 + r, bytes), from.begin() + r * bytes);
            const OnDevice<uint8_t> all(from);
            OnDevice<uint8_t> send(std::vector<uint8_t>(bytes * size, 0xff)), receive(std::vector<uint8_t>(bytes * size, 0xee));
            copy(send.data, all.data, bytes * size, stream);
            request = tensor_all_to_all_begin(world, receive.data, send.data, bytes, "exchange", stream);
            request_finish(world, request, stream);
            copy(out.data, receive.data, bytes * size, stream);
            const std::vector<uint8_t> received = out.get();
            for (int r = 0; r < size; r++) {
                const auto expected = r == rank ? std::vector<uint8_t>(bytes, 0xee) : pattern(r * 100 + rank, bytes);
                CHECK(same(received.data() + r * bytes, expected.data(), bytes));
            }
        }
    });
}

TEST_CASE("sums of floats are those in rank order") {
    everywhere([](Comm& world, Stream stream) {
        for (size_t n : {1, 5, 1000, 4099}) {
            CAPTURE(n);
            std::vector<float> expected = tensor(0, n);
            for (int r = 1; r < world.size; r++) {
                const std::vector<float> part = tensor(r, n);
                for (size_t i = 0; i < n; i++) expected[i] += part[i];
            }
            const OnDevice<float> own(tensor(world.rank, n));
            OnDevice<float> x(std::vector<float>(n, NAN)), out(n);
            copy(x.data, own.data, n * sizeof(float), stream);
            TensorRequest request = tensor_all_reduce_sum_begin(world, x.data, n, "sum", stream);
            request_finish(world, request, stream);
            copy(out.data, x.data, n * sizeof(float), stream);
            CHECK(same(out.get(), expected));
        }
    });
}

TEST_CASE("several are in flight while other work goes on") {
    everywhere([](Comm& world, Stream stream) {
        const size_t bytes = 5000;
        const int size = world.size;
        std::vector<std::unique_ptr<OnDevice<uint8_t>>> slots;
        std::vector<TensorRequest> requests;
        for (int i = 0; i < 4; i++) {
            std::vector<uint8_t> start(bytes * size, 0xff);
            std::ranges::copy(pattern(world.rank + 50 * i, bytes), start.begin() + world.rank * bytes);
            slots.push_back(std::make_unique<OnDevice<uint8_t>>(start));
            requests.push_back(tensor_all_gather_begin(world, slots[i]->data, bytes, "gather", stream));
            OnDevice<uint8_t> other(pattern(i, 999)), to(999);  // uses the caller's stream, and waits for it
            copy(to.data, other.data, 999, stream);
            CHECK(to.get() == pattern(i, 999));
        }
        for (int i : {0, 2, 1, 3}) request_finish(world, requests[i], stream);
        for (int i = 0; i < 4; i++) {
            const std::vector<uint8_t> all = slots[i]->get();
            for (int r = 0; r < size; r++) CHECK(same(&all[r * bytes], pattern(r + 50 * i, bytes).data(), bytes));
            if (size > 1) CHECK(event_seconds(requests[i].started, requests[i].done) >= 0);
        }
    });
}

TEST_CASE("two groups at once, whose streams each rank may run in its own order") {
    if (comm_world().size != 4) return;
    for (int seed = 1; seed <= 6; seed++) {
        emu::streams_set("random:" + std::to_string(10 * seed + comm_world().rank));
        Mesh mesh = mesh_make(2, 1, 60);
        for (Comm* comm : {&mesh.tp, &mesh.dp}) comm_tensors_open(*comm, test_device().device, Transport::nccl);
        OnDevice<float> a(tensor(mesh.tp.rank, 100)), b(tensor(mesh.dp.rank, 100));
        const Stream stream = test_device().stream;
        TensorRequest in_tp = tensor_all_reduce_sum_begin(mesh.tp, a.data, 100, "tp", stream);
        TensorRequest in_dp = tensor_all_reduce_sum_begin(mesh.dp, b.data, 100, "dp", stream);
        request_finish(mesh.tp, in_tp, stream);
        request_finish(mesh.dp, in_dp, stream);
        std::vector<float> expected = tensor(0, 100);
        for (size_t i = 0; i < 100; i++) expected[i] += tensor(1, 100)[i];
        CHECK(same(a.get(), expected));
        CHECK(same(b.get(), expected));
    }
    emu::streams_set("lazy");
}

TEST_CASE("what is read without request_finish is not there yet") {
    Comm world = world_make();
    if (world.size == 1) return;
    comm_tensors_open(world, test_device().device, Transport::nccl);
    OnDevice<float> x(tensor(world.rank, 100));
    TensorRequest request = tensor_all_reduce_sum_begin(world, x.data, 100, "sum", test_device().stream);
    CHECK(same(x.get(), tensor(world.rank, 100)));
    request_finish(world, request, test_device().stream);
    CHECK_FALSE(same(x.get(), tensor(world.rank, 100)));
}

TEST_CASE("NCCL of the emulator: the other collectives, and 16-bit sums") {
    Comm world = world_make();
    const NcclComm nccl = nccl_open(world);
    const Stream stream = test_device().stream;
    const int size = world.size, rank = world.rank;
    const size_t n = 33;
    const auto sum = [&](size_t i) {
        float total = 0;
        for (int r = 0; r < size; r++) total += float(bf16(tensor(r, n * size)[i]));
        return float(bf16(total));
    };
    OnDevice<bf16> x(tensor(rank, n * size)), block(n), all(n * size);
    nccl_check(ncclReduceScatter(x.data, block.data, n, ncclBfloat16, ncclSum, nccl.get(), stream.handle), "reduce-scatter");
    nccl_check(ncclAllReduce(x.data, all.data, n * size, ncclBfloat16, ncclSum, nccl.get(), stream.handle), "all-reduce");
    const std::vector<float> scattered = block.floats(), reduced = all.floats();
    for (size_t i = 0; i < n; i++) CHECK(scattered[i] == sum(rank * n + i));
    for (size_t i = 0; i < n * size; i++) CHECK(reduced[i] == sum(i));
    for (int root = 0; root < size; root++) {
        OnDevice<uint8_t> data(rank == root ? pattern(root, 77) : std::vector<uint8_t>(77)), to(77);
        nccl_check(ncclBroadcast(data.data, to.data, 77, ncclUint8, root, nccl.get(), stream.handle), "broadcast");
        CHECK(to.get() == pattern(root, 77));
    }
    // a ring by single sends and receives, without a group: sends do not wait
    OnDevice<uint8_t> mine(pattern(rank, 5)), theirs(5);
    nccl_check(ncclGroupStart(), "ncclGroupStart");
    nccl_check(ncclSend(mine.data, 5, ncclUint8, (rank + 1) % size, nccl.get(), stream.handle), "ncclSend");
    nccl_check(ncclRecv(theirs.data, 5, ncclUint8, (rank + size - 1) % size, nccl.get(), stream.handle), "ncclRecv");
    nccl_check(ncclGroupEnd(), "ncclGroupEnd");
    CHECK(theirs.get() == pattern((rank + size - 1) % size, 5));
}

TEST_CASE("NCCL of the emulator refuses what NCCL would, and ranks that disagree") {
    Comm world = world_make();
    const NcclComm nccl = nccl_open(world);
    const cudaStream_t stream = test_device().stream.handle;
    OnDevice<float> x(100);
    float host[100];
    CHECK(ncclAllReduce(host, x.data, 100, ncclFloat32, ncclSum, nccl.get(), stream) == ncclInvalidArgument);
    CHECK(std::string(ncclGetLastError(nccl.get())).find("ncclAllReduce: ") == 0);
    CHECK(ncclAllReduce(x.data, x.data, 101, ncclFloat32, ncclSum, nccl.get(), stream) == ncclInvalidArgument);
    CHECK(ncclAllReduce(x.data, x.data, 100, ncclFloat32, ncclMax, nccl.get(), stream) == ncclInvalidArgument);
    CHECK(ncclSend(x.data, 100, ncclFloat32, world.size, nccl.get(), stream) == ncclInvalidArgument);
    CHECK(ncclAllGather(x.data, x.data, 100, ncclFloat32, nullptr, stream) == ncclInvalidArgument);
    CHECK(ncclGroupEnd() == ncclInvalidUsage);
    refused([&] { nccl_check(ncclGroupEnd(), "ncclGroupEnd"); },
            {"ncclGroupEnd failed: invalid usage", "without ncclGroupStart"});
    if (world.size == 1) return;
    const size_t count = world.rank == 0 ? 100 : 99;
    nccl_check(ncclAllReduce(x.data, x.data, count, ncclFloat32, ncclSum, nccl.get(), stream), "ncclAllReduce");
    std::string error;
    try {
        stream_synchronize(test_device().stream);
    } catch (const emu::Error& e) {
        error = e.what();
    }
    if (world.rank == 0 || world.size == 2) {
        CHECK(error.find(format_text("rank %d of %d expects ncclAllReduce of %zu elements", world.rank, world.size, count)) !=
              std::string::npos);
    }
    barrier(world);
}

// A rank that sleeps on the host, one whose GPU has not come so far, and NCCL in flight everywhere else: as in mpi_comm.cpp,
// in runs of their own.
TEST_CASE("the watchdog names who is missing and ends the run") {
    Comm world = world_make();
    const char* ending = getenv("EMU_COMM_ENDING");
    if (ending && world.size == 4) {
        Mesh mesh = mesh_make(2, 1, 60);  // tp groups {0, 1} and {2, 3}
        comm_tensors_open(mesh.tp, test_device().device, Transport::nccl);
        const Stream stream = test_device().stream;
        OnDevice<float> x(std::vector<float>(100, 1.0f));
        for (int i = 0; i < 3; i++) {
            if (i == 2) {
                barrier(mesh.world);
                mesh.tp.timeout_s = 1;
                if (world.rank == 3 && std::string(ending) == "sleeps") sleep(60);
                if (world.rank == 3 && std::string(ending) == "stops") kill(getpid(), SIGSTOP);
                if (world.rank == 3 && std::string(ending) == "no hang") sleep(3);  // before the others wait
                if (std::string(ending) == "no hang") mesh.tp.timeout_s = 20;
            }
            TensorRequest request = tensor_all_reduce_sum_begin(mesh.tp, x.data, 100, "mlp_out.fwd", stream);
            request_finish(mesh.tp, request, stream);
            if (std::string(ending) == "no hang") {  // queued, not running: the emulator's streams run when waited for
                mesh.tp.timeout_s = 0.5;
                sleep(1);
            }
            stream_synchronize(stream);
        }
        barrier(mesh.world);
        return;
    }
    if (world.size > 2) return;  // once is enough
    if (world.rank == 0) {
        const auto run = [](const std::string& which) {
            return run_nested("EMU_STREAMS=lazy EMU_COMM_ENDING='" + which + "'", 4, "the watchdog names*");
        };
        for (const std::string which : {"sleeps", "stops"}) {
            const NestedRun nested = run(which);
            CAPTURE(nested.text);
            CHECK(nested.status != 0);
            CHECK(nested.seconds < 30);
            const std::string expected = "train_gpt: rank 2: waited over 1 s in 'mlp_out.fwd', collective ";
            const size_t at = nested.text.find(expected);
            REQUIRE(at != std::string::npos);
            CHECK(nested.text.find(which == "stops" ? "of its tp group, for rank 3 (no answer): is it alive?"
                                                    : "of its tp group, for rank 3: is it alive?") != std::string::npos);
            CHECK(nested.text.find("train_gpt:", at + 1) == std::string::npos);
        }
        const NestedRun nested = run("no hang");
        CAPTURE(nested.text);
        CHECK(nested.status == 0);
    }
    barrier(world);
}
