// The device seam on the cpu target: work is done when a call returns, so a Stream carries nothing and an Event is a time.
#pragma once
#include <sys/mman.h>

#include <chrono>
#include <cstddef>
#include <cstring>

#include "llmc/check.h"

struct Device {};
struct Stream {};
struct Event {
    double seconds = 0;
};

inline Device device_open(int) { return {}; }
inline int device_count() { return 1; }
inline Stream stream_make(Device&) { return {}; }
inline void stream_synchronize(Stream) {}
inline Event event_make() { return {}; }
inline void event_record(Event& event, Stream) {
    event.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
inline void stream_wait(Stream, const Event&) {}
inline double event_seconds(const Event& from, const Event& to) { return to.seconds - from.seconds; }

struct EventPool {};
inline Event event_take(EventPool&) { return {}; }
inline void stream_follow(EventPool&, Stream, Stream) {}

constexpr bool device_is_host = true;  // whether the host may touch the device's memory

// Zeroed memory of the device, `bytes` long. Large pages where the system has them: the optimizer's sweep over all
// parameters is bound by memory, and small pages cost it a TLB miss every 4 KB.
inline void* device_allocate(size_t bytes) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    check(memory != MAP_FAILED, "cannot allocate %.1f MiB of memory: use a smaller model, --micro-batch or --seq, or more ranks",
          double(bytes) / (1 << 20));
    madvise(memory, bytes, MADV_HUGEPAGE);
    return memory;
}

inline void device_free(void* memory, size_t bytes) { munmap(memory, bytes); }
inline void device_copy(void* to, const void* from, size_t bytes, Stream) { std::memcpy(to, from, bytes); }
inline void device_zero(void* memory, size_t bytes, Stream) { std::memset(memory, 0, bytes); }
inline void device_upload(void* to, const void* host, size_t bytes, Stream) { std::memcpy(to, host, bytes); }
inline void device_download(void* host, const void* from, size_t bytes, Stream) { std::memcpy(host, from, bytes); }
