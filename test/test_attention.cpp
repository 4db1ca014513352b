// Causal attention, forward and backward, against the textbook's formulas in float64.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>
#include <omp.h>

#include <cmath>
#include <vector>

#include "llmc/cpu/attention.h"

struct Shape {
    int B, T, NH, NKV, HS;
    long row() const { return long(NH + 2 * NKV) * HS; }
    size_t qkv() const { return size_t(B) * size_t(T) * size_t(row()); }
    size_t out() const { return size_t(B) * size_t(T) * size_t(NH) * size_t(HS); }
    size_t lse() const { return size_t(B) * size_t(NH) * size_t(T); }
};

template <class Float>
struct Result {
    std::vector<Float> out, lse, dqkv;
};

static std::vector<float> normal_floats(size_t n, uint64_t key) {
    std::vector<float> x(n);
    uint64_t state = key * 2 + 1;
    auto uniform = [&] {
        state = state * 6364136223846793005u + 1442695040888963407u;
        return (double(state >> 33) + 0.5) / 2147483648.0;
    };
    for (float& value : x) value = float(std::sqrt(-2 * std::log(uniform())) * std::cos(2 * M_PI * uniform()));
    return x;
}

// S = q k / sqrt(HS), P = softmax(S), out = P V and its derivatives, one query at a time.
static Result<double> reference(const Shape& s, const std::vector<float>& qkv, const std::vector<float>& dout) {
    Result<double> r{std::vector<double>(s.out()), std::vector<double>(s.lse()), std::vector<double>(s.qkv())};
    const double scale = 1 / std::sqrt(double(s.HS));
    for (int b = 0; b < s.B; b++)
        for (int h = 0; h < s.NH; h++)
            for (int i = 0; i < s.T; i++) {
                const int kv = h / (s.NH / s.NKV);
                auto q_at = [&](long t) { return size_t((b * long(s.T) + t) * s.row() + h * s.HS); };
                auto k_at = [&](long t) { return size_t((b * long(s.T) + t) * s.row() + (s.NH + kv) * s.HS); };
                auto v_at = [&](long t) { return k_at(t) + size_t(s.NKV) * size_t(s.HS); };
                const size_t out_at = size_t((b * long(s.T) + i) * s.NH + h) * size_t(s.HS);
                std::vector<double> p(size_t(i) + 1), dp(size_t(i) + 1);
                double max = -INFINITY, sum = 0, dot = 0;
                for (int j = 0; j <= i; j++) {
                    for (int d = 0; d < s.HS; d++) p[j] += double(qkv[q_at(i) + d]) * qkv[k_at(j) + d] * scale;
                    max = std::max(max, p[j]);
                }
                for (double& x : p) sum += x = std::exp(x - max);
                for (double& x : p) x /= sum;
                r.lse[size_t(b * s.NH + h) * size_t(s.T) + i] = max + std::log(sum);
                for (int j = 0; j <= i; j++)
                    for (int d = 0; d < s.HS; d++) {
                        r.out[out_at + d] += p[j] * qkv[v_at(j) + d];
                        dp[j] += double(dout[out_at + d]) * qkv[v_at(j) + d];
                        r.dqkv[v_at(j) + d] += p[j] * dout[out_at + d];
                    }
                for (int j = 0; j <= i; j++) dot += p[j] * dp[j];
                for (int j = 0; j <= i; j++)
                    for (int d = 0; d < s.HS; d++) {
                        const double ds = p[j] * (dp[j] - dot) * scale;
                        r.dqkv[q_at(i) + d] += ds * qkv[k_at(j) + d];
                        r.dqkv[k_at(j) + d] += ds * qkv[q_at(i) + d];
                    }
            }
    return r;
}

// Results lie between NaNs, to see a write outside them or an element left out.
constexpr size_t margin = 40;

static std::vector<float> poisoned(size_t n) { return std::vector<float>(n + 2 * margin, NAN); }

static std::vector<float> inside(const std::vector<float>& x) {
    for (size_t i = 0; i < margin; i++) {
        CHECK(std::isnan(x[i]));
        CHECK(std::isnan(x[x.size() - 1 - i]));
    }
    return std::vector<float>(x.begin() + margin, x.end() - margin);
}

static Result<float> computed(const Shape& s, const std::vector<float>& qkv, const std::vector<float>& dout, int threads) {
    const int before = omp_get_max_threads();
    omp_set_num_threads(threads);
    std::vector<float> out = poisoned(s.out()), lse = poisoned(s.lse()), dqkv = poisoned(s.qkv());
    cpu::attention_forward(out.data() + margin, lse.data() + margin, qkv.data(), s.B, s.T, s.NH, s.NKV, s.HS, {});
    cpu::attention_backward(dqkv.data() + margin, dout.data(), out.data() + margin, lse.data() + margin, qkv.data(), s.B, s.T,
                            s.NH, s.NKV, s.HS, {});
    omp_set_num_threads(before);
    return {inside(out), inside(lse), inside(dqkv)};
}

