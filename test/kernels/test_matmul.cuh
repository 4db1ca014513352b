// Linear layers, by cuBLASLt with epilogues and by our own kernels around a plain product, against the CPU's.
#include "kernel_test.h"
#include "llmc/cpu/matmul.h"
#include "llmc/cuda/matmul.cuh"

namespace {

struct MatmulTestShape {
    long N;
    int C, OC;
};

// One row; odd sizes; sizes that the epilogues take and that only some of them do; more rows than one range of a bias.
const MatmulTestShape matmul_shapes[] = {{1, 1, 3},    {1, 64, 128}, {7, 13, 9},  {64, 96, 80},
                                         {33, 48, 21}, {40, 17, 64}, {300, 32, 24}};

// `values` on the device, `shift` elements behind an aligned address.
template <class T>
struct Shifted {
    DeviceBuffer<T> buffer;
    size_t shift;

    Shifted(std::vector<float> values, size_t shift) : buffer(moved(std::move(values), shift)), shift(shift) {}
    Shifted(size_t n, size_t shift) : Shifted(std::vector<float>(n, NAN), shift) {}
    static std::vector<float> moved(std::vector<float> values, size_t shift) {
        values.insert(values.begin(), shift, 0.0f);
        return values;
    }
    T* data() const { return buffer.data + shift; }
    std::vector<float> floats() const {
        std::vector<float> values = buffer.floats();
        values.erase(values.begin(), values.begin() + long(shift));
        return values;
    }
};

template <class E>
void matmul_forward_check(long N, int C, int OC, size_t shift) {
    const std::vector<float> inp = random_values<E>(N * C, 1), weight = random_values<E>(OC * C, 2, 0.3f);
    const std::vector<float> bias = random_values<E>(OC, 3);
    const Shifted<E> inp_device(inp, shift), weight_device(weight, shift), bias_device(bias, shift);
    for (const bool with_bias : {false, true}) {
        for (const bool with_gelu : {false, true}) {
            CAPTURE(with_bias);
            CAPTURE(with_gelu);
            std::vector<float> out(N * OC), pre_gelu(N * OC);
            cpu::matmul_forward(out.data(), with_gelu ? pre_gelu.data() : nullptr, inp.data(), weight.data(),
                                with_bias ? bias.data() : nullptr, N, C, OC, {});
            in_thread_orders([&] {
                const Shifted<E> found(size_t(N) * OC, shift), pre_found(size_t(N) * OC, shift);
                cuda::matmul_forward(found.data(), with_gelu ? pre_found.data() : nullptr, inp_device.data(), weight_device.data(),
                                     with_bias ? bias_device.data() : nullptr, N, C, OC, kernel_test().stream);
                CHECK(relative_l2(found.floats(), out) < kernel_tolerance<E>);
                if (with_gelu) CHECK(relative_l2(pre_found.floats(), pre_gelu) < kernel_tolerance<E>);
                CHECK((found.buffer.guards_hold() && pre_found.buffer.guards_hold()));
            });
        }
    }
}

template <class E>
void matmul_backward_check(long N, int C, int OC, size_t shift) {
    const std::vector<float> inp = random_values<E>(N * C, 1), weight = random_values<E>(OC * C, 2, 0.3f);
    const std::vector<float> dout = random_values<E>(N * OC, 3), pre_gelu = random_values<E>(N * C, 4);
    const Shifted<E> inp_device(inp, shift), weight_device(weight, shift), dout_device(dout, shift), pre_device(pre_gelu, shift);
    for (const bool with_gelu : {false, true}) {
        CAPTURE(with_gelu);
        std::vector<float> dinp(N * C);
        cpu::matmul_backward_input(dinp.data(), dout.data(), weight.data(), with_gelu ? pre_gelu.data() : nullptr, N, C, OC, {});
        in_thread_orders([&] {
            const Shifted<E> found(size_t(N) * C, shift);
            cuda::matmul_backward_input(found.data(), dout_device.data(), weight_device.data(),
                                        with_gelu ? pre_device.data() : nullptr, N, C, OC, kernel_test().stream);
            CHECK(relative_l2(found.floats(), dinp) < kernel_tolerance<E>);
            CHECK(found.buffer.guards_hold());
        });
    }
    const std::vector<float> dweight_start = random_values<float>(OC * C, 5), dbias_start = random_values<float>(OC, 6);
    for (const bool accumulate : {false, true}) {
        for (const bool with_bias : {false, true}) {
            CAPTURE(accumulate);
            CAPTURE(with_bias);
            std::vector<float> dweight = dweight_start, dbias = dbias_start;
            cpu::matmul_backward_weight(dweight.data(), dbias.data(), dout.data(), inp.data(), N, C, OC, accumulate, {});
            in_thread_orders([&] {
                const std::vector<float> poison_weight(OC * C, NAN), poison_bias(OC, NAN);
                const Shifted<float> found(accumulate ? dweight_start : poison_weight, shift);
                const Shifted<float> bias_found(accumulate ? dbias_start : poison_bias, shift);
                cuda::matmul_backward_weight(found.data(), with_bias ? bias_found.data() : nullptr, dout_device.data(),
                                             inp_device.data(), N, C, OC, accumulate, kernel_test().stream);
                CHECK(relative_l2(found.floats(), dweight) < 1e-5);
                if (with_bias) CHECK(relative_l2(bias_found.floats(), dbias) < 1e-5);
                CHECK((found.buffer.guards_hold() && bias_found.buffer.guards_hold()));
            });
        }
    }
}

template <class E>
void bias_backward_check(long N, int C, size_t shift) {
    const std::vector<float> dout = random_values<E>(N * C, 1), start = random_values<float>(C, 2);
    const Shifted<E> dout_device(dout, shift);
    for (const bool accumulate : {false, true}) {
        CAPTURE(accumulate);
        std::vector<float> dbias = start, first;
        cpu::bias_backward(dbias.data(), dout.data(), N, C, accumulate, {});
        in_thread_orders([&] {
            const Shifted<float> found(accumulate ? start : std::vector<float>(C, NAN), shift);
            cuda::bias_backward(found.data(), dout_device.data(), N, C, accumulate, kernel_test().stream);
            CHECK(relative_l2(found.floats(), dbias) < 1e-5);
            CHECK(found.buffer.guards_hold());
            if (first.empty()) first = found.floats();
            CHECK(std::memcmp(found.floats().data(), first.data(), C * sizeof(float)) == 0);
        });
    }
}

}  // namespace

