// Every CPU operation but attention against plain loops in double, at odd shapes, on 1 and 2 threads. Outputs start as NaN,
// so what is not written shows.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>
#include <omp.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "llmc/cpu/classifier.h"
#include "llmc/cpu/embedding.h"
#include "llmc/cpu/gelu.h"
#include "llmc/cpu/layernorm.h"
#include "llmc/cpu/matmul.h"
#include "llmc/cpu/optimizer.h"

namespace {

using Floats = std::vector<float>;
using Doubles = std::vector<double>;

const float nan_value = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
const Stream stream;

Floats random_floats(size_t n, unsigned seed, float scale = 1.0f, float shift = 0.0f) {
    std::mt19937 bits(seed);
    std::normal_distribution<float> normal(shift, scale);
    Floats x(n);
    for (float& value : x) value = normal(bits);
    return x;
}

std::vector<int> random_ids(size_t n, int vocab, unsigned seed) {
    std::mt19937 bits(seed);
    std::vector<int> ids(n);
    for (int& id : ids) id = int(bits() % unsigned(vocab));
    return ids;
}

Floats poison(size_t n) { return Floats(n, nan_value); }

// The largest so far; a NaN, which std::max would pass over, counts as infinite.
void keep_larger(double& largest, double difference) {
    largest = difference <= largest ? largest : std::isnan(difference) ? INFINITY : difference;
}

double worst(const Floats& found, const Doubles& expected) {
    REQUIRE(found.size() == expected.size());
    double largest = 0;
    for (size_t i = 0; i < found.size(); i++) keep_larger(largest, std::abs(found[i] - expected[i]));
    return largest;
}

bool same_bits(const Floats& a, const Floats& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

Doubles added(const Floats& start, const Doubles& sum, bool accumulate) {
    Doubles total = sum;
    for (size_t i = 0; accumulate && i < total.size(); i++) total[i] += start[i];
    return total;
}

double gelu_reference(double x) { return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x))); }

double gelu_slope_reference(double x) {
    const double c = std::sqrt(2 / M_PI), t = std::tanh(c * (x + 0.044715 * x * x * x));
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * c * (1 + 3 * 0.044715 * x * x);
}

template <class F>
void on_threads(F test) {
    for (int threads : {1, 2}) {
        CAPTURE(threads);
        omp_set_num_threads(threads);
        test();
    }
}

}  // namespace

TEST_CASE("exp") {
    double largest = 0;
    for (double x = -87.3; x < 88.72; x += 1e-3) {
        keep_larger(largest, std::abs(cpu::exp_fast(float(x)) / std::exp(double(float(x))) - 1));
    }
    CHECK(largest < 1.2e-7);
    CHECK(cpu::exp_fast(0.0f) == 1.0f);
    CHECK(cpu::exp_fast(-inf) == 0.0f);
    CHECK(cpu::exp_fast(-88.0f) == 0.0f);
    CHECK(cpu::exp_fast(89.0f) == inf);
    CHECK(cpu::exp_fast(inf) == inf);
    CHECK(std::isnan(cpu::exp_fast(nan_value)));
}

TEST_CASE("gelu and its slope") {
    Floats x;
    for (double value = -14; value < 14; value += 1.7e-3) x.push_back(float(value));
    for (float value : {0.0f, 1e-30f, 1e-10f, -1e-10f, 1e-5f, 1e4f, -1e4f}) x.push_back(value);
    const Floats dout = random_floats(x.size(), 1);
    on_threads([&] {
        Floats out = poison(x.size()), dinp = poison(x.size()), in_place = dout;
        cpu::gelu_forward(out.data(), x.data(), x.size(), stream);
        cpu::gelu_backward(dinp.data(), dout.data(), x.data(), x.size(), stream);
        cpu::gelu_backward(in_place.data(), in_place.data(), x.data(), x.size(), stream);
        double value_off = 0, slope_off = 0, near_zero = 0;
        for (size_t i = 0; i < x.size(); i++) {
            keep_larger(value_off, std::abs(out[i] - gelu_reference(x[i])) / std::max(1.0f, std::abs(x[i])));
            keep_larger(slope_off, std::abs(dinp[i] - dout[i] * gelu_slope_reference(x[i])) / std::abs(dout[i]));
            if (x[i] != 0 && std::abs(x[i]) < 0.1)
                keep_larger(near_zero, std::abs(out[i] / gelu_reference(x[i]) - 1));  // relative
        }
        CHECK(value_off < 2e-7);
        CHECK(slope_off < 3e-7);
        CHECK(near_zero < 3e-7);
        CHECK(same_bits(in_place, dinp));
    });
}

