// NCCL's names over MPI, for programs on the emulator: an emulated GPU a rank.
//
// A call checks its arguments and puts work on the emulated stream, as NCCL does. When the stream comes to it, the work copies
// device memory to buffers of its own, exchanges those by MPI messages between the communicator's ranks, and copies back: MPI
// never sees device memory. Work that waits for other ranks is polled (emu::enqueue_poll), so that other streams go on
// meanwhile. Sums are formed in float32 in rank order. Each message begins with what it belongs to: ranks that call different
// things, or with different counts, are reported instead of hanging or mixing data. What NCCL would refuse is refused;
// ncclGetLastError says why.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <mpi.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#define NCCL_MAJOR 2
#define NCCL_MINOR 28
#define NCCL_PATCH 0
#define NCCL_VERSION_CODE 22800

enum ncclResult_t {
    ncclSuccess,
    ncclUnhandledCudaError,
    ncclSystemError,
    ncclInternalError,
    ncclInvalidArgument,
    ncclInvalidUsage,
    ncclRemoteError,
    ncclInProgress
};
enum ncclDataType_t {
    ncclInt8 = 0,
    ncclChar = 0,
    ncclUint8 = 1,
    ncclInt32 = 2,
    ncclInt = 2,
    ncclUint32 = 3,
    ncclInt64 = 4,
    ncclUint64 = 5,
    ncclFloat16 = 6,
    ncclHalf = 6,
    ncclFloat32 = 7,
    ncclFloat = 7,
    ncclFloat64 = 8,
    ncclDouble = 8,
    ncclBfloat16 = 9
};
enum ncclRedOp_t { ncclSum, ncclProd, ncclMax, ncclMin, ncclAvg };

struct ncclUniqueId {
    char internal[128];
};

