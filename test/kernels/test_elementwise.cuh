// Sweeps and gathers: GELU, casts, embeddings, classifier, optimizer, against the CPU's.
#include <algorithm>

#include "kernel_test.h"
#include "llmc/cpu/classifier.h"
#include "llmc/cpu/embedding.h"
#include "llmc/cpu/gelu.h"
#include "llmc/cpu/optimizer.h"
#include "llmc/cuda/cast.cuh"
#include "llmc/cuda/classifier.cuh"
#include "llmc/cuda/embedding.cuh"
#include "llmc/cuda/gelu.cuh"
#include "llmc/cuda/optimizer.cuh"

namespace {

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

// The same bits in all runs: keeps those of the first.
template <class T>
bool same_as_first(std::vector<T>& first, const std::vector<T>& found) {
    if (first.empty()) first = found;
    return same_bits(found, first);
}

// Ids below `vocab`, some of them again and again.
std::vector<int> random_ids(size_t n, int vocab, uint64_t seed) {
    std::mt19937_64 engine(seed);
    std::vector<int> ids(n);
    for (int& id : ids) id = engine() % 3 == 0 ? 2 % vocab : int(engine() % uint64_t(vocab));
    return ids;
}

#ifdef __SANITIZE_THREAD__
const size_t sweep_sizes[] = {1, 2053};
#else
const size_t sweep_sizes[] = {1, 7, 8, 64, 2053, 8192 + 5};
#endif

}  // namespace

TEST_CASE_TEMPLATE("gelu, forward, backward and in place", E, float, bf16, fp16) {
    for (size_t n : sweep_sizes) {
        for (size_t shift : {0, 1}) {  // 1: no array is aligned to packs
            CAPTURE(n);
            CAPTURE(shift);
            const std::vector<float> x = random_values<E>(n + shift, 1, 3.0f), dout = random_values<E>(n + shift, 2);
            std::vector<float> out(x), dinp(dout);
            cpu::gelu_forward(out.data() + shift, x.data() + shift, n, {});
            cpu::gelu_backward(dinp.data() + shift, dout.data() + shift, x.data() + shift, n, {});
            const DeviceBuffer<E> x_device(x), dout_device(dout);
            in_thread_orders([&] {
                const DeviceBuffer<E> out_found(x), dinp_found(dout), in_place(dout);  // what is before `shift` stays
                cuda::gelu_forward(out_found.data + shift, x_device.data + shift, n, kernel_test().stream);
                cuda::gelu_backward(dinp_found.data + shift, dout_device.data + shift, x_device.data + shift, n,
                                    kernel_test().stream);
                cuda::gelu_backward(in_place.data + shift, in_place.data + shift, x_device.data + shift, n, kernel_test().stream);
                CHECK(relative_l2(out_found.floats(), out) < kernel_tolerance<E>);
                CHECK(relative_l2(dinp_found.floats(), dinp) < kernel_tolerance<E>);
                CHECK(same_bits(in_place.download(), dinp_found.download()));
                CHECK((out_found.guards_hold() && dinp_found.guards_hold() && in_place.guards_hold()));
            });
        }
    }
}

TEST_CASE("gelu where its exponential is 0 or large, and of a NaN") {
    const std::vector<float> x = {-1e4f, -30.0f, -10.0f, -1e-20f, 0.0f, 1e-20f, 10.0f, 30.0f, 1e4f, NAN};
    std::vector<float> out(x), dinp(x), ones(x.size(), 1.0f);
    cpu::gelu_forward(out.data(), x.data(), x.size(), {});
    cpu::gelu_backward(dinp.data(), ones.data(), x.data(), x.size(), {});
    const DeviceBuffer<float> x_device(x), ones_device(ones), found(x.size()), dinp_found(x.size());
    cuda::gelu_forward(found.data, x_device.data, x.size(), kernel_test().stream);
    cuda::gelu_backward(dinp_found.data, ones_device.data, x_device.data, x.size(), kernel_test().stream);
    for (size_t i = 0; i + 1 < x.size(); i++) {
        CAPTURE(x[i]);
        CHECK(std::abs(found.floats()[i] - out[i]) <= 1e-6 * std::max(1e-25f, std::abs(x[i])));
        CHECK(std::abs(dinp_found.floats()[i] - dinp[i]) < 1e-6);
    }
    CHECK(std::isnan(found.floats().back()));
    CHECK(std::isnan(dinp_found.floats().back()));
}

