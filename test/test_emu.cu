// The emulator of CUDA, tested for itself: how it runs threads, memory and streams, and that it finds each kind of planted bug.
// Instructions and number formats: test_emu_instructions.cu.
//
// Bugs that end the process (what a sanitizer reports; a host that follows a device pointer) run in a child: `child(name)`
// starts this program again with EMU_TEST_CHILD=name.
#define DOCTEST_CONFIG_IMPLEMENT
#define DOCTEST_CONFIG_SUPER_FAST_ASSERTS
#include "emu_test.h"

#include <sys/wait.h>

#include <cstdlib>
#include <map>

std::map<std::string, void (*)()>& children() {
    static std::map<std::string, void (*)()> all;
    return all;
}
struct Child {
    Child(const char* name, void (*work)()) { children()[name] = work; }
};

// All that the child wrote, and its exit status.
std::string child(const char* name, int* status = nullptr) {
    char self[4096] = {};
    REQUIRE(readlink("/proc/self/exe", self, sizeof self - 1) > 0);
    const std::string command = std::string("EMU_TEST_CHILD=") + name + " ASAN_OPTIONS=detect_leaks=0 '" + self + "' 2>&1";
    FILE* pipe = popen(command.c_str(), "r");
    REQUIRE(pipe);
    std::string output;
    char part[4096];
    for (size_t n; (n = fread(part, 1, sizeof part, pipe)) > 0;) output.append(part, n);
    const int ended = pclose(pipe);
    if (status) *status = ended;
    return output;
}

// --- threads, blocks, warps

__global__ void indices(uint4* out) {
    const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    const unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    out[block * blockDim.x * blockDim.y * blockDim.z + thread] = {block, thread, threadIdx.x, blockIdx.x};
}

TEST_CASE("every thread of every block runs once, in every order") {
    for (const char* order : all_orders) {
        emu::order_set(order);
        const dim3 grid(3, 2, 2), block(5, 3, 2);
        uint4* out = device_fresh<uint4>(360);
        run(indices, grid, block, 0, out);
        const auto values = download(out, 360);
        for (unsigned i = 0; i < 360; i++) {
            CHECK(values[i].x == i / 30);
            CHECK(values[i].y == i % 30);
            CHECK(values[i].z == i % 30 % 5);
            CHECK(values[i].w == i / 30 % 3);
        }
        cudaFree(out);
    }
    emu::order_set("forward");
}

// Sum of in[n] by a tree in shared memory. bug 1: no barrier before the tree; 2: none within it.
template <int bug>
__global__ void tree_sum(float* out, const float* in, int n) {
    EMU_SHARED_ARRAY(float, partial, [128]);
    float sum = 0;
    for (int i = threadIdx.x; i < n; i += 128) sum += in[blockIdx.x * n + i];
    partial[threadIdx.x] = sum;
    if (bug != 1) __syncthreads();
    for (int stride = 64; stride > 0; stride /= 2) {
        if (threadIdx.x < unsigned(stride)) partial[threadIdx.x] += partial[threadIdx.x + stride];
        if (bug != 2) __syncthreads();
    }
    if (threadIdx.x == 0) out[blockIdx.x] = partial[0];
}

template <int bug>
int tree_sums_wrong() {
    std::vector<float> values(8 * 300);
    for (size_t i = 0; i < values.size(); i++) values[i] = float(i % 17);
    float *in = upload(values), *out = device_fresh<float>(8);
    run(tree_sum<bug>, dim3(8), dim3(128), 0, out, (const float*)in, 300);
    const auto sums = download(out, 8);
    int wrong = 0;
    for (int b = 0; b < 8; b++) {
        float sum = 0;
        for (int i = 0; i < 300; i++) sum += values[size_t(b) * 300 + i];
        wrong += sums[b] != sum;
    }
    cudaFree(in), cudaFree(out);
    return wrong;
}