TEST_CASE("matmul") {
    struct Shape {
        long N;
        int C, OC;
    };
    for (const auto [N, C, OC] : {Shape{1, 5, 7}, {1, 64, 130}, {3, 17, 33}, {37, 65, 129}, {130, 64, 48}, {600, 24, 40}}) {
        CAPTURE(N);
        CAPTURE(C);
        CAPTURE(OC);
        const Floats inp = random_floats(N * C, 1), weight = random_floats(size_t(OC) * C, 2), bias = random_floats(OC, 3);
        const Floats dout = random_floats(N * OC, 4), pre_gelu = random_floats(N * C, 5);
        Doubles product(N * OC), dinp(N * C), dweight(size_t(OC) * C), dbias(OC);
        for (long i = 0; i < N; i++) {
            for (int o = 0; o < OC; o++) {
                dbias[o] += dout[i * OC + o];
                for (int c = 0; c < C; c++) {
                    product[i * OC + o] += double(inp[i * C + c]) * weight[o * C + c];
                    dinp[i * C + c] += double(dout[i * OC + o]) * weight[o * C + c];
                    dweight[o * C + c] += double(dout[i * OC + o]) * inp[i * C + c];
                }
            }
        }
        Doubles biased = product, after_gelu(N * OC), dinp_gelu = dinp;
        for (size_t i = 0; i < biased.size(); i++) after_gelu[i] = gelu_reference(biased[i] += bias[i % OC]);
        for (size_t i = 0; i < dinp.size(); i++) dinp_gelu[i] *= gelu_slope_reference(pre_gelu[i]);
        const double tolerance = 3e-7 * std::max({N, long(C), long(OC)});
        on_threads([&] {
            Floats out = poison(N * OC), pre = poison(N * OC);
            cpu::matmul_forward(out.data(), nullptr, inp.data(), weight.data(), nullptr, N, C, OC, stream);
            CHECK(worst(out, product) < tolerance);
            out = poison(N * OC);
            cpu::matmul_forward(out.data(), nullptr, inp.data(), weight.data(), bias.data(), N, C, OC, stream);
            CHECK(worst(out, biased) < tolerance);
            out = poison(N * OC);
            cpu::matmul_forward(out.data(), pre.data(), inp.data(), weight.data(), bias.data(), N, C, OC, stream);
            CHECK(worst(pre, biased) < tolerance);
            CHECK(worst(out, after_gelu) < tolerance);

            Floats d = poison(N * C);
            cpu::matmul_backward_input(d.data(), dout.data(), weight.data(), nullptr, N, C, OC, stream);
            CHECK(worst(d, dinp) < tolerance);
            d = poison(N * C);
            cpu::matmul_backward_input(d.data(), dout.data(), weight.data(), pre_gelu.data(), N, C, OC, stream);
            CHECK(worst(d, dinp_gelu) < tolerance);

            for (bool accumulate : {false, true}) {
                const Floats dw_start = accumulate ? random_floats(size_t(OC) * C, 6) : poison(size_t(OC) * C);
                const Floats db_start = accumulate ? random_floats(OC, 7) : poison(OC);
                Floats dw = dw_start, db = db_start;
                cpu::matmul_backward_weight(dw.data(), db.data(), dout.data(), inp.data(), N, C, OC, accumulate, stream);
                CHECK(worst(dw, added(dw_start, dweight, accumulate)) < tolerance);
                CHECK(worst(db, added(db_start, dbias, accumulate)) < tolerance);
                dw = dw_start;
                cpu::matmul_backward_weight(dw.data(), nullptr, dout.data(), inp.data(), N, C, OC, accumulate, stream);
                CHECK(worst(dw, added(dw_start, dweight, accumulate)) < tolerance);
            }
        });
    }
    CHECK(cpu::sgemm_rate_measure(64, 96, 32) > 0.1);
}

