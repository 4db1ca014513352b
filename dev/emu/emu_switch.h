// Stacks, and the switch from one to another: a CUDA thread that waits keeps its stack, and the next one runs on its own.
//
// The compiler saves what the clobber list names; the assembly saves the frame pointer and the address to go on at, and
// swaps the stack pointer. It jumps rather than returns: a return to another stack is always mispredicted.
#pragma once
#include <sys/mman.h>

#include <cstdint>
#include <stdexcept>

#include "emu_sanitizer.h"

#ifdef __clang__
#define EMU_OPAQUE __attribute__((noinline))
#else
#define EMU_OPAQUE __attribute__((noipa))
#endif

namespace emu {

// Goes on at stack pointer `load`; returns when somebody loads what is put in *save.
#if defined __x86_64__
EMU_OPAQUE EMU_NO_TSAN inline void stack_switch(void** save, void* load) {
    asm volatile(
        "leaq -128(%%rsp), %%rsp\n\t"  // past the red zone
        "pushq %%rbp\n\t"
        "leaq 1f(%%rip), %%rax\n\t"
        "pushq %%rax\n\t"
        "movq %%rsp, (%%rdi)\n\t"
        "movq %%rsi, %%rsp\n\t"
        "popq %%rax\n\t"
        "jmpq *%%rax\n"
        "1:\n\t"
        "popq %%rbp\n\t"
        "leaq 128(%%rsp), %%rsp\n\t"
        : "+D"(save), "+S"(load)
        :
        : "rax", "rbx", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "cc", "memory");
}

// A stack pointer that stack_switch starts `entry` from.
EMU_NO_TSAN inline void* stack_prepare(char* top, void (*entry)()) {
    void** at = reinterpret_cast<void**>((reinterpret_cast<uintptr_t>(top) & ~uintptr_t(63)) - 64);
    at[0] = reinterpret_cast<void*>(entry);  // popped: a function starts 8 bytes below a multiple of 16
    at[1] = nullptr;
    return at;
}
#elif defined __aarch64__
EMU_OPAQUE EMU_NO_TSAN inline void stack_switch(void** save, void* load) {
    register void** x0 asm("x0") = save;
    register void* x1 asm("x1") = load;
    asm volatile(
        "adr x9, 1f\n\t"
        "stp x29, x9, [sp, #-16]!\n\t"
        "mov x9, sp\n\t"
        "str x9, [x0]\n\t"
        "mov sp, x1\n\t"
        "ldp x29, x9, [sp], #16\n\t"
        "br x9\n"
        "1:\n\t"
        : "+r"(x0), "+r"(x1)
        :
        : "x2", "x3", "x4", "x5", "x6", "x7", "x8", "x9", "x10", "x11", "x12", "x13", "x14", "x15", "x16", "x17", "x19", "x20",
          "x21", "x22", "x23", "x24", "x25", "x26", "x27", "x28", "x30", "v8", "v9", "v10", "v11", "v12", "v13", "v14", "v15",
          "cc", "memory");
}

EMU_NO_TSAN inline void* stack_prepare(char* top, void (*entry)()) {
    void** at = reinterpret_cast<void**>((reinterpret_cast<uintptr_t>(top) & ~uintptr_t(63)) - 64);
    at[0] = nullptr;  // frame pointer: end of the chain
    at[1] = reinterpret_cast<void*>(entry);
    return at;
}
#else
#error "dev/emu/emu_switch.h has no stack_switch for this processor"
#endif

// Stacks of one size, each above memory that may not be touched, made as they are needed.
struct Stacks {
    static constexpr size_t guard = 64 << 10;  // as large as a big frame that steps over it would have to be
    static constexpr size_t bytes = guard + (with_asan || with_tsan ? 256 << 10 : 64 << 10);
    static constexpr size_t max_count = with_tsan ? 4096 : 1024;

    char* all[max_count];
    char* unused[max_count];
    size_t count = 0, unused_count = 0;

    void reserve(size_t wanted) {
        if (wanted <= count) return;
        const size_t add = (wanted - count + 63) / 64 * 64;
        void* memory = mmap(nullptr, add * bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) throw std::runtime_error("emu: no memory for the stacks of CUDA threads");
        for (size_t i = 0; i < add; i++) {
            all[count] = static_cast<char*>(memory) + i * bytes;
            mprotect(all[count++], guard, PROT_NONE);
        }
        release_all();
    }
    void release_all() {
        unused_count = 0;
        for (size_t i = count; i-- > 0;) unused[unused_count++] = all[i];
    }
    // Also after threads were given up in the middle of what they did.
    void clean_all() {
        for (size_t i = 0; i < count; i++) memory_unpoison(all[i] + guard, bytes - guard);
        release_all();
    }
    bool is_guard(const void* address) const {
        const uintptr_t at = reinterpret_cast<uintptr_t>(address);
        for (size_t i = 0; i < count; i++) {
            if (at - reinterpret_cast<uintptr_t>(all[i]) < guard) return true;
        }
        return false;
    }
    // Below the top, differing from stack to stack: tops at equal distances would share few cache sets.
    static char* top(char* stack) { return stack + bytes - (reinterpret_cast<uintptr_t>(stack) / bytes % 16) * 192; }
};

}  // namespace emu
