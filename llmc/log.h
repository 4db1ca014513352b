// What a run tells: the progress lines on stdout, the JSON log (`--log run.jsonl`) and the table of boundaries at the end.
//
// The log has one object a line: first {"run": {...}}, then a line a step, lines with val_loss, samples. "step" counts
// finished steps, from 1; a validation before the first step has step 0. A resumed run goes on in the same file: what was
// logged after the checkpoint is dropped first, so each step is there once. Each line is flushed. A number that is not
// known (NaN) is null. All functions take a null or unopened log as "no log": ranks other than 0 pass that.
//
// Units: ms = milliseconds of one step, bytes = payload sent by this rank in one step, rates per second.
#pragma once
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "llmc/check.h"

// One boundary in one step or, for the table at the end, in the whole run.
struct BoundaryRecord {
    std::string name, codec;
    uint64_t calls = 0, raw_bytes = 0, wire_bytes = 0;  // raw: the same values as bf16
    double encode_ms = 0, wire_ms = 0, decode_ms = 0;
    double snr_db = NAN;     // NaN: not measured
    uint64_t nonfinite = 0;  // groups that held a NaN or an infinity
    long snr_steps = 0;      // in sums: the steps whose SNR is averaged in snr_db
};

struct StepRecord {
    long step = 0;
    double loss = NAN, norm = NAN, lr = 0, ms = 0, tokens_per_s = 0;
    double gflops = NAN;      // per second, all ranks
    double mfu = NAN;         // share of the peak: on CPUs of the measured sgemm rate
    double comm_share = NAN;  // of the step's time spent in encode, wire and decode
    uint64_t wire_bytes = 0, raw_bytes = 0;
    std::vector<BoundaryRecord> boundaries;  // those with calls are logged
};

struct RunLog {
    std::string path;
    std::unique_ptr<std::FILE, int (*)(std::FILE*)> file{nullptr, std::fclose};
};

// ---- units for people ----

inline std::string bytes_text(double bytes) {
    const char* const units[] = {"B", "kB", "MB", "GB", "TB"};
    int unit = 0;
    while (bytes >= 999.5 && unit < 4) bytes /= 1000, unit++;
    return format_text(unit == 0 || bytes >= 99.95 ? "%.0f %s" : bytes >= 9.995 ? "%.1f %s" : "%.2f %s", bytes, units[unit]);
}

// 124439808 -> "124.4M"
inline std::string count_text(double count) {
    const char* const units[] = {"", "k", "M", "G", "T"};
    int unit = 0;
    while (count >= 999.95 && unit < 4) count /= 1000, unit++;
    return format_text(unit == 0 ? "%.0f%s" : "%.1f%s", count, units[unit]);
}

inline std::string duration_text(double seconds) {
    if (seconds < 59.95) return format_text("%.1f s", seconds);
    const long whole = std::lround(seconds);
    if (whole < 3600) return format_text("%ld min %02ld s", whole / 60, whole % 60);
    return format_text("%ld h %02ld min", whole / 3600, whole / 60 % 60);
}

// The most memory this process has had, in MiB.
inline double peak_memory_mib() {
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
#ifdef __APPLE__
    return double(usage.ru_maxrss) / (1 << 20);  // bytes there, KiB elsewhere
#else
    return double(usage.ru_maxrss) / (1 << 10);
#endif
}

// ---- progress on stdout ----

// step   120/2000 | loss 2.3456 | norm 0.512 | lr 6.00e-04 | 812 ms | 2521 tok/s | 95.1 GFLOP/s, 71% of peak | comm 12% |
// wire 3.1 MB (1.88x)
inline std::string step_text(const StepRecord& r, long steps) {
    const int width = int(std::to_string(steps).size());
    std::string text =
        format_text("step %*ld/%ld | loss %.4f | norm %.3f | lr %.2e | ", width, r.step, steps, r.loss, r.norm, r.lr);
    text += format_text(r.ms < 99.95 ? "%.1f ms" : "%.0f ms", r.ms);
    text += format_text(" | %.0f tok/s", r.tokens_per_s);
    if (std::isfinite(r.gflops)) {
        text += r.gflops < 1e4 ? format_text(" | %.1f GFLOP/s", r.gflops) : format_text(" | %.1f TFLOP/s", 1e-3 * r.gflops);
    }
    if (std::isfinite(r.mfu)) text += format_text("%s %.0f%% of peak", std::isfinite(r.gflops) ? "," : " |", 100 * r.mfu);
    if (r.wire_bytes > 0) {
        if (std::isfinite(r.comm_share)) text += format_text(" | comm %.0f%%", 100 * r.comm_share);
        text += format_text(" | wire %s (%.2fx)", bytes_text(r.wire_bytes).c_str(), double(r.raw_bytes) / double(r.wire_bytes));
    }
    return text;
}

