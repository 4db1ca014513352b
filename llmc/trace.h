// A timeline of a run: what each rank computed, encoded, sent and decoded, and when. Written as a Chrome trace (JSON),
// which opens in Perfetto (ui.perfetto.dev) and chrome://tracing: one process a rank, one row a category.
//
//   Trace trace = trace_make(rank);                      // after a barrier, so that the ranks' zeros agree
//   const double begin = seconds_now();  ...work...
//   trace_add(&trace, "attn_out.fwd", "encode", begin, seconds_now());
//   trace_write(path, {trace_bytes(trace), ...});        // rank 0, with the bytes gathered from all ranks
//
// Times are seconds of the host's monotonic clock, counted from trace_make. Names and categories are string literals or
// otherwise outlive the trace: an event is 32 bytes and adding one allocates nothing but the vector's growth. A null trace
// turns trace_add into nothing. A trace holds at most `limit` events; those beyond are counted and reported, not kept.
#pragma once
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/check.h"

struct TraceEvent {
    const char* name;
    const char* category;  // "compute", "encode", "wire" or "decode"
    double begin_s, end_s;
};

struct Trace {
    int rank = 0;
    double origin_s = 0;
    size_t limit = size_t(1) << 21;  // 64 MiB of events
    size_t dropped = 0;
    std::vector<TraceEvent> events;
};

inline double seconds_now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

inline Trace trace_make(int rank) {
    Trace trace;
    trace.rank = rank;
    trace.origin_s = seconds_now();
    return trace;
}

inline void trace_add(Trace* trace, const char* name, const char* category, double begin_s, double end_s) {
    if (!trace) return;
    if (trace->events.size() >= trace->limit) {
        trace->dropped++;
        return;
    }
    trace->events.push_back({name, category, begin_s, end_s});
}

// A row of the timeline: the known categories from top to bottom, anything else below them.
inline int trace_row(std::string_view category) {
    constexpr std::string_view rows[] = {"compute", "encode", "wire", "decode"};
    for (int row = 0; row < 4; row++)
        if (rows[row] == category) return row;
    return 4;
}

inline std::string trace_escape(const char* text) {
    std::string out;
    for (; *text; text++) {
        if (*text == '"' || *text == '\\') out += '\\';
        if (static_cast<unsigned char>(*text) >= 0x20) out += *text;
    }
    return out;
}

// One rank's events as text: JSON objects joined by ",\n", so that ranks are merged by joining their texts the same way.
inline std::string trace_bytes(const Trace& trace) {
    std::string out =
        format_text(R"({"ph":"M","pid":%d,"name":"process_name","args":{"name":"rank %d"}})", trace.rank, trace.rank);
    out += format_text(
        ",\n"
        R"({"ph":"M","pid":%d,"name":"process_sort_index","args":{"sort_index":%d}})",
        trace.rank, trace.rank);
    constexpr const char* rows[] = {"compute", "encode", "wire", "decode", "other"};
    for (int row = 0; row < 5; row++)
        out += format_text(
            ",\n"
            R"({"ph":"M","pid":%d,"tid":%d,"name":"thread_name","args":{"name":"%s"}})",
            trace.rank, row, rows[row]);
    for (int row = 0; row < 5; row++)
        out += format_text(
            ",\n"
            R"({"ph":"M","pid":%d,"tid":%d,"name":"thread_sort_index","args":{"sort_index":%d}})",
            trace.rank, row, row);
    for (const TraceEvent& event : trace.events) {
        out += format_text(
            ",\n"
            R"({"ph":"X","pid":%d,"tid":%d,"ts":%.3f,"dur":%.3f,"name":"%s","cat":"%s"})",
            trace.rank, trace_row(event.category), (event.begin_s - trace.origin_s) * 1e6, (event.end_s - event.begin_s) * 1e6,
            trace_escape(event.name).c_str(), trace_escape(event.category).c_str());
    }
    if (trace.dropped > 0 && !trace.events.empty()) {
        const TraceEvent& last = trace.events.back();
        out += format_text(
            ",\n"
            R"({"ph":"i","s":"p","pid":%d,"tid":0,"ts":%.3f,"name":"trace full: %zu later events not kept"})",
            trace.rank, (last.end_s - trace.origin_s) * 1e6, trace.dropped);
    }
    return out;
}

inline void trace_write(const std::string& path, const std::vector<std::string>& ranks) {
    std::FILE* file = std::fopen(path.c_str(), "w");
    check(file, "--trace: cannot open %s for writing: %s; choose a file in a directory that exists and is writable", path.c_str(),
          std::strerror(errno));
    bool good = std::fputs("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n", file) >= 0;
    for (size_t rank = 0; rank < ranks.size(); rank++) {
        if (rank > 0) good = std::fputs(",\n", file) >= 0 && good;
        good = std::fwrite(ranks[rank].data(), 1, ranks[rank].size(), file) == ranks[rank].size() && good;
    }
    good = std::fputs("\n]}\n", file) >= 0 && good;
    const int write_errno = errno;  // fclose may change it
    const bool closed = std::fclose(file) == 0;
    check(good && closed, "--trace: writing %s failed: %s; the file is incomplete, free some space or choose another path",
          path.c_str(), std::strerror(good ? errno : write_errno));
}
