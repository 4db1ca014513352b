// The trainer's own step on several ranks against the same on one: tensor parallel with and without sequence parallelism,
// data parallel, every codec. Each rank trains the reference alone, beside the run under test.
#include "mpi_main.h"

#define TRAIN_GPT_NO_MAIN
#include "../train_gpt.cu"

namespace {

// A token file of our own, one a rank: a walk with enough structure to learn from, over 97 ids.
std::string tokens_write(int rank) {
    const std::string path = std::filesystem::temp_directory_path() / format_text("mpi_model_%d_%d.bin", int(getpid()), rank);
    std::vector<int> header(256);
    std::vector<uint16_t> ids(20000);
    header[0] = token_magic_u16;
    header[1] = 1;
    header[2] = int(ids.size());
    for (size_t i = 1; i < ids.size(); i++) ids[i] = uint16_t((ids[i - 1] * 3 + philox(7, i, 0)[0] % 5) % 97);
    const File file = file_create(path);
    pwrite_all(file, header.data(), 1024, 0);
    pwrite_all(file, ids.data(), ids.size() * 2, 1024);
    return path;
}

struct Trial : Run {
    std::string path;

    // tp = 0: the reference, this rank alone.
    explicit Trial(int tp, std::vector<std::string> more = {}) {
        Comm world = comm_world();
        path = tokens_write(world.rank);
        std::vector<std::string> words = {"train_gpt",
                                          "--train",
                                          path,
                                          "--model",
                                          "gpt2:d2,c=96,heads=24,vocab=97",
                                          "--seq",
                                          "24",
                                          "--steps",
                                          "50",
                                          "--threads",
                                          "1",
                                          "--lr",
                                          "3e-3",
                                          "--warmup",
                                          "2",
                                          "--tp",
                                          std::to_string(std::max(1, tp))};
        words.insert(words.end(), more.begin(), more.end());
        std::vector<const char*> arguments;
        for (const std::string& word : words) arguments.push_back(word.c_str());
        config = run_config_parse(int(arguments.size()), arguments.data()).config;
        run_config_resolve(config, tp ? world.size : 1, 1);
        if (tp) mesh = mesh_make(tp, 1, 60);
        run_setup(*this);
    }
    ~Trial() { std::filesystem::remove(path); }

    std::vector<double> losses(int steps) {
        std::vector<double> all;
        for (int i = 0; i < steps; i++) all.push_back(train_step(*this).loss);
        return all;
    }
};

double relative_worst(const std::vector<double>& a, const std::vector<double>& b) {
    double worst = 0;
    for (size_t i = 0; i < a.size(); i++) worst = std::max(worst, std::abs(a[i] - b[i]) / std::abs(b[i]));
    return worst;
}

// The largest relative L2 distance of any parameter's gradient between this rank's pieces and the reference.
double gradients_worst(const Model& m, const Model& reference) {
    double worst = 0;
    for (size_t i = 0; i < m.table.list.size(); i++) {
        const Param &p = m.table.list[i], &full = reference.table.list[i];
        double error = 0, norm = 0;
        for (const ParamBlock& block : param_blocks(p, m.table.tp, m.table.tp_rank)) {
            for (long r = 0; r < block.rows; r++) {
                for (long c = 0; c < block.cols; c++) {
                    const double mine = m.grads[p.offset + (block.local_row + r) * p.local_cols + c];
                    const double right =
                        reference.grads[full.offset + (block.global_row + r) * full.local_cols + block.global_col + c];
                    error += (mine - right) * (mine - right);
                    norm += right * right;
                }
            }
        }
        if (norm > 0) worst = std::max(worst, std::sqrt(error / norm));
    }
    return worst;
}

}  // namespace

TEST_CASE("tensor parallel with codec none is one rank's run") {
    const int tp = comm_world().size;
    Trial reference(0, {"--micro-batch", "2"});
    const std::vector<double> first = reference.losses(1);
    for (const char* sp : {"on", "off"}) {
        for (const char* recompute : {"none", "block"}) {
            Trial trial(tp, {"--micro-batch", "2", "--sp", sp, "--recompute", recompute});
            CAPTURE(sp);
            CHECK(relative_worst(trial.losses(1), first) <= 3e-6);
            CHECK(gradients_worst(trial.model, reference.model) <= 1e-4);
        }
    }
    Trial again(0, {"--micro-batch", "2"});
    const std::vector<double> expected = again.losses(20);
    CHECK(expected[19] < expected[0] - 0.2);  // it learns, so there is something to agree on
    for (const char* sp : {"on", "off"}) {
        Trial trial(tp, {"--micro-batch", "2", "--sp", sp});
        CAPTURE(sp);
        CHECK(relative_worst(trial.losses(20), expected) <= 3e-6);
    }
}

TEST_CASE("data parallel and gradient accumulation are one rank's run") {
    const int ranks = comm_world().size, tp = ranks % 2 == 0 && ranks > 2 ? 2 : 1, dp = ranks / tp;
    const std::string batch = std::to_string(4 * dp);
    Trial reference(0, {"--micro-batch", batch});
    const std::vector<double> expected = reference.losses(20);
    for (const char* micro : {"2", "4"}) {
        Trial trial(tp, {"--micro-batch", micro, "--global-batch", batch});
        CHECK(relative_worst(trial.losses(20), expected) <= 3e-6);
        replicas_check(trial.model, trial.mesh);
    }
}

TEST_CASE("replicated parameters stay the same bits with every codec, and the run still learns") {
    const int tp = comm_world().size;
    Trial reference(0, {"--micro-batch", "2"});
    const std::vector<double> expected = reference.losses(50);
    for (const char* codec :
         {"none", "bf16", "fp8", "int8", "taco", "taco:g=32:sr", "hadint8", "hadint7", "hadint6", "hadint5", "hadint4:sr"}) {
        for (const char* sp : {"on", "off"}) {
            CAPTURE(codec);
            CAPTURE(sp);
            Trial trial(tp, {"--micro-batch", "2", "--tp-codec", codec, "--sp", sp, "--snr-every", "10"});
            const std::vector<double> losses = trial.losses(50);
            CHECK_NOTHROW(replicas_check(trial.model, trial.mesh));
            CHECK(std::abs(losses[49] / expected[49] - 1) < 0.05);
        }
    }
}

TEST_CASE("a replica that differs is found") {
    const int ranks = comm_world().size;
    if (ranks == 1) return;
    Trial trial(ranks, {"--micro-batch", "2"});
    if (trial.mesh.tp.rank == ranks - 1) trial.model.params[5] += 1e-6f;
    CHECK_THROWS_WITH_AS(replicas_check(trial.model, trial.mesh), doctest::Contains("must be the same bits"), Error);
}

TEST_CASE("samples are the same at every tp, and on every rank") {
    const int tp = comm_world().size;
    Trial reference(0, {"--micro-batch", "2"}), trial(tp, {"--micro-batch", "2"});
    std::vector<int> expected = {1}, tokens = {1};
    sample(reference.model, expected, 40, reference.model.config.vocab, 0.0f, 0, 3);
    sample(trial.model, tokens, 40, trial.model.config.vocab, 0.0f, 0, 3);
    CHECK(tokens == expected);
}