TEST_CASE_TEMPLATE("matmul, forward", E, float, bf16, fp16) {
    for (const auto [N, C, OC] : matmul_shapes) {
        for (const size_t shift : {0, 1}) {
            CAPTURE(N);
            CAPTURE(C);
            CAPTURE(OC);
            CAPTURE(shift);
            matmul_forward_check<E>(N, C, OC, shift);
        }
    }
}

TEST_CASE_TEMPLATE("matmul, backward", E, float, bf16, fp16) {
    for (const auto [N, C, OC] : matmul_shapes) {
        for (const size_t shift : {0, 1}) {
            CAPTURE(N);
            CAPTURE(C);
            CAPTURE(OC);
            CAPTURE(shift);
            matmul_backward_check<E>(N, C, OC, shift);
        }
    }
}

TEST_CASE_TEMPLATE("gradient of a bias", E, float, bf16, fp16) {
#ifdef __SANITIZE_THREAD__
    const std::pair<long, int> shapes[] = {{3, 7}, {300, 8}, {130, 72}};
#else
    const std::pair<long, int> shapes[] = {{1, 1}, {3, 7}, {1000, 8}, {2077, 33}, {130, 768}, {600, 200}};
#endif
    for (const auto& [N, C] : shapes) {
        for (const size_t shift : {0, 1}) {
            CAPTURE(N);
            CAPTURE(C);
            CAPTURE(shift);
            bias_backward_check<E>(N, C, shift);
        }
    }
}

TEST_CASE("matmul of no rows: forward does nothing, gradients are zero or stay") {
    const std::vector<float> start = random_values<float>(8 * 16, 1), bias_start = random_values<float>(16, 2);
    for (const bool accumulate : {false, true}) {
        const DeviceBuffer<float> dweight(start), dbias(bias_start);
        cuda::matmul_forward<bf16>(nullptr, nullptr, nullptr, nullptr, nullptr, 0, 8, 16, kernel_test().stream);
        cuda::matmul_backward_input<bf16>(nullptr, nullptr, nullptr, nullptr, 0, 8, 16, kernel_test().stream);
        cuda::matmul_backward_weight<bf16>(dweight.data, dbias.data, nullptr, nullptr, 0, 8, 16, accumulate, kernel_test().stream);
        CHECK(dweight.floats() == (accumulate ? start : std::vector<float>(8 * 16, 0.0f)));
        CHECK(dbias.floats() == (accumulate ? bias_start : std::vector<float>(16, 0.0f)));
    }
}

