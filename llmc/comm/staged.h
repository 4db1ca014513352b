// Tensors by MPI, through pinned memory of the host: for ranks that share a GPU, as tests do, and where NCCL is missing.
// From the GPU at begin; exchange and back to the GPU at finish, where the host waits.
#pragma once
#include <functional>

#include "llmc/comm/comm.h"
#include "llmc/device.h"

// Pinned memory, kept from one request to the next.
struct PinnedPool {
    struct Block {
        std::shared_ptr<char> memory;
        size_t bytes = 0;
    };
    std::vector<Block> blocks;
};

inline std::shared_ptr<char> pinned_take(PinnedPool& pool, size_t bytes) {
    for (const PinnedPool::Block& block : pool.blocks)
        if (block.bytes >= bytes && block.memory.use_count() == 1) return block.memory;
    std::erase_if(pool.blocks, [](const PinnedPool::Block& block) { return block.memory.use_count() == 1; });  // too small
    void* memory = nullptr;
    cuda_check(cudaMallocHost(&memory, std::max<size_t>(1, bytes)), "cudaMallocHost");
    pool.blocks.push_back({std::shared_ptr<char>(static_cast<char*>(memory), [](char* p) { cudaFreeHost(p); }), bytes});
    return pool.blocks.back().memory;
}

inline void staged_copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, Stream stream) {
    if (bytes) cuda_check(cudaMemcpyAsync(to, from, bytes, kind, stream.handle), "cudaMemcpyAsync of a staged tensor");
}

// The slots [size][bytes] of all ranks but this one.
inline void staged_copy_others(const Comm& comm, char* to, const char* from, size_t bytes, cudaMemcpyKind kind, Stream stream) {
    const size_t before = comm.rank * bytes, after = before + bytes;
    staged_copy(to, from, before, kind, stream);
    staged_copy(to + after, from + after, (comm.size - comm.rank - 1) * bytes, kind, stream);
}

// Each puts the way from the GPU on the stream, and returns the rest, which waits for it.
using StagedRest = std::function<void(Comm&, const char* what)>;

inline StagedRest staged_all_gather(PinnedPool& pool, const Comm& comm, char* slots, size_t bytes, Stream stream) {
    const std::shared_ptr<char> host = pinned_take(pool, comm.size * bytes);
    const size_t own = comm.rank * bytes;
    staged_copy(host.get() + own, slots + own, bytes, cudaMemcpyDeviceToHost, stream);
    return [=](Comm& comm, const char* what) {
        stream_synchronize(stream);
        Request request = all_gather_begin(comm, host.get(), bytes);
        request_finish(comm, request, what);
        staged_copy_others(comm, slots, host.get(), bytes, cudaMemcpyHostToDevice, stream);
    };
}

inline StagedRest staged_all_to_all(PinnedPool& pool, const Comm& comm, char* receive, const char* send, size_t bytes,
                                    Stream stream) {
    const std::shared_ptr<char> from = pinned_take(pool, comm.size * bytes), to = pinned_take(pool, comm.size * bytes);
    staged_copy_others(comm, from.get(), send, bytes, cudaMemcpyDeviceToHost, stream);
    return [=](Comm& comm, const char* what) {
        stream_synchronize(stream);
        Request request = all_to_all_begin(comm, to.get(), from.get(), bytes);
        request_finish(comm, request, what);
        staged_copy_others(comm, receive, to.get(), bytes, cudaMemcpyHostToDevice, stream);
    };
}

// Sums in rank order.
inline StagedRest staged_all_reduce_sum(PinnedPool& pool, float* x, size_t n, Stream stream) {
    const std::shared_ptr<char> host = pinned_take(pool, n * sizeof(float));
    staged_copy(host.get(), x, n * sizeof(float), cudaMemcpyDeviceToHost, stream);
    return [=](Comm& comm, const char*) {
        stream_synchronize(stream);
        all_reduce_sum(comm, reinterpret_cast<float*>(host.get()), n);
        staged_copy(x, host.get(), n * sizeof(float), cudaMemcpyHostToDevice, stream);
    };
}