template <class To, class From>
void cast_check(size_t n, size_t shift) {
    std::vector<float> values = random_values<From>(n + shift, 3, 100.0f);
    const float special[] = {0.0f, -0.0f, INFINITY, -INFINITY, 1e-7f, 65519.0f, 65520.0f, 1e30f, 0x1.0081p-20f};
    for (size_t i = 0; i < std::size(special) && i < n; i++) values[i] = host_float(host_round<From>(special[i]));
    const DeviceBuffer<From> from(values);
    const DeviceBuffer<To> to(n + shift);
    cuda::cast(to.data + shift, from.data + shift, n, kernel_test().stream);
    const std::vector<To> found = to.download();
    size_t wrong = 0;
    for (size_t i = shift; i < n + shift; i++) wrong += host_float(found[i]) != host_float(host_round<To>(values[i]));
    CHECK(wrong == 0);
    CHECK(to.guards_hold());
}

TEST_CASE_TEMPLATE("casts round to nearest even", To, float, bf16, fp16) {
    for (size_t n : sweep_sizes) {
        for (size_t shift : {0, 1}) {
            CAPTURE(n);
            in_thread_orders([&] {
                cast_check<To, float>(n, shift);
                cast_check<To, bf16>(n, shift);
                cast_check<To, fp16>(n, shift);
            });
        }
    }
}

template <class E>
void embedding_check(long N, int C, int V, int tp) {
    std::vector<int> ids = random_ids(N, V, 1);
    if (N > 3) ids[1] = -1, ids[2] = V + 5;
    const int rows = (V + tp - 1) / tp;
    std::vector<float> table = random_values<E>(size_t(rows) * tp * C, 2);
    const std::vector<float> dout = random_values<E>(N * C, 3), start = random_values<float>(table.size(), 4);
    const DeviceBuffer<int> ids_device(N);
    device_upload(ids_device.data, ids.data(), N * sizeof(int), kernel_test().stream);
    const DeviceBuffer<E> dout_device(dout);
    for (int rank = 0; rank < tp; rank++) {
        const size_t first = size_t(rank) * rows * C, count = size_t(rows) * C;
        const std::vector<float> own(table.begin() + first, table.begin() + first + count);
        std::vector<float> out(N * C), grads(start.begin() + first, start.begin() + first + count);
        const std::vector<float> grads_before = grads;
        cpu::embedding_forward(out.data(), ids.data(), own.data(), rank * rows, rows, N, C, {});
        cpu::embedding_backward(grads.data(), dout.data(), ids.data(), rank * rows, rows, N, C, {});
        const DeviceBuffer<E> own_device(own);
        std::vector<float> first_found;
        in_thread_orders([&] {
            const DeviceBuffer<E> found(N * C);
            const DeviceBuffer<float> grads_found(grads_before);
            cuda::embedding_forward(found.data, ids_device.data, own_device.data, rank * rows, rows, N, C, kernel_test().stream);
            cuda::embedding_backward(grads_found.data, dout_device.data, ids_device.data, rank * rows, rows, N, C,
                                     kernel_test().stream);
            CHECK(same_bits(found.floats(), out));
            CHECK(relative_l2(grads_found.floats(), grads) < 1e-6);
            CHECK(same_as_first(first_found, grads_found.floats()));
            CHECK((found.guards_hold() && grads_found.guards_hold()));
        });
    }
}

