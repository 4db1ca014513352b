// The communication seam on MPI: groups of ranks, byte exchanges as begin / finish, and small deterministic reductions.
//
// A build without MPI (-DLLMC_NO_MPI) has the same functions for one rank. Every rank of a group calls the same functions
// in the same order. Sums over ranks are formed in rank order, so all ranks hold the same bits.
#pragma once
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "llmc/check.h"
#include "llmc/device.h"

#ifdef LLMC_NO_MPI
using CommHandle = int;
#else
#include <mpi.h>
using CommHandle = MPI_Comm;
#endif

struct Comm {
    int rank = 0, size = 1;
    CommHandle handle{};
    const char* axis = "world";      // "tp", "dp", "world": for messages
    double timeout_s = 600;          // of one collective
    size_t piece = size_t(1) << 30;  // longest single message, bytes: MPI counts in int
    uint64_t sequence = 0;           // collectives begun
    int world_rank = 0;              // for messages
};

// A collective in flight. Buffers belong to it until request_finish.
struct Request {
    uint64_t sequence = 0;
    size_t sent_bytes = 0;  // payload this rank handed to the transport
#ifndef LLMC_NO_MPI
    std::vector<MPI_Request> messages;
    std::vector<int> peers;  // of each message
#endif
};

// Ends the run on all ranks from any one of them.
[[noreturn]] inline void comm_abort(const std::string& text) {
    int rank = 0;
#ifndef LLMC_NO_MPI
    int running = 0;
    MPI_Initialized(&running);
    if (running) MPI_Comm_rank(MPI_COMM_WORLD, &rank);
#endif
    fprintf(stderr, "train_gpt: rank %d: %s\n", rank, text.c_str());
    fflush(nullptr);
#ifndef LLMC_NO_MPI
    if (running) MPI_Abort(MPI_COMM_WORLD, 1);
#endif
    _Exit(1);
}

#ifdef LLMC_NO_MPI
inline void comm_init(int*, char***) {}
inline void comm_finalize() {}
inline Comm comm_world() { return {}; }
inline Comm comm_split(const Comm&, int, const char* axis) {
    Comm comm;
    comm.axis = axis;
    return comm;
}
inline int comm_ranks_on_host(const Comm&) { return 1; }
inline Request all_gather_begin(Comm&, void*, size_t, Stream) { return {}; }
inline Request all_to_all_begin(Comm&, void*, const void*, size_t, Stream) { return {}; }
inline void request_finish(Comm&, Request&, const char*) {}
inline void broadcast(Comm&, void*, size_t, int) {}
#else

inline void comm_init(int* argc, char*** argv) {
    int level = 0;
    MPI_Init_thread(argc, argv, MPI_THREAD_FUNNELED, &level);  // threads compute, the main one communicates
    check(level >= MPI_THREAD_FUNNELED, "this MPI has no MPI_THREAD_FUNNELED: use one that was built with threads");
}
inline void comm_finalize() { MPI_Finalize(); }

inline Comm comm_wrap(MPI_Comm handle, const char* axis) {
    Comm comm;
    comm.handle = handle;
    comm.axis = axis;
    MPI_Comm_rank(handle, &comm.rank);
    MPI_Comm_size(handle, &comm.size);
    MPI_Comm_rank(MPI_COMM_WORLD, &comm.world_rank);
    return comm;
}
inline Comm comm_world() { return comm_wrap(MPI_COMM_WORLD, "world"); }

// The ranks of `from` that give the same color, in their old order. Collective.
inline Comm comm_split(const Comm& from, int color, const char* axis) {
    MPI_Comm handle;
    MPI_Comm_split(from.handle, color, from.rank, &handle);
    Comm comm = comm_wrap(handle, axis);
    comm.timeout_s = from.timeout_s;
    return comm;
}

