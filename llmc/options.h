// The command line. Every option is one row of one table (run_options), from which come the flags (CLI11), the keys of
// `--config run.json`, `--help`, `--print-config` and the record of the run in logs and checkpoints.
//
//   Command command = run_config_parse(argc, argv);        // file, then flags; every value checked; throws Error
//   if (command.action == Command::help) print run_config_help()
//   run_config_resolve(command.config, ranks, ranks_on_host);   // defaults that depend on other values
//   if (command.action == Command::print_config) print run_config_text(command.config)
//
// A key is the flag's name with - or _ ("micro-batch", "micro_batch"). A flag beats the file. null means the default.
#pragma once
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <variant>
#include <vector>

#include "llmc/check.h"

#pragma push_macro("check")  // CLI11 has a member of that name
#undef check
#include <CLI/CLI.hpp>
#pragma pop_macro("check")

#include "llmc/boundary_names.h"
#include "llmc/codec/codec.h"
#include "llmc/config.h"
#include "llmc/schedule.h"

struct RunConfig {
    // Model
    std::string model = "gpt2:d12", recompute = "none";
    // Data
    std::string train, val, tokenizer;
    bool check_data = false;
    // Parallel
    int tp = 1, pp = 1;
    bool sp = true;
    int threads = 0;  // 0: resolved
    std::string comm = "auto";
    float comm_timeout = 600;
    long check_replicas = 100;
    // Training
    int micro_batch = 4, seq = 1024;
    int global_batch = 0;  // 0: resolved
    long steps = 1000;
    long stop_step = 0;  // 0: resolved
    uint64_t seed = 1337;
    // Optimizer; below 0: resolved
    float lr = 6e-4f, min_lr = -1;
    long warmup = -1, lr_decay_steps = -1;
    std::string schedule = "cosine";
    float weight_decay = 0.1f, beta1 = 0.9f, beta2 = 0.95f, eps = 1e-8f, clip = 1;
    bool master_weights = true;
    // Compression
    std::string tp_codec = "none";
    std::map<std::string, std::string> codec;  // boundary -> spec, over tp_codec
    long codec_threshold = 0, codec_warmup = 0, snr_every = 50;
    // Validation and samples
    long val_every = 250, val_batches = 0, sample_every = 0;
    int sample_tokens = 256;
    std::string prompt = "\n";
    float temperature = 0.8f;
    int top_k = 50;
    // Output
    std::string out;
    long save_every = 500;
    int keep = 3;
    std::string resume;  // empty: a new run; "latest": resolved to --out; else a checkpoint or a directory of them
    std::string log, trace;
    long print_every = 1;
};

struct Command {
    enum Action { run, help, print_config } action = run;
    RunConfig config;
};

