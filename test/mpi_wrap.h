// What the multi-rank tests of communication share: MPI wrapped (PMPI) to count what it is handed, data that every rank can
// compute for every other, memory of the device, and runs within a run. Include it first.
#pragma once
// clang-format off
#include "mpi_main.h"  // first: doctest does not compile under the macros of llmc/check.h
// clang-format on

#include <sys/wait.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <vector>

#include "llmc/device.h"
#include "llmc/dtype.h"

inline uint64_t isend_bytes = 0, other_sends = 0;

// What this rank hands to MPI. The transport is meant to send by MPI_Isend alone: other ways for payload to leave are seen.
#define MEANT_NOT(name, parameters, ...) \
    int MPI_##name parameters {          \
        other_sends++;                   \
        return PMPI_##name(__VA_ARGS__); \
    }
extern "C" {
int MPI_Isend(const void* data, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm, MPI_Request* request) {
    int size = 0;
    PMPI_Type_size(type, &size);
    isend_bytes += uint64_t(count) * size;
    return PMPI_Isend(data, count, type, to, tag, comm, request);
}
MEANT_NOT(Send, (const void* data, int n, MPI_Datatype type, int to, int tag, MPI_Comm comm), data, n, type, to, tag, comm)
MEANT_NOT(Ssend, (const void* data, int n, MPI_Datatype type, int to, int tag, MPI_Comm comm), data, n, type, to, tag, comm)
MEANT_NOT(Rsend, (const void* data, int n, MPI_Datatype type, int to, int tag, MPI_Comm comm), data, n, type, to, tag, comm)
MEANT_NOT(Bsend, (const void* data, int n, MPI_Datatype type, int to, int tag, MPI_Comm comm), data, n, type, to, tag, comm)
MEANT_NOT(Issend, (const void* data, int n, MPI_Datatype type, int to, int tag, MPI_Comm comm, MPI_Request* request), data, n,
          type, to, tag, comm, request)
MEANT_NOT(Irsend, (const void* data, int n, MPI_Datatype type, int to, int tag, MPI_Comm comm, MPI_Request* request), data, n,
          type, to, tag, comm, request)
MEANT_NOT(Ibsend, (const void* data, int n, MPI_Datatype type, int to, int tag, MPI_Comm comm, MPI_Request* request), data, n,
          type, to, tag, comm, request)
MEANT_NOT(Sendrecv,
          (const void* data, int n, MPI_Datatype type, int to, int tag, void* out, int m, MPI_Datatype out_type, int from,
           int out_tag, MPI_Comm comm, MPI_Status* status),
          data, n, type, to, tag, out, m, out_type, from, out_tag, comm, status)
MEANT_NOT(Bcast, (void* data, int n, MPI_Datatype type, int root, MPI_Comm comm), data, n, type, root, comm)
MEANT_NOT(Ibcast, (void* data, int n, MPI_Datatype type, int root, MPI_Comm comm, MPI_Request* request), data, n, type, root,
          comm, request)
MEANT_NOT(Allreduce, (const void* data, void* out, int n, MPI_Datatype type, MPI_Op op, MPI_Comm comm), data, out, n, type, op,
          comm)
MEANT_NOT(Iallreduce, (const void* data, void* out, int n, MPI_Datatype type, MPI_Op op, MPI_Comm comm, MPI_Request* request),
          data, out, n, type, op, comm, request)
MEANT_NOT(Reduce_scatter_block, (const void* data, void* out, int n, MPI_Datatype type, MPI_Op op, MPI_Comm comm), data, out, n,
          type, op, comm)
MEANT_NOT(Ireduce_scatter_block,
          (const void* data, void* out, int n, MPI_Datatype type, MPI_Op op, MPI_Comm comm, MPI_Request* request), data, out, n,
          type, op, comm, request)
MEANT_NOT(Allgather, (const void* data, int n, MPI_Datatype type, void* out, int m, MPI_Datatype out_type, MPI_Comm comm), data,
          n, type, out, m, out_type, comm)
MEANT_NOT(Iallgather,
          (const void* data, int n, MPI_Datatype type, void* out, int m, MPI_Datatype out_type, MPI_Comm comm,
           MPI_Request* request),
          data, n, type, out, m, out_type, comm, request)
MEANT_NOT(Alltoall, (const void* data, int n, MPI_Datatype type, void* out, int m, MPI_Datatype out_type, MPI_Comm comm), data, n,
          type, out, m, out_type, comm)
MEANT_NOT(Ialltoall,
          (const void* data, int n, MPI_Datatype type, void* out, int m, MPI_Datatype out_type, MPI_Comm comm,
           MPI_Request* request),
          data, n, type, out, m, out_type, comm, request)
MEANT_NOT(Allgatherv,
          (const void* data, int n, MPI_Datatype type, void* out, const int* m, const int* at, MPI_Datatype out_type,
           MPI_Comm comm),
          data, n, type, out, m, at, out_type, comm)
MEANT_NOT(Iallgatherv,
          (const void* data, int n, MPI_Datatype type, void* out, const int* m, const int* at, MPI_Datatype out_type,
           MPI_Comm comm, MPI_Request* request),
          data, n, type, out, m, at, out_type, comm, request)
MEANT_NOT(Alltoallv,
          (const void* data, const int* n, const int* from, MPI_Datatype type, void* out, const int* m, const int* at,
           MPI_Datatype out_type, MPI_Comm comm),
          data, n, from, type, out, m, at, out_type, comm)
MEANT_NOT(Ialltoallv,
          (const void* data, const int* n, const int* from, MPI_Datatype type, void* out, const int* m, const int* at,
           MPI_Datatype out_type, MPI_Comm comm, MPI_Request* request),
          data, n, from, type, out, m, at, out_type, comm, request)
MEANT_NOT(Alltoallw,
          (const void* data, const int* n, const int* from, const MPI_Datatype* type, void* out, const int* m, const int* at,
           const MPI_Datatype* out_type, MPI_Comm comm),
          data, n, from, type, out, m, at, out_type, comm)
MEANT_NOT(Ialltoallw,
          (const void* data, const int* n, const int* from, const MPI_Datatype* type, void* out, const int* m, const int* at,
           const MPI_Datatype* out_type, MPI_Comm comm, MPI_Request* request),
          data, n, from, type, out, m, at, out_type, comm, request)
MEANT_NOT(Reduce, (const void* data, void* out, int n, MPI_Datatype type, MPI_Op op, int root, MPI_Comm comm), data, out, n, type,
          op, root, comm)
MEANT_NOT(Gather, (const void* data, int n, MPI_Datatype type, void* out, int m, MPI_Datatype out_type, int root, MPI_Comm comm),
          data, n, type, out, m, out_type, root, comm)
MEANT_NOT(Scatter, (const void* data, int n, MPI_Datatype type, void* out, int m, MPI_Datatype out_type, int root, MPI_Comm comm),
          data, n, type, out, m, out_type, root, comm)
MEANT_NOT(Put, (const void* data, int n, MPI_Datatype type, int to, MPI_Aint at, int m, MPI_Datatype out_type, MPI_Win window),
          data, n, type, to, at, m, out_type, window)
MEANT_NOT(Start, (MPI_Request * request), request)
MEANT_NOT(Startall, (int n, MPI_Request* requests), n, requests)
}
#undef MEANT_NOT

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
template <class T>
bool same(const std::vector<T>& a, const std::vector<T>& b) {
    return a.size() == b.size() && same(a.data(), b.data(), a.size() * sizeof(T));
}

