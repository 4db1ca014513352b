// What follows the sum over ranks of a row-parallel layer's output: bias, residual and norm. With b that sum, rows of C values,
//   residual = a + b + add_bias,   out = layernorm(residual)
// as in op::residual_layernorm_forward; given as one value to kernels that decode b on the way (cuda/codec_norm.cuh).
#pragma once

template <class E>
struct ResidualNorm {
    E* residual;             // [rows, C]
    E* out;                  // [rows, C]; null: not wanted, by kernels that encode it
    float *mean, *rstd;      // [rows]
    const E* a;              // [rows, C] the residual stream before
    const E* add_bias;       // [C]; null: none
    const E *weight, *bias;  // [C]
    int C;
    float eps;
};