TEST_CASE("matmul: a plan is made once for each shape, epilogue and alignment, and takes each call's pointers") {
    constexpr int N = 40, C = 24, OC = 56;
    Device device = device_open(0);
    Stream stream = stream_make(device);
    const DeviceBuffer<bf16> narrow(std::vector<float>(N * C + 1, 1.0f)), wide(std::vector<float>(N * OC + 1, 1.0f));
    const DeviceBuffer<bf16> weight(std::vector<float>(OC * C + 1, 1.0f)), bias(std::vector<float>(OC + 1, 1.0f));
    const DeviceBuffer<bf16> out(N * OC + 1), pre_gelu(N * OC + 1), dinp(N * C + 1);
    const DeviceBuffer<float> dweight(OC * C + 1), dbias(OC + 1);
    const auto run = [&](int shift) {
        bf16 *in = narrow.data + shift, *w = weight.data + shift, *b = bias.data + shift, *to = out.data + shift;
        cuda::matmul_forward(to, pre_gelu.data + shift, in, w, b, N, C, OC, stream);
        cuda::matmul_forward<bf16>(to, pre_gelu.data + shift, in, w, nullptr, N, C, OC, stream);
        cuda::matmul_forward<bf16>(to, nullptr, in, w, b, N, C, OC, stream);
        cuda::matmul_backward_input(dinp.data + shift, wide.data + shift, w, in, N, C, OC, stream);
        cuda::matmul_backward_weight(dweight.data + shift, dbias.data + shift, wide.data + shift, in, N, C, OC, false, stream);
        stream_synchronize(stream);
        return device.matmuls->plans.size();
    };
    const size_t aligned = run(0);
    CHECK(run(0) == aligned);
    const size_t all = run(1);
    CHECK(run(1) == all);
    size_t refused = 0;
    for (const auto& [key, plan] : device.matmuls->plans) refused += !plan.found;
#ifdef CUDA_EMU  // elsewhere the library chooses
    CHECK(aligned == 5);       // five epilogues, all found
    CHECK(refused == 5);       // the same for odd addresses, so there are four plain products
    CHECK(all == 5 + 5 + 4);
#endif
    for (const float value : {3.0f, 5.0f}) {
        const DeviceBuffer<bf16> other(std::vector<float>(OC, value));
        cuda::matmul_forward<bf16>(out.data, pre_gelu.data, narrow.data, weight.data, other.data, N, C, OC, stream);
        stream_synchronize(stream);
        CHECK(pre_gelu.floats()[7] == C + value);
    }
}

#ifdef CUDA_EMU
TEST_CASE("what cuBLASLt would do silently wrong is reported on the emulator") {
    const DeviceBuffer<bf16> a(std::vector<float>(64 * 64, 1.0f)), b(std::vector<float>(64 * 64, 1.0f)), d(64 * 64);
    Stream stream = kernel_test().stream;
    const auto run = [&](long n, const bf16* a, const bf16* b, bf16* d) {
        cuda::matmul_forward<bf16>(d, nullptr, b, a, nullptr, n, 64, 64, stream);
        stream_synchronize(stream);
    };
    run(64, a.data, b.data, d.data);
    CHECK_THROWS_WITH_AS(run(64, a.data, b.data, const_cast<bf16*>(b.data)), doctest::Contains("overlaps"), emu::Error);
    CHECK_THROWS_WITH_AS(run(300, a.data, b.data, d.data), doctest::Contains("B: "), emu::Error);
    CHECK_THROWS_WITH_AS(run(64, nullptr, b.data, d.data), doctest::Contains("A: "), emu::Error);

    Matmuls& matmuls = *kernel_test().device.matmuls;
    MatmulPlan plan = matmuls.plans.begin()->second;
    for (const auto& [key, made] : matmuls.plans) {
        if (key.first.m == 64 && key.first.n == 64 && key.first.k == 64 && made.found) plan = made;
    }
    const float one = 1, zero = 0;
    const auto call = [&](const bf16* a, char* workspace, size_t bytes) {
        return cublasLtMatmul(matmuls.handle, &plan.operation, &one, a, &plan.a, b.data, &plan.b, &zero, d.data, &plan.d, d.data,
                              &plan.d, &plan.algorithm, workspace, bytes, stream.handle);
    };
    char* workspace = static_cast<char*>(matmuls.workspaces[stream.handle]);
    CHECK(call(a.data, workspace, plan.workspace - 1) == CUBLAS_STATUS_INVALID_VALUE);
    CHECK_THROWS_WITH_AS(call(a.data, workspace + 16, plan.workspace), doctest::Contains("the workspace is at"), emu::Error);
    CHECK_THROWS_WITH_AS(call(a.data - 1, workspace, plan.workspace), doctest::Contains("multiples of 256"), emu::Error);
    plan.d.rows--;
    CHECK_THROWS_WITH_AS(call(a.data, workspace, plan.workspace), doctest::Contains("another product"), emu::Error);
}
#endif
