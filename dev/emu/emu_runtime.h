// The CUDA runtime: devices, memory, streams and events under CUDA's names.
#pragma once
#include <cstdlib>
#include <cstring>
#include <utility>

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
enum cudaDeviceAttr { cudaDevAttrClockRate = 13 };
enum cudaMemPoolAttr { cudaMemPoolAttrReleaseThreshold = 4 };
constexpr unsigned cudaStreamDefault = 0, cudaStreamNonBlocking = 1, cudaEventDefault = 0, cudaEventDisableTiming = 2,
                   cudaHostAllocDefault = 0;
enum cudaMemoryType { cudaMemoryTypeUnregistered, cudaMemoryTypeHost, cudaMemoryTypeDevice };
typedef struct CUmemPoolHandle_st* cudaMemPool_t;

struct cudaPointerAttributes {
    cudaMemoryType type;
    int device;
    void *devicePointer, *hostPointer;
};

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

// --- errors. Wrong use that CUDA reports by a code returns it; what a kernel does wrong is thrown as emu::Error by the call
// that waits for it.

namespace emu {
inline cudaError_t last_error = cudaSuccess;
inline cudaError_t result(cudaError_t error) {
    if (error != cudaSuccess && error != cudaErrorNotReady) last_error = error;
    return error;
}
}  // namespace emu

inline cudaError_t cudaPeekAtLastError() { return emu::last_error; }
inline cudaError_t cudaGetLastError() { return std::exchange(emu::last_error, cudaSuccess); }
inline const char* cudaGetErrorName(cudaError_t error) { return cudaGetErrorString(error); }

// --- the device

inline cudaError_t cudaGetDeviceCount(int* count) {
    *count = 1;
    return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int* index) {
    *index = 0;
    return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int index) { return emu::result(index == 0 ? cudaSuccess : cudaErrorInvalidDevice); }
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int index) {
    if (index != 0) return emu::result(cudaErrorInvalidDevice);
    *properties = {};
    std::strcpy(properties->name, "emulated");
    properties->totalGlobalMem = emu::Memory::total;
    properties->sharedMemPerBlock = emu::Shared::default_limit;
    properties->sharedMemPerBlockOptin = emu::Shared::highest_limit;
    properties->sharedMemPerMultiprocessor = 228 << 10;
    properties->regsPerBlock = 65536;
    properties->warpSize = 32;
    properties->maxThreadsPerBlock = 1024;
    properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
    properties->maxThreadsDim[2] = 64;
    properties->maxGridSize[0] = 0x7fffffff;
    properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
    properties->major = 9;
    properties->multiProcessorCount = 4;
    properties->maxThreadsPerMultiProcessor = 2048;
    properties->l2CacheSize = 50 << 20;
    return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int index) {
    if (attribute != cudaDevAttrClockRate) return emu::result(cudaErrorInvalidValue);
    if (index != 0) return emu::result(cudaErrorInvalidDevice);
    *value = 1'000'000;  // kHz
    return cudaSuccess;
}
inline cudaError_t cudaDeviceSynchronize() {
    emu::device_synchronize();
    return cudaSuccess;
}
inline cudaError_t cudaMemGetInfo(size_t* unused, size_t* total) {
    *total = emu::Memory::total;
    *unused = emu::Memory::total - emu::memory.live;
    return cudaSuccess;
}
inline cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) {
    *pool = nullptr;
    return cudaSuccess;
}
inline cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }

template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel kernel, cudaFuncAttribute attribute, int value) {
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
    if (value < 0 || size_t(value) > emu::Shared::highest_limit) return emu::result(cudaErrorInvalidValue);
    emu::shared_limits()[reinterpret_cast<const void*>(kernel)] = std::max(size_t(value), emu::Shared::default_limit);
    return cudaSuccess;
}
template <class Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel, int threads, size_t dynamic_shared) {
    if (threads < 1 || threads > 1024) return emu::result(cudaErrorInvalidValue);
    *blocks = std::min({32, 2048 / ((threads + 31) / 32 * 32), int((228 << 10) / (dynamic_shared + 1024))});
    return cudaSuccess;
}

// --- streams and events

inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
    emu::thread_check();
    if (flags != cudaStreamNonBlocking) throw emu::Error("emu: streams other than cudaStreamNonBlocking are not emulated");
    emu::streams.all.push_back(*stream = new CUstream_st);
    return cudaSuccess;
}
inline cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
    return cudaStreamCreateWithFlags(stream, flags);
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
    CUstream_st* stream = emu::stream_find(handle);
    if (!stream) return emu::result(cudaErrorInvalidResourceHandle);
    emu::stream_synchronize(*stream);
    return cudaSuccess;
}
inline cudaError_t cudaStreamQuery(cudaStream_t handle) {
    CUstream_st* stream = handle ? handle : &emu::streams.null_stream;
    emu::stream_poll(*stream);
    return stream->pending ? cudaErrorNotReady : cudaSuccess;
}
inline cudaError_t cudaStreamDestroy(cudaStream_t handle) {
    CUstream_st* stream = handle ? emu::stream_find(handle) : nullptr;
    if (!stream) return emu::result(cudaErrorInvalidResourceHandle);
    const bool done = emu::device_synchronize_quietly();
    std::erase(emu::streams.all, stream);
    delete stream;
    return emu::result(done ? cudaSuccess : cudaErrorLaunchFailure);
}

inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
    *event = new CUevent_st;
    return cudaSuccess;
}
inline cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }
inline cudaError_t cudaEventDestroy(cudaEvent_t event) {
    if (!event) return emu::result(cudaErrorInvalidResourceHandle);
    delete event;
    return cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t handle = nullptr) {
    CUstream_st* stream = emu::stream_find(handle);
    if (!event || !stream) return emu::result(cudaErrorInvalidResourceHandle);
    emu::event_record(*event, *stream);
    return cudaSuccess;
}
inline cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned = 0) {
    CUstream_st* stream = emu::stream_find(handle);
    if (!event || !stream) return emu::result(cudaErrorInvalidResourceHandle);
    emu::event_wait(*stream, *event);
    return cudaSuccess;
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    if (!event) return emu::result(cudaErrorInvalidResourceHandle);
    emu::event_synchronize(*event);
    return cudaSuccess;
}
inline cudaError_t cudaEventQuery(cudaEvent_t event) {
    if (!event) return emu::result(cudaErrorInvalidResourceHandle);
    if (!emu::event_done(*event) && event->record->stream) emu::stream_poll(*event->record->stream);
    return emu::event_done(*event) ? cudaSuccess : cudaErrorNotReady;
}
inline cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
    if (!from || !to || !from->record->recorded || !to->record->recorded) return emu::result(cudaErrorInvalidResourceHandle);
    if (!emu::event_done(*from) || !emu::event_done(*to)) return cudaErrorNotReady;
    *milliseconds = float(1e3 * (to->record->seconds - from->record->seconds));
    return cudaSuccess;
}

// --- memory

template <class T>
cudaError_t cudaMallocAsync(T** to, size_t bytes, cudaStream_t stream) {
    emu::thread_check();
    char* at = emu::allocation_take(bytes);
    *to = reinterpret_cast<T*>(at);
    if (!at) return emu::result(cudaErrorMemoryAllocation);
    emu::enqueue(stream, [at] { emu::allocation_begin(at); });
    return cudaSuccess;
}
inline cudaError_t cudaFreeAsync(void* at, cudaStream_t stream) {
    if (!at) return cudaSuccess;
    const auto it = emu::memory.allocations.find(reinterpret_cast<uintptr_t>(at));
    if (it == emu::memory.allocations.end() || it->second.state == emu::State::freed) return emu::result(cudaErrorInvalidValue);
    emu::enqueue(stream, [at] {
        if (!emu::allocation_end(at)) throw emu::Error(emu::text("cudaFreeAsync of %p, which is not allocated by then", at));
    });
    return cudaSuccess;
}
template <class T>
cudaError_t cudaMalloc(T** to, size_t bytes) {
    emu::thread_check();
    char* at = emu::allocation_take(bytes);
    *to = reinterpret_cast<T*>(at);
    if (!at) return emu::result(cudaErrorMemoryAllocation);
    emu::allocation_begin(at);
    return cudaSuccess;
}
// Waits for the device, as CUDA's does.
inline cudaError_t cudaFree(void* at) {
    if (!at) return cudaSuccess;
    const bool done = emu::device_synchronize_quietly();
    bool freed = false;
    try {
        freed = emu::allocation_end(at);
    } catch (...) {
        emu::streams.error = std::current_exception();
    }
    return emu::result(!done ? cudaErrorLaunchFailure : !freed ? cudaErrorInvalidValue : cudaSuccess);
}