TEST_CASE("the bias's gradient keeps float32's precision over many tokens, at any number of threads") {
    for (const auto& [N, C] : {std::pair(2048L, 67), {2051L, 1}, {7L, 1300}, {300L, 2500}}) {
        CAPTURE(N);
        CAPTURE(C);
        const Floats dout = random_floats(N * C, 1, 1.0f, 0.5f);  // sums that grow
        Doubles expected(C);
        for (size_t i = 0; i < dout.size(); i++) expected[i % C] += dout[i];
        Floats first;
        for (int threads : {1, 2, 3}) {
            omp_set_num_threads(threads);
            Floats dbias = poison(C);
            cpu::bias_backward(dbias.data(), dout.data(), N, C, false, stream);
            CHECK(worst(dbias, expected) < 1.2e-7 * 0.6 * double(N) + 1e-6);
            if (first.empty()) first = dbias;
            CHECK(same_bits(dbias, first));
            cpu::bias_backward(dbias.data(), dout.data(), N, C, true, stream);
            CHECK(worst(dbias, added(first, expected, true)) < 2.4e-7 * 0.6 * double(N) + 2e-6);
        }
    }
}

TEST_CASE("layer norm") {
    const float eps = 1e-5f;
    for (const auto& [N, C] : {std::pair(1L, 7), {5L, 33}, {3L, 64}, {70L, 100}, {2L, 1000}}) {
        for (float shift : {0.0f, 300.0f}) {
            CAPTURE(N);
            CAPTURE(C);
            CAPTURE(shift);
            const Floats a = random_floats(N * C, 1, 1.0f, shift), b = random_floats(N * C, 2), add_bias = random_floats(C, 3);
            const Floats weight = random_floats(C, 4), bias = random_floats(C, 5), dout = random_floats(N * C, 6);
            for (int kind = 0; kind < 3; kind++) {  // plain, residual, residual with bias
                CAPTURE(kind);
                Doubles x(N * C), out(N * C), mean(N), rstd(N);
                for (long i = 0; i < N * C; i++) x[i] = a[i] + (kind > 0 ? b[i] : 0.0) + (kind > 1 ? add_bias[i % C] : 0.0);
                for (long i = 0; i < N; i++) {
                    double variance = 0;
                    for (int j = 0; j < C; j++) mean[i] += x[i * C + j] / C;
                    for (int j = 0; j < C; j++) variance += std::pow(x[i * C + j] - mean[i], 2) / C;
                    rstd[i] = 1 / std::sqrt(variance + eps);
                    for (int j = 0; j < C; j++) out[i * C + j] = (x[i * C + j] - mean[i]) * rstd[i] * weight[j] + bias[j];
                }
                const double tolerance = 3e-6 + 4e-7 * shift;  // x itself is rounded to 6e-8 of shift
                on_threads([&] {
                    Floats res = a, o = poison(N * C), m = poison(N), r = poison(N);
                    if (kind == 0) {
                        cpu::layernorm_forward(o.data(), m.data(), r.data(), a.data(), weight.data(), bias.data(), N, C, eps,
                                               stream);
                    } else {
                        res = poison(N * C);
                        cpu::residual_layernorm_forward(res.data(), o.data(), m.data(), r.data(), a.data(), b.data(),
                                                        kind > 1 ? add_bias.data() : nullptr, weight.data(), bias.data(), N, C,
                                                        eps, stream);
                    }
                    CHECK(worst(res, x) < 5e-7 + 1.2e-7 * shift);
                    CHECK(worst(m, mean) < 3e-7 + 2e-7 * shift);
                    CHECK(worst(r, rstd) < tolerance);
                    CHECK(worst(o, out) < 2 * tolerance);
                });
                if (kind > 0) continue;

                Doubles dinp(N * C), dweight(C), dbias(C);
                for (long i = 0; i < N; i++) {
                    double g_mean = 0, gh_mean = 0;
                    for (int j = 0; j < C; j++) {
                        const double h = (x[i * C + j] - mean[i]) * rstd[i], g = double(dout[i * C + j]) * weight[j];
                        g_mean += g / C;
                        gh_mean += g * h / C;
                        dweight[j] += dout[i * C + j] * h;
                        dbias[j] += dout[i * C + j];
                    }
                    for (int j = 0; j < C; j++) {
                        const double h = (x[i * C + j] - mean[i]) * rstd[i], g = double(dout[i * C + j]) * weight[j];
                        dinp[i * C + j] = (g - g_mean - h * gh_mean) * rstd[i];
                    }
                }
                const Floats m(mean.begin(), mean.end()), r(rstd.begin(), rstd.end()), before = random_floats(N * C, 7);
                Floats first;
                for (int threads : {1, 2, 3}) {
                    omp_set_num_threads(threads);
                    for (bool accumulate : {false, true}) {
                        const Floats start = accumulate ? random_floats(C, 8) : poison(C);
                        Floats dx = before, dw = start, db = start;
                        cpu::layernorm_backward(dx.data(), dw.data(), db.data(), dout.data(), a.data(), weight.data(), m.data(),
                                                r.data(), N, C, accumulate, stream);
                        CHECK(worst(dx, added(before, dinp, true)) < 3 * tolerance);
                        CHECK(worst(dw, added(start, dweight, accumulate)) < double(N) * tolerance);
                        CHECK(worst(db, added(start, dbias, accumulate)) < double(N) * 1e-6);
                        if (accumulate) continue;
                        if (first.empty()) first = dw;
                        CHECK(same_bits(dw, first));
                    }
                }
            }
        }
    }
}