// Adds one step's records to a run's sums, by name. SNR becomes the mean, in dB, of the steps that measured it.
inline void boundary_records_add(std::vector<BoundaryRecord>& totals, const std::vector<BoundaryRecord>& step) {
    for (const BoundaryRecord& r : step) {
        auto total = std::find_if(totals.begin(), totals.end(), [&](const BoundaryRecord& t) { return t.name == r.name; });
        if (total == totals.end()) total = totals.insert(total, {r.name, r.codec});
        total->codec = r.codec;  // the latest: warm-up ends
        total->calls += r.calls, total->raw_bytes += r.raw_bytes, total->wire_bytes += r.wire_bytes;
        total->encode_ms += r.encode_ms, total->wire_ms += r.wire_ms, total->decode_ms += r.decode_ms;
        total->nonfinite += r.nonfinite;
        if (std::isnan(r.snr_db)) continue;
        total->snr_steps++;
        total->snr_db = total->snr_steps == 1 ? r.snr_db : total->snr_db + (r.snr_db - total->snr_db) / double(total->snr_steps);
    }
}

// The table at the end, from each boundary's sums over `steps` steps; empty if nothing was sent.
inline std::string boundary_table(const std::vector<BoundaryRecord>& totals, long steps) {
    const auto row = [&](const BoundaryRecord& r) {
        const auto per_step = [&](double ms) { return format_text("%.2f", ms / double(std::max(1L, steps))); };
        return std::vector<std::string>{r.name,
                                        r.codec,
                                        std::to_string(r.calls),
                                        format_text("%.2f", double(r.raw_bytes) / 1e6),
                                        format_text("%.2f", double(r.wire_bytes) / 1e6),
                                        r.wire_bytes ? format_text("%.3f", double(r.raw_bytes) / double(r.wire_bytes)) : "-",
                                        !std::isfinite(r.snr_db) ? "-" : format_text("%.1f", r.snr_db),
                                        per_step(r.encode_ms),
                                        per_step(r.wire_ms),
                                        per_step(r.decode_ms),
                                        std::to_string(r.nonfinite)};
    };
    std::vector<std::vector<std::string>> rows = {{"boundary", "codec", "calls", "raw MB", "wire MB", "ratio", "SNR dB",
                                                   "encode ms", "wire ms", "decode ms", "non-finite"}};
    BoundaryRecord total;
    total.name = "total";
    for (const BoundaryRecord& r : totals) {
        if (r.calls == 0) continue;
        rows.push_back(row(r));
        total.calls += r.calls, total.raw_bytes += r.raw_bytes, total.wire_bytes += r.wire_bytes, total.nonfinite += r.nonfinite;
        total.encode_ms += r.encode_ms, total.wire_ms += r.wire_ms, total.decode_ms += r.decode_ms;
    }
    if (total.calls == 0) return "";
    rows.push_back(row(total));
    if (total.nonfinite == 0) {  // a column for the exception only
        for (auto& cells : rows) cells.pop_back();
    }
    std::string text = "Tensor-parallel boundaries, one rank: bytes of the run, milliseconds a step; ratio against bf16\n";
    for (size_t i = 0; i < rows.size(); i++) {
        std::string line;
        for (size_t column = 0; column < rows[i].size(); column++) {
            size_t width = 0;
            for (const auto& cells : rows) width = std::max(width, cells[column].size());
            const std::string padding(width - rows[i][column].size(), ' ');
            line += column < 2 ? rows[i][column] + padding : padding + rows[i][column];  // names left, numbers right
            if (column + 1 < rows[i].size()) line += "  ";
        }
        text += line + "\n";
        if (i == 0 || i + 2 == rows.size()) text += std::string(line.size(), '-') + "\n";
    }
    return text;
}

// ---- the JSON log ----

inline void run_log_line(RunLog& log, const nlohmann::ordered_json& line) {
    if (!log.file) return;
    // Samples of a byte-level model need not be valid UTF-8.
    const std::string text = line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
    const bool good = std::fwrite(text.data(), 1, text.size(), log.file.get()) == text.size() && std::fflush(log.file.get()) == 0;
    check(good, "--log: writing '%s' failed: %s; free some space or log elsewhere", log.path.c_str(), std::strerror(errno));
}