TEST_CASE_TEMPLATE("token embedding, whole and over 3 ranks", E, float, bf16, fp16) {
    struct Shape {
        long N;
        int C, V, tp;
    };
#ifdef __SANITIZE_THREAD__
    const Shape shapes[] = {{1, 7, 5, 1}, {150, 8, 300, 1}};
#else
    // runs that fill windows of 32 exactly, end and begin in them, and reach over many; keys of one, two and three bytes, and a
    // table (256 rows of each rank) whose ids fit into one but not the key of the others'; more tokens than a block of the sort has
    const Shape shapes[] = {{1, 1, 5, 1},     {3, 7, 50, 3},      {17, 48, 97, 1},     {64, 100, 1023, 3},
                            {64, 64, 1, 1},   {200, 16, 3, 1},    {2100, 8, 300, 1},   {70, 1032, 60, 1}, {70, 8, 70000, 1},
                            {64, 8, 768, 3}};
#endif
    for (const auto [N, C, V, tp] : shapes) {
        CAPTURE(N);
        CAPTURE(C);
        CAPTURE(V);
        embedding_check<E>(N, C, V, tp);
    }
}

TEST_CASE("a token's gradient is the sum in the order of the tokens") {
    // Float sums of these depend on the order: 1e8 takes in what comes before it is taken away again.
    const int N = 20, C = 4;
    std::vector<float> dout(N * C);
    for (int i = 0; i < N * C; i++) dout[i] = i / C % 4 == 1 ? 1e8f : i / C % 4 == 3 ? -1e8f : 1.0f;
    const DeviceBuffer<float> dout_device(dout), found(std::vector<float>(3 * C, 0.0f));
    const DeviceBuffer<int> ids(std::vector<int>(N, 1).size());
    device_upload(ids.data, std::vector<int>(N, 1).data(), N * sizeof(int), kernel_test().stream);
    cuda::embedding_backward(found.data, dout_device.data, ids.data, 0, 3, N, C, kernel_test().stream);
    float expected = 0;
    for (int i = 0; i < N; i++) expected += dout[i * C];
    CHECK(expected != N / 2.0f);
    for (int j = 0; j < 3 * C; j++) CHECK(found.floats()[j] == (j / C == 1 ? expected : 0.0f));
}

TEST_CASE_TEMPLATE("position embedding of a stripe of the batch", E, float, bf16, fp16) {
    const int T = 6, positions = 8;
    for (int C : {1, 7, 48, 1100}) {
        for (const auto& [first_token, n] : {std::pair(0L, 18L), {9L, 33L}, {4L, 1L}}) {
            CAPTURE(C);
            CAPTURE(first_token);
            const std::vector<float> table = random_values<E>(positions * C, 1), x = random_values<E>(n * C, 2);
            std::vector<float> sum = x;
            cpu::position_forward(sum.data(), table.data(), first_token, n, T, C, {});
            const DeviceBuffer<E> table_device(table), dx(x);
            in_thread_orders([&] {
                const DeviceBuffer<E> x_found(x);
                cuda::position_forward(x_found.data, table_device.data, first_token, n, T, C, kernel_test().stream);
                std::vector<float> rounded = sum;
                for (float& value : rounded) value = host_float(host_round<E>(value));
                CHECK(same_bits(x_found.floats(), rounded));
                CHECK(x_found.guards_hold());
                for (bool accumulate : {false, true}) {
                    std::vector<float> start = random_values<float>(positions * C, 3), grads = start;
                    if (!accumulate) std::fill(start.begin(), start.end(), NAN);
                    cpu::position_backward(grads.data(), x.data(), first_token, n, T, C, positions, accumulate, {});
                    const DeviceBuffer<float> found(start);
                    cuda::position_backward(found.data, dx.data, first_token, n, T, C, positions, accumulate,
                                            kernel_test().stream);
                    CHECK(same_bits(found.floats(), grads));
                    CHECK(found.guards_hold());
                }
            });
        }
    }
}