TEST_CASE("token embedding over 1, 2 and 3 ranks") {
    const int V = 50;
    const long N = 37;
    for (int C : {1, 19, 70}) {
        std::vector<int> ids = random_ids(N, V, 1);
        ids[3] = ids[4] = ids[0];  // a token that comes again
        ids[5] = -1;
        const int meeting[] = {24, 25, 16, 17, 33, 34};  // of two ranks
        std::copy(std::begin(meeting), std::end(meeting), ids.begin() + 6);
        const Floats table = random_floats(V * C, 2), dout = random_floats(N * C, 3);
        for (int tp : {1, 2, 3}) {
            CAPTURE(tp);
            const int rows = (V + tp - 1) / tp;
            Floats padded = table;
            padded.resize(size_t(rows) * tp * C, 0.0f);
            const Floats start = random_floats(padded.size(), 4);
            Doubles dtable(start.begin(), start.end()), found(N * C), out(N * C);
            for (long i = 0; i < N * C; i++) {
                if (ids[i / C] < 0) continue;
                out[i] = table[ids[i / C] * C + i % C];
                dtable[ids[i / C] * C + i % C] += dout[i];
            }
            Floats first;
            for (int threads : {1, 2, 3}) {
                omp_set_num_threads(threads);
                Floats sum(N * C), grads = start;
                for (int rank = 0; rank < tp; rank++) {
                    Floats own = poison(N * C);
                    cpu::embedding_forward(own.data(), ids.data(), padded.data() + rank * rows * C, rank * rows, rows, N, C,
                                           stream);
                    for (long i = 0; i < N * C; i++) sum[i] += own[i];
                    cpu::embedding_backward(grads.data() + rank * rows * C, dout.data(), ids.data(), rank * rows, rows, N, C,
                                            stream);
                }
                CHECK(worst(sum, out) == 0);
                CHECK(worst(grads, dtable) < 2e-6);
                if (first.empty()) first = grads;
                CHECK(same_bits(grads, first));
            }
        }
    }
}

