// Streams and events.
#pragma once
#include <chrono>
#include <functional>
#include <memory>

#include "emu_memory.h"

struct CUstream_st {};
struct CUevent_st { double seconds = 0; };
typedef CUstream_st* cudaStream_t;
typedef CUevent_st* cudaEvent_t;

namespace emu {
inline void enqueue(cudaStream_t, std::function<void()> work) { work(); }
}