namespace log_detail {

// The lines of an earlier run up to its step `resumed_step`, without a torn last line.
inline std::string log_head(const std::string& path, long resumed_step) {
    std::ifstream file(path, std::ios::binary);
    std::string kept, line;
    while (std::getline(file, line)) {
        const nlohmann::json json = nlohmann::json::parse(line, nullptr, false);
        if (!json.is_object()) continue;  // cut off by a crash
        const bool later = json.contains("step") && json["step"].is_number() && json["step"] > resumed_step;
        const bool again =
            json.contains("resumed_step") && json["resumed_step"].is_number() && json["resumed_step"] >= resumed_step;
        if (!later && !again) kept += line + "\n";
    }
    return kept;
}

}  // namespace log_detail

// Opens the log, a new one (resumed_step < 0) or, to go on after that many steps, the earlier run's with later lines
// dropped. Writes {"run": run} (and "resumed_step"). An empty path leaves the log closed.
inline RunLog run_log_open(const std::string& path, nlohmann::json run, long resumed_step = -1) {
    RunLog log;
    if (path.empty()) return log;
    log.path = path;
    nlohmann::ordered_json first = {{"run", std::move(run)}};
    const bool resumed = resumed_step >= 0 && std::filesystem::is_regular_file(path);
    if (resumed) {
        // Rewritten beside it and renamed, so that an interruption here loses nothing.
        const std::string head = log_detail::log_head(path, resumed_step), temporary = path + ".tmp";
        std::ofstream out(temporary, std::ios::binary);
        out << head;
        out.close();
        check(out.good(), "--log: writing '%s' failed: %s; free some space or log elsewhere", temporary.c_str(),
              std::strerror(errno));
        std::error_code error;
        std::filesystem::rename(temporary, path, error);
        check(!error, "--log: cannot replace '%s': %s", path.c_str(), error.message().c_str());
        first["resumed_step"] = resumed_step;
    }
    log.file.reset(std::fopen(path.c_str(), resumed ? "a" : "w"));
    check(log.file != nullptr,
          "--log: cannot open '%s' for writing: %s; choose a file in a directory that exists and is writable", path.c_str(),
          std::strerror(errno));
    run_log_line(log, first);
    return log;
}

// {"config": every option, "host", "compiler", "started", "ranks", "dp"}: the first line's content.
inline nlohmann::json run_record(const nlohmann::json& config, int ranks, int dp) {
    char host[256] = "", started[32] = "";
    gethostname(host, sizeof host - 1);
    const std::time_t now = std::time(nullptr);
    std::tm utc{};
    std::strftime(started, sizeof started, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &utc));
    return {{"config", config}, {"host", host}, {"compiler", __VERSION__}, {"started", started}, {"ranks", ranks}, {"dp", dp}};
}

inline void run_log_step(RunLog& log, const StepRecord& r) {
    if (!log.file) return;
    nlohmann::ordered_json line = {{"step", r.step},
                                   {"loss", r.loss},
                                   {"norm", r.norm},
                                   {"lr", r.lr},
                                   {"ms", r.ms},
                                   {"tokens_per_s", r.tokens_per_s},
                                   {"mfu", r.mfu},
                                   {"gflops", r.gflops},
                                   {"comm_share", r.comm_share},
                                   {"wire_bytes", r.wire_bytes},
                                   {"raw_bytes", r.raw_bytes},
                                   {"boundaries", nlohmann::ordered_json::object()}};
    for (const BoundaryRecord& b : r.boundaries) {
        if (b.calls == 0) continue;
        line["boundaries"][b.name] = {{"codec", b.codec},         {"calls", b.calls},         {"wire", b.wire_bytes},
                                      {"raw", b.raw_bytes},       {"encode_ms", b.encode_ms}, {"wire_ms", b.wire_ms},
                                      {"decode_ms", b.decode_ms}, {"snr_db", b.snr_db},       {"nonfinite", b.nonfinite}};
    }
    run_log_line(log, line);
}

inline void run_log_validation(RunLog& log, long step, double val_loss) {
    run_log_line(log, {{"step", step}, {"val_loss", val_loss}});
}

inline void run_log_sample(RunLog& log, long step, const std::string& prompt, const std::string& text) {
    run_log_line(log, {{"step", step}, {"prompt", prompt}, {"sample", text}});
}
