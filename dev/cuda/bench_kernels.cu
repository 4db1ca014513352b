// Each kernel's time on this GPU against its floor, as the model calls it: GPT-2 124M, a micro-batch, one rank.
//
//   build/cuda/dev/bench_kernels [--tiny] [--json FILE] [WORD ..]     only the kernels whose name holds one of the words
//
// floor: what the op must move, at least once each, by the memory's bandwidth, or its FLOPs by the peak of peak.h, whichever
// is longer. time: the median of several, between two events, with everything it reads out of the L2 cache. To the host a
// kernel that is queued behind others costs nothing, to the GPU a launch costs some microseconds: they are in the time.
// --json writes the same as lines of JSON, first the device, then each kernel. To add a kernel: one row in rows_make.
#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "llmc/device.h"
#include "llmc/ops.h"
#include "llmc/peak.h"
#include "llmc/rng.h"

namespace {

struct Shape {
    int B, T, C, NH, V, layers;
    int runs;              // that are timed of each kernel
    size_t evicted_bytes;  // read before each
};
constexpr Shape gpt2 = {8, 1024, 768, 12, 50304, 12, 15, size_t(256) << 20}, tiny = {1, 32, 128, 2, 256, 1, 3, size_t(64) << 10};

struct Row {
    std::string name;
    double bytes, flops;  // that cannot be avoided
    std::function<void()> work;
};

struct Bench {
    Device device = device_open(0);
    Stream stream = stream_make(device);
    Shape s;
    double gb_per_s = 0;  // the memory's, as the device says
    Peak peak;
    std::vector<std::pair<void*, size_t>> memory;
    ~Bench() {
        for (const auto& [at, bytes] : memory) device_free(at, bytes);
    }
};

template <class T>
T* zeros(Bench& b, size_t n) {
    b.memory.emplace_back(device_allocate(n * sizeof(T)), n * sizeof(T));
    return static_cast<T*>(b.memory.back().first);
}

// Normal values of that deviation: 65536 of them, over and over.
template <class T>
T* normals(Bench& b, size_t n, float deviation) {
    const size_t period = std::min<size_t>(n, 65536);
    std::vector<float> host((period + 3) / 4 * 4);
    for (size_t i = 0; i < period; i += 4) {
        const auto four = normals_from_bits(philox(1, i, 0));
        for (size_t j = 0; j < 4; j++) host[i + j] = deviation * four[j];
    }
    const Scratch<float> floats(period, b.stream);
    device_upload(floats.data, host.data(), period * sizeof(float), b.stream);
    T* data = zeros<T>(b, n);
    op::cast(data, floats.data, period, b.stream);
    for (size_t done = period; done < n; done *= 2) {
        device_copy(data + done, data, std::min(done, n - done) * sizeof(T), b.stream);
    }
    stream_synchronize(b.stream);
    return data;
}

// Memory's bandwidth in GB/s: two transfers a clock, as for all of NVIDIA's.
double bandwidth_find(const Device& device) {
#ifdef CUDA_EMU
    return 1 + 0 * device.index;  // it has no memory clock
#else
    int khz = 0, bits = 0;
    cuda_check(cudaDeviceGetAttribute(&khz, cudaDevAttrMemoryClockRate, device.index), "cudaDeviceGetAttribute");
    cuda_check(cudaDeviceGetAttribute(&bits, cudaDevAttrGlobalMemoryBusWidth, device.index), "cudaDeviceGetAttribute");
    return 2e-6 * khz * bits / 8;
#endif
}

// The kernels, in the order of a training step. Work is timed with what the rows before it left behind.
std::vector<Row> rows_make(Bench& b) {
    using X = floatX;
    const Shape& s = b.s;
    const Stream stream = b.stream;
    const int C = s.C, T = s.T, F = 4 * C, V = s.V, HS = C / s.NH;
    const long N = long(s.B) * T;
    const long chunk =
        std::min(N, long((64l << 20) / (V * sizeof(X))));  // tokens whose logits exist at a time, as in the trainer
    const size_t params = size_t(V) * C + size_t(T) * C + s.layers * (12 * size_t(C) * C + 13 * size_t(C)) + 2 * size_t(C);
    const float eps = 1e-5f, deviation = 0.02f;

    std::vector<int> ids(N);
    for (long i = 0; i < N; i++) ids[i] = int(philox(2, i, 0)[0] % uint32_t(V));
    const double distinct = double(std::set<int>(ids.begin(), ids.end()).size());
    int* tokens = zeros<int>(b, N);
    device_upload(tokens, ids.data(), N * sizeof(int), stream);

    X *x = normals<X>(b, N * C, 1), *y = normals<X>(b, N * C, 1), *residual = zeros<X>(b, N * C), *normed = zeros<X>(b, N * C);
    X *qkv = normals<X>(b, N * 3 * C, 1), *dqkv = zeros<X>(b, N * 3 * C), *out = zeros<X>(b, N * C),
      *dx = normals<X>(b, N * C, 1e-3f);
    X *hidden = normals<X>(b, N * F, 1), *gelu = normals<X>(b, N * F, 1), *dhidden = normals<X>(b, N * F, 1e-3f);
    X *wide = normals<X>(b, size_t(F) * C, deviation), *table = normals<X>(b, size_t(V) * C, deviation),
      *row = normals<X>(b, F, 1);
    X* logits = normals<X>(b, chunk * V, 1);
    float *mean = zeros<float>(b, N), *rstd = normals<float>(b, N, 1), *lse = zeros<float>(b, N * s.NH);
    float *losses = zeros<float>(b, N), *stats = zeros<float>(b, 3 * N), *dwide = zeros<float>(b, size_t(F) * C);
    float *dtable = zeros<float>(b, size_t(V) * C), *drow = zeros<float>(b, F), *drow_2 = zeros<float>(b, F);
    X* p = normals<X>(b, params, deviation);
    float *master = normals<float>(b, params, deviation), *g = normals<float>(b, params, 1e-3f);
    float *m = zeros<float>(b, params), *v = zeros<float>(b, params);
    const AdamW hyper = {
        .lr = 6e-4f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .weight_decay = 0.1f, .grad_scale = 1, .step = 10};

    const double e = sizeof(X), nc = double(N) * C, nf = double(N) * F, cf = double(C) * F, cc = double(C) * C,
                 vc = double(V) * C;
    const double pairs = 0.5 * s.B * s.NH * double(T) * (T + 1), kc = double(chunk) * C, kv = double(chunk) * V,
                 P = double(params);
    const bool has_master = sizeof(X) < sizeof(float);
    std::vector<Row> rows = {
        {"copy, for comparison", 2 * e * nf, 0, [=] { device_copy(dhidden, hidden, size_t(nf) * sizeof(X), stream); }},
        {"embedding_forward", e * (nc + distinct * C) + 4 * N, 0,
         [=] { op::embedding_forward(x, tokens, table, 0, V, N, C, stream); }},
        {"position_forward", e * (2 * nc + T * C), 0, [=] { op::position_forward(x, table, 0, N, T, C, stream); }},
        {"layernorm_forward", 2 * e * nc + 8 * N, 0,
         [=] { op::layernorm_forward(normed, mean, rstd, x, row, row, N, C, eps, stream); }},
        {"matmul_forward qkv + bias", e * (4 * nc + 3 * cc), 6 * nc * C,
         [=] { op::matmul_forward(qkv, nullptr, normed, wide, row, N, C, 3 * C, stream); }},
        {"attention_forward", e * 4 * nc + 4 * N * s.NH, 4 * pairs * HS,
         [=] { op::attention_forward(out, lse, qkv, s.B, T, s.NH, s.NH, HS, stream); }},
        {"matmul_forward proj", e * (2 * nc + cc), 2 * nc * C,
         [=] { op::matmul_forward(y, nullptr, out, wide, nullptr, N, C, C, stream); }},
        {"residual_layernorm_forward + bias", e * 4 * nc + 8 * N, 0,
         [=] { op::residual_layernorm_forward(residual, normed, mean, rstd, x, y, row, row, row, N, C, eps, stream); }},
        {"matmul_forward fc + bias + gelu", e * (nc + cf + 2 * nf), 2 * nc * F,
         [=] { op::matmul_forward(gelu, hidden, normed, wide, row, N, C, F, stream); }},
        {"gelu_forward", e * 2 * nf, 0, [=] { op::gelu_forward(gelu, hidden, size_t(N) * F, stream); }},
        {"matmul_forward out", e * (nf + cf + nc), 2 * nc * F,
         [=] { op::matmul_forward(y, nullptr, gelu, wide, nullptr, N, F, C, stream); }},
        {"matmul_forward head, one chunk", e * (kc + vc + kv), 2 * kc * V,
         [=] { op::matmul_forward(logits, nullptr, normed, table, nullptr, chunk, C, V, stream); }},
        {"classifier_local, one chunk", e * kv + 16 * chunk, 0,
         [=] { op::classifier_local(stats, logits, tokens, 0, V, V, chunk, stream); }},
        {"classifier_finish, one chunk", e * 2 * kv + 20 * chunk, 0,
         [=] { op::classifier_finish(losses, logits, stats, tokens, 0, V, V, 1, 1 / float(N), chunk, stream); }},
        {"matmul_backward_weight head, one chunk", e * (kv + kc) + 8 * vc, 2 * kc * V,
         [=] { op::matmul_backward_weight(dtable, nullptr, logits, normed, chunk, C, V, true, stream); }},
        {"matmul_backward_input head, one chunk", e * (kc + vc + kv), 2 * kc * V,
         [=] { op::matmul_backward_input(y, logits, table, nullptr, chunk, C, V, stream); }},
        {"bias_backward out", e * nc + 4 * C, 0, [=] { op::bias_backward(drow, dx, N, C, false, stream); }},
        {"matmul_backward_weight out", e * (nc + nf) + 4 * cf, 2 * nc * F,
         [=] { op::matmul_backward_weight(dwide, nullptr, dx, gelu, N, F, C, false, stream); }},
        {"matmul_backward_input out + gelu", e * (nc + cf + 2 * nf), 2 * nc * F,
         [=] { op::matmul_backward_input(dhidden, dx, wide, hidden, N, F, C, stream); }},
        {"gelu_backward", e * 3 * nf, 0, [=] { op::gelu_backward(dhidden, gelu, hidden, size_t(N) * F, stream); }},
        {"matmul_backward_weight fc + bias", e * (nf + nc) + 4 * cf, 2 * nc * F,
         [=] { op::matmul_backward_weight(dwide, drow, dhidden, normed, N, C, F, false, stream); }},
        {"matmul_backward_input fc", e * (nf + cf + nc), 2 * nc * F,
         [=] { op::matmul_backward_input(y, dhidden, wide, nullptr, N, C, F, stream); }},
        {"layernorm_backward", e * 4 * nc + 8 * N, 0,
         [=] { op::layernorm_backward(dx, drow, drow_2, y, x, row, mean, rstd, N, C, false, stream); }},
        {"matmul_backward_weight proj", e * 2 * nc + 4 * cc, 2 * nc * C,
         [=] { op::matmul_backward_weight(dwide, nullptr, dx, out, N, C, C, false, stream); }},
        {"matmul_backward_input proj", e * (2 * nc + cc), 2 * nc * C,
         [=] { op::matmul_backward_input(y, dx, wide, nullptr, N, C, C, stream); }},
        {"attention_backward", e * 8 * nc + 4 * N * s.NH, 10 * pairs * HS,
         [=] { op::attention_backward(dqkv, y, out, lse, qkv, s.B, T, s.NH, s.NH, HS, stream); }},
        {"matmul_backward_weight qkv + bias", e * 4 * nc + 12 * cc, 6 * nc * C,
         [=] { op::matmul_backward_weight(dwide, drow, dqkv, normed, N, C, 3 * C, false, stream); }},
        {"matmul_backward_input qkv", e * (4 * nc + 3 * cc), 6 * nc * C,
         [=] { op::matmul_backward_input(y, dqkv, wide, nullptr, N, C, 3 * C, stream); }},
        {"position_backward", e * nc + 4.0 * T * C, 0, [=] { op::position_backward(dwide, dx, 0, N, T, C, T, false, stream); }},
        {"embedding_backward", e * nc + 8 * distinct * C + 4 * N, 0,
         [=] { op::embedding_backward(dtable, dx, tokens, 0, V, N, C, stream); }},
        {"global_norm_squared, to the host", 4 * P, 0, [=] { op::global_norm_squared(g, params, stream); }},
        {"adamw_update", P * (has_master ? e + 28 : 28), 0,
         [=] { op::adamw_update(p, has_master ? master : nullptr, g, m, v, params, hyper, stream); }},
        {"cast from float", P * (4 + e), 0, [=] { op::cast(p, master, params, stream); }},
    };
    if (has_master) {
        rows.push_back({"adamw_update, without master weights", P * (2 * e + 20), 0,
                        [=] { op::adamw_update(p, nullptr, g, m, v, params, hyper, stream); }});
    }

    // on two ranks, whose N C values are summed: the peer's wire and the own values
    const size_t n = size_t(nc);
    uint64_t* nonfinite = zeros<uint64_t>(b, 1);
    for (const char* spec : {"bf16", "fp8", "int8", "taco", "taco:sr", "hadint8", "hadint7", "hadint6", "hadint5", "hadint4"}) {
        const Codec c = codec_parse(spec);
        const size_t bytes = codec_wire_bytes<X>(c, n);
        const double w = double(bytes);
        uint8_t *wire = zeros<uint8_t>(b, bytes), *next = zeros<uint8_t>(b, bytes);
        op::codec_encode(c, wire, y, n, {}, nonfinite, stream);
        const ResidualNorm<X> to_wire = {residual, nullptr, mean, rstd, x, row, row, row, C, eps};
        ResidualNorm<X> to_memory = to_wire;
        to_memory.out = normed;
        const auto add = [&](const char* what, double moved, std::function<void()> work) {
            rows.push_back({std::string(what) + " " + spec, moved, 0, std::move(work)});
        };
        const auto fused = [=](bool done) { check(done, "%s: the fused kernel refuses rows of %d values", spec, C); };
        add("codec_encode", e * nc + w, [=] { op::codec_encode(c, wire, y, n, {}, nonfinite, stream); });
        add("codec_decode", w + e * nc, [=] { op::codec_decode(c, normed, wire, n, stream); });
        add("codec_decode_reduce", w + 2 * e * nc, [=] {
            const uint8_t* wires[] = {nullptr, wire};
            op::codec_decode_reduce(c, normed, wires, y, 2, n, stream);
        });
        add("codec_decode_reduce_encode", 2 * w + e * nc, [=] {
            const uint8_t* wires[] = {nullptr, wire};
            op::codec_decode_reduce_encode(c, next, wires, y, 2, n, {}, nonfinite, stream);
        });
        add("codec_decode_reduce_layernorm + encode", 2 * w + 3 * e * nc + 8 * N, [=] {
            const uint8_t* wires[] = {nullptr, wire};
            fused(op::codec_decode_reduce_layernorm(c, wires, y, 2, n, to_wire, c, next, {}, nonfinite, stream));
        });
        add("codec_decode_layernorm", w + 3 * e * nc + 8 * N, [=] {
            const uint8_t* wires[] = {wire};
            fused(op::codec_decode_layernorm(c, wires, 1, n, to_memory, stream));
        });
    }
    return rows;
}

// Seconds, the median of several runs. `evicted` is read before each, to empty the cache without dirty lines that would be
// written back on the kernel's time.
double seconds_measure(Bench& b, const Row& row, const float* evicted, float* sums) {
    row.work();
    std::vector<std::pair<Event, Event>> events;
    for (int run = 0; run < b.s.runs; run++) {
        op::bias_backward(sums, evicted, long(b.s.evicted_bytes / sizeof(float) / 1024), 1024, false, b.stream);
        auto& [from, to] = events.emplace_back(event_make(), event_make());
        event_record(from, b.stream);
        row.work();
        event_record(to, b.stream);
    }
    std::vector<double> seconds;
    for (const auto& [from, to] : events) seconds.push_back(event_seconds(from, to));
    std::nth_element(seconds.begin(), seconds.begin() + b.s.runs / 2, seconds.end());
    return seconds[b.s.runs / 2];
}

void bench(const Shape& shape, const char* json_path, const std::vector<std::string>& words) {
    Bench b;
    b.s = shape;
    b.gb_per_s = bandwidth_find(b.device);
    b.peak = peak_find(b.device, 0, 0, 0);
    const char* precision = sizeof(floatX) == 4 ? "fp32" : floatX_is_fp16 ? "fp16" : "bf16";
    FILE* json = json_path ? fopen(json_path, "w") : nullptr;
    check(!json_path || json, "--json '%s' cannot be written: %s", json_path, strerror(errno));
    printf("%s, %.0f GB/s; %s, %.1f TFLOP/s. %s, B %d, T %d, C %d, NH %d, V %d\n", b.device.properties.name, b.gb_per_s,
           b.peak.what.c_str(), 1e-3 * b.peak.gflops, precision, shape.B, shape.T, shape.C, shape.NH, shape.V);
    if (json) {
        fprintf(json,
                "{\"device\": \"%s\", \"gb_per_s\": %.1f, \"tflops\": %.2f, \"precision\": \"%s\", \"B\": %d, \"T\": %d, "
                "\"C\": %d, \"NH\": %d, \"V\": %d}\n",
                b.device.properties.name, b.gb_per_s, 1e-3 * b.peak.gflops, precision, shape.B, shape.T, shape.C, shape.NH,
                shape.V);
    }
    const float* evicted = zeros<float>(b, shape.evicted_bytes / sizeof(float));
    float* sums = zeros<float>(b, 1024);
    const std::vector<Row> rows = rows_make(b);
    printf("%-48s %9s %9s %9s %9s %9s %9s %7s\n", "kernel", "MB", "GFLOP", "floor us", "time us", "GB/s", "TFLOP/s", "floor");
    for (const Row& row : rows) {
        const bool wanted = words.empty() || std::any_of(words.begin(), words.end(), [&](const std::string& word) {
                                return row.name.find(word) != std::string::npos;
                            });
        if (!wanted) continue;
        const double by_bytes = 1e-9 * row.bytes / b.gb_per_s, by_flops = 1e-9 * row.flops / b.peak.gflops;
        const double floor = std::max(by_bytes, by_flops), seconds = seconds_measure(b, row, evicted, sums);
        printf("%-48s %9.2f %9.2f %9.2f %9.2f %9.0f %9.1f %6.1f%%\n", row.name.c_str(), 1e-6 * row.bytes, 1e-9 * row.flops,
               1e6 * floor, 1e6 * seconds, 1e-9 * row.bytes / seconds, 1e-12 * row.flops / seconds, 100 * floor / seconds);
        fflush(stdout);
        if (!json) continue;
        fprintf(json,
                "{\"kernel\": \"%s\", \"mb\": %.4f, \"gflop\": %.4f, \"bound\": \"%s\", \"floor_us\": %.4f, \"us\": %.3f, "
                "\"percent\": %.2f}\n",
                row.name.c_str(), 1e-6 * row.bytes, 1e-9 * row.flops, by_bytes < by_flops ? "FLOPs" : "bytes", 1e6 * floor,
                1e6 * seconds, 100 * floor / seconds);
        fflush(json);
    }
    if (json) fclose(json);
}

}  // namespace

int main(int argc, char** argv) try {
    Shape shape = gpt2;
    const char* json = nullptr;
    std::vector<std::string> words;
    for (int i = 1; i < argc; i++) {
        const std::string argument = argv[i];
        if (argument == "--tiny")
            shape = tiny;
        else if (argument == "--json" && i + 1 < argc)
            json = argv[++i];
        else if (argument.starts_with("-"))
            fail("'%s'? usage: bench_kernels [--tiny] [--json FILE] [WORD ..]", argument.c_str());
        else
            words.push_back(argument);
    }
    bench(shape, json, words);
} catch (const std::exception& error) {
    std::fprintf(stderr, "bench_kernels: %s\n", error.what());
    return 1;
}