TEST_CASE("barriers and shared memory") {
    for (const char* order : all_orders) {
        emu::order_set(order);
        CHECK(tree_sums_wrong<0>() == 0);
    }
    emu::order_set("forward");
}

// What two blocks leave to each other through a buffer of shared memory that one phase fills and the next reads.
template <bool bug>
__global__ void refill(float* out) {
    EMU_SHARED_ARRAY(float, buffer, [64]);
    float sum = 0;
    for (int round = 0; round < 3; round++) {
        buffer[threadIdx.x] = float(round);
        __syncthreads();
        sum += buffer[63 - threadIdx.x];
        if (!bug) __syncthreads();
    }
    out[threadIdx.x] = sum;
}

template <bool bug>
bool refill_wrong() {
    float* out = device_fresh<float>(64);
    run(refill<bug>, dim3(1), dim3(64), 0, out);
    const auto sums = download(out, 64);
    cudaFree(out);
    return std::count(sums.begin(), sums.end(), 3.0f) != 64;
}

// Lanes that trust each other to have written.
template <bool bug>
__global__ void warp_rotate(float* out) {
    EMU_SHARED_ARRAY(float, row, [32]);
    row[threadIdx.x] = float(threadIdx.x);
    if (!bug) __syncwarp();
    out[threadIdx.x] = row[(threadIdx.x + 1) % 32];
}

template <bool bug>
bool warp_rotate_wrong() {
    float* out = device_fresh<float>(32);
    run(warp_rotate<bug>, dim3(1), dim3(32), 0, out);
    const auto values = download(out, 32);
    cudaFree(out);
    for (int i = 0; i < 32; i++) {
        if (values[i] != float((i + 1) % 32)) return true;
    }
    return false;
}

#ifndef __SANITIZE_THREAD__
TEST_CASE("missing barriers give wrong results in some order") {
    int first = 0, tree = 0, again = 0, warp = 0;
    for (const char* order : all_orders) {
        emu::order_set(order);
        first += tree_sums_wrong<1>() > 0;
        tree += tree_sums_wrong<2>() > 0;
        again += refill_wrong<true>();
        warp += warp_rotate_wrong<true>();
        CHECK_FALSE(refill_wrong<false>());
        CHECK_FALSE(warp_rotate_wrong<false>());
    }
    CHECK(first > 0);
    CHECK(tree > 0);
    CHECK(again > 0);
    CHECK(warp > 0);
    emu::order_set("forward");
}
#endif

__global__ void count_plain(int* at) { *at += 1; }
__global__ void count_atomic(int* at) { atomicAdd(at, 1); }
template <class Kernel>
void count_run(Kernel kernel) {
    int* at = upload<int>({0});
    run(kernel, dim3(2), dim3(32), 0, at);
    CHECK(download(at, 1)[0] == 64);
    cudaFree(at);
}
Child race_barrier("race_barrier", [] { tree_sums_wrong<1>(); });
Child race_refill("race_refill", [] { refill_wrong<true>(); });
Child race_warp("race_warp", [] { warp_rotate_wrong<true>(); });
Child race_count("race_count", [] { count_run(count_plain); });
Child no_race("no_race", [] {
    for (const char* order : {"forward", "reverse", "random:1"}) {
        emu::order_set(order);
        tree_sums_wrong<0>(), refill_wrong<false>(), warp_rotate_wrong<false>(), count_run(count_atomic);
    }
});

TEST_CASE("ThreadSanitizer reports races between CUDA threads, and nothing else") {
    if (!emu::with_tsan) return;
    for (const char* name : {"race_barrier", "race_refill", "race_warp", "race_count"}) {
        CAPTURE(name);
        CHECK(contains(child(name), "data race"));
    }
    CHECK(child("no_race") == "");
}