// Relative L2 error; NaN counts as infinite.
static double distance(const std::vector<float>& x, const std::vector<double>& expected) {
    double error = 0, norm = 0;
    for (size_t i = 0; i < x.size(); i++) {
        error += (x[i] - expected[i]) * (x[i] - expected[i]);
        norm += expected[i] * expected[i];
    }
    return std::isnan(error) ? INFINITY : std::sqrt(error / norm);
}

static double distance_part(const Shape& s, const std::vector<float>& x, const std::vector<double>& expected, int from, int to) {
    std::vector<float> part;
    std::vector<double> expected_part;
    for (size_t i = 0; i < x.size(); i++) {
        const int head = int(i % size_t(s.row())) / s.HS;
        if (head < from || head >= to) continue;
        part.push_back(x[i]);
        expected_part.push_back(expected[i]);
    }
    return distance(part, expected_part);
}

TEST_CASE("outputs and gradients are those of the formulas") {
    const Shape shapes[] = {{2, 1, 2, 2, 8},    {3, 17, 2, 1, 12},   {2, 64, 2, 2, 64}, {1, 65, 3, 3, 12},  {2, 65, 4, 2, 64},
                            {1, 130, 6, 2, 8},  {2, 130, 2, 2, 64},  {1, 63, 1, 1, 1},  {1, 33, 2, 1, 7},   {1, 256, 2, 1, 32},
                            {1, 200, 1, 1, 80}, {1, 128, 2, 2, 128}, {1, 70, 2, 2, 48}, {1, 129, 2, 1, 100}};
    for (const Shape& s : shapes) {
        CAPTURE(s.T);
        CAPTURE(s.HS);
        CAPTURE(s.NKV);
        const std::vector<float> qkv = normal_floats(s.qkv(), 1), dout = normal_floats(s.out(), 2);
        const Result<double> expected = reference(s, qkv, dout);
        const Result<float> result = computed(s, qkv, dout, 1);
        CHECK(distance(result.out, expected.out) < 5e-7);
        CHECK(distance(result.lse, expected.lse) < 2e-7);
        if (s.T > 1) {  // one key: P is 1, so dq and dk are 0 but for rounding
            CHECK(distance_part(s, result.dqkv, expected.dqkv, 0, s.NH) < 5e-7);
            CHECK(distance_part(s, result.dqkv, expected.dqkv, s.NH, s.NH + s.NKV) < 5e-7);
        }
        CHECK(distance_part(s, result.dqkv, expected.dqkv, s.NH + s.NKV, s.NH + 2 * s.NKV) < 5e-7);
        const Result<float> two = computed(s, qkv, dout, 2);
        CHECK(two.out == result.out);
        CHECK(two.lse == result.lse);
        CHECK(two.dqkv == result.dqkv);
    }
}

// The running maximum rises from block to block, so that earlier sums shrink, some to nothing.
TEST_CASE("scores that grow along the sequence neither overflow nor lose precision") {
    const Shape s = {1, 200, 1, 1, 16};
    std::vector<float> qkv = normal_floats(s.qkv(), 3);
    const std::vector<float> dout = normal_floats(s.out(), 4);
    for (int t = 0; t < s.T; t++)
        for (int d = 0; d < s.HS; d++) {
            qkv[size_t(t * s.row() + d)] = 4.0f;
            qkv[size_t(t * s.row() + s.HS + d)] *= 0.05f * float(t % 130);
        }
    const Result<double> expected = reference(s, qkv, dout);
    const Result<float> result = computed(s, qkv, dout, 1);
    CHECK(distance(result.out, expected.out) < 1e-5);  // scores up to 100, rounded to 1e-5
    CHECK(distance(result.lse, expected.lse) < 1e-6);
    CHECK(distance(result.dqkv, expected.dqkv) < 1e-5);
}

TEST_CASE("a query sees no later key") {
    const Shape s = {1, 130, 2, 1, 12};
    std::vector<float> qkv = normal_floats(s.qkv(), 5);
    const std::vector<float> dout = normal_floats(s.out(), 6);
    const Result<float> before = computed(s, qkv, dout, 1);
    const int last = 70;
    for (size_t i = size_t((last + 1) * s.row()); i < qkv.size(); i++) qkv[i] = 50.0f;
    const Result<float> after = computed(s, qkv, dout, 1);
    const size_t same = size_t((last + 1) * s.NH * s.HS);
    CHECK(std::equal(before.out.begin(), before.out.begin() + long(same), after.out.begin()));
    CHECK(!std::equal(before.out.begin(), before.out.end(), after.out.begin()));
}

TEST_CASE("a number of key heads that does not divide the heads is refused") {
    float x[64] = {};
    CHECK_THROWS_WITH_AS(cpu::attention_forward(x, x, x, 1, 1, 3, 2, 1, {}), doctest::Contains("NKV must divide NH"), Error);
    CHECK_THROWS_AS(cpu::attention_backward(x, x, x, x, x, 1, 1, 2, 1, 0, {}), Error);
}
