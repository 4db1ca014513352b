// What the tests of the emulator share: memory there and back, kernels that run to their end at once, errors as text.
#pragma once
#include <doctest/doctest.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <string>
#include <vector>

#include "emu_ptx.h"

#ifdef __shared__
#error "a plain __shared__ must not compile"
#endif

template <class T>
T* upload(const std::vector<T>& values) {
    T* at = nullptr;
    REQUIRE(cudaMalloc(&at, values.size() * sizeof(T)) == cudaSuccess);
    REQUIRE(cudaMemcpy(at, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice) == cudaSuccess);
    return at;
}

template <class T>
std::vector<T> download(const T* at, size_t n) {
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
    std::vector<T> values(n);
    REQUIRE(cudaMemcpy(values.data(), at, n * sizeof(T), cudaMemcpyDeviceToHost) == cudaSuccess);
    return values;
}

template <class T>
T* device_fresh(size_t n) {
    T* at = nullptr;
    REQUIRE(cudaMalloc(&at, n * sizeof(T)) == cudaSuccess);
    return at;
}

// Runs to its end at once.
template <class... P, class... A>
void run(void (*kernel)(P...), dim3 grid, dim3 block, size_t dynamic_shared, A... args) {
    emu::launch(kernel, grid, block, dynamic_shared, nullptr, args...);
    cudaStreamSynchronize(nullptr);
}

// What the work throws; "" if nothing.
template <class Work>
std::string error_of(Work work) {
    try {
        work();
    } catch (const emu::Error& error) {
        return error.what();
    }
    return "";
}

inline bool contains(const std::string& text, const char* part) {
    if (text.find(part) != std::string::npos) return true;
    MESSAGE("no '" << part << "' in: " << text);
    return false;
}

const char* const all_orders[] = {"forward", "reverse", "random:0", "random:1", "random:2", "random:4", "random:5", "random:8"};