__global__ void shuffles(int* out) {
    const int lane = threadIdx.x;
    int* row = out + lane * 10;
    row[0] = __shfl_sync(~0u, lane, 5);
    row[1] = __shfl_sync(~0u, lane, 9, 8);  // lane 1 of the segment
    row[2] = __shfl_xor_sync(~0u, lane, 3);
    row[3] = __shfl_up_sync(~0u, lane, 2, 16);
    row[4] = __shfl_down_sync(~0u, lane, 20);
    row[5] = int(__shfl_down_sync(~0u, double(lane), 1, 4));
    row[6] = int(__ballot_sync(~0u, lane % 3 == 0));
    row[7] = __any_sync(~0u, lane == 31) + 2 * __all_sync(~0u, lane < 31) + 4 * __all_sync(~0u, 1);
    row[8] = __reduce_add_sync(~0u, lane) + 1000 * __reduce_max_sync(~0u, lane) + 100000 * __reduce_min_sync(~0u, lane + 1);
    row[9] = 0;
    if (lane % 2) row[9] = __shfl_sync(0xaaaaaaaau, lane, 7);
    else __syncwarp(0x55555555u);
}

TEST_CASE("shuffles, votes and reductions") {
    for (const char* order : all_orders) {
        emu::order_set(order);
        int* out = device_fresh<int>(320);
        run(shuffles, dim3(1), dim3(32), 0, out);
        const auto values = download(out, 320);
        cudaFree(out);
        for (int lane = 0; lane < 32; lane++) {
            const int* row = &values[size_t(lane) * 10];
            CHECK(row[0] == 5);
            CHECK(row[1] == lane / 8 * 8 + 1);
            CHECK(row[2] == (lane ^ 3));
            CHECK(row[3] == (lane % 16 < 2 ? lane : lane - 2));
            CHECK(row[4] == (lane + 20 < 32 ? lane + 20 : lane));
            CHECK(row[5] == (lane % 4 == 3 ? lane : lane + 1));
            CHECK(unsigned(row[6]) == 0x49249249u);
            CHECK(row[7] == 5);
            CHECK(row[8] == 496 + 31000 + 100000);
            CHECK(row[9] == (lane % 2 ? 7 : 0));
        }
    }
    emu::order_set("forward");
}

// --- what can never complete

__global__ void barrier_in_branch(int n) {
    if (threadIdx.x < unsigned(n)) __syncthreads();
}
__global__ void two_barriers(int n) {
    if (threadIdx.x < unsigned(n)) {
        __syncthreads();
    } else {
        __syncthreads();
    }
}
__global__ void mixed_collectives() {
    if (threadIdx.x < 16) __syncwarp();
    else __ballot_sync(~0u, 1);
}
__global__ void shuffle_after_return(int n) {
    if (threadIdx.x >= unsigned(n)) return;
    __shfl_xor_sync(~0u, 1, 1);
}
__global__ void not_in_mask() { __syncwarp(0xffff); }
__global__ void shuffle_from_nobody() {
    if (threadIdx.x < 16) __shfl_sync(0xffff, 1, 20);
}
__global__ void barrier_against_warp() {
    if (threadIdx.x < 40) __syncthreads();
    else __syncwarp();
}

TEST_CASE("what can never complete is reported, with who waits where") {
    for (const char* order : all_orders) {
        emu::order_set(order);
        CAPTURE(order);
        std::string error = error_of([] { run(barrier_in_branch, dim3(2), dim3(64), 0, 3); });
        CHECK(contains(error, "__syncthreads at "));
        CHECK(contains(error, "test_emu.cu:"));
        CHECK(contains(error, "returned"));
        CHECK(contains(error, "barrier_in_branch<<<(2,1,1), (64,1,1), 0>>>"));
        error = error_of([] { run(two_barriers, dim3(1), dim3(64), 0, 17); });
        CHECK(contains(error, "divergent __syncthreads"));
        error = error_of([] { run(mixed_collectives, dim3(1), dim3(32), 0); });
        CHECK(contains(error, "different warp collectives"));
        CHECK(contains(error, "a vote at "));
        error = error_of([] { run(shuffle_after_return, dim3(1), dim3(32), 0, 20); });
        CHECK(contains(error, "returned"));
        error = error_of([] { run(not_in_mask, dim3(1), dim3(32), 0); });
        CHECK(contains(error, "not in its mask"));
        error = error_of([] { run(shuffle_from_nobody, dim3(1), dim3(32), 0); });
        CHECK(contains(error, "does not take part"));
        error = error_of([] { run(barrier_against_warp, dim3(1), dim3(64), 0); });
        CHECK(contains(error, "wait for each other"));
        CHECK(tree_sums_wrong<0>() == 0);  // and the next launch works
    }
    emu::order_set("forward");
}

