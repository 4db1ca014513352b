// Layer norm: forward, with the residual, backward, against the CPU's.
#include "kernel_test.h"
#include "llmc/cpu/layernorm.h"
#include "llmc/cuda/layernorm.cuh"

namespace {

struct NormShape {
    long N;
    int C;
};

#ifdef __SANITIZE_THREAD__
const NormShape norm_shapes[] = {{3, 7}, {9, 64}, {26, 300}, {1, 2056}};
#else
// Rows of whole packs and others, fewer and more packs than threads, one row, each number of packs a thread, and rows too long
// for registers, packed (8200) and not (2051). For each kernel more rows than the emulator's device has blocks, of which several
// warps hold values: only then a warp that runs ahead into the next row changes what another one reads.
const NormShape norm_shapes[] = {{1, 1},     {3, 7},     {17, 48},   {64, 64},   {17, 96},  {26, 500}, {26, 768},
                                 {13, 1501}, {17, 1600}, {10, 2051}, {10, 3000}, {6, 4104}, {10, 8200}};
#endif
constexpr float norm_eps = 1e-5f;

template <class E>
void norm_forward_check(long N, int C, float shift) {
    std::vector<float> a = random_values<E>(N * C, 1), b = random_values<E>(N * C, 2);
    const std::vector<float> add_bias = random_values<E>(C, 3), weight = random_values<E>(C, 4), bias = random_values<E>(C, 5);
    for (float& value : a) value = host_float(host_round<E>(value + shift));
    const DeviceBuffer<E> a_device(a), b_device(b), add_bias_device(add_bias), weight_device(weight), bias_device(bias);
    for (int kind = 0; kind < 3; kind++) {  // plain, residual, residual with bias
        CAPTURE(kind);
        // the norm sees the residual as it is stored
        std::vector<float> residual = a;
        for (long i = 0; kind > 0 && i < N * C; i++) {
            residual[i] = host_float(host_round<E>(a[i] + (kind > 1 ? b[i] + add_bias[i % C] : b[i])));
        }
        std::vector<float> out(N * C), mean(N), rstd(N);
        cpu::layernorm_forward(out.data(), mean.data(), rstd.data(), residual.data(), weight.data(), bias.data(), N, C, norm_eps, {});
        std::vector<E> first;
        in_thread_orders([&] {
            const DeviceBuffer<E> residual_found(N * C), found(N * C);
            const DeviceBuffer<float> mean_found(N), rstd_found(N);
            if (kind == 0) {
                cuda::layernorm_forward(found.data, mean_found.data, rstd_found.data, a_device.data, weight_device.data,
                                        bias_device.data, N, C, norm_eps, kernel_test().stream);
            } else {
                cuda::residual_layernorm_forward(residual_found.data, found.data, mean_found.data, rstd_found.data, a_device.data,
                                                 b_device.data, kind > 1 ? add_bias_device.data : nullptr, weight_device.data,
                                                 bias_device.data, N, C, norm_eps, kernel_test().stream);
                CHECK(residual_found.floats() == residual);
            }
            CHECK(relative_l2(found.floats(), out) < kernel_tolerance<E>);
            CHECK(relative_l2(mean_found.floats(), mean) < 1e-5);
            CHECK(relative_l2(rstd_found.floats(), rstd) < 1e-5);
            CHECK((residual_found.guards_hold() && found.guards_hold() && mean_found.guards_hold() && rstd_found.guards_hold()));
            if (first.empty()) first = found.download();
            CHECK(std::memcmp(found.download().data(), first.data(), first.size() * sizeof(E)) == 0);
        });
    }
}

template <class E>
void norm_backward_check(long N, int C) {
    const std::vector<float> inp = random_values<E>(N * C, 1), dout = random_values<E>(N * C, 2), weight = random_values<E>(C, 3);
    const std::vector<float> before = random_values<E>(N * C, 4), start = random_values<float>(C, 5);
    std::vector<float> out(N * C), mean(N), rstd(N);
    cpu::layernorm_forward(out.data(), mean.data(), rstd.data(), inp.data(), weight.data(), weight.data(), N, C, norm_eps, {});
    const DeviceBuffer<E> inp_device(inp), dout_device(dout), weight_device(weight);
    const DeviceBuffer<float> mean_device(mean), rstd_device(rstd);
    std::vector<float> first;
    for (bool accumulate : {false, true}) {
        CAPTURE(accumulate);
        std::vector<float> dinp = before, dweight = start, dbias = start;
        cpu::layernorm_backward(dinp.data(), dweight.data(), dbias.data(), dout.data(), inp.data(), weight.data(), mean.data(),
                                rstd.data(), N, C, accumulate, {});
        const auto run = [&] {
            const DeviceBuffer<E> dinp_found(before);
            const std::vector<float> poison(C, NAN);
            const DeviceBuffer<float> dweight_found(accumulate ? start : poison), dbias_found(accumulate ? start : poison);
            cuda::layernorm_backward(dinp_found.data, dweight_found.data, dbias_found.data, dout_device.data, inp_device.data,
                                     weight_device.data, mean_device.data, rstd_device.data, N, C, accumulate,
                                     kernel_test().stream);
            CHECK(relative_l2(dinp_found.floats(), dinp) < kernel_tolerance<E>);
            CHECK(relative_l2(dweight_found.floats(), dweight) < 1e-5);
            CHECK(relative_l2(dbias_found.floats(), dbias) < 1e-5);
            CHECK((dinp_found.guards_hold() && dweight_found.guards_hold() && dbias_found.guards_hold()));
            if (first.empty()) first = dweight_found.floats();
            CHECK((accumulate || std::memcmp(dweight_found.floats().data(), first.data(), C * sizeof(float)) == 0));
        };
        if (accumulate) run();  // the kernels are the same: one order is enough
        else in_thread_orders(run);
    }
}

}  // namespace

TEST_CASE_TEMPLATE("layer norm, alone and after a residual", E, float, bf16, fp16) {
    for (const auto [N, C] : norm_shapes) {
        CAPTURE(N);
        CAPTURE(C);
        norm_forward_check<E>(N, C, 0.5f);
    }
    norm_forward_check<E>(2, 264, 300.0f);  // E[x^2] - E[x]^2 would lose half of the digits
}

TEST_CASE_TEMPLATE("layer norm, backward", E, float, bf16, fp16) {
    for (const auto [N, C] : norm_shapes) {
        CAPTURE(N);
        CAPTURE(C);
        norm_backward_check<E>(N, C);
    }
}