TEST_CASE("position embedding of a stripe of the batch") {
    const int T = 6, positions = 8;
    for (int C : {5, 33}) {
        for (const auto& [first_token, n] : {std::pair(0L, 18L), {9L, 9L}, {4L, 1L}}) {
            CAPTURE(first_token);
            const Floats table = random_floats(positions * C, 1), x = random_floats(n * C, 2);
            Doubles out(x.begin(), x.end()), dtable(positions * C);
            for (long i = 0; i < n * C; i++) {
                const long position = (first_token + i / C) % T;
                out[i] += table[position * C + i % C];
                dtable[position * C + i % C] += x[i];
            }
            on_threads([&] {
                Floats found = x;
                cpu::position_forward(found.data(), table.data(), first_token, n, T, C, stream);
                CHECK(worst(found, out) < 5e-7);
                for (bool accumulate : {false, true}) {
                    const Floats start = accumulate ? random_floats(positions * C, 3) : poison(positions * C);
                    Floats grads = start;
                    cpu::position_backward(grads.data(), x.data(), first_token, n, T, C, positions, accumulate, stream);
                    CHECK(worst(grads, added(start, dtable, accumulate)) < 2e-6);
                }
            });
        }
    }
}

TEST_CASE("classifier over 1, 2 and 3 ranks, with padding and ignored targets") {
    struct Shape {
        long N;
        int V;
    };
    for (const auto [N, V] : {Shape{23, 10}, {5, 257}, {2, 9001}, {1, 5}}) {
        for (int tp : {1, 2, 3}) {
            CAPTURE(N);
            CAPTURE(V);
            CAPTURE(tp);
            const int rows = (V / tp + 16) / 16 * 16;  // padded; with V small the last ranks hold nothing but padding
            const Floats logits = random_floats(N * V, 1, 3.0f, 20.0f);
            std::vector<int> targets = random_ids(N, V, 2);
            targets[0] = V - 1;
            if (N > 2) targets[1] = -1;
            for (long i = 2; i < N; i++) targets[i] = std::min(V - 1, i % 2 ? rows : rows - 1);  // where ranks meet
            const float scale = 0.25f;
            Doubles losses(N), dlogits(N * V);
            for (long i = 0; i < N; i++) {
                double sum = 0;
                for (int j = 0; j < V; j++) sum += std::exp(double(logits[i * V + j]));
                if (targets[i] < 0) continue;
                losses[i] = std::log(sum) - logits[i * V + targets[i]];
                for (int j = 0; j < V; j++)
                    dlogits[i * V + j] = scale * (std::exp(double(logits[i * V + j])) / sum - (j == targets[i]));
            }
            on_threads([&] {
                Floats stats = poison(tp * N * 3);
                std::vector<Floats> own(tp);
                auto first_row = [&](int rank) { return rank * rows; };
                auto valid = [&](int rank) { return std::clamp(V - first_row(rank), 0, rows); };
                for (int rank = 0; rank < tp; rank++) {
                    own[rank] = poison(N * rows);  // padded columns stay so: nobody may read them
                    for (long i = 0; i < N; i++) {
                        for (int j = 0; j < valid(rank); j++) own[rank][i * rows + j] = logits[i * V + first_row(rank) + j];
                    }
                    cpu::classifier_local(stats.data() + rank * N * 3, own[rank].data(), targets.data(), first_row(rank),
                                          valid(rank), rows, N, stream);
                }
                for (int rank = 0; rank < tp; rank++) {
                    Floats found = poison(N), before = own[rank];
                    cpu::classifier_finish(found.data(), own[rank].data(), stats.data(), targets.data(), first_row(rank),
                                           valid(rank), rows, tp, 0.0f, N, stream);
                    CHECK(same_bits(own[rank], before));
                    CHECK(worst(found, losses) < 3e-6);  // a logit of 30 is rounded to 2e-6
                    CHECK((N <= 2 || found[1] == 0.0f));

                    found = poison(N);
                    cpu::classifier_finish(found.data(), own[rank].data(), stats.data(), targets.data(), first_row(rank),
                                           valid(rank), rows, tp, scale, N, stream);
                    CHECK(worst(found, losses) < 3e-6);
                    double largest = 0;
                    bool zero = true;
                    for (long i = 0; i < N; i++) {
                        for (int j = 0; j < rows; j++) {
                            const float d = own[rank][i * rows + j];
                            if (j >= valid(rank) || targets[i] < 0) {
                                zero = zero && d == 0.0f;
                            } else {
                                keep_larger(largest, std::abs(d - dlogits[i * V + first_row(rank) + j]));
                            }
                        }
                    }
                    CHECK(zero);
                    CHECK(largest < 3e-7 * scale);
                }
            });
        }
    }
}