// --- launches

__global__ void nothing(const float*) {}
__global__ void uses_shared(float* out) {
    EMU_SHARED_DYNAMIC(float, buffer);
    EMU_SHARED_ARRAY(float, fixed, [64]);
    buffer[threadIdx.x] = 1;
    __syncthreads();
    out[threadIdx.x] = fixed[threadIdx.x];
}

TEST_CASE("launches that CUDA refuses") {
    float on_host = 0;
    CHECK(contains(error_of([&] { run(nothing, dim3(1), dim3(1), 0, (const float*)&on_host); }), "argument 0 is not device memory"));
    CHECK(contains(error_of([] { run(nothing, dim3(1), dim3(2048), 0, (const float*)nullptr); }), "1 .. 1024 threads"));
    CHECK(contains(error_of([] { run(nothing, dim3(1, 70000), dim3(1), 0, (const float*)nullptr); }), "a grid has"));
    CHECK(contains(error_of([] { run(nothing, dim3(0), dim3(1), 0, (const float*)nullptr); }), "a grid has"));
    CHECK(contains(error_of([] { run(nothing, dim3(1), dim3(1), 50 << 10, (const float*)nullptr); }), "cudaFuncSetAttribute"));
    CHECK(cudaFuncSetAttribute(nothing, cudaFuncAttributeMaxDynamicSharedMemorySize, 228 << 10) == cudaErrorInvalidValue);
    CHECK(cudaGetLastError() == cudaErrorInvalidValue);
    CHECK(cudaGetLastError() == cudaSuccess);
    CHECK(cudaFuncSetAttribute(nothing, cudaFuncAttributeMaxDynamicSharedMemorySize, 100 << 10) == cudaSuccess);
    run(nothing, dim3(1), dim3(1), 100 << 10, (const float*)nullptr);

    float* out = device_fresh<float>(64);  // dynamic and fixed shared memory count together
    CHECK(contains(error_of([&] { run(uses_shared, dim3(1), dim3(64), 48 << 10, out); }), "'fixed'"));
    cudaFree(out);
}

// --- memory

__global__ void write_at(float* at, long i) { at[i] = 1; }
__global__ void read_at(float* out, const float* at, long i) { *out = at[i]; }
__global__ void shared_write_at(int i) {
    EMU_SHARED_ARRAY(float, row, [17]);
    EMU_SHARED_ARRAY(float, other, [17]);
    row[0] = other[0] = 0;
    (&row[0])[i] = 1;
}
__global__ void dynamic_write_at(int i) {
    EMU_SHARED_DYNAMIC(float, row);
    row[i] = 1;
}
Child global_write("global_write", [] { run(write_at, dim3(1), dim3(1), 0, device_fresh<float>(7), 7l); });
Child global_read("global_read", [] { run(read_at, dim3(1), dim3(1), 0, device_fresh<float>(1), (const float*)device_fresh<float>(7), 7l); });
Child shared_write("shared_write", [] { run(shared_write_at, dim3(1), dim3(1), 0, 17); });
Child dynamic_write("dynamic_write", [] { run(dynamic_write_at, dim3(1), dim3(1), 12, 3); });

