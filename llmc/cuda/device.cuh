// The device seam on CUDA: a GPU, its streams, events and memory.
//
// Work is asynchronous: a call puts it on a stream, and streams are ordered among each other by events alone. What reaches
// the host (device_download, stream_synchronize) waits for what it needs.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <vector>

#include "llmc/check.h"

// Ends with the call that failed, what CUDA says, and what usually helps.
inline void cuda_check(cudaError_t error, const char* call) {
    if (error == cudaSuccess) return;
    const char* hint = error == cudaErrorMemoryAllocation ? ": use a smaller model, --micro-batch or --seq, or more ranks"
                       : error == cudaErrorNoDevice || error == cudaErrorInsufficientDriver
                           ? ": is there an NVIDIA GPU, and a driver as new as the toolkit? Without one, build TARGET=cpu"
                       : error == cudaErrorNoKernelImageForDevice
                           ? ": the program was built for other GPUs: make TARGET=cuda CUDA_ARCHS=NN, NN as in sm_NN"
                           : "";
    fail("%s failed: %s%s", call, cudaGetErrorString(error), hint);
}

struct Matmuls;  // cuda/matmul.cuh: the handle and the plans of cuBLASLt

struct Device {
    int index = 0;
    cudaDeviceProp properties{};
    std::shared_ptr<Matmuls> matmuls;  // made on first use
};

struct Stream {
    cudaStream_t handle = nullptr;
    Device* device = nullptr;
};

struct Event {
    std::shared_ptr<CUevent_st> handle;
};

inline int device_count() {
    int count = 0;
    cuda_check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
    return count;
}

// Makes GPU `index` this process's own.
inline Device device_open(int index) {
    Device device;
    device.index = index;
    cuda_check(cudaSetDevice(index), "cudaSetDevice");
    cuda_check(cudaGetDeviceProperties(&device.properties, index), "cudaGetDeviceProperties");
    // scratch memory of ops comes from the pool at every step: keep it there instead of giving it back at each wait
    cudaMemPool_t pool;
    cuda_check(cudaDeviceGetDefaultMemPool(&pool, index), "cudaDeviceGetDefaultMemPool");
    unsigned long long keep = ~0ull;
    cuda_check(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep), "cudaMemPoolSetAttribute");
    return device;
}

inline Stream stream_make(Device& device) {
    Stream stream{nullptr, &device};
    cuda_check(cudaStreamCreateWithFlags(&stream.handle, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    return stream;
}

inline void stream_synchronize(Stream stream) { cuda_check(cudaStreamSynchronize(stream.handle), "cudaStreamSynchronize"); }

inline Event event_make() {
    cudaEvent_t handle;
    cuda_check(cudaEventCreate(&handle), "cudaEventCreate");
    return {std::shared_ptr<CUevent_st>(handle, [](cudaEvent_t e) { cudaEventDestroy(e); })};
}
inline void event_record(Event& event, Stream stream) {
    cuda_check(cudaEventRecord(event.handle.get(), stream.handle), "cudaEventRecord");
}

// Work put on `stream` from now on starts after the event.
inline void stream_wait(Stream stream, const Event& event) {
    cuda_check(cudaStreamWaitEvent(stream.handle, event.handle.get(), 0), "cudaStreamWaitEvent");
}

// Between two events that were recorded; waits for the later one.
inline double event_seconds(const Event& from, const Event& to) {
    cuda_check(cudaEventSynchronize(to.handle.get()), "cudaEventSynchronize");
    float milliseconds = 0;
    cuda_check(cudaEventElapsedTime(&milliseconds, from.handle.get(), to.handle.get()), "cudaEventElapsedTime");
    return 1e-3 * milliseconds;
}

// Events that are used again once nobody else holds them: a step records hundreds, and making one is a call to the driver.
struct EventPool {
    std::vector<Event> events;
    size_t next = 0;
};
inline Event event_take(EventPool& pool) {
    for (size_t tries = std::min<size_t>(2, pool.events.size()); tries > 0; tries--) {
        const Event& event = pool.events[pool.next++ % pool.events.size()];
        if (event.handle.use_count() == 1) return event;
    }
    pool.events.push_back(event_make());
    return pool.events.back();
}

// What is put on `stream` from now on starts after what is on `before` now.
inline void stream_follow(EventPool& pool, Stream stream, Stream before) {
    if (stream.handle == before.handle) return;
    Event event = event_take(pool);
    event_record(event, before);
    stream_wait(stream, event);
}

constexpr bool device_is_host = false;  // whether the host may touch the device's memory

// Zeroed memory of the device, before any stream goes on.
inline void* device_allocate(size_t bytes) {
    void* memory = nullptr;
    cuda_check(cudaMalloc(&memory, bytes), "cudaMalloc");
    cuda_check(cudaMemset(memory, 0, bytes), "cudaMemset");
    cuda_check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");  // our streams do not wait for the default one
    return memory;
}
inline void device_free(void* memory, size_t) { cudaFree(memory); }

inline void device_copy(void* to, const void* from, size_t bytes, Stream stream) {
    cuda_check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream.handle), "cudaMemcpyAsync");
}
inline void device_zero(void* memory, size_t bytes, Stream stream) {
    cuda_check(cudaMemsetAsync(memory, 0, bytes, stream.handle), "cudaMemsetAsync");
}

// Both return when the host's memory may be touched again.
inline void device_upload(void* to, const void* host, size_t bytes, Stream stream) {
    cuda_check(cudaMemcpyAsync(to, host, bytes, cudaMemcpyHostToDevice, stream.handle), "cudaMemcpyAsync to the GPU");
    stream_synchronize(stream);
}
inline void device_download(void* host, const void* from, size_t bytes, Stream stream) {
    cuda_check(cudaMemcpyAsync(host, from, bytes, cudaMemcpyDeviceToHost, stream.handle), "cudaMemcpyAsync from the GPU");
    stream_synchronize(stream);
}

// Memory of an op's own for as long as its work on the stream lasts.
template <class T>
struct Scratch {
    T* data = nullptr;
    Stream stream;

    Scratch(size_t count, Stream stream) : stream(stream) {
        cuda_check(cudaMallocAsync(reinterpret_cast<void**>(&data), count * sizeof(T), stream.handle), "cudaMallocAsync");
    }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    ~Scratch() { cudaFreeAsync(data, stream.handle); }
};
