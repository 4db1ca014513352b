// Every CUDA kernel against the CPU op of the same name. The same source runs on the emulator in CI and, built by nvcc, on a
// GPU (scripts/gpu_check.sh). One file an area is in test/kernels/; KERNEL_AREA builds a single one.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#ifdef KERNEL_AREA
#include KERNEL_AREA
#else
#include "kernels/test_attention.cuh"
#include "kernels/test_codec.cuh"
#include "kernels/test_elementwise.cuh"
#include "kernels/test_matmul.cuh"
#include "kernels/test_norm.cuh"
#endif