template <class E>
void classifier_check(long N, int V, int tp, int multiple) {
    const int rows = (V / tp + multiple) / multiple * multiple;  // padded; with V small the last ranks have nothing but padding
    const float scale = 0.25f;
    const std::vector<float> logits = random_values<E>(N * V, 1, 3.0f);
    std::vector<int> targets = random_ids(N, V, 2);
    targets[0] = V - 1;
    if (N > 2) targets[1] = -1;
    for (long i = 2; i < N; i += 3) targets[i] = std::min(V - 1, i % 2 ? rows : rows - 1);  // where ranks meet
    const auto valid = [&](int rank) { return std::clamp(V - rank * rows, 0, rows); };
    const auto own_logits = [&](int rank) {
        std::vector<float> own(N * rows, NAN);  // what is in the padding does not matter
        for (long i = 0; i < N; i++) std::copy_n(&logits[i * V + rank * rows], valid(rank), &own[i * rows]);
        return own;
    };
    const DeviceBuffer<int> targets_device(N);
    device_upload(targets_device.data, targets.data(), N * sizeof(int), kernel_test().stream);
    std::vector<float> stats(tp * N * 3);
    for (int rank = 0; rank < tp; rank++) {
        cpu::classifier_local(&stats[rank * N * 3], own_logits(rank).data(), targets.data(), rank * rows, valid(rank), rows, N, {});
    }
    const DeviceBuffer<float> stats_device(stats);
    for (int rank = 0; rank < tp; rank++) {
        CAPTURE(rank);
        std::vector<float> own = own_logits(rank), losses(N), own_stats(&stats[rank * N * 3], &stats[rank * N * 3] + N * 3);
        const DeviceBuffer<E> untouched(own);
        cpu::classifier_finish(losses.data(), own.data(), stats.data(), targets.data(), rank * rows, valid(rank), rows, tp, scale, N,
                               {});
        std::vector<E> first;
        in_thread_orders([&] {
            const DeviceBuffer<float> stats_found(N * 3), losses_found(N);
            const DeviceBuffer<E> found(own_logits(rank));
            cuda::classifier_local(stats_found.data, found.data, targets_device.data, rank * rows, valid(rank), rows, N,
                                   kernel_test().stream);
            CHECK(relative_l2(stats_found.floats(), own_stats) < 1e-5);
            cuda::classifier_finish(losses_found.data, found.data, stats_device.data, targets_device.data, rank * rows, valid(rank),
                                    rows, tp, 0.0f, N, kernel_test().stream);
            CHECK(relative_l2(losses_found.floats(), losses) < 1e-6);
            CHECK(same_bits(found.download(), untouched.download()));
            cuda::classifier_finish(losses_found.data, found.data, stats_device.data, targets_device.data, rank * rows, valid(rank),
                                    rows, tp, scale, N, kernel_test().stream);
            CHECK(relative_l2(losses_found.floats(), losses) < 1e-6);
            CHECK(relative_l2(found.floats(), own) < kernel_tolerance<E>);
            CHECK((N < 3 || losses_found.floats()[1] == 0.0f));
            bool zero = true;
            for (long i = 0; i < N; i++) {
                for (int j = targets[i] < 0 ? 0 : valid(rank); j < rows; j++) zero &= found.floats()[i * rows + j] == 0.0f;
                if (N * rows > 3000) break;
            }
            CHECK(zero);
            CHECK(same_as_first(first, found.download()));
            CHECK((stats_found.guards_hold() && losses_found.guards_hold() && found.guards_hold()));
        });
    }
}

TEST_CASE_TEMPLATE("classifier on 1 and 3 ranks, with padding and ignored targets", E, float, bf16, fp16) {
    struct Shape {
        long N;
        int V, tp, multiple;
    };
#ifdef __SANITIZE_THREAD__
    const Shape shapes[] = {{3, 97, 3, 16}, {1, 1023, 1, 1}};
#else
    const Shape shapes[] = {{1, 97, 1, 1}, {17, 97, 3, 16}, {3, 1023, 1, 64}, {3, 1023, 3, 1}, {2, 9001, 1, 8}, {5, 10, 3, 16}};
#endif
    for (const auto [N, V, tp, multiple] : shapes) {
        CAPTURE(N);
        CAPTURE(V);
        CAPTURE(tp);
        classifier_check<E>(N, V, tp, multiple);
    }
}