namespace options_detail {

struct Range {
    double low, high = INFINITY;
    bool low_open = false;  // above `low`, not at it; `high` is always open
};

struct Option {
    using Codecs = std::map<std::string, std::string>;
    template <class T>
    using Field = T RunConfig::*;
    const char *group, *name, *value;  // value: the placeholder in --help, or the allowed words as in "on|off"
    std::variant<Field<int>, Field<long>, Field<uint64_t>, Field<float>, Field<bool>, Field<std::string>, Field<Codecs>> field;
    const char* help;
    Range range = {0};  // of numbers
};

inline std::vector<Option> run_options() {
    using R = RunConfig;
    const Range count = {1}, above_0 = {0, INFINITY, true}, below_1 = {0, 1};
    const char *model = "Model", *data = "Data", *parallel = "Parallel", *training = "Training", *optimizer = "Optimizer",
               *compression = "Compression", *samples = "Validation and samples", *output = "Output";
    return {
        {model, "model", "MODEL", &R::model, "gpt2:dN[,key=value..], a config.json, or a model directory: loads its weights too"},
        {model, "recompute", "none|gelu|block", &R::recompute, "compute again in backward instead of keeping: less memory"},

        {data, "train", "GLOB", &R::train, "token files to train on, as in 'data/*train*.bin' (quoted)"},
        {data, "val", "GLOB", &R::val, "token files to validate on; none: no validation"},
        {data, "tokenizer", "PATH", &R::tokenizer, "tokenizer.json; default: the one beside the training files"},
        {data, "check-data", "on|off", &R::check_data, "read every token before step 0 and check its range"},

        {parallel, "tp", "N", &R::tp, "tensor-parallel size; data-parallel size is ranks / (tp pp)", count},
        {parallel, "pp", "N", &R::pp, "pipeline-parallel size; above 1 not yet", count},
        {parallel, "sp", "on|off", &R::sp, "sequence parallelism over the tp ranks"},
        {parallel, "threads", "N", &R::threads, "CPU threads a rank; 0: OMP_NUM_THREADS, else the host's cores / its ranks"},
        {parallel, "comm", "auto|nccl|mpi", &R::comm, "how tensors travel between GPUs; auto: nccl where each rank has its own"},
        {parallel, "comm-timeout", "SECONDS", &R::comm_timeout, "abort when a collective waits longer", above_0},
        {parallel, "check-replicas", "N", &R::check_replicas, "compare replicated parameters every N steps; 0: never"},

        {training, "micro-batch", "B", &R::micro_batch, "sequences a rank works on at a time", count},
        {training, "seq", "T", &R::seq, "tokens a sequence", count},
        {training, "global-batch", "SEQUENCES", &R::global_batch, "sequences a step, by accumulation; 0: micro-batch x dp"},
        {training, "steps", "N", &R::steps, "steps of the whole run"},
        {training, "stop-step", "N", &R::stop_step, "stop after this step, the schedule unchanged; 0: at --steps"},
        {training, "seed", "S", &R::seed, "of weights, sample order, rounding and samples"},

        {optimizer, "lr", "RATE", &R::lr, "largest learning rate"},
        {optimizer, "min-lr", "RATE", &R::min_lr, "last learning rate; default: 0.1 lr"},
        {optimizer, "warmup", "STEPS", &R::warmup, "steps of linear warm-up; default: 2% of lr-decay-steps"},
        {optimizer, "lr-decay-steps", "STEPS", &R::lr_decay_steps, "step at which min-lr is reached; default: steps"},
        {optimizer, "schedule", schedule_names, &R::schedule, "of the learning rate; wsd: decay over the last fifth"},
        {optimizer, "weight-decay", "X", &R::weight_decay, "AdamW's, on matrices only"},
        {optimizer, "beta1", "X", &R::beta1, "AdamW's", below_1},
        {optimizer, "beta2", "X", &R::beta2, "AdamW's", below_1},
        {optimizer, "eps", "X", &R::eps, "AdamW's", above_0},
        {optimizer, "master-weights", "on|off", &R::master_weights, "float32 weights beside 16-bit ones; off: rounded stochastically"},
        {optimizer, "clip", "NORM", &R::clip, "largest global gradient norm; 0: no clipping"},

        {compression, "tp-codec", "SPEC", &R::tp_codec, "codec of all tensor-parallel boundaries"},
        {compression, "codec", "BOUNDARY=SPEC", &R::codec, "codec of one boundary; repeatable"},
        {compression, "codec-threshold", "BYTES", &R::codec_threshold, "a rank's float32 payload below this goes uncompressed"},
        {compression, "codec-warmup", "STEPS", &R::codec_warmup, "steps without compression at the start"},
        {compression, "snr-every", "N", &R::snr_every, "measure the boundaries' SNR every N steps; 0: never"},

        {samples, "val-every", "N", &R::val_every, "validate every N steps and at the end; 0: never"},
        {samples, "val-batches", "N", &R::val_batches, "batches a validation; 0: the whole set"},
        {samples, "sample-every", "N", &R::sample_every, "print a sample every N steps and at the end; 0: never"},
        {samples, "sample-tokens", "N", &R::sample_tokens, "tokens a sample", count},
        {samples, "prompt", "TEXT", &R::prompt, "the sample's beginning"},
        {samples, "temperature", "X", &R::temperature, "below 1: likelier tokens more often; 0: always the likeliest"},
        {samples, "top-k", "K", &R::top_k, "sample among the K likeliest tokens; 0: all"},

        {output, "out", "DIR", &R::out, "checkpoints go to DIR/step_N; none: nothing is saved"},
        {output, "save-every", "N", &R::save_every, "checkpoint every N steps and at the end; 0: at the end only"},
        {output, "keep", "N", &R::keep, "checkpoints to keep; 0: all"},
        {output, "resume", "[DIR]", &R::resume,
         "go on from DIR, or without DIR from --out's latest checkpoint; the model is the checkpoint's"},
        {output, "log", "FILE", &R::log, "JSON log, one object a line"},
        {output, "trace", "FILE", &R::trace, "timeline of all ranks, opens in Perfetto"},
        {output, "print-every", "N", &R::print_every, "print a line every N steps, the first and the last", count},
    };
}

template <class T>
inline constexpr const char* type_text = "a whole number";
template <>
inline constexpr const char* type_text<float> = "a number";
template <>
inline constexpr const char* type_text<bool> = "true or false";
template <>
inline constexpr const char* type_text<std::string> = "a string";
template <>
inline constexpr const char* type_text<Option::Codecs> = "an object of \"BOUNDARY\": \"SPEC\" pairs";

inline std::string key_of(const Option& option) {
    std::string key = option.name;
    std::replace(key.begin(), key.end(), '-', '_');
    return key;
}

// The shortest decimal that reads back as this float, as a double: 0.0006, not 0.0006000000284984708.
inline double float_decimal(float x) {
    char text[32];
    const auto end = std::to_chars(text, text + sizeof text, x).ptr;
    double value = 0;
    std::from_chars(text, end, value);
    return value;
}

inline std::string range_text(const Range& range) {
    std::string text = format_text("%s %g", range.low_open ? "above" : "at least", range.low);
    if (std::isfinite(range.high)) text += format_text(" and below %g", range.high);
    return text;
}

template <class T>
T number_parse(const Option& option, const std::string& text, const std::string& where) {
    const bool negative = text.starts_with('-');
    const char* const end = text.data() + text.size();
    // The sign of an unsigned number is skipped, so that -1 is "out of range" and not "no number".
    const char* const begin = text.data() + (negative && std::is_unsigned_v<T>);
    std::conditional_t<std::is_same_v<T, float>, double, T> value{};
    const auto [stop, error] = std::from_chars(begin, end, value);
    const bool fits = error == std::errc() && double(value) <= double(std::numeric_limits<T>::max());
    check(error != std::errc::invalid_argument && stop == end && !std::isnan(double(value)), "%s: expected %s, found '%s'",
          where.c_str(), type_text<T>, text.c_str());
    check(fits || negative, "%s: %s does not fit; the largest is %g", where.c_str(), text.c_str(),
          double(std::numeric_limits<T>::max()));
    const Range& range = option.range;
    const double x = negative && std::is_unsigned_v<T> ? -1 : double(value);
    check(fits && (range.low_open ? x > range.low : x >= range.low) && x < range.high, "%s: %s is out of range; it must be %s",
          where.c_str(), text.c_str(), range_text(range).c_str());
    return T(value);
}

// Whether `word` is one of "a|b|c".
inline bool word_in(const std::string& word, const std::string& words) {
    return !word.empty() && word.find('|') == std::string::npos &&
           ("|" + words + "|").find("|" + word + "|") != std::string::npos;
}

inline void codec_check(const std::string& spec, const std::string& where) {
    try {
        codec_parse(spec);
    } catch (const Error& e) {
        fail("%s: %s", where.c_str(), e.what());
    }
}

inline void codec_set(Option::Codecs& codecs, const std::string& text, const std::string& where) {
    const size_t equals = text.find('=');
    check(equals != std::string::npos && equals > 0, "%s: expected BOUNDARY=SPEC, as in attn_in.bwd=bf16, found '%s'",
          where.c_str(), text.c_str());
    const std::string boundary = text.substr(0, equals), spec = text.substr(equals + 1);
    check(boundary_find(boundary) != boundary_count, "%s: there is no boundary '%s'; allowed: %s", where.c_str(),
          boundary.c_str(), boundaries_text().c_str());
    codec_check(spec, where);
    codecs[boundary] = spec;
}

// Sets one option from text. `where` names the flag, or the file and key, in errors.
inline void option_set(RunConfig& config, const Option& option, const std::string& text, const std::string& where) {
    std::visit(
        [&](auto field) {
            auto& value = config.*field;
            using T = std::remove_reference_t<decltype(value)>;
            if constexpr (std::is_same_v<T, bool>) {
                check(text == "on" || text == "off", "%s: expected on or off, found '%s'", where.c_str(), text.c_str());
                value = text == "on";
            } else if constexpr (std::is_same_v<T, std::string>) {
                const bool words = std::string(option.value).find('|') != std::string::npos;
                check(!words || word_in(text, option.value), "%s: '%s' is not known; allowed: %s", where.c_str(), text.c_str(),
                      option.value);
                if (option.field == decltype(option.field)(&RunConfig::tp_codec)) codec_check(text, where);
                value = text;
            } else if constexpr (std::is_same_v<T, Option::Codecs>) {
                codec_set(value, text, where);
            } else {
                value = number_parse<T>(option, text, where);
            }
        },
        option.field);
}

// Sets one option from a JSON value of the right type.
inline void option_set_json(RunConfig& config, const Option& option, const nlohmann::json& json, const std::string& where) {
    if (json.is_null()) return;
    std::visit(
        [&](auto field) {
            using T = std::remove_reference_t<decltype(config.*field)>;
            const auto expect = [&](bool right) {
                check(right, "%s: expected %s, found %s", where.c_str(), type_text<T>, json.dump().c_str());
            };
            if constexpr (std::is_same_v<T, Option::Codecs>) {
                expect(json.is_object());
                for (const auto& [boundary, spec] : json.items()) {
                    expect(spec.is_string());
                    const std::string text = spec;
                    option_set(config, option, boundary + "=" + text, where);
                }
            } else if constexpr (std::is_same_v<T, bool>) {
                expect(json.is_boolean());
                config.*field = bool(json);
            } else if constexpr (std::is_same_v<T, std::string>) {
                expect(json.is_string());
                option_set(config, option, std::string(json), where);
            } else {
                expect(json.is_number());
                option_set(config, option, json.dump(), where);
            }
        },
        option.field);
}

inline size_t edit_distance(const std::string& a, const std::string& b) {
    std::vector<size_t> row(b.size() + 1);
    for (size_t j = 0; j <= b.size(); j++) row[j] = j;
    for (size_t i = 1; i <= a.size(); i++) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= b.size(); j++) {
            const size_t substituted = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            row[j] = std::min({substituted, row[j] + 1, row[j - 1] + 1});
        }
    }
    return row[b.size()];
}