namespace emu::nccl {

// The ranks of a communicator. Lives as long as work of it is queued.
struct Group {
    MPI_Comm mpi = MPI_COMM_NULL;
    int rank = 0, size = 1;
    uint64_t collectives = 0;               // begun here
    std::vector<uint64_t> sends, receives;  // begun here, with each rank
    bool ended = false;
};

// Travels before the data. Both sides make it, and it must be the same.
struct Header {
    char call[24];
    uint64_t count;
    int32_t type, root;
};

struct Message {
    int peer;
    bool sending;
    int tag;
    Header header;
    size_t bytes;
    char* device;  // where the data comes from or goes to; null: what is received stays in `data`
    std::vector<char> data{};
    Header arrived{};
};

// A collective, or the sends and receives of one group of calls, on its way.
struct Work {
    std::shared_ptr<Group> group;
    std::vector<Message> messages{};
    std::function<void(const Work&)> end{};  // when all data is here; may be empty
    enum Phase { fresh, headers, data, done } phase = fresh;
    std::vector<MPI_Request> requests{};
};

struct Queued {
    cudaStream_t stream;
    std::shared_ptr<Work> work;
    bool collective;
};

struct Calls {  // of this thread
    int depth = 0;  // of ncclGroupStart
    std::vector<Queued> queued;
    std::string refused;
    int ids = 0;
};

inline Calls& calls() {
    static thread_local Calls calls;
    return calls;
}

inline ncclResult_t refuse(ncclResult_t result, const std::string& why) {
    calls().refused = why;
    return result;
}

inline size_t type_bytes(int type) {
    constexpr size_t bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
    return bytes[type];
}

inline void device_copy(const Header& header, void* to, const void* from, size_t bytes, const void* device) {
    if (bytes == 0) return;
    const std::string error = device_range_error(device, bytes, true);
    if (!error.empty()) throw Error(std::string(header.call) + ": " + error);
    const DeviceAccess access;
    memmove(to, from, bytes);
}

inline void post(Work& work, Message& message, void* data, size_t bytes) {
    MPI_Request& request = work.requests.emplace_back();
    if (message.sending) MPI_Isend(data, int(bytes), MPI_BYTE, message.peer, message.tag, work.group->mpi, &request);
    else MPI_Irecv(data, int(bytes), MPI_BYTE, message.peer, message.tag, work.group->mpi, &request);
}

inline bool arrived(Work& work) {
    int all = 0;
    MPI_Testall(int(work.requests.size()), work.requests.data(), &all, MPI_STATUSES_IGNORE);
    if (all) work.requests.clear();
    return all;
}

inline std::string header_text(const Header& header) {
    return text("%s of %zu elements of type %d%s", header.call, size_t(header.count), header.type,
                header.root < 0 ? "" : text(", root %d", header.root).c_str());
}

// Goes on as far as it can without waiting; true at the end.
inline bool work_poll(Work& work) {
    if (work.group->ended) return true;
    if (work.phase == Work::fresh) {
        for (Message& m : work.messages) {
            m.data.resize(m.bytes);
            if (m.sending) device_copy(m.header, m.data.data(), m.device, m.bytes, m.device);
            post(work, m, m.sending ? &m.header : &m.arrived, sizeof(Header));
        }
        work.phase = Work::headers;
    }
    if (work.phase == Work::headers) {
        if (!arrived(work)) return false;
        for (const Message& m : work.messages) {
            if (!m.sending && memcmp(&m.header, &m.arrived, sizeof(Header)) != 0)
                throw Error(text("NCCL: rank %d of %d expects %s, but rank %d calls ", work.group->rank, work.group->size,
                                 header_text(m.header).c_str(), m.peer) + header_text(m.arrived));
        }
        for (Message& m : work.messages) post(work, m, m.data.data(), m.bytes);
        work.phase = Work::data;
    }
    if (work.phase == Work::data) {
        if (!arrived(work)) return false;
        for (const Message& m : work.messages)
            if (!m.sending && m.device) device_copy(m.header, m.device, m.data.data(), m.bytes, m.device);
        if (work.end) work.end(work);
        work.phase = Work::done;
    }
    return true;
}

inline void queued_flush(Calls& calls) {
    for (const Queued& queued : std::exchange(calls.queued, {}))
        enqueue_poll(queued.stream, [work = queued.work] { return work_poll(*work); });
}

// Puts the work on its stream, at the latest ncclGroupEnd. Sends and receives of a group of calls go together: each alone
// could wait for ever.
inline ncclResult_t work_queue(const Queued& queued) {
    Calls& all = calls();
    const auto same = [&](const Queued& q) {
        return !q.collective && q.stream == queued.stream && q.work->group == queued.work->group;
    };
    const auto before = std::find_if(all.queued.begin(), all.queued.end(), same);
    if (!queued.collective && before != all.queued.end()) {
        before->work->messages.push_back(std::move(queued.work->messages[0]));
    } else {
        all.queued.push_back(queued);
    }
    if (all.depth == 0) queued_flush(all);
    return ncclSuccess;
}

inline float to_float(const char* at, int type) {
    float x = 0;
    if (type == ncclFloat32) memcpy(&x, at, 4);
    if (type == ncclBfloat16) x = __bfloat162float(*reinterpret_cast<const __nv_bfloat16*>(at));
    if (type == ncclFloat16) x = __half2float(*reinterpret_cast<const __half*>(at));
    return x;
}

inline void from_float(char* at, int type, float x) {
    if (type == ncclFloat32) memcpy(at, &x, 4);
    if (type == ncclBfloat16) *reinterpret_cast<__nv_bfloat16*>(at) = __float2bfloat16_rn(x);
    if (type == ncclFloat16) *reinterpret_cast<__half*>(at) = __float2half_rn(x);
}

// out [count] = the sum over ranks of what was received, and of `own`, which is on the device as `out` is.
inline void sum_in_order(const Work& work, const Header& header, char* out, const char* own) {
    const size_t size = type_bytes(header.type), bytes = header.count * size;
    std::vector<char> mine(bytes), sums(bytes);
    device_copy(header, mine.data(), own, bytes, own);
    std::vector<const char*> parts(work.group->size, mine.data());
    for (const Message& m : work.messages)
        if (!m.sending) parts[m.peer] = m.data.data();
    for (size_t i = 0; i < bytes; i += size) {
        float sum = to_float(parts[0] + i, header.type);
        for (size_t r = 1; r < parts.size(); r++) sum += to_float(parts[r] + i, header.type);
        from_float(&sums[i], header.type, sum);
    }
    device_copy(header, out, sums.data(), bytes, out);
}

}  // namespace emu::nccl