TEST_CASE("what is not finite in the logits shows in the loss") {
    const int V = 1000;
    std::vector<float> logits = random_values<float>(V, 1);
    const DeviceBuffer<float> stats(3), loss(1);
    const DeviceBuffer<int> target(1);
    const int target_row = 17;
    device_upload(target.data, &target_row, sizeof(int), kernel_test().stream);
    const auto run = [&] {
        const DeviceBuffer<float> logits_device(logits);
        cuda::classifier_local(stats.data, logits_device.data, target.data, 0, V, V, 1, kernel_test().stream);
        cuda::classifier_finish(loss.data, logits_device.data, stats.data, target.data, 0, V, V, 1, 0.0f, 1, kernel_test().stream);
        return loss.floats()[0];
    };
    CHECK(std::isfinite(run()));
    logits[500] = NAN;
    CHECK(std::isnan(run()));
    logits[500] = INFINITY;
    CHECK(!std::isfinite(run()));
    logits[500] = -INFINITY;
    CHECK(std::isfinite(run()));
    std::fill(logits.begin(), logits.end(), -INFINITY);
    CHECK(!std::isfinite(run()));
}

TEST_CASE("the gradient's norm") {
    for (size_t n : {size_t(0), size_t(5), size_t(2048), size_t(50003)}) {
        const std::vector<float> x = random_values<float>(n + 1, 1);
        const DeviceBuffer<float> device(x);
        for (size_t shift : {0, 1}) {
            CAPTURE(n);
            const double expected = cpu::global_norm_squared(x.data() + shift, n, {});
            double first = -1;
            in_thread_orders([&] {
                const double found = cuda::global_norm_squared(device.data + shift, n, kernel_test().stream);
                CHECK(std::abs(found - expected) <= 1e-12 * expected);
                if (first < 0) first = found;
                CHECK(found == first);
            });
        }
    }
    const DeviceBuffer<float> bad(std::vector<float>{1.0f, NAN});
    CHECK(std::isnan(cuda::global_norm_squared(bad.data, 2, kernel_test().stream)));
}

namespace {

const AdamW test_hyper = {1e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.5f, 0, 1234};

// The neighbour of x in E that lies towards zero, and the next one from there.
template <class E>
std::pair<double, double> neighbours(float x) {
    const int digits = std::is_same_v<E, bf16> ? 7 : 10, least = std::is_same_v<E, bf16> ? -126 : -14;
    const int exponent = x == 0 ? least : std::max(std::ilogb(x), least);
    const double spacing = std::ldexp(1.0, exponent - digits), low = std::trunc(x / spacing) * spacing;
    return {low, low + std::copysign(spacing, x)};
}

}  // namespace

TEST_CASE_TEMPLATE("AdamW with float32 weights or a float32 master", E, float, bf16, fp16) {
    for (size_t n : sweep_sizes) {
        for (bool with_master : {false, true}) {
            if (!with_master && !std::is_same_v<E, float>) continue;
            CAPTURE(n);
            CAPTURE(with_master);
            std::vector<float> p = random_values<float>(n, 1), m(n), v(n);
            const std::vector<float> start = p;
            const DeviceBuffer<E> p_device(start);
            const DeviceBuffer<float> master(start), m_device(m), v_device(v);
            AdamW hyper = test_hyper;
            in_thread_orders([&] {
                hyper.step++;  // three steps
                const std::vector<float> g = random_values<float>(n, uint64_t(hyper.step) + 10, 1e-3f);
                const DeviceBuffer<float> g_device(g);
                cpu::adamw_update(p.data(), nullptr, g.data(), m.data(), v.data(), n, hyper, {});
                cuda::adamw_update(p_device.data, with_master ? master.data : nullptr, g_device.data, m_device.data, v_device.data,
                                   n, hyper, kernel_test().stream);
            });
            std::vector<float> rounded = p;
            for (float& value : rounded) value = host_float(host_round<E>(value));
            CHECK(relative_l2(p_device.floats(), rounded) < 1e-6);
            CHECK(relative_l2(master.floats(), with_master ? p : start) < 1e-6);
            CHECK(relative_l2(m_device.floats(), m) < 1e-6);
            CHECK(relative_l2(v_device.floats(), v) < 1e-6);
            CHECK((p_device.guards_hold() && master.guards_hold() && m_device.guards_hold() && v_device.guards_hold()));
        }
    }
}

