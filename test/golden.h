// Reads the golden models of test/golden and compares a model's tensors with them.
#pragma once
#include <doctest/doctest.h>

#include "llmc/ckpt/checkpoint.h"
#include "llmc/cpu/optimizer.h"

struct Golden {
    SafetensorsFile file;
    ModelConfig config;

    const TensorInfo& info(const std::string& name) const {
        for (const TensorInfo& tensor : file.tensors) {
            if (tensor.name == name) return tensor;
        }
        fail("golden file '%s' has no '%s'", file.file.path.c_str(), name.c_str());
    }
    std::vector<long> shape(const std::string& name) const { return info(name).shape; }
    template <class E>
    std::vector<E> values(const std::string& name) const {
        const TensorInfo& tensor = info(name);
        std::vector<E> out((tensor.end - tensor.begin) / sizeof(E));
        pread_all(file.file, out.data(), tensor.end - tensor.begin, file.data_begin + tensor.begin);
        return out;
    }
    std::vector<float> floats(const std::string& name) const { return values<float>(name); }
    std::vector<int> ints(const std::string& name) const { return values<int>(name); }
    double loss() const { return values<double>("loss")[0]; }
    AdamW adamw() const {
        const auto json = nlohmann::json::parse(file.metadata.at("adamw"));
        AdamW hyper{};
        hyper.lr = json["lr"];
        hyper.beta1 = json["beta1"];
        hyper.beta2 = json["beta2"];
        hyper.eps = json["eps"];
        hyper.weight_decay = json["weight_decay"];
        hyper.grad_scale = 1.0f;
        return hyper;
    }
};

inline Golden golden_open(const std::string& name) {
    const std::string path = std::string(PROJECT_ROOT) + "/test/golden/" + name + ".safetensors";
    Golden golden{safetensors_open(path), {}};
    if (golden.file.metadata.count("config")) {
        golden.config = model_config_from_json(nlohmann::json::parse(golden.file.metadata.at("config")), path);
    }
    return golden;
}

// This rank's piece of every tensor `prefix`NAME, into a flat buffer laid out by the table.
inline void golden_load(const Golden& golden, const std::string& prefix, const ParamTable& table, float* to) {
    for (const Param& p : table.list) {
        const TensorInfo& tensor = golden.info(prefix + p.name);
        param_read(p, table, to + p.offset,
                   [&](size_t first, float* data, size_t count) { safetensors_read(golden.file, tensor, first, count, data); });
    }
}

// Each gradient's relative L2 distance to the golden one is below `bound`. The key bias's gradient is zero in exact
// arithmetic, so it is held absolutely: below 1e-6 of the whole qkv bias's.
template <class Model>
void gradients_compare(const Golden& golden, const Model& m, const float* grads, double bound) {
    std::vector<float> expected(m.table.local_size);
    golden_load(golden, "grad.", m.table, expected.data());
    double worst = 0;
    for (const Param& p : m.table.list) {
        CAPTURE(p.name);
        const bool qkv_bias = p.name.ends_with("c_attn.bias");
        const size_t third = p.local_size() / 3;
        double error = 0, norm = 0, key = 0;
        for (size_t i = 0; i < p.local_size(); i++) {
            const double e = expected[p.offset + i], difference = double(grads[p.offset + i]) - e;
            norm += e * e;
            if (qkv_bias && i / third == 1) {
                key += double(grads[p.offset + i]) * grads[p.offset + i];
            } else {
                error += difference * difference;
            }
        }
        CHECK(std::sqrt(error) <= bound * std::sqrt(norm));
        if (qkv_bias) CHECK(std::sqrt(key) <= 1e-6 * std::sqrt(norm));
        if (norm > 0) worst = std::max(worst, std::sqrt(error / norm));
    }
    CHECK(worst > 0);  // something was compared
}

// The largest absolute difference to the golden tensors `prefix`NAME.
inline double params_compare(const Golden& golden, const std::string& prefix, const ParamTable& table, const float* params) {
    std::vector<float> expected(params, params + table.local_size);
    golden_load(golden, prefix, table, expected.data());
    double worst = 0;
    for (size_t i = 0; i < expected.size(); i++) worst = std::max(worst, std::abs(double(params[i]) - expected[i]));
    return worst;
}