TEST_CASE("losses are right to float32, and what is not finite shows in them") {
    const int V = 1000;
    Floats logits = random_floats(V, 1), stats = poison(3), loss = poison(1);
    const int target = 17;
    auto run = [&] {
        cpu::classifier_local(stats.data(), logits.data(), &target, 0, V, V, 1, stream);
        cpu::classifier_finish(loss.data(), logits.data(), stats.data(), &target, 0, V, V, 1, 0.0f, 1, stream);
        return double(loss[0]);
    };
    double sum = 0;
    for (float x : logits) sum += std::exp(double(x));
    const double expected = std::log(sum) - logits[target];
    CHECK(std::abs(run() - expected) < 1.2e-7 * expected);
    logits[500] = nan_value;
    CHECK(std::isnan(run()));
    logits[500] = inf;
    CHECK(!std::isfinite(run()));
    logits[500] = -inf;
    CHECK(std::isfinite(run()));
}

TEST_CASE("AdamW over ten steps, eps 1e-8") {
    for (size_t n : {size_t(1), size_t(37), size_t(20001)}) {
        CAPTURE(n);
        on_threads([&] {
            Floats p = random_floats(n, 1), m(n), v(n);
            Doubles p_reference(p.begin(), p.end()), m_reference(n), v_reference(n);
            AdamW hyper{1e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.5f, 0};
            for (hyper.step = 1; hyper.step <= 10; hyper.step++) {
                const Floats g = random_floats(n, unsigned(hyper.step), 1e-3f);
                cpu::adamw_update(p.data(), nullptr, g.data(), m.data(), v.data(), n, hyper, stream);
                for (size_t i = 0; i < n; i++) {
                    const double grad = 0.5 * g[i], step = double(hyper.step);
                    p_reference[i] *= 1 - 1e-3 * 0.1;
                    m_reference[i] = 0.9 * m_reference[i] + 0.1 * grad;
                    v_reference[i] = 0.95 * v_reference[i] + 0.05 * grad * grad;
                    const double root = std::sqrt(v_reference[i] / (1 - std::pow(0.95, step)));
                    p_reference[i] -= 1e-3 / (1 - std::pow(0.9, step)) * m_reference[i] / (root + 1e-8);
                }
            }
            CHECK(worst(p, p_reference) < 2e-6);
            CHECK(worst(m, m_reference) < 1e-9);
            CHECK(worst(v, v_reference) < 1e-12);
        });
    }
}

TEST_CASE("the gradient's norm, the same bits at any number of threads") {
    for (size_t n : {size_t(0), size_t(5), size_t(16384), size_t(100003)}) {
        const Floats x = random_floats(n, 1);
        double expected = 0;
        for (float value : x) expected += double(value) * value;
        omp_set_num_threads(1);
        const double one = cpu::global_norm_squared(x.data(), n, stream);
        CHECK(std::abs(one - expected) <= 1e-12 * expected);
        for (int threads : {2, 3}) {
            omp_set_num_threads(threads);
            CHECK(cpu::global_norm_squared(x.data(), n, stream) == one);
        }
    }
    const Floats bad = {1.0f, nan_value};
    CHECK(std::isnan(cpu::global_norm_squared(bad.data(), 2, stream)));
}
