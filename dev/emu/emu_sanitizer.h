// What the sanitizers must be told: AddressSanitizer about memory and stacks, ThreadSanitizer about threads.
//
// Under ThreadSanitizer every CUDA thread is a TSan fiber and only barriers order them, so a race between CUDA threads is
// reported though they run one after the other. The emulator's own code is hidden from it by EMU_NO_TSAN: such functions use
// no standard containers and no memset or memcpy (those are intercepted) on what several CUDA threads touch.
#pragma once
#include <cstddef>

#if defined __has_feature
#if __has_feature(address_sanitizer)
#define __SANITIZE_ADDRESS__ 1
#endif
#if __has_feature(thread_sanitizer)
#define __SANITIZE_THREAD__ 1
#endif
#endif

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#ifdef __SANITIZE_THREAD__
#define EMU_NO_TSAN __attribute__((no_sanitize("thread")))
extern "C" {
void* __tsan_get_current_fiber(void);
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
}
#else
#define EMU_NO_TSAN
#endif

namespace emu {

#ifdef __SANITIZE_ADDRESS__
constexpr bool with_asan = true;
inline void memory_poison(const void* from, size_t bytes) { __asan_poison_memory_region(from, bytes); }
inline void memory_unpoison(const void* from, size_t bytes) { __asan_unpoison_memory_region(from, bytes); }
#else
constexpr bool with_asan = false;
inline void memory_poison(const void*, size_t) {}
inline void memory_unpoison(const void*, size_t) {}
#endif

#ifdef __SANITIZE_THREAD__
constexpr bool with_tsan = true;
inline void order_release(void* at) { __tsan_release(at); }
inline void order_acquire(void* at) { __tsan_acquire(at); }
#else
constexpr bool with_tsan = false;
inline void order_release(void*) {}
inline void order_acquire(void*) {}
#endif

// memset that neither sanitizer sees.
EMU_NO_TSAN __attribute__((no_sanitize("address"))) inline void fill_unseen(void* to, unsigned char value, size_t bytes) {
    volatile unsigned char* at = static_cast<unsigned char*>(to);
    typedef volatile unsigned long long Word;
    const unsigned long long word = value * 0x0101010101010101ull;
    size_t i = 0;
    for (; i + 8 <= bytes; i += 8) *reinterpret_cast<Word*>(at + i) = word;
    for (; i < bytes; i++) at[i] = value;
}

}  // namespace emu