struct ncclComm {
    std::shared_ptr<emu::nccl::Group> group;
};
typedef ncclComm* ncclComm_t;

namespace emu::nccl {

struct Buffer {
    const void* at;
    size_t elements;
};

inline ncclResult_t arguments_check(const char* call, ncclComm_t comm, std::initializer_list<Buffer> buffers, int type, int peer) {
    if (!comm || comm->group->ended) return refuse(ncclInvalidArgument, text("%s: no communicator", call));
    if (type < ncclInt8 || type > ncclBfloat16) return refuse(ncclInvalidArgument, text("%s: type %d", call, type));
    if (peer < 0 || peer >= comm->group->size)
        return refuse(ncclInvalidArgument, text("%s: rank %d of %d", call, peer, comm->group->size));
    for (const Buffer& buffer : buffers) {
        if (buffer.elements == 0) continue;
        const std::string error = device_range_error(buffer.at, buffer.elements * type_bytes(type), false);
        if (!error.empty()) return refuse(ncclInvalidArgument, text("%s: ", call) + error);
    }
    return ncclSuccess;
}

inline Header header_make(const char* call, size_t count, int type, int root = -1) {
    Header header{};
    strncpy(header.call, call, sizeof header.call - 1);
    header.count = count;
    header.type = type;
    header.root = root;
    return header;
}

// A collective in which each rank sends from(peer) to, and receives into to(peer) from, the others; null `from`: nothing.
template <class From, class To>
Queued collective(ncclComm_t comm, cudaStream_t stream, const Header& header, From from, To to,
                  std::function<void(const Work&)> end) {
    Group& group = *comm->group;
    const size_t bytes = header.count * type_bytes(header.type);
    const int tag = int(group.collectives++ % 16384);
    auto work = std::make_shared<Work>(Work{comm->group});
    work->end = std::move(end);
    for (int step = 1; step < group.size; step++) {
        const int next = (group.rank + step) % group.size, last = (group.rank + group.size - step) % group.size;
        if (header.root < 0 || header.root == last)
            work->messages.push_back({last, false, tag, header, bytes, static_cast<char*>(to(last))});
        if (header.root < 0 || header.root == group.rank)
            work->messages.push_back({next, true, tag, header, bytes, static_cast<char*>(from(next))});
    }
    return {stream, work, true};
}

inline ncclResult_t send_or_receive(const char* call, bool sending, char* at, size_t count, ncclDataType_t type, int peer,
                                    ncclComm_t comm, cudaStream_t stream) {
    if (const ncclResult_t bad = arguments_check(call, comm, {{at, count}}, type, peer)) return bad;
    Group& group = *comm->group;
    const uint64_t number = (sending ? group.sends : group.receives)[peer]++;
    auto work = std::make_shared<Work>(Work{comm->group});
    work->messages.push_back({peer, sending, int(16384 + number % 16384), header_make("ncclSend", count, type),
                              count * type_bytes(type), at});
    return work_queue({stream, work, false});
}

constexpr int rendezvous_tag = 40000;  // on MPI_COMM_WORLD

}  // namespace emu::nccl