// "; did you mean X?" or nothing: the known name nearest to a misspelt one.
inline std::string nearest_text(const std::string& name, const std::vector<std::string>& known, const std::string& prefix) {
    const auto nearest = std::min_element(known.begin(), known.end(), [&](const std::string& a, const std::string& b) {
        return edit_distance(name, a) < edit_distance(name, b);
    });
    if (edit_distance(name, *nearest) > std::max<size_t>(2, name.size() / 2)) return "; see --help";
    return "; did you mean " + prefix + *nearest + "?";
}

inline void config_file_apply(RunConfig& config, const std::vector<Option>& options, const std::string& path) {
    const nlohmann::json json = json_read(path);
    check(json.is_object(), "'%s': expected a JSON object of options, as --print-config writes it", path.c_str());
    std::map<std::string, const Option*> by_key;
    std::vector<std::string> keys;
    for (const Option& option : options) {
        by_key[key_of(option)] = &option;
        keys.push_back(key_of(option));
    }
    std::map<std::string, std::string> seen;
    for (const auto& [name, value] : json.items()) {
        std::string key = name;
        std::replace(key.begin(), key.end(), '-', '_');
        check(by_key.count(key), "'%s': unknown key \"%s\"%s", path.c_str(), name.c_str(), nearest_text(key, keys, "").c_str());
        check(seen.emplace(key, name).second, "'%s': \"%s\" and \"%s\" are the same option; give it once", path.c_str(),
              seen[key].c_str(), name.c_str());
        option_set_json(config, *by_key[key], value, "'" + path + "': \"" + name + "\"");
    }
}

