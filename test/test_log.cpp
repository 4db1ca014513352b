// Progress lines, the JSON log and its resumption, the table of boundaries, the timeline.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <sstream>

#include "llmc/log.h"
#include "llmc/trace.h"

using Json = nlohmann::json;

struct TemporaryFile {
    std::string path;
    explicit TemporaryFile(const char* name) : path(std::filesystem::temp_directory_path() / (name + std::to_string(getpid()))) {
        std::filesystem::remove(path);
    }
    ~TemporaryFile() { std::filesystem::remove(path); }
};

static std::string file_read(const std::string& path) {
    std::ostringstream text;
    text << std::ifstream(path, std::ios::binary).rdbuf();
    return text.str();
}

static std::vector<Json> lines_read(const std::string& path) {
    std::ifstream file(path);
    std::vector<Json> lines;
    for (std::string line; std::getline(file, line);) lines.push_back(Json::parse(line));
    return lines;
}

static StepRecord step_record(long step, double loss) {
    StepRecord r;
    r.step = step, r.loss = loss, r.norm = 0.5, r.lr = 6e-4, r.ms = 812.4, r.tokens_per_s = 2521.3;
    r.gflops = 95.14, r.mfu = 0.714, r.comm_share = 0.12, r.wire_bytes = 3100000, r.raw_bytes = 5828000;
    r.boundaries = {{"attn_out.fwd", "taco", 12, 5828000, 3100000, 1.5, 2.5, 3.5, 31.8, 0}, {"embed.fwd", "none"}};
    return r;
}

TEST_CASE("numbers for people") {
    CHECK(bytes_text(0) == "0 B");
    CHECK(bytes_text(999) == "999 B");
    CHECK(bytes_text(1000) == "1.00 kB");
    CHECK(bytes_text(9996) == "10.0 kB");
    CHECK(bytes_text(99960) == "100 kB");
    CHECK(bytes_text(999600) == "1.00 MB");
    CHECK(bytes_text(2.3e9) == "2.30 GB");
    CHECK(bytes_text(5e15) == "5000 TB");
    CHECK(count_text(124439808) == "124.4M");
    CHECK(count_text(17) == "17");
    CHECK(count_text(999960) == "1.0M");
    CHECK(duration_text(3.21) == "3.2 s");
    CHECK(duration_text(59.96) == "1 min 00 s");
    CHECK(duration_text(185) == "3 min 05 s");
    CHECK(duration_text(3600 * 25 + 120) == "25 h 02 min");
}

TEST_CASE("the progress line") {
    StepRecord r = step_record(120, 2.34567);
    CHECK(
        step_text(r, 2000) ==
        "step  120/2000 | loss 2.3457 | norm 0.500 | lr 6.00e-04 | 812 ms | 2521 tok/s | 95.1 GFLOP/s, 71% of peak | comm 12% | "
        "wire 3.10 MB (1.88x)");
    r.wire_bytes = 0, r.gflops = NAN, r.mfu = NAN, r.ms = 12.345;  // one rank, no sgemm measured
    CHECK(step_text(r, 2000) == "step  120/2000 | loss 2.3457 | norm 0.500 | lr 6.00e-04 | 12.3 ms | 2521 tok/s");
}

