// Kernel launches: what CUDA would refuse is refused, arguments are copied, then block after block runs.
#pragma once
#include <functional>
#include <numeric>
#include <tuple>
#include <type_traits>

#include "emu_memory.h"
#include "emu_stream.h"
#include "emu_symbol.h"

namespace emu {

// A launch without its arguments.
struct Launch {
    const void* kernel;
    dim3 grid, block;
    size_t dynamic_shared, shared_limit;
};

inline std::map<const void*, size_t>& shared_limits() {  // raised by cudaFuncSetAttribute
    static std::map<const void*, size_t> limits;
    return limits;
}

[[noreturn]] inline void launch_error(const Launch& launch, const std::string& what) {
    throw Error(symbol_name(launch.kernel) + text("<<<(%u,%u,%u), (%u,%u,%u), %zu>>>: ", launch.grid.x, launch.grid.y,
                                                  launch.grid.z, launch.block.x, launch.block.y, launch.block.z,
                                                  launch.dynamic_shared) + what);
}

inline void launch_check(const Launch& launch) {
    const dim3 &grid = launch.grid, &block = launch.block;
    const uint64_t threads = uint64_t(block.x) * block.y * block.z;
    if (running) launch_error(launch, "a kernel cannot launch another");
    if (threads == 0 || threads > Block::max_threads || block.z > 64)
        launch_error(launch, text("a block has 1 .. 1024 threads and z up to 64, not %llu", (unsigned long long)threads));
    if (!grid.x || !grid.y || !grid.z || grid.x > 0x7fffffff || grid.y > 65535 || grid.z > 65535)
        launch_error(launch, "a grid has 1 .. 2147483647 blocks in x and 1 .. 65535 in y and z");
    if (launch.dynamic_shared > launch.shared_limit)
        launch_error(launch, text("%zu bytes of dynamic shared memory, allowed are %zu: raise it with cudaFuncSetAttribute",
                                  launch.dynamic_shared, launch.shared_limit));
}

enum class When { put, before, after };

// Pointers among the arguments are to memory of the device, or null. What a struct holds is not seen. After the kernel ran,
// the guards of that memory are looked at.
template <class T>
void argument_check(const Launch& launch, When when, int number, const T& value) {
    if constexpr (std::is_pointer_v<T> && !std::is_function_v<std::remove_pointer_t<T>>) {
        const void* address = reinterpret_cast<const void*>(value);
        if (!address || is_pinned(address)) return;
        const auto it = allocation_find(address);
        if (when == When::after) {
            try {
                guards_check(it->first, it->second);
            } catch (const Error& error) {
                launch_error(launch, text("argument %d: ", number) + error.what());
            }
            return;
        }
        const std::string error = device_range_error(address, 0, when == When::before);
        if (!error.empty()) launch_error(launch, text("argument %d is not device memory: ", number) + error);
    }
}

// `arguments` for `body`, which runs the kernel once.
inline void launch_run(const Launch& launch, void (*body)(void*), void* arguments) {
    const uint64_t width = launch.grid.x, slice = width * launch.grid.y, blocks = slice * launch.grid.z;
    blockDim = launch.block;
    gridDim = launch.grid;
    shared.limit = launch.shared_limit;
    try {
        block_prepare(launch.block, body, arguments);
        uint64_t step = 1, offset = 0;  // block k is k * step + offset: in turn, or by a step without common divisor
        if (block.order == Order::random) {
            offset = block.random.next() % blocks;
            do step = 1 + block.random.next() % blocks;
            while (std::gcd(step, blocks) != 1);
        }
        for (uint64_t k = 0; k < blocks; k++) {
            const uint64_t b = block.order == Order::reverse ? blocks - 1 - k : (k * step + offset) % blocks;
            shared_begin(launch.dynamic_shared);
            block_run({unsigned(b % width), unsigned(b / width % launch.grid.y), unsigned(b / slice)});
            shared_end();
        }
    } catch (const std::exception& error) {
        order_acquire(&block.end_order);
        launch_error(launch, error.what());
    }
    order_acquire(&block.end_order);
}

template <class... P, class... A>
void launch(void (*kernel)(P...), dim3 grid, dim3 block_shape, size_t dynamic_shared, cudaStream_t stream, A&&... args) {
    static_assert(sizeof...(P) == sizeof...(A), "as many arguments as the kernel has parameters");
    const void* address = reinterpret_cast<const void*>(kernel);
    const auto limit = shared_limits().find(address);
    const Launch launch{address, grid, block_shape, dynamic_shared,
                        limit == shared_limits().end() ? Shared::default_limit : limit->second};
    launch_check(launch);
    struct Call {
        void (*kernel)(P...);
        std::tuple<std::decay_t<P>...> args;
    };
    Call call{kernel, {static_cast<P>(std::forward<A>(args))...}};
    auto arguments_check = [](const Launch& launch, When when, const Call& call) {
        [[maybe_unused]] int n = 0;
        std::apply([&](const auto&... each) { (argument_check(launch, when, n++, each), ...); }, call.args);
    };
    arguments_check(launch, When::put, call);
    enqueue(stream, [launch, call, arguments_check]() mutable {
        arguments_check(launch, When::before, call);
        launch_run(launch, [](void* p) { std::apply(static_cast<Call*>(p)->kernel, static_cast<Call*>(p)->args); }, &call);
        arguments_check(launch, When::after, call);
    });
}

}  // namespace emu