TEST_CASE_TEMPLATE("AdamW rounds weights of 16 bits stochastically, by the element's own random number", E, bf16, fp16) {
    for (float size : {1.0f, 1e-4f, 1e-6f}) {  // the last two: subnormals of fp16, and where its spacing changes
        CAPTURE(size);
        const size_t n = 77;
        const std::vector<float> start = random_values<E>(n, 1, size), g = random_values<float>(n, 2);
        AdamW hyper = test_hyper;
        hyper.step = 3;
        hyper.lr = 0.05f * size * 0x1p-8f;  // far below the spacing: rounded to nearest, nothing would move
        hyper.weight_decay = 0;
        std::vector<float> exact = start, m(n), v(n);
        cpu::adamw_update(exact.data(), nullptr, g.data(), m.data(), v.data(), n, hyper, {});
        const DeviceBuffer<float> g_device(g);
        const DeviceBuffer<E> p(start);
        std::vector<double> mean(n);
        size_t wrong = 0;
#ifdef __SANITIZE_THREAD__
        const int seeds = 50;
#else
        const int seeds = 600;
#endif
        const DeviceBuffer<float> m_device(n), v_device(n);
        std::vector<E> start_rounded(n);
        for (size_t i = 0; i < n; i++) start_rounded[i] = host_round<E>(start[i]);
        for (int seed = 0; seed < seeds; seed++) {
            hyper.seed = uint64_t(seed) * 0x9E3779B97F4A7C15u;
            device_upload(p.data, start_rounded.data(), n * sizeof(E), kernel_test().stream);
            device_zero(m_device.data, n * sizeof(float), kernel_test().stream);
            device_zero(v_device.data, n * sizeof(float), kernel_test().stream);
            cuda::adamw_update(p.data, nullptr, g_device.data, m_device.data, v_device.data, n, hyper, kernel_test().stream);
            const std::vector<float> found = p.floats();
            for (size_t i = 0; i < n; i++) {
                const auto [low, high] = neighbours<E>(exact[i]);
                const uint32_t random = philox(hyper.seed, i / 4, uint64_t(hyper.step))[i % 4];
                // up if the fraction and the random number together reach 1; the kernel has 13 or more of their bits
                const double reach = (exact[i] - low) / (high - low) + random * 0x1p-32;
                if (std::abs(reach - 1) > 0x1p-12) wrong += found[i] != float(reach >= 1 ? high : low);
                else wrong += found[i] != float(high) && found[i] != float(low);
                mean[i] += found[i] / seeds;
            }
        }
        CHECK(wrong == 0);
        double worst = 0;
        for (size_t i = 0; i < n; i++) {
            const auto [low, high] = neighbours<E>(exact[i]);
            worst = std::max(worst, std::abs(mean[i] - exact[i]) / std::abs(high - low));
        }
        CHECK(worst < 4.5 * 0.5 / std::sqrt(seeds));
        CHECK(p.guards_hold());
    }
}

TEST_CASE_TEMPLATE("AdamW keeps what is not finite", E, bf16, fp16) {
    const std::vector<float> start = {INFINITY, -INFINITY, NAN, 1.0f};
    const DeviceBuffer<E> p(start);
    const DeviceBuffer<float> g(std::vector<float>(4, 0.0f)), m(std::vector<float>(4, 0.0f)), v(std::vector<float>(4, 0.0f));
    AdamW hyper = test_hyper;
    hyper.step = 1;
    hyper.weight_decay = 0;
    cuda::adamw_update(p.data, nullptr, g.data, m.data, v.data, 4, hyper, kernel_test().stream);
    const std::vector<float> found = p.floats();
    CHECK(found[0] == INFINITY);
    CHECK(found[1] == -INFINITY);
    CHECK(std::isnan(found[2]));
    CHECK(found[3] == 1.0f);
}
