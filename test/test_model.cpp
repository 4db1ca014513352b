// The whole model on one rank against PyTorch in float64 (test/golden, made by test/oracle/make_model.py).
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#define TRAIN_GPT_NO_MAIN
#include "../train_gpt.cu"
#include "golden.h"

namespace {

struct OneRank {
    Comm tp;
    Model m;
    Golden golden;

    OneRank(const std::string& name, Recompute recompute) : golden(golden_open(name)) {
        tp.size = 1;
        tp.rank = 0;
        m.boundaries.tp = &tp;
        const int B = int(golden.shape("ids")[0]), T = int(golden.shape("ids")[1]);
        model_make(m, golden.config, tp, true, recompute, B, T);
        golden_load(golden, "weight.", m.table, m.params);
        device_copy(m.act.ids, golden.ints("ids").data(), m.N * sizeof(int), m.stream);
        device_copy(m.act.targets, golden.ints("targets").data(), m.N * sizeof(int), m.stream);
    }
};

}  // namespace

TEST_CASE("logits and loss") {
    for (const std::string name : {"model_a", "model_b", "model_c"}) {
        CAPTURE(name);
        OneRank one(name, Recompute::none);
        Model& m = one.m;
        m.head_chunk = int(m.N);
        model_forward(m);
        head_forward_backward(m, 0.0f, false);
        const std::vector<float> expected = one.golden.floats("logits");
        double worst = 0;
        for (long i = 0; i < m.N; i++) {
            for (int v = 0; v < m.config.vocab; v++) {
                worst = std::max(worst, std::abs(double(m.act.logits[i * m.V_l + v]) - expected[i * m.config.vocab + v]));
            }
        }
        CHECK(worst < 2e-6);
        CHECK(std::abs(losses_sum(m) / m.N - one.golden.loss()) < 2e-6);
        MESSAGE(name << ": worst logit off by " << worst << ", loss by " << losses_sum(m) / m.N - one.golden.loss());
    }
}

TEST_CASE("every gradient, whatever is recomputed, and however the tokens of the head are cut") {
    for (const std::string name : {"model_a", "model_b", "model_c"}) {
        for (Recompute recompute : {Recompute::none, Recompute::gelu, Recompute::block}) {
            for (int chunk : {1 << 20, 7}) {
                CAPTURE(name);
                CAPTURE(int(recompute));
                CAPTURE(chunk);
                OneRank one(name, recompute);
                Model& m = one.m;
                m.head_chunk = std::min(m.head_chunk, chunk);
                std::fill_n(m.grads, m.table.local_size, NAN);  // every gradient must be written, not added to
                for (const Param& p : m.table.list)
                    std::fill_n(m.grads + p.offset + p.local_size(), (16 - p.local_size() % 16) % 16, 0.0f);
                model_forward_backward(m, 1.0f / float(m.N), false, nullptr);
                gradients_compare(one.golden, m, m.grads, 5e-6);

                const std::vector<float> once(m.grads, m.grads + m.table.local_size);
                model_forward_backward(m, 1.0f / float(m.N), true, nullptr);
                double worst = 0;
                for (size_t i = 0; i < once.size(); i++) worst = std::max(worst, std::abs(double(m.grads[i]) - 2.0 * once[i]));
                CHECK(worst < 1e-5);
            }
        }
    }
}

TEST_CASE("ten steps of AdamW") {
    for (const std::string name : {"model_a", "model_b", "model_c"}) {
        CAPTURE(name);
        OneRank one(name, Recompute::none);
        Model& m = one.m;
        AdamW hyper = one.golden.adamw();
        for (hyper.step = 1; hyper.step <= 10; hyper.step++) {
            model_forward_backward(m, 1.0f / float(m.N), false, nullptr);
            model_update(m, hyper);
        }
        const double worst = params_compare(one.golden, "adam10.", m.table, m.params);
        CHECK(worst < 2e-5);
        MESSAGE(name << ": parameters after 10 steps off by at most " << worst);
    }
}

TEST_CASE("AdamW alone, fed the oracle's gradients, at eps 1e-8") {
    const Golden golden = golden_open("adamw");
    for (const std::string name : {"transformer.wpe.weight", "transformer.h.0.mlp.c_fc.bias", "transformer.h.0.ln_1.weight"}) {
        CAPTURE(name);
        std::vector<float> p = golden.floats("param." + name), m(p.size()), v(p.size());
        const std::vector<float> grads = golden.floats("grad." + name);
        AdamW hyper = golden.adamw();
        if (golden.shape("param." + name).size() == 1) hyper.weight_decay = 0;
        for (hyper.step = 1; hyper.step <= 10; hyper.step++) {
            op::adamw_update(p.data(), nullptr, grads.data() + (hyper.step - 1) * p.size(), m.data(), v.data(), p.size(), hyper, Stream{});
        }
        const std::vector<float> expected = golden.floats("adam10." + name);
        double worst = 0;
        for (size_t i = 0; i < p.size(); i++) worst = std::max(worst, std::abs(double(p[i]) - expected[i]));
        CHECK(worst < 2e-6);
    }
}