template <class T>
cudaError_t cudaHostAlloc(T** to, size_t bytes, unsigned) {
    *to = static_cast<T*>(aligned_alloc(256, std::max<size_t>((bytes + 255) / 256, 1) * 256));
    if (!*to) return emu::result(cudaErrorMemoryAllocation);
    emu::memory.pinned[reinterpret_cast<uintptr_t>(*to)] = bytes;
    return cudaSuccess;
}
template <class T>
cudaError_t cudaMallocHost(T** to, size_t bytes, unsigned flags = cudaHostAllocDefault) {
    return cudaHostAlloc(to, bytes, flags);
}
inline cudaError_t cudaFreeHost(void* at) {
    const bool done = emu::device_synchronize_quietly();
    if (at && !emu::memory.pinned.erase(reinterpret_cast<uintptr_t>(at))) return emu::result(cudaErrorInvalidValue);
    free(at);
    return emu::result(done ? cudaSuccess : cudaErrorLaunchFailure);
}
inline cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* at) {
    const bool device = emu::in_region(at), pinned = emu::is_pinned(at);
    *attributes = {device ? cudaMemoryTypeDevice : pinned ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered, 0,
                   device || pinned ? const_cast<void*>(at) : nullptr, pinned ? const_cast<void*>(at) : nullptr};
    return cudaSuccess;
}

// --- copies

namespace emu {

// Throws unless [at, at + bytes) is device memory; host memory is not looked at.
inline void range_check(const char* call, const void* at, size_t bytes, bool now) {
    const std::string error = in_region(at) ? device_range_error(at, bytes, now) : "";
    if (!error.empty()) throw Error(std::string(call) + ": " + error);
}

// CUDA's rules: pinned memory is read and written when the copy's turn comes. Other host memory is read at once; a copy to it
// is waited for. `wait`: cudaMemcpy, which waits for every copy but one on the device.
inline cudaError_t copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t handle, bool wait) {
    const bool to_device = in_region(to), from_device = in_region(from);
    CUstream_st* stream = stream_find(handle);
    if (!stream) return result(cudaErrorInvalidResourceHandle);
    if (kind != cudaMemcpyDefault &&
        (to_device != (kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice) ||
         from_device != (kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice)))
        return result(cudaErrorInvalidValue);
    if (bytes == 0) return cudaSuccess;
    range_check("cudaMemcpy", to, bytes, false);
    range_check("cudaMemcpy", from, bytes, false);
    std::shared_ptr<char[]> staged;
    if (!from_device && !is_pinned(from)) {
        staged.reset(new char[bytes]);
        std::memcpy(staged.get(), from, bytes);
    }
    enqueue(handle, [=] {
        range_check("cudaMemcpy", to, bytes, true);
        range_check("cudaMemcpy", from, bytes, true);
        std::memmove(to, staged ? staged.get() : from, bytes);
    });
    if ((wait && !(to_device && from_device)) || (!to_device && !is_pinned(to))) stream_synchronize(*stream);
    return cudaSuccess;
}

}  // namespace emu

inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream = nullptr) {
    return emu::copy(to, from, bytes, kind, stream, false);
}
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    return emu::copy(to, from, bytes, kind, nullptr, true);
}
inline cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream = nullptr) {
    if (!emu::in_region(to)) return emu::result(cudaErrorInvalidValue);
    if (bytes == 0) return cudaSuccess;
    emu::range_check("cudaMemset", to, bytes, false);
    emu::enqueue(stream, [=] {
        emu::range_check("cudaMemset", to, bytes, true);
        std::memset(to, value, bytes);
    });
    return cudaSuccess;
}
// Does not wait, as CUDA's does not.
inline cudaError_t cudaMemset(void* to, int value, size_t bytes) { return cudaMemsetAsync(to, value, bytes, nullptr); }
