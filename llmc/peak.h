// The yardstick of a step's speed: what this rank's device could do at best. On GPUs NVIDIA's dense peak for the storage
// type with float32 accumulation, by the part's name; on CPUs the measured rate of sgemm, as nobody publishes one.
//
//   MFU = (6 (parameters - position embeddings) + 12 L C T) x tokens per second / peak of all ranks
#pragma once
#include <string>

#include "llmc/ops.h"

struct Peak {
    double gflops;
    std::string what;  // "sgemm, measured", "NVIDIA H200, dense bf16"
};

#ifdef LLMC_CUDA
namespace peak_detail {

struct Part {
    const char* name;      // longer names first, as the first that occurs in the device's own counts
    double tensor, simple;  // TFLOP/s: 16-bit tensor cores, dense, with float32 accumulation; float32 without tensor cores
};

constexpr Part parts[] = {
    {"GB300", 2500, 80},       {"B300", 2250, 75},        {"GB200", 2500, 80},       {"B200", 2250, 75},
    {"GH200", 989, 67},        {"H200 NVL", 835, 60},     {"H200", 989, 67},         {"H100 NVL", 835, 60},
    {"H100 PCIe", 756, 51},    {"H100", 989, 67},         {"H800 PCIe", 756, 51},    {"H800", 989, 67},
    {"H20", 148, 44},          {"A100", 312, 19.5},       {"A800", 312, 19.5},       {"A30", 165, 10.3},
    {"A40", 149.7, 37.4},      {"A10", 125, 31.2},        {"L40S", 362, 91.6},       {"L40", 181, 90.5},
    {"L4", 121, 30.3},         {"PRO 6000", 503.8, 126},  {"6000 Ada", 364.2, 91.1}, {"RTX A6000", 154.8, 38.7},
    {"RTX A5000", 111.1, 27.8}, {"RTX 5090", 209.5, 104.8}, {"RTX 5080", 112.6, 56.3}, {"RTX 4090", 165.2, 82.6},
    {"RTX 4080", 97.5, 48.7},  {"RTX 3090 Ti", 80, 40},   {"RTX 3090", 71.2, 35.6},  {"RTX 3080", 59.5, 29.8},
};

// FLOPs a clock and SM of the tensor cores (16 bits, dense, float32 accumulation), for parts that are not in the table.
constexpr int tensor_flops(int major, int minor) {
    if (major == 8) return minor == 0 ? 2048 : 512;
    return major == 9 ? 4096 : major == 10 ? 8192 : 512;
}

}  // namespace peak_detail

// Of one rank, whose matrices of a step have about M x N x K.
inline Peak peak_find(const Device& device, int, int, int) {
    const std::string name = device.properties.name;
    const bool tensor = sizeof(floatX) == 2;
    const std::string what = name + (tensor ? ", dense, 16 bits" : ", float32 without tensor cores");
    for (const peak_detail::Part& part : peak_detail::parts) {
        if (name.find(part.name) != std::string::npos) return {1e3 * (tensor ? part.tensor : part.simple), what};
    }
    int khz = 0;
    cuda_check(cudaDeviceGetAttribute(&khz, cudaDevAttrClockRate, device.index), "cudaDeviceGetAttribute");
    const cudaDeviceProp& p = device.properties;
    const int flops = tensor ? peak_detail::tensor_flops(p.major, p.minor) : p.major == 8 && p.minor == 0 ? 128 : 256;
    return {1e-6 * p.multiProcessorCount * double(khz) * flops, what + ", estimated from SMs and clock"};
}
#else
inline Peak peak_find(const Device&, int M, int N, int K) { return {op::sgemm_rate_measure(M, N, K), "sgemm, measured"}; }
#endif
