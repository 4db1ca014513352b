// What AdamW is told, on every target.
#pragma once
#include <cstdint>

struct AdamW {
    float lr, beta1, beta2, eps, weight_decay;
    float grad_scale;   // gradients are multiplied by it first (clipping)
    long step;          // from 1
    uint64_t seed = 0;  // of stochastic rounding, where weights of 16 bits have no float32 master
};
