// One training step's time on this CPU, on one rank, beside OpenBLAS's own rate at the model's products.
//
//   OMP_NUM_THREADS=2 build/cpu/dev/bench_step gpt2|small|nanogpt [STEPS]     gpt2: 9 s on 2 cores, 2.2 GB
//
// Prints one JSON line: step_ms (median of forward, backward, norm and AdamW, after two steps to warm up), gflops,
// sgemm_gflops, peak_mb (1e6 bytes). A token costs 6 N + 12 L C T operations, N the parameters without the position table.
// sgemm_gflops: operations over time of cblas_sgemm alone, on one step's products of linear layers.
#define TRAIN_GPT_NO_MAIN
#include "../../train_gpt.cu"

namespace {

struct Shape {
    const char* name;
    int layers, channels, heads, vocab, positions, T, B;
};
constexpr Shape shapes[] = {
    {"gpt2", 12, 768, 12, 50257, 1024, 64, 4}, {"small", 6, 384, 6, 256, 256, 256, 8}, {"nanogpt", 4, 128, 4, 65, 64, 64, 12}};

double median(std::vector<double> values) {
    std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
    return values[values.size() / 2];
}

// As train_step of the trainer, less data and log.
void step_run(Model& m, Comm& dp, long step) {
    std::vector<int> windows(size_t(m.B) * (m.T + 1));
    for (size_t i = 0; i < windows.size(); i++) windows[i] = int(philox(uint64_t(step), i, 0)[0] % uint32_t(m.config.vocab));
    batch_set(m, windows);
    GradientSums sums{&dp, {}};
    const double loss = model_forward_backward(m, 1.0f / float(m.N), false, &sums) / double(m.N);
    gradients_sum_finish(m, sums);
    const double norm = gradients_norm(m);
    check(std::isfinite(loss) && std::isfinite(norm), "step %ld: the loss is %g, the gradient's norm %g", step, loss, norm);
    AdamW hyper{};
    hyper.lr = 6e-4f;
    hyper.beta1 = 0.9f;
    hyper.beta2 = 0.95f;
    hyper.eps = 1e-8f;
    hyper.weight_decay = 0.1f;
    hyper.grad_scale = norm > 1 ? float(1 / norm) : 1.0f;
    hyper.step = step;
    model_update(m, hyper);
}

// GFLOP/s of sgemm on all products of a step's linear layers, forward and both gradients.
double sgemm_measure(const Model& m) {
    struct Layer {
        int inputs, outputs, count;
    };
    const int C = m.config.channels, L = m.config.layers, N = int(m.N);
    double work = 0, spent = 0;
    for (const auto [inputs, outputs, count] :
         {Layer{C, 3 * C, L}, Layer{C, C, L}, Layer{C, m.F_l, L}, Layer{m.F_l, C, L}, Layer{C, m.V_l, 1}}) {
        std::vector<float> x(size_t(N) * inputs, 0.5f), w(size_t(outputs) * inputs, 0.5f), y(size_t(N) * outputs);
        const auto forward = [&] {
            cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, N, outputs, inputs, 1, x.data(), inputs, w.data(), inputs, 0,
                        y.data(), outputs);
        };
        const auto input_gradient = [&] {
            cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, N, inputs, outputs, 1, y.data(), outputs, w.data(), inputs, 0,
                        x.data(), inputs);
        };
        const auto weight_gradient = [&] {
            cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, outputs, inputs, N, 1, y.data(), outputs, x.data(), inputs, 0,
                        w.data(), inputs);
        };
        const double operations = 2.0 * N * inputs * outputs;
        const auto measure = [&](const auto& product) {
            std::vector<double> times;
            product();
            for (int i = 0; i < std::clamp(int(2e9 / operations), 3, 20); i++) {
                const double begin = seconds_now();
                product();
                times.push_back(seconds_now() - begin);
            }
            work += count * operations;
            spent += count * median(times);
        };
        measure(forward);
        measure(input_gradient);
        measure(weight_gradient);
    }
    return work / spent / 1e9;
}

void bench(const Shape& s, int steps) {
    Mesh mesh = mesh_make(1, 1, 60.0);
    Model m;
    m.boundaries.tp = &mesh.tp;
    ModelConfig config;
    config.layers = s.layers;
    config.channels = s.channels;
    config.heads = s.heads;
    config.ffn = 4 * s.channels;
    config.positions = s.positions;
    config.vocab = s.vocab;
    model_make(m, config, mesh.tp, false, Recompute::none, s.B, s.T);
    params_init(m.table, m.params, 1337);

    std::vector<double> times;
    const int warm_up = 2;
    for (int step = 1; step <= warm_up + steps; step++) {
        const double begin = seconds_now();
        step_run(m, mesh.dp, step);
        if (step > warm_up) times.push_back(seconds_now() - begin);
    }
    const double seconds = median(times), peak_mb = peak_memory_mib() * (1 << 20) / 1e6;
    const double counted = double(m.table.full_size) - double(s.positions) * s.channels;
    const double operations = double(m.N) * (6 * counted + 12.0 * s.layers * s.channels * s.T);
    printf("{\"shape\": \"%s\", \"step_ms\": %.2f, \"gflops\": %.1f, \"sgemm_gflops\": %.1f, \"peak_mb\": %.0f}\n", s.name,
           1e3 * seconds, operations / seconds / 1e9, sgemm_measure(m), peak_mb);
}

}  // namespace

int main(int argc, char** argv) {
    comm_init(&argc, &argv);
    int status = 2;
    try {
        const int steps = argc > 2 ? atoi(argv[2]) : 5;
        for (const Shape& shape : shapes) {
            if (argc > 1 && steps > 0 && shape.name == std::string(argv[1])) {
                bench(shape, steps);
                status = 0;
            }
        }
        if (status) fprintf(stderr, "usage: bench_step gpt2|small|nanogpt [STEPS]\n");
    } catch (const std::exception& e) {
        fprintf(stderr, "bench_step: %s\n", e.what());
        status = 1;
    }
    comm_finalize();
    return status;
}
