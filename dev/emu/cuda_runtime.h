// CUDA without a GPU or a toolkit: kernels run on the CPU, one fiber for each CUDA thread. README.md says what it finds.
//
// Kernels are launched by emu::launch, and shared memory is declared by EMU_SHARED_ARRAY and EMU_SHARED_DYNAMIC:
// __shared__ is not defined, so that it does not compile.
#pragma once

#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

#include "emu_atomic.h"
#include "emu_launch.h"
#include "emu_math.h"
#include "emu_runtime.h"
#include "emu_shared.h"
#include "emu_vector.h"
#include "emu_warp.h"
