// Checkpoints: a Hugging Face model directory plus the trainer's state, in a layout that does not depend on tp or dp.
//
//   out/step_00001000/ config.json model.safetensors tokenizer.json optimizer.safetensors trainer_state.json
//   out/latest         text: step_00001000
//
// Every rank writes its own slices at their offsets. All goes to step_N.tmp, is fsynced, then renamed: a crash or a full
// disk leaves the last good checkpoint as it was. Each function here is collective; an error on one rank is thrown on all.
#pragma once
#include <filesystem>

#include "llmc/ckpt/param_io.h"
#include "llmc/ckpt/safetensors.h"
#include "llmc/comm/agree.h"
#include "llmc/comm/mesh.h"

// This rank's pieces of what a checkpoint holds, laid out by `table`.
struct TrainedTensors {
    const ModelConfig& config;
    const ParamTable& table;
    float* params;
    float *adam_m, *adam_v;  // null when only the weights are wanted
};

namespace checkpoint_detail {

namespace fs = std::filesystem;

inline void text_write(const std::string& path, const std::string& text) {
    const File file = file_create(path);
    pwrite_all(file, text.data(), text.size(), 0);
    file_sync(file);
}

// The tensors of one file: each parameter of the table under each prefix ("" or "m.", "v.").
inline SafetensorsHeader header_make(const ParamTable& table, const std::vector<std::string>& prefixes) {
    std::vector<TensorInfo> tensors;
    for (const std::string& prefix : prefixes) {
        for (const Param& p : table.list) tensors.push_back({prefix + p.name, "F32", param_file_shape(p)});
    }
    return safetensors_header(tensors);
}

// Replicas share the work: parameter i is written by dp rank i % dp and, if it is not cut, by tp rank i % tp.
inline bool writes(const Mesh& mesh, const Param& p, size_t i) {
    return int(i % mesh.dp.size) == mesh.dp.rank && (p.shard != Shard::none || int(i % mesh.tp.size) == mesh.tp.rank);
}

inline void slices_write(const std::string& path, const Mesh& mesh, const ParamTable& table, const SafetensorsHeader& header,
                         const std::vector<const float*>& tensors) {
    const File file = file_open_write(path);
    const size_t count = table.list.size();
    for (size_t t = 0; t < tensors.size(); t++) {
        for (size_t i = 0; i < count; i++) {
            const Param& p = table.list[i];
            if (!writes(mesh, p, i)) continue;
            const size_t begin = header.bytes.size() + header.tensors[t * count + i].begin;
            param_write(p, table, tensors[t] + p.offset, [&](size_t element, const float* data, size_t elements) {
                pwrite_all(file, data, elements * sizeof(float), begin + element * sizeof(float));
            });
        }
    }
    file_sync(file);
}

// The tensor of a parameter in a file, under its full name or without GPT2LMHeadModel's "transformer.".
inline const TensorPlace& tensor_find(const TensorFiles& files, const Param& p, const std::string& prefix) {
    auto place = files.tensors.find(prefix + p.name);
    const std::string bare = "transformer.";
    if (place == files.tensors.end() && p.name.rfind(bare, 0) == 0)
        place = files.tensors.find(prefix + p.name.substr(bare.size()));
    check(place != files.tensors.end(), "'%s' lacks the tensor '%s%s'", files.path.c_str(), prefix.c_str(), p.name.c_str());
    const std::vector<long> expected = param_file_shape(p), &found = place->second.info.shape;
    check(found == expected, "'%s': tensor '%s' has shape %s, the config asks for %s",
          files.files[place->second.file].file.path.c_str(), place->first.c_str(), shape_text(found).c_str(),
          shape_text(expected).c_str());
    return place->second;
}

inline void slices_read(const TensorFiles& files, const ParamTable& table, const std::string& prefix, float* tensors,
                        std::set<std::string>* seen) {
    for (const Param& p : table.list) {
        const TensorPlace& place = tensor_find(files, p, prefix);
        seen->insert(place.info.name);
        param_read(p, table, tensors + p.offset, [&](size_t element, float* data, size_t elements) {
            safetensors_read(files.files[place.file], place.info, element, elements, data);
        });
    }
}

// Tensors that nobody asked for are an error, but for what GPT-2 files carry along: causal masks and the tied head.
inline void extras_check(const TensorFiles& files, const std::set<std::string>& seen) {
    for (const auto& [name, place] : files.tensors) {
        const bool mask = name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias");
        check(seen.count(name) || mask || name == "lm_head.weight", "'%s' holds the tensor '%s', which the config does not have",
              files.path.c_str(), name.c_str());
    }
}

// Removes the oldest checkpoints of `out` but `keep`; keep 0 keeps all.
inline void checkpoints_prune(const fs::path& out, int keep) {
    std::vector<fs::path> found;
    for (const auto& entry : fs::directory_iterator(out)) {
        const std::string name = entry.path().filename().string();
        if (name.rfind("step_", 0) == 0 && name.find('.') == std::string::npos) found.push_back(entry.path());
    }
    std::sort(found.begin(), found.end());
    for (size_t i = 0; keep > 0 && i + keep < found.size(); i++) fs::remove_all(found[i]);
}

}  // namespace checkpoint_detail

