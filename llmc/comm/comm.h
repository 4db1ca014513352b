// Communication of what is in the host's memory, by MPI: groups of ranks, byte exchanges as begin / finish, and small
// deterministic reductions. Tensors in the device's memory: tensors.h.
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
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "llmc/check.h"

#ifdef LLMC_NO_MPI
using CommHandle = int;
#else
#include <mpi.h>
using CommHandle = MPI_Comm;
#endif

enum class Transport { mpi, nccl };  // of tensors between GPUs

struct TensorLink;  // tensors_gpu.h

struct Comm {
    int rank = 0, size = 1;
    CommHandle handle{};
    const char* axis = "world";      // "tp", "dp", "world": for messages
    double timeout_s = 600;          // of one collective
    size_t piece = size_t(1) << 30;  // longest single message, bytes: MPI counts in int
    uint64_t sequence = 0;           // collectives begun
    Transport transport = Transport::mpi;
    std::shared_ptr<TensorLink> link;  // of tensors, by comm_tensors_open; null on the cpu target
};

struct HostRanks {
    int rank = 0, size = 1;
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
inline HostRanks comm_host_ranks(const Comm&) { return {}; }
inline Request all_gather_begin(Comm&, void*, size_t) { return {}; }
inline Request all_to_all_begin(Comm&, void*, const void*, size_t) { return {}; }
inline void request_finish(Comm&, Request&, const char*) {}
inline void broadcast(Comm&, void*, size_t, int) {}
#else

inline void comm_init(int* argc, char*** argv) {
#ifdef LLMC_CUDA
    const int wanted = MPI_THREAD_MULTIPLE;  // the watchdog asks around while the main thread waits
#else
    const int wanted = MPI_THREAD_FUNNELED;  // threads compute, the main one communicates
#endif
    int level = 0;
    MPI_Init_thread(argc, argv, wanted, &level);
    check(level >= wanted, "this MPI cannot be called from %s: use one that was built with threads",
          wanted == MPI_THREAD_MULTIPLE ? "several threads" : "a program with threads");
}
inline void comm_finalize() { MPI_Finalize(); }

inline Comm comm_wrap(MPI_Comm handle, const char* axis) {
    Comm comm;
    comm.handle = handle;
    comm.axis = axis;
    MPI_Comm_rank(handle, &comm.rank);
    MPI_Comm_size(handle, &comm.size);
    return comm;
}
inline Comm comm_world() { return comm_wrap(MPI_COMM_WORLD, "world"); }

// Of the ranks in `group`, those on this rank's host, and this rank's number among them. Collective.
inline HostRanks comm_host_ranks(const Comm& group) {
    HostRanks ranks;
    if (group.size == 1) return ranks;  // works without MPI_Init
    MPI_Comm host;
    MPI_Comm_split_type(group.handle, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host);
    MPI_Comm_rank(host, &ranks.rank);
    MPI_Comm_size(host, &ranks.size);
    MPI_Comm_free(&host);
    return ranks;
}

// The ranks of `from` that give the same color, in their old order. Collective.
inline Comm comm_split(const Comm& from, int color, const char* axis) {
    MPI_Comm handle;
    MPI_Comm_split(from.handle, color, from.rank, &handle);
    Comm comm = comm_wrap(handle, axis);
    comm.timeout_s = from.timeout_s;
    comm.piece = from.piece;
    // Over TCP, Open MPI sends what exceeds its eager limit of 64 KB in one direction at a time. All ranks cut alike.
    int same_host = comm_host_ranks(comm).size == comm.size, all_same_host = 0;
    MPI_Allreduce(&same_host, &all_same_host, 1, MPI_INT, MPI_MIN, handle);
    if (!all_same_host) comm.piece = std::min<size_t>(comm.piece, 60 << 10);
    return comm;
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
inline Request all_gather_begin(Comm& comm, void* slots, size_t bytes) {
    char* base = static_cast<char*>(slots);
    return exchange_begin(
        comm, bytes, [=, &comm](int) { return base + comm.rank * bytes; }, [=](int peer) { return base + peer * bytes; });
}

// Slot p of `send` [size][bytes] goes to rank p, into its slot of this rank's number. Own slots are not touched.
inline Request all_to_all_begin(Comm& comm, void* receive, const void* send, size_t bytes) {
    char* to = static_cast<char*>(receive);
    const char* from = static_cast<const char*>(send);
    return exchange_begin(
        comm, bytes, [=](int peer) { return from + peer * bytes; }, [=](int peer) { return to + peer * bytes; });
}

// The ranks of the run that unfinished messages wait for: "1, 3".
inline std::string request_missing(const Comm& comm, const Request& request) {
    std::set<int> missing;
    MPI_Group group, world;
    MPI_Comm_group(comm.handle, &group);
    MPI_Comm_group(MPI_COMM_WORLD, &world);
    for (size_t i = 0; i < request.messages.size(); i++) {
        int complete = 0, rank = 0;
        MPI_Request_get_status(request.messages[i], &complete, MPI_STATUS_IGNORE);
        MPI_Group_translate_ranks(group, 1, &request.peers[i], world, &rank);
        if (!complete) missing.insert(rank);
    }
    std::string text;
    for (int rank : missing) text += (text.empty() ? "" : ", ") + std::to_string(rank);
    return text;
}

// Waits, yielding the core: ranks may outnumber cores. After the timeout names what waits for whom and ends the run.
inline void request_finish(Comm& comm, Request& request, const char* what) {
    if (request.messages.empty()) return;  // a group of one rank works without MPI_Init
    const auto begin = std::chrono::steady_clock::now();
    for (int done = 0, polls = 1;; polls++) {
        MPI_Testall(int(request.messages.size()), request.messages.data(), &done, MPI_STATUSES_IGNORE);
        if (done) break;
        sched_yield();
        if (polls % 1024 != 0) continue;
        if (std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() < comm.timeout_s) continue;
        const std::string missing = request_missing(comm, request);
        comm_abort(format_text(
            "waited over %g s in '%s', collective %llu of its %s group, for rank %s: is it alive? If it is only slow, raise "
            "--comm-timeout",
            comm.timeout_s, what, static_cast<unsigned long long>(request.sequence), comm.axis, missing.c_str()));
    }
    request.messages.clear();
}

// `bytes` of root's data, on every rank.
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

inline int comm_ranks_on_host(const Comm& group) { return comm_host_ranks(group).size; }
inline int comm_rank_on_host(const Comm& group) { return comm_host_ranks(group).rank; }

// One value of each rank, in rank order.
template <class T>
std::vector<T> gather_values(Comm& comm, T own, const char* what) {
    std::vector<T> all(comm.size);
    all[comm.rank] = own;
    Request request = all_gather_begin(comm, all.data(), sizeof(T));
    request_finish(comm, request, what);
    return all;
}

inline void barrier(Comm& comm) { gather_values(comm, char(0), "barrier"); }

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
    Request request = all_gather_begin(comm, slots.data(), slot);
    request_finish(comm, request, "texts");
    std::vector<std::string> texts;
    for (int r = 0; r < comm.size; r++) texts.emplace_back(slots.data() + slot * r, sizes[r]);
    return texts;
}

// x [n] becomes its sum over the ranks, in float32. Two-shot: each rank sums its stripe in rank order, then the sums are
// gathered. In blocks of at most `stripe` values a rank, so that the receive buffer stays small beside the gradients.
inline void all_reduce_sum(Comm& comm, float* x, size_t n, size_t stripe = size_t(1) << 20) {
    if (comm.size == 1) return;
    const auto sum_in_order = [&](float* out, const float* slots, size_t count) {
#pragma omp parallel for simd
        for (size_t i = 0; i < count; i++) {
            float sum = slots[i];
            for (int r = 1; r < comm.size; r++) sum += slots[size_t(r) * count + i];
            out[i] = sum;
        }
    };
    stripe = std::min(stripe, n / comm.size);
    std::vector<float> received(stripe * comm.size);
    while (stripe > 0) {
        float* own = x + comm.rank * stripe;
        Request request = all_to_all_begin(comm, received.data(), x, stripe * sizeof(float));
        request_finish(comm, request, "sum over ranks, reduce-scatter");
        std::copy_n(own, stripe, &received[comm.rank * stripe]);
        sum_in_order(own, received.data(), stripe);
        request = all_gather_begin(comm, x, stripe * sizeof(float));
        request_finish(comm, request, "sum over ranks, all-gather");
        x += stripe * comm.size;
        n -= stripe * comm.size;
        stripe = std::min(stripe, n / comm.size);
    }
    if (n == 0) return;
    received.resize(n * comm.size);  // the rest are fewer than the ranks: all ranks sum them
    std::copy_n(x, n, &received[comm.rank * n]);
    Request request = all_gather_begin(comm, received.data(), n * sizeof(float));
    request_finish(comm, request, "sum over ranks, last values");
    sum_in_order(x, received.data(), n);
}