TEST_CASE("out of bounds") {
    if (emu::with_asan) {
        for (const char* name : {"global_write", "global_read", "shared_write", "dynamic_write"}) {
            CAPTURE(name);
            const std::string report = child(name);
            CHECK(contains(report, "use-after-poison"));
            CHECK(contains(report, "test_emu.cu"));
        }
        return;
    }
    float* at = device_fresh<float>(7);
    for (long i : {-1l, 7l, 8l})
        CHECK(contains(error_of([&] { run(write_at, dim3(1), dim3(1), 0, at, i); }), i < 0 ? "wrote before" : "wrote behind"));
    CHECK(error_of([&] { run(write_at, dim3(1), dim3(1), 0, at, 6l); }) == "");
    for (int i : {-1, 17, 20}) CHECK(contains(error_of([&] { run(shared_write_at, dim3(1), dim3(1), 0, i); }), "shared 'row'"));
    CHECK(contains(error_of([] { run(dynamic_write_at, dim3(1), dim3(1), 12, 3); }), "dynamic shared memory"));
    cudaFree(at);
}

__global__ void shared_half_written(float* out) {
    EMU_SHARED_ARRAY(float, row, [64]);
    if (threadIdx.x < 32) row[threadIdx.x] = 1;
    __syncthreads();
    out[blockIdx.x * 64 + threadIdx.x] = row[threadIdx.x];
}

TEST_CASE("memory that nobody wrote is NaN: on the device, and in shared memory of every block") {
    float* out = device_fresh<float>(128);
    for (float value : download(out, 128)) CHECK(std::isnan(value));
    run(shared_half_written, dim3(2), dim3(64), 0, out);
    const auto values = download(out, 128);
    for (int i = 0; i < 128; i++) CHECK(std::isnan(values[i]) == (i % 64 >= 32));
    cudaFree(out);
}

struct Holder {
    const float* at;
};
__global__ void read_held(float* out, Holder held) { *out = held.at[0]; }
void use_after_free() {
    float *at = upload<float>({1.0f}), *out = device_fresh<float>(1);
    cudaFree(at);
    run(read_held, dim3(1), dim3(1), 0, out, Holder{at});
    CHECK(std::isnan(download(out, 1)[0]));
    cudaFree(out);
}
Child after_free("after_free", use_after_free);

TEST_CASE("use after free") {
    if (emu::with_asan) CHECK(contains(child("after_free"), "use-after-poison"));
    else use_after_free();
    cudaStream_t stream;
    cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    float* at;
    cudaMallocAsync(&at, 4, stream);
    cudaFreeAsync(at, stream);
    emu::launch(write_at, dim3(1), dim3(1), 0, stream, at, 0l);
    CHECK(contains(error_of([&] { cudaStreamSynchronize(stream); }), "were freed"));
    CHECK(cudaFree(at) == cudaErrorInvalidValue);
    cudaStreamDestroy(stream);
    cudaGetLastError();
}

volatile float sink;
Child host_reads("host_reads", [] { sink = device_fresh<float>(100)[25]; });
Child host_writes("host_writes", [] { upload<float>({1, 2})[1] = 3; });
__attribute__((noinline)) int dig(int depth, volatile int* above) {
    volatile int here = depth + *above;
    return depth == 0 ? here : dig(depth - 1, &here) + here;
}
__global__ void deep(float* out) {
    volatile int zero = 0;
    *out = float(dig(1 << 20, &zero));
}
Child overflow("overflow", [] { run(deep, dim3(1), dim3(1), 0, device_fresh<float>(1)); });

TEST_CASE("the host cannot touch device memory") {
    int status = 0;
    CHECK(contains(child("host_reads", &status), "host code touched device memory, 100 bytes into an allocation of 400 bytes"));
    CHECK(status != 0);
    CHECK(contains(child("host_writes", &status), "host code touched device memory, 4 bytes into an allocation of 8 bytes"));
    CHECK(status != 0);
    CHECK(contains(child("overflow", &status), emu::with_asan ? "stack-overflow" : "KB of stack"));
    CHECK(status != 0);
}

