// What the multi-rank tests of communication share: MPI wrapped (PMPI) to count what it is handed, and data that every rank
// can compute for every other. Include it first.
#pragma once
// clang-format off
#include "mpi_main.h"  // first: doctest does not compile under the macros of llmc/check.h
// clang-format on

#include <algorithm>
#include <cstring>
#include <vector>

inline uint64_t isend_bytes = 0, other_sends = 0;

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

inline Comm world_make() {
    Comm world = comm_world();
    world.timeout_s = 60;  // a rank whose check threw leaves the others waiting
    return world;
}

// What MPI was handed since this was made.
struct Sent {
    uint64_t bytes_before = isend_bytes, others_before = other_sends;
    uint64_t bytes() const { return other_sends == others_before ? isend_bytes - bytes_before : UINT64_MAX; }
};

inline uint64_t mix(uint64_t a, uint64_t b) {
    uint64_t x = (a + 1) * 0x9E3779B97F4A7C15u + b;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

// Of rank `rank`'s tensor, n values from `first`: bell-shaped, with outliers, known to all.
inline std::vector<float> tensor(int rank, size_t n, size_t first = 0) {
    std::vector<float> x(n);
    for (size_t i = 0; i < n; i++) {
        const uint64_t bits = mix(rank, first + i);
        const float bell = float(bits & 0xffff) + float(bits >> 16 & 0xffff) + float(bits >> 32 & 0xffff) - 98302.5f;
        x[i] = bell * ((first + i) % 97 == 5 ? 1e-3f : 3e-5f);
    }
    return x;
}

inline std::vector<uint8_t> pattern(int key, size_t bytes) {
    std::vector<uint8_t> data(bytes);
    for (size_t i = 0; i < bytes; i++) data[i] = uint8_t(mix(key + 1000, i));
    return data;
}

inline bool same(const void* a, const void* b, size_t bytes) { return bytes == 0 || memcmp(a, b, bytes) == 0; }
inline bool same(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && same(a.data(), b.data(), a.size() * sizeof(float));
}