inline int comm_ranks_on_host(const Comm& world) {
    MPI_Comm host;
    MPI_Comm_split_type(world.handle, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host);
    int ranks = 1;
    MPI_Comm_size(host, &ranks);
    MPI_Comm_free(&host);
    return ranks;
}

// Posts the sends and receives of `bytes` between this rank and every peer. `send(peer)` and `receive(peer)` give the
// addresses. Receives go first, so that a message finds its place.
template <class Send, class Receive>
Request exchange_begin(Comm& comm, size_t bytes, Send send, Receive receive) {
    Request request;
    request.sequence = ++comm.sequence;
    const int tag = int(request.sequence % 32768);
    for (bool sending : {false, true}) {
        for (int step = 1; step < comm.size; step++) {
            const int peer = (comm.rank + (sending ? step : comm.size - step)) % comm.size;  // all ranks busy at every step
            for (size_t at = 0; at < bytes; at += comm.piece) {
                const int count = int(std::min(comm.piece, bytes - at));
                MPI_Request message;
                if (sending) {
                    MPI_Isend(send(peer) + at, count, MPI_BYTE, peer, tag, comm.handle, &message);
                    request.sent_bytes += count;
                } else {
                    MPI_Irecv(receive(peer) + at, count, MPI_BYTE, peer, tag, comm.handle, &message);
                }
                request.messages.push_back(message);
                request.peers.push_back(peer);
            }
        }
    }
    return request;
}

// slots [size][bytes]: the own slot is filled, the others are received.
inline Request all_gather_begin(Comm& comm, void* slots, size_t bytes, Stream) {
    char* base = static_cast<char*>(slots);
    return exchange_begin(
        comm, bytes, [=, &comm](int) { return base + comm.rank * bytes; }, [=](int peer) { return base + peer * bytes; });
}

// Slot p of `send` [size][bytes] goes to rank p, into its slot of this rank's number. Own slots are not touched.
inline Request all_to_all_begin(Comm& comm, void* receive, const void* send, size_t bytes, Stream) {
    char* to = static_cast<char*>(receive);
    const char* from = static_cast<const char*>(send);
    return exchange_begin(
        comm, bytes, [=](int peer) { return from + peer * bytes; }, [=](int peer) { return to + peer * bytes; });
}

// Waits, yielding the core: ranks may outnumber cores. After the timeout names what waits for whom and ends the run.
inline void request_finish(Comm& comm, Request& request, const char* what) {
    const auto begin = std::chrono::steady_clock::now();
    for (int done = request.messages.empty(), polls = 1; !done; polls++) {
        MPI_Testall(int(request.messages.size()), request.messages.data(), &done, MPI_STATUSES_IGNORE);
        if (done) break;
        sched_yield();
        if (polls % 1024 != 0) continue;
        if (std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() < comm.timeout_s) continue;
        std::string missing;
        for (size_t i = 0; i < request.messages.size(); i++) {
            int complete = 0;
            if (request.messages[i] != MPI_REQUEST_NULL)
                MPI_Request_get_status(request.messages[i], &complete, MPI_STATUS_IGNORE);
            const std::string peer = " " + std::to_string(request.peers[i]);
            if (!complete && request.messages[i] != MPI_REQUEST_NULL && (missing + " ").find(peer + " ") == std::string::npos)
                missing += peer;
        }
        comm_abort(format_text(
            "%s rank %d waited over %g s in '%s' (collective %llu of the %s group) for rank%s: is it alive? "
            "Raise --comm-timeout if it is only slow",
            comm.axis, comm.rank, comm.timeout_s, what, (unsigned long long)request.sequence, comm.axis, missing.c_str()));
    }
    request.messages.clear();
}