// What each row of the table got on the command line.
struct Flags {
    std::map<std::string, std::vector<std::string>> values;
    std::string config_file;
    bool help = false, print_config = false;
};

template <class Json>
Json json_make(const RunConfig& config) {
    Json json;
    for (const Option& option : run_options()) {
        Json& value = json[key_of(option)];
        std::visit(
            [&](auto field) {
                const auto& x = config.*field;
                using T = std::remove_cvref_t<decltype(x)>;
                if constexpr (std::is_same_v<T, Option::Codecs>) {
                    value = Json::object();
                    for (const auto& [boundary, spec] : x) value[boundary] = spec;
                } else if constexpr (std::is_same_v<T, float>) {
                    if (x >= 0) value = float_decimal(x);  // below 0: not resolved yet, null
                } else if constexpr (std::is_same_v<T, long>) {
                    if (x >= 0) value = x;
                } else {
                    value = x;
                }
            },
            option.field);
    }
    return json;
}

inline std::string footer_text() {
    std::string text = "\nModels: gpt2:dN, N layers (channels/heads):";
    for (const GptWidth& width : gpt2_widths) text += format_text(" d%d %d/%d", width.layers, width.channels, width.heads);
    text += "\n        with overrides, as in gpt2:d6,c=384,heads=6,ffn=1536,ctx=1024,vocab=256\n";
    text += "Codecs: none  bf16  fp8  int8  taco  hadint8  hadint7  hadint6  hadint5  hadint4\n";
    text += "        with options: :g=32|64|128|256|512  :fmt=e4m3|e5m2  :target=X  :sr   as in taco:g=256:fmt=e5m2\n";
    text += "Boundaries: " + boundaries_text() + "\n\n";
    text += "Example: mpirun -np 2 ./train_gpt --train 'data/*train*.bin' --val 'data/*val*.bin' --tp 2 --tp-codec taco\n";
    return text;
}