// Writes out/step_N and points out/latest at it. `state` is trainer_state.json's content.
inline void checkpoint_save(const std::string& out, long step, Mesh& mesh, const TrainedTensors& tensors,
                            const nlohmann::json& state, const std::string& tokenizer_path, int keep) {
    namespace detail = checkpoint_detail;
    namespace fs = std::filesystem;
    const std::string name = format_text("step_%08ld", step), final = out + "/" + name, temporary = final + ".tmp";
    const ParamTable& table = tensors.table;
    const SafetensorsHeader model = detail::header_make(table, {""}), optimizer = detail::header_make(table, {"m.", "v."});
    const std::string model_path = temporary + "/model.safetensors", optimizer_path = temporary + "/optimizer.safetensors";
    try {
        together(mesh.world, [&] {
            if (mesh.world.rank != 0) return;
            fs::remove_all(temporary);
            fs::create_directories(temporary);
            for (auto& [path, header] : {std::pair(model_path, &model), {optimizer_path, &optimizer}}) {
                const File file = file_create(path);
                file_resize(file, header->file_bytes);
                pwrite_all(file, header->bytes.data(), header->bytes.size(), 0);
            }
            detail::text_write(temporary + "/config.json", model_config_to_json(tensors.config).dump(2) + "\n");
            detail::text_write(temporary + "/trainer_state.json", state.dump(2) + "\n");
            if (!tokenizer_path.empty()) detail::text_write(temporary + "/tokenizer.json", file_text(tokenizer_path));
        });
        together(mesh.world, [&] {
            detail::slices_write(model_path, mesh, table, model, {tensors.params});
            detail::slices_write(optimizer_path, mesh, table, optimizer, {tensors.adam_m, tensors.adam_v});
        });
        together(mesh.world, [&] {
            if (mesh.world.rank != 0) return;
            directory_sync(temporary);
            if (fs::exists(final)) fs::rename(final, final + ".old");
            fs::rename(temporary, final);
            directory_sync(out);
            detail::text_write(out + "/latest.tmp", name + "\n");
            fs::rename(out + "/latest.tmp", out + "/latest");
            directory_sync(out);
            fs::remove_all(final + ".old");
            detail::checkpoints_prune(out, keep);
        });
    } catch (const std::exception& e) {
        std::error_code ignored;
        if (mesh.world.rank == 0) fs::remove_all(temporary, ignored);
        throw AgreedError(format_text("step %ld could not be saved: %s. Earlier checkpoints in '%s' are as they were", step,
                                      e.what(), out.c_str()));
    }
}

// The checkpoint directory that `path` means: itself, or the one that its `latest` names.
inline std::string checkpoint_resolve(const std::string& path) {
    if (std::filesystem::exists(path + "/trainer_state.json")) return path;
    check(std::filesystem::exists(path + "/latest"),
          "nothing to resume in '%s': it has neither a trainer_state.json nor a file 'latest'", path.c_str());
    std::string name = file_text(path + "/latest");
    while (!name.empty() && isspace(static_cast<unsigned char>(name.back()))) name.pop_back();
    return path + "/" + name;
}

// Fills this rank's pieces from a model directory, ours or Hugging Face's, in float32, bfloat16 or float16.
inline void checkpoint_load(const std::string& directory, const TrainedTensors& tensors) {
    namespace detail = checkpoint_detail;
    std::set<std::string> seen;
    const TensorFiles files = tensor_files_open(directory);
    detail::slices_read(files, tensors.table, "", tensors.params, &seen);
    detail::extras_check(files, seen);
    if (!tensors.adam_m) return;
    std::set<std::string> seen_moments;
    const TensorFiles moments = tensor_files_open(directory + "/optimizer.safetensors");
    detail::slices_read(moments, tensors.table, "m.", tensors.adam_m, &seen_moments);
    detail::slices_read(moments, tensors.table, "v.", tensors.adam_v, &seen_moments);
    detail::extras_check(moments, seen_moments);
}