inline void broadcast(Comm& comm, void* data, size_t bytes, int root) {
    char* base = static_cast<char*>(data);
    Request request;
    request.sequence = ++comm.sequence;
    for (int peer = 0; peer < comm.size; peer++) {
        if (peer == comm.rank || (comm.rank != root && peer != root)) continue;
        for (size_t at = 0; at < bytes; at += comm.piece) {
            const int count = int(std::min(comm.piece, bytes - at)), tag = int(request.sequence % 32768);
            MPI_Request message;
            if (comm.rank == root) {
                MPI_Isend(base + at, count, MPI_BYTE, peer, tag, comm.handle, &message);
            } else {
                MPI_Irecv(base + at, count, MPI_BYTE, peer, tag, comm.handle, &message);
            }
            request.messages.push_back(message);
            request.peers.push_back(peer);
        }
    }
    request_finish(comm, request, "broadcast");
}
#endif

// One value of each rank, in rank order.
template <class T>
std::vector<T> gather_values(Comm& comm, T own, const char* what) {
    std::vector<T> all(comm.size);
    all[comm.rank] = own;
    Request request = all_gather_begin(comm, all.data(), sizeof(T), {});
    request_finish(comm, request, what);
    return all;
}

inline double all_reduce_sum(Comm& comm, double x) {
    double sum = 0;
    for (double value : gather_values(comm, x, "sum of a number")) sum += value;
    return sum;
}

inline double all_reduce_max(Comm& comm, double x) {
    double largest = -INFINITY;
    for (double value : gather_values(comm, x, "maximum of a number")) largest = std::max(largest, value);
    return largest;
}

// Each rank's text, on every rank.
inline std::vector<std::string> gather_text(Comm& comm, const std::string& own) {
    const std::vector<size_t> sizes = gather_values(comm, own.size(), "lengths of texts");
    const size_t slot = *std::max_element(sizes.begin(), sizes.end());
    std::vector<char> slots(slot * comm.size);
    std::copy(own.begin(), own.end(), slots.begin() + slot * comm.rank);
    Request request = all_gather_begin(comm, slots.data(), slot, {});
    request_finish(comm, request, "texts");
    std::vector<std::string> texts;
    for (int r = 0; r < comm.size; r++) texts.emplace_back(&slots[slot * r], sizes[r]);
    return texts;
}

// x [n] becomes its sum over the ranks, in float32. Two-shot: each rank sums its stripe in rank order, then the sums are
// gathered. In blocks, so that the receive buffer stays small beside the gradients.
inline void all_reduce_sum(Comm& comm, float* x, size_t n) {
    if (comm.size == 1) return;
    const size_t block = size_t(comm.size) << 20;  // values
    std::vector<float> received(std::min(block, n + comm.size));
    for (size_t at = 0; at < n; at += block) {
        const size_t count = std::min(block, n - at), whole = count / comm.size;
        float* begin = x + at;
        float* own = begin + comm.rank * whole;
        if (whole > 0) {
            Request request = all_to_all_begin(comm, received.data(), begin, whole * sizeof(float), {});
            request_finish(comm, request, "gradients, reduce-scatter");
            std::copy_n(own, whole, &received[comm.rank * whole]);
#pragma omp parallel for simd
            for (size_t i = 0; i < whole; i++) {
                float sum = received[i];
                for (int r = 1; r < comm.size; r++) sum += received[r * whole + i];
                own[i] = sum;
            }
            request = all_gather_begin(comm, begin, whole * sizeof(float), {});
            request_finish(comm, request, "gradients, all-gather");
        }
        const size_t rest = count - whole * comm.size;  // fewer than ranks: everybody sums them
        if (rest == 0) continue;
        float* tail = begin + whole * comm.size;
        std::copy_n(tail, rest, &received[comm.rank * rest]);
        Request request = all_gather_begin(comm, received.data(), rest * sizeof(float), {});
        request_finish(comm, request, "gradients, last values");
        for (size_t i = 0; i < rest; i++) {
            float sum = received[i];
            for (int r = 1; r < comm.size; r++) sum += received[r * rest + i];
            tail[i] = sum;
        }
    }
}