TEST_CASE("copies, and errors by code") {
    float* at = upload<float>({1, 2, 3, 4});
    float two[2] = {};
    CHECK(cudaMemcpy(two, at + 1, 8, cudaMemcpyDeviceToHost) == cudaSuccess);
    CHECK(two[0] == 2);
    CHECK(cudaMemcpy(two, at, 8, cudaMemcpyHostToDevice) == cudaErrorInvalidValue);
    CHECK(cudaMemcpy(at, two, 8, cudaMemcpyDeviceToHost) == cudaErrorInvalidValue);
    CHECK(contains(error_of([&] { cudaMemcpy(two, at + 3, 8, cudaMemcpyDeviceToHost); }), "end behind it"));
    CHECK(cudaMemset(at, 0, 8) == cudaSuccess);
    CHECK(download(at, 4) == std::vector<float>{0, 0, 3, 4});
    CHECK(cudaMemset(two, 0, 8) == cudaErrorInvalidValue);
    CHECK(cudaFree(two) == cudaErrorInvalidValue);
    CHECK(cudaFree(at) == cudaSuccess);
    CHECK(cudaFree(at) == cudaErrorInvalidValue);
    CHECK(cudaMalloc(&at, size_t(1) << 40) == cudaErrorMemoryAllocation);
    CHECK(std::string(cudaGetErrorString(cudaGetLastError())) == "out of memory");
    CHECK(cudaSetDevice(1) == cudaErrorInvalidDevice);
    size_t before, after, total;
    cudaMemGetInfo(&before, &total);
    CHECK(cudaMalloc(&at, 1000) == cudaSuccess);
    CHECK(reinterpret_cast<uintptr_t>(at) % 256 == 0);
    cudaMemGetInfo(&after, &total);
    CHECK(before - after == 1000);
    cudaFree(at);
    cudaDeviceProp properties;
    CHECK(cudaGetDeviceProperties(&properties, 0) == cudaSuccess);
    CHECK(properties.major == 9);
}

// --- streams and events

__global__ void add_one(float* at) { *at += 1; }
__global__ void double_it(float* to, const float* from) { *to = 2 * *from; }

// 3 on stream a, then 2 x on stream b; `ordered` by an event or not.
float two_streams(bool ordered) {
    cudaStream_t a, b;
    cudaEvent_t event;
    cudaStreamCreateWithFlags(&a, cudaStreamNonBlocking);
    cudaStreamCreateWithFlags(&b, cudaStreamNonBlocking);
    cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
    float *x = upload<float>({0}), *y = upload<float>({-1});
    for (int i = 0; i < 3; i++) emu::launch(add_one, dim3(1), dim3(1), 0, a, x);
    cudaEventRecord(event, a);
    if (ordered) cudaStreamWaitEvent(b, event, 0);
    emu::launch(double_it, dim3(1), dim3(1), 0, b, y, (const float*)x);
    float result = 0;
    cudaMemcpyAsync(&result, y, 4, cudaMemcpyDeviceToHost, b);
    cudaDeviceSynchronize();
    cudaFree(x), cudaFree(y);
    cudaEventDestroy(event);
    cudaStreamDestroy(a), cudaStreamDestroy(b);
    return result;
}

TEST_CASE("a missing event wait shows under some policy, and no policy breaks what is ordered") {
    int wrong = 0;
    for (const char* policy : {"lazy", "eager", "random:1", "random:2", "random:3"}) {
        emu::streams_set(policy);
        CAPTURE(policy);
        CHECK(two_streams(true) == 6);
        wrong += two_streams(false) != 6;
    }
    CHECK(wrong > 0);
    emu::streams_set("lazy");
}