inline std::string help_default(const Option& option, const nlohmann::json& defaults) {
    const nlohmann::json value = defaults.at(key_of(option));
    if (value.is_null() || value.empty() || value == "" || std::string(option.help).find("default:") != std::string::npos)
        return "";
    if (value.is_boolean()) return value == true ? " (on)" : " (off)";
    if (value.is_number() && value == 0 && std::string(option.help).find("0:") != std::string::npos) return " (0)";
    return " (" + (value.is_string() && value != "\n" ? std::string(value) : value.dump()) + ")";
}

// The one CLI11 application, for parsing and for --help.
inline void app_fill(CLI::App& app, const std::vector<Option>& options, Flags& flags) {
    const nlohmann::json defaults = json_make<nlohmann::json>(RunConfig());
    app.set_help_flag();
    app.allow_extras();  // so that the error can name the nearest flag
    for (const Option& option : options) {
        std::vector<std::string>& values = flags.values[option.name];
        CLI::Option* flag = app.add_option("--" + std::string(option.name), values, option.help + help_default(option, defaults));
        const bool bare = std::holds_alternative<bool RunConfig::*>(option.field) || option.value[0] == '[';
        const bool repeatable = std::holds_alternative<Option::Field<Option::Codecs>>(option.field);
        flag->group(option.group)->type_name(option.value)->allow_extra_args(false);
        flag->multi_option_policy(repeatable ? CLI::MultiOptionPolicy::TakeAll : CLI::MultiOptionPolicy::TakeLast);
        flag->expected(bare ? 0 : 1, 1);
    }
    app.add_option("--config", flags.config_file, "JSON file with the same keys; a flag beats the file")
        ->type_name("FILE")
        ->group("Other");
    app.add_flag("--print-config", flags.print_config, "print the resulting options, as --config reads them, and exit")
        ->group("Other");
    app.add_flag("--help,-h", flags.help, "print this and exit")->group("Other");
    app.get_formatter()->column_width(40);
    app.footer(footer_text());
}

}  // namespace options_detail

inline std::string run_config_help() {
    CLI::App app("Trains a GPT-2 on token files, on one process or under mpirun.", "train_gpt");
    options_detail::Flags flags;
    options_detail::app_fill(app, options_detail::run_options(), flags);
    return app.help();
}

// All options by key (with _), as --config reads them. What is not resolved yet is null.
inline nlohmann::json run_config_json(const RunConfig& config) { return options_detail::json_make<nlohmann::json>(config); }

// The same as text, in the order of --help.
inline std::string run_config_text(const RunConfig& config) {
    return options_detail::json_make<nlohmann::ordered_json>(config).dump(2) + "\n";
}