inline const char* ncclGetErrorString(ncclResult_t result) {
    constexpr const char* texts[] = {"no error",         "unhandled cuda error", "unhandled system error", "internal error",
                                     "invalid argument", "invalid usage",        "remote process exited or there was a network error",
                                     "NCCL operation in progress"};
    return texts[result];
}
inline const char* ncclGetLastError(ncclComm_t) { return emu::nccl::calls().refused.c_str(); }
inline ncclResult_t ncclGetVersion(int* version) {
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}

// The id is who made it and a number. Its maker must be rank 0 of the communicator: the others ask it who takes part.
inline ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    int maker[2] = {0, emu::nccl::calls().ids++};
    MPI_Comm_rank(MPI_COMM_WORLD, &maker[0]);
    *id = {};
    memcpy(id->internal, maker, sizeof maker);
    return ncclSuccess;
}

inline ncclResult_t ncclCommInitRank(ncclComm_t* comm, int size, ncclUniqueId id, int rank) {
    using namespace emu::nccl;
    if (size < 1 || rank < 0 || rank >= size) return refuse(ncclInvalidArgument, emu::text("rank %d of %d", rank, size));
    int maker[2], me;
    memcpy(maker, id.internal, sizeof maker);
    MPI_Comm_rank(MPI_COMM_WORLD, &me);
    if ((rank == 0) != (me == maker[0])) return refuse(ncclInvalidUsage, "rank 0 must be who called ncclGetUniqueId");
    const int tag = rendezvous_tag + maker[1] % 10000;
    std::vector<int> ranks(size, -1);  // in MPI_COMM_WORLD
    ranks[rank] = me;
    if (rank == 0) {
        for (int i = 1; i < size; i++) {
            int both[2];
            MPI_Recv(both, 2, MPI_INT, MPI_ANY_SOURCE, tag, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
            if (both[0] < size) ranks[both[0]] = both[1];
        }
        for (int i = 1; i < size; i++)
            if (ranks[i] >= 0) MPI_Send(ranks.data(), size, MPI_INT, ranks[i], tag, MPI_COMM_WORLD);
    } else {
        const int both[2] = {rank, me};
        MPI_Send(both, 2, MPI_INT, maker[0], tag, MPI_COMM_WORLD);
        MPI_Recv(ranks.data(), size, MPI_INT, maker[0], tag, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    }
    if (std::find(ranks.begin(), ranks.end(), -1) != ranks.end()) return refuse(ncclInvalidUsage, "two ranks of one number");
    MPI_Group world, own;
    MPI_Comm_group(MPI_COMM_WORLD, &world);
    MPI_Group_incl(world, size, ranks.data(), &own);
    auto group = std::make_shared<Group>();
    MPI_Comm_create_group(MPI_COMM_WORLD, own, tag, &group->mpi);
    group->rank = rank;
    group->size = size;
    group->sends.resize(size);
    group->receives.resize(size);
    *comm = new ncclComm{group};
    return ncclSuccess;
}

inline ncclResult_t ncclCommCount(ncclComm_t comm, int* size) {
    *size = comm->group->size;
    return ncclSuccess;
}
inline ncclResult_t ncclCommUserRank(ncclComm_t comm, int* rank) {
    *rank = comm->group->rank;
    return ncclSuccess;
}
inline ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) {
    *error = ncclSuccess;
    return ncclSuccess;
}

// What is still queued is dropped. MPI_Finalize frees the ranks' communicator.
inline ncclResult_t ncclCommAbort(ncclComm_t comm) {
    comm->group->ended = true;
    delete comm;
    return ncclSuccess;
}
inline ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    cudaDeviceSynchronize();
    return ncclCommAbort(comm);
}