TEST_CASE("the log: first line, steps, validation, samples") {
    const TemporaryFile file("llmc_log_");
    {
        RunLog log = run_log_open(file.path, run_record({{"seed", 1337}}, 4, 2));
        run_log_step(log, step_record(1, 2.5));
        CHECK(lines_read(file.path).size() == 2);  // flushed, before the log is closed
        run_log_step(log, step_record(2, NAN));
        run_log_validation(log, 2, 3.25);
        run_log_sample(log, 2, "To be", "or\nnot\xff");
    }
    const std::vector<Json> lines = lines_read(file.path);
    REQUIRE(lines.size() == 5);
    CHECK(lines[0]["run"]["config"]["seed"] == 1337);
    CHECK(lines[0]["run"]["ranks"] == 4);
    CHECK(lines[0]["run"]["dp"] == 2);
    CHECK(lines[0]["run"]["host"].is_string());
    const Json& step = lines[1];
    CHECK(step["step"] == 1);
    CHECK(step["loss"] == 2.5);
    CHECK(step["norm"] == 0.5);
    CHECK(step["lr"] == 6e-4);
    CHECK(step["ms"] == 812.4);
    CHECK(step["tokens_per_s"] == 2521.3);
    CHECK(step["mfu"] == 0.714);
    CHECK(step["comm_share"] == 0.12);
    CHECK(step["wire_bytes"] == 3100000);
    CHECK(step["raw_bytes"] == 5828000);
    REQUIRE(step["boundaries"].size() == 1);  // embed.fwd was not called
    const Json& boundary = step["boundaries"]["attn_out.fwd"];
    CHECK(boundary["wire"] == 3100000);
    CHECK(boundary["raw"] == 5828000);
    CHECK(boundary["encode_ms"] == 1.5);
    CHECK(boundary["wire_ms"] == 2.5);
    CHECK(boundary["decode_ms"] == 3.5);
    CHECK(boundary["snr_db"] == 31.8);
    CHECK(lines[2]["loss"].is_null());
    CHECK(lines[3] == Json({{"step", 2}, {"val_loss", 3.25}}));
    CHECK(lines[4]["sample"] == "or\nnot\xef\xbf\xbd");  // not UTF-8: the replacement character
    CHECK(file_read(file.path).find("{\"step\":1,\"loss\":2.5,") != std::string::npos);
}

TEST_CASE("a resumed log has each step once") {
    const TemporaryFile file("llmc_log_");
    const auto steps = [&](long first, long last, long resumed) {
        RunLog log = run_log_open(file.path, {{"first", first}}, resumed);
        for (long step = first; step <= last; step++) {
            run_log_step(log, step_record(step, double(first)));
            run_log_validation(log, step, double(first));
        }
    };
    steps(1, 25, -1);
    std::ofstream(file.path, std::ios::app) << "{\"step\":7,\"lo";  // torn by a crash
    steps(21, 23, 20);
    steps(21, 30, 20);  // and once more from the same checkpoint
    std::vector<Json> lines = lines_read(file.path);
    std::map<long, int> seen, validated;
    int runs = 0, resumed = 0;
    for (const Json& line : lines) {
        if (line.contains("loss")) {
            seen[line["step"]]++;
            CHECK(line["loss"] == (line["step"] <= 20 ? 1 : 21));
        }
        if (line.contains("val_loss")) validated[line["step"]]++;
        runs += line.contains("run");
        resumed += line.contains("resumed_step");
    }
    CHECK(seen.size() == 30);
    CHECK(validated == seen);
    for (const auto& [step, count] : seen) CHECK(count == 1);
    CHECK(lines[0]["run"]["first"] == 1);
    CHECK(runs == 2);
    CHECK(resumed == 1);

    steps(1, 2, -1);  // a new run starts a new log
    CHECK(lines_read(file.path).size() == 5);
    std::filesystem::remove(file.path);
    steps(6, 6, 5);  // a resumed run whose log is elsewhere
    lines = lines_read(file.path);
    CHECK(lines.size() == 3);
    CHECK(lines[0].contains("run"));
}

TEST_CASE("no log, and a log that cannot be written") {
    RunLog none = run_log_open("", {});
    run_log_step(none, step_record(1, 1));
    run_log_validation(none, 1, 1);
    CHECK(none.file == nullptr);
    CHECK_THROWS_WITH(run_log_open("/nonexistent/run.jsonl", {}), doctest::Contains("cannot open '/nonexistent/run.jsonl'"));
    CHECK_THROWS_WITH(run_log_open("/dev/full", {}), doctest::Contains("No space left on device"));
}

