// Help for the kernel tests: device buffers with poisoned memory, random data, comparisons, thread orders.
//
// A case checks a CUDA op against the CPU op of the same name, on inputs that are already rounded to the storage type E.
// On the emulator each case runs in three thread orders; on a GPU once.
#pragma once
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "llmc/cuda/common.cuh"
#include "llmc/device.h"

struct KernelTest {
    Device device = device_open(0);
    Stream stream = stream_make(device);
};

inline KernelTest& kernel_test() {
    static KernelTest test;
    return test;
}

inline float host_float(float x) { return x; }
inline float host_float(bf16 x) { return __bfloat162float(x); }
inline float host_float(fp16 x) { return __half2float(x); }
template <class E>
E host_round(float x) {
    if constexpr (std::is_same_v<E, bf16>) return __float2bfloat16_rn(x);
    if constexpr (std::is_same_v<E, fp16>) return __float2half_rn(x);
    if constexpr (std::is_same_v<E, float>) return x;
}

// Normal values, rounded to E: what the CPU op is given too.
template <class E>
std::vector<float> random_values(size_t n, uint64_t seed, float scale = 1.0f) {
    std::mt19937_64 engine(seed);
    std::normal_distribution<float> normal(0.0f, scale);
    std::vector<float> values(n);
    for (float& value : values) value = host_float(host_round<E>(normal(engine)));
    return values;
}

// `n` elements on the device, with a guard of NaN before and behind that device_check_guards looks at.
template <class T>
struct DeviceBuffer {
    static constexpr size_t guard = 256 / sizeof(T);
    size_t n;
    T* base;
    T* data;  // [n]; NaN (all bits one) until written

    explicit DeviceBuffer(size_t n) : n(n) {
        base = static_cast<T*>(device_allocate((n + 2 * guard) * sizeof(T)));
        data = base + guard;
        const std::vector<unsigned char> ones((n + 2 * guard) * sizeof(T), 0xff);
        device_upload(base, ones.data(), ones.size(), kernel_test().stream);
    }
    DeviceBuffer(const DeviceBuffer&) = delete;
    DeviceBuffer& operator=(const DeviceBuffer&) = delete;
    ~DeviceBuffer() { device_free(base, (n + 2 * guard) * sizeof(T)); }

    // From floats, rounded to T, or from values of T itself.
    template <class S>
    explicit DeviceBuffer(const std::vector<S>& values) : DeviceBuffer(values.size()) {
        std::vector<T> own(n);
        for (size_t i = 0; i < n; i++) {
            if constexpr (std::is_same_v<S, T>) own[i] = values[i];
            else own[i] = host_round<T>(values[i]);
        }
        device_upload(data, own.data(), n * sizeof(T), kernel_test().stream);
    }

    std::vector<T> download() const {
        std::vector<T> values(n);
        device_download(values.data(), data, n * sizeof(T), kernel_test().stream);
        return values;
    }
    std::vector<float> floats() const {
        std::vector<float> values;
        for (const T& value : download()) values.push_back(host_float(value));
        return values;
    }
    // False if a kernel wrote before or behind the data.
    bool guards_hold() const {
        std::vector<unsigned char> bytes((n + 2 * guard) * sizeof(T));
        device_download(bytes.data(), base, bytes.size(), kernel_test().stream);
        const size_t edge = guard * sizeof(T);
        for (size_t i = 0; i < edge; i++) {
            if (bytes[i] != 0xff || bytes[bytes.size() - 1 - i] != 0xff) return false;
        }
        return true;
    }
};

// |a - b| / |b| over all elements; infinite if any of a is not finite where b is.
inline double relative_l2(const std::vector<float>& a, const std::vector<float>& b) {
    if (a.size() != b.size()) return INFINITY;
    double error = 0, norm = 0;
    for (size_t i = 0; i < a.size(); i++) {
        if (!std::isfinite(a[i]) && std::isfinite(b[i])) return INFINITY;
        if (a[i] == b[i]) {
            if (std::isfinite(b[i])) norm += double(b[i]) * b[i];
            continue;
        }
        error += (double(a[i]) - b[i]) * (double(a[i]) - b[i]);
        norm += double(b[i]) * b[i];
    }
    return std::sqrt(error / std::max(norm, 1e-30));
}

template <class E>
constexpr double kernel_tolerance = std::is_same_v<E, float> ? 1e-5 : 4e-3;

// Runs `work` once for each thread order: forward, reverse, random.
template <class Work>
void in_thread_orders(Work work) {
#ifdef CUDA_EMU
    for (const char* order : {"forward", "reverse", "random:1"}) {
        emu::order_set(order);
        work();
    }
    emu::order_set("forward");
#else
    work();
#endif
}