inline ncclResult_t ncclGroupStart() {
    emu::nccl::calls().depth++;
    return ncclSuccess;
}
inline ncclResult_t ncclGroupEnd() {
    emu::nccl::Calls& calls = emu::nccl::calls();
    if (calls.depth == 0) return emu::nccl::refuse(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
    if (--calls.depth == 0) emu::nccl::queued_flush(calls);
    return ncclSuccess;
}

inline ncclResult_t ncclSend(const void* from, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
    char* at = static_cast<char*>(const_cast<void*>(from));
    return emu::nccl::send_or_receive("ncclSend", true, at, count, type, peer, comm, stream);
}
inline ncclResult_t ncclRecv(void* to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
    return emu::nccl::send_or_receive("ncclRecv", false, static_cast<char*>(to), count, type, peer, comm, stream);
}

inline ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t comm,
                                  cudaStream_t stream) {
    using namespace emu::nccl;
    const size_t ranks = comm ? comm->group->size : 1;
    if (const ncclResult_t bad = arguments_check("ncclAllGather", comm, {{from, count}, {to, ranks * count}}, type, 0)) return bad;
    const Header header = header_make("ncclAllGather", count, type);
    const size_t bytes = count * type_bytes(type);
    char *own = static_cast<char*>(const_cast<void*>(from)), *slots = static_cast<char*>(to);
    char* own_slot = slots + comm->group->rank * bytes;
    return work_queue(collective(
        comm, stream, header, [=](int) { return own; }, [=](int peer) { return slots + peer * bytes; },
        [=](const Work&) { device_copy(header, own_slot, own, bytes, own_slot); }));
}

inline ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                                      ncclComm_t comm, cudaStream_t stream) {
    using namespace emu::nccl;
    const size_t ranks = comm ? comm->group->size : 1;
    if (const ncclResult_t bad = arguments_check("ncclReduceScatter", comm, {{from, ranks * count}, {to, count}}, type, 0))
        return bad;
    if (op != ncclSum || (type != ncclFloat32 && type != ncclBfloat16 && type != ncclFloat16))
        return refuse(ncclInvalidArgument, "ncclReduceScatter: the emulator sums float32, bfloat16 and float16 only");
    const Header header = header_make("ncclReduceScatter", count, type);
    const size_t bytes = count * type_bytes(type);
    char *slots = static_cast<char*>(const_cast<void*>(from)), *out = static_cast<char*>(to);
    return work_queue(collective(
        comm, stream, header, [=](int peer) { return slots + peer * bytes; }, [](int) { return nullptr; },
        [=](const Work& work) { sum_in_order(work, header, out, slots + work.group->rank * bytes); }));
}

inline ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                                  cudaStream_t stream) {
    using namespace emu::nccl;
    if (const ncclResult_t bad = arguments_check("ncclAllReduce", comm, {{from, count}, {to, count}}, type, 0)) return bad;
    if (op != ncclSum || (type != ncclFloat32 && type != ncclBfloat16 && type != ncclFloat16))
        return refuse(ncclInvalidArgument, "ncclAllReduce: the emulator sums float32, bfloat16 and float16 only");
    const Header header = header_make("ncclAllReduce", count, type);
    char *in = static_cast<char*>(const_cast<void*>(from)), *out = static_cast<char*>(to);
    return work_queue(collective(
        comm, stream, header, [=](int) { return in; }, [](int) { return nullptr; },
        [=](const Work& work) { sum_in_order(work, header, out, in); }));
}

inline ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                                  cudaStream_t stream) {
    using namespace emu::nccl;
    const bool sends = comm && comm->group->rank == root;
    if (const ncclResult_t bad = arguments_check("ncclBroadcast", comm, {{sends ? from : to, count}, {to, count}}, type, root))
        return bad;
    const Header header = header_make("ncclBroadcast", count, type, root);
    char *in = static_cast<char*>(const_cast<void*>(from)), *out = static_cast<char*>(to);
    return work_queue(collective(
        comm, stream, header, [=](int) { return in; }, [=](int) { return out; },
        [=](const Work& work) {
            if (work.group->rank == root) device_copy(header, out, in, count * type_bytes(type), out);
        }));
}