// What the storage type keeps of the values.
inline std::vector<float> stored(std::vector<float> x) {
    for (float& value : x) value = float(floatX(value));
    return x;
}

// ---- the device ----

struct TestDevice {
    Device device = device_open(0);
    Stream stream = stream_make(device);
};
inline TestDevice& test_device() {
    static TestDevice device;
    return device;
}

// n values of T on the device.
template <class T>
struct OnDevice {
    size_t n;
    T* data;

    explicit OnDevice(size_t n) : n(n), data(static_cast<T*>(device_allocate(std::max<size_t>(1, n * sizeof(T))))) {}
    template <class S>
    explicit OnDevice(const std::vector<S>& values) : OnDevice(values.size()) {
        set(values);
    }
    OnDevice(const OnDevice&) = delete;
    OnDevice& operator=(const OnDevice&) = delete;
    ~OnDevice() { device_free(data, std::max<size_t>(1, n * sizeof(T))); }

    void resize(size_t count) {  // what was there is lost
        device_free(data, std::max<size_t>(1, n * sizeof(T)));
        n = count;
        data = static_cast<T*>(device_allocate(std::max<size_t>(1, n * sizeof(T))));
    }

    template <class S>
    void set(const std::vector<S>& values, size_t at = 0) {
        const std::vector<T> own(values.begin(), values.end());
        if (!own.empty()) device_upload(data + at, own.data(), own.size() * sizeof(T), test_device().stream);
    }
    std::vector<T> get() const {
        std::vector<T> own(n);
        if (n) device_download(own.data(), data, n * sizeof(T), test_device().stream);
        return own;
    }
    std::vector<float> floats() const {
        const std::vector<T> own = get();
        return std::vector<float>(own.begin(), own.end());
    }
};

// ---- a run of this program within a run, for what ends the process ----

struct NestedRun {
    int status;  // of the exit; -1: killed
    double seconds;
    std::string text;  // stdout and stderr
};

// `settings`, as in "NAME=x OTHER=y", are in the environment.
inline NestedRun run_nested(const std::string& settings, int ranks, const std::string& test_case) {
    // it must not see the outer run's variables
    const std::string command =
        "for v in $(env | sed -n 's/^\\(\\(OMPI\\|PMIX\\|ORTE\\|OPAL\\|PRTE\\)_[A-Za-z0-9_]*\\)=.*/\\1/p'); do unset $v; done; "
        ". '" PROJECT_ROOT "/scripts/mpi_env.sh'; OMP_NUM_THREADS=1 " +
        settings + " mpirun -np " + std::to_string(ranks) + " '" + std::filesystem::read_symlink("/proc/self/exe").string() +
        "' '--test-case=" + test_case + "' 2>&1 </dev/null";
    const auto begin = std::chrono::steady_clock::now();
    FILE* pipe = popen(command.c_str(), "r");
    REQUIRE(pipe);
    NestedRun run{};
    for (int c; (c = fgetc(pipe)) != EOF;) run.text += char(c);
    const int status = pclose(pipe);
    run.status = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    run.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    return run;
}
