// The CUDA runtime: devices, memory, streams and events under CUDA's names.
#pragma once
#include <cstdlib>

#include "emu_launch.h"

enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInsufficientDriver = 35,
    cudaErrorNoDevice = 100,
    cudaErrorInvalidDevice = 101,
    cudaErrorNoKernelImageForDevice = 209,
    cudaErrorInvalidResourceHandle = 400,
    cudaErrorNotReady = 600,
    cudaErrorIllegalAddress = 700,
    cudaErrorLaunchFailure = 719,
    cudaErrorUnknown = 999
};
enum cudaMemcpyKind {
    cudaMemcpyHostToHost,
    cudaMemcpyHostToDevice,
    cudaMemcpyDeviceToHost,
    cudaMemcpyDeviceToDevice,
    cudaMemcpyDefault
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8, cudaFuncAttributePreferredSharedMemoryCarveout = 9 };
enum cudaMemPoolAttr { cudaMemPoolAttrReleaseThreshold = 4 };
constexpr unsigned cudaStreamDefault = 0, cudaStreamNonBlocking = 1, cudaEventDefault = 0, cudaEventDisableTiming = 2,
                   cudaHostAllocDefault = 0;
typedef struct CUmemPoolHandle_st* cudaMemPool_t;

struct cudaDeviceProp {
    char name[256];
    size_t totalGlobalMem, sharedMemPerBlock, sharedMemPerBlockOptin, sharedMemPerMultiprocessor;
    int regsPerBlock, warpSize, maxThreadsPerBlock, maxThreadsDim[3], maxGridSize[3];
    int major, minor, multiProcessorCount, maxThreadsPerMultiProcessor, l2CacheSize, memoryBusWidth, pciBusID, pciDeviceID,
        pciDomainID, ECCEnabled, integrated;
};

inline const char* cudaGetErrorString(cudaError_t error) {
    switch (error) {
        case cudaSuccess: return "no error";
        case cudaErrorInvalidValue: return "invalid argument";
        case cudaErrorMemoryAllocation: return "out of memory";
        case cudaErrorInsufficientDriver: return "CUDA driver version is insufficient for CUDA runtime version";
        case cudaErrorNoDevice: return "no CUDA-capable device is detected";
        case cudaErrorInvalidDevice: return "invalid device ordinal";
        case cudaErrorNoKernelImageForDevice: return "no kernel image is available for execution on the device";
        case cudaErrorInvalidResourceHandle: return "invalid resource handle";
        case cudaErrorNotReady: return "device not ready";
        case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
        case cudaErrorLaunchFailure: return "unspecified launch failure";
        default: return "unknown error";
    }
}
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaPeekAtLastError() { return cudaSuccess; }
inline cudaError_t cudaGetDeviceCount(int* n) { *n = 1; return cudaSuccess; }
inline cudaError_t cudaGetDevice(int* n) { *n = 0; return cudaSuccess; }
inline cudaError_t cudaSetDevice(int n) { return n == 0 ? cudaSuccess : cudaErrorInvalidDevice; }
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
    *p = {};
    strcpy(p->name, "emulated");
    p->major = 9;
    p->totalGlobalMem = emu::Memory::total;
    p->sharedMemPerBlock = 48 << 10;
    p->sharedMemPerBlockOptin = 227 << 10;
    p->sharedMemPerMultiprocessor = 228 << 10;
    p->warpSize = 32;
    p->maxThreadsPerBlock = 1024;
    p->multiProcessorCount = 4;
    p->maxThreadsPerMultiProcessor = 2048;
    return cudaSuccess;
}
inline cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) { *pool = nullptr; return cudaSuccess; }
inline cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }
template <class F>
cudaError_t cudaFuncSetAttribute(F kernel, cudaFuncAttribute attribute, int value) {
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
    if (value < 0 || size_t(value) > emu::Shared::highest_limit) return cudaErrorInvalidValue;
    emu::shared_limits()[reinterpret_cast<const void*>(kernel)] = std::max(size_t(value), emu::Shared::default_limit);
    return cudaSuccess;
}

inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { *stream = new CUstream_st; return cudaSuccess; }
inline cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithFlags(stream, 0); }
inline cudaError_t cudaStreamDestroy(cudaStream_t stream) { delete stream; return cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { emu::guards_check_all(); return cudaSuccess; }
inline cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaDeviceSynchronize() { emu::guards_check_all(); return cudaSuccess; }
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { *event = new CUevent_st; return cudaSuccess; }
inline cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
inline cudaError_t cudaEventDestroy(cudaEvent_t event) { delete event; return cudaSuccess; }
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t = nullptr) {
    event->seconds = std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
    return cudaSuccess;
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned = 0) { return cudaSuccess; }
inline cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t from, cudaEvent_t to) {
    *ms = float(1e3 * (to->seconds - from->seconds));
    return cudaSuccess;
}

template <class T>
cudaError_t cudaMalloc(T** to, size_t bytes) {
    *to = reinterpret_cast<T*>(emu::device_take(bytes));
    return *to ? cudaSuccess : cudaErrorMemoryAllocation;
}
template <class T>
cudaError_t cudaMallocAsync(T** to, size_t bytes, cudaStream_t) { return cudaMalloc(to, bytes); }
inline cudaError_t cudaFree(void* at) {
    if (!at) return cudaSuccess;
    const auto it = emu::memory.allocations.find(reinterpret_cast<uintptr_t>(at));
    if (it == emu::memory.allocations.end() || !it->second.live) return cudaErrorInvalidValue;
    emu::device_give_back(at);
    return cudaSuccess;
}
inline cudaError_t cudaFreeAsync(void* at, cudaStream_t) { return cudaFree(at); }
template <class T>
cudaError_t cudaMallocHost(T** to, size_t bytes, unsigned = 0) {
    *to = static_cast<T*>(malloc(std::max<size_t>(bytes, 1)));
    emu::memory.pinned[reinterpret_cast<uintptr_t>(*to)] = bytes;
    return cudaSuccess;
}
template <class T>
cudaError_t cudaHostAlloc(T** to, size_t bytes, unsigned) { return cudaMallocHost(to, bytes); }
inline cudaError_t cudaFreeHost(void* at) {
    if (at && !emu::memory.pinned.erase(reinterpret_cast<uintptr_t>(at))) return cudaErrorInvalidValue;
    free(at);
    return cudaSuccess;
}

inline cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    if (bytes == 0) return cudaSuccess;
    const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice,
               from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    if (kind != cudaMemcpyDefault && (emu::in_region(to) != to_device || emu::in_region(from) != from_device))
        return cudaErrorInvalidValue;
    for (const void* end : {static_cast<const void*>(to), from}) {
        if (!emu::in_region(end)) continue;
        const std::string error = emu::device_range_error(end, bytes);
        if (!error.empty()) throw emu::Error("cudaMemcpy: " + error);
    }
    const emu::DeviceAccess access;
    memcpy(to, from, bytes);
    return cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t = nullptr) {
    return cudaMemcpy(to, from, bytes, kind);
}
inline cudaError_t cudaMemset(void* to, int value, size_t bytes) {
    if (bytes == 0) return cudaSuccess;
    const std::string error = emu::device_range_error(to, bytes);
    if (!error.empty()) throw emu::Error("cudaMemset: " + error);
    const emu::DeviceAccess access;
    memset(to, value, bytes);
    return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t = nullptr) { return cudaMemset(to, value, bytes); }