// Options from the command line and the file that --config names.
inline Command run_config_parse(int argc, const char* const* argv) {
    using namespace options_detail;
    const std::vector<Option> options = run_options();
    CLI::App app;
    Flags flags;
    app_fill(app, options, flags);
    try {
        app.parse(argc, argv);
    } catch (const CLI::ParseError& e) {
        fail("%s; see --help", e.what());
    }
    Command command;
    if (flags.help) {
        command.action = Command::help;
        return command;
    }
    std::vector<std::string> names = {"config", "print-config", "help"};
    for (const Option& option : options) names.push_back(option.name);
    for (const std::string& extra : app.remaining()) {
        const std::string flag = extra.substr(0, extra.find('='));
        if (flag.rfind("--", 0) == 0 && flag.size() > 2)
            fail("unknown flag %s%s", flag.c_str(), nearest_text(flag.substr(2), names, "--").c_str());
        fail("'%s' belongs to no flag; quote values with spaces, and file patterns, as in --train 'data/*train*.bin'",
             extra.c_str());
    }
    if (!flags.config_file.empty()) config_file_apply(command.config, options, flags.config_file);
    for (const Option& option : options) {
        const CLI::Option* flag = app.get_option("--" + std::string(option.name));
        if (flag->count() == 0) continue;
        const std::vector<std::string>& given = flags.values[option.name];
        for (const std::string& text : given) {
            // Without its value, `--resume` is --out's latest checkpoint and `--check-data` is on.
            const char* bare = option.value[0] == '[' ? "latest" : "on";
            const bool is_bare = text.empty() && flag->get_expected_min() == 0;
            const std::string where = "--" + std::string(option.name);
            check(!text.starts_with("--") || std::find(names.begin(), names.end(), text.substr(2)) == names.end(),
                  "%s: its value is missing; the flag %s follows", where.c_str(), text.c_str());
            option_set(command.config, option, is_bare ? bare : text, where);
        }
    }
    if (flags.print_config) command.action = Command::print_config;
    check(flags.print_config || !command.config.train.empty(),
          "--train is missing: the token files to train on, as in --train 'data/*train*.bin'; data/prepare.py makes them from "
          "text");
    return command;
}

// Fills in what depends on other options or on the number of ranks, and checks options against each other.
inline void run_config_resolve(RunConfig& c, int ranks, int ranks_on_host) {
    const int dp = int(std::max(1L, ranks / (long(c.tp) * c.pp)));
    const long micro = long(c.micro_batch) * dp;  // sequences all ranks work on at a time
    if (c.lr_decay_steps < 0) c.lr_decay_steps = c.steps;
    if (c.warmup < 0) c.warmup = c.lr_decay_steps / 50;
    if (c.min_lr < 0) c.min_lr = float(options_detail::float_decimal(c.lr) * 0.1);
    if (c.stop_step == 0) c.stop_step = c.steps;
    check(micro <= std::numeric_limits<int>::max(), "--micro-batch %d is too large", c.micro_batch);
    if (c.global_batch == 0) c.global_batch = int(micro);
    if (c.threads == 0) {
        const char* omp = std::getenv("OMP_NUM_THREADS");
        c.threads = omp ? std::atoi(omp) : 0;
        if (c.threads < 1) c.threads = std::max(1, int(std::thread::hardware_concurrency()) / std::max(1, ranks_on_host));
    }
    check(c.resume != "latest" || !c.out.empty(), "--resume without a directory needs --out, whose latest checkpoint it takes");
    if (c.resume == "latest") c.resume = c.out;

    check(c.min_lr <= c.lr, "--min-lr %g is above --lr %g", double(c.min_lr), double(c.lr));
    check(c.schedule == "constant" || c.warmup <= c.lr_decay_steps, "--warmup %ld is longer than --lr-decay-steps %ld", c.warmup,
          c.lr_decay_steps);
    check(c.stop_step <= c.steps, "--stop-step %ld is beyond --steps %ld", c.stop_step, c.steps);
    check(c.global_batch % micro == 0,
          "--global-batch %d is not a multiple of --micro-batch %d x %d data-parallel ranks; the nearest that is: %ld",
          c.global_batch, c.micro_batch, dp, std::max(1L, (c.global_batch + micro / 2) / micro) * micro);
}
