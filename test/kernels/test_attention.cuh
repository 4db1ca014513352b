// Attention, forward and backward, on tensor cores and without, against the CPU's.
#include "kernel_test.h"
#include "llmc/cpu/attention.h"
#include "llmc/cuda/attention.cuh"

namespace {

struct HeadShape {
    int B, T, NH, NKV, HS;
    size_t qkv() const { return size_t(B) * T * (NH + 2 * NKV) * HS; }
    size_t out() const { return size_t(B) * T * NH * HS; }
    size_t lse() const { return size_t(B) * NH * T; }
};

#ifdef __SANITIZE_THREAD__
const HeadShape head_shapes[] = {{1, 67, 2, 1, 16}, {1, 67, 1, 1, 64}, {1, 35, 1, 1, 7}};
#else
// One token, less than a tile, whole tiles, one more; each width of the tensor cores, filled up or not; shared key heads; heads
// for kernels without tensor cores in each size of tile.
const HeadShape head_shapes[] = {{1, 1, 1, 1, 16},  {2, 5, 4, 2, 8},   {1, 64, 1, 1, 32},  {2, 67, 2, 1, 64},
                                 {1, 130, 1, 1, 48}, {1, 130, 3, 1, 16}, {1, 67, 1, 1, 80},  {1, 33, 2, 2, 96},
                                 {1, 67, 2, 1, 128}, {2, 37, 2, 1, 7},   {1, 34, 1, 1, 132}, {1, 3, 1, 1, 256}};
#endif

template <class E>
constexpr double attention_gradient_tolerance = std::is_same_v<E, float> ? 1e-5 : 1e-2;

// Columns [from, to) of each row of `row` elements.
std::vector<float> columns_of(const std::vector<float>& x, size_t row, size_t from, size_t to) {
    std::vector<float> part;
    for (size_t at = 0; at < x.size(); at += row) part.insert(part.end(), x.begin() + long(at + from), x.begin() + long(at + to));
    return part;
}

template <class E>
void attention_check(const HeadShape& s, float spread) {
    const std::vector<float> qkv = random_values<E>(s.qkv(), 1, spread), dout = random_values<E>(s.out(), 2);
    std::vector<float> out(s.out()), lse(s.lse()), dqkv(s.qkv());
    cpu::attention_forward(out.data(), lse.data(), qkv.data(), s.B, s.T, s.NH, s.NKV, s.HS, {});
    cpu::attention_backward(dqkv.data(), dout.data(), out.data(), lse.data(), qkv.data(), s.B, s.T, s.NH, s.NKV, s.HS, {});
    const DeviceBuffer<E> qkv_device(qkv), dout_device(dout);
    std::vector<E> first_out, first_dqkv;
    in_thread_orders([&] {
        const DeviceBuffer<E> out_found(s.out()), dqkv_found(s.qkv());
        const DeviceBuffer<float> lse_found(s.lse());
        cuda::attention_forward(out_found.data, lse_found.data, qkv_device.data, s.B, s.T, s.NH, s.NKV, s.HS, kernel_test().stream);
        cuda::attention_backward(dqkv_found.data, dout_device.data, out_found.data, lse_found.data, qkv_device.data, s.B, s.T, s.NH,
                                 s.NKV, s.HS, kernel_test().stream);
        CHECK(relative_l2(out_found.floats(), out) < kernel_tolerance<E>);
        CHECK(relative_l2(lse_found.floats(), lse) < 1e-5);
        const size_t row = size_t(s.NH + 2 * s.NKV) * s.HS, k = size_t(s.NH) * s.HS, v = size_t(s.NH + s.NKV) * s.HS;
        const std::vector<float> found = dqkv_found.floats();
        CHECK(relative_l2(found, dqkv) < attention_gradient_tolerance<E>);
        if (s.T > 1) {  // one key: P is 1, so dq and dk are 0 but for rounding
            CHECK(relative_l2(columns_of(found, row, 0, k), columns_of(dqkv, row, 0, k)) < attention_gradient_tolerance<E>);
            CHECK(relative_l2(columns_of(found, row, k, v), columns_of(dqkv, row, k, v)) < attention_gradient_tolerance<E>);
        }
        CHECK((out_found.guards_hold() && lse_found.guards_hold() && dqkv_found.guards_hold()));
        if (first_out.empty()) first_out = out_found.download(), first_dqkv = dqkv_found.download();
        CHECK(std::memcmp(out_found.download().data(), first_out.data(), first_out.size() * sizeof(E)) == 0);
        CHECK(std::memcmp(dqkv_found.download().data(), first_dqkv.data(), first_dqkv.size() * sizeof(E)) == 0);
    });
}

}  // namespace

TEST_CASE_TEMPLATE("attention, forward and backward", E, float, bf16, fp16) {
    for (const HeadShape& s : head_shapes) {
        CAPTURE(s.T);
        CAPTURE(s.NKV);
        CAPTURE(s.HS);
        attention_check<E>(s, 1.0f);
    }
}

TEST_CASE("attention refuses heads that cannot share") {
    const DeviceBuffer<bf16> x(64);
    const DeviceBuffer<float> lse(8);
    CHECK_THROWS_WITH_AS(cuda::attention_forward(x.data, lse.data, x.data, 1, 1, 3, 2, 1, kernel_test().stream),
                         doctest::Contains("NKV must divide NH"), Error);
}