TEST_CASE("events: nothing is done before somebody waits, and then only what is needed") {
    cudaStream_t a, b;
    cudaEvent_t first, second;
    cudaStreamCreateWithFlags(&a, cudaStreamNonBlocking);
    cudaStreamCreateWithFlags(&b, cudaStreamNonBlocking);
    cudaEventCreate(&first), cudaEventCreate(&second);
    float *x = upload<float>({0}), *y = upload<float>({0});
    CHECK(cudaEventQuery(first) == cudaSuccess);  // never recorded
    emu::launch(add_one, dim3(1), dim3(1), 0, a, x);
    cudaEventRecord(first, a);
    emu::launch(add_one, dim3(1), dim3(1), 0, b, y);
    cudaEventRecord(second, b);
    CHECK(cudaEventSynchronize(first) == cudaSuccess);
    float milliseconds = -1;
    CHECK(cudaEventElapsedTime(&milliseconds, first, second) == cudaErrorNotReady);
    int polls = 0;
    while (cudaEventQuery(second) == cudaErrorNotReady) REQUIRE(++polls < 10);
    CHECK(polls > 0);
    CHECK(cudaEventElapsedTime(&milliseconds, first, second) == cudaSuccess);
    CHECK(milliseconds >= 0);
    CHECK(cudaStreamQuery(b) == cudaSuccess);
    CHECK(cudaStreamDestroy(a) == cudaSuccess);
    CHECK(cudaStreamSynchronize(a) == cudaErrorInvalidResourceHandle);
    cudaGetLastError();
    cudaStreamDestroy(b), cudaEventDestroy(first), cudaEventDestroy(second), cudaFree(x), cudaFree(y);
}

TEST_CASE("copies of pinned memory happen when their turn comes, of other memory at once") {
    cudaStream_t stream;
    cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    float *pinned, *at = device_fresh<float>(2), plain = 1;
    REQUIRE(cudaMallocHost(&pinned, 8) == cudaSuccess);
    pinned[0] = 1, pinned[1] = -1;
    cudaMemcpyAsync(at, pinned, 4, cudaMemcpyHostToDevice, stream);
    cudaMemcpyAsync(at + 1, &plain, 4, cudaMemcpyHostToDevice, stream);
    pinned[0] = 2, plain = 2;  // a bug, and none
    cudaMemcpyAsync(pinned + 1, at, 4, cudaMemcpyDeviceToHost, stream);
    CHECK(pinned[1] == -1);  // not waited for
    cudaStreamSynchronize(stream);
    CHECK(pinned[1] == 2);
    CHECK(download(at, 2) == std::vector<float>{2, 1});
    cudaPointerAttributes attributes;
    cudaPointerGetAttributes(&attributes, pinned);
    CHECK(attributes.type == cudaMemoryTypeHost);
    cudaPointerGetAttributes(&attributes, at);
    CHECK(attributes.type == cudaMemoryTypeDevice);
    cudaFree(at), cudaFreeHost(pinned), cudaStreamDestroy(stream);
}

TEST_CASE("work of libraries takes its turn on a stream, and an error ends what is queued") {
    float* at = upload<float>({1});
    emu::enqueue(nullptr, [at] { *at = 5; });
    emu::launch(add_one, dim3(1), dim3(1), 0, nullptr, at);
    CHECK(download(at, 1)[0] == 6);
    emu::enqueue(nullptr, [] { throw emu::Error("a library's"); });
    emu::launch(add_one, dim3(1), dim3(1), 0, nullptr, at);
    CHECK(contains(error_of([] { cudaStreamSynchronize(nullptr); }), "a library's"));
    CHECK(download(at, 1)[0] == 6);
    emu::enqueue(nullptr, [] { throw emu::Error("found by cudaFree"); });
    CHECK(cudaFree(at) == cudaErrorLaunchFailure);
    CHECK(contains(error_of([] { cudaDeviceSynchronize(); }), "found by cudaFree"));
    cudaDeviceSynchronize();
}

int main(int argc, char** argv) {
    if (const char* name = getenv("EMU_TEST_CHILD")) {
        doctest::Context checks;
        checks.setAsDefaultForAssertsOutOfTestCases();
        children().at(name)();
        return 0;
    }
    return doctest::Context(argc, argv).run();
}