TEST_CASE("the table of boundaries") {
    const std::vector<BoundaryRecord> totals = {{"attn_out.fwd", "taco:g=256", 120, 62000000, 31981000, 15, 25, 35, 31.84, 0},
                                                {"embed.fwd", "none", 10, 2000000, 4000000, 0, 5, 0, NAN, 0},
                                                {"head.fwd", "none"}};
    CHECK(boundary_table(totals, 10) ==
          "Tensor-parallel boundaries, one rank: bytes of the run, milliseconds a step; ratio against bf16\n"
          "boundary      codec       calls  raw MB  wire MB  ratio  SNR dB  encode ms  wire ms  decode ms\n"
          "----------------------------------------------------------------------------------------------\n"
          "attn_out.fwd  taco:g=256    120   62.00    31.98  1.939    31.8       1.50     2.50       3.50\n"
          "embed.fwd     none           10    2.00     4.00  0.500       -       0.00     0.50       0.00\n"
          "----------------------------------------------------------------------------------------------\n"
          "total                       130   64.00    35.98  1.779       -       1.50     3.00       3.50\n");
    CHECK(boundary_table({{"embed.fwd", "none"}}, 10) == "");
    std::vector<BoundaryRecord> bad = totals;
    bad[0].nonfinite = 3;
    CHECK(boundary_table(bad, 10).find("non-finite") != std::string::npos);
    CHECK(boundary_table(bad, 0).find("inf") == std::string::npos);
}

TEST_CASE("sums over steps") {
    std::vector<BoundaryRecord> totals;
    boundary_records_add(totals, {{"a", "none", 2, 10, 20, 1, 2, 3, NAN, 0}, {"b", "taco", 1, 1, 1, 1, 1, 1, 30, 1}});
    boundary_records_add(totals, {{"a", "taco", 2, 10, 5, 1, 2, 3, 30, 1}, {"b", "taco", 1, 1, 1, 1, 1, 1, NAN, 0}});
    boundary_records_add(totals, {{"a", "taco", 2, 10, 5, 1, 2, 3, 32, 1}, {"c", "none"}});
    REQUIRE(totals.size() == 3);
    const BoundaryRecord &a = totals[0], &b = totals[1];
    CHECK(a.name == "a");
    CHECK(a.codec == "taco");
    CHECK(a.calls == 6);
    CHECK(a.raw_bytes == 30);
    CHECK(a.wire_bytes == 30);
    CHECK(a.encode_ms == 3);
    CHECK(a.wire_ms == 6);
    CHECK(a.decode_ms == 9);
    CHECK(a.snr_db == 31);
    CHECK(a.nonfinite == 2);
    CHECK(b.snr_db == 30);
    CHECK(b.calls == 2);
    CHECK(std::isnan(totals[2].snr_db));
    CHECK(peak_memory_mib() > 1);
    CHECK(peak_memory_mib() < 10000);
}

TEST_CASE("the timeline of two ranks") {
    const TemporaryFile file("llmc_trace_");
    std::vector<std::string> ranks;
    for (int rank = 0; rank < 2; rank++) {
        Trace trace = trace_make(rank);
        trace.limit = 3;
        const double t = trace.origin_s;
        trace_add(&trace, "block \"0\"", "compute", t + 0.001, t + 0.003);
        trace_add(&trace, "attn_out.fwd", "wire", t + 0.0015, t + 0.002);
        trace_add(&trace, "else", "something", t, t);
        trace_add(&trace, "dropped", "compute", t, t);
        CHECK(trace.dropped == 1);
        ranks.push_back(trace_bytes(trace));
    }
    trace_add(nullptr, "nothing", "compute", 0, 1);
    trace_write(file.path, ranks);
    const Json json = Json::parse(file_read(file.path));
    std::map<std::string, int> phases;
    std::vector<Json> complete;
    for (const Json& event : json["traceEvents"]) {
        phases[event["ph"]]++;
        if (event["ph"] == "X") complete.push_back(event);
    }
    REQUIRE(complete.size() == 6);
    CHECK(phases["i"] == 2);
    CHECK(complete[0]["name"] == "block \"0\"");
    CHECK(complete[0]["cat"] == "compute");
    CHECK(complete[0]["ts"] == doctest::Approx(1000).epsilon(1e-3));
    CHECK(complete[0]["dur"] == doctest::Approx(2000).epsilon(1e-3));
    CHECK(complete[0]["pid"] == 0);
    CHECK(complete[3]["pid"] == 1);
    CHECK(complete[0]["tid"] == 0);
    CHECK(complete[1]["tid"] == 2);
    CHECK(complete[2]["tid"] == 4);
    CHECK_THROWS_WITH(trace_write("/nonexistent/t.json", ranks), doctest::Contains("cannot open /nonexistent/t.json"));
    CHECK_THROWS_WITH(trace_write("/dev/full", ranks), doctest::Contains("No space left on device"));
    const double before = seconds_now();
    CHECK(seconds_now() >= before);
}
