// What a model is: the sizes of a GPT-2, from `gpt2:d12[,key=value..]` or from Hugging Face's config.json.
#pragma once
#include <array>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "llmc/check.h"

struct ModelConfig {
    int layers = 0, channels = 0, heads = 0;
    int ffn = 0;        // width of the MLP
    int positions = 0;  // rows of the position table: the longest sequence; 0 = taken from --seq
    int vocab = 0;      // unpadded; 0 = taken from the data
    float eps = 1e-5f;  // of the layer norms
    float init_std = 0.02f;
    bool tied = true;  // the classifier shares the embedding's weight
};

// llm.c's widths for a depth.
struct GptWidth {
    int layers, channels, heads;
};
inline constexpr std::array<GptWidth, 8> gpt2_widths = {
    {{6, 384, 6}, {12, 768, 12}, {24, 1024, 16}, {36, 1280, 20}, {48, 1600, 25}, {60, 1920, 30}, {72, 2880, 30}, {84, 3456, 36}}};

inline void model_config_check(const ModelConfig& c, const std::string& from) {
    check(c.layers > 0 && c.channels > 0 && c.heads > 0 && c.ffn > 0 && c.positions >= 0 && c.vocab >= 0,
          "model '%s': layers %d, channels %d, heads %d, ffn %d, positions %d and vocab %d must all be positive", from.c_str(),
          c.layers, c.channels, c.heads, c.ffn, c.positions, c.vocab);
    check(c.channels % c.heads == 0, "model '%s': %d channels do not divide by %d heads", from.c_str(), c.channels, c.heads);
    check(c.eps > 0, "model '%s': the layer norm's epsilon is %g, it must be positive", from.c_str(), double(c.eps));
}

// "gpt2:d12", "gpt2:d6,c=384,heads=6,ffn=1536,ctx=1024,vocab=256"
inline ModelConfig model_config_from_spec(const std::string& spec) {
    const char* usage = "expected gpt2:dN[,c=CHANNELS][,heads=N][,ffn=N][,ctx=POSITIONS][,vocab=N], as in gpt2:d12";
    ModelConfig c;
    check(spec.rfind("gpt2:d", 0) == 0, "model '%s': neither a directory, nor a config.json, nor a known family; %s",
          spec.c_str(), usage);
    for (size_t at = 5; at < spec.size();) {
        const size_t comma = std::min(spec.find(',', at), spec.size());
        const std::string item = spec.substr(at, comma - at);
        at = comma + 1;
        const size_t equals = item.find('=');
        const std::string key = equals == std::string::npos ? item.substr(0, 1) : item.substr(0, equals);
        const std::string text = item.substr(equals == std::string::npos ? key.size() : equals + 1);
        size_t parsed = 0;
        int value = 0;
        try {
            value = std::stoi(text, &parsed);
        } catch (const std::exception&) {
        }
        check(parsed == text.size() && value > 0, "model '%s': '%s' is not a positive number; %s", spec.c_str(), item.c_str(),
              usage);
        if (key == "d" && equals == std::string::npos) {
            c.layers = value;
            for (const GptWidth& width : gpt2_widths) {
                if (width.layers == value) c.channels = width.channels, c.heads = width.heads;
            }
        } else if (key == "c") {
            c.channels = value;
        } else if (key == "heads") {
            c.heads = value;
        } else if (key == "ffn") {
            c.ffn = value;
        } else if (key == "ctx") {
            c.positions = value;
        } else if (key == "vocab") {
            c.vocab = value;
        } else {
            fail("model '%s': unknown key '%s'; %s", spec.c_str(), key.c_str(), usage);
        }
    }
    check(c.channels && c.heads, "model '%s': no standard width for %d layers; add c=CHANNELS,heads=N", spec.c_str(), c.layers);
    if (!c.ffn) c.ffn = 4 * c.channels;
    model_config_check(c, spec);
    return c;
}

inline nlohmann::json json_read(const std::string& path) {
    std::ifstream file(path);
    check(file.good(), "cannot open '%s': does it exist, and may it be read?", path.c_str());
    try {
        return nlohmann::json::parse(file);
    } catch (const nlohmann::json::exception& e) {
        fail("'%s' is not valid JSON: %s", path.c_str(), e.what());
    }
}

// Hugging Face's keys. Dropout is not read: this trainer has none. What would change the arithmetic is refused.
inline ModelConfig model_config_from_json(const nlohmann::json& json, const std::string& path) {
    try {
        const std::string type = json.value("model_type", "");
        check(type == "gpt2", "'%s': model_type is '%s', this version trains gpt2", path.c_str(), type.c_str());
        const std::string activation = json.value("activation_function", "gelu_new");
        check(activation == "gelu_new" || activation == "gelu_pytorch_tanh",
              "'%s': activation_function '%s' is not supported, only gelu_new (the tanh form)", path.c_str(), activation.c_str());
        check(json.value("scale_attn_weights", true) && !json.value("scale_attn_by_inverse_layer_idx", false),
              "'%s': attention scores must be scaled by 1/sqrt(head size) only", path.c_str());
        ModelConfig c;
        c.layers = json.at("n_layer");
        c.channels = json.at("n_embd");
        c.heads = json.at("n_head");
        c.ffn = json.contains("n_inner") && !json["n_inner"].is_null() ? json["n_inner"].get<int>() : 4 * c.channels;
        c.positions = json.at("n_positions");
        c.vocab = json.at("vocab_size");
        c.eps = json.value("layer_norm_epsilon", 1e-5f);
        c.init_std = json.value("initializer_range", 0.02f);
        c.tied = json.value("tie_word_embeddings", true);
        model_config_check(c, path);
        return c;
    } catch (const nlohmann::json::exception& e) {
        fail("'%s' is not a GPT-2 config: %s", path.c_str(), e.what());
    }
}

inline nlohmann::json model_config_to_json(const ModelConfig& c) {
    return {{"architectures", {"GPT2LMHeadModel"}},
            {"model_type", "gpt2"},
            {"activation_function", "gelu_new"},
            {"n_layer", c.layers},
            {"n_embd", c.channels},
            {"n_head", c.heads},
            {"n_inner", c.ffn},
            {"n_positions", c.positions},
            {"n_ctx", c.positions},
            {"vocab_size", c.vocab},
            {"layer_norm_epsilon", c.eps},
            {"initializer_range", c.init_std},
            {"tie_word_embeddings", c.tied},
            {"resid_pdrop", 0.0},
            {"embd_pdrop", 0.0},
            {"attn_pdrop", 0.0},
            {"torch_dtype", "float32"}};
}
